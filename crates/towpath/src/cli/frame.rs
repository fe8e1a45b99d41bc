//! `towpath frame`: prints the messages in the TCP streams of captures.

use std::collections::BTreeMap;
use std::io::{self, BufWriter, Write};
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use clap::Parser;
use clap::builder::ValueHint;
use serde::Serialize;
use towpath::framing::{self, Named};
use towpath::quantity::count;
use towpath::streams::guess::{self, Guess, Sample};
use towpath::streams::messages::{Found, Messages};
use towpath::streams::{Chunk, Counters, Ending, Limits, Streams, Way};
use towpath_gate::reassembly::Reassembler;
use towpath_mux::framing::{Framing, PRESETS};
use towpath_wire::{self as wire, Addresses, Fragment};

use crate::args::exit;
use crate::cli::captured::Captured;
use crate::cli::{fail, warn};

/// Maximum number of bytes shown per message.
const SHOWN: usize = 16;
/// Maximum number of streams whose first bytes `--guess` keeps.
const MOST_SAMPLES: usize = 2048;

/// Print the messages in the TCP streams of captures
///
/// Streams are reassembled as by their receivers: retransmitted bytes are dropped, reordered segments are sorted, and the
/// first data for a sequence number is kept. FRAMING defines where a message ends: the name of a preset, clauses on one line,
/// a TOML file with the clauses, or a file with a BPF program for KCM (an ELF object of clang, raw instructions, or the output
/// of `tcpdump -ddd`; `FILE:NAME` selects one program of an object). `postgres` stands for postgres-frontend on the client's
/// side and postgres-backend on the server's side.
#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  towpath frame dns.pcap --framing dns-tcp
  towpath frame app.pcap --framing 'offset=0 length=4 be adjust=4 max=16M' --json
  towpath frame unknown.pcap --guess")]
pub(crate) struct Frame {
    /// Capture files (pcap or pcapng, also gzipped), or `-` for standard input
    #[arg(required_unless_present = "presets", value_name = "CAPTURE", value_hint = ValueHint::FilePath)]
    pub(crate) captures: Vec<PathBuf>,

    /// Framing of the messages: a preset, a file, or clauses
    #[arg(long, value_name = "FRAMING", required_unless_present_any = ["guess", "presets"])]
    pub(crate) framing: Option<String>,

    /// Framing of the server's messages, if different
    #[arg(long, value_name = "FRAMING", requires = "framing")]
    pub(crate) reply: Option<String>,

    /// Try the presets on both directions of each stream and print the ones that fit
    #[arg(long, conflicts_with = "framing")]
    pub(crate) guess: bool,

    /// List the presets
    #[arg(long)]
    pub(crate) presets: bool,

    /// Only streams with this port at either end; may be repeated
    #[arg(long = "port", value_name = "PORT")]
    pub(crate) ports: Vec<u16>,

    /// Only the stream with this number; may be repeated
    #[arg(long = "stream", value_name = "N")]
    pub(crate) streams: Vec<u64>,

    /// Print one JSON object per line (messages, or the results of --guess); other output goes to standard error
    #[arg(long)]
    pub(crate) json: bool,
}

enum Failure {
    Capture(towpath_port::Error),
    Framing(String),
    Output(io::Error),
}

pub(crate) fn run(args: &Frame) -> u8 {
    let result = if args.presets {
        presets(args)
    } else if args.guess {
        guess(args)
    } else {
        messages(args)
    };
    match result {
        Ok(()) => exit::OK,
        // The reader closed the pipe (`| head`); this is not an error.
        Err(Failure::Output(error)) if error.kind() == io::ErrorKind::BrokenPipe => exit::OK,
        Err(Failure::Output(error)) => fail(exit::FAILED, format_args!("standard output: {error}")),
        Err(Failure::Framing(error)) => fail(exit::USAGE, error),
        Err(Failure::Capture(error)) => fail(exit::NO_CAPTURE, error),
    }
}

