//! Every interleaving and every reordering that the memory model permits, explored by loom:
//! `RUSTFLAGS="--cfg loom" cargo test -p towpath-ring --lib --release model`

use std::sync::Arc;

use loom::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use loom::thread;

use crate::lane::consumer::Consumer;
use crate::lane::producer::{Entry, Producer};
use crate::lane::records;
use crate::lane::verdict::{Verdict, Word};
use crate::shm::abi::{RecordsPlace, RingPlace};
use crate::shm::geometry::Geometry;
use crate::shm::header::{Credentials, Header, Kind, Layers, Meta};
use crate::shm::park::{Fences, Ringer, Sleeper};
use crate::shm::region::Words;
use crate::shm::seq::Seq;

const FRAME_NR: u32 = 2;
const HEADERS: usize = 0;
const NOTES: usize = HEADERS + FRAME_NR as usize * crate::shm::abi::HEADER_WORDS;
const ENTRIES: usize = 0;
const SLEEP: usize = 4;

struct Shared {
    /// The producer's memory.
    ours: Words,
    /// The consumer's memory.
    theirs: Words,
}

fn shared() -> Arc<Shared> {
    Arc::new(Shared { ours: Words::heap(NOTES + 2), theirs: Words::heap(SLEEP + 1) })
}

fn geometry() -> Geometry {
    Geometry { block_size: 4096, block_nr: 1, frame_size: 64, frame_nr: FRAME_NR }
}

fn place() -> RingPlace {
    RingPlace { geometry: geometry(), headers: HEADERS, notes: NOTES, entries: ENTRIES }
}

fn producer() -> Producer {
    Producer::new(place(), Seq::FIRST)
}

fn consumer() -> Consumer {
    Consumer::new(place(), Seq::FIRST)
}

/// The header of message `n`. Every field depends on `n`.
fn header(n: u32) -> Header {
    let meta = Meta { kind: Kind(n as u16), time: n.into(), mark: n, port: n, group: n, ..Meta::default() };
    meta.header(n as usize, crate::shm::header::FLAG_INLINE)
}

fn publish(producer: &mut Producer, shared: &Shared) -> Option<Seq> {
    let room = producer.room(1).ok()?;
    let n = producer.frames.next_seq().0;
    Some(producer.publish(&shared.ours, room, &header(n), &[n as u8]))
}

fn pass(seq: Seq) -> Word {
    Word::new(seq, Verdict::Pass)
}

fn hold(seq: Seq) -> Word {
    Word::new(seq, Verdict::Hold)
}

/// The consumer sees complete messages, and a frame is not written again before it is released.
#[test]
fn a_frame_is_seen_whole_and_reused_after_release() {
    loom::model(|| {
        let shared = shared();
        let client = {
            let shared = shared.clone();
            thread::spawn(move || {
                let mut consumer = consumer();
                for _ in 0..2 {
                    let Some(found) = consumer.next(&shared.ours).expect("a valid header") else { continue };
                    let n = found.seq.0;
                    assert_eq!(found.header, header(n));
                    assert_eq!(consumer.inline(&shared.ours, found.at)[0], n as u8);
                    consumer.release(&shared.theirs, found.at, pass(found.seq), n, !n);
                }
            })
        };
        let mut producer = producer();
        publish(&mut producer, &shared);
        publish(&mut producer, &shared);
        for at in 0..FRAME_NR {
            if let Entry::Word(word) = producer.entry(&shared.theirs, at) {
                assert_eq!(producer.mark(&shared.theirs, at), (word.seq.0, !word.seq.0));
                producer.frames.release(at);
            }
        }
        // Publishes into a released frame: the consumer must not read it any more.
        publish(&mut producer, &shared);
        client.join().unwrap();
    });
}

/// The producer skips a held frame; the consumer finds the messages published after it.
#[test]
fn a_note_leads_to_the_frame() {
    loom::model(|| {
        let shared = shared();
        let mut producer = producer();
        let mut consumer = consumer();
        // Frame 0 is held and frame 1 is released: message 3 is in frame 1 instead of frame 0.
        publish(&mut producer, &shared);
        publish(&mut producer, &shared);
        let first = consumer.next(&shared.ours).unwrap().unwrap();
        consumer.release(&shared.theirs, first.at, hold(first.seq), 0, 0);
        let second = consumer.next(&shared.ours).unwrap().unwrap();
        consumer.release(&shared.theirs, second.at, pass(second.seq), 0, 0);
        assert!(matches!(producer.entry(&shared.theirs, 0), Entry::Word(w) if w.is_hold()));
        producer.frames.hold(0);
        assert!(matches!(producer.entry(&shared.theirs, 1), Entry::Word(_)));
        producer.frames.release(1);
        let client = {
            let shared = shared.clone();
            thread::spawn(move || {
                if let Some(found) = consumer.next(&shared.ours).expect("a valid header") {
                    assert_eq!((found.seq, found.at, found.header), (Seq(3), 1, header(3)));
                }
                consumer
            })
        };
        assert_eq!(publish(&mut producer, &shared), Some(Seq(3)));
        let consumer = client.join().unwrap();
        assert!(consumer.expected() == Seq(4) || consumer.is_ready(&shared.ours));
    });
}

