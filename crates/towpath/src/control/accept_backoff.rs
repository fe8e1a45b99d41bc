//! Pause for a listener after accept(2) failed for lack of descriptors or memory (EMFILE, ENFILE, ENOMEM). The socket would stay readable
//! and the event loop would spin. During the pause, connections wait in the kernel's backlog.

use std::fmt::Display;
use std::io;
use std::time::{Duration, Instant};

use rustix::io::Errno;

/// Duration of a pause.
const PAUSE: Duration = Duration::from_secs(1);

/// Pause state of one listener. See the module documentation.
#[derive(Debug)]
pub(crate) struct AcceptBackoff {
    name: String,
    until: Option<Instant>,
    /// Number of failures so far.
    count: u64,
}

impl AcceptBackoff {
    /// Creates the state for the listener `name`, which appears in the log.
    pub(crate) fn of(name: impl Display) -> Self {
        Self { name: name.to_string(), until: None, count: 0 }
    }

    /// Starts a pause after an error. Logs the 1st, 2nd, 4th, 8th, ... failure.
    pub(crate) fn begin(&mut self, error: &io::Error) {
        self.until = Some(Instant::now() + PAUSE);
        self.count += 1;
        if self.count.is_power_of_two() {
            tracing::warn!(
                "{}: {error}; connections wait ({} times so far){}",
                self.name,
                self.count,
                hint(error)
            );
        }
    }

    /// Returns true during a pause.
    pub(crate) fn is_on(&mut self) -> bool {
        self.until = self.until.filter(|until| Instant::now() < *until);
        self.until.is_some()
    }
}

fn hint(error: &io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::MFILE) => ": raise the limit of open files (`ulimit -n`, LimitNOFILE=)",
        Some(Errno::NFILE) => ": raise the system's limit of open files (`sysctl fs.file-max`)",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lack_of_descriptors_has_a_hint() {
        #[rustfmt::skip]
        let rows = [
            (Errno::MFILE, "ulimit -n"),
            (Errno::NFILE, "fs.file-max"),
            (Errno::NOMEM, ""),
        ];
        for (errno, expected) in rows {
            let hint = hint(&errno.into());
            assert!(hint.contains(expected) && hint.is_empty() == expected.is_empty(), "{errno}: {hint}");
        }
    }

    #[test]
    fn it_ends_by_itself() {
        let mut pause = AcceptBackoff::of("a listener");
        assert!(!pause.is_on());
        pause.begin(&io::ErrorKind::Other.into());
        assert!(pause.is_on());
        pause.until = Some(Instant::now());
        assert!(!pause.is_on());
    }
}
