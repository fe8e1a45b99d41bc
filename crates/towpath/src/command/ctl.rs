//! `towpath ctl`: looks into a running engine through its control socket.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::ValueHint;
use clap::{Args, Parser, Subcommand};
use serde_json::json;
use towpath::control::protocol::{
    ANSWER_MAX, Answer, Code, Frame, JSON, PCAPNG, Request, emit, parse_answer,
};
use towpath::control::{mux, show};

use crate::args::exit;
use crate::command::{answer, fail};

/// How long the engine has for an answer, which it promises within half of that.
const PATIENCE: Duration = Duration::from_secs(10);

/// Look into a running engine
///
/// Connects to the control socket of an engine (`towpath replay --control PATH`). Only the engine's own user and root
/// may. An engine is never slowed down by those who look at it.
#[derive(Debug, Parser)]
#[command(after_help = "\
Example:
  towpath replay - --rules FILE --queue 1=COMMAND --control /tmp/ctl.sock < CAPTURE &
  towpath ctl --socket /tmp/ctl.sock show rings")]
pub(crate) struct Ctl {
    /// The engine's control socket
    #[arg(long, value_name = "PATH", env = "TOWPATH_CONTROL", default_value = "/run/towpath/control.sock")]
    #[arg(global = true, value_hint = ValueHint::FilePath)]
    socket: PathBuf,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Show what there is
    #[command(subcommand)]
    Show(Show),
    Trace(Trace),
}

#[derive(Debug, Subcommand)]
enum Show {
    /// Every channel to an inspector, with its ring
    ///
    /// One line per channel: its number, queue, process and user; frames of the ring and their size; frames in use;
    /// messages out, held and most at a time; age of the oldest; messages published and decided; doorbells. Below it what
    /// is not zero: verdicts, decisions by default, losses by reason.
    Rings(Json),
    /// The multiplexor of `towpath mux`, in the columns of Linux's /proc/net/kcm and /proc/net/kcm_stats
    ///
    /// A line for the mux, for each worker (kcm) and for each connection (psock): messages and bytes received and sent,
    /// messages that wait or are worked on, bytes held, state. Then the counters, what became of the messages, and how
    /// long they waited and took. Of more than 1000 connections those that hold most are listed.
    Mux(Json),
    /// The frames of a channel that are not free
    ///
    /// The states are memory-mapped netlink's: VALID is the inspector's, SKIP is held, COPY lies in a memory of its own;
    /// OVERDUE was decided without the inspector, which still has the memory.
    Frames {
        /// The channel's number, from `show rings`
        channel: u32,
        #[command(flatten)]
        json: Json,
    },
}

#[derive(Debug, Args)]
struct Json {
    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Write what a channel gets from now on as a pcapng capture
///
/// Each packet is written when it is decided, with the verdict as its comment. What the trace could not keep up with is
/// left out and counted, in the packets' drop counts and the interfaces' statistics: a trace never slows the engine. Ends
/// with the channel, or after --count packets.
#[derive(Debug, Args)]
struct Trace {
    /// The channel's number, from `show rings`
    channel: u32,

    /// Where to write it; `-` is standard output
    #[arg(long, value_name = "FILE", default_value = "-", value_hint = ValueHint::FilePath)]
    out: PathBuf,