/// Passes every chunk of the selected streams to `out`.
fn follow(args: &Frame, out: &mut impl FnMut(&Way, Chunk<'_>)) -> Result<(), Failure> {
    let mut streams = Streams::new(Limits::default());
    let mut chosen = |way: &Way, chunk: Chunk<'_>| {
        let port =
            args.ports.is_empty() || [way.src, way.dst].iter().any(|end| args.ports.contains(&end.port()));
        if port && (args.streams.is_empty() || args.streams.contains(&way.stream)) {
            out(way, chunk);
        }
    };
    let mut fragments = Reassembler::new();
    let mut malformed = 0u64;
    let mut captured = Captured::default();
    for path in &args.captures {
        let read = captured.read(path, |frame, now| {
            let link = frame.link;
            let Ok(packet) = wire::parse(link, frame.bytes, frame.wire_len) else {
                malformed += 1;
                return ControlFlow::<()>::Continue(());
            };
            if packet.fragment == Fragment::Whole || !matches!(packet.addresses, Addresses::V4(..)) {
                streams.handle_packet(&packet, &mut chosen);
                return ControlFlow::Continue(());
            }
            // A fragmented datagram reaches TCP only after reassembly.
            fragments.expire(now);
            if let Some(whole) = fragments.add(&packet, 0, 1, now, ()).whole
                && let Ok(packet) = wire::parse(link, &whole.frame, 0)
            {
                streams.handle_packet(&packet, &mut chosen);
            }
            ControlFlow::Continue(())
        });
        read.map_err(Failure::Capture)?;
    }
    streams.handle_end(&mut chosen);
    if malformed > 0 {
        warn(format_args!("{malformed} malformed packets were left out"));
    }
    captured.tell("left out");
    tell(&streams.counters());
    Ok(())
}

/// Warns of conflicts and losses that reassembly resolved.
fn tell(counters: &Counters) {
    if counters.conflicting > 0 {
        let bytes = counters.conflicting;
        warn(format_args!("{bytes} retransmitted bytes differ from the first transmission, which is used"));
    }
    if counters.missing > 0 {
        warn(format_args!("{} bytes of the streams are not in the capture", counters.missing));
    }
    if counters.forgotten > 0 {
        warn(format_args!("{} streams were ended early: too many are open at once", counters.forgotten));
    }
}

fn messages(args: &Frame) -> Result<(), Failure> {
    let request = args.framing.as_deref().unwrap_or_default();
    let reply = args.reply.as_deref().unwrap_or(request);
    // `postgres` names both sides of the protocol.
    let request = if request == "postgres" { "postgres-frontend" } else { request };
    let reply = if reply == "postgres" { "postgres-backend" } else { reply };
    let mut messages = Messages::new(framing("--framing", request)?, framing("--reply", reply)?);
    let mut printer = Printer::new(args.json);
    follow(args, &mut |way, chunk| {
        messages.handle_chunk(way, chunk, &mut |way, found| printer.print(way, &found));
    })?;
    printer.finish().map_err(Failure::Output)
}

/// Parses the framing that `option` was given: a preset, clauses, or a file.
fn framing(option: &str, text: &str) -> Result<Framing, Failure> {
    let named = Named::read(text, Path::new("")).map_err(|error| match error {
        framing::Error::Document(..) => Failure::Framing(error.to_string()),
        framing::Error::Other(..) => Failure::Framing(format!("{option} {error}")),
    })?;
    Ok(named.framing().clone())
}

/// Formats an end as `address:port`, IPv6 without brackets, like tshark. The port follows the last colon.
fn end(end: SocketAddr) -> String {
    format!("{}:{}", end.ip(), end.port())
}

/// One line of `--json`: a message or an event of a stream.
#[derive(Serialize)]
struct Line {
    stream: u64,
    src: String,
    dst: String,
    offset: u64,
    length: usize,
}

struct Printer {
    json: bool,
    out: BufWriter<io::StdoutLock<'static>>,
    /// The first write error; nothing is written after it.
    broken: Option<io::Error>,
    messages: u64,
    bytes: u64,
    stopped: u64,
}

