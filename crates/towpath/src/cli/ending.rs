//! Termination signals. The first signal stops a command in an orderly way, so that it removes its sockets and directories and stops its
//! processes. A second signal has its default action and kills the command.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{flag, low_level::signal_name};

use crate::cli::fail;

/// Exit code offset of a termination signal, as in shells: 128 + signal number.
const BY_SIGNAL: u8 = 128;

/// The termination signal that was received, if any. Before [`Ending::listen`], signals have their default action.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ending(Arc<AtomicUsize>);

impl Ending {
    /// Installs the signal handlers. Signals that the process ignores (nohup(1), a shell's `&`) stay ignored.
    pub(crate) fn listen(&self) -> io::Result<()> {
        let ignored = ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
        let again = Arc::new(AtomicBool::new(false));
        for signal in [SIGHUP, SIGINT, SIGTERM] {
            if ignored >> (signal - 1) & 1 == 1 {
                continue;
            }
            // The order matters: at the first signal, the conditional default must find `again` still false.
            flag::register_conditional_default(signal, Arc::clone(&again))?;
            flag::register(signal, Arc::clone(&again))?;
            flag::register_usize(signal, Arc::clone(&self.0), signal as usize)?;
        }
        Ok(())
    }

    /// Returns the number of the signal that was received.
    pub(crate) fn signal(&self) -> Option<i32> {
        // Relaxed: the value does not guard other data.
        let signal = self.0.load(Ordering::Relaxed);
        (signal != 0).then_some(signal as i32)
    }

    /// If a signal was received, prints that it ended `what` and returns the exit code.
    pub(crate) fn tell(&self, what: &str) -> Option<u8> {
        let signal = self.signal()?;
        let name = signal_name(signal).unwrap_or("a signal");
        Some(fail(BY_SIGNAL + signal as u8, format_args!("{what} was ended by {name}")))
    }
}

/// The signals that the process ignores, as a bit mask; bit 0 is signal 1 (proc_pid_status(5)).
fn ignored(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_status() {
        assert_eq!(ignored("Name:\tx\nSigBlk:\t00000000000000ff\nSigIgn:\t0000000000001001\n"), 0x1001);
        assert_eq!(ignored("Name:\tx\n"), 0);
    }

    #[test]
    fn a_signal_gives_the_exit_code() {
        let ending = Ending::default();
        assert_eq!((ending.signal(), ending.tell("it")), (None, None));
        ending.0.store(SIGTERM as usize, Ordering::Relaxed);
        assert_eq!((ending.signal(), ending.tell("it")), (Some(15), Some(143)));
    }
}
