//! Settings: listed, read and set.

use std::path::Path;

use serde_json::json;
use towpath::control::protocol::{Answer, Request};
use towpath::control::show;
use towpath::settings;

use super::connection::{Connection, Failure};
use super::either;
use crate::args::exit;

/// A setting that is asked for, by its short name.
enum Asked<'a> {
    Read(&'a str),
    Set(&'a str, u64),
}

pub(super) fn sysctl(socket: &Path, names: &[String], json: bool) -> Result<String, Failure> {
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