impl Printer {
    fn new(json: bool) -> Self {
        let out = BufWriter::with_capacity(1 << 16, io::stdout().lock());
        Self { json, out, broken: None, messages: 0, bytes: 0, stopped: 0 }
    }

    fn print(&mut self, way: &Way, found: &Found<'_>) {
        if let Found::Message { offset, bytes } = found {
            self.messages += 1;
            self.bytes += bytes.len() as u64;
            self.message(way, *offset, bytes);
        } else if let Some(text) = told(found) {
            self.stopped += 1;
            let text = format!("stream {} {} > {}: {text}", way.stream, way.src, way.dst);
            if self.json {
                warn(text);
            } else {
                self.line(&text);
            }
        }
    }

    fn message(&mut self, way: &Way, offset: u64, bytes: &[u8]) {
        let (stream, length) = (way.stream, bytes.len());
        if !self.json {
            let (src, dst) = (way.src, way.dst);
            let shown = dump(bytes);
            return self
                .line(&format!("stream {stream} {src} > {dst}: offset {offset}, length {length}: {shown}"));
        }
        let line = Line { stream, src: end(way.src), dst: end(way.dst), offset, length };
        match serde_json::to_string(&line) {
            Ok(line) => self.line(&line),
            Err(error) => self.broken = self.broken.take().or(Some(error.into())),
        }
    }

    fn line(&mut self, line: &str) {
        if self.broken.is_none() {
            self.broken = writeln!(self.out, "{line}").err();
        }
    }

    fn finish(mut self) -> io::Result<()> {
        if !self.json {
            let (messages, bytes, stopped) = (self.messages, self.bytes, self.stopped);
            self.line(&format!(
                "{}, {}; {} stopped or lost a message",
                count(messages, "message"),
                count(bytes, "byte"),
                count(stopped, "direction")
            ));
        }
        match self.broken {
            Some(error) => Err(error),
            None => self.out.flush(),
        }
    }
}

/// The text for an event other than a message; `None` for a clean end.
fn told(found: &Found<'_>) -> Option<String> {
    Some(match found {
        Found::Message { .. } | Found::End { inside: 0, .. } => return None,
        Found::Lost { offset, length, missing } => {
            format!(
                "the message of {length} bytes at offset {offset} has {missing} bytes that were not captured"
            )
        }
        Found::Hole { offset, missing } => {
            format!(
                "{missing} bytes were not captured; after offset {offset} the start of a message is unknown"
            )
        }
        Found::Failed(failure) => failure.to_string(),
        Found::GivenBack { offset, bytes } => {
            format!("given back at offset {offset}: another protocol begins: {}", dump(bytes))
        }
        Found::GivenUp { offset } => {
            format!("given up at offset {offset}: too much is held for all streams together")
        }
        Found::End { offset, inside, length, ending } => {
            let ending = match ending {
                Ending::Fin => "closed",
                Ending::Reset => "reset",
                Ending::Capture => "the capture ends",
                Ending::Reused => "the ports are used again",
                Ending::Forgotten => "too many streams are open",
            };
            let of = length.map_or_else(|| "an unknown number".to_owned(), |length| length.to_string());
            format!("{ending} inside the message at offset {offset}: {inside} bytes of {of}")
        }
    })
}

/// The first bytes of a message, in hexadecimal and as text.
fn dump(bytes: &[u8]) -> String {
    let shown = &bytes[..bytes.len().min(SHOWN)];
    let hex: Vec<String> = shown.iter().map(|byte| format!("{byte:02x}")).collect();
    let printable = |byte: &u8| if matches!(byte, b' '..=b'~') { char::from(*byte) } else { '.' };
    let text: String = shown.iter().map(printable).collect();
    let more = if bytes.len() > SHOWN { " .." } else { "" };
    format!("{}{more} |{text}|", hex.join(" "))
}

/// One line of `--guess --json`.
#[derive(Serialize)]
struct GuessLine<'a> {
    stream: u64,
    client: String,
    server: String,
    preset: &'a str,
    reply: &'a str,
    score: f64,
    reason: &'a str,
}

