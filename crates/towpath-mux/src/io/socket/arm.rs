//! Waiting for a socket in an event loop, by an eventfd that is written while the socket is armed.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use super::super::state::Work;
use super::send::room;
use super::{Socket, To};
use crate::mux::SendError;

impl Socket {
    /// For event loops: announces that this thread will sleep until [`as_fd`](AsFd::as_fd) is readable.
    /// Returns false if the thread must not sleep: a message can be read, the mux has drained, or with `send`
    /// there is write space or a deferred error. A wake-up may be spurious, so use
    /// [`Flags::DONTWAIT`](super::Flags::DONTWAIT) after it.
    ///
    /// Without `send`, messages that were read are done, as by the next `recv`. With `send` they are not, and
    /// a socket with an unfinished message is woken for write space only.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::io::{Read, Write};
    /// use rustix::event::{PollFd, PollFlags, poll};
    /// use towpath_mux::io::{Error, Flags, Kind, Server, To};
    /// use towpath_mux::mux::{Config, Order};
    ///
    /// let server = Server::new("line".parse()?, Config::new(Order::Replies))?;
    /// let mut client = std::net::TcpStream::connect(server.listen("127.0.0.1:0")?)?;
    /// let mut socket = server.socket(Kind::Dgram)?;
    /// client.write_all(b"hello\n")?;
    /// let mut answered = 0;
    /// while answered < 1 {
    ///     if socket.arm(None) {
    ///         // Together with other descriptors.
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
        let failed = send.is_some() && self.error.is_some();
        let answers = matches!(send, Some(To::Requester | To::Message(_)));
        if self.current.is_some() || !self.next.is_empty() || failed || answers {
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
        // Batched messages without write space wait for it, too.
        let to = send.or(self.batch.front().map(|(to, _)| *to));
        let roomy = to.is_some_and(|to| !matches!(room(&mut state, to), Err(SendError::Full)));
        let receives = self.receives && self.held.is_empty();
        let ready = receives && state.mux.has_ready(self.id);
        let mut sleeps = !(state.closed || roomy || ready);
        if sleeps && receives {
            self.attend(&mut state, true, now);
            // The socket is idle from here on. It gets a message now only with `Order::Sticky`, if that
            // waited for a worker.
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

    /// For event loops: this thread is awake. Call `recv` with [`Flags::DONTWAIT`](super::Flags::DONTWAIT)
    /// until it returns [`super::Error::WouldBlock`]: a woken socket that does not take its message delays it
    /// by up to [`crate::mux::Config::patience`].
    pub fn disarm(&mut self) {
        let shared = Arc::clone(&self.shared);
        let mut state = shared.lock();
        let now = shared.now();
        state.set_armed(self.id, false);
        self.attend(&mut state, false, now);
        if !self.attends {
            // A disabled worker gets no messages, and no message waits for it.
            state.mux.poll_up_to(self.id, 1, now, &mut self.room);
        }
        drop(state);
        self.drain_eventfd();
    }

    /// Resets the eventfd.
    fn drain_eventfd(&self) {
        // EAGAIN if it was not written.
        let _ = rustix::io::read(&*self.eventfd, &mut [0; 8]);
    }
}

impl AsFd for Socket {
    /// Readable between [`Socket::arm`] and [`Socket::disarm`] when there may be something to do. For poll(2)
    /// only.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }
}
