//! YANET's rule files with sent and expected packets, if present (`shared/cases/yanet`).

use std::collections::BTreeMap;
use std::path::Path;

use towpath_gate::rules::Ruleset;
use towpath_gate::state;
use towpath_gate::{Dir, Gate, Ports, Step, Walk};
use towpath_wire::{self as wire, Addresses, LinkType, Packet, Time};

/// Returns the frames of a classic little-endian capture.
fn frames(path: &Path) -> Vec<Vec<u8>> {
    let bytes = std::fs::read(path).unwrap();
    let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    assert!(matches!(word(0), 0xa1b2_c3d4 | 0xa1b2_3c4d), "{}", path.display());
    let mut at = 24;
    let mut frames = Vec::new();
    while at + 16 <= bytes.len() {
        let length = word(at + 8);
        frames.push(bytes[at + 16..at + 16 + length].to_vec());
        at += 16 + length;
    }
    frames
}

/// Returns the packet without the fields that their router changes: link header, TTL, IPv4 checksum.
fn unchanged(frame: &[u8], sent: bool) -> Option<Vec<u8>> {
    let packet = wire::parse(LinkType::ETHERNET, frame, frame.len() as u32).ok()?;
    let end = packet.network + packet.ip_len as usize;
    let mut ip = frame[packet.network..end.min(frame.len())].to_vec();
    match packet.addresses {
        Addresses::V4(..) => {
            ip[8] = ip[8].wrapping_sub(u8::from(sent));
            ip[10..12].fill(0);
        }
        Addresses::V6(..) => ip[7] = ip[7].wrapping_sub(u8::from(sent)),
        Addresses::None => return None,
    }
    Some(ip)
}

/// Returns true if a packet passes that is received on the port of its VLAN.
fn passes(gate: &mut Gate, packet: &Packet<'_>, now: Time) -> bool {
    let dotted = |vlan| [format!("lp0.{vlan}"), format!("lp.{vlan}")];
    let recv = packet.vlan.and_then(|vlan| dotted(vlan).iter().find_map(|name| gate.ports().find(name)));
    gate.walk(&mut Walk::new(Dir::In, recv, None), packet, now) == Step::Pass
}

fn to_the_router(frame: &[u8]) -> bool {
    let own: [std::net::IpAddr; 2] = ["200.0.0.2".parse().unwrap(), "fe80::2".parse().unwrap()];
    match wire::parse(LinkType::ETHERNET, frame, frame.len() as u32).map(|packet| packet.addresses) {
        Ok(Addresses::V4(_, dst)) => own.contains(&dst.into()),
        Ok(Addresses::V6(_, dst)) => own.contains(&dst.into()),
        _ => false,
    }
}

#[towpath_testenv::needs(shared)]
#[test]
fn every_case_gives_the_packets_expected() {
    let cases = Path::new(towpath_testenv::shared!()).join("cases/yanet");
    let mut directories: Vec<_> = std::fs::read_dir(&cases).unwrap().map(|e| e.unwrap().path()).collect();
    directories.retain(|path| path.is_dir());
    directories.sort();
    assert_eq!(directories.len(), 8);
    let mut wrong = BTreeMap::new();
    for case in &directories {
        run(case, &mut wrong);
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn run(case: &Path, wrong: &mut BTreeMap<String, String>) {
    let file = ["firewall.txt", "firewall.conf.txt"]
        .iter()
        .map(|name| case.join(name))
        .find(|p| p.exists())
        .unwrap();
    let mut gate = load(&file);
    let mut now = 1_000;
    let steps = std::fs::read_to_string(case.join("autotest.yaml")).unwrap();
    let mut send = String::new();
    for line in steps.lines().map(str::trim) {
        let (word, rest) = line.trim_start_matches("- ").split_once(':').unwrap_or((line, ""));
        match word {
            "sleep" => now += rest.trim().parse::<u64>().unwrap(),
            "reload" => gate = load(&case.join("firewall_keepstate.txt")),
            "clearFWState" => drop(gate.states_mut().remove_where(|_| true)),
            "send" => send = rest.trim().to_owned(),
            "expect" => {
                let name =
                    format!("{} {send} {}", case.file_name().unwrap().to_string_lossy(), file.display());
                let sent = frames(&case.join(&send));
                let passed: Vec<_> = sent
                    .iter()
                    .filter(|frame| {
                        let packet = wire::parse(LinkType::ETHERNET, frame, frame.len() as u32);
                        packet.is_ok_and(|packet| passes(&mut gate, &packet, Time::from_secs(now)))
                    })
                    // Their router consumes packets addressed to itself.
                    .filter(|frame| !to_the_router(frame))
                    .filter_map(|frame| unchanged(frame, true))
                    .collect();
                // Their state synchronisation sends multicast packets.
                let expected: Vec<_> = frames(&case.join(rest.trim()))
                    .iter()
                    .filter(|frame| frame[0] & 1 == 0)
                    .filter_map(|frame| unchanged(frame, false))
                    .collect();
                // These states come from another machine by synchronisation, which the first capture contains.
                let synchronised = case
                    .ends_with("041_firewall_keepstate_with_sync_multi_state_in_single_packet")
                    && send == "002-send.pcap";
                if passed != expected && !synchronised {
                    wrong.insert(
                        name,
                        format!("{} sent, {} passed, {} expected", sent.len(), passed.len(), expected.len()),
                    );
                }
            }
            _ => {}
        }
    }
}

fn load(file: &Path) -> Gate {
    let text = std::fs::read_to_string(file).unwrap();
    let ruleset = Ruleset::parse("firewall", &text)
        .ruleset
        .unwrap_or_else(|errors| panic!("{}: {errors:#?}", file.display()));
    let again = Ruleset::parse("again", &ruleset.to_text()).ruleset.unwrap();
    assert_eq!(again.to_text(), ruleset.to_text());
    let mut ports = Ports::new();
    for vlan in [100, 200, 300, 2000] {
        ports.add(&format!("lp0.{vlan}"), Vec::new());
        ports.add(&format!("lp.{vlan}"), Vec::new());
    }
    Gate::new(ruleset, ports, state::Settings::default(), 1)
}
