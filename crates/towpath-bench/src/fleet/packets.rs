//! Packets of new flows, and the gate that they pass.

use std::sync::Arc;

use anyhow::{Context, Result, anyhow, ensure};
use towpath::ruleset_manager::RulesetManager;
use towpath_gate::rules::Ruleset;
use towpath_gate::state::Changes;
use towpath_gate::{Dir, Gate, Ports, Step, Walk, Walker, state};
use towpath_wire::{self as wire, LinkType, Time};

/// The time of the first packet.
pub(crate) const START: Time = Time::from_secs(1);

/// A reply needs a state.
const RULES: &str = "add 100 check-state\nadd 200 allow udp from 10.0.0.0/8 to any keep-state\nadd 300 deny ip from any to any\n";

/// Packets of a flow whose instructions are counted: a state each ten packets.
pub(crate) const PACKETS: u32 = 10;

/// Rules that make a state for each flow, with room for `states`, and two walkers.
pub(crate) fn manager(states: u32) -> Result<(Arc<RulesetManager>, [Walker; 2])> {
    let ruleset = Ruleset::parse("bench", RULES).ruleset.map_err(|errors| anyhow!("{}", errors[0]))?;
    let settings = state::Settings {
        dyn_max: states.saturating_add(1 << 16),
        dyn_udp_lifetime: 3600,
        ..state::Settings::default()
    };
    let mut gate = Gate::new(ruleset.clone(), Ports::new(), settings, 1);
    let walkers = gate.walker().zip(gate.walker()).context("no room for walkers")?;
    let manager = RulesetManager::new(gate, ruleset, false);
    manager.clock().set(START);
    Ok((Arc::new(manager), walkers.into()))
}

/// A datagram of flow `n`. Returns true if it passes.
pub(crate) fn walk(walker: &mut Walker, n: u32, reply: bool, now: Time) -> Result<bool> {
    let [a, b, c, d] = n.to_be_bytes();
    let ends = [[10, a, b, c], [192, 0, 2, 1]];
    let ports = [[4, d], [0, 53]];
    let at = usize::from(reply);
    let mut frame = [0; 28];
    frame[..12].copy_from_slice(&[0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0]);
    frame[12..16].copy_from_slice(&ends[at]);
    frame[16..20].copy_from_slice(&ends[1 - at]);
    frame[20..22].copy_from_slice(&ports[at]);
    frame[22..24].copy_from_slice(&ports[1 - at]);
    frame[25] = 8;
    let packet = wire::parse(LinkType::RAW, &frame, 28).map_err(|error| anyhow!("{error:?}"))?;
    Ok(walker.walk(&mut Walk::new(Dir::In, None, None), &packet, now) == Step::Pass)
}

/// Makes the state of flow `n`, with a reply.
pub(crate) fn create(walker: &mut Walker, n: u32, now: Time) -> Result<()> {
    let passed = walk(walker, n, false, now)? && walk(walker, n, true, now)?;
    ensure!(passed, "the packets of flow {n} did not pass");
    Ok(())
}

/// Passes packets of `flows` flows, under callgrind. `replicated`: a reader follows the changes, as the thread of the fleet does.
pub(crate) fn side(replicated: bool, flows: u32) -> Result<()> {
    let (manager, [mut walker, _other]) = manager(flows)?;
    let _journal = replicated.then(|| manager.journal(Changes::AfterBeginning));
    for n in 0..flows {
        for packet in 0..PACKETS {
            ensure!(walk(&mut walker, n, packet % 2 == 1, START)?, "a packet did not pass");
        }
    }
    Ok(())
}
