//! Several walkers of one gate: invariants under concurrent evaluation and rule changes.

use std::net::Ipv4Addr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

use towpath_gate::rules::Ruleset;
use towpath_gate::rules::table::{Key, Value};
use towpath_gate::state::{self, Cursor};
use towpath_gate::{Dir, DropReason, Gate, Ports, StatePolicy, Step, Walk, Walker};
use towpath_wire::{self as wire, LinkType, Time};

const THREADS: usize = 3;
const PACKETS: u32 = 30_000;
const NOW: Time = Time::from_secs(100);

fn ruleset(text: &str) -> Ruleset {
    Ruleset::parse("t", text).ruleset.unwrap()
}

fn gate(text: &str) -> Gate {
    Gate::new(ruleset(text), Ports::new(), state::Settings::default(), 7)
}

/// Evaluates a UDP packet of 28 bytes from 10.0.0.0 + `n`.
fn walk(walker: &mut Walker, n: u32, now: Time) -> Step {
    let [a, b, c, d] = (0x0a00_0000 + n).to_be_bytes();
    let frame = [0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, a, b, c, d, 192, 0, 2, 1, 4, 0, 0, 53, 0, 8, 0, 0];
    let packet = wire::parse(LinkType::RAW, &frame, 28).unwrap();
    walker.walk(&mut Walk::new(Dir::In, None, None), &packet, now)
}

