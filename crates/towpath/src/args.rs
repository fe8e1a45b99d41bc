//! The command line's grammar. The commands are implemented in `cli/`.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::ValueHint;
use clap::{Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use towpath_engine::queue::parse::{fanout, overload, queue_number, within};
use towpath_ring::{Fanout, Overload};

pub(crate) use towpath::exit;

use crate::cli::bpf::Bpf;
use crate::cli::config::ConfigArgs;
use crate::cli::ctl::Ctl;
use crate::cli::doctor::Doctor;

use crate::cli::explain::Explain;
use crate::cli::frame::Frame;
use crate::cli::log::LogFormat;
use crate::cli::mux::Mux;
use crate::cli::nfq::Nfq;
use crate::cli::recv::Recv;
use crate::cli::run::Run;
use crate::cli::send::Send;
use crate::cli::top::Top;
use crate::cli::wiring::Wiring;
#[cfg(feature = "fleet")]
use crate::cli::worker::Worker;

#[derive(Debug, Parser)]
#[command(name = "towpath", version, about, max_term_width = 100, after_help = exit::help())]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Run(Run),
    Replay(Replay),
    Check(Check),
    /// Show and change a running engine
    ///
    /// Connects to the control socket of `towpath run`, or of `towpath replay` or `towpath mux` with `--control PATH`. Root, the engine's
    /// user and the socket's owner may show and change everything. Other users with access to the socket file may show everything except
    /// packets. Queries do not slow the engine down.
    #[command(after_help = "\
Example:
  towpath replay - --rules FILE --queue 1=COMMAND --control /tmp/ctl.sock < CAPTURE &
  towpath ctl --socket /tmp/ctl.sock show rings")]
    Ctl(Ctl),
    Top(Top),
    Config(ConfigArgs),
    Doctor(Doctor),
    Explain(Explain),
    Inspect(Inspect),
    Frame(Frame),
    Bpf(Bpf),
    Mux(Box<Mux>),
    #[cfg(feature = "fleet")]
    Worker(Worker),
    Nfq(Nfq),
    Send(Send),
    Recv(Recv),
    #[cfg(feature = "demo")]
    Demo(towpath_demo::Args),
    #[cfg(feature = "demo")]
    #[command(hide = true, subcommand)]
    DemoPart(towpath_demo::Part),
    /// Apply the description of a process that arrives on standard input to this process, and execute its program
    #[command(hide = true)]
    Confine,
    /// Start the programs of CONFIG for the engine at standard input
    #[command(hide = true)]
    Launcher {
        #[command(flatten)]
        log: LogFormat,
        config: PathBuf,
    },
    /// Print a shell's completion script
    ///
    /// For bash: `towpath completions bash > /etc/bash_completion.d/towpath`.
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Write the man pages into a directory
    Man {
        /// Output directory for towpath.1, towpath-replay.1 and the other pages; created if missing
        #[arg(value_hint = ValueHint::DirPath)]
        directory: PathBuf,
    },
}

/// Replay captures through the rules, with real inspector processes on the queues
///
/// Each packet of each CAPTURE walks the rules of FILE once, with direction in, on port `cap0` (or on the port that --port
/// names for its VLAN). Packets that a rule sends to queue N (inspect, divert, tee) go through shared memory to the process
/// that --queue N names, and its verdict applies. Passed packets are written to --out in capture order; the report goes to
/// standard output. Timeouts of states follow the captures' clock, which never goes back and ignores a jump ahead of a
/// single packet; an inspector's deadline is wall-clock time. SIGINT, SIGTERM and SIGHUP stop the replay and the
/// processes that it started; the exit code is 128 plus the signal's number. A second signal kills it immediately.
#[derive(Debug, Parser)]
#[command(after_help = "\
Example:
  towpath replay examples/office.pcap --rules examples/office.ipfw \\
      --queue 1='towpath inspect --queue 1 --match password= --verdict drop'")]
pub(crate) struct Replay {
    /// Capture files (pcap or pcapng, also gzipped), or `-` for standard input
    #[arg(required = true, value_name = "CAPTURE", value_hint = ValueHint::FilePath)]
    pub(crate) captures: Vec<PathBuf>,

