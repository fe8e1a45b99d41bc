//! `towpath ctl`: looks into a running engine through its control socket.

mod connection;
mod listing;
mod stream;
mod sysctl;

use std::path::{Path, PathBuf};

use clap::builder::ValueHint;
use clap::{Args, Parser, Subcommand};
use serde_json::json;
use towpath::control::protocol::{Answer, Frame, Request};
use towpath::control::{mux, records, send, show};
use towpath::report::Rule;

use self::connection::{Connection, Failure};
use self::stream::{dump, events, trace};
use self::sysctl::sysctl;
use crate::args::exit;
use crate::cli::{answer, fail, warn};

/// Look into a running engine
///
/// Connects to the control socket of an engine (`towpath run`, or `towpath replay` or `towpath mux` with `--control PATH`). The engine's
/// own user, root and the socket's owner may look and change; whoever else the socket's file lets in may look. An engine is never
/// slowed down by those who look at it.
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
    /// Write all states, however many, a line each: over a ring, while packets go on
    Dump(Dump),
    /// Add a rule: `add [NUMBER] [set N] ACTION ...`, as in a rule file
    Add(Words),
    /// Delete rules by number or range, or all of a set: `delete 100 200-300`, `delete set 5`
    Delete(Words),
    /// Count anew: all rules, or those of these numbers
    Zero(Words),
    /// Delete all rules but the default rule and those of set 31
    Flush(Words),
    /// Enable, disable, move or swap sets: `set disable 4 enable 5`; or list those that have rules: `set show`
    Set(Words),
    /// Create, change or look into a table: `table T add 10.0.0.0/8 5`, `table T list`, `table T lookup 10.1.2.3`
    ///
    /// `lookup` ends with exit code 1 when the table has nothing for the key.
    Table(Words),
    /// List the settings, or set some: `sysctl dyn_max=100000 net.inet.ip.fw.dyn_keepalive=0`
    ///
    /// Names and values are all looked at before the first is set.
    Sysctl(Sysctl),
    Ipfw(Ipfw),
    Events(Events),
}

/// Print what happens to states, a line each, as it happens
///
/// created, expired, removed, evicted; and nearly full and no longer full for all of them. Ends with the engine, or after
/// --count events. What this program or the engine could not keep up with is left out and counted.
#[derive(Debug, Args)]
struct Events {
    /// End after N events
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    #[command(flatten)]
    json: Json,
}

/// The rest of a rule file's command.
#[derive(Debug, Args)]
struct Words {
    /// The words of the command
    #[arg(value_name = "WORD", trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,

    /// Print JSON
    #[arg(long, short = 'j')]
    json: bool,
}

#[derive(Debug, Args)]
struct Sysctl {
    /// NAME to read, NAME=VALUE to set; all are listed when there is none
    #[arg(value_name = "NAME[=VALUE]")]
    names: Vec<String>,
    #[command(flatten)]
    json: Json,
}

/// The words of ipfw(8): `ipfw show`, `ipfw -d list`, `ipfw add ...`, `ipfw table T add ...`
///
/// Flags: -a counters, -d states too, -D states only, -S sets, -v more of the states, -n: a command is read and what it would change is
/// told, but nothing changes; -q: `table T add` gives an entry that is there the new value, and `delete` of one that is not there is no error;
/// -f, -N, -t, -T, -c and -e are taken and mean nothing here. Whatever changes something takes all of it or nothing.
#[derive(Debug, Args)]
struct Ipfw {
    /// ipfw's flags and words
    #[arg(value_name = "WORD", trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Show {
    /// Every rule with its counters: packets and bytes
    Rules(Json),
    /// The dynamic states, as ipfw lists them
    States(Json),
    /// The states that most goes through
    Top {
        /// How many, 100 at most
        #[arg(long, value_name = "N", default_value = "10")]
        count: u64,
        /// By bytes; by packets without it
        #[arg(long)]
        bytes: bool,
        #[command(flatten)]
        json: Json,
    },
    /// The tables, their kinds and how many entries they have
    Tables(Json),
    /// The entries of a table
    Table {
        /// Its name
        name: String,
        #[command(flatten)]
        json: Json,
    },
    /// The settings, under ipfw's sysctl names
    Settings(Json),
    /// The queues: inspectors, frames that they have, what became of all frames
    Queues(Json),
    /// The ports: their drivers, states, frames, and losses by reason; as of the last second
    Ports(Json),
    /// What became of the packets
    Stats(Json),
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
    /// Sends without a copy: the long answers of `towpath mux`
    ///
    /// The limits, why bytes went plain, numbers per notification, how long buffers were pinned, why modes switched; and a
    /// line for each connection that had a long answer: bytes without a copy, those that the kernel copied after all, bytes
    /// sent plain, numbers given out and outstanding, bytes pinned and how many may be, ENOBUFS. See docs/book/src/reference/send.md.
    Send(Json),
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

/// Write all states, however many, a line each
///
/// They come over a ring beside the control socket, while packets go on: none comes twice, and none that lives throughout is
/// missed. If the engine or this program ends before it is done, --from goes on where it was.
#[derive(Debug, Args)]
struct Dump {
    /// What: `states`
    #[arg(value_parser = ["states"])]
    what: String,

