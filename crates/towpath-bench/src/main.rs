//! Measures each figure that Towpath claims, together with its peers, in one run.
//!
//! ```text
//! towpath-bench ring [--json] [--seconds N] [--reps N] [--only NAME]
//! towpath-bench replay [--json]
//! towpath-bench framing [--json]
//! towpath-bench gate [--json] [--seconds N] [--reps N] [--only NAME]
//! towpath-bench instructions [--json] [--write]
//! towpath-bench mux [--json] [--seconds N] [--reps N] [--only NAME] [--svg FILE]
//! towpath-bench live [--json] [--seconds N] [--reps N] [--only NAME]
//! towpath-bench nfqueue [--json] [--seconds N] [--reps N] [--only NAME]
//! towpath-bench offload [--json] [--seconds N] [--reps N] [--only NAME]
//! towpath-bench fleet [--json] [--seconds N] [--reps N] [--states N] [--connections N] [--only NAME]
//! towpath-bench send [--json] [--megabytes N] [--reps N] [--only NAME]
//! towpath-bench hostile [--json] [--seconds N] [--modes NAME,...] [--port DRIVER] [--threads N] [--lanes N]
//! towpath-bench soak [--json] [--seconds N]
//! towpath-bench variance FILE... [--json] [--write]
//! ```
//!
//! Measurements need two CPUs; the NFQUEUE rows also need root, `ip` and `iptables`. Ratios are comparable only within one run:
//! repetitions of both sides alternate, and medians are compared.

mod all;
mod baseline_send;
mod clock;
mod engine;
mod fleet;
mod flows;
mod hostile;
mod live;
mod machine;
mod mapping;
mod memory;
mod metric;
mod mmsg;
mod mux;
mod numbers;
mod packet;
mod payload;
mod peer;
mod pin;
mod raw;
mod side;
mod soak;
mod stat;
mod subject;
mod transfer;
mod variance;
mod xdp;

use std::ffi::OsStr;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand};
use rustix::process::{Signal, set_parent_process_death_signal};

#[derive(Debug, Parser)]
#[command(name = "towpath-bench", version, about, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Ring(Ring),
    Replay(Replay),
    Framing(Framing),
    Gate(Gate),
    Instructions(Instructions),
    Mux(Mux),
    Send(Send),
    Live(Live),
    Nfqueue(Nfqueue),
    Offload(Offload),
    Fleet(subject::fleet::Fleet),
    Hostile(hostile::Hostile),
    Soak(Soak),
    All(All),
    Numbers(Numbers),
    Variance(Variance),
    /// Peer process of a measurement, started by the bench
    #[command(hide = true, subcommand)]
    Side(Role),
}

/// Renamed subcommands: the old name and the new one.
const RENAMED: &[(&str, &str)] = &[("spread", "variance")];

/// The usage error for the old name of a subcommand. It names the new one.
fn renamed(name: &OsStr) -> Option<clap::Error> {
    let (old, new) = RENAMED.iter().find(|(old, _)| *old == name)?;
    let text = format!("unknown subcommand `{old}`; this subcommand is now `{new}`");
    Some(Cli::command().error(ErrorKind::InvalidSubcommand, text))
}

/// Benchmark the ring against iceoryx2, Unix sockets, NFQUEUE and raw hardware limits
///
/// Prints one row per metric. Rows that this system cannot measure are omitted; standard error states the reason. Exits with 0 if
/// every measured metric meets its target, else with 1.
#[derive(Debug, Parser)]
struct Ring {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// Duration of each measurement
    #[arg(long, value_name = "N", default_value = "0.4", value_parser = seconds)]
    seconds: Duration,

    /// Number of repetitions; ours and the peer's alternate
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,

    /// Measure only metrics whose name contains NAME
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// Benchmark the state table against concurrent maps, memory limits and itself at other sizes
///
/// Prints one row per metric. Exits with 0 if every measured metric meets its target, else with 1.
#[derive(Debug, Parser)]
struct Gate {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// Duration of each measurement
    #[arg(long, value_name = "N", default_value = "0.4", value_parser = seconds)]
    seconds: Duration,

    /// Number of repetitions; ours and the peer's alternate
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,

    /// Measure only metrics whose name contains NAME
    #[arg(long, value_name = "NAME")]
    only: Option<String>,

    /// Measure all sizes from 64 to 5,000,000 flows and write a plot to FILE; no other measurement
    #[arg(long, value_name = "FILE")]
    svg: Option<std::path::PathBuf>,

