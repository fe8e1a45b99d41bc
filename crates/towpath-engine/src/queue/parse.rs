//! The text form of a queue's policy, on the command line, in the configuration and in control answers.

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use towpath_ring::{Fanout, Overload};

const FANOUTS: [(&str, Fanout); 6] = [
    ("exclusive", Fanout::Exclusive),
    ("flow", Fanout::FlowHash),
    ("cpu", Fanout::Cpu),
    ("least", Fanout::LeastLoaded),
    ("broadcast", Fanout::Broadcast),
    ("mirror", Fanout::Mirror),
];

/// Parses a fan-out mode.
///
/// # Errors
/// The error names the valid words.
pub fn fanout(text: &str) -> Result<Fanout, String> {
    if text == "tap" {
        return Err("fanout `tap` is now called `mirror`".to_owned());
    }
    let found = FANOUTS.iter().find(|(word, _)| *word == text);
    found
        .map(|(_, fanout)| *fanout)
        .ok_or_else(|| format!("fanout `{text}` is not exclusive, flow, cpu, least, broadcast or mirror"))
}

/// The word that [`fanout`] parses.
pub fn fanout_word(fanout: Fanout) -> &'static str {
    FANOUTS.iter().find(|(_, of)| *of == fanout).map_or("", |(word, _)| word)
}

/// Parses an overload policy.
///
/// # Errors
/// The error names the valid words, or the range of the number.
pub fn overload(text: &str) -> Result<Overload, String> {
    Ok(match text.split_once(':').unwrap_or((text, "")) {
        ("block", "") => Overload::Block,
        ("drop-newest", "") => Overload::DropNewest,
        ("drop-oldest", count) if !count.is_empty() => Overload::DropOldest(within(count, 1..=4096)?),
        ("pass", "") => Overload::Pass,
        ("drop", "") => Overload::Drop,
        ("queue", number) if !number.is_empty() => Overload::Queue(queue_number(number)?),
        _ => {
            return Err(format!(
                "overload `{text}` is not block, drop-newest, drop-oldest:COUNT, pass, drop or queue:N"
            ));
        }
    })
}

/// The text that [`overload`] parses.
pub fn overload_words(overload: Overload) -> String {
    match overload {
        Overload::Block => "block".to_owned(),
        Overload::DropNewest => "drop-newest".to_owned(),
        Overload::DropOldest(max) => format!("drop-oldest:{max}"),
        Overload::Pass => "pass".to_owned(),
        Overload::Drop => "drop".to_owned(),
        Overload::Queue(number) => format!("queue:{number}"),
    }
}

/// Parses a queue number.
///
/// # Errors
/// The text is not a number in 1..65535.
pub fn queue_number(text: &str) -> Result<u16, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err(format!("queue number `{text}` is not in 1..65535")),
        Ok(number) => Ok(number),
    }
}

/// Parses a number in `range`.
///
/// # Errors
/// The text is not a number in `range`.
pub fn within<N: FromStr + PartialOrd + Display>(text: &str, range: RangeInclusive<N>) -> Result<N, String> {
    match text.parse() {
        Ok(number) if range.contains(&number) => Ok(number),
        _ => Err(format!("`{text}` is not a number in {}..{}", range.start(), range.end())),
    }
}
