//! Stories: sequences of packets, the step for each, and the counters at the end.

mod actions;
mod jumps;
mod states;
mod zones;

use towpath_gate::rules::Ruleset;
use towpath_gate::state::Settings;
use towpath_gate::{Dir, DropReason, Gate, PacketSpec, Ports, Step, Walk};
use towpath_wire::{self as wire, Time};

/// A gate, a clock and the walks of the packets.
struct Story {
    gate: Gate,
    now: u64,
}

impl Story {
    fn new(rules: &str) -> Self {
        Self::with(rules, Settings::default())
    }

    fn with(rules: &str, settings: Settings) -> Self {
        let ruleset = Ruleset::parse("t", rules).ruleset.unwrap_or_else(|e| panic!("{rules}: {}", e[0]));
        let mut ports = Ports::new();
        ports.add("em0", vec!["10.0.0.254".parse().unwrap()]);
        ports.add("em1", Vec::new());
        Self { gate: Gate::new(ruleset, ports, settings, 7), now: 1000 }
    }

    /// Returns the next step of a walk.
    fn step(&mut self, walk: &mut Walk, packet: &str) -> Step {
        let written = PacketSpec::parse(packet).unwrap_or_else(|e| panic!("{packet}: {e}"));
        let parsed = wire::parse(written.link(), &written.frame, written.frame.len() as u32).unwrap();
        self.gate.walk(walk, &parsed, Time::from_secs(self.now))
    }

    fn walk(&self, packet: &str) -> Walk {
        let written = PacketSpec::parse(packet).unwrap_or_else(|e| panic!("{packet}: {e}"));
        let port = written.port.as_deref().map(|name| self.gate.ports().find(name).unwrap());
        match written.dir {
            Dir::In => Walk::new(Dir::In, port, None),
            Dir::Out => Walk::new(Dir::Out, None, port),
        }
    }

    fn first(&mut self, packet: &str) -> Step {
        let mut walk = self.walk(packet);
        self.step(&mut walk, packet)
    }

    /// Returns every step of one packet to its end; inspectors always pass.
    fn all(&mut self, packet: &str) -> (Vec<Step>, Walk) {
        let mut walk = self.walk(packet);
        let mut steps = Vec::new();
        loop {
            let step = self.step(&mut walk, packet);
            steps.push(step);
            if !matches!(step, Step::Divert(_) | Step::Tee(_) | Step::Reassemble) {
                return (steps, walk);
            }
        }
    }

    /// Returns `number packets` of the rules that counted.
    fn counts(&self) -> Vec<(u32, u64)> {
        self.gate
            .show()
            .iter()
            .filter(|rule| rule.packets > 0)
            .map(|rule| (rule.number, rule.packets))
            .collect()
    }
}

const DENY: Step = Step::Drop(DropReason::Deny);
const SYN: &str = "tcp 10.0.0.1:1000 > 10.0.0.2:80 syn";
const SYNACK: &str = "tcp 10.0.0.2:80 > 10.0.0.1:1000 syn ack ackno 5";
const DNS: &str = "udp 10.0.0.1:1000 > 10.0.0.2:53";
const ANSWER: &str = "udp 10.0.0.2:53 > 10.0.0.1:1000";
