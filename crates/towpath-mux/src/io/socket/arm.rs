//! A descriptor to wait by: it is rung while the handle is armed.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::super::state::Work;
use super::send::room;
use super::{Socket, To};
use crate::mux::SendError;

impl Socket {
    /// For event loops: says that this thread is about to sleep until [`as_fd`](AsFd::as_fd) is readable. False when it is not to, because
    /// there is a message to be read, or the mux has drained, or, with `send`, there is room to send there, or something went wrong with
    /// what was sent. What it wakes for may be gone when it comes: it looks with [`Flags::DONTWAIT`](super::Flags::DONTWAIT).
    ///
    /// Without `send`, messages that were read are done, as when the next one is asked for. With it they are not, and whoever still has
    /// one wakes for room only.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::io::{Read, Write};
    /// use rustix::event::{PollFd, PollFlags, poll};
    /// use towpath_mux::io::{Error, Flags, Kind, Server, To};
    /// use towpath_mux::mux::Config;
    ///
    /// let server = Server::new("line".parse()?, Config::default())?;
    /// let mut client = std::net::TcpStream::connect(server.listen("127.0.0.1:0")?)?;
    /// let mut socket = server.socket(Kind::Dgram)?;
    /// client.write_all(b"hello\n")?;
    /// let mut answered = 0;
    /// while answered < 1 {
    ///     if socket.arm(None) {
    ///         // Beside whatever else is waited for.
    ///         poll(&mut [PollFd::new(&socket, PollFlags::IN)], None)?;
    ///     }
    ///     socket.disarm();
    ///     loop {
    ///         match socket.recv_bytes(Flags::DONTWAIT) {
    ///             Ok((_, bytes)) => socket.send(To::Requester, &bytes, Flags::empty())?,
    ///             Err(Error::WouldBlock) => break,
    ///             Err(error) => return Err(error.into()),
    ///         };
    ///         answered += 1;
    ///     }
    /// }
    /// client.read_exact(&mut [0; 6])?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use = "false means that there is something to do"]
    pub fn arm(&mut self, send: Option<To>) -> bool {
        let told = send.is_some() && self.error.is_some();
        let answers = matches!(send, Some(To::Requester | To::Message(_)));
        if self.current.is_some() || !self.next.is_empty() || told || answers {
            return false;
        }
        self.drain_eventfd();
        let shared = Arc::clone(&self.shared);
        let mut work = Work::default();
        let mut state = shared.lock();
        let now = shared.now();
        let before = (self.held.len(), self.batch.len());
        if send.is_none() {
            self.finish(&mut state, now);
        }
        let changed = (self.held.len(), self.batch.len()) != before;
        // What is batched and found no room leaves when there is some, too.
        let to = send.or(self.batch.front().map(|(to, _)| *to));
        let roomy = to.is_some_and(|to| !matches!(room(&mut state, to), Err(SendError::Full)));
        let receives = self.receives && self.held.is_empty();
        let ready = receives && state.mux.has_ready(self.id);
        let mut sleeps = !(state.closed || roomy || ready);
        if sleeps && receives {
            self.attend(&mut state, true, now);
            // It is idle from here on. It gets something only if that has waited for a handle to come (`Order::Sticky`).
            state.mux.poll_up_to(self.id, 1, now, &mut self.room);
            self.next.extend(self.room.drain(..));
            sleeps = self.next.is_empty();
        }
        state.set_armed(self.id, sleeps);
        match to {
            Some(To::Any) if sleeps => state.write_space_waiters.push((self.id, None)),
            Some(To::Psock(psock)) if sleeps => state.write_space_waiters.push((self.id, Some(psock))),
            _ => {}
        }
        if changed {
            state.pump(&shared, &mut work);
        } else {
            state.pump_quietly(&shared, &mut work);
        }
        drop(state);
        shared.perform(work);
        sleeps
    }

    /// For event loops: awake again. Then it is to look for messages, with [`Flags::DONTWAIT`](super::Flags::DONTWAIT) until there are none: who was woken for
    /// one and does not come holds others up for [`crate::mux::Config::patience`].
    pub fn disarm(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        let now = shared.now();
        state.set_armed(self.id, false);
        self.attend(&mut state, false, now);
        if !self.attends {
            // It gets nothing: it is idle, and not waited for. Nobody else is woken before it has had its time to look.
            state.mux.poll_up_to(self.id, 1, now, &mut self.room);
        }
        drop(state);
        self.drain_eventfd();
    }

    /// Reads what rang.
    fn drain_eventfd(&self) {
        // When nothing has, it says so (EAGAIN).
        let _ = rustix::io::read(&*self.eventfd, &mut [0; 8]);
    }
}

impl AsFd for Socket {
    /// Readable when there may be something to do, between [`Socket::arm`] and [`Socket::disarm`]. Only to be polled.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}
