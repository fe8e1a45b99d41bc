//! `towpath ctl ipfw`: the command line of ipfw(8).

use clap::Args;
use serde_json::{Value, json};

use super::super::client::{Engine, Failure};
use super::super::command::{
    Access, Command, Context, Handled, NoMembers, Reply, Request, arguments, json_behind, parse,
};
use super::super::text::items;
use super::show_rules::{Columns, Times};
use super::{change, set, show_rules, show_states, table};
use crate::exit;

/// The words of ipfw(8): `ipfw show`, `ipfw -d list`, `ipfw add ...`, `ipfw table T add ...`
///
/// Flags: -a counters; -t the time of each rule's last packet in UTC, -T in seconds since 1970; -d states too; -D states only; -S sets;
/// -v more about the states; -n prints what a command would change and changes nothing; -q: a command prints nothing, `table T add`
/// replaces an existing entry, and `delete` of a missing entry or rule is not an error. -f, -N, -c and -e are accepted and have no
/// effect. A command is carried out completely or not at all.
#[derive(Debug, Args)]
pub(super) struct Ipfw {
    /// ipfw's flags and words
    #[arg(value_name = "WORD", trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) const COMMAND: Command = Command::other::<Ipfw>(
    "ipfw",
    &[Request { name: "show-pipes", access: Access::Read, handle }],
    |engine, matches| ipfw(engine, &arguments(matches)),
);

fn handle(body: Value, context: &Context<'_>) -> Handled {
    let NoMembers {} = parse(body)?;
    let pipes = context.ruleset()?.pipes();
    let pipe = |(number, rate, burst)| json!({ "number": number, "rate": rate, "burst": burst });
    Ok(Reply::Answer("pipes", json!({ "pipes": pipes.into_iter().map(pipe).collect::<Vec<_>>() })))
}

fn ipfw(engine: &Engine, args: &Ipfw) -> Result<String, Failure> {
    let (words, json) = json_behind(&args.words, args.json);
    let (flags, words) = words.split_at(words.iter().take_while(|word| word.starts_with('-')).count());
    let given = |letter| flags.iter().any(|flag| flag.contains(letter));
    let unknown = flags.iter().flat_map(|flag| flag.chars().skip(1)).find(|l| !"adDSvqfnNtTce".contains(*l));
    if let Some(letter) = unknown {
        let message = format!(
            "ipfw's flag -{letter} is not supported; supported are -a -d -D -S -v -q -f -n -N -t -T -c -e"
        );
        return Err(Failure::new(exit::USAGE, message));
    }
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let columns = |counters| Columns {
        counters,
        times: match (given('T'), given('t')) {
            (true, _) => Times::Seconds,
            (false, true) => Times::Date,
            (false, false) => Times::None,
        },
        sets: given('S'),
    };
    match words[..] {
        [] => Err(Failure::new(exit::USAGE, "ipfw needs a command; `ipfw show` lists the rules")),
        ["show" | "list" | "l" | "print", ref rest @ ..] => {
            let counters = words[0] == "show" || given('a');
            let mut rules = if given('D') { Vec::new() } else { show_rules::rules(engine)? };
            select(&mut rules, rest)?;
            let dynamic = given('d') || given('D');
            let states = if dynamic { show_states::states(engine, given('v'))? } else { Vec::new() };
            if json {
                return Ok(format!("{}\n", json!({ "rules": rules, "states": states })));
            }
            let text = show_rules::text(&rules, columns(counters));
            Ok(if dynamic { text + &show_states::text(&states) } else { text })
        }
        ["set", "show" | "list"] => set::show(engine, json),
        ["set", number, word @ ("show" | "list")] => {
            set::show_rules_of(engine, number, columns(word == "show" || given('a')), json)
        }
        ["pipe", "show" | "list", ref numbers @ ..] => pipes(engine, numbers, json),
        ["pipe", number, "show" | "list"] => pipes(engine, &[number], json),
        _ => {
            let how = table::How { quiet: given('q'), check: given('n') };
            let done = table::run(engine, &words, json, how).unwrap_or_else(|| {
                // -q is the only flag that changes what a command does.
                let quiet = if given('q') { "-q " } else { "" };
                change::command(engine, format!("{quiet}{}", words.join(" ")), given('n'), json)
            });
            let shows = matches!(words[..], ["table", _, "list" | "info" | "detail" | "lookup", ..]);
            if given('q') && !given('n') && !json && !shows { done.map(|_| String::new()) } else { done }
        }
    }
}

/// Keeps the rules with these numbers and ranges. Without numbers: all.
fn select(rules: &mut Vec<Value>, numbers: &[&str]) -> Result<(), Failure> {
    let mut ranges = Vec::new();
    for word in numbers {
        let (low, high) = word.split_once('-').unwrap_or((word, word));
        match (low.parse::<u64>(), high.parse::<u64>()) {
            (Ok(low), Ok(high)) => ranges.push(low..=high),
            _ => return Err(Failure::new(exit::USAGE, format!("`{word}` is not a rule number"))),
        }
    }
    if !ranges.is_empty() {
        let number = |rule: &Value| rule["number"].as_u64().unwrap_or(0);
        rules.retain(|rule| ranges.iter().any(|range| range.contains(&number(rule))));
        if rules.is_empty() {
            return Err(Failure::new(exit::FAILED, format!("there is no rule {}", numbers.join(", "))));
        }
    }
    Ok(())
}

/// The pipes with these numbers. Without numbers: all.
fn pipes(engine: &Engine, numbers: &[&str], json: bool) -> Result<String, Failure> {
    let number = |word: &&str| {
        word.parse().map_err(|_| Failure::new(exit::USAGE, format!("`{word}` is not a pipe number")))
    };
    let numbers = numbers.iter().map(number).collect::<Result<Vec<u64>, _>>()?;
    let answer = engine.ask("show-pipes", json!({}), "pipes")?;
    let wanted =
        |pipe: &&Value| numbers.is_empty() || pipe["number"].as_u64().is_some_and(|n| numbers.contains(&n));
    let pipes: Vec<&Value> = items(&answer["pipes"]).iter().filter(wanted).collect();
    if pipes.is_empty() && !numbers.is_empty() {
        return Err(Failure::new(exit::FAILED, "there is no such pipe"));
    }
    if json {
        return Ok(format!("{}\n", json!({ "pipes": pipes })));
    }
    if pipes.is_empty() {
        return Ok("no pipes\n".to_owned());
    }
    let line = |pipe: &Value| match (&pipe["number"], &pipe["rate"], &pipe["burst"]) {
        (number, rate, burst) if *rate == 0 => format!("pipe {number} unlimited burst {burst}\n"),
        (number, rate, burst) => format!("pipe {number} bw {rate}bit/s burst {burst}\n"),
    };
    Ok(pipes.into_iter().map(line).collect())
}
