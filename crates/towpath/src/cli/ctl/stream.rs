//! What goes on coming once it was asked for: a trace's packets, a dump's states, events.

use std::fmt::Display;
use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::json;
use towpath::control::dumps;
use towpath::control::protocol::{Answer, Request};
use towpath_ring::{AttachError, Consumer, Kind, Verdict};

use super::connection::{Connection, Failure, Message};
use super::{Dump, Events, Trace};
use crate::args::exit;
use crate::cli::say;

pub(super) fn trace(socket: &Path, args: &Trace) -> Result<String, Failure> {
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

pub(super) fn dump(socket: &Path, args: &Dump) -> Result<String, Failure> {
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

pub(super) fn events(socket: &Path, args: &Events) -> Result<String, Failure> {
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
