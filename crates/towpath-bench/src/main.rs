//! Every figure that Towpath claims, measured beside its peers in one run.
//!
//! ```text
//! towpath-bench ring [--json] [--seconds N] [--reps N] [--only NAME]
//! towpath-bench replay [--json]
//! towpath-bench framing [--json]
//! towpath-bench gate [--json] [--seconds N] [--reps N] [--only NAME]
//! towpath-bench instructions [--json] [--write]
//! towpath-bench mux [--json] [--seconds N] [--reps N] [--only NAME] [--svg FILE]
//! towpath-bench live [--json] [--seconds N] [--reps N] [--only NAME]
//! towpath-bench send [--json] [--megabytes N] [--reps N] [--only NAME]
//! towpath-bench spread FILE... [--json] [--write]
//! ```
//!
//! What it measures needs two CPUs; the NFQUEUE rows also need root, `ip` and `iptables`. Ratios mean something only
//! within one run: everything is measured in turns, and medians are compared.

mod all;
mod bar;
mod bare;
mod clock;
mod engine;
mod flows;
mod live;
mod mapping;
mod memory;
mod mmsg;
mod mux;
mod numbers;
mod packet;
mod payload;
mod peer;
mod pin;
mod raw;
mod side;
mod spread;
mod stat;
mod subject;
mod transfer;
mod xdp;

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::{Parser, Subcommand};
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
    All(All),
    Numbers(Numbers),
    Spread(Spread),
    /// The other process of a measurement, started by the bench itself
    #[command(hide = true, subcommand)]
    Side(Role),
}

/// The ring beside iceoryx2, Unix sockets, NFQUEUE and what the machine itself gives
///
/// One row for each bar. Rows that this system cannot measure are left out, with a line on standard error that says
/// why. Ends with 0 when every bar that was measured holds, else with 1.
#[derive(Debug, Parser)]
struct Ring {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// How long each measurement runs
    #[arg(long, value_name = "N", default_value = "0.4", value_parser = seconds)]
    seconds: Duration,

    /// How often each measurement is made, ours and the peer's in turns
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,

    /// Only the bars whose name contains NAME
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// The state table beside concurrent maps, what memory gives, and itself at other sizes
///
/// One row for each bar. Ends with 0 when every bar that was measured holds, else with 1.
#[derive(Debug, Parser)]
struct Gate {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// How long each measurement runs
    #[arg(long, value_name = "N", default_value = "0.4", value_parser = seconds)]
    seconds: Duration,

    /// How often each measurement is made, ours and the peer's in turns
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,

    /// Only the bars whose name contains NAME
    #[arg(long, value_name = "NAME")]
    only: Option<String>,

    /// Measure every size from 64 to 5,000,000 flows, plot it into this file, and do nothing else
    #[arg(long, value_name = "FILE")]
    svg: Option<std::path::PathBuf>,

    /// Plot what a run with --json --svg printed into this file, and measure nothing
    #[arg(long, value_name = "FILE", requires = "svg")]
    from: Option<std::path::PathBuf>,
}

/// Instructions of a packet's path through the gate, beside those that are kept (needs valgrind)
///
/// Ends with 0 when no step takes 5% more than what is kept, else with 1.
#[derive(Debug, Parser)]
struct Instructions {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// Keep the counts in the repository
    #[arg(long)]
    write: bool,
}

/// A million packets through `towpath replay`
#[derive(Debug, Parser)]
struct Replay {
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// BPF programs and declarative framing, beside what the specification asks and tokio-util's codec
///
/// Ends with 0 when every bar holds, else with 1.
#[derive(Debug, Parser)]
struct Framing {
    /// Print one JSON array
    #[arg(long)]
    json: bool,
}

/// The multiplexor beside servers that pin connections to threads, share one epoll, or have a central queue
#[derive(Debug, Parser)]
struct Mux {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// How long each measurement runs
    #[arg(long, value_name = "N", default_value = "2", value_parser = seconds)]
    seconds: Duration,

    /// How often each measurement is made, ours and the peer's in turns; each in four short ones where no high quantile is asked for
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,

    /// Only the bars whose name contains NAME
    #[arg(long, value_name = "NAME")]
    only: Option<String>,

    /// Plot the waiting time of workload D against load into this file, and do nothing else
    #[arg(long, value_name = "FILE")]
    svg: Option<std::path::PathBuf>,
}

/// Zero-copy sends beside plain ones: CPU of the sender and of both ends, over veth and over loopback
///
/// Over veth the receiving end has a native XDP program and its NAPI in a thread, so that sends are truly without a copy. It
/// makes its own network namespaces, which end with it; that needs root. A ratio is the median of those of pairs of transfers, one
/// behind the other, of those that other programs disturbed least; "beside a bare one" compares with the least that a program has to do. Ends with 0 when every bar holds, else
/// with 1.
#[derive(Debug, Parser)]
struct Send {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// How much each repetition sends in each way, MiB, in transfers of 256 at most that take turns
    #[arg(long, value_name = "N", default_value = "1024", value_parser = clap::value_parser!(u64).range(1..=65536))]
    megabytes: u64,

    /// How often each transfer is made, ours and the peer's in turns
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,