    /// End after N packets
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

pub(crate) fn run(args: &Ctl) -> u8 {
    let done = match &args.command {
        Command::Show(Show::Rings(Json { json })) => rings(&args.socket, *json),
        Command::Show(Show::Mux(Json { json })) => show_mux(&args.socket, *json),
        Command::Show(Show::Frames { channel, json }) => frames(&args.socket, *channel, json.json),
        Command::Trace(trace) => self::trace(&args.socket, trace),
    };
    match done {
        Ok(text) => answer(exit::OK, &text),
        Err(Failure { code, message }) => fail(code, message),
    }
}

fn rings(socket: &Path, json: bool) -> Result<String, Failure> {
    let mut engine = Connection::open(socket, Request::ShowRings)?;
    let Answer::Rings { rings } = engine.answer()? else { return Err(engine.nonsense("to show rings")) };
    Ok(if json { json!({ "rings": rings }).to_string() + "\n" } else { show::rings(&rings) })
}

fn show_mux(socket: &Path, json: bool) -> Result<String, Failure> {
    let mut engine = Connection::open(socket, Request::ShowMux)?;
    let Answer::Mux { mux } = engine.answer()? else { return Err(engine.nonsense("to show mux")) };
    Ok(if json { json!({ "mux": mux }).to_string() + "\n" } else { mux::show(&mux) })
}

fn frames(socket: &Path, channel: u32, json: bool) -> Result<String, Failure> {
    let mut engine = Connection::open(socket, Request::ShowFrames { channel })?;
    let mut all: Vec<Frame> = Vec::new();
    loop {
        let Answer::Frames { frames, more, .. } = engine.answer()? else {
            return Err(engine.nonsense("to show frames"));
        };
        all.extend(frames);
        if !more {
            break;
        }
    }
    let text = || show::frames(channel, &all);
    Ok(if json { json!({ "channel": channel, "frames": all }).to_string() + "\n" } else { text() })
}

fn trace(socket: &Path, args: &Trace) -> Result<String, Failure> {
    let &Trace { channel, ref out, count } = args;
    if out.as_os_str() == "-" && io::stdout().is_terminal() {
        let message = "a capture is no text for a terminal; name a file with --out, or redirect it";
        return Err(Failure::new(exit::USAGE, message.to_owned()));
    }
    let mut engine = Connection::open(socket, Request::Trace { channel, count })?;
    let Answer::Tracing { .. } = engine.answer()? else { return Err(engine.nonsense("to trace")) };
    engine.is_patient(true)?;
    let file = |source| Failure::new(exit::FAILED, format!("{}: {source}", out.display()));
    let mut out: Box<dyn Write> = match out.as_os_str() == "-" {
        true => Box::new(io::stdout()),
        false => Box::new(File::create(out).map_err(file)?),
    };
    loop {
        match engine.message()? {
            Message::Capture(blocks) => match out.write_all(blocks).and_then(|()| out.flush()) {
                // Who reads no further has read enough.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(String::new()),
                other => other.map_err(file)?,
            },
            Message::Answer(Answer::Traced { packets, dropped, .. }) => {
                eprintln!("towpath: {packets} packets traced, {dropped} left out");
                return Ok(String::new());
            }
            Message::Answer(_) => return Err(engine.nonsense("to trace")),
        }
    }
}

/// A connection to an engine.
struct Connection {
    stream: UnixStream,
    socket: PathBuf,
    message: Vec<u8>,
}

enum Message<'a> {
    Answer(Answer),
    Capture(&'a [u8]),
}

struct Failure {
    code: u8,
    message: String,
}

impl Failure {
    fn new(code: u8, message: String) -> Self {
        Self { code, message }
    }
}

impl Connection {
    fn open(socket: &Path, request: Request) -> Result<Self, Failure> {
        let unreachable = |error: io::Error| {
            let hint = match error.kind() {
                ErrorKind::NotFound => "; no engine is there: is its --control the same path?",
                ErrorKind::ConnectionRefused => "; its engine has ended",
                ErrorKind::PermissionDenied => "; only the engine's user and root may",
                _ => "",
            };
            Failure::new(exit::NO_ENGINE, format!("cannot connect to {}: {error}{hint}", socket.display()))
        };
        let stream = UnixStream::connect(socket).map_err(unreachable)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(unreachable)?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(unreachable)?;
        let mut connection = Self { stream, socket: socket.into(), message: Vec::new() };
        // An engine that refuses us says why and closes: its answer is read all the same.
        let _ = connection.stream.write_all(&emit(&request));
        Ok(connection)
    }

    /// Whether to wait for messages however long they take.
    fn is_patient(&mut self, patient: bool) -> Result<(), Failure> {
        let timeout = (!patient).then_some(PATIENCE);
        self.stream.set_read_timeout(timeout).map_err(|error| self.broken(&error))
    }

    fn answer(&mut self) -> Result<Answer, Failure> {
        match self.message()? {
            Message::Answer(answer) => Ok(answer),
            Message::Capture(_) => Err(self.nonsense("with a capture that was not asked for")),
        }
    }

    fn message(&mut self) -> Result<Message<'_>, Failure> {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).map_err(|error| self.broken(&error))?;
        let length = u32::from_le_bytes(length) as usize;
        if !(1..=ANSWER_MAX).contains(&length) {
            return Err(self.nonsense("with a message of impossible length"));
        }
        self.message.resize(length, 0);
        let mut message = std::mem::take(&mut self.message);
        let read = self.stream.read_exact(&mut message);
        self.message = message;
        read.map_err(|error| self.broken(&error))?;
        match self.message[0] {
            PCAPNG => Ok(Message::Capture(&self.message[1..])),
            JSON => match parse_answer(&self.message[1..]) {
                Ok(Answer::Error { code, message }) => Err(Failure::new(exit_code(code), message)),
                Ok(answer) => Ok(Message::Answer(answer)),
                Err(error) => Err(Failure::new(exit::FAILED, error)),
            },
            _ => Err(self.nonsense("with an unknown kind of message")),
        }
    }

    fn broken(&self, error: &io::Error) -> Failure {
        let socket = self.socket.display();
        match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
                Failure::new(exit::NO_ENGINE, format!("{socket}: the engine has ended"))
            }
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                let seconds = PATIENCE.as_secs();
                Failure::new(exit::FAILED, format!("{socket}: the engine did not answer within {seconds} s"))
            }
            _ => Failure::new(exit::FAILED, format!("{socket}: {error}")),
        }
    }

    fn nonsense(&self, what: &str) -> Failure {
        let socket = self.socket.display();
        Failure::new(exit::FAILED, format!("{socket} answers {what}: is it an engine's control socket?"))
    }
}

fn exit_code(code: Code) -> u8 {
    match code {
        Code::NotPermitted | Code::Ended => exit::NO_ENGINE,
        Code::Version | Code::Request | Code::TooLong | Code::Busy | Code::NoChannel | Code::NoMux => {
            exit::FAILED
        }
    }
}