    /// Go on at this cursor; with --json each line has it as "next"
    #[arg(long, value_name = "CURSOR", default_value_t = 0)]
    from: u64,

    /// A JSON object a line: {"next":CURSOR,"states":[...]}
    #[arg(long)]
    json: bool,
}

/// Write what a channel gets, or what a rule or a flow does, from now on as a pcapng capture
///
/// Each packet is written when it is decided, with the verdict as its comment. What the trace could not keep up with is
/// left out and counted, in the packets' drop counts and the interfaces' statistics: a trace never slows the engine. Ends
/// with the channel, or after --count packets.
#[derive(Debug, Args)]
#[command(
    override_usage = "towpath ctl trace [OPTIONS] <CHANNEL>\n       towpath ctl trace [OPTIONS] [--rule <N>] [--flow <FLOW>]"
)]
struct Trace {
    /// The channel's number, from `show rings`
    #[arg(required_unless_present_any = ["rule", "flow"], conflicts_with_all = ["rule", "flow"])]
    channel: Option<u32>,

    /// Instead of a channel: packets that rule N decides
    #[arg(long, value_name = "N")]
    rule: Option<u32>,

    /// Instead of a channel, or with --rule: packets of a flow: PROTOCOL END END, such as `tcp 10.0.0.1 10.0.0.2:22`; an END is
    /// ADDRESS, ADDRESS:PORT, :PORT or any
    #[arg(long, value_name = "FLOW")]
    flow: Option<String>,

    /// Where to write it; `-` is standard output
    #[arg(long, value_name = "FILE", default_value = "-", value_hint = ValueHint::FilePath)]
    out: PathBuf,

    /// End after N packets
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
}

pub(crate) fn run(args: &Ctl) -> u8 {
    let socket = args.socket.as_path();
    let done = match &args.command {
        Command::Show(show) => self::show(socket, show),
        Command::Trace(trace) => self::trace(socket, trace),
        Command::Dump(dump) => self::dump(socket, dump),
        Command::Add(words) => change(socket, "add", words),
        Command::Delete(words) => change(socket, "delete", words),
        Command::Zero(words) => change(socket, "zero", words),
        Command::Flush(words) => change(socket, "flush", words),
        Command::Set(words) => change(socket, "set", words),
        Command::Table(words) => change(socket, "table", words),
        Command::Sysctl(sysctl) => self::sysctl(socket, &sysctl.names, sysctl.json.json),
        Command::Events(events) => self::events(socket, events),
        Command::Ipfw(ipfw) => self::ipfw(socket, ipfw),
    };
    match done {
        Ok(text) => answer(exit::OK, &text),
        Err(Failure { code, message }) => fail(code, message),
    }
}

fn show(socket: &Path, show: &Show) -> Result<String, Failure> {
    match show {
        Show::Rules(Json { json }) => {
            let rules = listing::rules(socket)?;
            Ok(either(*json, &json!({ "rules": rules }), || show::rules(&rules, true, false)))
        }
        Show::States(Json { json }) => {
            let states = listing::states(socket, false)?;
            Ok(either(*json, &json!({ "states": states }), || show::states(&states)))
        }
        &Show::Top { count, bytes, json: Json { json } } => {
            let mut engine = Connection::open(socket, Request::ShowTop { count, bytes })?;
            let Answer::Top { states } = engine.answer()? else {
                return Err(engine.nonsense("to show top talkers"));
            };
            Ok(either(json, &json!({ "states": states }), || show::states(&states)))
        }
        Show::Tables(Json { json }) => tables(socket, "all", *json),
        Show::Table { name, json } => table(socket, name, json.json),
        Show::Settings(Json { json }) => sysctl(socket, &[], *json),
        Show::Queues(Json { json }) => {
            let mut engine = Connection::open(socket, Request::ShowQueues)?;
            let Answer::Queues { queues } = engine.answer()? else {
                return Err(engine.nonsense("to show queues"));
            };
            Ok(either(*json, &json!({ "queues": queues }), || show::queues(&queues)))
        }
        Show::Ports(Json { json }) => {
            let mut engine = Connection::open(socket, Request::ShowPorts)?;
            let Answer::Ports { ports } = engine.answer()? else {
                return Err(engine.nonsense("to show ports"));
            };
            Ok(either(*json, &json!({ "ports": ports }), || show::ports(&ports)))
        }
        Show::Stats(Json { json }) => {
            let mut engine = Connection::open(socket, Request::ShowStats)?;
            let Answer::Stats { stats } = engine.answer()? else {
                return Err(engine.nonsense("to show stats"));
            };
            Ok(either(*json, &json!({ "stats": stats }), || show::stats(&stats)))
        }
        Show::Mux(Json { json }) => show_mux(socket, *json),
        Show::Send(Json { json }) => show_send(socket, *json),
        Show::Rings(Json { json }) => rings(socket, *json),
        Show::Frames { channel, json } => frames(socket, *channel, json.json),
    }
}

