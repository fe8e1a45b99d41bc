//! A temporary directory for the sockets of programs that the engine starts.
//!
//! A file in it is locked (flock(2)) while the process lives. The lock of a killed process is free: another engine of the same user then
//! removes the directory ([`abandoned`]). The file has its name only after it was locked, so that a new directory never looks abandoned.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};
use tempfile::TempDir;

/// The beginning of a directory's name.
const PREFIX: &str = "towpath-";
/// The locked file.
const LOCK: &str = "engine.lock";

/// A directory with its lock. Dropping it removes the directory.
#[derive(Debug)]
pub(crate) struct SocketDirectory {
    directory: TempDir,
    _lock: File,
}

impl SocketDirectory {
    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }
}

/// Makes a directory with a random name that only this user may enter, or every user if `others_enter`: access to the sockets is
/// then checked with SO_PEERCRED.
///
/// # Errors
///
/// The directory cannot be made, or another user has replaced it.
pub(crate) fn make(others_enter: bool) -> io::Result<SocketDirectory> {
    let mut builder = tempfile::Builder::new();
    // By default, every user may enter it.
    let directory = builder.prefix(PREFIX).permissions(Permissions::from_mode(0o700)).tempdir()?;
    if others_enter {
        permit_entry(directory.path())?;
    }
    let new = directory.path().join("new");
    // For writing only: the sandbox of the engine permits no more in this place.
    let lock = File::options().write(true).create_new(true).open(&new)?;
    flock(&lock, FlockOperation::NonBlockingLockExclusive)?;
    std::fs::rename(&new, directory.path().join(LOCK))?;
    Ok(SocketDirectory { directory, _lock: lock })
}

/// The directories of killed processes that belong to one of `users`.
pub(crate) fn abandoned(users: &[u32]) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(std::env::temp_dir()) else { return Vec::new() };
    let is_abandoned = |path: &PathBuf| {
        let is_named =
            path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(PREFIX.as_bytes()));
        let is_own = || {
            std::fs::symlink_metadata(path).is_ok_and(|found| found.is_dir() && users.contains(&found.uid()))
        };
        is_named && is_own() && is_unlocked(&path.join(LOCK)).unwrap_or(false)
    };
    let mut found: Vec<_> = entries.flatten().map(|entry| entry.path()).filter(is_abandoned).collect();
    found.sort_unstable();
    found
}

/// Returns true if no process has the lock.
fn is_unlocked(path: &Path) -> io::Result<bool> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
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

    use towpath_port::netns::until;

    use super::*;

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_directory_is_abandoned_when_its_lock_is_free() {
        let user = rustix::process::geteuid().as_raw();
        let directory = make(false).unwrap();
        let path = directory.path().to_owned();
        assert!(!abandoned(&[user]).contains(&path));
        // As after kill -9: the directory stays, and the kernel closes the file.
        let SocketDirectory { directory, _lock } = directory;
        let kept = directory.keep();
        drop(_lock);
        // A child that another test has forked holds a copy of the file until it calls execve(2).
        until(|| abandoned(&[user]).contains(&kept));
        assert!(!abandoned(&[user + 1]).contains(&kept));
        // Without a lock it is not an engine's.
        std::fs::remove_file(kept.join(LOCK)).unwrap();
        assert!(!abandoned(&[user]).contains(&kept));
        std::fs::remove_dir_all(kept).unwrap();
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
