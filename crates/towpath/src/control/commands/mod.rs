//! The subcommands of `towpath ctl`, one file each. To add one, write its file and add it to [`COMMANDS`].

use clap::ArgMatches;

pub(crate) use self::metrics::collect as collect_metrics;
use super::client::{Engine, Failure};
use super::command::{Command, Request};
use super::protocol::{Code, Refusal};

mod change;
mod clean;
mod delete_state;
mod dump;
mod events;
mod explain;
mod fleet;
mod ipfw;
mod log;
mod metrics;
mod paging;
mod set;
mod show_fleet;
mod show_frames;
pub mod show_mux;
mod show_offload;
pub mod show_ports;
mod show_queues;
pub mod show_rings;
mod show_rules;
pub mod show_send;
pub mod show_states;
mod show_stats;
mod show_table;
mod show_tables;
mod show_top;
mod sysctl;
mod table;
mod trace;
mod upgrade;

/// Every subcommand, in the order of `--help`.
pub static COMMANDS: &[Command] = &[
    Command::query::<show_rules::ShowRules>(),
    Command::query::<show_states::ShowStates>(),
    Command::query::<show_top::ShowTop>(),
    Command::query::<show_tables::ShowTables>(),
    Command::query::<show_table::ShowTable>(),
    Command::query::<sysctl::ShowSettings>(),
    Command::query::<show_queues::ShowQueues>(),
    Command::query::<show_ports::ShowPorts>(),
    Command::query::<show_stats::ShowStats>(),
    Command::query::<show_offload::ShowOffload>(),
    Command::query::<show_fleet::ShowFleet>(),
    Command::query::<show_rings::ShowRings>(),
    Command::query::<show_mux::ShowMux>(),
    Command::query::<show_send::ShowSend>(),
    Command::query::<show_frames::ShowFrames>(),
    Command::query::<explain::Explain>(),
    trace::COMMAND,
    dump::COMMAND,
    events::COMMAND,
    metrics::COMMAND,
    log::COMMAND,
    change::ADD,
    change::DELETE,
    change::ZERO,
    change::RESET_LOG,
    change::FLUSH,
    set::COMMAND,
    table::COMMAND,
    fleet::COMMAND,
    sysctl::COMMAND,
    ipfw::COMMAND,
    clean::COMMAND,
    upgrade::COMMAND,
];

/// Finds a request by the value of `do`.
pub(super) fn request(name: &str) -> Result<&'static Request, Refusal> {
    let requests = || COMMANDS.iter().flat_map(|command| command.requests);
    requests().find(|request| request.is(name)).ok_or_else(|| {
        let names: Vec<String> = requests().map(|request| super::command::name(request.name)).collect();
        Refusal::new(Code::Request, format!("there is no request `{name}`; there are {}", names.join(", ")))
    })
}

/// Adds the subcommands to the command `ctl`.
pub fn grammar(mut ctl: clap::Command) -> clap::Command {
    let mut show = clap::Command::new("show")
        .about("Show one part of the engine")
        .subcommand_required(true)
        .arg_required_else_help(true);
    for command in COMMANDS.iter().filter_map(|c| Some((c, c.words.strip_prefix("show ")?))) {
        show = show.subcommand((command.0.grammar)(clap::Command::new(command.1)));
    }
    ctl = ctl.subcommand_required(true).arg_required_else_help(true).subcommand(show);
    for command in COMMANDS.iter().filter(|command| !command.words.contains(' ')) {
        ctl = ctl.subcommand((command.grammar)(clap::Command::new(command.words)));
    }
    ctl
}