    /// The rule file, in ipfw syntax (default: that of --config)
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, required_unless_present = "config")]
    pub(crate) rules: Option<PathBuf>,

    /// Start COMMAND as an inspector of queue N; may be repeated, also for the same queue
    ///
    /// COMMAND is split into words as by a shell, and runs without a shell. The first word `towpath` runs this program's
    /// own executable. COMMAND finds the socket's path in TOWPATH_SOCKET and must attach within 15 seconds.
    #[arg(long = "queue", value_name = "N=COMMAND", value_parser = queue)]
    pub(crate) queues: Vec<QueueArg>,

    /// Set the policy of queue N: comma-separated KEY:VALUE pairs
    ///
    /// workers:COUNT: processes to start for each command of the queue (1-64). fanout:exclusive|flow|cpu|least|broadcast|mirror:
    /// how packets are distributed among several inspectors (default: flow).
    /// overload:block|drop-newest|drop-oldest:COUNT|pass|drop|queue:N: action for a packet whose inspector has no room (block:
    /// the packet waits until its deadline). high:COUNT and low:COUNT: an inspector with `high` packets gets no more until it
    /// has only `low`. may-queue:N: a queue to which its inspectors may send a packet; may be repeated (default: none).
    /// deadline:SECONDS and default:pass|drop override --deadline and --default-verdict for this queue.
    #[arg(long = "queue-policy", value_name = "N=KEY:VALUE,...", value_parser = queue_policy)]
    pub(crate) queue_policies: Vec<QueuePolicy>,

    #[command(flatten)]
    pub(crate) wiring: Wiring,

    /// Write the passed packets to FILE; pcapng if the name ends in .pcapng, otherwise pcap
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) out: Option<PathBuf>,

    /// Write the replies to rejected packets (ICMP unreachable, TCP RST, SCTP ABORT) to FILE, in the format of --out
    ///
    /// A live port would send these packets. Limit: 200 per port and second of capture time.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) replies: Option<PathBuf>,

    /// Write the lines of `log` rules to FILE instead of standard error
    ///
    /// Each line begins with the packet's time in UTC, as in `2026-11-22T08:15:30.123456Z ipfw: 100 Deny UDP 10.0.0.1:1 10.0.0.2:53 in via cap0`.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) log: Option<PathBuf>,

    /// Start with the states that an earlier run wrote with --states-out
    ///
    /// States of rules that are not in the rule file are assigned to a hidden allow rule. Their lifetimes continue at the first
    /// packet.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) states_in: Option<PathBuf>,

    /// Write the remaining states to FILE at the end
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) states_out: Option<PathBuf>,

    /// Serve `towpath ctl` on a Unix socket at PATH, for this user and root
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub(crate) control: Option<PathBuf>,

    /// Maximum time an inspector may hold a packet, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = seconds)]
    pub(crate) deadline: Duration,

    /// Verdict for a packet whose inspector died, missed the deadline or is missing
    #[arg(long = "default-verdict", value_name = "VERDICT", default_value = "drop")]
    pub(crate) default_verdict: PassOrDrop,

    /// Print the report as one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Check a rule file: reports all errors, each with line, column and a hint
///
/// Without errors, prints the normalised rules: tables, pipes, labels, rules with their options in ipfw's order, sets. The
/// output parses to the same rules. Warns of rules that no packet can reach because of an earlier rule.
#[derive(Debug, Parser)]
pub(crate) struct Check {
    /// The rule file (default: that of --config)
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath, required_unless_present = "config")]
    pub(crate) file: Option<PathBuf>,

    /// Replay this capture through the rules and list the rules that matched no packet; may be repeated
    ///
    /// With --against, also list the packets whose outcome differs from that with OLD. Assumes that inspectors pass the packets.
    #[arg(long = "capture", value_name = "CAPTURE", value_hint = ValueHint::FilePath)]
    pub(crate) captures: Vec<PathBuf>,

    /// Show the differences between OLD and FILE that can change a packet's outcome
    ///
    /// OLD is a rule file; a name that ends in .toml is a configuration, whose settings, routes and default rule are compared
    /// with those of --config.
    #[arg(long, value_name = "OLD", value_hint = ValueHint::FilePath)]
    pub(crate) against: Option<PathBuf>,

    #[command(flatten)]
    pub(crate) wiring: Wiring,

    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
}

/// Search the payload of a queue's packets for a pattern and give verdicts
///
/// A packet whose upper-layer payload matches REGEX gets VERDICT; other packets get the opposite verdict. An engine that
/// starts an inspector passes its socket's path in TOWPATH_SOCKET. Exits when the engine ends.
#[derive(Debug, Parser)]
pub(crate) struct Inspect {
    /// The queue to serve
    #[arg(long, value_name = "N")]
    pub(crate) queue: u16,

    /// The pattern: a regular expression over bytes (Rust's regex syntax; `(?i)` ignores case)
    #[arg(long = "match", value_name = "REGEX")]
    pub(crate) pattern: String,

