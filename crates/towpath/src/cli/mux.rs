//! `towpath mux`: a message multiplexor with worker processes.

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
use towpath::mux_bounds::MuxBounds;
use towpath::process::{Local, Place, Program, Starter};
use towpath::quantity::count;
use towpath::service_manager::{self, Address, Sockets};
use towpath::upgrade::{Executable, Predecessor};
#[cfg(feature = "fleet")]
use towpath::worker_pool::RemoteSlots;
use towpath::worker_pool::{
    self, Error, Inherited, InheritedFile, Outcome, Upgradable, WorkerEnd, WorkerPool, delivery,
};
use towpath_mux::assembler::Limits;
use towpath_mux::framing::Framing;
use towpath_mux::io::{Connect, Server, ServerTls, Tls};
use towpath_mux::mux::{self, Order};
use towpath_send::CopyMode;

use crate::args::exit;
use crate::cli::log::LogOptions;
use crate::cli::{answer, fail, say};

const EXAMPLE: &str = "\
Example (the worker is crates/towpath-ring/examples/worker.rs):
  towpath mux 127.0.0.1:7007 --framing line --workers 4 --worker target/debug/examples/worker
  printf 'hello\\nworld\\n' | nc -N 127.0.0.1 7007";

/// Serve connections with worker processes; each message goes to a free worker
///
/// Listens on ADDR (HOST:PORT or unix:PATH; may be repeated), splits the received bytes into messages, hands each message to a
/// worker process through shared memory, and sends the worker's reply to the message's connection. A slow message occupies one
/// worker and does not block other connections.
///
/// SIGTERM and SIGINT drain: the mux accepts and reads nothing more, answers the received messages, and exits. SIGHUP replaces
/// the workers one by one; a worker is released after its replacement has attached. It also reads the certificates again. A worker that
/// dies is restarted; its message goes to another worker.
///
/// SIGUSR2 upgrades: a new process of the same path and arguments gets the listening sockets and the connections, and this one ends.
/// No connection is refused and no message is lost. TLS connections are served by this process for up to --drain seconds.
#[derive(Debug, Parser)]
#[command(after_help = EXAMPLE, after_long_help = format!("{EXAMPLE}\n\n{}", delivery::help()))]
pub(crate) struct Mux {
    /// Listening address: HOST:PORT or unix:PATH; [::] is IPv6 only
    #[arg(required_unless_present = "connected", value_name = "ADDR")]
    listen: Vec<String>,

    #[command(flatten)]
    tls: TlsArgs,

    /// Keep a connection to PEER (HOST:PORT or unix:PATH); may be repeated for equivalent peers
    ///
    /// A message that a worker sends without an address goes to the connection with the least unsent data. A connection that ends
    /// is re-established after 100 ms; the delay doubles up to 30 s, with a random reduction of up to half.
    #[arg(long, value_name = "PEER")]
    connected: Vec<String>,

    /// Use TLS for TCP connections to peers; trust certificates signed by a CA in FILE (PEM); the name is PEER's host
    #[arg(long, value_name = "FILE", requires = "connected", value_hint = ValueHint::FilePath)]
    trust: Option<PathBuf>,

    /// Framing of the messages: a preset, clauses, a TOML file, or a BPF program for KCM (docs/book/src/reference/framing.md)
    #[arg(long, value_name = "FRAMING")]
    framing: String,

    /// The worker's command
    ///
    /// COMMAND is split into words as by a shell, and runs without a shell. It finds the socket's path in TOWPATH_SOCKET
    /// (towpath_ring::Worker::attach_env) and must attach within 15 seconds.
    #[arg(long, value_name = "COMMAND")]
    #[cfg_attr(not(feature = "fleet"), arg(required = true))]
    #[cfg_attr(feature = "fleet", arg(required_unless_present = "remote"))]
    worker: Option<String>,

