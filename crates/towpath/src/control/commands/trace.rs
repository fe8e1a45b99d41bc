//! `towpath ctl trace`

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::PathBuf;
use std::sync::atomic::Ordering;
use std::sync::mpsc::TryRecvError;

use clap::Args;
use clap::builder::ValueHint;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use towpath_port::pcap::{Blocks, Options};
use towpath_wire::LinkType;

use super::super::client::{Engine, Failure, Message};
use super::super::command::{
    Access, Command, Context, Handled, Progress, Reply, Request, Stream, arguments, parse,
};
use super::super::flow_filter::FlowFilter;
use super::super::protocol::{Code, PCAPNG, Refusal, answer, frame};
use super::super::query::Target;
use super::super::trace::{TraceBuffer, TraceRecord, TraceSource};
use super::show_frames::no_channel;
use crate::exit;
use crate::output::say;
use crate::quantity;

/// Inbound (`epb_flags`, bits 0 and 1).
const INBOUND: u32 = 1;

/// Write the packets of a channel, of a rule or of a flow, or the dropped packets, as a pcapng capture
///
/// A packet is written when it is decided, with the verdict as its comment. Packets that the trace has no room for are left out
/// and counted, in the packets' drop counts and the interfaces' statistics: a trace does not slow the engine. Ends with
/// the channel, or after --count packets. With --drop, the comment has the reason of the drop; a packet that passed the rules and failed
/// to leave has the port that it failed to leave by.
#[derive(Debug, Args)]
#[command(
    override_usage = "towpath ctl trace [OPTIONS] <CHANNEL>\n       towpath ctl trace [OPTIONS] [--rule <N>] [--flow <FLOW>] [--drop <REASON>]"
)]
pub(super) struct Trace {
    /// The channel's number, from `show rings`
    #[arg(required_unless_present_any = ["rule", "flow", "drop"], conflicts_with_all = ["rule", "flow", "drop"])]
    channel: Option<u32>,

    /// Trace the packets that rule N decides
    #[arg(long, value_name = "N")]
    rule: Option<u32>,

    /// Trace the packets of a flow, in both directions: PROTOCOL END END, such as `tcp 10.0.0.1 10.0.0.2:22`; an END is ADDRESS,
    /// ADDRESS:PORT, :PORT or any
    #[arg(long, value_name = "FLOW")]
    flow: Option<String>,

    /// Trace the packets that are dropped for a reason of `show stats`, such as no_route; `malformed` and `tx_refused` stand for all
    /// reasons that begin so, `any` for all reasons
    #[arg(long, value_name = "REASON")]
    drop: Option<String>,

    /// The file to write; `-` is standard output
    #[arg(long, value_name = "FILE", default_value = "-", value_hint = ValueHint::FilePath)]
    out: PathBuf,

    /// End after N packets
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

pub(super) const COMMAND: Command = Command::other::<Trace>(
    "trace",
    &[
        Request { name: "trace", access: Access::Packets, handle: trace_channel },
        Request { name: "follow", access: Access::Packets, handle: trace_packets },
    ],
    |engine, matches| trace(engine, &arguments(matches)),
);

/// Traces a channel.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct ChannelRequest {
    channel: u32,
    /// End after this number of packets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    count: Option<u64>,
}

/// Traces the packets that a rule decides, the packets of a flow, dropped packets, or those that match several of these.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PacketsRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rule: Option<u32>,
    /// As [`FlowFilter::new`] reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    flow: Option<String>,
    /// As [`FlowFilter::with_drop`] reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    drop: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    count: Option<u64>,
}

fn trace_channel(body: Value, context: &Context<'_>) -> Handled {
    let ChannelRequest { channel, count } = parse(body)?;
    let begin = move |target: &mut Target<'_>, buffer: TraceBuffer| {
        let engine = target.engine()?;
        engine.trace_channel(channel, Box::new(buffer)).then(|| engine.ports())
    };
    begin_trace(context, begin, channel, count, no_channel(channel))
}

fn trace_packets(body: Value, context: &Context<'_>) -> Handled {
    let PacketsRequest { rule, flow, drop, count } = parse(body)?;
    let filter = FlowFilter::new(rule, flow.as_deref())
        .and_then(|filter| filter.with_drop(drop.as_deref()))
        .map_err(|message| Refusal::new(Code::Invalid, message))?;
    let begin = move |target: &mut Target<'_>, buffer: TraceBuffer| {
        let engine = target.engine()?;
        engine.trace_packets(Box::new(filter.clone()), Box::new(buffer)).then(|| engine.ports())
    };
    let refusal = Refusal::new(Code::Busy, "the engine already runs 8 packet traces, or has no ports");
    begin_trace(context, begin, 0, count, refusal)
}

