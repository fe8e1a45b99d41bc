//! A hostile engine: writes arbitrary words to all memory that it may write, and any messages to the socket.
//!
//! The harness checks that the client library neither panics nor reads outside of the memory, that each call returns, and
//! that the memory which the client uses stays bounded.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::{Input, small, sockets};
use crate::handshake::attach::{Attached, Memory};
use crate::handshake::messages::Notice;
use crate::shm::abi::{self, ENTRY_WORDS, HEADER_WORDS, Layout};
use crate::shm::park::Fences;
use crate::shm::region::{Access, Payload, Words};
use crate::shm::sys;
use crate::{Consumer, FrameId, Kind, Meta, Seq, Verdict};

/// Frames of the ring to the client.
const FRAMES: u32 = 32;

/// One lane at the hostile engine.
pub(crate) struct HostileLane {
    pub(crate) socket: OwnedFd,
    /// Memory that the engine writes.
    pub(crate) own: Words,
    /// Payloads, in memory that the engine writes.
    #[cfg(test)]
    pub(crate) payload: Payload,
    /// Memory that the client writes.
    #[cfg(test)]
    pub(crate) theirs: Words,
    pub(crate) layout: Layout,
}

/// A hostile engine with `lanes` lanes, and the memory that a client has mapped.
pub(crate) fn engine(lanes: u32) -> (Vec<HostileLane>, Vec<Attached>) {
    (0..lanes).map(|_| lane()).unzip()
}

fn lane() -> (HostileLane, Attached) {
    let layout = Layout { rx: small(FRAMES), tx: small(16), records: 4 };
    let memory = |bytes| sys::memfd("test", bytes).unwrap();
    let (engine, rx, client, tx) = (
        memory(layout.engine_bytes()),
        memory(layout.rx.bytes()),
        memory(layout.client_bytes()),
        memory(layout.tx.bytes()),
    );
    let words = |fd: &OwnedFd, bytes, access| Words::map(fd.as_fd(), bytes, access).unwrap();
    let payload = |fd: &OwnedFd, bytes, access| Payload::map(fd.as_fd(), bytes, access).unwrap();
    let (socket, theirs) = sockets();
    let attached = Attached {
        socket: theirs,
        oneshot_max: 20_000,
        replacement_max: 4000,
        fences: Fences::Both,
        messages: true,
        memory: Memory {
            layout,
            theirs: words(&engine, layout.engine_bytes(), Access::Lent),
            own: words(&client, layout.client_bytes(), Access::Own),
            rx_payload: payload(&rx, layout.rx.bytes(), Access::Lent),
            tx_payload: payload(&tx, layout.tx.bytes(), Access::Own),
        },
    };
    let hostile = HostileLane {
        socket,
        own: words(&engine, layout.engine_bytes(), Access::Own),
        #[cfg(test)]
        payload: payload(&rx, layout.rx.bytes(), Access::Own),
        #[cfg(test)]
        theirs: words(&client, layout.client_bytes(), Access::Foreign),
        layout,
    };
    (hostile, attached)
}

impl HostileLane {
    /// Writes a header: message `seq` at frame `at`.
    pub(crate) fn publish(&self, at: u32, seq: u32, kind: Kind, flags: u16, len: u32) {
        let header = self.layout.rx_headers() + at as usize * HEADER_WORDS;
        let word = u64::from(len) | u64::from(kind.0) << 32 | u64::from(flags) << 48;
        self.own.word(header + 1).store(word, Ordering::Relaxed);
        self.own.word(header).store(seq.into(), Ordering::Release);
    }

    /// Writes a header with a mark, and no flags.
    #[cfg(test)]
    pub(crate) fn publish_marked(&self, at: u32, seq: u32, kind: Kind, len: u32, mark: u32) {
        let header = self.layout.rx_headers() + at as usize * HEADER_WORDS;
        self.own.word(header + 4).store(mark.into(), Ordering::Relaxed);
        self.publish(at, seq, kind, 0, len);
    }