    #[cfg(feature = "fleet")]
    #[command(flatten)]
    remote: RemoteArgs,

    /// Further rights of the workers; a worker without the right is detached at once and restarted after a second or more
    ///
    /// By default, a worker may answer each message once, and send messages to the connections that it received messages from.
    #[arg(long, value_name = "RIGHT")]
    worker_may: Option<Right>,

    /// Number of workers; default: the number of processors
    #[arg(long, value_name = "N", requires = "worker", value_parser = workers)]
    workers: Option<NonZeroUsize>,

    /// Order guarantee when several workers run concurrently; default: the one that the framing's protocol needs
    #[arg(long, value_name = "MODE")]
    order: Option<OrderArg>,

    /// Maximum number of messages of one connection that workers hold at a time; default: those of all workers but one
    ///
    /// By default, a connection leaves a worker free while another connection was attached or sent a message in the last 10 s. It has all
    /// workers otherwise, and with --order serial or sticky. A number applies always; a large one, such as 1000000, is no limit.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    in_flight: Option<NonZeroUsize>,

    /// With --order sticky: move a connection between two messages if its worker has more than N connections more than another one
    ///
    /// Default: a connection stays with its worker, which may keep state of it, until this worker leaves.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    rebalance: Option<NonZeroUsize>,

    /// Time limit for connections to finish when the mux stops, and for workers being replaced, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    drain: Duration,

    /// Time for a new process to start its workers after SIGUSR2, in seconds; if it needs longer, this process continues
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    upgrade_time: Duration,

    /// Kill a worker that holds a message for longer than this, in seconds; default: no limit
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    timeout: Option<Duration>,

    /// Close connections without traffic and pending work for this time, in seconds; default: never
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    idle: Option<Duration>,

    /// Close connections whose message is incomplete after this time, in seconds, counted from its first byte; one second more
    /// per 64 KiB of the message; default: never
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    message_time: Option<Duration>,

    /// Maximum message size, in bytes; above 16 MiB the framing must allow it too (max=32M)
    #[arg(long, value_name = "BYTES", default_value = "16777216", value_parser = clap::value_parser!(u32).range(1..=33_554_432))]
    message_max: u32,

    #[command(flatten)]
    bounds: Bounds,

    /// How often a message whose worker died is redelivered to another worker
    #[arg(long, value_name = "N", default_value = "2")]
    redeliver: u8,

    /// What happens to the connections of a worker that ends; default: close with --order sticky, move with other orders
    ///
    /// A worker serves the connections bound to it (sticky), and with other orders those whose messages it holds and those that it
    /// opened. Closed connections get the goodbye of their protocol if the preset has one, and their messages are given up. SIGHUP
    /// with --order sticky lets a worker finish its connections for up to --drain seconds before.
    #[arg(long, value_name = "WHAT")]
    on_worker_end: Option<EndArg>,

    /// How to send replies of 16 KiB and more on connections without TLS
    #[arg(long, value_name = "HOW", default_value = "adaptive")]
    send: SendArg,

    /// Verify that workers do not modify sent replies: compare the checksum of each long reply before and after sending
    ///
    /// `ctl show send` counts modified replies. Reads every byte twice.
    #[arg(long)]
    send_check: bool,

    /// Action on the connection of a message that is given up after all redeliveries
    #[arg(long, value_name = "WHAT", default_value = "close")]
    undone: Undone,

    /// Serve `towpath ctl` on a Unix socket at PATH, for this user and root
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    control: Option<PathBuf>,

    /// On exit, print the connection and message counters as one JSON object on standard output
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    log: LogOptions,
}

// Not a doc comment: clap would make it the description of the command.
#[derive(Debug, clap::Args)]
struct TlsArgs {
    /// Serve TLS on TCP connections, with this certificate chain and its key (PEM); SIGHUP reads the files again
    ///
    /// A client that asks for other protocols (ALPN) than those of the framing's preset is refused.
    #[arg(long, value_name = "CERT,KEY", value_parser = pair, value_hint = ValueHint::FilePath)]
    tls: Option<(PathBuf, PathBuf)>,

