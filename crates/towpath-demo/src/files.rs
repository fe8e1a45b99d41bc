//! The demo's files: a directory that is removed when the demo ends, even by SIGKILL.
//!
//! A separate process waits until the exit of the demo closes its standard input, then removes the remaining files.

use std::io::{self, Read, stdin};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{Failure, doing};

/// Time during which killed processes may still create files.
const PATIENCE: Duration = Duration::from_secs(20);

/// Longest directory whose `towpath-demo-XXXXXX/towpath-XXXXXX/queue-1.sock` fits into a socket address (107 bytes, unix(7)).
const LONGEST: usize = 50;

/// A directory private to this user.
#[derive(Debug)]
pub(super) struct Files {
    /// Dropped first: the sweeper then finds nothing.
    directory: Option<TempDir>,
    sweeper: Child,
}

impl Files {
    pub(super) fn new() -> Result<Self, Failure> {
        let directory = tempfile::Builder::new()
            .prefix("towpath-demo-")
            .tempdir_in(place(std::env::temp_dir()))
            .map_err(doing("a temporary directory"))?;
        let mut command = Command::new(std::env::current_exe().map_err(doing("this program"))?);
        command.args(["demo-part", "sweep"]).arg(directory.path());
        // In its own process group: Ctrl-C is for the demo, which cleans up itself.
        command.current_dir("/").process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let sweeper = command.spawn().map_err(doing("a process that removes the files"))?;
        Ok(Self { directory: Some(directory), sweeper })
    }

    pub(super) fn path(&self) -> &Path {
        self.directory.as_ref().map_or(Path::new(""), TempDir::path)
    }
}

impl Drop for Files {
    fn drop(&mut self) {
        self.directory = None;
        self.sweeper.stdin = None;
        // The sweeper ends at once; an error means that it was reaped already.
        let _ = self.sweeper.wait();
    }
}

/// The parent directory: `$TMPDIR`, or /tmp if socket addresses below `$TMPDIR` would be too long.
fn place(temporary: PathBuf) -> PathBuf {
    // A relative path becomes longer when it is made absolute.
    let long = std::path::absolute(&temporary).map_or(true, |path| path.as_os_str().len() > LONGEST);
    if long { "/tmp".into() } else { temporary }
}

/// The sweeper: waits until the demo has ended, then removes `directory`.
pub(crate) fn sweep(directory: &Path) -> Result<(), String> {
    // Nothing is ever written; a read error also means that the demo has ended.
    let _ = stdin().read_to_end(&mut Vec::new());
    let begun = Instant::now();
    loop {
        match std::fs::remove_dir_all(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if begun.elapsed() >= PATIENCE => return Err(error.to_string()),
            // Processes that are being killed may have created files meanwhile.
            Ok(()) | Err(_) => thread::sleep(Duration::from_millis(20)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::place;

    #[test]
    fn a_directory_too_long_for_sockets_is_not_taken() {
        let long = PathBuf::from("/var/folders/".to_owned() + &"x".repeat(90));
        let rows =
            [("/var/tmp".into(), "/var/tmp"), ("/home/ann/tmp".into(), "/home/ann/tmp"), (long, "/tmp")];
        for (temporary, taken) in rows {
            assert_eq!(place(temporary), PathBuf::from(taken));
        }
    }
}