    /// The verdict for packets that match
    #[arg(long, value_name = "VERDICT")]
    pub(crate) verdict: PassOrDrop,

    /// Apply the verdict of a matching packet to the rest of its flow
    #[arg(long)]
    pub(crate) flow: bool,

    /// The engine's socket
    #[arg(long, value_name = "PATH", env = "TOWPATH_SOCKET", value_hint = ValueHint::FilePath)]
    pub(crate) socket: PathBuf,

    /// Print each matching packet and each gap record to standard error
    #[arg(long)]
    pub(crate) verbose: bool,
}

/// Verdicts that the command line accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum PassOrDrop {
    /// Pass the packet
    Pass,
    /// Drop the packet
    Drop,
}

/// An argument `N=COMMAND`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct QueueArg {
    pub(crate) number: u16,
    pub(crate) words: Vec<String>,
}

/// An argument `N=KEY:VALUE,...`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueuePolicy {
    pub(crate) number: u16,
    pub(crate) workers: Option<usize>,
    pub(crate) fanout: Option<Fanout>,
    pub(crate) overload: Option<Overload>,
    pub(crate) high: Option<u32>,
    pub(crate) low: Option<u32>,
    pub(crate) deadline: Option<Duration>,
    pub(crate) default_verdict: Option<PassOrDrop>,
    pub(crate) may_queue: Vec<u16>,
}

/// An argument `NAME=vlan:ID`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VlanPort {
    pub(crate) name: String,
    pub(crate) vlan: u16,
}

/// An argument `PREFIX=NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RouteArg {
    pub(crate) net: IpAddr,
    pub(crate) len: u8,
    pub(crate) port: String,
}

/// An argument `NAME=ADDRESS`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AddressArg {
    pub(crate) port: String,
    pub(crate) address: IpAddr,
}

fn queue(text: &str) -> Result<QueueArg, String> {
    let (number, command) = split(text, "N=COMMAND")?;
    let number = queue_number(number)?;
    let words = shell_words::split(command).map_err(|error| format!("`{command}`: {error}"))?;
    if words.is_empty() {
        return Err(format!("queue {number} has no command"));
    }
    Ok(QueueArg { number, words })
}

fn queue_policy(text: &str) -> Result<QueuePolicy, String> {
    let (number, pairs) = split(text, "N=KEY:VALUE,...")?;
    let mut policy = QueuePolicy { number: queue_number(number)?, ..QueuePolicy::default() };
    for pair in pairs.split(',') {
        let (key, value) = pair.split_once(':').ok_or_else(|| format!("`{pair}` is not KEY:VALUE"))?;
        match key {
            "workers" => policy.workers = Some(within(value, 1..=64)?),
            "fanout" => policy.fanout = Some(fanout(value)?),
            "overload" => policy.overload = Some(overload(value)?),
            "high" => policy.high = Some(within(value, 1..=65_536)?),
            "low" => policy.low = Some(within(value, 0..=65_536)?),
            "deadline" => policy.deadline = Some(seconds(value)?),
            "default" => policy.default_verdict = Some(PassOrDrop::from_str(value, false)?),
            "may-queue" => policy.may_queue.push(queue_number(value)?),
            _ => {
                return Err(format!(
                    "`{key}` is not a policy; the policies are workers, fanout, overload, high, low, may-queue, deadline and default"
                ));
            }
        }
    }
    if policy.low.is_some() && policy.high.is_none_or(|high| policy.low.is_some_and(|low| low >= high)) {
        return Err("low: needs a high: that is larger".to_owned());
    }
    Ok(policy)
}

pub(crate) fn vlan_port(text: &str) -> Result<VlanPort, String> {
    let (name, vlan) = split(text, "NAME=vlan:ID")?;
    let id = vlan.strip_prefix("vlan:").ok_or_else(|| format!("`{vlan}` is not vlan:ID"))?;
    match id.parse() {
        Ok(vlan @ 0..=4095) => Ok(VlanPort { name: name.to_owned(), vlan }),
        _ => Err(format!("VLAN id `{id}` is not in 0..4095")),
    }
}

pub(crate) fn route(text: &str) -> Result<RouteArg, String> {
    let (prefix, port) = split(text, "PREFIX=NAME")?;
    let (address, len) = prefix.split_once('/').map_or((prefix, None), |(net, len)| (net, Some(len)));
    let net: IpAddr = address.parse().map_err(|_| format!("`{address}` is not an IP address"))?;
    let width = if net.is_ipv4() { 32 } else { 128 };
    match len.map_or(Ok(width), str::parse) {
        Ok(len) if len <= width => Ok(RouteArg { net, len, port: port.to_owned() }),
        _ => Err(format!("prefix length of `{prefix}` is not in 0..{width}")),
    }
}

