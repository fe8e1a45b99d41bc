//! A line of the log, and its representations as text and as JSON. No IO.

use std::borrow::Cow;
use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};
use towpath_wire::Time;
use tracing::Level;

use crate::packet_log::utc;

/// The text before the message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Head {
    /// `towpath: warning: `
    Level,
    /// `towpath: `
    Program,
    /// Nothing: a message to the terminal.
    None,
}

/// A line. The message is complete: fields repeat its values for programs, and the text does not show them.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Line {
    pub(crate) time: SystemTime,
    pub(crate) level: Level,
    pub(crate) target: Cow<'static, str>,
    pub(crate) head: Head,
    pub(crate) message: String,
    pub(crate) fields: Vec<(Cow<'static, str>, Value)>,
}

/// The target of lines that a command prints itself.
const PROGRAM: &str = "towpath";

impl Line {
    /// A line without fields.
    pub(crate) fn new(level: Level, head: Head, message: String) -> Self {
        let target = Cow::Borrowed(PROGRAM);
        Self { time: SystemTime::now(), level, target, head, message, fields: Vec::new() }
    }

    /// Bytes that count for the bound of the queue.
    pub(super) fn size(&self) -> usize {
        let field = |(name, value): &(Cow<'static, str>, Value)| {
            name.len()
                + match value {
                    Value::String(text) => text.len(),
                    _ => size_of::<Value>(),
                }
        };
        self.message.len() + self.fields.iter().map(field).sum::<usize>()
    }

    /// The line as text, without the newline at its end. With `time`, it begins with the time, except for messages of a command.
    pub(super) fn text(&self, time: bool) -> String {
        let mut text = String::with_capacity(self.message.len() + 64);
        if time && self.head == Head::Level {
            // Writing to a string does not fail.
            let _ = write!(text, "{} ", utc(self.time(), true));
        }
        let _ = match self.head {
            Head::Level => write!(text, "towpath: {}: ", word(self.level)),
            Head::Program => write!(text, "towpath: "),
            Head::None => Ok(()),
        };
        text.push_str(&self.message);
        text
    }

    /// The line as one JSON object, without the newline at its end.
    pub(super) fn json(&self) -> String {
        let mut object = json!({
            "time": utc(self.time(), true).to_string(),
            "level": word(self.level),
            "target": self.target,
            "message": self.message,
        });
        if !self.fields.is_empty() {
            let fields = self.fields.iter().map(|(name, value)| (name.clone().into_owned(), value.clone()));
            object["fields"] = Value::Object(fields.collect::<Map<_, _>>());
        }
        object.to_string()
    }

    fn time(&self) -> Time {
        let since = self.time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Time::from_nanos(u64::try_from(since.as_nanos()).unwrap_or(u64::MAX))
    }
}

/// The word of a level in lines, requests and answers.
pub(super) fn word(level: Level) -> &'static str {
    match level {
        Level::ERROR => "error",
        Level::WARN => "warning",
        Level::INFO => "info",
        Level::DEBUG => "debug",
        Level::TRACE => "trace",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_line_has_a_text_and_a_json_form() {
        let mut line = Line::new(Level::WARN, Head::Level, "client \"x\"\nof user 7".to_owned());
        line.time = UNIX_EPOCH + Duration::from_micros(1_709_210_096_123_456);
        assert_eq!(line.text(false), "towpath: warning: client \"x\"\nof user 7");
        assert_eq!(line.text(true), "2024-02-29T12:34:56.123456Z towpath: warning: client \"x\"\nof user 7");
        let fields = line.json();
        assert!(!fields.contains("fields") && !fields.contains('\n'), "{fields}");
        line.fields = vec![("peer".into(), json!(7)), ("name".into(), json!("x"))];
        let object: Value = serde_json::from_str(&line.json()).unwrap();
        let expected = json!({
            "time": "2024-02-29T12:34:56.123456Z", "level": "warning", "target": "towpath",
            "message": "client \"x\"\nof user 7", "fields": {"peer": 7, "name": "x"},
        });
        assert_eq!(object, expected);
        line.head = Head::Program;
        assert!(line.text(true).starts_with("towpath: client"));
        line.head = Head::None;
        assert!(line.text(true).starts_with("client"));
        assert!(line.size() > line.message.len() + "peername".len());
    }
}