    /// Only the rows whose name contains NAME
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// Towpath between two interfaces, beside bare forwarders, NFQUEUE and the kernel's own forwarding
///
/// It makes its own network namespaces, which end with it; that needs root, `ip` and `iptables`, TCP also iperf3. `towpath`
/// is to be built beside this program. Ends with 0 when every bar that was measured holds, else with 1.
#[derive(Debug, Parser)]
struct Live {
    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// How long each measurement runs
    #[arg(long, value_name = "N", default_value = "1", value_parser = seconds)]
    seconds: Duration,

    /// How often each measurement is made, ours and the peer's in turns
    #[arg(long, value_name = "N", default_value = "5", value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,

    /// Only the bars whose name contains NAME
    #[arg(long, value_name = "NAME")]
    only: Option<String>,
}

/// Every subject one after the other, for `numbers`
///
/// Takes a good half hour, and the machine for itself. Ends with 0 when every subject measured every bar and all hold.
#[derive(Debug, Parser)]
struct All {
    /// Print all bars as one JSON array
    #[arg(long)]
    json: bool,

    /// Write each subject's bars into this directory, as SUBJECT.json
    #[arg(long, value_name = "DIR")]
    dir: std::path::PathBuf,

    /// How often each measurement is made, where a subject lets itself be told
    #[arg(long, value_name = "N", default_value_t = numbers::REPS, value_parser = clap::value_parser!(u32).range(1..))]
    reps: u32,
}

/// What the subjects measured, as a page: docs/book/src/numbers.md
///
/// Prints the page for the files that `all` wrote. Why bars are missed stands in reasons.tsv; what the README quotes of the page,
/// in quoted.tsv.
#[derive(Debug, Parser)]
struct Numbers {
    /// SUBJECT.json, as many as there are
    #[arg(value_name = "FILE")]
    files: Vec<std::path::PathBuf>,

    /// Write the marked block of this file anew from the page, and print nothing
    #[arg(long, value_name = "README", conflicts_with = "files")]
    readme: Option<std::path::PathBuf>,

    /// Only look whether the marked block of this file is what the page says; ends with 1 when it is not
    #[arg(long, value_name = "README", conflicts_with_all = ["files", "readme"])]
    check: Option<std::path::PathBuf>,

    /// The page that --readme and --check read
    #[arg(long, value_name = "FILE", default_value = "docs/book/src/numbers.md")]
    page: std::path::PathBuf,
}

/// How far apart several runs of the same rows are
///
/// Each FILE is what a subject printed with --json. Rows are compared by their names. Ends with 0 when every row is steady: in each run
/// within 15% of the median of all, else with 1.
#[derive(Debug, Parser)]
struct Spread {
    /// One for each run; runs may have some of the rows only
    #[arg(value_name = "FILE", required = true)]
    files: Vec<std::path::PathBuf>,

    /// Print one JSON array
    #[arg(long)]
    json: bool,

    /// Keep it in the repository, for the page of numbers
    #[arg(long)]
    write: bool,
}

#[derive(Debug, Subcommand)]
enum Role {
    Home,
    Within {
        home: u32,
        #[arg(last = true)]
        words: Vec<String>,
    },
    Bare {
        driver: String,
        home: u32,
        from: String,
        to: String,
        how: String,
        wait: String,
        cpu: usize,
    },
    Echo {
        home: u32,
        cpu: usize,
    },
    Ask {
        home: u32,
        milliseconds: u64,
        cpu: usize,
    },
    LiveFlood {
        home: u32,
        flows: u32,
        len: usize,
        milliseconds: u64,
        rate: u64,
        cpu: usize,
    },
    MuxWorker,
    MuxIdle,
    MuxIdleClients {
        address: std::net::SocketAddr,
    },
    LiveInspector {
        queue: String,
        cpu: usize,
    },
    LiveNfqueue {
        home: u32,
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
    ConntrackHome {
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
        Command::All(args) => all::run(args.json, &args.dir, args.reps),
        Command::Numbers(args) => tell(&args).map(|()| true),
        Command::Spread(args) => spread::run(&args.files, args.json, args.write),
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

fn tell(args: &Numbers) -> Result<()> {
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
        Role::Home => live::home::side(),
        Role::Within { home, words } => live::home::within(home, &words),
        Role::Bare { driver, home, from, to, how, wait, cpu } => {
            live::bare::side(&driver, home, [&from, &to], how == "offload", wait == "park", cpu)
        }
        Role::Echo { home, cpu } => live::round_trip::echo(home, cpu),
        Role::Ask { home, milliseconds, cpu } => {
            live::round_trip::ask(home, Duration::from_millis(milliseconds), cpu)
        }
        Role::LiveFlood { home, flows, len, milliseconds, rate, cpu } => {
            let time = Duration::from_millis(milliseconds);
            live::flood::side(home, live::flood::Order { flows, len, time, rate }, cpu)
        }
        Role::MuxWorker => mux::rings::side(),
        Role::MuxIdle => mux::idle::server(),
        Role::MuxIdleClients { address } => mux::idle::clients(address),
        Role::LiveInspector { queue, cpu } => engine::live_inspector(&queue, cpu),
        Role::LiveNfqueue { home, queue, len, batch, cpu } => {
            peer::nfqueue::live(home, queue, len, batch, cpu)
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
        Role::ConntrackHome { how } => peer::conntrack::home(how == "tracked"),
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
    let seconds: f64 = text.parse().map_err(|_| format!("{text:?} is not a number of seconds"))?;
    if !(0.01..=60.0).contains(&seconds) {
        return Err("between 0.01 and 60 seconds".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}
