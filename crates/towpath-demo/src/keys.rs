//! Keys of the live view: single characters from standard input, without waiting for Enter and without echo.

use std::io::{self, IsTerminal, Stdin};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::termios::{LocalModes, OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr};

/// What a key asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// `k`: kill an inspector.
    Kill,
    /// `f`: start a SYN flood.
    Flood,
    /// `q`: end the demo.
    Quit,
}

impl Key {
    fn of(byte: u8) -> Option<Self> {
        match byte {
            b'k' => Some(Self::Kill),
            b'f' => Some(Self::Flood),
            b'q' => Some(Self::Quit),
            _ => None,
        }
    }
}

/// The terminal on standard input. Dropping it restores the terminal's mode.
pub(super) struct Keys {
    input: Stdin,
    mode: Termios,
}

impl Keys {
    /// Reads keys from now on. `None` without a terminal, and in the background, where reading would stop the process.
    /// Ctrl-C still sends SIGINT.
    pub(super) fn open() -> Option<Self> {
        let input = io::stdin();
        if !input.is_terminal() || tcgetpgrp(&input).ok()? != rustix::process::getpgrp() {
            return None;
        }
        let mode = tcgetattr(&input).ok()?;
        let mut single = mode.clone();
        single.local_modes -= LocalModes::ICANON | LocalModes::ECHO;
        tcsetattr(&input, OptionalActions::Now, &single).ok()?;
        Some(Self { input, mode })
    }

    /// Returns the next key that was pressed.
    pub(super) fn next(&self) -> Option<Key> {
        loop {
            let mut fds = [PollFd::new(&self.input, PollFlags::IN)];
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            if !matches!(poll(&mut fds, Some(&now)), Ok(1..)) {
                return None;
            }
            let mut byte = [0];
            match rustix::io::read(&self.input, &mut byte) {
                Ok(1..) => {}
                Ok(0) | Err(_) => return None,
            }
            if let Some(key) = Key::of(byte[0]) {
                return Some(key);
            }
        }
    }
}

impl Drop for Keys {
    fn drop(&mut self) {
        // The terminal may be closed.
        let _ = tcsetattr(&self.input, OptionalActions::Now, &self.mode);
    }
}
