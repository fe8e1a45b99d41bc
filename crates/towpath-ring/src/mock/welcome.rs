//! A hostile engine's handshake: welcomes and offers with any values, and any descriptors.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use super::{Input, small, sockets};
use crate::handshake::attach::{Attached, receive};
use crate::handshake::messages::{Offer, Reply, Terms, Welcome};
use crate::shm::abi::{self, Layout};
use crate::shm::park::Fences;
use crate::shm::region::{Access, Words};
use crate::shm::sync::Ordering;
use crate::shm::sys;
use crate::{Consumer, Geometry, Kind, Meta, Verdict, Worker};

/// Maximum number of lanes of a handshake.
const LANES: u64 = 4;

/// Sends the messages of a handshake to a client, ends the connection, and uses the rings that the client has accepted.
pub(crate) fn run(input: &mut Input<'_>) {
    let (engine, client) = sockets();
    say(input, &engine);
    // The client never waits for a further message.
    drop(engine);
    let Ok(lanes) = receive(client, Path::new("hostile"), Fences::Both) else { return };
    use_rings(lanes);
}

/// Sends the messages of a handshake, with contents from the fuzzer.
pub(crate) fn say(input: &mut Input<'_>, engine: &OwnedFd) {
    let layout = layout(input);
    let lanes = 1 + input.below(LANES) as u32;
    let said = if input.below(8) == 0 { input.number(4) as u32 } else { lanes };
    let terms = Terms {
        layout,
        lanes: said,
        oneshot_max: input.any(70, 9000),
        replacement_max: input.any(70, 9000) as u32,
        fences: if input.below(2) == 0 { Fences::Both } else { Fences::Membarrier },
        messages: true,
    };
    let welcome = Welcome { version: abi::VERSION, answer: Reply::Attached(terms) };
    send(engine, damaged(input, welcome.emit().to_vec()), descriptors(input, &layout, 4));
    for lane in 1..lanes {
        let lane = if input.below(8) == 0 { input.number(4) as u32 } else { lane };
        let layout = if input.below(4) == 0 { self::layout(input) } else { layout };
        send(engine, damaged(input, Offer { lane, layout }.emit().to_vec()), descriptors(input, &layout, 5));
    }
}

fn use_rings(lanes: Vec<Attached>) {
    let mut consumer = Consumer::over(lanes);
    let meta = Meta { kind: Kind::MESSAGE, ..Meta::default() };
    let _ = consumer.try_send(&[1; 100], &meta);
    let _ = (consumer.overrun(), consumer.has_room(10));
    while let Ok(Some(frame)) = consumer.try_recv() {
        std::hint::black_box(consumer.payload(&frame).iter().map(|b| u64::from(*b)).sum::<u64>());
        consumer.verdict(frame, Verdict::Pass);
    }
    let mut worker = Worker::over(consumer);
    while let Ok(Some(message)) = worker.try_recv() {
        std::hint::black_box(worker.payload(&message).len());
        worker.done(message);
    }
}

/// A small layout, or one with any values.
fn layout(input: &mut Input<'_>) -> Layout {
    let mut layout = Layout { rx: small(32), tx: small(16), records: 4 };
    if input.below(4) == 0 {
        let area = if input.below(2) == 0 { &mut layout.rx } else { &mut layout.tx };
        let Geometry { block_size, block_nr, frame_size, frame_nr } = area;
        let field = [block_size, block_nr, frame_size, frame_nr, &mut layout.records];
        let which = input.below(5) as usize;
        let value = match input.below(3) {
            0 => input.number(4) as u32,
            1 => 1 << input.below(32),
            _ => input.below(70) as u32,
        };
        for (index, field) in field.into_iter().enumerate() {
            if index == which {
                *field = value;
            }
        }
    }
    layout
}

/// Four memories that the client accepts, usually; some of them wrong, too few or too many.
fn descriptors(input: &mut Input<'_>, layout: &Layout, count: usize) -> Vec<OwnedFd> {
    let wrong = input.below(8) as usize;
    let count = if input.below(8) == 0 { input.below(sys::MAX_FDS as u64 + 1) as usize } else { count };
    // Layouts with huge values are refused before the memory is looked at.
    let bytes = match layout.check() {
        Ok(()) => [layout.engine_bytes(), layout.rx.bytes(), layout.client_bytes(), layout.tx.bytes()],
        Err(_) => [4096; 4],
    };
    (0..count)
        .map(|index| {
            let Some(bytes) = bytes.get(index).copied() else { return sockets().0 };
            let (how, size) = match (index == wrong).then(|| input.below(6)) {
                None => (0, bytes),
                // Shorter or longer than the layout says.
                Some(1) => (0, bytes / 2),
                Some(2) => (0, bytes + 4096),
                Some(how) => (how, bytes),
            };
            let memory = sys::memfd("hostile", size.clamp(1, 1 << 22)).unwrap();
            match how {
                // It can shrink.
                3 => return memory,
                4 => return std::fs::File::open("/dev/null").unwrap().into(),
                5 => return sockets().1,
                _ => {}
            }
            if index == 0 && size == bytes && size <= 1 << 22 {
                fill(&memory, size, input);
            }
            sys::seal(&memory, if index < 2 { sys::READ_ONLY } else { sys::WRITABLE }).unwrap();
            memory
        })
        .collect()
}

/// Writes the magic number and some words of the engine's memory.
fn fill(memory: &OwnedFd, bytes: usize, input: &mut Input<'_>) {
    let words = Words::map(memory.as_fd(), bytes, Access::Own).unwrap();
    for _ in 0..input.below(16) {
        words.word(input.number(2) as usize % (bytes / 8)).store(input.any(70, 9000), Ordering::Relaxed);
    }
    if input.below(8) > 0 {
        words
            .word(abi::IDENT)
            .store(u64::from(abi::MAGIC) | u64::from(abi::VERSION) << 32, Ordering::Relaxed);
    }
}

/// Changes some bytes of a message, or its length.
fn damaged(input: &mut Input<'_>, mut message: Vec<u8>) -> Vec<u8> {
    if input.below(8) == 0 {
        let at = input.below(64) as usize;
        message[at] = input.number(1) as u8;
    }
    if input.below(8) == 0 {
        message.truncate(1 + input.below(64) as usize);
    }
    message
}

fn send(socket: &OwnedFd, message: Vec<u8>, fds: Vec<OwnedFd>) {
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let _ = sys::send(socket, &message, &fds);
}
