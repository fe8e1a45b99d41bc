//! Signals that end a command before its time. The first is obeyed in order, so that sockets, directories and processes go with the
//! command that made them; a second one ends it as it stands.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::{flag, low_level::signal_name};

use crate::cli::fail;

/// What a signal that a program does not survive adds to its number, as a shell has it.
const BY_SIGNAL: u8 = 128;

/// Whether a signal has come. Until [`Ending::listen`] none does: they do what they do to any program.
#[derive(Clone, Debug, Default)]
pub(crate) struct Ending(Arc<AtomicUsize>);

impl Ending {
    /// From here on signals are remembered, but for those that are ignored (nohup(1), a shell's `&`).
    pub(crate) fn listen(&self) -> io::Result<()> {
        let ignored = ignored(&std::fs::read_to_string("/proc/self/status").unwrap_or_default());
        let again = Arc::new(AtomicBool::new(false));
        for signal in [SIGHUP, SIGINT, SIGTERM] {
            if ignored >> (signal - 1) & 1 == 1 {
                continue;
            }
            // In this order: the first one finds that none has come.
            flag::register_conditional_default(signal, Arc::clone(&again))?;
            flag::register(signal, Arc::clone(&again))?;
            flag::register_usize(signal, Arc::clone(&self.0), signal as usize)?;
        }
        Ok(())
    }

    /// The signal that has come.
    pub(crate) fn signal(&self) -> Option<i32> {
        // Relaxed: it guards nothing.
        let signal = self.0.load(Ordering::Relaxed);
        (signal != 0).then_some(signal as i32)
    }

    /// Says that `what` was ended by the signal that has come, if one has; the code to exit with.
    pub(crate) fn tell(&self, what: &str) -> Option<u8> {
        let signal = self.signal()?;
        let name = signal_name(signal).unwrap_or("a signal");
        Some(fail(BY_SIGNAL + signal as u8, format_args!("{what} was ended by {name}")))
    }
}

/// The signals that a process ignores, the first in the lowest bit (proc_pid_status(5)).
fn ignored(status: &str) -> u64 {
    let line = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_ignored_is_read_from_the_status() {
        assert_eq!(ignored("Name:\tx\nSigBlk:\t00000000000000ff\nSigIgn:\t0000000000001001\n"), 0x1001);
        assert_eq!(ignored("Name:\tx\n"), 0);
    }

    #[test]
    fn nothing_has_come_yet() {
        let ending = Ending::default();
        assert_eq!((ending.signal(), ending.tell("it")), (None, None));
        ending.0.store(SIGTERM as usize, Ordering::Relaxed);
        assert_eq!((ending.signal(), ending.tell("it")), (Some(15), Some(143)));
    }
}
