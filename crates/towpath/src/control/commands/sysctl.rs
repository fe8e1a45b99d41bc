//! `towpath ctl sysctl` and `towpath ctl show settings`.

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use towpath_gate::SettingError;

use super::super::client::{Engine, Failure};
use super::super::command::{
    Access, Command, Context, Handled, Query, Reply, Request, arguments, name, parse,
};
use super::super::protocol::{Code, Refusal};
use crate::config::meant;
use crate::exit;
use crate::settings;

/// The settings, under ipfw's sysctl names
#[derive(Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShowSettings {}

impl Query for ShowSettings {
    const WORDS: &'static str = "show settings";
    const ANSWER: &'static str = "settings";

    fn handle(self, context: &Context<'_>) -> Handled {
        Ok(Reply::Answer(Self::ANSWER, json!({ "settings": context.ruleset()?.settings() })))
    }

    fn ask(&self, engine: &Engine) -> Result<Value, Failure> {
        Ok(json!({ "settings": object(&settings(engine)?) }))
    }

    fn text(&self, answer: &Value) -> String {
        let settings = answer["settings"].as_object().into_iter().flatten();
        settings.map(|(name, value)| format!("net.inet.ip.fw.{name}: {value}\n")).collect()
    }
}

/// List the settings, or set some: `sysctl dyn_max=100000 net.inet.ip.fw.dyn_keepalive=0`
///
/// All names and values are checked before the first one is set.
#[derive(Debug, Args)]
pub(super) struct Sysctl {
    /// NAME reads a setting, NAME=VALUE sets it; without arguments all are listed
    #[arg(value_name = "NAME[=VALUE]")]
    names: Vec<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

pub(super) const COMMAND: Command = Command::other::<Sysctl>(
    "sysctl",
    &[Request { name: "set", access: Access::Change, handle }],
    |engine, matches| sysctl(engine, &arguments(matches)),
);

/// Changes a setting.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct SetRequest {
    /// With or without `net.inet.ip.fw.`.
    name: String,
    /// Switches are 0 and 1.
    value: u64,
}

fn handle(body: Value, context: &Context<'_>) -> Handled {
    let SetRequest { name, value } = parse(body)?;
    match context.ruleset()?.set(&name, value) {
        Ok((name, before, value)) => {
            Ok(Reply::Answer("set", json!({ "name": name, "before": before, "value": value })))
        }
        Err(error) => Err(Refusal::new(Code::Invalid, error.to_string())),
    }
}

/// A setting that is read or set, by its short name.
enum Operation<'a> {
    Read(&'a str),
    Set(&'a str, u64),
}

type Settings = Vec<(String, u64)>;

fn settings(engine: &Engine) -> Result<Settings, Failure> {
    let mut answer = engine.ask(&name(ShowSettings::WORDS), ShowSettings {}, ShowSettings::ANSWER)?;
    serde_json::from_value(answer["settings"].take())
        .map_err(|error| Failure::new(exit::FAILED, format!("settings: {error}")))
}

fn object(settings: &[(String, u64)]) -> Map<String, Value> {
    settings.iter().map(|(name, value)| (name.clone(), json!(value))).collect()
}

fn line(name: &str, value: u64) -> String {
    format!("net.inet.ip.fw.{name}: {value}\n")
}

fn sysctl(engine: &Engine, Sysctl { names, json }: &Sysctl) -> Result<String, Failure> {
    let mut settings = settings(engine)?;
    let operations = names.iter().map(|name| operation(name, &settings)).collect::<Result<Vec<_>, _>>()?;
    let (mut rows, mut text) = (Vec::new(), String::new());
    if names.is_empty() {
        text = settings.iter().map(|(name, value)| line(name, *value)).collect();
        rows.clone_from(&settings);
    }
    for operation in operations {
        match operation {
            Operation::Read(name) => {
                for (name, value) in settings.iter().filter(|(row, _)| row == name) {
                    text += &line(name, *value);
                    rows.push((name.clone(), *value));
                }
            }
            Operation::Set(name, value) => {
                let request = SetRequest { name: name.to_owned(), value };
                let answer = engine.ask("set", request, "set")?;
                let value = answer["value"].as_u64().unwrap_or(value);
                // As sysctl(8) prints a change.
                text += &format!("net.inet.ip.fw.{name}: {} -> {value}\n", answer["before"]);
                settings.iter_mut().filter(|(row, _)| row == name).for_each(|(_, own)| *own = value);
                rows.push((name.to_owned(), value));
            }
        }
    }
    Ok(if *json { format!("{}\n", json!({ "settings": object(&rows) })) } else { text })
}

/// Reads NAME or NAME=VALUE.
fn operation<'a>(word: &'a str, settings: &[(String, u64)]) -> Result<Operation<'a>, Failure> {
    let Some((name, value)) = word.split_once('=') else {
        let short = settings::short(word);
        return match settings.iter().any(|(row, _)| row == short) {
            true => Ok(Operation::Read(short)),
            false => Err(unknown(word, settings.iter().map(|(row, _)| &**row))),
        };
    };
    let value = value.parse().map_err(|_| {
        Failure::new(exit::USAGE, format!("`{value}` is not a whole number; switches are 0 and 1"))
    })?;
    let checked = settings::Settings::default().set(name, value);
    checked.map_err(|error| match error {
        SettingError::Unknown(..) => unknown(name, settings::table().map(|setting| setting.name)),
        error => Failure::new(exit::FAILED, error.to_string()),
    })?;
    Ok(Operation::Set(settings::short(name), value))
}

fn unknown<'n>(word: &str, names: impl Iterator<Item = &'n str>) -> Failure {
    let hint = meant(settings::short(word), names);
    let hint = hint.unwrap_or_else(|| "`towpath ctl sysctl` lists the settings".to_owned());
    Failure::new(exit::FAILED, format!("there is no setting `{word}`; {hint}"))
}
