//! `towpath check --against`: the differences between two rulesets or configurations, and the packets of captures whose outcome differs.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use serde::Serialize;
use towpath::config::{Config, compare};
use towpath::explained;
use towpath::quantity::count;
use towpath_gate::state::Flow;
use towpath_gate::{Dir, Gate, StatePolicy, differences};
use towpath_wire::{self as wire, Packet, Time};

use crate::args::Check;
use crate::cli::captured::{Captured, NOT_IP};
use crate::cli::offline_gate::{Ended, Failure, OfflineGate};
use crate::cli::wiring::{Loaded, Wiring, Wrong};

/// Packets that are listed; further ones are only counted.
const LISTED: usize = 10_000;

/// Entries of one table that the text lists; further ones are only counted.
const ENTRIES: usize = 20;

/// The differences from the old rules to the new ones.
#[derive(Serialize)]
pub(crate) struct Changes {
    added: Vec<String>,
    removed: Vec<String>,
    /// Rules of both files that are before or behind other rules than before.
    moved: Vec<String>,
    kept: usize,
    /// Rules of both files that have another number.
    renumbered: usize,
    tables: Vec<String>,
    /// Jumps, sets, pipes, tables, entries, and keys of the configurations.
    differences: Vec<Difference>,
}

#[derive(Serialize)]
struct Difference {
    kind: &'static str,
    name: String,
    old: Option<String>,
    new: Option<String>,
}

/// The packets of the captures whose outcome differs.
#[derive(Serialize)]
pub(crate) struct Packets {
    /// Packets of the captures.
    compared: u64,
    /// Packets whose outcome differs.
    different: u64,
    /// The first of them.
    packets: Vec<Differing>,
}

#[derive(Serialize)]
struct Differing {
    capture: String,
    /// Its number in the capture, from 1.
    packet: u64,
    /// Time in seconds.
    time: f64,
    flow: String,
    old: End,
    new: End,
}

#[derive(Serialize)]
struct End {
    verdict: String,
    direction: &'static str,
    /// Number of the rule that decided; `null` if the packet was dropped before the first rule.
    rule: Option<u32>,
    /// Text of this rule.
    text: String,
    /// DSCP and MSS that rules set.
    dscp: Option<u8>,
    mss: Option<u16>,
}

/// Compares the rules that `args` names with those of `old`.
pub(crate) fn against(args: &Check, new: &Loaded, old: &Path) -> Result<(Changes, Option<Packets>), Failure> {
    let is_config = old.extension().is_some_and(|extension| extension == "toml");
    let of_old = match (is_config, &args.wiring.config) {
        (false, _) => args.wiring.clone(),
        (true, Some(_)) => {
            Wiring { config: Some(old.to_owned()), ingress: args.wiring.ingress.clone(), ..Wiring::default() }
        }
        (true, None) => {
            let message = "--against with a configuration needs --config with the other one";
            return Err(Wrong::Usage(message.to_owned()).into());
        }
    };
    let before = of_old.load((!is_config).then_some(old))?;
    // The same seed: `prob` is equally random in both.
    let seed = std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0);
    let mut old_gate = OfflineGate::new(of_old.gate_with_seed(&before, None, seed)?);
    let mut new_gate = OfflineGate::new(args.wiring.gate_with_seed(new, None, seed)?);
    let diff = old_gate.gate.preview(&new.ruleset, StatePolicy::Keep, Time::default());
    let mut found: Vec<Difference> = differences(&before.ruleset, &new.ruleset)
        .into_iter()
        .map(|found| Difference {
            kind: found.kind.as_str(),
            name: found.name,
            old: found.old,
            new: found.new,
        })
        .collect();
    if let (Some(before), Some(now)) = (&before.config, &new.config) {
        found.extend(compare::differences(before, now).into_iter().map(|found| Difference {
            kind: found.kind,
            name: found.name,
            old: found.old,
            new: found.new,
        }));
    }
    let changes = Changes {
        added: diff.added,
        removed: diff.removed,
        moved: diff.moved,
        kept: diff.kept,
        renumbered: diff.renumbered,
        tables: diff.tables,
        differences: found,
    };
    if args.captures.is_empty() {
        return Ok((changes, None));
    }
    let mut packets = Packets { compared: 0, different: 0, packets: Vec::new() };
    let mut captured = Captured::default();
    for capture in &args.captures {
        let mut number = 0;
        captured.read(capture, |frame, now| {
            number += 1;
            packets.compared += 1;
            if let Ok(packet) = wire::parse(frame.link, frame.bytes, frame.wire_len) {
                let [old, new] = [&mut old_gate, &mut new_gate].map(|gate| gate.process(&packet, now));
                if !old.same_as(&new) {
                    packets.different += 1;
                    if packets.packets.len() < LISTED {
                        packets.packets.push(Differing {
                            capture: capture.display().to_string(),
                            packet: number,
                            time: now.as_nanos() as f64 / 1e9,
                            flow: flow(&packet),
                            old: End::new(&old, &old_gate.gate),
                            new: End::new(&new, &new_gate.gate),
                        });
                    }
                }
            }
            ControlFlow::<()>::Continue(())
        })?;
    }
    captured.tell(NOT_IP);
    Ok((changes, Some(packets)))
}