/// By stream number: the first bytes of both directions, the client's first, and one of the stream's two directions.
type Samples = BTreeMap<u64, ([Sample; 2], Way)>;

fn guess(args: &Frame) -> Result<(), Failure> {
    let mut samples = Samples::new();
    let mut left_out = false;
    follow(args, &mut |way, chunk| {
        if samples.len() >= MOST_SAMPLES && !samples.contains_key(&way.stream) {
            left_out |= matches!(chunk, Chunk::Data(_));
            return;
        }
        let side = usize::from(!way.is_client());
        if let Chunk::Data(bytes) = chunk {
            let (both, _) = samples.entry(way.stream).or_insert_with(|| (Default::default(), *way));
            both[side].extend(bytes, way.midstream);
        } else if let Some((both, _)) = samples.get_mut(&way.stream) {
            both[side].close(matches!(chunk, Chunk::End(_)));
        }
    })?;
    if left_out {
        warn(format_args!("only the first {MOST_SAMPLES} streams were tried"));
    }
    tell_guesses(args, samples).map_err(Failure::Output)
}

fn tell_guesses(args: &Frame, samples: Samples) -> io::Result<()> {
    let mut out = BufWriter::new(io::stdout().lock());
    // Per preset, the bytes for which it fitted best, over all streams.
    let mut best: BTreeMap<&str, usize> = BTreeMap::new();
    for (stream, (both, way)) in samples {
        let (client, server) = if way.is_client() { (way.src, way.dst) } else { (way.dst, way.src) };
        let guesses = guess::guess(&both);
        let bytes = both[0].bytes.len() + both[1].bytes.len();
        *best.entry(guesses.first().map_or("none", |guess| guess.request)).or_default() += bytes;
        if args.json {
            for Guess { request, reply, swapped, score, reason } in &guesses {
                let (client, server) = if *swapped { (server, client) } else { (client, server) };
                let (client, server) = (end(client), end(server));
                let score = (score * 1000.0).round() / 1000.0;
                let line = GuessLine { stream, client, server, preset: request, reply, score, reason };
                writeln!(out, "{}", serde_json::to_string(&line)?)?;
            }
            continue;
        }
        writeln!(out, "stream {stream} {client} > {server}:")?;
        if guesses.is_empty() {
            writeln!(out, "  no preset fits")?;
        }
        for Guess { request, reply, swapped, score, reason } in guesses.iter().take(3) {
            let reply = if request == reply { String::new() } else { format!(" and {reply}") };
            let swapped = if *swapped { ", the ends the other way around" } else { "" };
            writeln!(out, "  {score:.2}  {request}{reply}{swapped}: {reason}")?;
        }
    }
    if !args.json {
        let mut best: Vec<_> = best.into_iter().collect();
        best.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
        for (name, bytes) in best {
            writeln!(out, "best for {bytes} bytes: {name}")?;
        }
    }
    out.flush()
}

/// One line of `--presets --json`.
#[derive(Serialize)]
struct PresetLine {
    name: &'static str,
    alias: Option<&'static str>,
    about: &'static str,
    /// `null` for presets that are implemented in code.
    framing: Option<String>,
}

fn presets(args: &Frame) -> Result<(), Failure> {
    let mut out = BufWriter::new(io::stdout().lock());
    for preset in PRESETS {
        let framing = preset.text().map(|text| text.split_whitespace().collect::<Vec<_>>().join(" "));
        let alias = Some(preset.alias).filter(|alias| !alias.is_empty());
        let line = PresetLine { name: preset.name, alias, about: preset.about, framing };
        let written = if args.json {
            serde_json::to_string(&line).map_err(io::Error::from).and_then(|line| writeln!(out, "{line}"))
        } else {
            let framing = line.framing.as_deref().unwrap_or("(in code)");
            writeln!(out, "{}: {}\n    {framing}", line.name, line.about)
        };
        written.map_err(Failure::Output)?;
    }
    out.flush().map_err(Failure::Output)
}