    /// Plot the JSON output of an earlier run with --json --svg from FILE; no measurement
    #[arg(long, value_name = "FILE", requires = "svg")]
    from: Option<std::path::PathBuf>,
}

/// Count the instructions of the packet path and compare them with the stored counts (needs valgrind)
///
/// Exits with 0 if no step takes 5% more than its stored count, else with 1.
#[derive(Debug, Parser)]
struct Instructions {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// Store the counts in the repository
    #[arg(long)]
    write: bool,
}

/// Benchmark `towpath replay` with one million packets
#[derive(Debug, Parser)]
struct Replay {
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// Benchmark BPF programs and declarative framing against the specification and tokio-util's codec
///
/// Exits with 0 if every metric meets its target, else with 1.
#[derive(Debug, Parser)]
struct Framing {
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// Benchmark the multiplexor against servers with pinned connections, a shared epoll or a central queue
#[derive(Debug, Parser)]
struct Mux {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// Duration of each measurement
    #[arg(long, value_name = "N", default_value = "2", value_parser = seconds)]
    seconds: Duration,

    /// Number of repetitions; ours and the peer's alternate; each is split into four shorter ones unless a high quantile is measured
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,

    /// Measure only metrics whose name contains NAME
    #[arg(long, value_name = "NAME")]
    only: Option<String>,

    /// Plot the waiting time of workload D against load to FILE; no other measurement
    #[arg(long, value_name = "FILE")]
    svg: Option<std::path::PathBuf>,
}

/// Benchmark zero-copy sends against plain sends: CPU of the sender and of both ends, over veth and loopback
///
/// Over veth, the receiving end has a native XDP program and threaded NAPI, so zero-copy sends are not copied by the sender. The
/// command creates temporary network namespaces, which needs root. A ratio is the median over pairs of consecutive transfers;
/// the pairs with the most preemptions are discarded. "over a bare one" compares with a minimal sender. Exits with 0 if every
/// metric meets its target, else with 1.
#[derive(Debug, Parser)]
struct Send {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// Data sent per repetition and method in MiB, in alternating transfers of at most 256
    #[arg(long, value_name = "N", default_value = "1024", value_parser = clap::value_parser!(u64).range(1..=65536))]
    megabytes: u64,

    /// Number of repetitions; ours and the peer's alternate
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,

    /// Measure only rows whose name contains NAME
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// Benchmark Towpath between two interfaces against baseline forwarders, NFQUEUE and kernel forwarding
///
/// The command creates temporary network namespaces, which needs root, `ip` and `iptables`; TCP also needs iperf3. Expects the
/// `towpath` binary in the directory of this program. Exits with 0 if every measured metric meets its target, else with 1.
#[derive(Debug, Parser)]
struct Live {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// Duration of each measurement
    #[arg(long, value_name = "N", default_value = "1", value_parser = seconds)]
    seconds: Duration,

    /// Number of repetitions; ours and the peer's alternate
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,

    /// Measure only metrics whose name contains NAME
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// Benchmark unchanged programs for NFQUEUE on Towpath's queue against the kernel's queue
///
/// The command creates temporary network namespaces, which needs root, `ip` and `iptables`, and compiles a program, which needs a C
/// compiler and the headers of libnetfilter_queue. Expects `towpath` and libnetfilter_queue.so in the directory of this program. Exits
/// with 0 if every measured metric meets its target, else with 1.
#[derive(Debug, Parser)]
struct Nfqueue {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// Duration of each measurement
    #[arg(long, value_name = "N", default_value = "1", value_parser = seconds)]
    seconds: Duration,

    /// Number of repetitions; ours and the peer's alternate
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,

    /// Measure only metrics whose name contains NAME
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// Benchmark flow offload against the kernel's bridge, a bare tc redirect, the engine without offload, and NFQUEUE
///
/// The command creates temporary network namespaces, which needs root, `ip`, `tc`, `iptables` and `iperf3`, and Linux 6.6. Expects the
/// `towpath` binary in the directory of this program. Exits with 0 if every measured metric meets its target, else with 1.
#[derive(Debug, Parser)]
struct Offload {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// Duration of each measurement
    #[arg(long, value_name = "N", default_value = "1", value_parser = seconds)]
    seconds: Duration,

    /// Number of repetitions; ours and the peer's alternate
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,