    /// Require certificates of clients, signed by a CA in FILE (PEM); workers get their names
    #[arg(long, value_name = "FILE", requires = "tls", value_hint = ValueHint::FilePath)]
    tls_client_ca: Option<PathBuf>,

    /// Serve clients without a certificate too
    #[arg(long, requires = "tls_client_ca")]
    tls_client_optional: bool,

    /// Begin in plaintext and require STARTTLS (smtp) or SSLRequest (postgres-frontend); default: TLS from the first byte
    #[arg(long, requires = "tls")]
    starttls: bool,

    /// The kernel encrypts and decrypts after the handshake; needs its module tls (`modprobe tls`)
    #[arg(long, requires = "tls")]
    tls_kernel: bool,
}

impl TlsArgs {
    fn server(&self, framing: &Framing, name: &str) -> Result<Option<Tls>, (u8, String)> {
        let Some((chain, key)) = &self.tls else { return Ok(None) };
        let starttls = framing.starttls().filter(|_| self.starttls);
        if self.starttls && starttls.is_none() {
            let why = "its protocol has none; use smtp or postgres-frontend, or remove --starttls";
            return Err((exit::USAGE, format!("--starttls, --framing {name}: {why}")));
        }
        let files = ServerTls {
            client_ca: self.tls_client_ca.clone(),
            client_optional: self.tls_client_optional,
            starttls,
            kernel: self.tls_kernel,
            ..ServerTls::new(chain, key).for_framing(framing)
        };
        Tls::from_files(files).map(Some).map_err(|error| (exit::USAGE, format!("--tls: {error}")))
    }
}

// Not a doc comment: clap would make it the description of the command.
#[cfg(feature = "fleet")]
#[derive(Debug, clap::Args)]
struct RemoteArgs {
    /// Use workers on other machines too: those of each `towpath worker --subject SUBJECT`, over NATS
    ///
    /// They get the messages that the processes of --worker do not take, the nearest first. Without --worker, they get all messages.
    #[arg(long, value_name = "SUBJECT", group = super::bus::SUBJECT, value_parser = super::bus::subject)]
    remote: Option<String>,

    /// Maximum number of workers on other machines (1-64)
    #[arg(long, value_name = "N", default_value = "16", requires = "remote", value_parser = workers)]
    remote_workers: NonZeroUsize,

    #[command(flatten)]
    bus: super::bus::BusArgs,
}

#[cfg(feature = "fleet")]
impl RemoteArgs {
    /// Starts the client of NATS. It ends when it is dropped, after the pool.
    fn start(&self) -> io::Result<Option<(towpath::remote_workers::RemoteFront, RemoteSlots)>> {
        let Some(subject) = &self.remote else { return Ok(None) };
        let config = towpath::remote_workers::FrontConfig { bus: self.bus.settings(subject), begin: || () };
        let front = towpath::remote_workers::RemoteFront::start(config)?;
        let remote = RemoteSlots { starter: front.starter(), most: self.remote_workers };
        Ok(Some((front, remote)))
    }
}

// Not a doc comment: clap would make it the description of the command.
#[derive(Debug, clap::Args)]
struct Bounds {
    /// Maximum bytes of a message before its length is known, for BPF programs; default: 64 KiB
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    head_max: Option<usize>,

    /// Do not read a connection that has this many bytes of complete messages; default: 1 MiB
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    connection_bytes: Option<usize>,

    /// Do not read a connection whose peer has not taken this many bytes of replies; default: 256 KiB
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    send_bytes: Option<usize>,

    /// Close a connection whose peer has not taken more than this many bytes of several replies; default: 16 MiB, or two of
    /// --message-max
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    send_most: Option<usize>,

