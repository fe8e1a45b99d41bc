//! `towpath ctl upgrade`

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::super::client::{Engine, Failure};
use super::super::command::{Access, Command, Context, Handled, NoMembers, Reply, Request, arguments, parse};
use super::super::protocol::{Code, Refusal};
use crate::exit;

/// Interval of looks at the progress.
const LOOK: Duration = Duration::from_millis(50);

/// Time without an answer of either version.
const PATIENCE: Duration = Duration::from_secs(10);

/// Replace the running engine by another version; packets wait in the receive rings of the ports
///
/// The engine starts BINARY, hands over its ports, sockets, inspectors and states, and ends. If the new version does not come up, the
/// engine continues. BINARY must be named by `upgrade` of [engine] in the configuration. Only root may request an upgrade.
#[derive(Debug, Args)]
#[command(after_help = "\
Example:
  towpath ctl upgrade
  towpath ctl upgrade /usr/bin/towpath")]
pub(super) struct Upgrade {
    /// The program to start; by default the first one that the configuration names
    binary: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) const COMMAND: Command = Command::other::<Upgrade>(
    "upgrade",
    &[
        Request { name: "upgrade", access: Access::Root, handle: begin },
        Request { name: "show upgrade", access: Access::Read, handle: show },
    ],
    |engine, matches| upgrade(engine, &arguments(matches)),
);

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Begin {
    binary: Option<PathBuf>,
}

fn begin(body: Value, context: &Context<'_>) -> Handled {
    let Begin { binary } = parse(body)?;
    context.endpoints.upgrade(|desk| {
        let refuse = |code, message: &str| Err(Refusal::new(code, message));
        if desk.running {
            return refuse(Code::Busy, "an upgrade is in progress");
        }
        if let Some(why) = &desk.impossible {
            return refuse(Code::Invalid, why);
        }
        let named = |path: &PathBuf| desk.programs.iter().position(|program| program == path);
        let Some(at) = binary.as_ref().map_or_else(|| (!desk.programs.is_empty()).then_some(0), named) else {
            let named: Vec<_> = desk.programs.iter().map(|path| path.display().to_string()).collect();
            let message = match named.is_empty() {
                true => "the configuration names no program for upgrades: write upgrade = [\"/usr/bin/towpath\"] in [engine] and reload".to_owned(),
                false => format!("`upgrade` of [engine] names {}", named.join(", ")),
            };
            return refuse(Code::Invalid, &message);
        };
        (desk.wanted, desk.running, desk.failed) = (Some(at), true, None);
        Ok(Reply::Answer("upgrade", state(desk.running, None)))
    })
}

fn show(body: Value, context: &Context<'_>) -> Handled {
    let NoMembers {} = parse(body)?;
    let answer = context.endpoints.upgrade(|desk| state(desk.running, desk.failed.as_deref()));
    Ok(Reply::Answer("upgrade", answer))
}

fn state(running: bool, failed: Option<&str>) -> Value {
    json!({ "process": std::process::id(), "running": running, "failed": failed })
}

fn upgrade(engine: &Engine, Upgrade { binary, json }: &Upgrade) -> Result<String, Failure> {
    let old = engine.ask("upgrade", &Begin { binary: binary.clone() }, "upgrade")?["process"].clone();
    let mut answered = Instant::now();
    loop {
        thread::sleep(LOOK);
        // Between the two processes, a connection may end without an answer.
        let answer = match engine.ask("show-upgrade", json!({}), "upgrade") {
            Ok(answer) => answer,
            Err(failure) if answered.elapsed() > PATIENCE => return Err(failure),
            Err(_) => continue,
        };
        answered = Instant::now();
        if answer["process"] != old {
            return Ok(match json {
                true => format!("{}\n", json!({ "process": answer["process"], "before": old })),
                false => format!("process {} has replaced process {old}\n", answer["process"]),
            });
        }
        if let Some(why) = answer["failed"].as_str() {
            return Err(Failure::new(exit::FAILED, format!("not upgraded: {why}")));
        }
    }
}
