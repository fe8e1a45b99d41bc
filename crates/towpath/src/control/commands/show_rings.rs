//! `towpath ctl show rings`

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use towpath_engine::ChannelSnapshot;
use towpath_engine::queue::parse::{fanout_word, overload_words};
use towpath_engine::queue::{About, VerdictStats};
use towpath_metrics::{Kind, Metric};
use towpath_ring::{Channel, ChannelStats, Credentials, Geometry};

use super::super::command::{Context, Handled, Query, Reply};
use super::super::query::Target;
use super::super::text::{age, cell, items, nonzero, table};
use crate::metrics::{self, Layout};

/// The channels to inspectors, workers and dump clients, with their rings
///
/// One line per channel: its number, queue, process and user; the number and size of the ring's frames; frames in use; undecided
/// messages, held messages, and the maximum; the age of the oldest message; messages published and decided; wake-ups. The next
/// line has the counters that are not zero: verdicts, default decisions, losses by reason.
#[derive(Debug, Default, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ShowRings {}

impl Query for ShowRings {
    const WORDS: &'static str = "show rings";
    const ANSWER: &'static str = "rings";

    fn handle(self, context: &Context<'_>) -> Handled {
        let dumps = context.endpoints.dumps();
        context.query(rings, |parts| {
            let mut rings: Vec<Ring> = parts.into_iter().flatten().collect();
            rings.sort_by_key(|ring| ring.channel);
            rings.extend(dumps);
            Ok(Reply::Answer(
                Self::ANSWER,
                json!({ "rings": rings.iter().map(Ring::object).collect::<Vec<_>>() }),
            ))
        })
    }

    fn text(&self, answer: &Value) -> String {
        let rings = items(&answer["rings"]);
        if rings.is_empty() {
            return "no channels\n".to_owned();
        }
        let header = [
            "channel",
            "queue",
            "pid",
            "uid",
            "frames",
            "used",
            "depth",
            "held",
            "high",
            "oldest",
            "published",
            "decided",
            "wakeups",
            "inspector",
        ];
        let mut rows = vec![header.map(str::to_owned).to_vec()];
        rows.extend(rings.iter().map(|ring| {
            let number = |key: &str| cell(&ring[key]);
            let dump = ring["dump"] == true;
            vec![
                if dump { "-".to_owned() } else { number("channel") },
                if dump { "dump".to_owned() } else { number("queue") },
                number("pid"),
                number("uid"),
                format!("{}x{}", ring["frame_nr"], ring["frame_size"]),
                number("used"),
                number("depth"),
                number("held"),
                number("high_water"),
                age(&ring["oldest"]),
                number("published"),
                cell(&ring["verdicts"]["decided"]),
                number("wakeups"),
                number("name"),
            ]
        }));
        let notes = std::iter::once(String::new()).chain(rings.iter().map(note));
        table(&rows).lines().zip(notes).map(|(line, note)| format!("{line}\n{note}")).collect()
    }
}

/// The channel's counters that are not zero.
fn note(ring: &Value) -> String {
    let word = |key: &str| ring[key].as_str().unwrap_or_default();
    let pages = if ring["huge_pages"] == true { ", huge pages" } else { "" };
    let mut text = match ring["dump"] == true {
        true => format!("         dump{pages}"),
        false => format!("         fanout {}, overload {}{pages}", word("fanout"), word("overload")),
    };
    for (name, key) in [("verdicts", "verdicts"), ("by default", "defaults"), ("lost", "lost")] {
        let sums = ["decided", "other"];
        let counters =
            ring[key].as_object().into_iter().flatten().filter(|(name, _)| !sums.contains(&name.as_str()));
        if let Some(counters) = nonzero(counters) {
            text += &format!("; {name}: {counters}");
        }
    }
    // The counters that have neither a column nor a group.
    let columns = ["published", "bytes", "wakeups"];
    let also = |metric: &Metric| {
        metric.kind == Kind::Counter && metric.label.is_none() && !columns.contains(&metric.name)
    };
    let names = ChannelStats::TABLE.iter().filter(|metric| also(metric)).map(|metric| metric.name);
    let names: Vec<&str> = names.chain(["traces"]).collect();
    let also = ring.as_object().into_iter().flatten().filter(|(name, _)| names.contains(&name.as_str()));
    if let Some(counters) = nonzero(also) {
        text += &format!("; also: {counters}");
    }
    if let Some(gone) = ring["gone"].as_str() {
        text += &format!("; {gone}");
    }
    text + "\n"
}

/// The channels of one engine thread.
fn rings(target: &mut Target<'_>) -> Vec<Ring> {
    let mut rings: Vec<Ring> = target.pool().map_or_else(Vec::new, |pool| pool.rings());
    if let Some(engine) = target.engine() {
        rings.extend(engine.channels().into_iter().map(Ring::from));
    }
    rings
}

/// The channel's counters in its object.
const CHANNEL: Layout = Layout {
    families: &[("default_verdict", "defaults"), ("lost", "lost")],
    renamed: &[("invalid", "garbage")],
    moved: &[("decided", "verdicts"), ("cumulative", "verdicts")],
    hidden: &["out", "huge_pages"],
};

