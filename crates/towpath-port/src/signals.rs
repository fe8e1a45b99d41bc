//! Which thread of a process handles a signal.

use std::io;

use crate::sys;

pub use rustix::process::Signal;

/// Blocks these signals in the calling thread: another thread of the process handles them (signal(7)). The kernel prefers the first thread,
/// but it takes any other one while that one has another signal to handle or is traced. Threads and programs that the calling thread starts
/// inherit the block.
///
/// ```
/// use towpath_port::signals::{self, Signal};
/// std::thread::spawn(|| signals::block(&[Signal::HUP])).join().unwrap().unwrap();
/// ```
///
/// # Errors
/// The error of sigprocmask(2), such as a sandbox that forbids it.
pub fn block(signals: &[Signal]) -> io::Result<()> {
    sys::block_signals(signals)
}
