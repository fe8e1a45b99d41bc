//! `towpath ctl`: looks into a running engine through its control socket.

mod listing;

use std::fmt::Display;
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
use towpath::control::{dumps, mux, rows, send, show};
use towpath::report::Rule;
use towpath::settings;
use towpath_ring::{AttachError, Consumer, Kind, Verdict};

use crate::args::exit;
use crate::command::{answer, fail, say, warn};

/// How long the engine has for an answer, which it promises within half of that.
const PATIENCE: Duration = Duration::from_secs(10);

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
    /// sent plain, numbers given out and outstanding, bytes pinned and how many may be, ENOBUFS. See docs/send.md.
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

fn all_tables(socket: &Path) -> Result<Vec<rows::Table>, Failure> {
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

/// A setting that is asked for, by its short name.
enum Asked<'a> {
    Read(&'a str),
    Set(&'a str, u64),
}

fn sysctl(socket: &Path, names: &[String], json: bool) -> Result<String, Failure> {
    let mut engine = Connection::open(socket, Request::ShowSettings)?;
    let Answer::Settings { mut settings } = engine.answer()? else {
        return Err(engine.nonsense("to show settings"));
    };
    if names.is_empty() {
        return Ok(told(&settings, show::settings(&settings), json));
    }
    // All of them are looked at before the first is set.
    let asked = names.iter().map(|name| asked(name, &settings)).collect::<Result<Vec<_>, _>>()?;
    let (mut rows, mut text) = (Vec::new(), String::new());
    for asked in asked {
        match asked {
            Asked::Read(name) => {
                let row: Vec<_> = settings.iter().filter(|(row, _)| row == name).cloned().collect();
                text += &show::settings(&row);
                rows.extend(row);
            }
            Asked::Set(name, value) => {
                let mut engine = Connection::open(socket, Request::Set { name: name.to_owned(), value })?;
                let Answer::Set { name, before, value } = engine.answer()? else {
                    return Err(engine.nonsense("to change a setting"));
                };
                // As sysctl(8) does.
                text += &format!("net.inet.ip.fw.{name}: {before} -> {value}\n");
                settings.iter_mut().filter(|(row, _)| *row == name).for_each(|(_, own)| *own = value);
                rows.push((name, value));
            }
        }
    }
    Ok(told(&rows, text, json))
}

fn told(rows: &[(String, u64)], text: String, json: bool) -> String {
    let object: serde_json::Map<_, _> =
        rows.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
    either(json, &json!({ "settings": object }), || text)
}

/// NAME or NAME=VALUE, of these settings.
fn asked<'a>(word: &'a str, settings: &[(String, u64)]) -> Result<Asked<'a>, Failure> {
    let Some((name, value)) = word.split_once('=') else {
        let short = settings::short(word);
        return match settings.iter().any(|(row, _)| row == short) {
            true => Ok(Asked::Read(short)),
            false => {
                let message = format!("there is no setting `{word}`; `towpath ctl sysctl` lists them");
                Err(Failure::new(exit::FAILED, message))
            }
        };
    };
    let value = value.parse().map_err(|_| {
        Failure::new(exit::USAGE, format!("`{value}` is not a whole number; switches are 0 and 1"))
    })?;
    let taken = settings::Settings::default().set(name, value);
    taken.map_err(|error| Failure::new(exit::FAILED, error.to_string()))?;
    Ok(Asked::Set(settings::short(name), value))
}