    /// Measure only metrics whose name contains NAME
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// Run an engine under traffic, reloads, upgrades and kills, and check that nothing is lost and nothing grows
///
/// Traffic crosses ports of three drivers (af_packet, af_xdp, tap) in network namespaces; two queues and a mux have load. Each round reloads
/// the rules, kills an inspector of each queue and a worker of the mux, replays a capture and sends a file; in the second half of the time it
/// also upgrades the engine. At the end, every packet is counted: sent = arrived + lost or dropped, by reason. Memory (RSS, PSS) may not grow
/// by more than 1% after the warm-up, and descriptors not at all, if there are 12 rounds of each kind. Needs root. Expects the `towpath`
/// binary in the directory of this program. Exits with 0 if everything held, else with 1.
#[derive(Debug, Parser)]
struct Soak {
    /// Print the report as one JSON object
    #[arg(long)]
    json: bool,

    /// Duration; a day has 86400
    #[arg(long, value_name = "N", default_value = "30", value_parser = soak_seconds)]
    seconds: Duration,
}

/// Run every subject in sequence, as input for `numbers`
///
/// Takes more than half an hour on an otherwise idle machine. Exits with 0 if all metrics were measured and meet their targets.
#[derive(Debug, Parser)]
struct All {
    /// Print all metrics as one JSON array
    #[arg(long)]
    json: bool,

    /// Write the metrics of each subject to DIR/SUBJECT.json
    #[arg(long, value_name = "DIR")]
    dir: std::path::PathBuf,

    /// Number of repetitions, for subjects with this option
    #[arg(long, value_name = "N", default_value_t = numbers::REPS, value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,
}

/// Generate docs/book/src/numbers.md from measurements
///
/// Prints the page for the files written by `all`. reasons.tsv has the reasons for missed targets; quoted.tsv selects the metrics
/// that the README quotes.
#[derive(Debug, Parser)]
struct Numbers {
    /// Files SUBJECT.json
    #[arg(value_name = "FILE")]
    files: Vec<std::path::PathBuf>,

    /// Rewrite the marked block of this file from the page; print nothing
    #[arg(long, value_name = "README", conflicts_with = "files")]
    readme: Option<std::path::PathBuf>,

    /// Check that the marked block of this file matches the page; exit with 1 if it differs
    #[arg(long, value_name = "README", conflicts_with_all = ["files", "readme"])]
    check: Option<std::path::PathBuf>,