/// Runs `work` with a walker in each of several threads, and `meanwhile` in this thread until they finish.
fn run_concurrently<T: Send>(
    gate: &mut Gate,
    work: impl Fn(usize, &mut Walker) -> T + Sync,
    mut meanwhile: impl FnMut(&mut Gate),
) -> Vec<T> {
    let walkers: Vec<Walker> = std::iter::repeat_with(|| gate.walker().unwrap()).take(THREADS).collect();
    let running = AtomicU64::new(THREADS as u64);
    thread::scope(|scope| {
        let threads: Vec<_> = walkers
            .into_iter()
            .enumerate()
            .map(|(n, mut walker)| {
                let (work, running) = (&work, &running);
                scope.spawn(move || {
                    let done = work(n, &mut walker);
                    running.fetch_sub(1, Ordering::Release);
                    done
                })
            })
            .collect();
        while running.load(Ordering::Acquire) > 0 {
            meanwhile(gate);
            thread::yield_now();
        }
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn packets(gate: &Gate) -> Vec<u64> {
    gate.show().iter().map(|shown| shown.packets).collect()
}

#[test]
fn packets_are_counted_once_during_reloads() {
    let texts = [
        "add 100 count ip from any to any\nadd 200 allow udp from any to any 53 keep-state\n",
        "add 50 count tcp from any to any\nadd 100 count ip from any to any\nadd 200 allow udp from any to any 53 keep-state\n",
        "add 100 count ip from any to any\nadd 150 count udp from any to any\nadd 200 allow udp from any to any 53 keep-state\nadd 300 deny ip from any to any\n",
    ];
    let mut gate = gate(texts[0]);
    let mut turn = 0;
    let mut seen = 0;
    let steps = run_concurrently(
        &mut gate,
        |_, walker| (0..PACKETS).filter(|&n| walk(walker, n, NOW) == Step::Pass).count(),
        |gate| {
            turn += 1;
            gate.reload(ruleset(texts[turn % texts.len()]), StatePolicy::Recheck, NOW);
            gate.expire(NOW, 0);
            let at = gate.show().iter().position(|shown| shown.number == 100).unwrap();
            let now = packets(gate)[at];
            assert!(now >= seen, "a count goes back from {seen} to {now}");
            seen = now;
        },
    );
    assert_eq!(steps, [PACKETS as usize; THREADS]);
    gate.reload(ruleset(texts[0]), StatePolicy::Keep, NOW);
    let all = u64::from(PACKETS) * THREADS as u64;
    assert_eq!(packets(&gate), [all, all, 0]);
    assert_eq!((gate.show()[1].bytes, gate.states().len()), (28 * all, PACKETS as usize));
    let counted: u64 = gate.states().list(NOW).map(|state| state.packets.iter().sum::<u64>()).sum();
    assert_eq!(counted, all);
    gate.zero(Some(200));
    assert_eq!(packets(&gate), [all, 0, 0]);
}

#[test]
fn states_of_a_late_walker_by_a_deleted_rule_are_removed() {
    let mut gate = gate("add 100 allow udp from any to any keep-state");
    let mut late = gate.walker().unwrap();
    assert_eq!(walk(&mut late, 1, NOW), Step::Pass);
    gate.reload(ruleset("add 100 deny udp from any to any"), StatePolicy::Recheck, NOW);
    assert_eq!(gate.states().list(NOW).count(), 0);
    gate.expire(NOW, 10);
    assert!(gate.states().is_empty());
    // This walker has not called since the reload; its next call sees the new rules first.
    assert_eq!(walk(&mut late, 1, NOW), Step::Drop(DropReason::Deny));
    assert_eq!(packets(&gate), [1, 0]);
    // An idle walker delays nothing, and returns to the current generation.
    late.idle();
    gate.reload(ruleset("add 100 allow udp from any to any keep-state"), StatePolicy::Keep, NOW);
    assert_eq!(walk(&mut late, 1, NOW), Step::Pass);
    drop(late);
    assert_eq!((packets(&gate), gate.states().len()), (vec![1, 0], 1));
}

#[test]
fn table_changes_are_atomic() {
    let mut gate = gate(
        "table 1 create type addr\ntable 1 add 10.0.0.0/24 1\n\
         add 100 skipto 300 udp from table(1) to any\nadd 200 deny ip from any to any\nadd 300 allow ip from any to any",
    );
    let key = |n: u8| Key::Net4(Ipv4Addr::new(10, 0, n, 0).to_bits(), 24);
    // At any time the table contains exactly one of 10.0.0/24 and 10.0.1/24.
    let stop = AtomicBool::new(false);
    let mut turn = 0_u8;
    let answers = run_concurrently(
        &mut gate,
        |n, walker| {
            let mut passed = 0_u32;
            for _ in 0..PACKETS {
                passed += u32::from(walk(walker, 256 * (n as u32 % 2), NOW) == Step::Pass);
            }
            stop.store(true, Ordering::Relaxed);
            passed
        },
        |gate| {
            turn ^= 1;
            let changed = gate.with_table("1", |table| {
                table.flush();
                table.add(&key(turn), Value::default())
            });
            assert_eq!(changed, Some(Ok(())));
            assert_eq!(gate.table("1").unwrap().len(), 1);
            gate.expire(NOW, 0);
        },
    );
    let counts = packets(&gate);
    let (all, passed) = (u64::from(PACKETS) * THREADS as u64, u64::from(answers.iter().sum::<u32>()));
    assert_eq!(counts, [passed, all - passed, passed, 0]);
}

#[test]
fn rates_and_log_limits_cover_all_walkers() {
    let mut gate = gate(
        "pipe 1 config bw 8Mbit/s burst 10000\n\
         add 100 count log logamount 5 ip from any to any\nadd 200 pipe 1 ip from any to any",
    );
    let done = run_concurrently(
        &mut gate,
        |_, walker| {
            let passed = (0..PACKETS).filter(|&n| walk(walker, n, NOW) == Step::Pass).count();
            (passed, std::iter::from_fn(|| walker.log().take()).count())
        },
        |_| (),
    );
    let (passed, logged) = done.iter().fold((0, 0), |(a, b), (c, d)| (a + c, b + d));
    assert_eq!((passed, logged), (10_000 / 28, 5));
}

/// States of a deleted rule pass no packet and do not block other rules.
#[test]
fn states_of_a_deleted_rule_do_not_interfere() {
    let first = "add 100 allow udp from any to any 53 keep-state\n";
    let mut gate = gate(first);
    let mut walker = gate.walker().unwrap();
    (0..1000).for_each(|n| assert_eq!(walk(&mut walker, n, NOW), Step::Pass));
    let other = "add 200 allow udp from any to any keep-state\n";
    let diff = gate.reload(ruleset(other), StatePolicy::Delete, NOW);
    assert_eq!(diff.states_dropped, 1000);
    assert_eq!(gate.states().list(NOW).count(), 0);
    // The packet creates a state of the new rule, not of the old one.
    assert_eq!(walk(&mut walker, 5, NOW), Step::Pass);
    let listed: Vec<_> = gate.states().list(NOW).map(|state| gate.rule_number(state.rule)).collect();
    assert_eq!(listed, [200]);
    gate.reload(ruleset("add 300 deny ip from any to any"), StatePolicy::Delete, NOW);
    assert!(matches!(walk(&mut walker, 5, NOW), Step::Drop(DropReason::Deny)));
}

/// A segment of TCP connection `n`: a data packet of its server if `reply`.
fn tcp(n: u32, flags: u8, reply: bool) -> [u8; 44] {
    let mut frame = [0; 44];
    frame[..10].copy_from_slice(&[0x45, 0, 0, 44, 0, 0, 0, 0, 64, 6]);
    let (client, server) = (Ipv4Addr::from(0x0a00_0000 | n).octets(), [192, 0, 2, 1]);
    let ports = [1024 + n as u16, [22, 80, 443][n as usize % 3]].map(u16::to_be_bytes);
    let ends = if reply { [server, client] } else { [client, server] };
    let ports = if reply { [ports[1], ports[0]] } else { ports };
    frame[12..20].copy_from_slice(ends.as_flattened());
    frame[20..24].copy_from_slice(ports.as_flattened());
    (frame[32], frame[33]) = (0x50, flags);
    frame
}

fn walk_frame(walker: &mut Walker, frame: &[u8]) -> Step {
    let packet = wire::parse(LinkType::RAW, frame, frame.len() as u32).unwrap();
    walker.walk(&mut Walk::new(Dir::In, None, None), &packet, NOW)
}

/// File number `turn`: the same services under other names and numbers, in another order. In each, TCP connections have names of
/// their own, a data packet without a state is denied, and the names of the file before serve other protocols.
fn file_of_turn(turn: usize) -> String {
    let names = ["a", "b", "c", "d", "e"];
    let name = |at: usize| names[(turn * 2 + at) % names.len()];
    let mut number = 10 + turn % 7;
    let mut text = String::new();
    let mut add = |rule: String| {
        text += &format!("add {number} {rule}\n");
        number += 1 + turn % 5;
    };
    let services = [(22, 0), (80, 1), (443, turn % 2)].map(|(port, at)| (port, name(at)));
    if turn.is_multiple_of(3) {
        add("count ip from any to any".to_owned());
    }
    for at in 0..2 {
        add(format!("check-state :{}", name((turn + at) % 2)));
    }
    for at in 0..3 {
        let (port, name) = services[(turn + at) % 3];
        add(format!("allow tcp from any to any {port} in setup keep-state :{name}"));
    }
    add("deny tcp from any to any established".to_owned());
    for at in 2..5 {
        add(format!("allow udp from any to any 53{at} keep-state :{}", name(at)));
    }
    add("deny ip from any to any".to_owned());
    text
}

/// Reloads that change names, numbers and order of the rules deny no data packet of a live connection, whichever step of the
/// re-check a walker meets.
#[test]
fn no_data_packet_is_denied_during_reloads() {
    const CONNECTIONS: u32 = 1000;
    const RELOADS: usize = if cfg!(miri) { 4 } else { 50 };
    let mut gate = gate(&file_of_turn(0));
    let mut first = gate.walker().unwrap();
    for n in 0..CONNECTIONS {
        for (flags, reply) in [(0x02, false), (0x12, true), (0x10, false)] {
            assert_eq!(walk_frame(&mut first, &tcp(n, flags, reply)), Step::Pass);
        }
    }
    first.idle();
    let (walked, done) = ([const { AtomicU64::new(0) }; 2], AtomicBool::new(false));
    let walkers = [first, gate.walker().unwrap()];
    thread::scope(|scope| {
        let threads: Vec<_> = (0..2)
            .zip(walkers)
            .map(|(at, mut walker)| {
                let (walked, done) = (&walked[at], &done);
                scope.spawn(move || {
                    let mut denied = Vec::new();
                    for n in (0..CONNECTIONS).cycle() {
                        if done.load(Ordering::Relaxed) {
                            break;
                        }
                        for reply in [false, true] {
                            let step = walk_frame(&mut walker, &tcp(n, 0x18, reply));
                            if step != Step::Pass {
                                denied.push((n, reply, step));
                            }
                        }
                        walked.fetch_add(1, Ordering::Relaxed);
                    }
                    denied
                })
            })
            .collect();
        // Until each thread has walked as many packets since.
        let go_on = |packets: u64| {
            let since = [0, 1].map(|at| walked[at].load(Ordering::Relaxed));
            while (0..2).any(|at| {
                walked[at].load(Ordering::Relaxed) < since[at] + packets && !threads[at].is_finished()
            }) {
                thread::yield_now();
            }
        };
        for turn in 1..=RELOADS {
            let file = ruleset(&file_of_turn(turn));
            if turn % 2 == 0 {
                gate.reload(file, StatePolicy::Recheck, NOW);
            } else {
                gate.reload(file, StatePolicy::RecheckLater, NOW);
                go_on(100);
                // Sometimes another reload comes first.
                if turn % 3 != 0 {
                    assert_eq!(gate.recheck_step(Cursor::default(), NOW).next, None);
                    go_on(30);
                    assert_eq!(gate.finish_recheck(), 0);
                }
            }
            go_on(if turn % 5 == 0 { 300 } else { 10 });
            gate.expire(NOW, 0);
        }
        done.store(true, Ordering::Relaxed);
        for thread in threads {
            assert_eq!(thread.join().unwrap(), []);
        }
    });
    assert_eq!(gate.states().list(NOW).count(), CONNECTIONS as usize);
}