impl End {
    fn new(end: &Ended, gate: &Gate) -> Self {
        let text = end.rule.and_then(|rule| gate.show().into_iter().find(|row| row.number == rule));
        Self {
            verdict: explained::verdict(end.step),
            direction: if end.dir == Dir::In { "in" } else { "out" },
            rule: end.rule,
            text: text.map_or_else(String::new, |row| row.text),
            dscp: end.edits.dscp,
            mss: end.edits.mss,
        }
    }

    fn text(&self) -> String {
        let mut text = format!("{}: {}", self.direction, self.verdict);
        if let Some(dscp) = self.dscp {
            text += &format!(", dscp {dscp}");
        }
        if let Some(mss) = self.mss {
            text += &format!(", mss {mss}");
        }
        match self.rule {
            Some(rule) => text + &format!(", by rule {rule:05} {}", self.text),
            None => text + ", before the first rule",
        }
    }
}

impl Changes {
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        text.extend(self.removed.iter().map(|rule| format!("- {rule}\n")));
        text.extend(self.added.iter().map(|rule| format!("+ {rule}\n")));
        text.extend(self.moved.iter().map(|rule| format!("> {rule} (moved)\n")));
        text.extend(self.tables.iter().map(|table| format!("~ table {table}\n")));
        let mut listed: BTreeMap<&str, usize> = BTreeMap::new();
        for Difference { kind, name, old, new } in &self.differences {
            let table = name.split(' ').next().unwrap_or(name);
            if *kind == "entry" {
                let count = listed.entry(table).or_default();
                *count += 1;
                if *count > ENTRIES {
                    continue;
                }
            }
            let value = |value: &Option<String>| value.clone().unwrap_or_else(|| "none".to_owned());
            text += &format!("~ {kind} {name}: {} -> {}\n", value(old), value(new));
        }
        for (table, count) in listed.iter().filter(|(_, count)| **count > ENTRIES) {
            text += &format!("~ table {table}: {} more entries (--json lists them)\n", count - ENTRIES);
        }
        text += &format!("{} kept\n", count(self.kept as u64, "rule"));
        if self.renumbered > 0 {
            text += &format!("{} of them renumbered\n", self.renumbered);
        }
        text
    }
}

impl Packets {
    pub(crate) fn text(&self) -> String {
        let mut text = String::new();
        for Differing { capture, packet, time, flow, old, new } in &self.packets {
            text += &format!("packet {packet} of {capture}, {time:.6}: {flow}\n");
            text += &format!("  old: {}\n  new: {}\n", old.text(), new.text());
        }
        text + &format!("different: {} of {}\n", self.different, count(self.compared, "packet"))
    }
}

/// The flow of a packet in words.
fn flow(packet: &Packet<'_>) -> String {
    let Some(Flow { ends, proto, src_port, dst_port, .. }) = packet.flow() else {
        return format!("not IP, ethertype 0x{:04x}", packet.ethertype);
    };
    let name = match proto {
        1 => "icmp".to_owned(),
        6 => "tcp".to_owned(),
        17 => "udp".to_owned(),
        58 => "icmp6".to_owned(),
        number => format!("proto {number}"),
    };
    let (src, dst) = ends.addresses();
    format!("{name} {} > {}", SocketAddr::new(src, src_port), SocketAddr::new(dst, dst_port))
}

/// The rule file that `check` reads: FILE, or that of the configuration.
pub(crate) fn rule_file(args: &Check, config: Option<&Config>) -> PathBuf {
    match (&args.file, config) {
        (Some(file), _) => file.clone(),
        (None, Some(config)) => config.rules.clone(),
        // clap requires one of both.
        (None, None) => PathBuf::from("-"),
    }
}
