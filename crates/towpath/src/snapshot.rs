//! State snapshot files, which keep states across restarts. The old file is replaced only when the new one is
//! complete.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use towpath_gate::Restored;

use crate::quantity::count;
use crate::ruleset_manager::RulesetManager;

pub mod running;

/// A snapshot to be written. A regular file is written under a temporary name in the same directory and renamed when it is complete.
/// Other files (pipes, devices) are written directly.
#[derive(Debug)]
pub struct Saving {
    file: File,
    /// The temporary path and the final path; `None` for a file that is written directly.
    renamed: Option<(PathBuf, PathBuf)>,
}

impl Saving {
    /// Creates the output file, to detect errors early.
    ///
    /// # Errors
    /// The file cannot be created or opened.
    pub fn create(path: &Path) -> io::Result<Self> {
        Self::create_as(path, &std::process::id().to_string())
    }

    /// As [`create`](Self::create), under a temporary name with this part.
    fn create_as(path: &Path, part: &str) -> io::Result<Self> {
        // Resolve symbolic links, so that the rename replaces the target and not the link.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        if fs::metadata(&path).is_ok_and(|there| !there.is_file()) {
            let file = OpenOptions::new().write(true).open(&path)?;
            return Ok(Self { file, renamed: None });
        }
        let name = path.file_name().ok_or(io::ErrorKind::InvalidInput)?;
        let mut other = name.to_owned();
        other.push(format!(".{part}.new"));
        let other = path.with_file_name(other);
        // Mode 0600: the content is private. An existing file of this name is a leftover of a dead process.
        let _ = fs::remove_file(&other);
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&other)?;
        Ok(Self { file, renamed: Some((other, path)) })
    }

    /// Writes the current states and moves the file into its place.
    ///
    /// # Errors
    /// Writing failed; the old file remains.
    pub fn finish(mut self, book: &RulesetManager) -> io::Result<()> {
        let mut written = Ok(());
        book.snapshot(|piece| {
            if written.is_ok() {
                written = self.file.write_all(piece);
            }
        });
        written?;
        self.commit()
    }

    /// Writes bytes to the file.
    ///
    /// # Errors
    /// Writing failed; the old file remains.
    pub fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.file.write_all(bytes)
    }

    /// Moves the file into its place.
    ///
    /// # Errors
    /// The file cannot be synced or renamed; the old file remains.
    pub fn commit(mut self) -> io::Result<()> {
        if let Some((from, to)) = &self.renamed {
            self.file.sync_all()?;
            fs::rename(from, to)?;
            self.renamed = None;
        }
        Ok(())
    }

    /// The file under a second handle, with the same position.
    fn file(&self) -> io::Result<File> {
        self.file.try_clone()
    }

    /// Returns true unless the file is written directly.
    fn is_renamed(&self) -> bool {
        self.renamed.is_some()
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        if let Some((from, _)) = &self.renamed {
            let _ = fs::remove_file(from);
        }
    }
}

/// Reads a snapshot file; `None` if it does not exist.
///
/// # Errors
/// The file cannot be read or is not a regular file.
pub fn read(path: &Path) -> io::Result<Option<Vec<u8>>> {
    let mut file = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        file => file?,
    };
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is not a regular file"));
    }
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// Renames a snapshot that was read to `PATH.used`. If the engine is killed later, the next one must not restore outdated states, which
/// would pass packets of connections that have ended.
pub fn set_aside(path: &Path) {
    let moved = fs::canonicalize(path).and_then(|from| {
        let mut to = from.clone().into_os_string();
        to.push(".used");
        fs::rename(from, to)
    });
    match moved {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            tracing::warn!(
                "{}: cannot be renamed, so a next engine would restore outdated states: {error}; remove it",
                path.display()
            );
        }
        _ => {}
    }
}

/// The result of restoring a snapshot, as text.
pub fn told(restored: Restored) -> String {
    let Restored { states, default_dynamic, existing, refused, killed, cut, gap, .. } = restored;
    let mut text = format!("{} restored", count(states + default_dynamic, "state"));
    if killed {
        text += " as they were before the engine was killed";
    }
    if gap {
        text += ", changes before that are missing";
    }
    if cut > 0 {
        text += &format!(", {} at the end not used, because they are incomplete", count(cut, "byte"));
    }
    let more = [
        (default_dynamic, "of rules that do not exist: the default dynamic rule decides them"),
        (existing, "existed already"),
        (refused, "refused, because the table is full"),
    ];
    for (count, what) in more.into_iter().filter(|(count, _)| *count > 0) {
        text += &format!(", {count} {what}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use towpath_gate::Ports;
    use towpath_gate::rules::Ruleset;
    use towpath_gate::{Gate, state};

    fn book() -> RulesetManager {
        let gate = Gate::new(Ruleset::empty(), Ports::new(), state::Settings::default(), 1);
        RulesetManager::new(gate, Ruleset::empty(), false)
    }

    #[test]
    fn the_old_file_stays_until_the_new_one_is_whole() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("states");
        let files = || fs::read_dir(directory.path()).unwrap().count();
        assert_eq!(read(&path).unwrap(), None);
        fs::write(&path, "old").unwrap();
        let link = directory.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();

        let saving = Saving::create(&link).unwrap();
        assert_eq!((read(&path).unwrap().unwrap(), files()), (b"old".to_vec(), 3));
        drop(saving);
        assert_eq!((read(&path).unwrap().unwrap(), files()), (b"old".to_vec(), 2));
        Saving::create(&link).unwrap().finish(&book()).unwrap();
        assert!(read(&path).unwrap().unwrap().starts_with(b"TOWPATHS"));
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink() && files() == 2);
    }

    #[test]
    fn paths_that_cannot_hold_a_file_are_errors() {
        let directory = tempfile::tempdir().unwrap();
        assert!(Saving::create(&directory.path().join("no/such")).is_err());
        assert!(Saving::create(directory.path()).is_err());
        assert!(read(Path::new("/dev/zero")).is_err());
        // A full disk.
        if Path::new("/dev/full").exists() {
            assert!(Saving::create(Path::new("/dev/full")).unwrap().finish(&book()).is_err());
            assert!(Path::new("/dev/full").exists());
        }
    }
}
