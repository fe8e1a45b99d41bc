//! Signals as something to read: a pipe for those that stop the engine, one for the one that has it read its files again.

use std::io::{self, ErrorKind, Read};
use std::os::unix::net::UnixStream;

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};

/// Pipes that become readable when the engine is to stop, and when it is to read its files again.
pub(super) fn signals() -> io::Result<(UnixStream, UnixStream)> {
    let (stop, write) = UnixStream::pair()?;
    signal_hook::low_level::pipe::register(SIGTERM, write.try_clone()?)?;
    signal_hook::low_level::pipe::register(SIGINT, write)?;
    let (hup, write) = UnixStream::pair()?;
    signal_hook::low_level::pipe::register(SIGHUP, write)?;
    stop.set_nonblocking(true)?;
    hup.set_nonblocking(true)?;
    Ok((stop, hup))
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
