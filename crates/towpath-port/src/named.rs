//! A port under the name that its configuration gives it, in place of the interface's.

use std::os::fd::BorrowedFd;

use crate::{Burst, Caps, Error, Frame, HandOver, Port, QueueVerdict, Received, State, Stats, TxDrop};

/// Replaces the name of a port.
pub(crate) struct NamedPort<P> {
    name: String,
    port: P,
}

impl<P: Port> NamedPort<P> {
    /// `port` under the name `name`, in a box.
    pub(crate) fn boxed(name: &str, port: P) -> Box<dyn Port>
    where
        P: 'static,
    {
        Box::new(Self { name: name.to_owned(), port })
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

    fn verdict(&mut self, frame: Frame<'_>, verdict: QueueVerdict) -> Result<(), Error> {
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

    fn is_midway(&self) -> bool {
        self.port.is_midway()
    }

    fn has_lent(&self) -> bool {
        self.port.has_lent()
    }

    fn hand_over(&mut self) -> std::io::Result<Option<HandOver>> {
        self.port.hand_over()
    }

    fn resume(&mut self) {
        self.port.resume();
    }

    fn own_stats(&mut self) -> Stats {
        self.port.own_stats()
    }

    fn continue_stats(&mut self, before: Stats) {
        self.port.continue_stats(before);
    }

    fn take_refused(&mut self, each: &mut dyn FnMut(TxDrop, &[u8])) {
        self.port.take_refused(each);
    }

    fn stats(&mut self) -> Stats {
        self.port.stats()
    }
}
