//! `towpath ctl events`

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::sync::Arc;

use clap::Args;
use serde_json::{Value, json};

use super::super::client::{Engine, Failure};
use super::super::command::{
    Access, Command, Context, Handled, NoMembers, Progress, Reply, Request, Stream, arguments, parse,
};
use super::super::protocol::answer;
use super::super::text::items;
use super::show_states::Event;
use crate::exit;
use crate::output::say;
use crate::ruleset_manager::EVENTS;

/// Print the events of states, one per line, as they happen
///
/// The events are created, restored, replied, updated (established, closed, another rule), expired, removed and evicted; and nearly
/// full and no longer full for the table of states. Ends with the engine, or after --count events. Events that this program or the
/// engine has no room for are left out and counted.
#[derive(Debug, Args)]
pub(super) struct Events {
    /// End after N events
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,

    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
}

pub(super) const COMMAND: Command = Command::other::<Events>(
    "events",
    &[Request { name: "events", access: Access::Read, handle }],
    |engine, matches| events(engine, &arguments(matches)),
);

fn handle(body: Value, context: &Context<'_>) -> Handled {
    let NoMembers {} = parse(body)?;
    context.ruleset()?;
    Ok(Reply::Stream(Box::new(Watch::default())))
}

/// Events that wait until they are put into an answer. All clients share one copy.
#[derive(Debug, Default)]
struct Watch {
    begun: bool,
    waiting: VecDeque<Arc<[Event]>>,
    /// Number of waiting events.
    count: usize,
    /// Events dropped because this client reads too slowly.
    missed: u64,
    /// Events that the control thread missed in the journal.
    lost: u64,
}

impl Stream for Watch {
    fn produce(&mut self, output: &mut Vec<u8>) -> Progress {
        if !self.begun {
            self.begun = true;
            output.extend(answer("watching", json!({})));
            return Progress::More;
        }
        let Some(part) = self.waiting.pop_front() else { return Progress::Idle };
        self.count -= part.len();
        output.extend(answer("events", json!({ "events": *part, "lost": self.lost + self.missed })));
        Progress::More
    }

    fn is_live(&self) -> bool {
        true
    }

    fn takes_events(&self) -> bool {
        true
    }

    fn events(&mut self, events: &Arc<[Event]>, lost: u64) {
        self.lost = lost;
        if self.count + events.len() > EVENTS {
            self.missed += events.len() as u64;
            return;
        }
        self.count += events.len();
        self.waiting.push_back(Arc::clone(events));
    }
}

fn events(engine: &Engine, args: &Events) -> Result<String, Failure> {
    let mut connection = engine.open("events", json!({}))?;
    connection.answer("watching")?;
    connection.wait_forever()?;
    let (mut left, mut told) = (args.count.unwrap_or(u64::MAX), 0);
    let mut out = io::stdout().lock();
    loop {
        let answer = connection.answer("events")?;
        for event in items(&answer["events"]) {
            let what = event["what"].as_str().unwrap_or_default();
            let line = match (args.json, event["state"]["text"].as_str()) {
                (true, _) => event.to_string(),
                (false, Some(state)) => format!("{what} {state}"),
                (false, None) => what.to_owned(),
            };
            match writeln!(out, "{line}").and_then(|()| out.flush()) {
                // The reader has read enough (`| head`).
                Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(String::new()),
                Err(error) => return Err(Failure::new(exit::FAILED, format!("standard output: {error}"))),
                Ok(()) => {}
            }
            left -= 1;
            if left == 0 {
                return Ok(String::new());
            }
        }
        let lost = answer["lost"].as_u64().unwrap_or(0);
        if lost > told {
            say(format_args!("towpath: {} events were left out", lost - told));
            told = lost;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::session::{Session, tests as session};
    use super::*;

    #[test]
    fn events_wait_until_they_are_taken() {
        let mut client = Session::new(0);
        session::ask(&mut client, "events", json!({}));
        client.handle_reply(Reply::Stream(Box::new(Watch::default())), 0);
        let event = Event { at: 1, what: "expired", state: None };
        let part: Arc<[Event]> = vec![event; 500].into();
        // 131 of them fit.
        (0..140).for_each(|_| client.handle_events(&part, 3));
        let told = |client: &mut Session| -> Vec<(usize, u64)> {
            let (answers, _) = session::take(client);
            let answers = answers.into_iter().filter(|answer| answer.name == "events");
            answers
                .map(|answer| (items(&answer.body["events"]).len(), answer.body["lost"].as_u64().unwrap()))
                .collect()
        };
        let answers = told(&mut client);
        assert_eq!(answers.iter().map(|(events, _)| events).sum::<usize>(), 131 * 500);
        assert_eq!(answers.last(), Some(&(500, 9 * 500 + 3)));
        client.handle_events(&part, 3);
        assert_eq!(told(&mut client), [(500, 9 * 500 + 3)]);
    }
}
