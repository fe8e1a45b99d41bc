//! `towpath mux`: a server front whose workers are processes.

use std::io;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::builder::ValueHint;
use clap::{Parser, ValueEnum};
use rustix::process::DumpableBehavior;
use serde_json::json;
use towpath::control;
use towpath::framing::Named;
use towpath::worker_pool::{self, Error, Outcome, WorkerPool};
use towpath_mux::assembler::Limits;
use towpath_mux::io::{Connect, Server, Tls};
use towpath_mux::mux::{self, Order};
use towpath_send::Choice;

use crate::args::exit;
use crate::cli::{answer, fail, say};

/// Serve connections with worker processes: each message goes to the worker that is free
///
/// Listens on ADDR (HOST:PORT, or unix:PATH; several are possible), cuts what comes into messages, hands each to a worker
/// process in shared memory, and sends the answer back to the peer that asked. A slow message holds up one worker, not
/// the connections that happened to share it.
///
/// SIGTERM and SIGINT drain: nothing more is accepted or read, what was is answered. SIGHUP replaces the workers one by
/// one: each new one has attached before the old one is let go. A worker that dies is started again; its message goes to
/// another one.
#[derive(Debug, Parser)]
#[command(after_help = "\
Example (the worker is crates/towpath-ring/examples/worker.rs):
  towpath mux 127.0.0.1:7007 --framing line --workers 4 --worker target/debug/examples/worker
  printf 'hello\\nworld\\n' | nc -N 127.0.0.1 7007")]
pub(crate) struct Mux {
    /// Where to listen: HOST:PORT, or unix:PATH; [::] is IPv6 alone
    #[arg(required_unless_present = "connected", value_name = "ADDR")]
    listen: Vec<String>,

    /// Encrypt what comes in over TCP: a certificate chain and its key, both PEM
    #[arg(long, value_name = "CERT,KEY", value_parser = pair, value_hint = ValueHint::FilePath)]
    tls: Option<(PathBuf, PathBuf)>,

    /// Keep a connection to PEER (HOST:PORT, or unix:PATH): several times for several that are equivalent
    ///
    /// What a worker sends without an address goes to the one that has least to send; one that ends is connected again,
    /// after 100 ms, doubled up to 30 s, by chance up to half less.
    #[arg(long, value_name = "PEER")]
    connected: Vec<String>,

    /// Encrypt those connections over TCP, and trust peers whose certificate one in FILE signed, PEM; PEER's host is the name
    #[arg(long, value_name = "FILE", requires = "connected", value_hint = ValueHint::FilePath)]
    trust: Option<PathBuf>,

    /// Where messages end: a preset's name, clauses, or a file: the same in TOML, or a BPF program made for KCM (docs/book/src/reference/framing.md)
    #[arg(long, value_name = "FRAMING")]
    framing: String,

    /// The program of a worker
    ///
    /// COMMAND is split into words as a shell would, and started without a shell. It finds its socket in TOWPATH_SOCKET
    /// (towpath_ring::Worker::attach_env) and must attach within 15 seconds.
    #[arg(long, value_name = "COMMAND")]
    worker: String,

    /// How many workers; as many as there are processors without it
    #[arg(long, value_name = "N", value_parser = workers)]
    workers: Option<NonZeroUsize>,

    /// What keeps its order when several workers work at once
    #[arg(long, value_name = "MODE", default_value = "none")]
    order: OrderArg,

    /// How long connections have to be done when the front is told to end, and workers that are replaced
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    drain: Duration,

    /// Kill a worker that has a message for longer; for ever without it
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,

    /// End connections without traffic and without work for so long; never without it
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    idle: Option<Duration>,

    /// End connections whose message does not arrive whole in this time (from its first byte; a long message has a
    /// second more for each 64 KiB); never without it
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    message_time: Option<Duration>,

    /// The longest message, in bytes; beyond 16 MiB the framing has to allow it too (max=32M)
    #[arg(long, value_name = "BYTES", default_value = "16777216", value_parser = clap::value_parser!(u32).range(1..=33_554_432))]
    message_max: u32,