fn either(json: bool, object: &serde_json::Value, text: impl FnOnce() -> String) -> String {
    if json { object.to_string() + "\n" } else { text() }
}

fn table(socket: &Path, name: &str, json: bool) -> Result<String, Failure> {
    let all = listing::entries(socket, name)?;
    Ok(either(json, &json!({ "name": name, "entries": all }), || show::entries(&all)))
}

/// The words without a `--json` behind them, which is no word of any command.
fn json_behind(words: &[String], json: bool) -> (&[String], bool) {
    match words.split_last() {
        Some((last, rest)) if last == "--json" => (rest, true),
        _ => (words, json),
    }
}

/// A command of a rule file, or one of ipfw's that only shows something.
fn change(socket: &Path, command: &str, words: &Words) -> Result<String, Failure> {
    let (words, json) = json_behind(&words.words, words.json);
    let words: Vec<&str> = std::iter::once(command).chain(words.iter().map(String::as_str)).collect();
    look(socket, &words, json).unwrap_or_else(|| self::command(socket, words.join(" "), false, json))
}

/// What only shows something of tables, sets and pipes, in ipfw's words; none for all others.
fn look(socket: &Path, words: &[&str], json: bool) -> Option<Result<String, Failure>> {
    Some(match *words {
        ["table", "all", "list"] => all_entries(socket, json),
        ["table", name, "list"] => table(socket, name, json),
        ["table", name, "info" | "detail"] => tables(socket, name, json),
        ["table", name, "lookup", key] => lookup(socket, name, key, json),
        ["table", _, "lookup", ..] => Err(Failure::new(exit::USAGE, "write table NAME lookup KEY".into())),
        ["set", "show" | "list"] => sets(socket, json),
        ["pipe", "show" | "list", ref numbers @ ..] => pipes(socket, numbers, json),
        ["pipe", number, "show" | "list"] => pipes(socket, &[number], json),
        _ => return None,
    })
}

fn all_entries(socket: &Path, json: bool) -> Result<String, Failure> {
    let (mut text, mut rows) = (String::new(), Vec::new());
    for one in all_tables(socket)? {
        let entries = listing::entries(socket, &one.name)?;
        text += &format!("--- table({}), set(0) ---\n{}", one.name, show::entries(&entries));
        rows.push(json!({ "name": one.name, "entries": entries }));
    }
    Ok(either(json, &json!({ "tables": rows }), || text))
}

fn all_tables(socket: &Path) -> Result<Vec<records::Table>, Failure> {
    let mut engine = Connection::open(socket, Request::ShowTables)?;
    match engine.answer()? {
        Answer::Tables { tables } => Ok(tables),
        _ => Err(engine.nonsense("to show tables")),
    }
}

/// One table, or all.
fn tables(socket: &Path, name: &str, json: bool) -> Result<String, Failure> {
    let mut tables = all_tables(socket)?;
    tables.retain(|table| name == "all" || table.name == name);
    if tables.is_empty() && name != "all" {
        return Err(Failure::new(exit::FAILED, format!("there is no table {name}")));
    }
    Ok(either(json, &json!({ "tables": tables }), || show::tables(&tables)))
}

fn lookup(socket: &Path, name: &str, key: &str, json: bool) -> Result<String, Failure> {
    let request = Request::Lookup { name: name.to_owned(), key: key.to_owned() };
    let mut engine = Connection::open(socket, request)?;
    let Answer::Entry { key, value } = engine.answer()? else {
        return Err(engine.nonsense("to look into a table"));
    };
    let object = json!({ "name": name, "key": key, "value": value });
    Ok(either(json, &object, || show::entries(&[(key, value)])))
}