/// Begins one trace on all engine threads. `begin` returns the names of the ports.
fn begin_trace(
    context: &Context<'_>,
    begin: impl Fn(&mut Target<'_>, TraceBuffer) -> Option<Vec<String>> + Clone + Send + 'static,
    channel: u32,
    count: Option<u64>,
    refusal: Refusal,
) -> Handled {
    let (buffer, mut source) = TraceBuffer::new();
    source.pause = context.ruleset.and_then(|ruleset| ruleset.offload()).map(|offload| offload.pause());
    let query = || {
        let (begin, buffer) = (begin.clone(), buffer.for_another_thread());
        move |target: &mut Target<'_>| begin(target, buffer)
    };
    context.query_each(query, move |parts| {
        let ports = parts.into_iter().flatten().next().ok_or(refusal)?;
        Ok(Reply::Stream(Box::new(Capture::new(source, &ports, channel, count))))
    })
}

/// The answers of a trace: `tracing`, a capture in parts, `traced`.
#[derive(Debug)]
struct Capture {
    source: TraceSource,
    /// Output before the first packet.
    head: Vec<u8>,
    blocks: Blocks,
    left: u64,
    packets: u64,
    /// Drops already reported in the capture.
    told: u64,
    /// Time of the last packet.
    time: u64,
}

impl Capture {
    fn new(source: TraceSource, ports: &[String], channel: u32, count: Option<u64>) -> Self {
        let mut head = answer("tracing", json!({ "channel": channel }));
        let (mut blocks, mut section) = (Blocks::new(), Vec::new());
        blocks.section(&mut section).expect("writing to a Vec does not fail");
        for (number, name) in (0..).zip(ports) {
            blocks.name(number, name.clone());
        }
        head.extend(frame(PCAPNG, &section));
        Self { source, head, blocks, left: count.unwrap_or(u64::MAX), packets: 0, told: 0, time: 0 }
    }

    fn dropped(&self) -> u64 {
        // Relaxed: a counter that orders nothing.
        self.source.dropped.load(Ordering::Relaxed)
    }

    fn end(&mut self, output: &mut Vec<u8>, why: &str) -> Progress {
        self.statistics(output);
        let body = json!({ "packets": self.packets, "dropped": self.dropped(), "why": why });
        output.extend(answer("traced", body));
        Progress::Done
    }

    fn packet(&mut self, output: &mut Vec<u8>, record: &TraceRecord) {
        let dropped = self.dropped();
        let packet = towpath_port::Frame {
            bytes: &record.bytes,
            wire_len: record.wire_len,
            time_ns: record.time,
            link: LinkType(record.link),
            interface: record.port,
            meta: Default::default(),
        };
        let options = Options {
            comment: Some(&record.comment),
            flags: Some(INBOUND),
            dropped: (dropped > self.told).then(|| dropped - self.told),
        };
        let mut block = Vec::with_capacity(record.bytes.len() + 256);
        self.blocks.packet(&mut block, packet, &options).expect("writing to a Vec does not fail");
        output.extend(frame(PCAPNG, &block));
        self.told = dropped;
        self.time = record.time;
        self.packets += 1;
        self.left -= 1;
    }

    fn statistics(&mut self, output: &mut Vec<u8>) {
        let dropped = self.dropped();
        let mut blocks = Vec::new();
        let received = self.packets + dropped;
        self.blocks
            .statistics(&mut blocks, self.time, received, dropped)
            .expect("writing to a Vec does not fail");
        if !blocks.is_empty() {
            output.extend(frame(PCAPNG, &blocks));
        }
        self.told = dropped;
    }
}

impl Stream for Capture {
    fn produce(&mut self, output: &mut Vec<u8>) -> Progress {
        output.append(&mut self.head);
        if self.left == 0 {
            return self.end(output, "count");
        }
        match self.source.ready.try_recv() {
            Ok(record) => {
                self.packet(output, &record);
                Progress::More
            }
            Err(TryRecvError::Empty) => {
                if self.dropped() > self.told {
                    self.statistics(output);
                }
                Progress::Idle
            }
            Err(TryRecvError::Disconnected) => self.end(output, "channel"),
        }
    }

    fn is_live(&self) -> bool {
        true
    }
}

fn trace(engine: &Engine, args: &Trace) -> Result<String, Failure> {
    let &Trace { channel, ref out, count, rule, ref flow, ref drop } = args;
    if out.as_os_str() == "-" && io::stdout().is_terminal() {
        let message =
            "a capture cannot be written to a terminal; name a file with --out, or redirect the output";
        return Err(Failure::new(exit::USAGE, message));
    }
    let mut connection = match channel {
        Some(channel) => engine.open("trace", ChannelRequest { channel, count })?,
        None => {
            engine.open("follow", PacketsRequest { rule, flow: flow.clone(), drop: drop.clone(), count })?
        }
    };
    connection.answer("tracing")?;
    connection.wait_forever()?;
    let file = |source| Failure::new(exit::FAILED, format!("{}: {source}", out.display()));
    let mut out: Box<dyn Write> = match out.as_os_str() == "-" {
        true => Box::new(io::stdout()),
        false => Box::new(File::create(out).map_err(file)?),
    };
    loop {
        match connection.message()? {
            Message::Capture(blocks) => match out.write_all(blocks).and_then(|()| out.flush()) {
                // The reader has read enough (`| head`).
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(String::new()),
                other => other.map_err(file)?,
            },
            Message::Answer(answer) if answer.name == "traced" => {
                let number = |key: &str| answer.body[key].as_u64().unwrap_or_default();
                let (packets, dropped) = (quantity::count(number("packets"), "packet"), number("dropped"));
                say(format_args!("towpath: {packets} traced, {dropped} left out"));
                return Ok(String::new());
            }
            Message::Answer(_) => return Err(connection.unexpected("something else than a trace")),
        }
    }
}

#[cfg(test)]
mod tests {
    use towpath_engine::{DropReason, TraceSink};
    use towpath_ring::{Cause, Decision, Meta, Seq, Verdict};

    use super::super::super::session::{Session, tests as session};
    use super::*;

    #[test]
    fn a_trace_is_a_capture_and_counts_losses() {
        let (mut buffer, source) = TraceBuffer::new();
        let mut client = Session::new(0);
        session::ask(&mut client, "trace", json!({ "channel": 1, "count": 2 }));
        let capture = Capture::new(source, &["cap0".to_owned()], 1, Some(2));
        client.handle_reply(Reply::Stream(Box::new(capture)), 0);
        assert!(client.is_live());
        let meta = Meta {
            wire_len: 100,
            time: 77,
            group: 3,
            layers: towpath_ring::Layers { link: 1, ..Default::default() },
            ..Meta::default()
        };
        for seq in 1..=3 {
            buffer.given(Seq(seq), &[seq as u8; 60], &meta);
        }
        let decision =
            Decision { verdict: Verdict::Drop, mark: 1, mask: 3, flow: true, cause: Cause::Single };
        buffer.decided(Seq(2), 2500, &Ok(decision));
        buffer.decided(Seq(1), 3000, &Err(DropReason::Overdue));
        buffer.decided(Seq(3), 3000, &Err(DropReason::InvalidVerdict));
        let (answers, capture) = session::take(&mut client);
        assert_eq!((&*answers[0].name, &answers[0].body), ("tracing", &json!({ "channel": 1 })));
        let end = json!({ "packets": 2, "dropped": 0, "why": "count" });
        assert_eq!((&*answers[1].name, &answers[1].body), ("traced", &end));
        let text = String::from_utf8_lossy(&capture);
        assert!(text.contains("queue 3, seq 2: drop, mark 0x1/0x3, for the flow, after 2.500 us"));
        assert!(text.contains("queue 3, seq 1: no verdict, overdue, after 3.000 us"));
        assert!(text.contains("cap0"));
        assert!(!client.is_live());
        buffer.decided(Seq(3), 0, &Err(DropReason::InspectorDied));
    }

    #[test]
    fn a_trace_ends_with_its_channel() {
        let (buffer, source) = TraceBuffer::new();
        let mut client = Session::new(0);
        session::ask(&mut client, "trace", json!({ "channel": 1 }));
        client.handle_reply(Reply::Stream(Box::new(Capture::new(source, &[], 1, None))), 0);
        drop(buffer);
        let (answers, _) = session::take(&mut client);
        assert_eq!(answers[1].body, json!({ "packets": 0, "dropped": 0, "why": "channel" }));
    }
}
