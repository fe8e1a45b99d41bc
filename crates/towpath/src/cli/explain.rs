//! `towpath explain`: traces one packet through the rules, step by step.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use clap::Parser;
use clap::builder::ValueHint;
use serde_json::{Value, json};
use towpath::control::client::Engine;
use towpath::explained::{self, Walked};
use towpath::quantity::count;
use towpath_gate::{Dir, ExplainedRule, Explanation, PacketSpec, Step, Walk};
use towpath_wire::{self as wire, Packet, Time};

use crate::args::exit;
use crate::cli::captured::{Captured, NOT_IP};
use crate::cli::offline_gate::{Failure, OfflineGate};
use crate::cli::wiring::{Wiring, Wrong};
use crate::cli::{answer, fail};

/// Explain what the rules do with one packet, rule by rule
///
/// PACKET is a description such as `in cap0 tcp 10.0.0.1:1234 > 10.0.0.2:22 syn`: direction, port, protocol, source, `>`,
/// destination, and further fields (TCP flags, `type N`, `ttl N`, `vlan N`, ...). Alternatively, --capture and --packet select
/// packet N of a capture; the packets before it walk the rules first, to create their states. With PACKET and --capture,
/// PACKET follows the whole capture, or its first N packets. The explanation assumes that inspectors pass the packet, that
/// `prob` matches and that pipes have room.
#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  towpath explain --rules examples/office.ipfw in cap0 tcp 192.168.10.20:40000 '>' 203.0.113.5:443 syn
  towpath explain --rules examples/office.ipfw --capture examples/office.pcap --packet 17")]
pub(crate) struct Explain {
    /// The packet's description
    #[arg(value_name = "PACKET", required_unless_present = "capture")]
    pub(crate) words: Vec<String>,

    /// The rule file, in ipfw syntax (default: that of --config)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, required_unless_present_any = ["config", "live"])]
    pub(crate) rules: Option<PathBuf>,

    /// Take the packet, or the preceding packets, from this capture
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) capture: Option<PathBuf>,

    /// Number of the packet in the capture, from 1
    #[arg(
        long,
        value_name = "N",
        requires = "capture",
        required_unless_present = "words",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    pub(crate) packet: Option<u64>,

    #[command(flatten)]
    pub(crate) wiring: Wiring,

    /// Ask a running engine: its rules, tables, ports, routes and states decide, and nothing changes
    ///
    /// No state is made or refreshed, and no counter changes. The verdict is that of the real walk, also if a state cannot be made (a
    /// limit, a full table).
    #[arg(long, conflicts_with_all = ["rules", "capture", "config", "ports", "routes", "addresses"])]
    pub(crate) live: bool,

    /// With --live: the engine's control socket
    #[arg(
        long,
        value_name = "PATH",
        env = "TOWPATH_CONTROL",
        default_value = "/run/towpath/control.sock",
        value_hint = ValueHint::FilePath
    )]
    pub(crate) socket: PathBuf,

    /// Exit with 8 if the packet does not pass
    #[arg(long)]
    pub(crate) exit_code: bool,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

pub(crate) fn run(args: &Explain) -> u8 {
    if args.live {
        return live(args);
    }
    let explained = match (&args.capture, args.packet) {
        (Some(capture), Some(number)) if args.words.is_empty() => from_capture(args, capture, number),
        _ => from_words(args),
    };
    let Told { walks, notes } = match explained {
        Ok(told) => told,
        Err(failure) => return failure.tell(),
    };
    tell(args, &explained::json(&walks, &notes))
}

/// Asks a running engine.
fn live(args: &Explain) -> u8 {
    match Engine::at(args.socket.clone()).ask("explain", json!({ "packet": args.words }), "explained") {
        Ok(told) => tell(args, &told),
        Err(failure) => fail(failure.code, failure.message),
    }
}

/// Prints walks and notes ([`explained::json`]).
fn tell(args: &Explain, told: &Value) -> u8 {
    let passes = |walk: &Value| walk["passes"] == true;
    let stopped = told["walks"].as_array().is_none_or(|walks| !walks.iter().all(passes));
    let code = if args.exit_code && stopped { exit::NOT_PASSED } else { exit::OK };
    answer(code, &if args.json { format!("{told}\n") } else { explained::text(told) })
}

/// The explanation of a packet.
struct Told {
    walks: Vec<Walked>,
    /// Facts that the walks do not show.
    notes: Vec<String>,
}

