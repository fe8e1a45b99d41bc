//! Signals as something to read: a pipe for those that stop the engine, one for the one that has it read its files again.

use std::io::{self, ErrorKind, Read};
use std::os::unix::net::UnixStream;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// A pipe that becomes readable when the engine is to stop.
pub(super) fn stops() -> io::Result<UnixStream> {
    told_by(&[SIGTERM, SIGINT])
}

/// A pipe that becomes readable when the engine is to read its files again.
pub(super) fn reloads() -> io::Result<UnixStream> {
    told_by(&[SIGHUP])
}

fn told_by(signals: &[i32]) -> io::Result<UnixStream> {
    let (pipe, write) = UnixStream::pair()?;
    for signal in signals {
        signal_hook::low_level::pipe::register(*signal, write.try_clone()?)?;
    }
    pipe.set_nonblocking(true)?;
    Ok(pipe)
}

/// Whether there was a signal since this was asked.
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
