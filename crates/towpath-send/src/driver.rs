//! The driver: the engine with a backend. The blocking sender, the tokio sender, `PollSender` and the tests share it. The caller
//! does the waiting.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use crate::buffer::Buffer;
use crate::engine::{Engine, MAX_CALLS, MAX_PARTS, Path, Transmit};
use crate::error::SendError;
use crate::notification::{Event, ExtendedError};
use crate::quarantine::Quarantine;
use crate::sender::Options;
use crate::sys::Part;
use towpath_wire::Time;

/// Limit on the error queue entries of one read, which bounds its work.
const MOST_EVENTS: usize = 64;
/// Limit on stored entries that are not zero-copy notifications.
const MOST_OTHERS: usize = 64;

/// Time for which a full backend is not tried again, unless the caller waited for it. A socket becomes writable when a third of its
/// buffer is free; sending earlier produces small parts, each with a number.
const FULL_FOR: Duration = Duration::from_micros(500);

/// Transmits bytes and delivers completions: a socket, or the simulated kernel of a test.
pub(crate) trait Backend {
    /// Makes one call. Never blocks.
    fn transmit(&mut self, parts: &[Part<'_>], zerocopy: bool) -> io::Result<usize>;

    /// Makes several calls in order, until one is accepted partially or fails. On entry `calls` has the number of `parts` of each
    /// call, on return the bytes accepted. Returns the number of calls made.
    ///
    /// # Errors
    /// The first call failed.
    fn transmit_all(&mut self, parts: &[Part<'_>], calls: &mut [usize], zerocopy: bool) -> io::Result<usize>;
    /// Returns the next entry of the error queue. Never blocks.
    fn event(&mut self) -> io::Result<Option<Event>>;
}

/// A completed buffer.
#[derive(Debug)]
pub struct Done {
    /// The token that was passed with the buffer.
    pub token: u64,
    /// The buffer, free for reuse.
    pub buffer: Buffer,
}

#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) done: Done,
    /// Checksum at the push with `tamper_check`; otherwise 0.
    checksum: u64,
}

/// Result of one turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// The kernel has accepted all data.
    Flushed,
    /// The socket is full: wait until it is writable.
    Full,
    /// A queue below the socket is full, and no event reports its end: retry after a short wait.
    Busy,
}

#[derive(Debug)]
pub(crate) struct Driver<B> {
    pub(crate) backend: B,
    pub(crate) engine: Engine<Item>,
    others: VecDeque<ExtendedError>,
    done: VecDeque<Done>,
    keep_done: bool,
    tamper_check: bool,
    /// Limit on the calls of one sendmmsg(2).
    batch: usize,
    /// Progress counter: incremented when bytes are accepted or numbers complete.
    pub(crate) progress: u64,
    /// The time at which the backend was found full.
    full_at: Option<Time>,
}

impl<B: Backend> Driver<B> {
    pub(crate) fn new(backend: B, mut engine: Engine<Item>, options: &Options) -> Self {
        if !options.keep_done && !options.tamper_check {
            engine.drop_done();
        }
        Self {
            backend,
            engine,
            others: VecDeque::new(),
            done: VecDeque::new(),
            keep_done: options.keep_done,
            tamper_check: options.tamper_check,
            batch: options.batch,
            progress: 0,
            full_at: None,
        }
    }

    /// Queues a buffer; the caller has checked for room.
    // Builds the item in place: moving a struct that was just written in smaller pieces stalls store forwarding.
    #[inline]
    pub(crate) fn push(&mut self, token: u64, buffer: Buffer) {
        let len = buffer.len();
        self.engine.push_in_room(Item { done: Done { token, buffer }, checksum: 0 }, len);
        if self.tamper_check
            && let Some(item) = self.engine.last_pushed()
        {
            item.checksum = item.done.buffer.checksum();
        }
    }

    /// Like [`turn`](Self::turn), but does nothing shortly after the backend was full.
    pub(crate) fn try_turn(&mut self, now: Time) -> Result<(), SendError> {
        if self.full_at.is_none_or(|full| now.since(full) >= FULL_FOR) {
            self.turn(now)?;
        }
        Ok(())
    }

    /// Transmits as much as the backend accepts.
    pub(crate) fn turn(&mut self, now: Time) -> Result<Turn, SendError> {
        loop {
            if self.engine.wants_notifications(now) {
                self.read(now)?;
            }
            let calls = self.engine.poll_transmits(self.batch, now);
            let Some(&Transmit { bytes, parts, how, .. }) = calls.first() else {
                // Empty buffers complete without a call.
                self.collect();
                return Ok(Turn::Flushed);
            };
            let (count, zerocopy) = (calls.len(), how == Path::Zerocopy);
            let made = if count == 1 {
                self.call(parts, zerocopy).map(|bytes| self.engine.handle_sent(bytes, now))
            } else {
                self.calls(count, zerocopy, now)
            };
            let Err(error) = made else {
                self.progress += 1;
                self.full_at = None;
                self.collect();
                if self.engine.is_flushed() {
                    return Ok(Turn::Flushed);
                }
                continue;
            };
            if zerocopy && self.engine.is_datagram() {
                let unknown = self.engine.counters().unknown;
                while !self.read(now)? {}
                self.engine.handle_refused_datagram(unknown, now);
            }
            match error.raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::EAGAIN) => {
                    self.read(now)?;
                    self.full_at = Some(now);
                    return Ok(Turn::Full);
                }
                Some(libc::ENOBUFS) if zerocopy => {
                    self.read(now)?;
                    self.engine.handle_no_buffers(now);
                }
                Some(libc::ENOBUFS) => return Ok(Turn::Busy),
                Some(libc::EINVAL | libc::EOPNOTSUPP) if zerocopy => self.engine.handle_unsupported(),
                // EINVAL for a datagram: more segments than the kernel accepts, or segments longer than the path MTU.
                Some(code) if code == libc::EMSGSIZE || code == libc::EINVAL && self.engine.is_datagram() => {
                    // A retry would fail again and block all later datagrams.
                    self.engine.handle_too_long(now);
                    self.collect();
                    return Err(SendError::TooLong { bytes });
                }
                Some(
                    libc::EPIPE | libc::ECONNRESET | libc::ENOTCONN | libc::ETIMEDOUT | libc::ECONNREFUSED,
                ) => {
                    return Err(SendError::Gone(error));
                }
                _ => return Err(SendError::Io(error)),
            }
        }
    }

