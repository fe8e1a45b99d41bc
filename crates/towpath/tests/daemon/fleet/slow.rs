//! A server that does not read, and a gate that does not: what waits for them is bounded, and what is dropped is counted.

use std::time::{Duration, Instant};

use rustix::process::Signal;
use towpath_fleet::Output;
use towpath_fleet::nats::{Bus, Incoming};
use towpath_port::netns::within;

use super::*;

/// Bytes of a batch.
const BATCH: usize = 64 << 10;

/// The most bytes that may wait: in the clients, and some more in sockets.
const BOUND: usize = 64 << 20;

/// A batch with this number.
fn batch(number: u64) -> Output {
    let mut bytes = number.to_le_bytes().to_vec();
    bytes.resize(BATCH, 0);
    Output::Batch { bytes, states: 1 }
}

/// Sends batches until the client refuses them for a while. Returns their number.
fn fill(bus: &Bus) -> u64 {
    let (mut sent, mut refused) = (0, None);
    while refused.is_none_or(|since: Instant| since.elapsed() < Duration::from_millis(200)) {
        match bus.send(batch(sent)) {
            Ok(()) => (sent, refused) = (sent + 1, None),
            Err(_) => {
                refused = refused.or_else(|| Some(Instant::now()));
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
    sent
}

/// The numbers of the batches of gate `b` that have come, or `None` if the session has ended.
fn numbers(bus: &Bus, numbers: &mut Vec<u64>) -> Option<()> {
    while let Some(incoming) = bus.receive(Duration::from_millis(10)) {
        match incoming {
            Incoming::Message { from, bytes, .. } if from == "b" => {
                numbers.push(u64::from_le_bytes(*bytes.first_chunk().unwrap()));
            }
            Incoming::Away(_) => return None,
            _ => {}
        }
    }
    Some(())
}

/// `None`: the session has ended meanwhile, as it does after some seconds.
fn batches_of_a_server_that_does_not_read() -> Option<()> {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::start(directory.path());
    let ((one, _), (two, _)) = (client("a", "one"), client("b", "two"));
    server.signal(Signal::STOP);
    let sent = fill(&two);
    server.signal(Signal::CONT);
    numbers(&two, &mut Vec::new())?;
    assert!(sent as usize * BATCH <= BOUND, "{sent} batches");
    let mut arrived = Vec::new();
    let mut alive = true;
    until(|| {
        alive = numbers(&one, &mut arrived).is_some();
        !alive || arrived.len() as u64 >= sent
    });
    assert!(!alive || arrived.iter().copied().eq(0..sent), "{sent} were sent: {arrived:?}");
    alive.then_some(())
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn a_server_that_does_not_read_makes_batches_wait_and_loses_none() {
    within(|| until(|| batches_of_a_server_that_does_not_read().is_some()));
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn messages_for_a_gate_that_does_not_read_are_dropped_and_counted() {
    with_server(|_, _, _server| {
        let ((one, _), (two, _)) = (client("a", "one"), client("b", "two"));
        // Twice as much as waits for a gate.
        let all = 2 * (BOUND / BATCH) as u64;
        for number in 0..all {
            until(|| two.send(batch(number)).is_ok());
        }
        let mut dropped = 0;
        until(|| {
            dropped += one.take_dropped();
            dropped >= all / 2
        });
        let mut arrived = Vec::new();
        until(|| {
            numbers(&one, &mut arrived).unwrap();
            dropped += one.take_dropped();
            arrived.len() as u64 + dropped == all
        });
        assert!(
            arrived.len() * BATCH <= BOUND && arrived.is_sorted(),
            "{} batches, {dropped} dropped",
            arrived.len()
        );
        // Afterwards, messages arrive as before.
        two.send(batch(all)).unwrap();
        until(|| {
            numbers(&one, &mut arrived).unwrap();
            arrived.last() == Some(&all)
        });
    });
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn states_that_are_made_while_the_server_does_not_read_reach_the_peer() {
    with_server(|(left, right), _, server| {
        let files = [files(&gate("a", "one", 1), RULES), files(&gate("b", "two", 2), RULES)];
        let [one, two] = [0, 1].map(|at| Engine::start(files[at].path()));
        in_step(&one, 1);
        in_step(&two, 1);
        server.signal(Signal::STOP);
        let mut ends = connection(left, right, 7);
        assert!(exchange(&mut ends));
        server.signal(Signal::CONT);
        until(|| stat(&two, "created") == 1);
        in_step(&one, 1);
        in_step(&two, 1);
        one.stop();
        two.stop();
    });
}