    /// How often a message whose worker died is given to another one
    #[arg(long, value_name = "N", default_value = "2")]
    redeliver: u8,

    /// How answers of 16 KiB and more leave, on connections without TLS
    #[arg(long, value_name = "HOW", default_value = "adaptive")]
    send: SendArg,

    /// Compare each long answer's checksum when it is given with that when it has left: `ctl show send` counts those that changed
    ///
    /// Finds workers that write into what they have sent; reads every byte twice
    #[arg(long)]
    send_check: bool,

    /// What becomes of the connection of a message that was given up after that
    #[arg(long, value_name = "WHAT", default_value = "close")]
    undone: Undone,

    /// Serve `towpath ctl` on a Unix socket at PATH, for this user and root
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    control: Option<PathBuf>,

    /// At the end, print what became of connections and messages as one JSON object on standard output
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OrderArg {
    /// Nothing: the first worker that is free takes the next message
    None,
    /// Answers leave in the order of their messages
    Replies,
    /// One message of a connection at a time, on any worker
    Serial,
    /// All messages of a connection on one worker
    Sticky,
    /// One message with the framing's hash at a time
    Key,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SendArg {
    /// Without a copy where probes show that it works
    Adaptive,
    /// Without a copy
    Zerocopy,
    /// With one
    Plain,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Undone {
    /// It ends: its peer would wait for an answer that never comes
    Close,
    /// It goes on
    Keep,
}

pub(crate) fn run(args: &Mux) -> u8 {
    match serve(args) {
        Ok(outcome) => tell(&outcome, args.json),
        Err((code, message)) => fail(code, message),
    }
}

fn serve(args: &Mux) -> Result<Outcome, (u8, String)> {
    let framing = Named::read(&args.framing, Path::new(""))
        .map_err(|error| (exit::USAGE, format!("--framing {error}")))?
        .framing()
        .clone();
    if args.order == OrderArg::Key && !framing.may_have_key() {
        let why =
            "it gives no key; write its clauses with key=OFFSET:LENGTH (docs/book/src/reference/framing.md)";
        return Err((exit::USAGE, format!("--order key, --framing {}: {why}", args.framing)));
    }
    let command = shell_words::split(&args.worker)
        .map_err(|error| (exit::USAGE, format!("--worker {}: {error}", args.worker)))?;
    if command.is_empty() {
        return Err((exit::USAGE, "--worker has no command".to_owned()));
    }
    let failed = |error: io::Error| (exit::FAILED, error.to_string());
    let config = mux::Config {
        order: args.order.into(),
        redeliver: args.redeliver,
        idle: args.idle,
        connected: !args.connected.is_empty(),
        ..mux::Config::for_messages(args.message_max as usize)
    };
    let limits = Limits {
        message: args.message_max as usize,
        head_time: args.message_time,
        body_time: args.message_time,
        rate: 64 << 10,
        ..Limits::default()
    };
    super::run::open_files();
    // A process of the same user may otherwise read and write our memory through ptrace(2).
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let server = Server::with_limits(framing, limits, config).map_err(failed)?;
    let tls = args.tls.as_ref().map(|(cert, key)| Tls::server(cert, key)).transpose();
    let tls = tls.map_err(|error| (exit::USAGE, format!("--tls: {error}")))?;
    let peers = args.connected.iter().map(|peer| how(peer, args.trust.as_deref()));
    let peers = peers.collect::<Result<Vec<_>, _>>()?;
    let mut sockets = Vec::new();
    for address in &args.listen {
        let listens = worker_pool::listen(&server, address, tls.as_ref());
        let (at, socket) = listens.map_err(|error| {
            let code = if worker_pool::is_no_address(&error.source) { exit::USAGE } else { exit::NO_PORT };
            (code, error.to_string())
        })?;
        say(format_args!("listening on {at}"));
        sockets.extend(socket);
    }
    let control = args.control.as_deref().map(|path| control::Server::open(path, None)).transpose();
    let control = control.map_err(|error| (exit::NO_ENGINE, format!("--control: {error}")))?;
    let (_control, desk) = control.unzip();
    let workers =
        args.workers.unwrap_or_else(|| std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN));
    let config = worker_pool::Config {
        command,
        workers,
        drain: args.drain,
        timeout: args.timeout,
        close_undone: args.undone == Undone::Close,
        name: String::new(),
        first_channel: 0,
        send: match args.send {
            SendArg::Adaptive => Choice::Adaptive,
            SendArg::Zerocopy => Choice::Zerocopy,
            SendArg::Plain => Choice::Plain,
        },
        send_check: args.send_check,
    };
    let code = |error: Error| match error {
        Error::Worker { .. } => (exit::INSPECTOR, error.to_string()),
        Error::System { .. } => (exit::FAILED, error.to_string()),
    };
    let mut front = WorkerPool::new(&server, config, desk).map_err(code)?;
    front.keep(sockets);
    say(format_args!("{workers} workers attached"));
    let connect = |(peer, how): (&String, Connect)| {
        let connector = server.connect(peer, how);
        connector.map_err(|error| (exit::FAILED, format!("--connected {peer}: {error}")))
    };
    let _connectors = args.connected.iter().zip(peers).map(connect).collect::<Result<Vec<_>, _>>()?;
    front.run().map_err(code)
}

/// How to connect to a peer.
fn how(peer: &str, trust: Option<&Path>) -> Result<Connect, (u8, String)> {
    let wrong = |error: &dyn std::fmt::Display| (exit::USAGE, format!("--connected {peer}: {error}"));
    let mut how = Connect::default();
    if !peer.starts_with("unix:") {
        let parts = peer.rsplit_once(':').filter(|(_, port)| port.parse::<u16>().is_ok());
        let host = parts.map(|(host, _)| host.trim_matches(['[', ']']));
        let host = host.ok_or_else(|| wrong(&"a peer is HOST:PORT or unix:PATH"))?;
        let tls = trust.map(|roots| Tls::client(roots, host)).transpose();
        how.tls = tls.map_err(|error| (exit::USAGE, format!("--trust: {error}")))?;
    }
    Ok(how)
}

fn tell(outcome: &Outcome, json: bool) -> u8 {
    let Outcome { drained, cut, totals, restarts } = outcome;
    if json {
        let object = json!({
            "connections": totals.attach, "messages": totals.received, "done": totals.done,
            "given_up": totals.undone, "not_begun": totals.queued + totals.in_hand,
            "given_again": totals.redelivered, "restarts": restarts, "drained": drained, "cut": cut,
        });
        return answer(if *drained { exit::OK } else { exit::FAILED }, &format!("{object}\n"));
    }
    say(format_args!(
        "{} connections, {} messages: {} done, {} given up, {} not begun; {} given again, {restarts} workers started again",
        totals.attach,
        totals.received,
        totals.done,
        totals.undone,
        totals.queued + totals.in_hand,
        totals.redelivered,
    ));
    match drained {
        true => exit::OK,
        false => fail(
            exit::FAILED,
            format!("ended before everything was drained; {cut} connections were not done"),
        ),
    }
}

impl From<OrderArg> for Order {
    fn from(order: OrderArg) -> Self {
        match order {
            OrderArg::None => Self::None,
            OrderArg::Replies => Self::Replies,
            OrderArg::Serial => Self::Serial,
            OrderArg::Sticky => Self::Sticky,
            OrderArg::Key => Self::Key,
        }
    }
}

fn workers(text: &str) -> Result<NonZeroUsize, String> {
    match text.parse() {
        Ok(count @ 1..=64) => Ok(NonZeroUsize::new(count).expect("at least 1")),
        _ => Err("there are 1 to 64 workers".to_owned()),
    }
}

fn pair(text: &str) -> Result<(PathBuf, PathBuf), String> {
    let (cert, key) = text.split_once(',').ok_or("it is two files, CERT,KEY")?;
    Ok((cert.into(), key.into()))
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds) if (0.001..=86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("it is a number of seconds between 0.001 and 86400".to_owned()),
    }
}
