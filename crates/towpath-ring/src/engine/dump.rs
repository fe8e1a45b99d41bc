//! Dumps: answers of any size, in frames, that do not delay other frames.
//!
//! A step publishes parts while at least half of the ring is free (the rule of netlink_dump_space, Linux commit
//! cd1df525); the next step continues. The last frame is DONE, and is marked if the data changed during the dump.
//! Each channel has one dump at a time.

use crate::engine::channel::Channel;
use crate::lane::loss_record::Loss;
use crate::lane::reserve_error::ReserveError;
use crate::shm::header::{FLAG_INLINE, FLAG_INTERRUPTED, Kind, Meta};

/// EBUSY of errno(3).
const EBUSY: u32 = 16;

/// Source of a dump.
pub trait Source {
    /// Appends the next part to `into`, which is empty. Returns false at the end.
    fn next(&mut self, into: &mut Vec<u8>) -> bool;

    /// A number that changes with the data.
    fn generation(&self) -> u64;
}

/// A dump in progress.
#[derive(Debug)]
pub(crate) struct Dump {
    group: u32,
    generation: Option<u64>,
    interrupted: bool,
    /// A part that found no space.
    part: Vec<u8>,
    pending: bool,
}

/// State of a dump.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The channel has no dump.
    Idle,
    /// The dump continues when the client has released frames.
    Running,
    /// DONE was sent.
    Done,
}

/// The channel has a dump already (EBUSY); the client was informed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this channel already has a dump")]
pub struct Busy;

impl Channel {
    /// Begins a dump of `group`; [`dump`](Self::dump) sends it.
    ///
    /// # Errors
    /// [`Busy`]: the channel has a dump already. The client gets a frame of [`Kind::ERROR`] with EBUSY.
    pub fn begin_dump(&mut self, group: u32) -> Result<(), Busy> {
        if self.dump.is_some() {
            let meta = Meta { kind: Kind::ERROR, group, mark: EBUSY, ..Meta::default() };
            if self.send(&[], &meta).is_err() {
                self.lose(Loss::NoRoom);
            }
            return Err(Busy);
        }
        self.dump =
            Some(Dump { group, generation: None, interrupted: false, part: Vec::new(), pending: false });
        Ok(())
    }

    /// Sends as much of the dump as the ring permits. Call it again whenever [`poll_verdicts`](Self::poll_verdicts)
    /// has released frames, until it returns [`Progress::Done`].
    pub fn dump(&mut self, source: &mut dyn Source) -> Progress {
        let Some(mut dump) = self.dump.take() else { return Progress::Idle };
        let generation = source.generation();
        dump.interrupted |= *dump.generation.get_or_insert(generation) != generation;
        let meta = Meta { kind: Kind::DUMP, group: dump.group, ..Meta::default() };
        let half = self.rings.rx.frames.frame_nr().div_ceil(2);
        while self.rings.rx.frames.free() >= half {
            if !dump.pending {
                dump.part.clear();
                if !source.next(&mut dump.part) {
                    dump.interrupted |= source.generation() != generation;
                    return self.done(dump);
                }
            }
            match self.send(&dump.part, &meta) {
                Ok(_) => dump.pending = false,
                // The part never fits: a loss record reports it to the client.
                Err(ReserveError::TooLarge) => {
                    self.lose(Loss::TooLarge);
                    dump.pending = false;
                }
                Err(
                    ReserveError::RingFull
                    | ReserveError::NoContiguousSpace
                    | ReserveError::Disconnected
                    | ReserveError::Interrupted,
                ) => {
                    dump.pending = true;
                    break;
                }
            }
        }
        dump.interrupted |= source.generation() != generation;
        self.dump = Some(dump);
        Progress::Running
    }

