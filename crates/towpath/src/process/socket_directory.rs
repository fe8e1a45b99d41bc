//! A temporary directory for the sockets of programs that the engine starts.

use std::fs::Permissions;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use tempfile::TempDir;

/// Makes a directory with a random name that only this user may enter, or every user if `others_enter`: access to the sockets is
/// then checked with SO_PEERCRED.
///
/// # Errors
///
/// The directory cannot be made, or another user has replaced it.
pub(crate) fn make(others_enter: bool) -> io::Result<TempDir> {
    let mut builder = tempfile::Builder::new();
    // By default, every user may enter it.
    let directory = builder.prefix("towpath-").permissions(Permissions::from_mode(0o700)).tempdir()?;
    if others_enter {
        permit_entry(directory.path())?;
    }
    Ok(directory)
}

/// Permits every user to enter a new directory of this user. By descriptor: where other users may rename files, a link or another
/// directory may stand at the path by now.
fn permit_entry(path: &Path) -> io::Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let directory = rustix::fs::open(path, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&directory)?;
    let is_new =
        Mode::from_raw_mode(stat.st_mode) == Mode::RWXU && stat.st_uid == rustix::process::geteuid().as_raw();
    if !is_new {
        return Err(io::Error::other(format!("{} was replaced by another user", path.display())));
    }
    Ok(rustix::fs::fchmod(&directory, Mode::RWXU | Mode::XGRP | Mode::XOTH)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn others_may_enter_only_a_new_directory_of_this_user() {
        assert_eq!(mode(make(false).unwrap().path()), 0o700);
        assert_eq!(mode(make(true).unwrap().path()), 0o711);
        let private = make(false).unwrap();
        // Another user has replaced the directory by a link, or by a directory that was not made here.
        let (link, other) = (private.path().join("link"), private.path().join("other"));
        let target = make(false).unwrap();
        symlink(target.path(), &link).unwrap();
        std::fs::create_dir(&other).unwrap();
        std::fs::set_permissions(&other, Permissions::from_mode(0o770)).unwrap();
        assert!(permit_entry(&link).is_err());
        let refused = permit_entry(&other).unwrap_err().to_string();
        assert!(refused.contains("was replaced by another user"), "{refused}");
        assert_eq!([target.path(), &other].map(mode), [0o700, 0o770]);
    }
}