    /// Page that --readme and --check read
    #[arg(long, value_name = "FILE", default_value = "docs/book/src/numbers.md")]
    page: std::path::PathBuf,
}

/// Compare several runs of the same rows
///
/// Each FILE is the --json output of a subject. Rows are matched by name. Exits with 0 if every row is steady, that is, within 15% of
/// the median of all runs in each run, else with 1.
#[derive(Debug, Parser)]
struct Variance {
    /// One file per run; a run may lack some rows
    #[arg(value_name = "FILE", required = true)]
    files: Vec<std::path::PathBuf>,

    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// Store the result in the repository, for the page of numbers
    #[arg(long)]
    write: bool,
}

#[derive(Debug, Subcommand)]
enum Role {
    NetnsProc,
    Within {
        netns_pid: u32,
        #[arg(last = true)]
        words: Vec<String>,
    },
    BaselineFwd {
        driver: String,
        netns_pid: u32,
        from: String,
        to: String,
        how: String,
        wait: String,
        cpu: usize,
    },
    Echo {
        netns_pid: u32,
        cpu: usize,
    },
    Ask {
        netns_pid: u32,
        milliseconds: u64,
        cpu: usize,
    },
    OutageSend {
        netns_pid: u32,
        cpu: usize,
    },
    OutageReceive {
        netns_pid: u32,
        cpu: usize,
    },
    FleetServer {
        netns_pid: u32,
        connections: usize,
    },
    FleetClient {
        netns_pid: u32,
        connections: usize,
    },
    FleetResponder {
        port: u16,
    },
    FleetWorker {
        micros: u64,
    },
    FleetPackets {
        #[arg(action = clap::ArgAction::Set)]
        replicated: bool,
        flows: u32,
    },
    LiveFlood {
        netns_pid: u32,
        flows: u32,
        len: usize,
        milliseconds: u64,
        rate: u64,
        cpu: usize,
    },
    HostileAttack(hostile::Attack),
    HostilePassOn {
        how: String,
        queue: std::path::PathBuf,
    },
    HostileWorker {
        mode: String,
    },
    MuxWorker,
    MuxStuckWorker,
    MuxIdle,
    MuxIdleClients {
        address: std::net::SocketAddr,
    },
    LiveInspector {
        queue: String,
        cpu: usize,
    },
    LiveDelay {
        queue: String,
        cpu: usize,
        micros: u64,
    },
    LiveNfqueue {
        netns_pid: u32,
        queue: u16,
        len: usize,
        batch: usize,
        cpu: usize,
    },
    SendReceiver {
        place: String,
        cpu: usize,
    },
    SendSender {
        join: u32,
        cpu: usize,
    },
    Inspector {
        how: String,
        batch: usize,
        cpu: usize,
    },
    PingPong {
        page: String,
        cpu: usize,
    },
    EventfdWake {
        page: String,
        bell: i32,
        cpu: usize,
    },
    Seqpacket {
        socket: i32,
        len: usize,
        batch: usize,
        cpu: usize,
    },
    IceoryxRate {
        service: String,
        read: String,
        cpu: usize,
    },
    IceoryxEcho {
        ping: String,
        pong: String,
        len: usize,
        cpu: usize,
    },
    ConntrackReceiver {
        how: String,
    },
    ConntrackFlood {
        flows: u32,
        milliseconds: u64,
        cpu: usize,
    },
    Flood {
        len: usize,
        cpu: usize,
    },
    Instructions {
        step: String,
        times: u32,
    },
    Map {
        map: String,
        flows: u32,
        milliseconds: u64,
        cpu: usize,
    },
    Nfqueue {
        queue: u16,
        queues: u16,
        len: usize,
        batch: usize,
        milliseconds: u64,
        cpu: usize,
    },
}

fn main() -> ExitCode {
    if let Some(error) = std::env::args_os().nth(1).and_then(|name| renamed(&name)) {
        error.exit();
    }
    let done = match Cli::parse().command {
        Command::Ring(args) => subject::ring::run(args.json, args.seconds, args.reps, args.only.as_deref()),
        Command::Gate(args) => match &args.svg {
            Some(path) => {
                subject::sweep::run(path, args.from.as_deref(), args.json, args.seconds).map(|()| true)
            }
            None => subject::gate::run(args.json, args.seconds, args.reps, args.only.as_deref()),
        },
        Command::Instructions(args) => subject::instructions::run(args.json, args.write),
        Command::Replay(args) => subject::replay::run(args.json),
        Command::Mux(args) => match &args.svg {
            Some(path) => subject::mux::plot(path, args.seconds).map(|()| true),
            None => subject::mux::run(args.json, args.seconds, args.reps, args.only.as_deref()),
        },
        Command::Framing(args) => subject::framing::run(args.json),
        Command::Send(args) => subject::send::run(args.json, args.megabytes, args.reps, args.only.as_deref()),
        Command::Live(args) => subject::live::run(args.json, args.seconds, args.reps, args.only.as_deref()),
        Command::Nfqueue(args) => {
            subject::nfqueue::run(args.json, args.seconds, args.reps, args.only.as_deref())
        }
        Command::Offload(args) => {
            subject::offload::run(args.json, args.seconds, args.reps, args.only.as_deref())
        }
        Command::Fleet(args) => subject::fleet::run(&args),
        Command::Hostile(args) => hostile::run(&args),
        Command::Soak(args) => soak::run(args.json, args.seconds),
        Command::All(args) => all::run(args.json, &args.dir, args.reps),
        Command::Numbers(args) => print_or_update(&args).map(|()| true),
        Command::Variance(args) => variance::run(&args.files, args.json, args.write),
        Command::Side(role) => side(role).map(|()| true),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("towpath-bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn print_or_update(args: &Numbers) -> Result<()> {
    match (&args.readme, &args.check) {
        (Some(readme), _) => numbers::quote(readme, &args.page),
        (_, Some(readme)) => numbers::check(readme, &args.page),
        _ => {
            print!("{}", numbers::page(&args.files)?);
            Ok(())
        }
    }
}

fn side(role: Role) -> Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    match role {
        Role::NetnsProc => live::netns_proc::side(),
        Role::Within { netns_pid, words } => live::netns_proc::within(netns_pid, &words),
        Role::BaselineFwd { driver, netns_pid, from, to, how, wait, cpu } => {
            live::baseline_fwd::side(&driver, netns_pid, [&from, &to], how == "offload", wait == "park", cpu)
        }
        Role::Echo { netns_pid, cpu } => live::round_trip::echo(netns_pid, cpu),
        Role::Ask { netns_pid, milliseconds, cpu } => {
            live::round_trip::ask(netns_pid, Duration::from_millis(milliseconds), cpu)
        }
        Role::OutageSend { netns_pid, cpu } => live::outage::send(netns_pid, cpu),
        Role::OutageReceive { netns_pid, cpu } => live::outage::receive(netns_pid, cpu),
        Role::FleetServer { netns_pid, connections } => fleet::connections::server(netns_pid, connections),
        Role::FleetClient { netns_pid, connections } => fleet::connections::client(netns_pid, connections),
        Role::FleetResponder { port } => fleet::remote::responder(port),
        Role::FleetWorker { micros } => fleet::remote::worker(micros),
        Role::FleetPackets { replicated, flows } => fleet::packets::side(replicated, flows),
        Role::LiveFlood { netns_pid, flows, len, milliseconds, rate, cpu } => {
            let time = Duration::from_millis(milliseconds);
            live::flood::side(netns_pid, live::flood::Order { flows, len, time, rate }, cpu)
        }
        Role::HostileAttack(order) => hostile::side(&order),
        Role::HostilePassOn { how, queue } => hostile::pass_on_side(&how, &queue),
        Role::HostileWorker { mode } => hostile::worker_side(&mode),
        Role::MuxWorker => mux::rings::side(),
        Role::MuxStuckWorker => mux::drain::side(),
        Role::MuxIdle => mux::idle::server(),
        Role::MuxIdleClients { address } => mux::idle::clients(address),
        Role::LiveInspector { queue, cpu } => engine::live_inspector(&queue, cpu),
        Role::LiveDelay { queue, cpu, micros } => {
            engine::live_delay(&queue, cpu, Duration::from_micros(micros))
        }
        Role::LiveNfqueue { netns_pid, queue, len, batch, cpu } => {
            peer::nfqueue::live(netns_pid, queue, len, batch, cpu)
        }
        Role::SendReceiver { place, cpu } => transfer::receiver(place == "veth", cpu),
        Role::SendSender { join, cpu } => transfer::sender((join != 0).then_some(join), cpu),
        Role::Inspector { how, batch, cpu } => engine::inspector(&how, batch, cpu),
        Role::PingPong { page, cpu } => raw::ping_pong_side(&page, cpu),
        Role::EventfdWake { page, bell, cpu } => raw::eventfd_wake_side(&page, bell, cpu),
        Role::Seqpacket { socket, len, batch, cpu } => peer::seqpacket::rate_side(socket, len, batch, cpu),
        Role::IceoryxRate { service, read, cpu } => peer::iceoryx::rate_side(&service, read == "read", cpu),
        Role::IceoryxEcho { ping, pong, len, cpu } => peer::iceoryx::echo_side(&ping, &pong, len, cpu),
        Role::Instructions { step, times } => subject::instructions::side(&step, times),
        Role::Map { map, flows, milliseconds, cpu } => {
            peer::maps::side(&map, flows, Duration::from_millis(milliseconds), cpu)
        }
        Role::ConntrackReceiver { how } => peer::conntrack::receiver(how == "tracked"),
        Role::ConntrackFlood { flows, milliseconds, cpu } => {
            peer::conntrack::flood(flows, Duration::from_millis(milliseconds), cpu)
        }
        Role::Flood { len, cpu } => peer::flood::side(len, cpu),
        Role::Nfqueue { queue, queues, len, batch, milliseconds, cpu } => {
            peer::nfqueue::side(queue, queues, len, batch, Duration::from_millis(milliseconds), cpu)
        }
    }
}

fn seconds(text: &str) -> Result<Duration, String> {
    seconds_within(text, 60.0)
}

fn long_seconds(text: &str) -> Result<Duration, String> {
    seconds_within(text, 3600.0)
}

fn soak_seconds(text: &str) -> Result<Duration, String> {
    seconds_within(text, 604_800.0)
}

fn seconds_within(text: &str, most: f64) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of seconds"))?;
    if !(0.01..=most).contains(&seconds) {
        return Err(format!("between 0.01 and {most} seconds"));
    }
    Ok(Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{Cli, RENAMED, renamed};

    #[test]
    fn a_renamed_subcommand_is_an_error_that_names_the_new_one() {
        for (old, new) in RENAMED {
            assert!(Cli::try_parse_from(["towpath-bench", old, "file"]).is_err(), "`{old}` is a subcommand");
            assert!(Cli::try_parse_from(["towpath-bench", new, "file"]).is_ok(), "`{new}` is no subcommand");
            let error = renamed(old.as_ref()).unwrap().to_string();
            assert!(error.contains(&format!("this subcommand is now `{new}`")), "{error}");
        }
        assert!(renamed("ring".as_ref()).is_none());
    }
}
