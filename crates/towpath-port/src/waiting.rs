//! Ports whose interface did not exist at the start (`optional`): gone until it exists.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use crate::{Burst, Caps, Error, Frame, HandOver, Port, QueueVerdict, Received, State, Stats, TxDrop};

/// Opens the ports of all workers.
type Open = dyn Fn() -> Result<Vec<Box<dyn Port>>, Error> + Send + Sync;

/// One worker's port. [`Port::reopen`] opens it.
pub(crate) struct WaitingPort {
    name: String,
    worker: usize,
    workers: Arc<Workers>,
    port: Option<Box<dyn Port>>,
}

/// The ports of all workers are opened together: by the first worker that finds the interface, for the others too.
struct Workers {
    open: Box<Open>,
    opened: Mutex<Vec<Option<Box<dyn Port>>>>,
}

impl WaitingPort {
    /// The ports of `count` workers, which `open` opens.
    pub(crate) fn boxed(
        name: &str,
        count: usize,
        open: impl Fn() -> Result<Vec<Box<dyn Port>>, Error> + Send + Sync + 'static,
    ) -> Vec<Box<dyn Port>> {
        let workers = Arc::new(Workers {
            open: Box::new(open),
            opened: Mutex::new((0..count).map(|_| None).collect()),
        });
        let one = |worker| -> Box<dyn Port> {
            Box::new(Self { name: name.to_owned(), worker, workers: Arc::clone(&workers), port: None })
        };
        (0..count).map(one).collect()
    }
}

impl Port for WaitingPort {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> Caps {
        match &self.port {
            Some(port) => port.caps(),
            // It will do both.
            None => Caps { receive: true, send: true, ..Caps::default() },
        }
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
        match &mut self.port {
            Some(port) => port.receive(burst),
            None => {
                burst.clear();
                Ok(Received::Nothing)
            }
        }
    }

    /// Frames for an interface that does not exist are refused.
    fn send<'a>(&mut self, frames: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error> {
        match &mut self.port {
            Some(port) => port.send(frames),
            None => Err(Error::NoInterface { interface: self.name.clone() }),
        }
    }

    fn verdict(&mut self, frame: Frame<'_>, verdict: QueueVerdict) -> Result<(), Error> {
        match &mut self.port {
            Some(port) => port.verdict(frame, verdict),
            None => Err(Error::Direction { name: self.name.clone(), verb: "give a verdict" }),
        }
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.port.as_mut().map_or(Ok(()), |port| port.flush())
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        self.port.as_ref().and_then(|port| port.poll_fd())
    }

    fn state(&mut self) -> Result<State, Error> {
        self.port.as_mut().map_or(Ok(State::Gone), |port| port.state())
    }

    fn reopen(&mut self) -> Result<(), Error> {
        if let Some(port) = &mut self.port {
            return port.reopen();
        }
        let mut opened = self.workers.opened.lock().unwrap_or_else(PoisonError::into_inner);
        if opened[self.worker].is_none() {
            *opened = (self.workers.open)()?.into_iter().map(Some).collect();
        }
        self.port = opened[self.worker].take();
        Ok(())
    }

    fn is_midway(&self) -> bool {
        self.port.as_ref().is_some_and(|port| port.is_midway())
    }

    fn has_lent(&self) -> bool {
        self.port.as_ref().is_some_and(|port| port.has_lent())
    }

    fn hand_over(&mut self) -> std::io::Result<Option<HandOver>> {
        self.port.as_mut().map_or_else(|| Ok(Some(HandOver::default())), |port| port.hand_over())
    }

    fn resume(&mut self) {
        if let Some(port) = &mut self.port {
            port.resume();
        }
    }

    fn own_stats(&mut self) -> Stats {
        self.port.as_mut().map_or_else(Stats::default, |port| port.own_stats())
    }

    fn continue_stats(&mut self, before: Stats) {
        if let Some(port) = &mut self.port {
            port.continue_stats(before);
        }
    }

    fn take_refused(&mut self, each: &mut dyn FnMut(TxDrop, &[u8])) {
        if let Some(port) = &mut self.port {
            port.take_refused(each);
        }
    }

    fn stats(&mut self) -> Stats {
        self.port.as_mut().map_or_else(Stats::default, |port| port.stats())
    }
}
