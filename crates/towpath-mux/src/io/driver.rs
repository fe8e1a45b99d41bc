//! Driver: one thread has the sockets, and workers elsewhere (such as processes at the other end of a ring)
//! process the messages.
//!
//! What: [`Driver`] reads and writes the sockets and also waits for descriptors of its caller. The caller
//! takes messages for its workers from the core ([`Driver::change`]), passes them on, and applies the
//! completions. Only [`Driver::wait`] blocks.
//!
//! The core never recalls messages from such a worker, which may have begun any of them.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll::{self, EventData, EventFlags};

use super::connection_info::Lifecycle;
use super::state::{Event, FOREVER, Mode, Work};
use super::turn::{CALLER, Turn};
use super::{Server, Shared};
use crate::Time;
use crate::mux::Mux;

/// Drives the sockets of a [`Server`] from one thread, for workers elsewhere. See the documentation of
/// [`super`].
///
/// # Examples
///
/// An echo server whose worker is the caller:
///
/// ```
/// use std::io::{Read, Write};
/// use towpath_mux::io::{Server, Event};
/// use towpath_mux::mux::{Config, Order};
///
/// let server = Server::new("line".parse()?, Config::new(Order::Replies))?;
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
    /// Work left by [`Driver::apply`].
    work: Work,
    applied: bool,
}

impl Server {
    /// Makes the caller drive the sockets. This is final.
    ///
    /// # Errors
    ///
    /// Fails if the server has a driver, [`super::Worker`]s or [`super::Socket`]s.
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
    /// The driven server.
    pub fn server(&self) -> Server {
        Server { shared: Arc::clone(&self.shared) }
    }

    /// Changes the core and performs the effects: writes what is to be sent.
    pub fn change<T>(&mut self, change: impl FnOnce(&mut Mux, Time) -> T) -> T {
        // Keeps the order of the calls.
        if self.applied {
            self.flush();
        }
        let now = self.shared.now();
        self.shared.change(|mux| change(mux, now))
    }

    /// As [`Driver::change`], but leaves writes to [`Driver::flush`], [`Driver::wait`], the next change, or
    /// the drop. Workers can then get messages before the writes.
    pub fn apply<T>(&mut self, change: impl FnOnce(&mut Mux, Time) -> T) -> T {
        let now = self.shared.now();
        let mut state = self.shared.lock();
        let result = change(&mut state.mux, now);
        state.pump(&self.shared, &mut self.work);
        self.applied = true;
        result
    }

    /// Performs the writes left by [`Driver::apply`].
    pub fn flush(&mut self) {
        self.applied = false;
        self.shared.perform(std::mem::take(&mut self.work));
    }

    /// Holds back replies while workers process short messages ([`Mux::quick_batch`]): the replies of a
    /// connection are sent together when all of its messages are done, or after some turns. This saves writes
    /// and wake-ups of the peer. [`Driver::wait`] sends all replies before it sleeps.
    pub fn gather(&mut self) {
        self.shared.lock().tx.coalesces = true;
    }

    /// Makes [`Driver::wait`] report this descriptor by `token` while it is readable.
    ///
    /// # Errors
    ///
    /// Fails if epoll refuses the descriptor.
    ///
    /// # Panics
    ///
    /// Panics if `token` is 2^31 or more.
    pub fn watch(&self, fd: impl AsFd, token: u32) -> io::Result<()> {
        assert!(u64::from(token) < CALLER, "a token has 31 bits");
        let data = EventData::new_u64(CALLER | u64::from(token));
        Ok(epoll::add(&self.shared.epoll, fd, data, EventFlags::IN)?)
    }

    /// Removes a descriptor of [`Driver::watch`]. Closing the descriptor has the same effect.
    pub fn unwatch(&self, fd: BorrowedFd<'_>) {
        // Fails only if the descriptor is closed.
        let _ = epoll::delete(&self.shared.epoll, fd);
    }

    /// Waits up to `timeout` for sockets and for descriptors of [`Driver::watch`]. Reads and writes sockets.
    /// Passes the tokens of readable descriptors to `each`; a descriptor that stays readable is reported by
    /// every call. Also returns when there is something for [`Driver::poll_event`] or [`Server::poll_ended`].
    ///
    /// Returns true if there was something to do, not counting events.
    ///
    /// # Errors
    ///
    /// Fails if epoll_wait(2) fails.
    pub fn wait(&mut self, timeout: Option<Duration>, each: impl FnMut(u32)) -> io::Result<bool> {
        self.applied = false;
        let work = std::mem::take(&mut self.work);
        Ok(self.shared.turn(work, timeout, |_| {}, each)? == Turn::Busy)
    }

    /// When to call [`Driver::wait`] although its descriptor is not readable. The descriptor becomes readable
    /// if this time moves forward. For threads that wait elsewhere, after a call of `wait` has returned
    /// false.
    pub fn poll_timeout(&self) -> Option<std::time::Instant> {
        let mut state = self.shared.lock();
        // Idle workers, ended connections and held-back data need a turn at once.
        let at_once =
            state.worker_wanted || state.connection_ended || !state.tx.psocks.is_empty() || self.applied;
        let due = if at_once { Some(self.shared.now()) } else { state.poll_timeout() };
        state.pollers.sleeps_until = Some(due.unwrap_or(FOREVER));
        let time = due?;
        Some(self.shared.start + Duration::from_nanos(time.as_nanos()))
    }

    /// A duplicate of the epoll descriptor.
    #[cfg(feature = "tokio")]
    pub(super) fn epoll(&self) -> io::Result<std::os::fd::OwnedFd> {
        self.shared.epoll.try_clone()
    }

    /// Returns the next event, oldest first.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.shared.lock().notices.pop_event()
    }

    /// Reports connections by [`Driver::poll_lifecycle`] from here on, beginning with those that are open, and gives workers an opened
    /// event of each ([`Mux::report_opened`]). Call `poll_lifecycle` in each turn then.
    pub fn report_connections(&mut self) {
        let now = self.shared.now();
        self.shared.with(|state, _| state.report_connections(now));
    }

    /// Returns the next change of a connection, oldest first. None is lost.
    pub fn poll_lifecycle(&mut self) -> Option<Lifecycle> {
        self.shared.lock().lifecycle.as_mut()?.pop_front()
    }

    /// Returns true if [`Driver::poll_event`] or [`Server::poll_ended`] has something, or if [the server has
    /// drained](Driver::is_drained). Takes the lock once.
    pub fn has_news(&self) -> bool {
        let state = self.shared.lock();
        state.closed || !state.notices.is_empty()
    }

    /// Returns true if the mux drains and has no connections any more.
    pub fn is_drained(&self) -> bool {
        self.shared.lock().closed
    }
}

/// Readable when [`Driver::wait`] has something to do.
impl AsFd for Driver {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.epoll.as_fd()
    }
}
