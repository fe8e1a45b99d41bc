//! `towpath top`: the rates of a running engine, over the control socket.
//!
//! ```text
//! Reader --Sample--> Model --lines--> terminal
//!        <--Command--      <--keys--
//! ```
//!
//! The engine answers the requests of `towpath ctl`; nothing else is read. A part of a sample is read only while a view shows it, over one
//! connection per sample. Engine output reaches the terminal only through `text::clean`.
//!
//! - `sample`, `flows`, `views`, `table`, `model`, `trace`: without IO;
//! - `reader`: the control socket; `screen`: the terminal.

mod flows;
mod model;
mod reader;
mod sample;
mod screen;
mod table;
mod text;
mod trace;
mod views;

use std::thread;
use std::time::Duration;

use serde_json::{Map, Value, json};

use self::flows::Flows;
use self::model::Wanted;
use self::reader::Reader;
use self::sample::{Part, Sample};
use self::views::{Pair, View};
use crate::control::client::{Engine, Failure};

/// Shows the engine on the terminal until the user quits. A sample is read every `interval`.
///
/// # Errors
///
/// Fails without a terminal. An engine that cannot be reached is no error: the view waits for it.
pub fn watch(engine: Engine, interval: Duration) -> Result<(), Failure> {
    screen::run(engine, interval)
}

/// Reads two samples, `interval` apart, and returns them with the rates: as text, or with `json` as one object. At most `count` flows.
///
/// # Errors
///
/// Fails if there is no engine.
pub fn once(engine: Engine, interval: Duration, count: usize, json: bool) -> Result<String, Failure> {
    let socket = engine.socket().display().to_string();
    let mut reader = Reader::new(engine);
    let parts = vec![Part::Stats, Part::Ports, Part::Queues, Part::Rings, Part::Mux, Part::Rules];
    let wanted = Wanted { running: true, parts, flows: true, filter: None };
    let mut flows = Flows::default();
    let before = take(&mut reader, &wanted, &mut flows)?;
    thread::sleep(interval);
    let now = take(&mut reader, &wanted, &mut flows)?;
    let pair = Pair { now: &now, before: Some(&before) };
    let tables = View::ALL.map(|view| {
        let mut table = view.table(&pair, &flows);
        table.sort(view.sort());
        if view == View::Flows {
            table.rows.truncate(count);
        }
        (view, table)
    });
    if json {
        let mut object: Map<String, Value> =
            tables.iter().map(|(view, table)| (view.name().to_owned(), table.json())).collect();
        let notes = tables
            .iter()
            .filter_map(|(view, table)| Some((view.name().to_owned(), json!(table.note.as_ref()?))));
        object.insert("notes".to_owned(), notes.collect::<Map<_, _>>().into());
        object.insert("socket".to_owned(), socket.into());
        object.insert("seconds".to_owned(), json!(pair.seconds()));
        object.insert("totals".to_owned(), pair.totals().into());
        return Ok(text::ascii_json(&Value::Object(object).to_string()) + "\n");
    }
    let number = |key: &str| {
        pair.totals().get(key).and_then(Value::as_f64).map_or_else(|| "-".to_owned(), text::short)
    };
    let mut printed = format!(
        "packets {}/s, passed {}/s, dropped {}/s, rejected {}/s, states {} of {}\n",
        number("packets_per_second"),
        number("passed_per_second"),
        number("dropped_per_second"),
        number("rejected_per_second"),
        number("states"),
        number("states_max"),
    );
    for (view, table) in &tables {
        printed.push('\n');
        printed += &table.text(view.name());
    }
    Ok(printed)
}

fn take(reader: &mut Reader, wanted: &Wanted, flows: &mut Flows) -> Result<Sample, Failure> {
    let mut sample = reader.read(wanted)?;
    if let Some(Ok(part)) = &mut sample.flows {
        flows.take(std::mem::take(&mut part.states), sample.at, part.swept);
    }
    Ok(sample)
}