    /// Writes the note that message `seq` is in frame `at`.
    pub(crate) fn note(&self, seq: u32, at: u32) {
        let index = (seq & (FRAMES - 1)) as usize;
        self.own.word(self.layout.rx_notes() + index).store(abi::note(Seq(seq), at), Ordering::Release);
    }

    /// The message that the release entry of frame `at` is for.
    #[cfg(test)]
    pub(crate) fn released(&self, at: u32) -> u32 {
        let entry = self.layout.rx_entries() + at as usize * ENTRY_WORDS + 1;
        self.theirs.word(entry).load(Ordering::Acquire) as u32
    }

    /// Releases a TX frame: frame, number, verdict.
    fn release(&self, at: u32, seq: u32, verdict: u8) {
        let entry = self.layout.tx_entries() + at as usize * ENTRY_WORDS + 1;
        self.own.word(entry).store(u64::from(seq) | u64::from(verdict) << 32, Ordering::Release);
    }
}

/// An operation of the hostile engine or of its client.
#[derive(Clone, Debug)]
pub(crate) enum EngineOp {
    /// Writes any word.
    Word(usize, u64),
    /// Writes a header: frame, number, length, flags.
    Header(u32, u32, u32, u16),
    Note(u32, u32),
    /// Releases a TX frame: frame, number, verdict.
    Release(u32, u32, u8),
    /// Announces a one-shot message: number, length, and a frozen memfd, a memfd that can shrink, another file, or none.
    Notice(u32, u64, u8),
    Message(Vec<u8>),
    Recv,
    RecvBatch(usize),
    RecvTimeout,
    Verdict(usize),
    Hold(usize),
    Replace(usize, usize),
    Upto(u32),
    All,
    Send(usize),
    /// Asks for everything that the engine's words decide: lost frames, room, readiness, end, shared CPU.
    Look,
}

impl EngineOp {
    pub(crate) fn decode(i: &mut Input<'_>) -> Option<Self> {
        if i.0.is_empty() {
            return None;
        }
        Some(match i.below(40) {
            0..2 => Self::Word(i.number(4) as usize, i.number(8)),
            2..10 => {
                Self::Header(i.below(32) as u32, i.below(3) as u32, i.any(70, 9000) as u32, i.below(8) as u16)
            }
            10..12 => Self::Note(i.below(3) as u32, i.below(40) as u32),
            12 => Self::Notice(i.below(3) as u32, i.any(70, 200), i.below(4) as u8),
            13 => Self::Message(i.bytes(40)),
            14..20 => Self::Recv,
            20..23 => Self::Verdict(i.number(1) as usize),
            23 => Self::Hold(i.number(1) as usize),
            24..26 => Self::Replace(i.number(1) as usize, i.below(5000) as usize),
            26..28 => Self::Upto(i.number(1) as u32),
            28..30 => Self::Release(i.below(16) as u32, i.below(24) as u32, i.below(9) as u8),
            30..33 => Self::Send(i.below(9000) as usize),
            33..35 => Self::RecvBatch(i.below(40) as usize),
            35 => Self::RecvTimeout,
            36 => Self::All,
            _ => Self::Look,
        })
    }
}

