//! The memory of a lane at the client: the frames that this client has, and their decisions.

use std::collections::VecDeque;

use crate::client::recv_error::RecvError;
use crate::client::tx_ring::TxRing;
use crate::handshake::attach::Memory;
use crate::lane::consumer::{BadHeader, Consumer, Found};
use crate::lane::records;
use crate::lane::verdict::{Decision, Verdict, Word};
use crate::shm::header::{FLAG_INLINE, FLAG_ONESHOT};
use crate::shm::region::{Payload, Use};
use crate::shm::seq::Seq;
use crate::shm::sys;

/// The rings of a lane.
#[derive(Debug)]
pub(crate) struct Rings {
    pub(crate) memory: Memory,
    pub(crate) rx: Consumer,
    pub(crate) tx: TxRing,
    /// Frames of this client, by first frame.
    mine: Box<[Mine]>,
    /// Received frames, oldest first; some were decided or held since.
    undecided: VecDeque<(Seq, u32)>,
    /// Memory of one-shot messages, by first frame.
    oneshots: Vec<(u32, Payload)>,
    /// Records have decided every frame up to this one.
    upto: Seq,
    records: records::Writer,
}

/// A frame of this client.
#[derive(Clone, Copy, Debug)]
struct Mine {
    seq: Seq,
    len: u32,
    place: Place,
    /// Records do not cover it.
    held: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    NotMine,
    Ring,
    Inline,
    /// In a one-shot memfd.
    OneShot,
}

impl Rings {
    /// `rx` and `tx` are the sequence numbers of the first messages.
    pub(crate) fn new(memory: Memory, rx: Seq, tx: Seq) -> Self {
        let layout = memory.layout;
        let none = Mine { seq: Seq(0), len: 0, place: Place::NotMine, held: false };
        Self {
            rx: Consumer::new(layout.rx_place(), rx),
            tx: TxRing::new(&layout, &memory.own, tx),
            mine: vec![none; layout.rx.frame_nr as usize].into(),
            undecided: VecDeque::new(),
            oneshots: Vec::new(),
            upto: rx.back(1),
            records: records::Writer::new(layout.records_place()),
            memory,
        }
    }