    /// Makes the single open call, of `parts` frames. Returns the bytes accepted.
    fn call(&mut self, parts: usize, zerocopy: bool) -> io::Result<usize> {
        if parts == 1 {
            let (item, span) = self.engine.first_part().ok_or(io::ErrorKind::InvalidInput)?;
            return self.backend.transmit(&[item.done.buffer.part(span)], zerocopy);
        }
        let mut all = [Part::NONE; MAX_PARTS];
        let mut count = 0;
        for part in self.engine.parts().map(|(item, span)| item.done.buffer.part(span)) {
            if count == 0 || !all[count - 1].join(&part) {
                all[count] = part;
                count += 1;
            }
        }
        self.backend.transmit(&all[..count], zerocopy)
    }

    /// Makes all open calls at once and reports each result to the engine.
    fn calls(&mut self, count: usize, zerocopy: bool, now: Time) -> io::Result<()> {
        let mut all = [Part::NONE; MAX_PARTS];
        let parts = self.engine.parts().map(|(item, span)| item.done.buffer.part(span));
        let parts = all.iter_mut().zip(parts).map(|(place, part)| *place = part).count();
        let mut calls = [0; MAX_CALLS];
        for (place, transmit) in calls.iter_mut().zip(self.engine.asked()) {
            *place = transmit.parts;
        }
        let made = self.backend.transmit_all(&all[..parts], &mut calls[..count], zerocopy)?;
        calls[..made].iter().for_each(|bytes| self.engine.handle_sent(*bytes, now));
        Ok(())
    }

    /// Reads the error queue up to the limit of one read. Returns true if the queue is empty.
    pub(crate) fn read(&mut self, now: Time) -> Result<bool, SendError> {
        let mut emptied = false;
        for _ in 0..MOST_EVENTS {
            match self.backend.event().map_err(SendError::Queue)? {
                None => {
                    emptied = true;
                    break;
                }
                Some(Event::Zerocopy(range)) => {
                    self.progress += 1;
                    self.engine.handle_notification(range, now);
                }
                Some(Event::Other(_)) if self.others.len() >= MOST_OTHERS => {
                    self.engine.counters_mut().events_lost += 1;
                }
                Some(Event::Other(other)) => self.others.push_back(other),
            }
        }
        self.engine.handle_queue_read(now);
        self.collect();
        Ok(emptied)
    }

    /// Collects completed buffers.
    fn collect(&mut self) {
        while let Some(item) = self.engine.poll_done() {
            if self.tamper_check && item.checksum != item.done.buffer.checksum() {
                self.engine.counters_mut().tampered += 1;
            }
            if self.keep_done {
                self.done.push_back(item.done);
            }
        }
    }

