//! Workers that are elsewhere: one thread has the sockets, and somebody (a process at the other end of a ring) does the
//! messages.
//!
//! What: [`Driver`] is the leader for good. It reads and writes the sockets, and waits for descriptors of its caller beside
//! them; the caller takes messages for its workers from the core ([`Driver::change`]), hands them on, and tells the core
//! what came back. Nothing here blocks but [`Driver::wait`].
//!
//! The core never recalls messages from such a worker: what it has been handed it may have begun.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};

use super::state::{Event, FOREVER, Mode, Work};
use super::turn::{CALLER, Turn};
use super::{Server, Shared};
use crate::Time;
use crate::mux::Mux;

/// The sockets of a [`Server`], driven by one thread for workers that are elsewhere. See the module's documentation of
/// [`super`].
///
/// # Examples
///
/// An echo server whose worker is the caller itself:
///
/// ```
/// use std::io::{Read, Write};
/// use towpath_mux::io::{Server, Event};
/// use towpath_mux::mux::Config;
///
/// let server = Server::new("line".parse()?, Config::default())?;
/// let address = server.listen("127.0.0.1:0")?;
/// let mut driver = server.driver()?;
/// let worker = driver.change(|mux, now| mux.clone_worker(1, now));
///
/// let mut client = std::net::TcpStream::connect(address)?;
/// client.write_all(b"hello\n")?;
/// let mut batch = Vec::new();
/// while batch.is_empty() {
///     driver.change(|mux, now| mux.poll_messages(worker, now, &mut batch));
///     if batch.is_empty() {
///         driver.wait(None, |_token| {})?;
///     }
/// }
/// let message = batch.remove(0);
/// driver.change(|mux, now| {
///     mux.reply(worker, message.ticket(), message.bytes().clone(), now)?;
///     mux.done(worker, message.ticket(), now);
///     Ok::<_, towpath_mux::mux::SendError>(())
/// })?;
/// let mut answer = [0; 6];
/// client.read_exact(&mut answer)?;
/// assert_eq!(&answer, b"hello\n");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Driver {
    shared: Arc<Shared>,
    /// What [`Driver::apply`] left to be done, if it left anything.
    work: Work,
    applied: bool,
}

impl Server {
    /// Becomes the one who drives the sockets, for good. A server has either a driver or [`super::Worker`]s.
    ///
    /// # Errors
    ///
    /// When the server has a driver or workers already.
    pub fn driver(&self) -> io::Result<Driver> {
        let mut state = self.shared.lock();
        if state.mode != Mode::Workers || !state.workers.is_empty() {
            return Err(io::Error::new(
                io::ErrorKind::AlreadyExists,
                "the server has a driver, workers or sockets already",
            ));
        }
        state.mode = Mode::Driver;
        drop(state);
        Ok(Driver { shared: Arc::clone(&self.shared), work: Work::default(), applied: false })
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        if self.applied {
            self.flush();
        }
    }
}

impl Driver {
    /// The server whose sockets it drives.
    pub fn server(&self) -> Server {
        Server { shared: Arc::clone(&self.shared) }
    }

    /// Changes the core, and does what follows: writes what is to be sent.
    pub fn change<T>(&mut self, change: impl FnOnce(&mut Mux, Time) -> T) -> T {
        // In the order of the calls.
        if self.applied {
            self.flush();
        }
        let now = self.shared.now();
        self.shared.change(|mux| change(mux, now))
    }

    /// As [`Driver::change`], but what is to be sent is written by [`Driver::flush`], [`Driver::wait`], the next change, or when
    /// the driver is dropped: workers are handed before what they are to do meanwhile.
    pub fn apply<T>(&mut self, change: impl FnOnce(&mut Mux, Time) -> T) -> T {
        let now = self.shared.now();
        let mut state = self.shared.lock();
        let result = change(&mut state.mux, now);
        state.pump(&self.shared, &mut self.work);
        self.applied = true;
        result
    }

    /// Writes what [`Driver::apply`] left.
    pub fn flush(&mut self) {
        self.applied = false;
        self.shared.perform(std::mem::take(&mut self.work));
    }

    /// From now on, while workers do short messages ([`Mux::quick_batch`]), answers of a connection leave together when all is done that
    /// it asked, or after some turns: one write is cheaper than many, and wakes the peer once. All leave when [`Driver::wait`] is to wait.
    pub fn gather(&mut self) {
        self.shared.lock().tx.coalesces = true;
    }

    /// Has [`Driver::wait`] wait for this descriptor to be readable too, and name it by `token`.
    ///
    /// # Errors
    ///
    /// When the system refuses to watch it.
    ///
    /// # Panics
    ///
    /// When `token` is 2^31 or more.
    pub fn watch(&self, fd: impl AsFd, token: u32) -> io::Result<()> {
        assert!(u64::from(token) < CALLER, "a token has 31 bits");
        let data = EventData::new_u64(CALLER | u64::from(token));
        Ok(epoll::add(&self.shared.epoll, fd, data, EventFlags::IN)?)
    }

    /// The opposite; also done by closing the descriptor.
    pub fn unwatch(&self, fd: BorrowedFd<'_>) {
        // It was closed meanwhile: nothing is left to be done.
        let _ = epoll::delete(&self.shared.epoll, fd);
    }

    /// Waits for sockets and the caller's descriptors, at most `timeout`; reads and writes sockets, and names to `each` the
    /// descriptors that are readable. A caller's descriptor that stays readable is named each time. It comes back too when there is
    /// something new for [`Driver::poll_event`] or [`Server::poll_ended`], whoever caused it.
    ///
    /// Whether there was anything, or is, besides what there is to tell.
    ///
    /// # Errors
    ///
    /// When epoll fails.
    pub fn wait(&mut self, timeout: Option<Duration>, each: impl FnMut(u32)) -> io::Result<bool> {
        self.applied = false;
        let work = std::mem::take(&mut self.work);
        Ok(self.shared.turn(work, timeout, |_| {}, each)? == Turn::Busy)
    }

    /// When [`Driver::wait`] has to be called though its descriptor is not readable. From now on that is readable when this
    /// becomes sooner. For who waits elsewhere, once a call has found nothing.
    pub fn poll_timeout(&self) -> Option<std::time::Instant> {
        let mut state = self.shared.lock();
        // What is worker_wanted was so since the last look, and what was coalesced is to leave.
        let at_once =
            state.worker_wanted || state.connection_ended || !state.tx.psocks.is_empty() || self.applied;
        let due = if at_once { Some(self.shared.now()) } else { state.poll_timeout() };
        state.pollers.sleeps_until = Some(due.unwrap_or(FOREVER));
        let time = due?;
        Some(self.shared.start + Duration::from_nanos(time.as_nanos()))
    }

    /// The descriptor, for somebody else to have.
    #[cfg(feature = "tokio")]
    pub(super) fn epoll(&self) -> io::Result<std::os::fd::OwnedFd> {
        self.shared.epoll.try_clone()
    }

    /// What the core has to tell, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.shared.lock().notices.pop_event()
    }

    /// Whether there is something for [`Driver::poll_event`] or [`Server::poll_ended`], or [it has drained](Driver::is_drained): one
    /// look instead of three, for who looks often.
    pub fn has_news(&self) -> bool {
        let state = self.shared.lock();
        state.closed || !state.notices.is_empty()
    }

    /// Whether the mux was told to drain and holds nothing any more.
    pub fn is_drained(&self) -> bool {
        self.shared.lock().closed
    }
}

/// Readable when there is something to do for [`Driver::wait`].
impl AsFd for Driver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.epoll.as_fd()
    }
}
