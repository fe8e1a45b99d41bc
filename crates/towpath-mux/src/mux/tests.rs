//! The harness under random, simulated and all short sequences. The modules test bounds, timers and ends one
//! by one.

mod batches;
mod bounds;
mod ends;
mod fairness;
mod opened;
mod parts;
mod workers;

use std::time::Duration;

use proptest::prelude::*;

use super::world::{Op, World};
use super::*;
use crate::assembler::Limits;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn any_operations_satisfy_the_model(kind in any::<u8>(), ops in prop::collection::vec(any::<Op>(), 0..120)) {
        World::run(kind, ops);
    }
}

/// One run of the simulation, determined by the seed. xorshift64* (Vigna 2016).
fn simulate(seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32
    };
    let kind = next() as u8;
    let length = next() % 200;
    // Start with a connection and a worker.
    let start: [Op; 4] = [[0, 0, 0], [6, 0, 4], [0, 0, 0], [6, 0, 0]];
    let ops = (0..length).map(|_| {
        let [act, target, much, ..] = next().to_le_bytes();
        [act, target, much]
    });
    World::run(kind, start.into_iter().chain(ops));
}

/// `TOWPATH_SEEDS`: number of worlds; `TOWPATH_SEED`: first seed.
#[test]
fn simulation() {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse().ok());
    let (first, count) = (number("TOWPATH_SEED").unwrap_or(1), number("TOWPATH_SEEDS").unwrap_or(5000));
    let threads = std::thread::available_parallelism().map_or(1, |threads| threads.get() as u64);
    std::thread::scope(|scope| {
        for thread in 0..threads {
            scope.spawn(move || {
                for seed in (first + thread..first + count).step_by(threads as usize) {
                    if let Err(panic) = std::panic::catch_unwind(|| simulate(seed)) {
                        eprintln!("repeat with TOWPATH_SEED={seed} TOWPATH_SEEDS=1");
                        std::panic::resume_unwind(panic);
                    }
                }
            });
        }
    });
}

/// Every sequence of four operations in each order, starting with one connection and one worker.
#[test]
fn every_small_case() {
    const OPS: [Op; 15] = [
        [0, 0, 0],
        [1, 0, 11],
        [2, 0, 0],
        [3, 0, 0],
        [4, 0, 0],
        [5, 0, 0],
        [6, 0, 4],
        [7, 0, 0],
        [8, 0, 0],
        [9, 0, 1],
        [10, 0, 0],
        [11, 0, 0],
        [13, 0, 0],
        [14, 0, 9],
        [16, 0, 3],
    ];
    let start: [Op; 4] = [[0, 0, 0], [6, 0, 4], [1, 0, 30], [10, 0, 0]];
    let count = OPS.len().pow(4);
    for kind in 0..10 {
        for case in 0..count {
            let ops = (0..4).map(|at| OPS[case / OPS.len().pow(at) % OPS.len()]);
            World::run(kind, start.into_iter().chain(ops));
        }
    }
}

fn at(millis: u64) -> Time {
    Time::from_secs(1) + Duration::from_millis(millis)
}

fn lines(config: Config) -> (Mux, psock::Id) {
    let mut mux = Mux::new(config);
    let psock = attach(&mut mux);
    (mux, psock)
}

fn attach(mux: &mut Mux) -> psock::Id {
    let limits = Limits {
        message: 1 << 16,
        head_time: Some(Duration::from_millis(100)),
        body_time: Some(Duration::from_millis(100)),
        ..Limits::default()
    };
    mux.attach("line".parse().expect("a framing"), limits, at(0)).expect("it does not drain")
}

fn poll(mux: &mut Mux, worker: worker::Id, now: Time) -> Vec<String> {
    let mut batch = Vec::new();
    mux.poll_messages(worker, now, &mut batch);
    batch.iter().map(|message| String::from_utf8_lossy(message.payload()).into_owned()).collect()
}

/// All events but changes of interest.
fn events(mux: &mut Mux) -> Vec<Event> {
    let events = std::iter::from_fn(|| mux.poll_event());
    events.filter(|event| !matches!(event, Event::Interest(_))).collect()
}

