//! YANET's rule files with packets sent and expected (`shared/cases/yanet`, when it is there), as a user would replay
//! them.
//!
//! - Ports: every logicalPort of controlplane.conf is a `--port NAME=vlan:ID`; a packet enters on the VLAN it carries.
//! - No `--route`: their router evaluates the rules once, on input (logicalPort, then acl, then the routes). With routes, Towpath
//!   would evaluate them again with direction out, where `via lp0.200` means the sending port: a different test.
//! - One replay for the steps between two resets (a subtest, a reload, clearFWState), so that they share the states.
//!   The captures have no meaningful times: the steps get times, a tenth of a second apart, and sleeps are added.
//! - The IP packet is compared without TTL and IPv4 header checksum. MAC addresses and VLAN are not compared.

use std::collections::BTreeSet;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use towpath_port::{Burst, Frame, Port, Received, pcap};
use towpath_wire::{self as wire, Addresses, LinkType};

/// Steps that do not concern a gate: the word, and the reason.
const WITHOUT_MEANING: [(&str, &str); 3] = [
    ("ipv4Update", "their routes: all packets of the family have one"),
    ("ipv6Update", "their routes: all packets of the family have one"),
    ("cli", "their command line: sampling of addresses"),
];

/// Captures whose outcome depends on state synchronisation: case, capture, and why.
const SYNCHRONISED: [(&str, &str, &str); 1] = [(
    "041_firewall_keepstate_with_sync_multi_state_in_single_packet",
    "002-send.pcap",
    "passes by states that another machine announced in 001-send.pcap",
)];

const S: u64 = 1_000_000_000;