pub(crate) fn address(text: &str) -> Result<AddressArg, String> {
    let (port, address) = split(text, "NAME=ADDRESS")?;
    let address = address.parse().map_err(|_| format!("`{address}` is not an IP address"))?;
    Ok(AddressArg { port: port.to_owned(), address })
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    if !(0.001..=3600.0).contains(&seconds) {
        return Err("a deadline is between 0.001 and 3600 seconds".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

fn split<'a>(text: &'a str, shape: &str) -> Result<(&'a str, &'a str), String> {
    match text.split_once('=') {
        Some((left, right)) if !left.is_empty() && !right.is_empty() => Ok((left, right)),
        _ => Err(format!("expected {shape}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_grammar_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn queue_commands_are_split_as_a_shell_would() {
        let queue = queue("7=towpath inspect --match 'a b' --verdict drop").unwrap();
        assert_eq!(queue.number, 7);
        assert_eq!(queue.words, ["towpath", "inspect", "--match", "a b", "--verdict", "drop"]);
    }

    #[test]
    fn a_queue_policy_has_many_parts() {
        let policy = queue_policy(
            "3=workers:2,fanout:least,overload:drop-oldest:9,high:5,low:2,deadline:0.5,default:pass,may-queue:4,may-queue:5",
        );
        assert_eq!(
            policy,
            Ok(QueuePolicy {
                number: 3,
                workers: Some(2),
                fanout: Some(Fanout::LeastLoaded),
                overload: Some(Overload::DropOldest(9)),
                high: Some(5),
                low: Some(2),
                deadline: Some(Duration::from_millis(500)),
                default_verdict: Some(PassOrDrop::Pass),
                may_queue: vec![4, 5],
            })
        );
    }

    #[test]
    fn a_prefix_without_a_length_is_one_address() {
        let one = |text| route(text).map(|route| (route.net.to_string(), route.len, route.port));
        assert_eq!(one("10.0.0.1=a"), Ok(("10.0.0.1".into(), 32, "a".into())));
        assert_eq!(one("::/0=lp0.100"), Ok(("::".into(), 0, "lp0.100".into())));
    }

    #[test]
    fn wrong_values_say_what_was_expected() {
        let rows = [
            (queue("1").unwrap_err(), "expected N=COMMAND"),
            (queue("0=x").unwrap_err(), "queue number `0` is not in 1..65535"),
            (queue("70000=x").unwrap_err(), "queue number `70000` is not in 1..65535"),
            (queue("1= ").unwrap_err(), "queue 1 has no command"),
            (queue("1='x").unwrap_err(), "`'x`: missing closing quote"),
            (vlan_port("a=5").unwrap_err(), "`5` is not vlan:ID"),
            (vlan_port("a=vlan:4096").unwrap_err(), "VLAN id `4096` is not in 0..4095"),
            (route("10.0.0.0/33=a").unwrap_err(), "prefix length of `10.0.0.0/33` is not in 0..32"),
            (route("::/129=a").unwrap_err(), "prefix length of `::/129` is not in 0..128"),
            (route("10.0.0/8=a").unwrap_err(), "`10.0.0` is not an IP address"),
            (address("cap0=1.2.3").unwrap_err(), "`1.2.3` is not an IP address"),
            (queue_policy("1=x").unwrap_err(), "`x` is not KEY:VALUE"),
            (queue_policy("1=workers:65").unwrap_err(), "`65` is not a number in 1..64"),
            (queue_policy("1=high:4,low:4").unwrap_err(), "low: needs a high: that is larger"),
            (
                queue_policy("1=fanout:hash").unwrap_err(),
                "fanout `hash` is not exclusive, flow, cpu, least, broadcast or mirror",
            ),
            (
                queue_policy("1=overload:drop-oldest").unwrap_err(),
                "overload `drop-oldest` is not block, drop-newest, drop-oldest:COUNT, pass, drop or queue:N",
            ),
            (queue_policy("1=overload:drop-oldest:0").unwrap_err(), "`0` is not a number in 1..4096"),
            (
                queue_policy("1=overload:pass:1").unwrap_err(),
                "overload `pass:1` is not block, drop-newest, drop-oldest:COUNT, pass, drop or queue:N",
            ),
            (seconds("0").unwrap_err(), "a deadline is between 0.001 and 3600 seconds"),
        ];
        for (got, expected) in rows {
            assert_eq!(got, expected);
        }
    }
}
