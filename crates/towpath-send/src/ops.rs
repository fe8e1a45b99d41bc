//! Test harness for the completion engine: runs operations against the engine and against a reference model.
//!
//! The property test and the fuzzer share it: operations are decoded from bytes. The model is the kernel's view: a list of all calls
//! with the frames that each covered, and whether each was notified. With io_uring, the notifications are those of single requests in any
//! order, failed requests have some too, and `Requests` is between the model and the engine.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use crate::engine::{Config, CopyMode, Engine, Kind, Path};
use crate::locked::LockedMemory;
use crate::notification::Range;
use crate::requests::Requests;
use towpath_wire::Time;

/// Encoded size of an operation in bytes.
pub const OP_BYTES: usize = 4;

/// An operation on a connection.
#[derive(Clone, Copy, Debug)]
pub enum Op {
    /// Pushes a frame of this many bytes.
    Push(usize),
    /// Makes calls; the first field is the part of the last call that the kernel accepts, in 255ths, the second selects their number.
    Send(u8, usize),
    /// The call fails with ENOBUFS.
    NoBuffers,
    /// Notifies a range of outstanding numbers: start, count, and the COPIED code.
    Notify(u8, u8, bool),
    /// Notifies an arbitrary range: distance of its first number from the next number, and length.
    Stray(i8, u32),
    /// Advances the time.
    Advance(Duration),
}

impl Op {
    /// Decodes an operation.
    pub fn from_bytes(bytes: [u8; OP_BYTES]) -> Self {
        let [op, a, b, c] = bytes;
        match op % 16 {
            0..4 => Self::Push(usize::from(a) << (b % 12)),
            4..9 => Self::Send(a, usize::from(b)),
            9 => Self::NoBuffers,
            10..14 => Self::Notify(a, b, c % 2 == 1),
            14 => Self::Stray(a as i8, u32::from(b) << (c % 32)),
            _ => Self::Advance(Duration::from_millis(u64::from(a) << (b % 9))),
        }
    }
}

/// A zero-copy call that the kernel accepted.
struct Call {
    frames: Vec<u32>,
    bytes: u64,
    /// The kernel no longer reads the memory, and whether it copied. The engine may not have been told yet.
    finished: Option<bool>,
    notified: bool,
}

/// The back end io_uring: the numbers of requests, and the kernel's view of them.
struct Ring {
    requests: Requests,
    /// Requests whose notification is still to come, with the call of those that the kernel accepted.
    pending: Vec<(u64, Option<usize>)>,
}

impl Ring {
    /// A request that fails. `way` selects whether a notification follows, precedes the result, or is absent.
    fn fail(&mut self, way: usize) {
        let id = self.requests.begin();
        match way % 3 {
            0 => self.pending.push((id, None)),
            1 => self.requests.handle_notification(id, false),
            _ => {}
        }
        assert_eq!(self.requests.handle_result(id, -11, way % 3 < 2), Err(11));
    }

    /// An accepted request, the call `at`. Returns whether the kernel copied, if it has finished with it already.
    fn accept(&mut self, at: usize, bytes: usize, way: usize) -> Option<bool> {
        let id = self.requests.begin();
        match way % 4 {
            0 => self.requests.handle_notification(id, true),
            1 => {}
            _ => self.pending.push((id, Some(at))),
        }
        assert_eq!(self.requests.handle_result(id, bytes as i32, way % 4 != 1), Ok(bytes));
        (way % 4 < 2).then_some(way.is_multiple_of(4))
    }
}

/// An engine and its model.
pub struct World {
    engine: Engine<u32>,
    locked: Arc<LockedMemory>,
    first: u64,
    now: Time,
    pushed: u32,
    pushed_bytes: u64,
    /// Length and accepted bytes of each frame that was not returned.
    frames: BTreeMap<u32, (usize, usize)>,
    calls: Vec<Call>,
    returned: BTreeSet<u32>,
    stray: bool,
    /// Absent with MSG_ZEROCOPY.
    ring: Option<Ring>,
}

impl World {
    /// A connection; `shape` selects its kind and limits. Its numbers start shortly before they wrap.
    pub fn new(shape: u8) -> Self {
        let first = [0, (1 << 32) - 3, (1 << 32) - 40, (7 << 32) - 1][usize::from(shape & 3)];
        let locked = Arc::new(LockedMemory::new(if shape & 4 == 0 { u64::MAX } else { 96 << 10 }));
        let config = Config {
            kind: if shape & 8 == 0 { Kind::Stream } else { Kind::Datagram { segmented: true } },
            choice: if shape & 16 == 0 { CopyMode::Zerocopy } else { CopyMode::Adaptive },
            min_zerocopy: if shape & 32 == 0 { 1 } else { 4096 },
            gather: if shape & 64 == 0 { 16 << 10 } else { 0 },
            optmem: if shape & 128 == 0 { 128 << 10 } else { 1500 },
            max_frames: 40,
            max_numbers: 24,
            locked: locked.clone(),
            first_number: first,
            ..Config::default()
        };
        let now = Time::default();
        Self {
            engine: Engine::new(config, now),
            locked,
            first,
            now,
            pushed: 0,
            pushed_bytes: 0,
            frames: BTreeMap::new(),
            calls: Vec::new(),
            returned: BTreeSet::new(),
            stray: false,
            ring: None,
        }
    }