/// A channel and its ring towards the inspector.
#[derive(Clone, Debug, Default)]
pub struct Ring {
    /// Channel number, from 1.
    pub channel: u32,
    /// Queue number.
    pub queue: u16,
    /// Name that the inspector gave itself.
    pub name: String,
    /// Process and user.
    pub peer: Credentials,
    /// How the channel ended; `None` while it is open.
    pub gone: Option<String>,
    /// How the queue distributes frames among its inspectors.
    pub fanout: &'static str,
    /// Action for a frame that finds no room.
    pub overload: String,
    /// Blocks and frames. `None` for a channel without a ring.
    pub geometry: Option<Geometry>,
    /// Published messages without a decision.
    pub depth: u32,
    /// Frames in use, including those of messages that were decided without the inspector.
    pub used: u32,
    /// Age of the oldest undecided message, in nanoseconds; `None` if there is none.
    pub oldest: Option<u64>,
    /// Counters of the channel.
    pub stats: ChannelStats,
    /// The inspector's decisions.
    pub verdicts: VerdictStats,
    /// Running traces.
    pub traces: u32,
    /// The ring of a dump client: it has no number and no queue.
    pub dump: bool,
}

impl Ring {
    /// The ring of a dump client.
    pub(in crate::control) fn of_dump(channel: &Channel) -> Self {
        Self {
            name: channel.name().to_owned(),
            peer: channel.peer(),
            geometry: Some(channel.geometry()),
            depth: channel.held(),
            stats: channel.stats(),
            dump: true,
            ..Self::default()
        }
    }

    /// The channel as an object.
    fn object(&self) -> Map<String, Value> {
        let mut object = CHANNEL.object(&self.stats);
        if let Some(verdicts) = object["verdicts"].as_object_mut() {
            verdicts.extend(metrics::json(&self.verdicts));
        }
        let other = self.stats.lost_overwritten + self.stats.lost_limited;
        object["lost"]["other"] = other.into();
        // The ring counts invalid words. The engine counts verdicts that the queue does not allow.
        let refused = self.verdicts.forbidden_queue + self.verdicts.too_long;
        object.insert("violations".to_owned(), (self.stats.violations + refused).into());
        let size = |size: fn(&Geometry) -> u32| self.geometry.as_ref().map_or(0, size);
        let Value::Object(state) = json!({
            "channel": self.channel,
            "queue": self.queue,
            "name": self.name,
            "pid": self.peer.pid,
            "uid": self.peer.uid,
            "fanout": self.fanout,
            "overload": self.overload,
            "block_size": size(|geometry| geometry.block_size),
            "block_nr": size(|geometry| geometry.block_nr),
            "frame_size": size(|geometry| geometry.frame_size),
            "frame_nr": size(|geometry| geometry.frame_nr),
            "depth": self.depth,
            "used": self.used,
            "oldest": self.oldest,
            "huge_pages": self.stats.huge_pages != 0,
            "traces": self.traces,
        }) else {
            return object;
        };
        object.extend(state);
        if self.dump {
            object.insert("dump".to_owned(), true.into());
        }
        if let Some(gone) = &self.gone {
            object.insert("gone".to_owned(), gone.as_str().into());
        }
        object
    }
}

impl From<ChannelSnapshot> for Ring {
    fn from(channel: ChannelSnapshot) -> Self {
        let ring = Self {
            channel: channel.channel,
            queue: channel.queue,
            gone: channel.gone,
            fanout: fanout_word(channel.policy.fanout),
            overload: overload_words(channel.policy.overload),
            depth: channel.open,
            used: channel.used,
            oldest: channel.oldest,
            verdicts: channel.verdicts,
            traces: channel.traces,
            ..Self::default()
        };
        match channel.about {
            Some(About { peer, name, geometry, stats }) => {
                Self { name, peer, geometry: Some(geometry), stats, ..ring }
            }
            None => ring,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rings_are_a_table_with_the_counters_below() {
        let ring = Ring {
            channel: 1,
            queue: 12,
            name: "ids".into(),
            peer: Credentials { pid: 4711, ..Credentials::default() },
            geometry: Some(Geometry { block_size: 1 << 20, block_nr: 4, frame_size: 1024, frame_nr: 4096 }),
            depth: 3,
            oldest: Some(12_345_678),
            fanout: "flow",
            overload: "block".into(),
            stats: ChannelStats { decided: 9, lost_no_room: 2, late: 5, ..ChannelStats::default() },
            verdicts: VerdictStats { pass: 9, ..VerdictStats::default() },
            ..Ring::default()
        };
        let other = Ring { channel: 10, oldest: None, gone: Some("it left".into()), ..ring.clone() };
        let text = ShowRings {}.text(&json!({ "rings": [ring.object(), other.object()] }));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "channel  queue   pid  uid     frames  used  depth  held  high  oldest  published  decided  wakeups  inspector"
        );
        assert_eq!(
            lines[1],
            "      1     12  4711    0  4096x1024     0      3     0     0    12ms          0        9        0  ids"
        );
        assert_eq!(
            lines[2],
            "         fanout flow, overload block; verdicts: 9 pass; lost: 2 no room; also: 5 late"
        );
        assert!(lines[4].ends_with("; it left"), "{text}");
        assert_eq!(ShowRings {}.text(&json!({ "rings": [] })), "no channels\n");
        let dump = Ring { channel: 0, queue: 0, dump: true, gone: None, ..other };
        let text = ShowRings {}.text(&json!({ "rings": [dump.object()] }));
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!((&lines[1][..4], lines[2][0]), (&["-", "dump", "4711", "0"][..], "dump;"), "{text}");
    }
}