/// The operations, on the raw memory of an engine's last lane and the client library.
pub(crate) fn run_engine(lanes: u32, ops: impl IntoIterator<Item = EngineOp>) {
    let (mut hostile, attached) = engine(lanes);
    let mut client = Consumer::over(attached);
    client.set_send_timeout(Some(Duration::ZERO));
    // Doorbells ring at the first lane's socket; one-shot messages come on the lane's own.
    let lane = hostile.pop().expect("a lane");
    let HostileLane { socket, own, layout, .. } = &lane;
    let number = lanes - 1;
    let mut frames = Vec::new();
    let mut expected = 1u32;
    let mut at_next = 0;
    for op in ops {
        match op {
            EngineOp::Word(i, w) => own.word(i % (layout.engine_bytes() / 8)).store(w, Ordering::Relaxed),
            EngineOp::Header(at, ahead, len, flags) => {
                // Usually at the position that the client reads next.
                let at = if ahead == 0 { at_next } else { at };
                lane.publish(at, expected.wrapping_add(ahead), Kind(0), flags, len);
            }
            EngineOp::Note(ahead, at) => lane.note(expected.wrapping_add(ahead), at),
            EngineOp::Release(at, seq, verdict) => lane.release(at, seq, verdict),
            EngineOp::Notice(ahead, len, what) => {
                let fd = match what {
                    0 | 3 => sys::frozen(&[1; 100]).unwrap(),
                    1 => sys::memfd("hostile", 100).unwrap(),
                    _ => std::fs::File::open("/dev/null").unwrap().into(),
                };
                let notice = Notice::OneShot { seq: Seq(expected.wrapping_add(ahead)), len };
                let fds = [fd.as_fd()];
                let _ = sys::send(socket, &notice.emit(), if what == 3 { &[] } else { &fds });
            }
            EngineOp::Message(bytes) => {
                let _ = sys::send(socket, &bytes, &[]);
            }
            EngineOp::Recv | EngineOp::RecvBatch(_) | EngineOp::RecvTimeout => {
                let before = frames.len();
                let _ = match op {
                    EngineOp::RecvTimeout => {
                        client.recv_timeout(Duration::ZERO).map(|frame| frames.extend(frame))
                    }
                    // Waits for the first frame: only if one is there.
                    EngineOp::RecvBatch(max) => {
                        let ready = !client.arm() && !client.is_ended();
                        let _ = client.disarm();
                        if ready { client.recv_batch(&mut frames, max).map(drop) } else { Ok(()) }
                    }
                    _ => client.try_recv().map(|frame| frames.extend(frame)),
                };
                for frame in &frames[before..] {
                    let payload = client.payload(frame);
                    assert_eq!(payload.len(), frame.header().len as usize);
                    // Reads every byte: an address outside the mapping would crash the test.
                    std::hint::black_box(payload.iter().map(|b| u64::from(*b)).sum::<u64>());
                    if frame.id().lane == number {
                        expected = frame.seq().0.wrapping_add(1);
                        at_next = (at_next + layout.rx.frames_for(payload.len()) as u32) % FRAMES;
                    }
                }
            }
            EngineOp::Verdict(i) if !frames.is_empty() => {
                let frame = frames.swap_remove(i % frames.len());
                client.verdict(frame, Verdict::Pass);
            }
            EngineOp::Hold(i) if !frames.is_empty() => client.hold(&frames[i % frames.len()]),
            EngineOp::Replace(i, len) if !frames.is_empty() => {
                let frame = frames.swap_remove(i % frames.len());
                if let Err(not) = client.try_replace(frame, &vec![1; len]) {
                    frames.push(not.frame);
                }
            }
            EngineOp::Upto(seq) => {
                let upto = FrameId { lane: number, seq: Seq(expected.wrapping_sub(1 + seq % 8)) };
                client.verdict_upto(upto, Verdict::Drop);
                let _ = client.disarm();
                frames.retain(|f| client.has(f));
            }
            EngineOp::All => {
                client.verdict_all(Verdict::Pass);
                frames.retain(|f| client.has(f));
            }
            EngineOp::Send(len) => {
                let meta = Meta { kind: Kind::MESSAGE, ..Meta::default() };
                let _ = client.try_send(&vec![7; len], &meta);
                let _ = client.send(&vec![7; len], &meta);
            }
            EngineOp::Look => {
                let _ = (client.overrun(), client.has_room(300), client.is_ended(), client.stats());
                let _ = client.arm();
                let _ = client.disarm();
            }
            _ => {}
        }
        assert!(client.queued() <= (2 * FRAMES * lanes) as usize, "the queue for records is not bounded");
        assert!(frames.len() <= (FRAMES * lanes) as usize, "more frames than the ring has");
    }
}
