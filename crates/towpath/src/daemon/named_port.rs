//! Wraps a port under its configured name.

use std::os::fd::BorrowedFd;

use towpath_port::{Burst, Caps, Error, Frame, Port, Received, State, Stats, Verdict};

/// A port and its configured name.
pub(super) struct NamedPort<P> {
    name: String,
    port: P,
}

impl<P: Port> NamedPort<P> {
    pub(super) fn new(name: &str, port: P) -> Self {
        Self { name: name.to_owned(), port }
    }
}

impl<P: Port> Port for NamedPort<P> {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> Caps {
        self.port.caps()
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
        self.port.receive(burst)
    }

    fn send<'a>(&mut self, frames: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error> {
        self.port.send(frames)
    }

    fn verdict(&mut self, frame: Frame<'_>, verdict: Verdict) -> Result<(), Error> {
        self.port.verdict(frame, verdict)
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.port.flush()
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        self.port.poll_fd()
    }

    fn state(&mut self) -> Result<State, Error> {
        self.port.state()
    }

    fn reopen(&mut self) -> Result<(), Error> {
        self.port.reopen()
    }

    fn stats(&mut self) -> Stats {
        self.port.stats()
    }
}