    /// Do not read any connection while all connections hold this many bytes; default: 256 MiB
    #[arg(long, value_name = "BYTES", value_parser = bytes)]
    mux_bytes: Option<usize>,

    /// Close a connection whose peer takes nothing of its replies for this time, in seconds; default: 60
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    send_time: Option<Duration>,
}

impl Bounds {
    fn given(&self) -> MuxBounds {
        MuxBounds {
            head: self.head_max,
            connection_bytes: self.connection_bytes,
            send_bytes: self.send_bytes,
            send_most: self.send_most,
            mux_bytes: self.mux_bytes,
            send_time: self.send_time,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum OrderArg {
    /// No order: each message goes to the first free worker
    None,
    /// Replies leave in the order of their messages
    Replies,
    /// One message per connection at a time, on any worker
    Serial,
    /// All messages of a connection go to the same worker
    Sticky,
    /// One message per hash value of the framing at a time
    Key,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Right {
    /// Send messages to all connections, and answer a message several times
    Push,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum SendArg {
    /// Zero copy where probes show that it works
    Adaptive,
    /// Zero copy
    Zerocopy,
    /// Copy
    Plain,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum EndArg {
    /// Other workers continue them
    Move,
    /// Close them
    Close,
}

impl EndArg {
    /// The argument, or the default of the order.
    fn or_default(arg: Option<Self>, order: Order) -> WorkerEnd {
        match arg {
            Some(Self::Move) => WorkerEnd::Move,
            Some(Self::Close) => WorkerEnd::Close,
            None => WorkerEnd::of(order),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Undone {
    /// Close it: its peer would wait for a reply that never comes
    Close,
    /// Keep it open
    Keep,
}

pub(crate) fn run(args: &Mux, passed: Sockets) -> u8 {
    if let Err(message) = args.log.apply() {
        return fail(exit::USAGE, message);
    }
    let mut predecessor = match Predecessor::of_this_process(worker_pool::SERVICE) {
        Ok(predecessor) => predecessor,
        Err(error) => {
            return fail(exit::FAILED, format_args!("cannot take over from the older process: {error}"));
        }
    };
    match serve(args, passed, &mut predecessor) {
        Ok(outcome) => tell(&outcome, args.json),
        Err((code, message)) => {
            if let Some(predecessor) = predecessor {
                predecessor.refuse(&message);
            }
            fail(code, message)
        }
    }
}

fn serve(
    args: &Mux,
    mut passed: Sockets,
    predecessor: &mut Option<Predecessor>,
) -> Result<Outcome, (u8, String)> {
    let framing = Named::read(&args.framing, Path::new(""))
        .map_err(|error| (exit::USAGE, format!("--framing {error}")))?
        .framing()
        .clone();
    if args.order == Some(OrderArg::Key) && !framing.may_have_key() {
        let why = "it gives no key; write key=OFFSET:LENGTH or key=WORD after it (docs/book/src/reference/framing.md)";
        return Err((exit::USAGE, format!("--order key, --framing {}: {why}", args.framing)));
    }
    let order = args.order.map_or(framing.order(), Order::from);
    if args.rebalance.is_some() && order != Order::Sticky {
        return Err((
            exit::USAGE,
            "--rebalance moves connections of --order sticky; add --order sticky".to_owned(),
        ));
    }
    let worker = args.worker.as_deref().unwrap_or_default();
    let command =
        shell_words::split(worker).map_err(|error| (exit::USAGE, format!("--worker {worker}: {error}")))?;
    if command.is_empty() && args.worker.is_some() {
        return Err((exit::USAGE, "--worker has no command".to_owned()));
    }
    let failed = |error: io::Error| (exit::FAILED, error.to_string());
    let executable = Executable::of_this_process().map_err(failed)?;
    let bounds = args.bounds.given();
    if let Some(why) = bounds.unused_head(&framing) {
        return Err((exit::USAGE, format!("--head-max, --framing {}: {why}", args.framing)));
    }
    let config = mux::Config {
        redeliver: args.redeliver,
        on_worker_end: EndArg::or_default(args.on_worker_end, order).config(framing.name()),
        idle: args.idle,
        connected: !args.connected.is_empty(),
        in_flight: args.in_flight.map(NonZeroUsize::get),
        rebalance: args.rebalance.map(NonZeroUsize::get),
        ..mux::Config::new(order).for_messages(args.message_max as usize)
    };
    let limits = Limits {
        message: args.message_max as usize,
        head_time: args.message_time,
        body_time: args.message_time,
        rate: 64 << 10,
        part: worker_pool::PART,
        ..Limits::default()
    };
    let (limits, config) = bounds.apply(limits, config);
    towpath::logging::start_or_warn();
    super::run::open_files();
    // Otherwise, ptrace(2) lets other processes of the same user read and write this process's memory.
    let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    let tls = args.tls.server(&framing, &args.framing)?;
    let server = Server::with_limits(framing, limits, config).map_err(failed)?;
    let peers = args.connected.iter().map(|peer| how(peer, args.trust.as_deref()));
    let peers = peers.collect::<Result<Vec<_>, _>>()?;
    let (mut files, mut later) = (Vec::new(), Vec::new());
    let (mut listen, mut inherited) = (Vec::new(), Vec::new());
    for address in &args.listen {
        let taken = predecessor.as_mut().and_then(|older| Inherited::listener(older, address));
        if let Some(taken) = taken {
            inherited.push((address, taken));
            continue;
        }
        if let Some(passed) = passed.take(Address::of(address)) {
            let no_port = |error: io::Error| (exit::NO_PORT, format!("{address}: {error}"));
            if let Address::Unix(path) = Address::of(address) {
                files.push(passed.file(path, None, None, None).map_err(no_port)?);
            }
            let at = match &tls {
                Some(tls) => server.listen_tls_on(passed.socket, tls.clone()),
                None => server.listen_on(passed.socket),
            };
            say(format_args!("listening on {}", at.map_err(no_port)?));
            listen.push(address.clone());
            continue;
        }
        let listens = worker_pool::listen(&server, address, tls.as_ref());
        let (at, socket) = listens.map_err(|error| {
            let code = if worker_pool::is_no_address(&error.source) { exit::USAGE } else { exit::NO_PORT };
            (code, error.to_string())
        })?;
        say(format_args!("listening on {at}"));
        files.extend(socket);
        listen.push(address.clone());
    }
    passed.finish();
    let path = args.control.as_deref();
    let older = predecessor.as_mut();
    let taken_control = path.zip(older).and_then(|(path, older)| Inherited::control(older, path));
    let control = path.filter(|_| taken_control.is_none()).map(|path| control::Server::open(path, None));
    let no_control = |error| (exit::NO_ENGINE, format!("--control: {error}"));
    let (mut control, desk) = control.transpose().map_err(no_control)?.unzip();
    let processors = || std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let workers = args.worker.as_ref().map_or(0, |_| args.workers.unwrap_or_else(processors).get());
    #[cfg(feature = "fleet")]
    let (_remote_front, remote) = args.remote.start().map_err(failed)?.unzip();
    #[cfg(not(feature = "fleet"))]
    let remote = None;
    let config = worker_pool::Config {
        program: Program::new(&command),
        place: Place::Mux(String::new()),
        // The user of this command runs its workers: with the same environment, without privileges.
        starter: Starter::Local(Local::interactive()),
        workers,
        remote,
        drain: args.drain,
        timeout: args.timeout,
        close_undone: args.undone == Undone::Close,
        name: String::new(),
        first_channel: 0,
        send: match args.send {
            SendArg::Adaptive => CopyMode::Adaptive,
            SendArg::Zerocopy => CopyMode::Zerocopy,
            SendArg::Plain => CopyMode::Plain,
        },
        send_check: args.send_check,
        may_push: args.worker_may == Some(Right::Push),
        tls: tls.clone(),
    };
    let code = |error: Error| match error {
        Error::Worker { .. } => (exit::INSPECTOR, error.to_string()),
        Error::Stopped | Error::System { .. } => (exit::FAILED, error.to_string()),
    };
    let mut front = WorkerPool::new(&server, config, desk).map_err(code)?;
    if let Some(older) = predecessor {
        let ended = |error| format!("the older process did not hand over: {error}");
        older.begin().map_err(|error| (exit::FAILED, ended(error)))?;
    }
    for (address, taken) in inherited {
        let (at, file) = taken.listen(&server, address, tls.as_ref()).map_err(failed)?;
        say(format_args!("listening on {at}"));
        later.extend(file);
        listen.push(address.clone());
    }
    if let Some((taken, path)) = taken_control.zip(path) {
        let (socket, file) = taken.into_parts();
        later.push(InheritedFile::Control(file));
        let listening = control::Listening::adopt(path, socket, None).map_err(no_control)?;
        let (server, inboxes) = listening.start(None, vec![None]).map_err(no_control)?;
        control = Some(server);
        inboxes.into_iter().for_each(|inbox| front.serve_control(inbox));
    }
    say(format_args!("{} attached", count(workers as u64, "worker")));
    let connect = |(peer, how): (&String, Connect)| {
        let connector = server.connect(peer, how);
        connector.map_err(|error| (exit::FAILED, format!("--connected {peer}: {error}")))
    };
    let connectors = args.connected.iter().zip(peers).map(connect).collect::<Result<Vec<_>, _>>()?;
    let upgradable = Upgradable {
        executable: Some(executable),
        listen,
        limit: args.upgrade_time,
        files,
        later,
        control: path.map(Path::to_owned).zip(control),
        connectors,
        predecessor: predecessor.take(),
        finished: None,
    };
    front.enable_upgrades(upgradable).map_err(code)?;
    service_manager::notify("READY=1");
    front.run().map_err(code)
}

/// Returns the connect options for a peer.
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
    let Outcome { drained, cut, begun, totals, restarts, upgrade } = outcome;
    let waits = totals.queued + totals.in_hand - begun;
    let (done, discarded) = (totals.messages_done(), totals.messages_discarded());
    if json {
        let object = json!({
            "connections": totals.attach, "messages": totals.received, "done": done,
            "given_up": totals.undone, "discarded": discarded, "begun": begun, "not_begun": waits,
            "given_again": totals.redelivered, "unsent": totals.unsent, "restarts": restarts, "drained": drained, "cut": cut,
            "handed_over": upgrade.handed_over, "taken_over": upgrade.taken_over,
        });
        return answer(if *drained { exit::OK } else { exit::FAILED }, &format!("{object}\n"));
    }
    say(format_args!(
        "{}, {}: {done} done, {} given up, {discarded} discarded, {begun} begun, {waits} not begun; {} given again, {} not sent, {} started again",
        count(totals.attach, "connection"),
        count(totals.received, "message"),
        totals.undone,
        totals.redelivered,
        count(totals.unsent, "answer"),
        count(*restarts, "worker"),
    ));
    match drained {
        true => exit::OK,
        false => fail(
            exit::FAILED,
            format!("ended before everything was drained; {} not done", count(*cut, "connection")),
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

fn at_least_one(text: &str) -> Result<NonZeroUsize, String> {
    text.parse().map_err(|_| "it is a number of at least 1".to_owned())
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

fn bytes(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(bytes @ 1..=0x1_0000_0000) => Ok(bytes),
        _ => Err("it is a number of bytes between 1 and 4294967296".to_owned()),
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds) if (0.001..=86_400.0).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("it is a number of seconds between 0.001 and 86400".to_owned()),
    }
}