fn from_words(args: &Explain) -> Result<Told, Failure> {
    let usage = |message: String| Failure::Wrong(Wrong::Usage(message));
    let written = PacketSpec::parse(&args.words.join(" ")).map_err(|error| usage(error.to_string()))?;
    let port = written.port.as_deref();
    let loaded = args.wiring.load(args.rules.as_deref())?;
    let mut offline = OfflineGate::new(args.wiring.gate(&loaded, port)?);
    let length = u32::try_from(written.frame.len()).unwrap_or(u32::MAX);
    let packet = wire::parse(written.link(), &written.frame, length)
        .map_err(|reason| usage(format!("these words make a malformed packet: {reason}")))?;
    let id = port.map_or_else(|| Some(offline.arrival(&packet)), |name| offline.gate.ports().find(name));
    let walk = match written.dir {
        Dir::In => Walk::new(Dir::In, id, None),
        Dir::Out => Walk::new(Dir::Out, None, id),
    };
    let now = match &args.capture {
        Some(capture) => before(&mut offline, capture, args.packet)?,
        None => Time::default(),
    };
    let mut told = explain(&mut offline, walk, &packet, now);
    let looked = |walk: &Walked| walk.explanation.steps.iter().any(|step| step.looks_up);
    if args.capture.is_none() && told.walks.iter().any(looked) {
        told.notes.push(
            "there are no states before a packet in words; --capture FILE makes those of its packets"
                .to_owned(),
        );
    }
    Ok(told)
}

/// Runs the first `packets` packets of a capture, or all of them, through the rules. Returns the time of the last one.
fn before(offline: &mut OfflineGate, capture: &Path, packets: Option<u64>) -> Result<Time, Failure> {
    let mut captured = Captured::default();
    let (mut left, mut last) = (packets.unwrap_or(u64::MAX), Time::default());
    let read = captured.read(capture, |frame, now| {
        if left == 0 {
            return ControlFlow::Break(());
        }
        left -= 1;
        last = now;
        if let Ok(packet) = wire::parse(frame.link, frame.bytes, frame.wire_len) {
            offline.process(&packet, now);
        }
        ControlFlow::Continue(())
    });
    read?;
    captured.tell(NOT_IP);
    Ok(last)
}

fn from_capture(args: &Explain, capture: &Path, number: u64) -> Result<Told, Failure> {
    let loaded = args.wiring.load(args.rules.as_deref())?;
    let mut offline = OfflineGate::new(args.wiring.gate(&loaded, None)?);
    let mut captured = Captured::default();
    let mut seen = 0;
    let read = captured.read(capture, |frame, now| {
        seen += 1;
        match wire::parse(frame.link, frame.bytes, frame.wire_len) {
            Ok(packet) if seen < number => {
                offline.process(&packet, now);
                ControlFlow::Continue(())
            }
            Err(_) if seen < number => ControlFlow::Continue(()),
            Ok(packet) => {
                let walk = Walk::new(Dir::In, Some(offline.arrival(&packet)), None);
                ControlFlow::Break(Ok(explain(&mut offline, walk, &packet, now)))
            }
            Err(reason) => ControlFlow::Break(Err(reason)),
        }
    });
    let told = read?;
    captured.tell(NOT_IP);
    let capture = capture.display();
    match told {
        Some(told) => told.map_err(|reason| {
            Failure::Capture(format!("{capture}: packet {number} is undecodable: {reason}"))
        }),
        None => {
            let packets = count(seen, "packet");
            Err(Failure::Capture(format!("{capture} has {packets}, so there is no packet {number}")))
        }
    }
}

fn explain(offline: &mut OfflineGate, mut walk: Walk, packet: &Packet<'_>, now: Time) -> Told {
    let mut walks = Vec::new();
    let mut notes = Vec::new();
    loop {
        let explanation = offline.gate.explain(&walk, packet, now);
        let port = if walk.dir() == Dir::In { walk.recv() } else { walk.xmit() };
        let port = port.and_then(|id| offline.gate.ports().name(id)).unwrap_or("?").to_owned();
        let dir = walk.dir();
        let verdict = end(offline, &mut walk, packet, now, &explanation);
        if verdict != explanation.verdict {
            notes.push(format!(
                "with the current states, the packet has another outcome: {}, at rule {}",
                explained::verdict(verdict),
                walk.rule().map_or_else(|| "?".to_owned(), |rule| format!("{rule:05}"))
            ));
        }
        let out = offline.way_out(&walk, packet, verdict);
        walks.push(Walked { dir, port, explanation, verdict });
        match out {
            Some(port) => walk.leave(port),
            None => return Told { walks, notes },
        }
    }
}

/// Walks the packet and returns its real end, which the printed verdict is in any case. Where chance decides (`prob`, a pipe),
/// the explained end counts.
fn end(
    offline: &mut OfflineGate,
    walk: &mut Walk,
    packet: &Packet<'_>,
    now: Time,
    explanation: &Explanation,
) -> Step {
    let end = offline.walk(walk, packet, now);
    let chance = |step: &ExplainedRule| step.text.starts_with("prob ") || step.text.starts_with("pipe ");
    let explained = explanation.steps.iter().any(chance)
        || matches!(explanation.verdict, Step::Divert(_) | Step::Tee(_) | Step::Reassemble);
    if explained { explanation.verdict } else { end }
}
