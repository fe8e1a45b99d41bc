//! `towpath ctl dump`. [`dumps`] is the server.

use std::fmt::Display;
use std::io::{self, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use clap::Args;
use serde_json::Value;
use towpath_ring::{AttachError, Consumer, Kind, Verdict};

use super::super::client::Failure;
use super::super::command::{Command, arguments};
use super::super::dumps;
use super::super::state_filter::StateFilter;
use super::super::text::items;
use crate::exit;
use crate::output::say;

/// Write all states, or those that match the options, one per line, without stopping the engine
///
/// No state is listed twice, and no state that exists throughout is missed. After an interruption, --from continues at the cursor of
/// the last complete line.
#[derive(Debug, Args)]
pub(super) struct Dump {
    /// What to write: `states`
    #[arg(value_parser = ["states"])]
    what: String,

    /// Continue at this cursor; with --json each line has it as "next"
    #[arg(long, value_name = "CURSOR", default_value_t = 0)]
    from: u64,

    #[command(flatten)]
    filter: StateFilter,

    /// Print one JSON object per line: {"next":CURSOR,"states":[...]}
    #[arg(long)]
    json: bool,
}

pub(super) const COMMAND: Command =
    Command::other::<Dump>("dump", &[], |engine, matches| dump(engine.socket(), &arguments(matches)));

fn dump(socket: &Path, args: &Dump) -> Result<String, Failure> {
    let path = dumps::path(socket);
    let failed = |error: &dyn Display| Failure::new(exit::NO_ENGINE, format!("{}: {error}", path.display()));
    let refused = |error: &dyn Display| Failure::new(exit::FAILED, format!("{}: {error}", path.display()));
    let mut ring = Consumer::attach_as(&path, "towpath-ctl-dump").map_err(|error| match &error {
        AttachError::Connect { source, .. } if source.kind() == ErrorKind::NotFound => {
            no_dumps(socket).unwrap_or_else(|| failed(&error))
        }
        AttachError::Limit(_) | AttachError::Engine(_) => refused(&error),
        _ => failed(&error),
    })?;
    let request = dumps::request(args.from, &args.filter);
    // The engine reports an invalid filter by an errno only; this error names the option.
    args.filter.clone().compile().map_err(|error| Failure::new(exit::USAGE, error))?;
    ring.request(dumps::STATES, &request).map_err(|error| failed(&error))?;
    let mut out = io::BufWriter::new(io::stdout().lock());
    loop {
        let Some(frame) = ring.recv().map_err(|error| failed(&error))? else {
            return Err(Failure::new(exit::FAILED, "the engine has ended; the list of states is incomplete"));
        };
        let kind = frame.header().kind;
        let page: Value = match kind {
            Kind::DUMP => serde_json::from_slice(ring.payload(&frame)).map_err(|error| refused(&error))?,
            _ => Value::Null,
        };
        let (error, interrupted) = (frame.header().mark, frame.header().interrupted());
        ring.verdict(frame, Verdict::Pass);
        match kind {
            Kind::DUMP => {}
            Kind::DONE => {
                if interrupted {
                    say(
                        "towpath: the rules changed during the dump: rule numbers may differ before and after the change",
                    );
                }
                return Ok(String::new());
            }
            Kind::ERROR if error == dumps::ERANGE => {
                let from = args.from;
                return Err(Failure::new(exit::FAILED, format!("--from {from} is beyond the last state")));
            }
            Kind::ERROR => return Err(refused(&io::Error::from_raw_os_error(error as i32))),
            _ => continue,
        }
        let wrote = match args.json {
            // A page of the table in which no state matches.
            _ if items(&page["states"]).is_empty() && !args.filter.is_empty() => Ok(()),
            true => writeln!(out, "{page}"),
            false => {
                let states = items(&page["states"]).iter();
                states.filter_map(|state| state["text"].as_str()).try_for_each(|text| writeln!(out, "{text}"))
            }
        };
        match wrote.and_then(|()| out.flush()) {
            // The reader has read enough (`| head`).
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(String::new()),
            other => other.map_err(|error| Failure::new(exit::FAILED, error.to_string()))?,
        }
    }
}

/// The failure if the engine runs and has no ring for dumps. `None` if there is no engine.
fn no_dumps(socket: &Path) -> Option<Failure> {
    UnixStream::connect(socket).ok()?;
    let socket = socket.display();
    let message = format!(
        "{socket}: this engine has no dumps (`towpath run` has them); `show states` lists its states"
    );
    Some(Failure::new(exit::FAILED, message))
}