/// The sets that have rules.
fn sets(socket: &Path, json: bool) -> Result<String, Failure> {
    let mut sets: Vec<u8> = listing::rules(socket)?.iter().map(|rule| rule.set).collect();
    sets.sort_unstable();
    sets.dedup();
    Ok(either(json, &json!({ "sets": sets }), || sets.iter().map(|set| format!("set {set}\n")).collect()))
}

/// The pipes of these numbers; all when there are none.
fn pipes(socket: &Path, numbers: &[&str], json: bool) -> Result<String, Failure> {
    let number = |word: &&str| {
        word.parse().map_err(|_| Failure::new(exit::USAGE, format!("`{word}` is no pipe number")))
    };
    let numbers = numbers.iter().map(number).collect::<Result<Vec<u32>, _>>()?;
    let mut engine = Connection::open(socket, Request::ShowPipes)?;
    let Answer::Pipes { mut pipes } = engine.answer()? else {
        return Err(engine.nonsense("to show pipes"));
    };
    pipes.retain(|pipe| numbers.is_empty() || numbers.contains(&pipe.number));
    if pipes.is_empty() && !numbers.is_empty() {
        return Err(Failure::new(exit::FAILED, "there is no such pipe".into()));
    }
    Ok(either(json, &json!({ "pipes": pipes }), || show::pipes(&pipes)))
}

/// Has a command carried out, or only looked at.
fn command(socket: &Path, text: String, check: bool, json: bool) -> Result<String, Failure> {
    let mut engine = Connection::open(socket, Request::Command { text, check })?;
    let Answer::Done { changes } = engine.answer()? else { return Err(engine.nonsense("to change rules")) };
    if json {
        return Ok(json!({ "changes": changes }).to_string() + "\n");
    }
    changes.warnings.iter().for_each(warn);
    Ok(show::changes(&changes))
}

/// ipfw's own words.
fn ipfw(socket: &Path, args: &Ipfw) -> Result<String, Failure> {
    let (words, json) = json_behind(&args.words, args.json);
    let (flags, words) = words.split_at(words.iter().take_while(|word| word.starts_with('-')).count());
    let given = |letter| flags.iter().any(|flag| flag.contains(letter));
    let unknown = flags.iter().flat_map(|flag| flag.chars().skip(1)).find(|l| !"adDSvqfnNtTce".contains(*l));
    if let Some(letter) = unknown {
        let message = format!(
            "ipfw's flag -{letter} is not known here; there are -a -d -D -S -v -q -f -n -N -t -T -c -e"
        );
        return Err(Failure::new(exit::USAGE, message));
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    match words[..] {
        ["show" | "list" | "l" | "print", ref rest @ ..] => {
            let counters = words[0] == "show" || given('a');
            let mut rules = if given('D') { Vec::new() } else { listing::rules(socket)? };
            select(&mut rules, rest)?;
            let states =
                if given('d') || given('D') { listing::states(socket, given('v'))? } else { Vec::new() };
            let dynamic = given('d') || given('D');
            Ok(either(json, &json!({ "rules": rules, "states": states }), || {
                let text = show::rules(&rules, counters, given('S'));
                if dynamic { text + &show::states(&states) } else { text }
            }))
        }
        [] => Err(Failure::new(exit::USAGE, "ipfw needs a command; `ipfw show` lists the rules".into())),
        _ => look(socket, &words, json).unwrap_or_else(|| {
            // It is the one flag that changes what a command does.
            let quiet = if given('q') { "-q " } else { "" };
            command(socket, format!("{quiet}{}", words.join(" ")), given('n'), json)
        }),
    }
}

/// The rules of these numbers and ranges; all when there are none.
fn select(rules: &mut Vec<Rule>, numbers: &[&str]) -> Result<(), Failure> {
    let mut ranges = Vec::new();
    for word in numbers {
        let (low, high) = word.split_once('-').unwrap_or((word, word));
        match (low.parse::<u32>(), high.parse::<u32>()) {
            (Ok(low), Ok(high)) => ranges.push(low..=high),
            _ => return Err(Failure::new(exit::USAGE, format!("`{word}` is no rule number"))),
        }
    }
    if !ranges.is_empty() {
        rules.retain(|rule| ranges.iter().any(|range| range.contains(&rule.number)));
        if rules.is_empty() {
            return Err(Failure::new(exit::FAILED, format!("there is no rule {}", numbers.join(", "))));
        }
    }
    Ok(())
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

fn show_send(socket: &Path, json: bool) -> Result<String, Failure> {
    let mut engine = Connection::open(socket, Request::ShowSend)?;
    let Answer::Send { send } = engine.answer()? else { return Err(engine.nonsense("to show send")) };
    Ok(if json { json!({ "send": send }).to_string() + "\n" } else { send::show(&send) })
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