/// A reader that sees a record sees the single verdicts given before it. A slot is written again only after it was read.
#[test]
fn a_record_is_visible_after_earlier_verdicts() {
    // After the entries: the counter, then two records; and the producer's counter of records taken.
    let place = RecordsPlace { ring: SLEEP + 2, records: 2, written: SLEEP + 1, taken: NOTES + 2 };
    loom::model(move || {
        let shared = Arc::new(Shared {
            ours: Words::heap(NOTES + 3),
            theirs: Words::heap(place.ring + 2 * crate::shm::abi::ENTRY_WORDS),
        });
        let mut producer = producer();
        publish(&mut producer, &shared);
        publish(&mut producer, &shared);
        let client = {
            let shared = shared.clone();
            thread::spawn(move || {
                let mut writer = records::Writer::new(place);
                let drop = Word::new(Seq(1), Verdict::Drop);
                consumer().release(&shared.theirs, 0, drop, 0, 0);
                for n in 2..=4 {
                    if !writer.is_full(&shared.ours) {
                        writer.write(&shared.theirs, pass(Seq(n)), n, !n);
                    }
                }
            })
        };
        let mut reader = records::Reader::new(place);
        let mut expected = 2;
        for _ in 0..2 {
            let count = reader.look(&shared.theirs).expect("a valid count");
            if expected == 2 && count > 0 {
                let first = producer.entry(&shared.theirs, 0);
                assert!(
                    matches!(first, Entry::Word(w) if w == Word::new(Seq(1), Verdict::Drop)),
                    "{first:?}"
                );
            }
            for _ in 0..count {
                let (mark, word) = reader.peek(&shared.theirs);
                reader.step();
                assert_eq!(word, pass(Seq(expected)).emit());
                assert_eq!(mark, u64::from(expected) | u64::from(!expected) << 32);
                expected += 1;
            }
            reader.acknowledge(&shared.ours);
        }
        client.join().unwrap();
    });
}

/// A side that publishes while the other side falls asleep rings the doorbell, or the sleeper's second check sees the publication. Both
/// sides use this protocol.
#[test]
fn no_wake_up_is_lost() {
    for fences in [Fences::Both, Fences::Membarrier] {
        no_wake_up_is_lost_with(fences);
    }
}

fn no_wake_up_is_lost_with(fences: Fences) {
    loom::model(move || {
        let shared = shared();
        let rang = Arc::new(AtomicBool::new(false));
        let client = {
            let shared = shared.clone();
            thread::spawn(move || {
                let mut sleeper = Sleeper::new(SLEEP, fences);
                let consumer = consumer();
                !sleeper.arm([&shared.theirs]) || consumer.is_ready(&shared.ours)
            })
        };
        let mut producer = producer();
        let ringer = Ringer::new(SLEEP, fences, Arc::default());
        publish(&mut producer, &shared);
        if ringer.should_ring(&shared.theirs) {
            rang.store(true, Ordering::Relaxed);
        }
        let stays_awake = client.join().unwrap();
        assert!(stays_awake || rang.load(Ordering::Relaxed), "asleep without a doorbell");
        // And one doorbell per sleep.
        if rang.load(Ordering::Relaxed) {
            assert!(!ringer.should_ring(&shared.theirs));
        }
    });
}

/// A client sleeps for two lanes, on which two threads publish: exactly one of the threads rings, and the client wakes.
#[test]
fn one_doorbell_wakes_a_sleeper_of_two_lanes() {
    loom::model(|| {
        let lanes = [shared(), shared()];
        let answered = crate::shm::park::Answered::default();
        let rang = Arc::new(AtomicUsize::new(0));
        let threads = lanes.clone().map(|shared| {
            let (answered, rang) = (answered.clone(), rang.clone());
            thread::spawn(move || {
                publish(&mut producer(), &shared);
                if Ringer::new(SLEEP, Fences::Both, answered).should_ring(&shared.theirs) {
                    rang.fetch_add(1, Ordering::Relaxed);
                }
            })
        });
        let mut sleeper = Sleeper::new(SLEEP, Fences::Both);
        let consumer = consumer();
        let awake = !sleeper.arm(lanes.iter().map(|shared| &shared.theirs))
            || lanes.iter().any(|shared| consumer.is_ready(&shared.ours));
        for thread in threads {
            thread.join().unwrap();
        }
        let rang = rang.load(Ordering::Relaxed);
        assert!(awake || rang == 1, "rung {rang} times");
        assert!(rang <= 1);
    });
}
