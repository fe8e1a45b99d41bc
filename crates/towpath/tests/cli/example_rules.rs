//! The rule files of `examples/rules`: the outcome of each packet of their captures, as in `NAME.expected`, and the commands of
//! their README.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use towpath_gate::rules::Ruleset;
use towpath_gate::state;
use towpath_gate::{Dir, DropReason, Gate, PortId, Ports, Route, Routes, Step, Walk};
use towpath_port::{Burst, Port, Received, pcap};
use towpath_wire::{self as wire, Addresses, LinkType, Packet, Time};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A command of the README, `towpath replay CAPTURE --rules FILE ...`, in words.
struct Example {
    name: String,
    words: Vec<String>,
}

/// The README's commands, by the names of their rule files.
fn examples() -> Vec<Example> {
    let readme = fs::read_to_string(root().join("examples/rules/README.md")).unwrap().replace("\\\n", " ");
    let commands = readme.lines().filter(|line| line.starts_with("towpath replay "));
    let examples: Vec<_> = commands
        .map(|line| {
            let words = shell_words::split(line).unwrap().split_off(1);
            let name = words[1].trim_start_matches("examples/rules/").trim_end_matches(".pcap").to_owned();
            Example { name, words }
        })
        .collect();
    let shown: BTreeSet<_> = examples.iter().map(|example| example.name.clone()).collect();
    let files = fs::read_dir(root().join("examples/rules")).unwrap().map(|entry| entry.unwrap().file_name());
    let kept: BTreeSet<_> =
        files.filter_map(|name| name.to_str()?.strip_suffix(".ipfw").map(str::to_owned)).collect();
    assert_eq!(shown, kept, "every rule file has one command in the README");
    examples
}

impl Example {
    fn path(&self, extension: &str) -> PathBuf {
        root().join(format!("examples/rules/{}.{extension}", self.name))
    }

    /// The values of a flag, split at the first `=`.
    fn flags(&self, flag: &str) -> impl Iterator<Item = (&str, &str)> {
        let pairs = self.words.windows(2).filter(move |pair| pair[0] == flag);
        pairs.map(|pair| pair[1].split_once('=').expect("NAME=VALUE"))
    }

    fn gate(&self) -> (Gate, World) {
        let text = fs::read_to_string(self.path("ipfw")).unwrap();
        let parsed = Ruleset::parse(&self.name, &text);
        assert!(parsed.warnings.is_empty(), "{}: {:?}", self.name, parsed.warnings);
        let ruleset = parsed.ruleset.unwrap_or_else(|errors| panic!("{errors:#?}"));
        let again = Ruleset::parse("again", &ruleset.to_text()).ruleset.unwrap();
        // The rules as they stand; a table's entries have no order.
        let printed = |text: String| {
            let (mut tables, rules): (Vec<_>, Vec<_>) =
                text.lines().map(str::to_owned).partition(|line| line.starts_with("table "));
            tables.sort();
            (tables, rules)
        };
        let (once, twice) = (printed(ruleset.to_text()), printed(again.to_text()));
        assert_eq!(twice, once, "{}: printed and read again", self.name);

        let mut ports = Ports::new();
        let mut world =
            World { cap0: ports.add("cap0", Vec::new()), vlans: BTreeMap::new(), routes: Routes::new() };
        for (name, vlan) in self.flags("--port") {
            let vlan = vlan.strip_prefix("vlan:").unwrap().parse().unwrap();
            world.vlans.insert(vlan, ports.add(name, Vec::new()));
        }
        for (name, address) in self.flags("--address") {
            ports.add(name, vec![address.parse().unwrap()]);
        }
        for (prefix, name) in self.flags("--route") {
            let (net, len) = prefix.split_once('/').unwrap();
            let route =
                Route { port: ports.find(name).unwrap(), connected: true, gateway: Default::default() };
            world.routes.add(net.parse().unwrap(), len.parse().unwrap(), route);
        }
        let mut gate = Gate::new(ruleset, ports, state::Settings::default(), 1);
        gate.set_routes(world.routes.clone());
        (gate, world)
    }