#[towpath_testenv::needs(shared)]
#[test]
fn every_case_gives_the_packets_expected() {
    let directory = Path::new(towpath_testenv::shared!()).join("cases/yanet");
    let entries = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path());
    let cases: BTreeSet<PathBuf> = entries.filter(|path| path.is_dir()).collect();
    let (mut wrong, mut compared) = (Vec::new(), 0);
    for case in &cases {
        for run in Run::of(case) {
            compared += run.steps.len();
            wrong.extend(run.differences());
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert_eq!((cases.len(), compared), (8, 19), "cases and steps that were compared");
}

/// One replay: steps that share rules and states.
struct Run {
    case: PathBuf,
    config: PathBuf,
    steps: Vec<Step>,
}

#[derive(Default)]
struct Step {
    /// When it begins, in nanoseconds.
    at: u64,
    send: String,
    expect: String,
}

impl Run {
    /// No steps yet, under a configuration of the case.
    fn new(case: &Path, config: PathBuf) -> Self {
        Self { case: case.to_owned(), config, steps: Vec::new() }
    }

    /// The runs of a case, read from autotest.yaml: a list of steps, each a word with a value. The value of sendPackets is a
    /// list of port, send and expect.
    fn of(case: &Path) -> Vec<Self> {
        let yaml = fs::read_to_string(case.join("autotest.yaml")).unwrap();
        let mut runs = vec![Self::new(case, case.join("controlplane.conf"))];
        let mut now = 1_000 * S;
        for line in yaml.lines().map(|line| line.trim().trim_start_matches("- ")) {
            let Some((word, value)) = line.split_once(':') else { continue };
            let value = value.trim().trim_matches('"');
            let run = runs.last_mut().unwrap();
            match word {
                "steps" | "port" => {}
                "sendPackets" => {
                    now += S / 10;
                    run.steps.push(Step { at: now, ..Step::default() });
                }
                "send" => run.steps.last_mut().unwrap().send = value.to_owned(),
                "expect" => run.steps.last_mut().unwrap().expect = value.to_owned(),
                "sleep" => now += value.parse::<u64>().unwrap() * S,
                "reload" => runs.push(Self::new(case, case.join(value))),
                "clearFWState" | "subtest" => {
                    let config = run.config.clone();
                    runs.push(Self::new(case, config));
                }
                word => assert!(
                    WITHOUT_MEANING.iter().any(|(known, _)| *known == word),
                    "{}: a step that this test does not know: {line}",
                    case.display()
                ),
            }
        }
        let name = case.file_name().unwrap().to_str().unwrap();
        for run in &mut runs {
            let skipped =
                |step: &Step| SYNCHRONISED.iter().any(|(case, send, _)| *case == name && *send == step.send);
            run.steps.retain(|step| !skipped(step));
        }
        runs.retain(|run| !run.steps.is_empty());
        runs
    }

    /// Unexpected results of the steps, and missing ones.
    fn differences(&self) -> Vec<String> {
        let config: Value = serde_json::from_str(&fs::read_to_string(&self.config).unwrap()).unwrap();
        let modules = config["modules"].as_object().unwrap();
        let of_type = |kind: &'static str| modules.iter().filter(move |(_, module)| module["type"] == kind);
        let rules = of_type("acl").map(|(_, acl)| acl["firewall"].as_str().unwrap()).next().unwrap();
        let bench = tempfile::tempdir().unwrap();
        let out = bench.path().join("out.pcap");
        let mut command = Command::new(env!("CARGO_BIN_EXE_towpath"));
        command.arg("replay").arg("--rules").arg(self.case.join(rules)).arg("--out").arg(&out);
        for (name, port) in of_type("logicalPort") {
            command.arg("--port").arg(format!("{name}=vlan:{}", port["vlanId"].as_str().unwrap()));
        }
        for (index, step) in self.steps.iter().enumerate() {
            let capture = bench.path().join(format!("{index}.pcap"));
            set_times(&self.case.join(&step.send), &capture, step.at);
            command.arg(capture);
        }
        let output = command.output().expect("the program starts");
        assert!(
            output.status.success(),
            "{}: {}",
            self.case.display(),
            String::from_utf8_lossy(&output.stderr)
        );

        // Their router does not forward packets to its own addresses.
        let own: BTreeSet<IpAddr> =
            of_type("route").flat_map(|(_, route)| own_addresses(&route["interfaces"])).collect();
        let passed = frames(&out);
        let mut differences = Vec::new();
        for (index, step) in self.steps.iter().enumerate() {
            let end = self.steps.get(index + 1).map_or(u64::MAX, |next| next.at);
            let mut got = passed
                .iter()
                .filter(|(time, _)| (step.at..end).contains(time))
                .filter_map(|(_, frame)| kept(frame))
                .filter(|packet| !own.contains(&packet.to))
                .map(|packet| packet.bytes);
            // Multicast frames belong to their state synchronisation.
            let expected = frames(&self.case.join(&step.expect));
            let mut expected = expected
                .iter()
                .filter(|(_, frame)| frame[0] & 1 == 0)
                .map(|(_, frame)| kept(frame).expect("an IP packet").bytes);
            let mut number = 0;
            loop {
                number += 1;
                match (got.next(), expected.next()) {
                    (None, None) => break,
                    (got, expected) if got == expected => {}
                    (got, expected) => {
                        let case = self.case.file_name().unwrap().to_str().unwrap();
                        let at = format!("{case}, {rules}, {}: packet {number} that came out", step.send);
                        differences.push(format!("{at}: expected {expected:02x?}, got {got:02x?}"));
                        break;
                    }
                }
            }
        }
        differences
    }
}

/// The addresses of a route module's interfaces.
fn own_addresses(interfaces: &Value) -> Vec<IpAddr> {
    let mut addresses = Vec::new();
    for interface in interfaces.as_object().unwrap().values() {
        let prefixes = ["ipv4Prefix", "ipv6Prefix"].iter().filter_map(|key| interface[key].as_str());
        let listed = interface["ipAddresses"].as_array().into_iter().flatten().filter_map(Value::as_str);
        for text in prefixes.chain(listed) {
            addresses.push(text.split('/').next().unwrap().parse().unwrap());
        }
    }
    addresses
}

/// Copies a capture, its packets a microsecond apart from `at`.
fn set_times(from: &Path, to: &Path, at: u64) {
    let mut reader = pcap::Reader::open(from).unwrap();
    let mut writer = pcap::Writer::create(to).unwrap();
    let mut burst = Burst::new(64);
    let mut time_ns = at;
    while reader.receive(&mut burst).unwrap() == Received::Frames {
        for frame in burst.iter() {
            writer.write(Frame { time_ns, ..frame }, None).unwrap();
            time_ns += 1_000;
        }
    }
    writer.finish().unwrap();
}

fn frames(path: &Path) -> Vec<(u64, Vec<u8>)> {
    let mut reader = pcap::Reader::open(path).unwrap();
    let mut burst = Burst::new(64);
    let mut frames = Vec::new();
    while reader.receive(&mut burst).unwrap() == Received::Frames {
        frames.extend(burst.iter().map(|frame| (frame.time_ns, frame.bytes.to_vec())));
    }
    frames
}

/// The parts of a packet that a router does not change.
struct Kept {
    to: IpAddr,
    bytes: Vec<u8>,
}

/// The IP packet without TTL and IPv4 header checksum.
fn kept(frame: &[u8]) -> Option<Kept> {
    let packet = wire::parse(LinkType::ETHERNET, frame, frame.len() as u32).ok()?;
    let end = packet.network + packet.ip_len as usize;
    let mut bytes = frame[packet.network..end.min(frame.len())].to_vec();
    let to = match packet.addresses {
        Addresses::V4(_, to) => {
            bytes[8] = 0;
            bytes[10..12].fill(0);
            to.into()
        }
        Addresses::V6(_, to) => {
            bytes[7] = 0;
            to.into()
        }
        Addresses::None => return None,
    };
    Some(Kept { to, bytes })
}