fn events(socket: &Path, args: &Events) -> Result<String, Failure> {
    let mut engine = Connection::open(socket, Request::Events)?;
    let Answer::Watching {} = engine.answer()? else { return Err(engine.nonsense("to watch")) };
    engine.is_patient(true)?;
    let (mut left, mut told) = (args.count.unwrap_or(u64::MAX), 0);
    let mut out = io::stdout().lock();
    loop {
        let Answer::Events { events, lost } = engine.answer()? else {
            return Err(engine.nonsense("to watch"));
        };
        for event in events {
            let line = match (args.json.json, &event.state) {
                (true, _) => json!(event).to_string(),
                (false, Some(state)) => format!("{} {}", event.what, state.text),
                (false, None) => event.what.clone(),
            };
            match writeln!(out, "{line}").and_then(|()| out.flush()) {
                // Who reads no further has read enough.
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(String::new()),
                Err(error) => return Err(Failure::new(exit::FAILED, format!("standard output: {error}"))),
                Ok(()) => {}
            }
            left -= 1;
            if left == 0 {
                return Ok(String::new());
            }
        }
        if lost > told {
            say(format_args!("towpath: {} events were left out", lost - told));
            told = lost;
        }
    }
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

fn trace(socket: &Path, args: &Trace) -> Result<String, Failure> {
    let &Trace { channel, ref out, count, rule, ref flow } = args;
    if out.as_os_str() == "-" && io::stdout().is_terminal() {
        let message = "a capture is no text for a terminal; name a file with --out, or redirect it";
        return Err(Failure::new(exit::USAGE, message.to_owned()));
    }
    let request = match channel {
        Some(channel) => Request::Trace { channel, count },
        None => Request::Follow { rule, flow: flow.clone(), count },
    };
    let mut engine = Connection::open(socket, request)?;
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
                say(format_args!("towpath: {packets} packets traced, {dropped} left out"));
                return Ok(String::new());
            }
            Message::Answer(_) => return Err(engine.nonsense("to trace")),
        }
    }
}

fn dump(socket: &Path, args: &Dump) -> Result<String, Failure> {
    let path = dumps::path(socket);
    let failed = |error: &dyn Display| Failure::new(exit::NO_ENGINE, format!("{}: {error}", path.display()));
    let refused = |error: &dyn Display| Failure::new(exit::FAILED, format!("{}: {error}", path.display()));
    let mut ring = Consumer::attach_as(&path, "towpath-ctl-dump").map_err(|error| match &error {
        AttachError::Connect { source, .. } if source.kind() == ErrorKind::NotFound => {
            without_dumps(socket).unwrap_or_else(|| failed(&error))
        }
        AttachError::Limit(_) | AttachError::Engine(_) => refused(&error),
        _ => failed(&error),
    })?;
    let from = args.from;
    let asked = if from == 0 { Vec::new() } else { from.to_le_bytes().to_vec() };
    ring.request(dumps::STATES, &asked).map_err(|error| failed(&error))?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    loop {
        let Some(frame) = ring.recv().map_err(|error| failed(&error))? else {
            // Another engine has other states: there is nothing to go on with.
            let message = "the engine has ended: this is not all of them".to_owned();
            return Err(Failure::new(exit::FAILED, message));
        };
        let kind = frame.header().kind;
        let page: serde_json::Value = match kind {
            Kind::DUMP => serde_json::from_slice(ring.payload(&frame)).map_err(|error| refused(&error))?,
            _ => serde_json::Value::Null,
        };
        let (error, interrupted) = (frame.header().mark, frame.header().interrupted());
        ring.verdict(frame, Verdict::Pass);
        match kind {
            Kind::DUMP => {}
            Kind::DONE => {
                if interrupted {
                    say("towpath: rules changed meanwhile: numbers before and after that may differ");
                }
                return Ok(String::new());
            }
            Kind::ERROR => return Err(refused(&io::Error::from_raw_os_error(error as i32))),
            _ => continue,
        }
        let wrote = match args.json {
            true => writeln!(out, "{page}"),
            false => {
                let states = page["states"].as_array().into_iter().flatten();
                states.filter_map(|state| state["text"].as_str()).try_for_each(|text| writeln!(out, "{text}"))
            }
        };
        match wrote.and_then(|()| out.flush()) {
            // Who reads no further has read enough.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(String::new()),
            other => other.map_err(|error| Failure::new(exit::FAILED, error.to_string()))?,
        }
    }
}

/// Whether there is an engine at the socket all the same: it has no ring for dumps then.
fn without_dumps(socket: &Path) -> Option<Failure> {
    UnixStream::connect(socket).ok()?;
    let socket = socket.display();
    let message =
        format!("{socket}: this engine has no dumps (`towpath run` has); `show states` lists its states");
    Some(Failure::new(exit::FAILED, message))
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
                ErrorKind::NotFound => {
                    "; no engine is there: is that the `socket` of its [control], or its --control?"
                }
                ErrorKind::ConnectionRefused => "; its engine has ended",
                ErrorKind::PermissionDenied => {
                    "; only the engine's user and root may, and whom `owner` and `group` of its [control] name"
                }
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
        Code::Version
        | Code::Request
        | Code::TooLong
        | Code::Busy
        | Code::NoChannel
        | Code::NoMux
        | Code::NotFound
        | Code::Invalid => exit::FAILED,
    }
}