    /// The frames of the capture with their times.
    fn frames(&self) -> Vec<(Time, Vec<u8>)> {
        let mut reader = pcap::Reader::open(self.path("pcap")).unwrap();
        let mut burst = Burst::new(64);
        let mut frames = Vec::new();
        while reader.receive(&mut burst).unwrap() == Received::Frames {
            frames.extend(burst.iter().map(|frame| (Time::from_nanos(frame.time_ns), frame.bytes.to_vec())));
        }
        frames
    }

    /// Per packet: its steps through the rules, and its description.
    fn expected(&self) -> Vec<(Vec<String>, String)> {
        let text = fs::read_to_string(self.path("expected")).unwrap();
        let rows = text.lines().filter(|line| !line.starts_with('#')).enumerate();
        rows.map(|(index, line)| {
            let (row, what) = line.split_once(" # ").unwrap();
            let (number, stops) = row.trim().split_once(' ').unwrap();
            assert_eq!(number, (index + 1).to_string(), "{}", self.name);
            (stops.split(',').map(|stop| stop.trim().to_owned()).collect(), what.to_owned())
        })
        .collect()
    }

    /// The pattern that the README's inspector of a queue drops.
    fn dropped_by(&self, queue: &str) -> &str {
        let (_, command) = self.flags("--queue").find(|(number, _)| *number == queue).expect("a --queue");
        let words: Vec<_> = command.split(' ').collect();
        assert_eq!(&words[words.len() - 2..], ["--verdict", "drop"]);
        words[words.iter().position(|word| *word == "--match").unwrap() + 1]
    }
}

/// The environment of the gate: ports and routes.
struct World {
    cap0: PortId,
    vlans: BTreeMap<u16, PortId>,
    routes: Routes,
}

impl World {
    fn arrival(&self, packet: &Packet<'_>) -> PortId {
        packet.vlan.and_then(|vlan| self.vlans.get(&vlan)).copied().unwrap_or(self.cap0)
    }

    fn departure(&self, packet: &Packet<'_>) -> Option<PortId> {
        let dst = match packet.addresses {
            Addresses::V4(_, dst) => dst.into(),
            Addresses::V6(_, dst) => dst.into(),
            Addresses::None => return None,
        };
        self.routes.lookup(dst).map(|(route, _)| route.port)
    }
}

/// Every step of a packet whose inspectors pass it: direction `in`, then direction `out` if there is a route.
fn stops(gate: &mut Gate, world: &World, packet: &Packet<'_>, now: Time) -> Vec<String> {
    let arrival = world.arrival(packet);
    let mut stops = Vec::new();
    if !walk(gate, Walk::new(Dir::In, Some(arrival), None), packet, now, &mut stops) {
        return stops;
    }
    if let Some(departure) = world.departure(packet) {
        walk(gate, Walk::new(Dir::Out, Some(arrival), Some(departure)), packet, now, &mut stops);
    }
    stops
}

/// Continues a walk to its end. Returns false if the packet was dropped or rejected.
fn walk(gate: &mut Gate, mut walk: Walk, packet: &Packet<'_>, now: Time, stops: &mut Vec<String>) -> bool {
    loop {
        let step = gate.walk(&mut walk, packet, now);
        let verdict = match step {
            Step::Pass | Step::Forward(..) => "pass".to_owned(),
            Step::Drop(_) => "drop".to_owned(),
            Step::Reject(_) => "reject".to_owned(),
            Step::Inspect(queue) | Step::Divert(queue) => format!("queue {queue}"),
            Step::Tee(queue) => format!("tee {queue}"),
            other => panic!("no example asks for {other:?}"),
        };
        let unseen = matches!(step, Step::Drop(DropReason::TinyFragment | DropReason::UnknownHeader));
        let rule = if unseen { None } else { walk.rule() };
        let rule = rule.map_or("none".to_owned(), |number| format!("{number:05}"));
        stops.push(format!("{verdict} rule {rule}"));
        match step {
            Step::Divert(_) | Step::Tee(_) => {}
            Step::Drop(_) | Step::Reject(_) => return false,
            _ => return true,
        }
    }
}