    /// As above, with the back end io_uring.
    pub fn io_uring(shape: u8) -> Self {
        let world = Self::new(shape);
        let requests = Requests::new(world.first as u32);
        Self { ring: Some(Ring { requests, pending: Vec::new() }), ..world }
    }

    /// Executes one operation and checks all invariants.
    ///
    /// # Panics
    /// Panics if an invariant is violated.
    pub fn step(&mut self, op: Op) {
        match op {
            Op::Push(len) => self.push(len),
            Op::Send(share, most) => self.send(share, most),
            Op::NoBuffers => self.no_buffers(),
            Op::Notify(from, count, copied) => self.notify(from, count, copied),
            // The ring has no completions without a request.
            Op::Stray(..) if self.ring.is_some() => {}
            Op::Stray(distance, len) => self.stray(distance, len),
            Op::Advance(time) => self.now = self.now + time,
        }
        self.check();
    }

    /// Sends the remaining data, notifies every number, and checks that all frames are returned.
    ///
    /// # Panics
    /// Panics if a frame is not returned, or if progress stops.
    pub fn finish(mut self) {
        for _ in 0..10_000 {
            if self.engine.is_flushed() {
                break;
            }
            self.send(255, 3);
            self.check();
        }
        assert!(self.engine.is_flushed(), "sending stalls although the kernel accepts all data");
        while self.engine.outstanding() > 0 || self.ring.as_ref().is_some_and(|ring| !ring.pending.is_empty())
        {
            self.notify(0, 255, false);
            self.check();
        }
        assert!(self.frames.is_empty(), "frames never returned: {:?}", self.frames);
        assert_eq!((self.engine.held(), self.engine.pinned(), self.engine.unsent()), (0, 0, 0));
        assert_eq!(self.locked.used(), 0);
        let counters = self.engine.counters();
        assert_eq!(counters.completed, counters.numbers);
    }

    fn push(&mut self, len: usize) {
        let room = self.frames.len() < 40;
        assert_eq!(self.engine.push(self.pushed, len).is_ok(), room);
        if room {
            self.frames.insert(self.pushed, (len, 0));
            self.pushed += 1;
            self.pushed_bytes += len as u64;
        }
    }

    fn send(&mut self, share: u8, most: usize) {
        let calls = self.engine.poll_transmits(most % 20, self.now).to_vec();
        if calls.is_empty() {
            return assert!(self.engine.is_flushed());
        }
        assert!(calls.len() <= (most % 20).max(1) && calls.iter().all(|call| call.how == calls[0].how));
        let parts: Vec<_> = self.engine.parts().map(|(token, span)| (*token, span)).collect();
        let mut parts = parts.into_iter();
        // The kernel may stop before any call.
        let made = 1 + most / 20 % calls.len();
        for (at, transmit) in calls[..made].iter().enumerate() {
            let own: Vec<_> = parts.by_ref().take(transmit.parts).collect();
            assert_eq!(own.iter().map(|(_, span)| span.len()).sum::<usize>(), transmit.bytes);
            for (token, span) in &own {
                let (len, sent) = self.frames[token];
                assert!(span.start == sent && span.end <= len, "frame {token}: {span:?} of {sent}..{len}");
            }
            let zerocopy = transmit.how == Path::Zerocopy;
            if let Some(ring) = self.ring.as_mut().filter(|_| zerocopy && share.is_multiple_of(5)) {
                // EAGAIN: nothing is accepted, and the call is repeated later.
                ring.fail(most);
            }
            let whole = self.engine.is_datagram() || at + 1 < made;
            let bytes = match transmit.bytes * usize::from(share) / 255 {
                _ if whole => transmit.bytes,
                0 => 1,
                bytes => bytes,
            };
            self.engine.handle_sent(bytes, self.now);
            let mut left = bytes;
            let mut touched = Vec::new();
            for (token, span) in own {
                let part = span.len().min(left);
                left -= part;
                if let Some((_, sent)) = self.frames.get_mut(&token) {
                    *sent += part;
                }
                if part > 0 {
                    touched.push(token);
                }
            }
            if zerocopy {
                let next = self.calls.len();
                let way = usize::from(share) + at;
                let finished = self.ring.as_mut().and_then(|ring| ring.accept(next, bytes, way));
                self.calls.push(Call { frames: touched, bytes: bytes as u64, finished, notified: false });
            }
        }
    }