    /// Passes the next message to `give`, if it is published. `oneshot` returns the memory of a one-shot message, or
    /// none if it was lost for lack of a descriptor. An invalid message stays the next one.
    #[inline(always)]
    pub(crate) fn next(
        &mut self,
        oneshot: impl FnOnce(Seq, u32) -> Result<Option<Payload>, RecvError>,
        give: impl FnOnce(Found),
    ) -> Result<bool, RecvError> {
        let found = match self.rx.next(&self.memory.theirs) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(false),
            Err(what) => return Err(bad_header(what)),
        };
        let Found { seq, at, header } = found;
        let Some(mine) = self.mine.get_mut(at as usize).filter(|mine| mine.place == Place::NotMine) else {
            self.rx.back(seq, at);
            return Err(came_again(at));
        };
        let place = if header.flags & FLAG_ONESHOT != 0 {
            match oneshot(seq, header.len) {
                Ok(Some(memory)) => self.oneshots.push((at, memory)),
                // The message is skipped: it cannot be received any more, and the following ones can.
                Ok(None) => return Err(sys::no_descriptor().into()),
                Err(e) => {
                    self.rx.back(seq, at);
                    return Err(e);
                }
            }
            Place::OneShot
        } else if header.flags & FLAG_INLINE != 0 {
            Place::Inline
        } else {
            // Prefetched now; the caller reads it after its batch.
            self.memory.rx_payload.prefetch(self.rx.payload_offset(at), header.len as usize, Use::Read);
            Place::Ring
        };
        *mine = Mine { seq, len: header.len, place, held: false };
        self.remember(seq, at);
        // Numbers are compared modulo 2^32: a number far behind must not appear to be ahead.
        if self.upto.is_before(seq.back(1 << 30)) {
            self.upto = seq.back(1 << 30);
        }
        give(found);
        Ok(true)
    }

    /// Queues the message for records, in the order of the sequence numbers.
    #[inline]
    fn remember(&mut self, seq: Seq, at: u32) {
        while let Some((seq, at)) = self.undecided.front().copied()
            && !self.is_undecided(seq, at)
        {
            self.undecided.pop_front();
        }
        // An honest engine goes no further than the size of its ring from an undecided frame. A hostile one could otherwise make this
        // queue grow without bound behind one frame that the client keeps.
        if self.undecided.len() >= 2 * self.mine.len() {
            let Self { undecided, mine, .. } = self;
            undecided.retain(|(seq, at)| is_undecided(mine, *seq, *at));
        }
        self.undecided.push_back((seq, at));
    }

    /// Number of messages queued for records.
    #[cfg(any(test, feature = "test-util"))]
    pub(crate) fn queued(&self) -> usize {
        self.undecided.len()
    }

    /// The payload of message `seq` at `at`, if this client has it.
    #[inline]
    pub(crate) fn payload(&self, seq: Seq, at: u32) -> Option<&[u8]> {
        let mine = self.mine.get(at as usize).filter(|mine| mine.seq == seq)?;
        let len = mine.len as usize;
        match mine.place {
            Place::Inline => Some(self.memory.theirs.lent(self.rx.inline_index(at), len)),
            Place::Ring => Some(self.memory.rx_payload.lent(self.rx.payload_offset(at), len)),
            Place::OneShot => {
                let own = self.oneshots.iter().find(|(first, _)| *first == at);
                own.map(|(_, memory)| memory.lent(0, len))
            }
            Place::NotMine => None,
        }
    }

    /// Returns true while the caller has a frame.
    pub(crate) fn has_any(&self) -> bool {
        self.mine.iter().any(|mine| mine.place != Place::NotMine)
    }

    /// Returns true if this client has message `seq` at `at`.
    #[inline]
    pub(crate) fn has(&self, seq: Seq, at: u32) -> bool {
        let mine = self.mine.get(at as usize);
        mine.is_some_and(|m| m.seq == seq && m.place != Place::NotMine)
    }

    /// Decides the message at `at` and releases it.
    #[inline]
    pub(crate) fn decide(&mut self, seq: Seq, at: u32, decision: Decision<'_>) {
        self.write_entry(at, Word::new(seq, decision), decision);
        self.give_back(at);
    }

    /// Replaces the payload of the message at `at` by that of TX frame `frame`, and sets the bits of its mark that `mask` has.
    pub(crate) fn replace(&mut self, seq: Seq, at: u32, frame: u16, (mark, mask): (u32, u32)) {
        let decision = Decision::from(Verdict::Replace(&[])).with_mark(mark, mask);
        self.write_entry(at, Word::replace(seq, frame, mask != 0), decision);
        self.give_back(at);
    }

    /// Holds the message at `at`.
    pub(crate) fn hold(&mut self, seq: Seq, at: u32) {
        self.write_entry(at, Word::new(seq, Verdict::Hold), Verdict::Hold.into());
        self.mine[at as usize].held = true;
    }

    /// Decides every undecided message received up to `upto`; returns true if there may be one.
    pub(crate) fn decide_upto(&mut self, upto: Seq, decision: Decision<'_>) -> bool {
        let received = self.rx.expected().back(1);
        let upto = if received.is_before(upto) { received } else { upto };
        if !self.upto.is_before(upto) {
            return false;
        }
        let full = self.records.is_full(&self.memory.theirs);
        while let Some((seq, at)) = self.undecided.front().copied()
            && !upto.is_before(seq)
        {
            self.undecided.pop_front();
            if !self.is_undecided(seq, at) {
                continue;
            }
            if full {
                self.write_entry(at, Word::new(seq, decision), decision);
            }
            self.give_back(at);
        }
        if !full {
            self.upto = upto;
            let word = Word::new(upto, decision);
            self.records.write(&self.memory.own, word, decision.mark, decision.mask);
        }
        true
    }

    #[inline]
    fn give_back(&mut self, at: u32) {
        let mine = &mut self.mine[at as usize];
        if mine.place == Place::OneShot {
            self.oneshots.retain(|(frame, _)| *frame != at);
        }
        mine.place = Place::NotMine;
    }

    #[inline]
    fn write_entry(&self, at: u32, word: Word, decision: Decision<'_>) {
        self.rx.release(&self.memory.own, at, word, decision.mark, decision.mask);
    }

    #[inline]
    fn is_undecided(&self, seq: Seq, at: u32) -> bool {
        is_undecided(&self.mine, seq, at)
    }
}