/// Runs the subcommand in the matches of `ctl`.
///
/// # Errors
///
/// Fails if the engine cannot be reached or refuses the request.
///
/// # Panics
///
/// Panics if the matches are not those of [`grammar`].
pub fn run(engine: &Engine, ctl: &ArgMatches) -> Result<String, Failure> {
    let (first, mut matches) = ctl.subcommand().expect("clap requires a subcommand");
    let mut words = first.to_owned();
    if let ("show", Some((second, inner))) = (first, matches.subcommand()) {
        words = format!("{first} {second}");
        matches = inner;
    }
    let command = COMMANDS.iter().find(|command| command.words == words);
    (command.expect("the grammar is made from this table").run)(engine, matches)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use serde_json::json;

    use super::super::EndpointCounters;
    use super::super::command::{Access, Context};
    use super::*;

    #[test]
    fn the_grammar_is_consistent_and_every_subcommand_has_help() {
        let ctl = grammar(clap::Command::new("ctl"));
        ctl.clone().debug_assert();
        for command in ctl.get_subcommands().flat_map(|c| std::iter::once(c).chain(c.get_subcommands())) {
            assert!(command.get_about().is_some(), "{}", command.get_name());
        }
    }

    #[test]
    fn every_request_refuses_unknown_members() {
        let endpoints = &EndpointCounters::default();
        let context = Context { ruleset: None, engines: &[], control: Default::default(), endpoints };
        // The members that requests need; each request refuses those of others, and `typo`.
        let needed = [
            ("show-table", json!({ "name": "t" })),
            ("lookup", json!({ "name": "t", "key": "k" })),
            ("load-table", json!({ "name": "t", "file": "f", "text": "" })),
            ("show-frames", json!({ "channel": 1 })),
            ("trace", json!({ "channel": 1 })),
            ("explain", json!({ "packet": ["arp"] })),
            ("command", json!({ "text": "zero" })),
            ("delete-state", json!({ "flow": "icmp 10.0.0.1 10.0.0.2" })),
            ("set", json!({ "name": "n", "value": 1 })),
            ("upgrade", json!({ "binary": null })),
            ("apply-fleet", json!({ "rules": { "name": "r", "text": "" } })),
            ("change-fleet-table", json!({ "table": "t", "lines": "" })),
            ("show-apply", json!({ "apply": 1 })),
        ];
        for request in COMMANDS.iter().flat_map(|command| command.requests) {
            let name = super::super::command::name(request.name);
            let needed =
                needed.iter().find(|(of, _)| *of == name).map_or(json!({}), |(_, body)| body.clone());
            let outcome = |body| match (request.handle)(body, &context) {
                Err(refusal) if refusal.code == Code::Request => Err(refusal.message),
                _ => Ok(()),
            };
            assert_eq!(outcome(needed.clone()), Ok(()), "{name}");
            let mut more = needed;
            more["typo"] = 1.into();
            let message = outcome(more).expect_err(&name);
            assert!(message.contains("unknown field `typo`"), "{name}: {message}");
        }
    }

    #[test]
    fn requests_have_distinct_names_and_the_documented_access() {
        let requests: Vec<&Request> = COMMANDS.iter().flat_map(|command| command.requests).collect();
        let names: HashSet<String> = requests.iter().map(|r| super::super::command::name(r.name)).collect();
        assert_eq!(names.len(), requests.len());
        for (name, access) in [
            ("show-rings", Access::Read),
            ("show-states", Access::Read),
            ("events", Access::Read),
            ("metrics", Access::Read),
            ("show-log", Access::Read),
            ("log", Access::Change),
            ("lookup", Access::Read),
            ("show-frames", Access::Packets),
            ("trace", Access::Packets),
            ("follow", Access::Packets),
            ("command", Access::Change),
            ("set", Access::Change),
            ("upgrade", Access::Root),
            ("apply-fleet", Access::Change),
            ("show-apply", Access::Read),
        ] {
            assert_eq!(request(name).unwrap().access, access, "{name}");
        }
        let refusal = request("fly").unwrap_err();
        assert!(refusal.message.contains("show-rings") && refusal.code == Code::Request, "{refusal:?}");
    }
}