fn end(mux: &mut Mux) -> Option<End> {
    events(mux).into_iter().find_map(|event| match event {
        Event::Ended(end) => Some(end),
        _ => None,
    })
}

fn tickets(mux: &mut Mux, worker: worker::Id, now: Time) -> Vec<Ticket> {
    let mut batch = Vec::new();
    mux.poll_messages(worker, now, &mut batch);
    batch.iter().map(Message::ticket).collect()
}

#[test]
fn connected_mode_uses_the_least_loaded_connection_and_reports_full() {
    let config = Config { connected: true, send_bytes: Bound::of(4), ..Config::new(Order::None) };
    let mut mux = Mux::new(config);
    assert_eq!(mux.send(&b"x"[..], at(0)), Err(SendError::NotConnected));
    let (one, two) = (attach(&mut mux), attach(&mut mux));
    let first = mux.send(&b"abcd"[..], at(0)).expect("room");
    let second = mux.send(&b"ab"[..], at(0)).expect("room");
    assert_ne!(first, second);
    assert_eq!(mux.send(&b"cd"[..], at(0)), Ok(second));
    assert_eq!(mux.send(&b"e"[..], at(0)), Err(SendError::Full));

    // Two bytes of the first message were sent, and none of the others, which are retried.
    let mut transmit = mux.transmit(first).expect("a message");
    transmit.advance(2);
    mux.handle_transmitted(transmit, Outcome::Blocked, at(0));
    mux.handle_error(first, 104, at(0));
    let undelivered = events(&mut mux)
        .into_iter()
        .find_map(|event| match event {
            Event::Undelivered(undelivered) => Some(undelivered),
            _ => None,
        })
        .expect("it comes back");
    assert_eq!((&undelivered.bytes[..], undelivered.left), (&b"abcd"[..], 2));
    mux.handle_error(second, 104, at(0));
    let back = events(&mut mux).iter().filter(|event| matches!(event, Event::Undelivered(_))).count();
    assert_eq!(back, 2, "no connection is left");
    let _ = (one, two);
}

#[test]
fn messages_share_the_buffer_that_they_were_read_into() {
    let (mut mux, psock) = lines(Config { read: 64, ..Config::new(Order::None) });
    let worker = mux.clone_worker(64, at(0));
    mux.service_time.ewma = 1;
    let mut buffer = mux.reserve(psock).expect("it is read");
    let start = buffer.as_ptr().addr();
    buffer.extend_from_slice(&b"0123456\n".repeat(6));
    buffer.extend_from_slice(b"89");
    mux.handle_read(psock, buffer, at(0));
    let mut batch = Vec::new();
    mux.poll_messages(worker, at(0), &mut batch);
    let places: Vec<_> = batch.iter().map(|message| message.bytes().as_ptr().addr() - start).collect();
    assert_eq!(places, [0, 8, 16, 24, 32, 40]);
    assert_eq!(mux.psocks[psock].assembler.held(), 2);
}

#[test]
fn worker_and_connection_count_sent_messages_alike() {
    let (mut mux, psock) = lines(Config { connected: true, ..Config::new(Order::None) });
    let worker = mux.clone_worker(2, at(0));
    mux.handle_bytes(psock, b"a\nb\n", at(0));
    for answer in [&b"answer"[..], b""] {
        let ticket = tickets(&mut mux, worker, at(0))[0];
        mux.reply(worker, ticket, answer, at(0)).expect("it holds it");
        mux.done(worker, ticket, at(0));
    }
    mux.send(&b"unasked"[..], at(0)).expect("room");
    mux.count_sent(worker, 7);
    let mut transmit = mux.transmit(psock).expect("answers");
    transmit.advance(13);
    mux.handle_transmitted(transmit, Outcome::Taken, at(0));
    let show = mux.show();
    let (worker, psock) = (show.workers[0].stats, show.psocks[0].stats);
    assert_eq!((worker.tx_msgs, worker.tx_bytes), (2, 13));
    assert_eq!((psock.tx_msgs, psock.tx_bytes), (2, 13));
}
