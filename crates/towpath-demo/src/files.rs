//! The demo's files: a directory that goes with the demo, however that ends.
//!
//! SIGKILL leaves nobody who could clean up, so a process of its own waits for the demo's end, which it sees as the end of
//! its standard input, and removes what is still there.

use std::io::{self, Read, stdin};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

use super::{Failure, doing};

/// How long processes that were killed may still make files there.
const PATIENCE: Duration = Duration::from_secs(20);

/// Bytes of a path under which `towpath-demo-XXXXXX/towpath-XXXXXX/queue-1.sock` has room in a socket's name (107 bytes, unix(7)).
const LONGEST: usize = 50;

/// A directory private to this user.
#[derive(Debug)]
pub(super) struct Files {
    /// Removed first: then the sweeper finds nothing.
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
        // A group of its own: Ctrl-C is for the demo, which cleans up by itself.
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
        // It ends at once; an error would be that it has been waited for.
        let _ = self.sweeper.wait();
    }
}

/// Where the directory is: `$TMPDIR`, unless sockets below it would have longer names than sockets may.
fn place(temporary: PathBuf) -> PathBuf {
    // A relative one becomes longer.
    let long = std::path::absolute(&temporary).map_or(true, |path| path.as_os_str().len() > LONGEST);
    if long { "/tmp".into() } else { temporary }
}

/// The sweeper: waits for the demo's end, then removes `directory`.
pub(crate) fn sweep(directory: &Path) -> Result<(), String> {
    // Nothing is ever written; an error is an end, too.
    let _ = stdin().read_to_end(&mut Vec::new());
    let begun = Instant::now();
    loop {
        match std::fs::remove_dir_all(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(error) if begun.elapsed() >= PATIENCE => return Err(error.to_string()),
            // Others are being killed meanwhile, and may have made something just now.
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