#[test]
fn every_packet_is_decided_as_ipfw_would_and_by_the_same_rule() {
    let mut wrong = Vec::new();
    for example in examples() {
        let (mut gate, world) = example.gate();
        let (frames, expected) = (example.frames(), example.expected());
        assert_eq!(frames.len(), expected.len(), "{}: a line for each packet", example.name);
        for (index, ((time, frame), (expected, what))) in frames.iter().zip(&expected).enumerate() {
            let packet = wire::parse(LinkType::ETHERNET, frame, frame.len() as u32).expect(what);
            let got = stops(&mut gate, &world, &packet, *time);
            if got != *expected {
                let number = index + 1;
                wrong.push(format!("{} {number} ({what}): expected {expected:?}, got {got:?}", example.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Rules that no packet can bring to count, each with the reason.
const NEVER: [(&str, u32, &str); 1] = [("office-gateway", 2020, "its set is disabled")];

#[test]
fn every_rule_decides_about_some_packets_and_not_about_others() {
    for example in examples() {
        let (mut gate, world) = example.gate();
        let frames = example.frames();
        for (time, frame) in &frames {
            let packet = wire::parse(LinkType::ETHERNET, frame, frame.len() as u32).unwrap();
            stops(&mut gate, &world, &packet, *time);
        }
        for rule in gate.show() {
            let never = NEVER.iter().any(|(name, number, _)| *name == example.name && *number == rule.number);
            // check-state counts where the state was made; a file that ends with its own deny needs no default rule.
            if rule.text.starts_with("check-state") || (rule.number == 65_535 && example.name != "closed") {
                continue;
            }
            let rows = (rule.packets > 0, rule.packets < frames.len() as u64);
            assert_eq!(rows, (!never, true), "{}: {} {}", example.name, rule.number, rule.text);
        }
    }
}

#[test]
fn the_commands_of_the_readme_give_these_totals() {
    for example in examples() {
        let expected = totals(&example);
        // A busy machine may keep an inspector from its processor for longer than the usual deadline.
        let patient: &[&str] =
            if example.words.iter().any(|word| word == "--queue") { &["--deadline", "600"] } else { &[] };
        let output = Command::new(env!("CARGO_BIN_EXE_towpath"))
            .args(&example.words)
            .args(patient)
            .arg("--json")
            .current_dir(root())
            .output()
            .expect("the program starts");
        assert!(output.status.success(), "{}: {}", example.name, String::from_utf8_lossy(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let got = ["passed", "dropped", "rejected"].map(|key| report[key].as_u64().unwrap());
        assert_eq!(got, expected, "{}: passed, dropped, rejected", example.name);
    }
}

/// Passed, dropped and rejected packets, the README's inspectors included.
fn totals(example: &Example) -> [u64; 3] {
    let mut totals = [0; 3];
    for ((_, frame), (stops, what)) in example.frames().iter().zip(example.expected()) {
        let dropped_by_inspector = stops.iter().any(|stop| {
            stop.strip_prefix("queue ").is_some_and(|stop| {
                let pattern = example.dropped_by(stop.split(' ').next().unwrap_or_default()).as_bytes();
                frame.windows(pattern.len()).any(|window| window == pattern)
            })
        });
        let last = stops.last().expect("a stop").split(' ').next().unwrap();
        totals[match last {
            _ if dropped_by_inspector => 1,
            "pass" | "queue" => 0,
            "drop" => 1,
            "reject" => 2,
            other => panic!("{what}: a walk does not end with {other}"),
        }] += 1;
    }
    totals
}