    pub(crate) fn poll_done(&mut self) -> Option<Done> {
        self.done.pop_front()
    }

    /// Returns true if a frame may be pushed; the limit includes completed frames that were not taken.
    #[inline]
    pub(crate) fn has_room(&self, max_frames: usize) -> bool {
        self.engine.held() + self.done.len() < max_frames
    }

    pub(crate) fn poll_other(&mut self) -> Option<ExtendedError> {
        self.others.pop_front()
    }

    /// Ends the connection. Buffers that the kernel may still read go into quarantine; the others are returned.
    pub(crate) fn abandon(&mut self, now: Time) -> Remains {
        self.collect();
        let abandoned = self.engine.abandon();
        let mut quarantine = Quarantine::new();
        quarantine.hold(abandoned.in_flight.into_iter().map(|item| item.done), now);
        let mut done: Vec<Done> = self.done.drain(..).collect();
        done.extend(abandoned.done.into_iter().map(|item| item.done));
        let unsent = abandoned.unsent.into_iter().map(|item| item.done).collect();
        Remains { done, unsent, quarantine }
    }
}

/// The buffers of a sender that ended.
#[derive(Debug, Default)]
pub struct Remains {
    /// Completed buffers, with [`Options::keep_done`].
    pub done: Vec<Done>,
    /// Buffers that the kernel has not accepted completely and does not read.
    pub unsent: Vec<Done>,
    /// Buffers that the kernel may still read. Keep the quarantine, or drop it and leak their memory.
    pub quarantine: Quarantine<Done>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Config, CopyMode};
    use crate::notification::Range;
    use crate::policy::Mode;

    /// A simulated kernel that is never full and completes each call at once.
    #[derive(Default)]
    struct Kernel {
        copies: bool,
        refuses: bool,
        next: u32,
        queue: VecDeque<Event>,
    }

    impl Backend for Kernel {
        fn transmit(&mut self, parts: &[Part<'_>], zerocopy: bool) -> io::Result<usize> {
            if zerocopy {
                if self.refuses {
                    return Err(io::Error::from_raw_os_error(libc::ENOBUFS));
                }
                let range = Range { first: self.next, last: self.next, copied: self.copies };
                self.queue.push_back(Event::Zerocopy(range));
                self.next += 1;
            }
            Ok(parts.iter().map(Part::len).sum())
        }

        fn transmit_all(&mut self, _: &[Part<'_>], _: &mut [usize], _: bool) -> io::Result<usize> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn event(&mut self) -> io::Result<Option<Event>> {
            Ok(self.queue.pop_front())
        }
    }

    /// Sends `count` messages of `len` bytes, one per `every`.
    fn send(choice: CopyMode, kernel: Kernel, len: usize, count: u32, every: Duration) -> Driver<Kernel> {
        let config = Config { choice, ..Config::default() };
        let mut now = Time::default();
        let mut driver = Driver::new(kernel, Engine::new(config, now), &Options::default());
        for _ in 0..count {
            driver.push(0, vec![0; len].into());
            assert_eq!(driver.turn(now).unwrap(), Turn::Flushed);
            now = now + every;
        }
        driver
    }

    #[test]
    fn a_probe_completes_on_a_socket_that_is_never_full() {
        let every = Duration::from_millis(4);
        let driver = send(CopyMode::Adaptive, Kernel::default(), 256 << 10, 3, every);
        assert_eq!((driver.engine.mode(), driver.engine.counters().plain_calls), (Mode::Zerocopy, 0));
        let copies = Kernel { copies: true, ..Kernel::default() };
        assert_eq!(send(CopyMode::Adaptive, copies, 256 << 10, 4, every).engine.mode(), Mode::Copying);
    }

    #[test]
    fn unread_completions_do_not_make_a_peer_stuck() {
        let driver = send(CopyMode::Zerocopy, Kernel::default(), 32 << 10, 8, Duration::from_millis(1100));
        let counters = driver.engine.counters();
        assert_eq!((counters.numbers, counters.plain_calls), (8, 0));
        assert_eq!(driver.engine.held(), 1, "the last frame sent");
    }

    #[test]
    fn persistent_enobufs_costs_few_calls() {
        for choice in [CopyMode::Zerocopy, CopyMode::Adaptive] {
            let refuses = Kernel { refuses: true, ..Kernel::default() };
            let driver = send(choice, refuses, 64 << 10, 20_000, Duration::from_millis(1));
            let counters = driver.engine.counters();
            assert_eq!(counters.plain_bytes(), 20_000 * (64 << 10));
            assert!((2..20).contains(&counters.no_buffers), "{}", counters.no_buffers);
        }
    }
}