    fn no_buffers(&mut self) {
        let Some(transmit) = self.engine.poll_transmit(self.now) else { return };
        if transmit.how != Path::Zerocopy {
            return;
        }
        if let Some(ring) = &mut self.ring {
            ring.fail(self.calls.len());
        }
        self.engine.handle_no_buffers(self.now);
        if self.engine.outstanding() == 0 {
            let next = self.engine.poll_transmit(self.now).expect("the frame still waits");
            assert!(matches!(next.how, Path::Plain(_)), "waits for a completion that cannot arrive");
        }
    }

    /// Completes requests in any order, and gives the engine every completed number.
    fn complete(&mut self, from: u8, count: u8, copied: bool) {
        let Some(ring) = &mut self.ring else { return };
        for _ in 0..=count % 16 {
            if ring.pending.is_empty() {
                break;
            }
            let (id, call) = ring.pending.swap_remove(usize::from(from) % ring.pending.len());
            if let Some(call) = call {
                self.calls[call].finished = Some(copied);
            }
            ring.requests.handle_notification(id, copied);
        }
        while let Some((number, copied)) = ring.requests.poll_completed() {
            let at = number.wrapping_sub(self.first as u32) as usize;
            let call = self.calls.get_mut(at).unwrap_or_else(|| panic!("number {number} was never assigned"));
            assert!(!call.notified, "number {number} is completed twice");
            assert_eq!(
                call.finished,
                Some(copied),
                "number {number} is completed early or by another request"
            );
            call.notified = true;
            self.engine.handle_notification(Range { first: number, last: number, copied }, self.now);
        }
        self.engine.handle_queue_read(self.now);
    }

    fn notify(&mut self, from: u8, count: u8, copied: bool) {
        if self.ring.is_some() {
            return self.complete(from, count, copied);
        }
        let open: Vec<usize> = (0..self.calls.len()).filter(|&at| !self.calls[at].notified).collect();
        if open.is_empty() {
            return;
        }
        let first = open[usize::from(from) % open.len()];
        let last = (first + usize::from(count % 16)).min(self.calls.len() - 1);
        for call in &mut self.calls[first..=last] {
            (call.finished, call.notified) = (Some(copied), true);
        }
        let wire = |at: usize| (self.first + at as u64) as u32;
        self.engine.handle_notification(Range { first: wire(first), last: wire(last), copied }, self.now);
        self.engine.handle_queue_read(self.now);
    }

    fn stray(&mut self, distance: i8, len: u32) {
        let next = self.first + self.calls.len() as u64;
        let first = (next as u32).wrapping_add_signed(i32::from(distance));
        let range = Range { first, last: first.wrapping_add(len), copied: false };
        self.engine.handle_notification(range, self.now);
        self.stray = true;
        // The assigned numbers in the range count as notified.
        let from = self.calls.len() as i64 + i64::from(distance);
        for at in from.max(0)..(from + range.count() as i64).min(self.calls.len() as i64) {
            self.calls[at as usize].notified = true;
        }
    }

    fn check(&mut self) {
        while let Some(token) = self.engine.poll_done() {
            assert!(self.returned.insert(token), "frame {token} was returned twice");
            let (len, sent) = self.frames.remove(&token).expect("a pending frame");
            assert_eq!(sent, len, "frame {token} was returned before it was accepted");
            let pinned = self.calls.iter().any(|call| !call.notified && call.frames.contains(&token));
            assert!(!pinned, "frame {token} was returned while the kernel reads it");
        }
        for (token, (len, sent)) in &self.frames {
            let pinned = self.calls.iter().any(|call| !call.notified && call.frames.contains(token));
            assert!(sent < len || pinned || *len == 0, "frame {token} is kept although no number covers it");
        }
        let open = self.calls.iter().filter(|call| !call.notified);
        assert_eq!(self.engine.pinned(), open.clone().map(|call| call.bytes).sum::<u64>());
        assert_eq!(self.engine.outstanding(), open.count());
        let counters = self.engine.counters();
        assert_eq!(counters.numbers, self.calls.len() as u64);
        assert_eq!(
            self.pushed_bytes,
            counters.zerocopy_bytes + counters.plain_bytes() + self.engine.unsent()
        );
        assert_eq!(counters.numbers, counters.completed + self.engine.outstanding() as u64);
        if !self.stray {
            assert_eq!(counters.unknown, 0);
        }
        assert!(self.engine.outstanding() <= 24);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

        #[test]
        fn frames_are_returned_after_completion(
            shape: u8,
            ops in proptest::collection::vec(any::<[u8; OP_BYTES]>(), 0..200),
        ) {
            for mut world in [World::new(shape), World::io_uring(shape)] {
                for op in &ops {
                    world.step(Op::from_bytes(*op));
                }
                world.finish();
            }
        }
    }
}