    fn done(&mut self, dump: Dump) -> Progress {
        let Ok(room) = self.room(0) else {
            self.dump = Some(dump);
            return Progress::Running;
        };
        let interrupted = if dump.interrupted { FLAG_INTERRUPTED } else { 0 };
        let meta = Meta { kind: Kind::DONE, group: dump.group, ..Meta::default() };
        self.publish(room, 0, FLAG_INLINE | interrupted, &meta, &[]);
        Progress::Done
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Config, Consumer, Endpoint, Geometry, Verdict};

    struct Numbers {
        next: u32,
        end: u32,
        generation: u64,
    }

    impl Source for Numbers {
        fn next(&mut self, into: &mut Vec<u8>) -> bool {
            if self.next == self.end {
                return false;
            }
            into.extend_from_slice(&[self.next as u8; 100]);
            self.next += 1;
            true
        }

        fn generation(&self) -> u64 {
            self.generation
        }
    }

    fn pair() -> (tempfile::TempDir, Channel, Consumer) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let rx = Geometry { block_size: 4096, block_nr: 1, frame_size: 256, frame_nr: 16 };
        let mut endpoint =
            Endpoint::bind(&path, Config { rx, messages: true, deadline: None, ..Config::default() })
                .unwrap();
        let client = std::thread::spawn(move || Consumer::attach_as(path, "c").unwrap());
        let channel = loop {
            endpoint.wait(None).unwrap();
            if let Some(channel) = endpoint.accept().unwrap() {
                break channel;
            }
        };
        (dir, channel, client.join().unwrap())
    }

    /// Receives every frame: kind, first byte, whether it is marked.
    fn drain(client: &mut Consumer, channel: &mut Channel) -> Vec<(Kind, Option<u8>, bool)> {
        let mut got = Vec::new();
        while let Some(frame) = client.try_recv().unwrap() {
            assert_eq!(frame.header().group, 7);
            got.push((
                frame.header().kind,
                client.payload(&frame).first().copied(),
                frame.header().interrupted(),
            ));
            client.verdict(frame, Verdict::Pass);
        }
        channel.poll_verdicts(0, |_, _| {});
        got
    }

    #[test]
    fn a_dump_leaves_half_of_the_ring_free_and_continues() {
        for change in [false, true] {
            let (_dir, mut channel, mut client) = pair();
            client.request(7, b"").unwrap();
            let mut asked = Vec::new();
            channel.poll_messages(|h, _| asked.push((h.kind, h.group)));
            assert_eq!(asked, [(Kind::REQUEST, 7)]);
            let mut source = Numbers { next: 0, end: 20, generation: 1 };
            assert_eq!(channel.dump(&mut source), Progress::Idle);
            channel.begin_dump(7).unwrap();
            let mut got = Vec::new();
            let mut steps = 0;
            while channel.dump(&mut source) == Progress::Running {
                // 16 frames: at 8 free ones the last part is sent.
                assert_eq!(channel.held(), 9);
                assert_eq!(channel.dump(&mut source), Progress::Running);
                assert_eq!(channel.held(), 9, "no more until something has come back");
                source.generation += u64::from(change);
                got.extend(drain(&mut client, &mut channel));
                steps += 1;
            }
            got.extend(drain(&mut client, &mut channel));
            assert_eq!(steps, 2);
            let mut expected: Vec<_> = (0..20).map(|n| (Kind::DUMP, Some(n), false)).collect();
            expected.push((Kind::DONE, None, change));
            assert_eq!(got, expected);
            assert_eq!(channel.dump(&mut source), Progress::Idle);
        }
    }

    #[test]
    fn a_second_dump_is_busy() {
        let (_dir, mut channel, mut client) = pair();
        channel.begin_dump(7).unwrap();
        assert_eq!(channel.begin_dump(7), Err(Busy));
        assert_eq!(drain(&mut client, &mut channel), [(Kind::ERROR, None, false)]);
        let mut source = Numbers { next: 0, end: 0, generation: 1 };
        assert_eq!(channel.dump(&mut source), Progress::Done);
        channel.begin_dump(7).unwrap();
    }
}
