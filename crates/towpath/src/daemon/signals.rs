//! Signals as readable pipes: one for signals that stop the engine, one for SIGHUP, which reloads, one for SIGUSR2.

use std::io::{self, ErrorKind, PipeReader, Read};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR2};

/// Returns a pipe that becomes readable when the engine must stop.
pub(super) fn stops() -> io::Result<PipeReader> {
    told_by(&[SIGTERM, SIGINT])
}

/// Returns a pipe that becomes readable when the engine must reload.
pub(super) fn reloads() -> io::Result<PipeReader> {
    told_by(&[SIGHUP])
}

/// Returns a pipe that becomes readable when the engine is told to upgrade, which it cannot.
pub(super) fn upgrades() -> io::Result<PipeReader> {
    told_by(&[SIGUSR2])
}

fn told_by(signals: &[i32]) -> io::Result<PipeReader> {
    // Not a socket: the kernel runs the handler on any thread, and the sandbox lets each one write(2), but not send(2).
    let (pipe, write) = io::pipe()?;
    for signal in signals {
        signal_hook::low_level::pipe::register(*signal, write.try_clone()?)?;
    }
    rustix::io::ioctl_fionbio(&pipe, true)?;
    Ok(pipe)
}

/// Returns whether a signal arrived since the last call.
pub(super) fn heard(pipe: &mut PipeReader) -> bool {
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