#[inline]
fn is_undecided(mine: &[Mine], seq: Seq, at: u32) -> bool {
    let mine = &mine[at as usize];
    mine.seq == seq && mine.place != Place::NotMine && !mine.held
}

#[cold]
fn bad_header(what: BadHeader) -> RecvError {
    RecvError::Damaged(format!("{what:?}"))
}

#[cold]
fn came_again(at: u32) -> RecvError {
    RecvError::Damaged(format!("frame {at} was published again before it was released"))
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::client::tx_ring::Way;
    use crate::engine::control_rx::ControlRx;
    use crate::engine::rings::{self, First};
    use crate::engine::tx_ring::{Next, Taken};
    use crate::handshake::attach;
    use crate::lane::producer::Entry;
    use crate::mock;
    use crate::shm::abi;
    use crate::shm::header::{Kind, Meta};
    use crate::shm::sync::Ordering;

    /// Both ends of a lane, without a channel.
    struct World {
        engine: rings::Rings,
        client: Rings,
        control: ControlRx,
        socket: OwnedFd,
    }

    /// A lane of 32 frames to the client and 16 back, 256 bytes each; `first` is the first sequence number.
    fn world(first: Seq) -> World {
        let config = mock::config();
        let numbers = First { rx: first, tx: first };
        let teardown = config.reaper.teardown(crate::reaper::PeerKey::User(0));
        let (engine, memory) = rings::Rings::make(&config, config.layout(), numbers, &teardown).unwrap();
        let fds = memory.fds().map(|fd| fd.try_clone_to_owned().unwrap());
        let memory = attach::map(config.layout(), fds).unwrap();
        let (ours, socket) = mock::sockets();
        World {
            engine,
            client: Rings::new(memory, first, first),
            control: ControlRx::new(teardown.wrap(ours), 4, 1000),
            socket,
        }
    }

    impl World {
        /// The engine publishes `bytes`; returns false without space.
        fn send(&mut self, bytes: &[u8]) -> bool {
            let Ok(room) = self.engine.rx.room(bytes.len()) else { return false };
            let offset = self.engine.rx.payload_offset(room.at);
            self.engine.payload.bytes_mut(offset, bytes.len()).copy_from_slice(bytes);
            let header = Meta::default().header(bytes.len(), 0);
            self.engine.rx.publish(&self.engine.own, room, &header, &[]);
            true
        }

        /// The next message at the client.
        fn receive(&mut self) -> Option<Found> {
            let mut found = None;
            let ready = self.client.rx.is_ready(&self.client.memory.theirs);
            let there = self.client.next(|_, _| unreachable!(), |f| found = Some(f)).unwrap();
            assert_eq!((ready, there), (found.is_some(), found.is_some()));
            found
        }

        /// The engine reads the release entries.
        fn reclaim(&mut self) {
            let rings::Rings { rx, theirs, .. } = &mut self.engine;
            let (oldest, next) = (rx.frames.oldest(), rx.frames.next_seq());
            let numbers = std::iter::successors(Some(oldest), |seq| Some(seq.next()));
            let mut out: Vec<u32> =
                numbers.take(next.since(oldest) as usize).filter_map(|seq| rx.frames.find(seq)).collect();
            out.extend(rx.frames.skipped());
            for at in out {
                match rx.entry(theirs, at) {
                    Entry::Unchanged => {}
                    Entry::Word(word) if word.is_hold() => rx.frames.hold(at),
                    Entry::Word(_) => rx.frames.release(at),
                    other => panic!("{other:?} at {at}"),
                }
            }
        }

        /// The client publishes `bytes`.
        fn reply(&mut self, bytes: &[u8]) {
            let memory = &mut self.client.memory;
            let way = Way {
                own: &memory.own,
                theirs: &memory.theirs,
                payload: &mut memory.tx_payload,
                socket: &self.socket,
                oneshot_max: 1000,
            };
            let meta = Meta { kind: Kind::MESSAGE, ..Meta::default() };
            self.client.tx.send(way, bytes, &meta).unwrap();
        }

        /// The next message at the engine, held if `hold`.
        fn take(&mut self, hold: bool) -> Option<(Seq, Taken)> {
            let rings::Rings { own, theirs, tx, .. } = &mut self.engine;
            let ready = tx.is_ready(theirs);
            match tx.next(own, theirs, &mut self.control, |_| hold).unwrap() {
                Next::Nothing => {
                    assert!(!ready);
                    None
                }
                Next::Message(found, taken) => Some((found.seq, taken)),
                Next::Missing => panic!("no payload"),
            }
        }
    }

    const BEGINS: [Seq; 3] = [Seq(u32::MAX - 3), Seq(u32::MAX - 60), Seq(0)];

    /// The client looks before each message is published, like a client that has caught up.
    #[test]
    fn a_lane_to_the_client_survives_the_wrap() {
        for (first, len) in BEGINS.into_iter().flat_map(|first| [(first, 200), (first, 300), (first, 600)]) {
            let mut w = world(first);
            let mut held = None;
            for n in 0..200u32 {
                assert!(w.receive().is_none(), "there is no message {n} yet, from {first} on");
                assert!(w.send(&vec![n as u8; len]), "room for message {n}");
                let found = w.receive().expect("the message");
                assert_eq!(found.seq, Seq(first.0.wrapping_add(n)));
                assert!(w.client.payload(found.seq, found.at) == Some(&vec![n as u8; len][..]));
                // Some messages are held for a while; the engine skips them.
                if n % 40 == 5 {
                    w.client.hold(found.seq, found.at);
                    held = Some(found);
                } else {
                    w.client.decide(found.seq, found.at, Verdict::Pass.into());
                }
                if n % 40 == 35
                    && let Some(found) = held.take()
                {
                    w.client.decide(found.seq, found.at, Verdict::Drop.into());
                }
                w.reclaim();
            }
        }
    }

    /// The same for messages of the client.
    #[test]
    fn a_lane_to_the_engine_survives_the_wrap() {
        for (first, len) in BEGINS.into_iter().flat_map(|first| [(first, 200), (first, 300), (first, 600)]) {
            let mut w = world(first);
            let mut held = None;
            for n in 0..200u32 {
                assert!(w.take(false).is_none(), "there is no message {n} yet, from {first} on");
                w.reply(&vec![n as u8; len]);
                let (seq, taken) = w.take(n % 40 == 5).expect("the message");
                assert_eq!(seq, Seq(first.0.wrapping_add(n)));
                match taken {
                    Taken::Held(frame) => held = Some(frame),
                    Taken::Copied(bytes) => assert!(bytes == vec![n as u8; len]),
                }
                if n % 40 == 35
                    && let Some(frame) = held.take()
                {
                    w.engine.tx.give_back(&w.engine.own, &frame);
                }
            }
        }
    }

    /// Repeated numbers meet notes that were written 2^32 messages before.
    #[test]
    fn a_stale_note_is_ignored() {
        let mut w = world(Seq(7));
        for n in 7..40 {
            let note = w.engine.layout.rx_notes() + (n & 31) as usize;
            w.engine.own.word(note).store(abi::note(Seq(n), (n * 5) % 32), Ordering::Release);
            assert!(w.receive().is_none(), "message {n}");
            assert!(w.send(&[1; 100]));
            let found = w.receive().expect("the message");
            assert_eq!(found.seq, Seq(n));
            w.client.decide(found.seq, found.at, Verdict::Pass.into());
            w.reclaim();
        }
    }

    /// The header after the last message was never written: messages of two frames, then one of one frame.
    #[test]
    fn an_unwritten_header_is_not_a_message() {
        let mut w = world(Seq(u32::MAX - 2));
        for len in [400, 400, 100] {
            assert!(w.send(&vec![1; len]));
            assert!(w.receive().is_some());
            w.reply(&vec![1; len]);
            assert!(w.take(false).is_some());
        }
        assert_eq!((w.client.rx.expected(), w.client.tx.next_seq()), (Seq(0), Seq(0)));
        assert!(w.receive().is_none());
        assert!(w.take(false).is_none());
    }
}
