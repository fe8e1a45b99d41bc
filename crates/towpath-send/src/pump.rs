//! The engine and a back end, joined: what blocking, tokio and the tests share. Waiting is the caller's.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use crate::buffer::Buffer;
use crate::engine::{Engine, How, MAX_CALLS, MAX_PARTS, Transmit};
use crate::error::SendError;
use crate::notification::{Event, ExtendedError};
use crate::quarantine::Quarantine;
use crate::sender::Options;
use crate::sys::Part;
use towpath_wire::Time;

/// Entries of the error queue that are read at once: reading is bounded work.
const MOST_EVENTS: usize = 64;
/// Entries that are not about zero copy, kept until somebody takes them.
const MOST_OTHERS: usize = 64;

/// How long a back end that was full is not tried again, unless somebody waited for it.
/// A socket says that it is writable when a third of its buffer is free: what is sent before goes in small parts, each with a number.
const FULL_FOR: Duration = Duration::from_micros(500);

/// What carries bytes and brings completions: a socket; a kernel that a test plays.
pub(crate) trait Backend {
    /// One call. Never blocks.
    fn transmit(&mut self, parts: &[Part<'_>], zerocopy: bool) -> io::Result<usize>;

    /// Several calls, one behind the other, until one takes a part only or fails. Each has as many of `parts` as `calls` says, which
    /// then says how many bytes it took. How many were made.
    ///
    /// # Errors
    /// The first failed.
    fn transmit_all(&mut self, parts: &[Part<'_>], calls: &mut [usize], zerocopy: bool) -> io::Result<usize>;
    /// The next entry of the error queue. Never blocks.
    fn event(&mut self) -> io::Result<Option<Event>>;
}

/// A buffer that the kernel is done with.
#[derive(Debug)]
pub struct Done {
    /// What it was given with.
    pub token: u64,
    /// The buffer, to be used again.
    pub buffer: Buffer,
}

#[derive(Debug)]
pub(crate) struct Item {
    pub(crate) done: Done,
    /// Its checksum when it was given, where that is checked; else nothing.
    checksum: u64,
}

/// What one turn came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    /// Everything is handed over.
    Flushed,
    /// The socket takes no more now: wait until it is writable.
    Full,
    /// A queue below the socket is full, which nothing tells the end of: wait a moment.
    Busy,
}

#[derive(Debug)]
pub(crate) struct Pump<B> {
    pub(crate) backend: B,
    pub(crate) engine: Engine<Item>,
    others: VecDeque<ExtendedError>,
    done: VecDeque<Done>,
    keep_done: bool,
    tamper_check: bool,
    /// Most calls that are made at once.
    batch: usize,
    /// Counts whatever moves: bytes that are taken, numbers that complete.
    pub(crate) progress: u64,
    /// When the back end was found full.
    full_at: Option<Time>,
}

impl<B: Backend> Pump<B> {
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

    /// Takes a buffer for which there is room.
    // It is built where it will stand: what is written in pieces and moved at once, in larger ones, has to wait for the writes.
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

    /// As [`turn`](Self::turn), but not so soon after the back end was full: it would say so again.
    pub(crate) fn try_turn(&mut self, now: Time) -> Result<(), SendError> {
        if self.full_at.is_none_or(|full| now.since(full) >= FULL_FOR) {
            self.turn(now)?;
        }
        Ok(())
    }

    /// Hands over as much as the back end takes.
    pub(crate) fn turn(&mut self, now: Time) -> Result<Turn, SendError> {
        loop {
            if self.engine.wants_notifications(now) {
                self.read(now)?;
            }
            let calls = self.engine.poll_transmits(self.batch, now);
            let Some(&Transmit { bytes, parts, how, .. }) = calls.first() else {
                // Buffers without bytes are done without a call.
                self.collect();
                return Ok(Turn::Flushed);
            };
            let (count, zerocopy) = (calls.len(), how == How::Zerocopy);
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
                // EINVAL of a datagram: more segments than the kernel takes at once, or longer ones than the path.
                Some(code) if code == libc::EMSGSIZE || code == libc::EINVAL && self.engine.is_datagram() => {
                    // It would be refused for ever, and all behind it would wait.
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

    /// The one call that the engine asked for, of so many frames: what it took.
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

    /// The calls that it asked for, at once: what each took is told to it.
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

    /// Reads the error queue, until it is empty or enough was read. Whether it was emptied.
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

    /// Takes back what is done.
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

    /// Whether a frame may be pushed: the quota counts those that are done and not taken.
    #[inline]
    pub(crate) fn has_room(&self, max_frames: usize) -> bool {
        self.engine.held() + self.done.len() < max_frames
    }

    pub(crate) fn poll_other(&mut self) -> Option<ExtendedError> {
        self.others.pop_front()
    }

    /// Ends: what the kernel may still read goes into quarantine, the rest comes back.
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

/// What a sender leaves behind when it ends.
#[derive(Debug, Default)]
pub struct Remains {
    /// Buffers that the kernel is done with, as far as they were to be kept.
    pub done: Vec<Done>,
    /// Buffers that were not handed over to their ends, and that the kernel does not read.
    pub unsent: Vec<Done>,
    /// Buffers that the kernel may still read: keep the quarantine, or drop it and lose their memory.
    pub quarantine: Quarantine<Done>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Choice, Config};
    use crate::notification::Range;
    use crate::policy::Mode;

    /// A kernel that is never full and completes each call at once.
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

    /// Sends `count` messages of `len` bytes, one each `every`.
    fn send(choice: Choice, kernel: Kernel, len: usize, count: u32, every: Duration) -> Pump<Kernel> {
        let config = Config { choice, ..Config::default() };
        let mut now = Time::default();
        let mut pump = Pump::new(kernel, Engine::new(config, now), &Options::default());
        for _ in 0..count {
            pump.push(0, vec![0; len].into());
            assert_eq!(pump.turn(now).unwrap(), Turn::Flushed);
            now = now + every;
        }
        pump
    }

    #[test]
    fn a_probe_is_judged_although_the_socket_is_never_full() {
        let every = Duration::from_millis(4);
        let pump = send(Choice::Adaptive, Kernel::default(), 256 << 10, 3, every);
        assert_eq!((pump.engine.mode(), pump.engine.counters().plain_calls), (Mode::Zerocopy, 0));
        let copies = Kernel { copies: true, ..Kernel::default() };
        assert_eq!(send(Choice::Adaptive, copies, 256 << 10, 4, every).engine.mode(), Mode::Copying);
    }

    #[test]
    fn a_peer_that_acknowledges_is_not_stuck_because_nobody_looked() {
        let pump = send(Choice::Zerocopy, Kernel::default(), 32 << 10, 8, Duration::from_millis(1100));
        let counters = pump.engine.counters();
        assert_eq!((counters.numbers, counters.plain_calls), (8, 0));
        assert_eq!(pump.engine.held(), 1, "the one that was sent last");
    }

    #[test]
    fn memory_that_is_refused_for_ever_costs_few_calls() {
        for choice in [Choice::Zerocopy, Choice::Adaptive] {
            let refuses = Kernel { refuses: true, ..Kernel::default() };
            let pump = send(choice, refuses, 64 << 10, 20_000, Duration::from_millis(1));
            let counters = pump.engine.counters();
            assert_eq!(counters.plain_bytes(), 20_000 * (64 << 10));
            assert!((2..20).contains(&counters.no_buffers), "{}", counters.no_buffers);
        }
    }
}
