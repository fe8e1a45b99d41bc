//! Verdicts for flows are announced to flow offload when no packet of the flow waits.

use std::sync::Arc;

use towpath_gate::PortId;
use towpath_ring::{Decision, Verdict};

use super::*;
use crate::verdict_feed::{Entries, VerdictFeed, VerdictReader};

#[derive(Debug)]
struct NoEntries;

impl Entries for NoEntries {
    fn end(&self, _slot: u32) {}
}

/// An inspector of all packets, and what its verdicts announce.
fn world() -> (World, VerdictReader, Inspector) {
    let mut world = World::new("add inspect 1 ip from any to any\n", Inside::default());
    let (feed, reader) = VerdictFeed::new(Arc::new(NoEntries));
    world.engine.set_verdict_feed(feed);
    let inspector = world.inspector.clone();
    (world, reader, inspector)
}

/// Decides the oldest frame that the inspector has.
fn decide_one(inspector: &Inspector, decision: Decision<'static>) {
    let mut inside = inspector.0.borrow_mut();
    let seq = inside.decided;
    inside.verdicts.push((seq, decision));
    inside.decided += 1;
}

#[test]
fn a_flow_is_announced_after_its_packets_have_left() {
    let (mut world, reader, inspector) = world();
    let frame = packet("udp 10.0.0.1:1024 > 10.0.0.2:53");
    let pass = Decision { flow: true, ..Verdict::Pass.into() };
    world.burst(&[&frame, &frame]);
    decide_one(&inspector, pass);
    let Ok(()) = world.engine.idle();
    // The second packet waits, so the third one leaves after it.
    world.burst(&[&frame]);
    assert!(reader.read().is_none());
    decide_one(&inspector, Verdict::Pass.into());
    let Ok(()) = world.engine.idle();
    assert_eq!(world.counts(), [3, 3, 0, 0]);
    world.burst(&[&frame, &frame]);
    let announced = reader.read().expect("no packet waits");
    assert_eq!((announced.queue, announced.arrival), (1, PortId(0)));
    assert!(announced.verdict.passes());
    assert!(reader.read().is_none());
    world.assert_clear();
}

#[test]
fn the_packet_that_is_decided_announces_its_flow() {
    let (mut world, reader, inspector) = world();
    let frame = packet("udp 10.0.0.1:1024 > 10.0.0.2:53");
    let other = packet("udp 10.0.0.1:1025 > 10.0.0.2:53");
    let back = packet("udp 10.0.0.2:53 > 10.0.0.1:1024");
    world.burst(&[&frame, &other]);
    decide_one(&inspector, Decision { flow: true, ..Verdict::Pass.into() });
    let Ok(()) = world.engine.idle();
    let announced = reader.read().expect("no packet of the flow waits");
    assert_eq!((announced.queue, announced.arrival, announced.flow.src_port), (1, PortId(0), 1024));
    assert!(announced.verdict.passes() && reader.read().is_none());
    // Once for each direction.
    world.burst(&[&frame, &back, &back]);
    assert_eq!(reader.read().expect("the other direction").flow.src_port, 53);
    assert!(reader.read().is_none());
    decide_one(&inspector, Verdict::Pass.into());
    let Ok(()) = world.engine.idle();
    assert!(reader.read().is_none(), "not a verdict for a flow");
    world.assert_clear();
}

/// Its state is not established: the flow could not be offloaded yet.
#[test]
fn the_first_packet_of_a_connection_does_not_announce_it() {
    let (mut world, reader, inspector) = world();
    world.burst(&[&packet("tcp 10.0.0.1:1024 > 10.0.0.2:80 syn")]);
    decide_one(&inspector, Decision { flow: true, ..Verdict::Pass.into() });
    let Ok(()) = world.engine.idle();
    assert!(reader.read().is_none());
    world.burst(&[&packet("tcp 10.0.0.1:1024 > 10.0.0.2:80 ack")]);
    assert!(reader.read().expect("a later packet").verdict.passes());
    world.assert_clear();
}

/// A verdict that does not pass is announced at once; the engine drops the packets.
#[test]
fn a_blocked_flow_is_announced_as_such() {
    let (mut world, reader, inspector) = world();
    let frame = packet("udp 10.0.0.1:1024 > 10.0.0.2:53");
    world.burst(&[&frame, &frame]);
    decide_one(&inspector, Decision { flow: true, ..Verdict::Drop.into() });
    let Ok(()) = world.engine.idle();
    assert!(!reader.read().expect("at once").verdict.passes());
    world.burst(&[&frame]);
    assert!(reader.read().is_none());
    decide_one(&inspector, Verdict::Pass.into());
    let Ok(()) = world.engine.idle();
    assert_eq!(world.counts(), [3, 1, 2, 0]);
}
