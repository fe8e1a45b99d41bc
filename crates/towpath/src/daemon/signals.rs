//! Signals as readable pipes: one for signals that stop the engine, one for SIGHUP, which reloads, one for SIGUSR2.

use std::io::{self, ErrorKind, Read};
use std::os::unix::net::UnixStream;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2};

/// Returns a pipe that becomes readable when the engine must stop.
pub(super) fn stops() -> io::Result<UnixStream> {
    told_by(&[SIGTERM, SIGINT])
}

/// Returns a pipe that becomes readable when the engine must reload.
pub(super) fn reloads() -> io::Result<UnixStream> {
    told_by(&[SIGHUP])
}

/// Returns a pipe that becomes readable when the engine is told to upgrade, which it cannot.
pub(super) fn upgrades() -> io::Result<UnixStream> {
    told_by(&[SIGUSR2])
}

fn told_by(signals: &[i32]) -> io::Result<UnixStream> {
    let (pipe, write) = UnixStream::pair()?;
    for signal in signals {
        signal_hook::low_level::pipe::register(*signal, write.try_clone()?)?;
    }
    pipe.set_nonblocking(true)?;
    Ok(pipe)
}

/// Returns whether a signal arrived since the last call.
pub(super) fn heard(pipe: &mut UnixStream) -> bool {
    let mut bytes = [0; 64];
    let mut any = false;
    loop {
        match pipe.read(&mut bytes) {
            Ok(0) => return any,
            Ok(_) => any = true,
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(_) => return any,
        }
    }
}
