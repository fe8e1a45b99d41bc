//! `towpath ctl show rings`

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use towpath_engine::ChannelSnapshot;
use towpath_engine::queue::About;
use towpath_engine::queue::parse::{fanout_word, overload_words};

use super::super::command::{Context, Handled, Query, Reply};
use super::super::query::Target;
use super::super::text::{age, cell, items, nonzero, table};

/// The channels to inspectors and workers, with their rings
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
        context.query(rings, |parts| {
            let mut rings: Vec<Ring> = parts.into_iter().flatten().collect();
            rings.sort_by_key(|ring| ring.channel);
            Ok(Reply::Answer(Self::ANSWER, json!({ "rings": rings })))
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
            vec![
                number("channel"),
                number("queue"),
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
    let mut text = format!("         fanout {}, overload {}{pages}", word("fanout"), word("overload"));
    for (name, key) in [("verdicts", "verdicts"), ("by default", "defaults"), ("lost", "lost")] {
        let counters = ring[key].as_object().into_iter().flatten().filter(|(name, _)| *name != "decided");
        if let Some(counters) = nonzero(counters) {
            text += &format!("; {name}: {counters}");
        }
    }
    let also = ["full", "late", "violations", "oneshots", "gaps", "traces"];
    let also = ring.as_object().into_iter().flatten().filter(|(name, _)| also.contains(&name.as_str()));
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

/// A channel and its ring towards the inspector.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Ring {
    /// Channel number, from 1.
    pub channel: u32,
    /// Queue number.
    pub queue: u16,
    /// Name that the inspector gave itself.
    pub name: String,
    /// Process id.
    pub pid: u32,
    /// User id.
    pub uid: u32,
    /// How the channel ended; absent while it is open.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gone: Option<String>,
    /// How the queue distributes frames among its inspectors.
    pub fanout: String,
    /// Action for a frame that finds no room.
    pub overload: String,
    /// Block size, in bytes.
    pub block_size: u32,
    /// Number of blocks.
    pub block_nr: u32,
    /// Frame size, in bytes.
    pub frame_size: u32,
    /// Number of frames.
    pub frame_nr: u32,
    /// Published messages without a decision.
    pub depth: u32,
    /// Frames in use, including those of messages that were decided without the inspector.
    pub used: u32,
    /// Maximum of `depth`.
    pub high_water: u32,
    /// Age of the oldest undecided message, in nanoseconds; null if there is none.
    pub oldest: Option<u64>,
    /// Messages that the inspector holds; later messages may be decided before them.
    pub held: u32,
    /// Messages published, including gap records.
    pub published: u64,
    /// Bytes published.
    pub bytes: u64,
    /// The inspector's decisions.
    pub verdicts: Verdicts,
    /// Messages decided without the inspector, by reason.
    pub defaults: Defaults,
    /// Messages that did not reach the inspector, by reason.
    pub lost: Lost,
    /// Messages that found no room.
    pub full: u64,
    /// Verdicts that arrived after the message was decided.
    pub late: u64,
    /// Invalid verdict words, and verdicts that the queue does not allow (a queue outside of `may-queue`, a replacement longer than a
    /// frame of the sending port).
    pub violations: u64,
    /// Doorbells rung.
    pub wakeups: u64,
    /// Messages sent in a memory object outside the ring.
    pub oneshots: u64,
    /// Gap records published.
    pub gaps: u64,
    /// Whether the payload area uses huge pages.
    pub huge_pages: bool,
    /// Running traces.
    pub traces: u32,
}

/// An inspector's decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Verdicts {
    /// All decisions.
    pub decided: u64,
    /// Of these, decisions by a cumulative verdict.
    pub cumulative: u64,
    /// Passes, including hand-overs to another queue and returns to the rules.
    pub pass: u64,
    /// Drops.
    pub drop: u64,
    /// Rejects.
    pub reject: u64,
    /// Passes with a replaced payload.
    pub replace: u64,
    /// Of all decisions, those that apply to the rest of the flow.
    pub flow: u64,
}

/// Messages decided without their inspector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Defaults {
    /// The inspector missed the deadline.
    pub overdue: u64,
    /// The inspector's verdict was invalid.
    pub garbage: u64,
    /// The inspector was gone.
    pub drained: u64,
}

/// Messages that did not reach an inspector, by reason; the names are those of gap records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Lost {
    /// The ring was full.
    pub no_room: u64,
    /// Displaced by a newer message.
    pub oldest: u64,
    /// Dropped by the overload policy.
    pub dropped: u64,
    /// Passed by the overload policy.
    pub passed: u64,
    /// Handed to another queue.
    pub handed_on: u64,
    /// Larger than the maximum message size.
    pub too_large: u64,
    /// Other reasons.
    pub other: u64,
}

impl From<ChannelSnapshot> for Ring {
    fn from(channel: ChannelSnapshot) -> Self {
        let verdicts = channel.verdicts;
        let refused = verdicts.forbidden_queue + verdicts.too_long;
        let verdicts = Verdicts {
            pass: verdicts.pass,
            drop: verdicts.drop,
            reject: verdicts.reject,
            replace: verdicts.replace,
            flow: verdicts.flow,
            ..Verdicts::default()
        };
        let ring = Self {
            channel: channel.channel,
            queue: channel.queue,
            gone: channel.gone,
            fanout: fanout_word(channel.policy.fanout).to_owned(),
            overload: overload_words(channel.policy.overload),
            depth: channel.open,
            oldest: channel.oldest,
            traces: channel.traces,
            violations: refused,
            ..Self::default()
        };
        let Some(About { peer, name, geometry, stats }) = channel.about else { return ring };
        let lost = Lost {
            no_room: stats.lost_no_room,
            oldest: stats.lost_oldest,
            dropped: stats.lost_dropped,
            passed: stats.lost_passed,
            handed_on: stats.lost_handed_on,
            too_large: stats.lost_too_large,
            other: stats.lost_overwritten + stats.lost_limited,
        };
        Self {
            name,
            pid: peer.pid,
            uid: peer.uid,
            block_size: geometry.block_size,
            block_nr: geometry.block_nr,
            frame_size: geometry.frame_size,
            frame_nr: geometry.frame_nr,
            used: channel.used,
            high_water: stats.high_water as u32,
            held: stats.held as u32,
            published: stats.published,
            bytes: stats.bytes,
            verdicts: Verdicts { decided: stats.decided, cumulative: stats.cumulative, ..verdicts },
            defaults: Defaults { overdue: stats.overdue, garbage: stats.invalid, drained: stats.drained },
            lost,
            full: stats.full,
            late: stats.late,
            violations: stats.violations + refused,
            wakeups: stats.wakeups,
            oneshots: stats.oneshots,
            gaps: stats.gaps,
            huge_pages: stats.huge_pages != 0,
            ..ring
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
            pid: 4711,
            frame_nr: 4096,
            frame_size: 1024,
            depth: 3,
            oldest: Some(12_345_678),
            fanout: "flow".into(),
            overload: "block".into(),
            verdicts: Verdicts { decided: 9, pass: 9, ..Verdicts::default() },
            lost: Lost { no_room: 2, ..Lost::default() },
            ..Ring::default()
        };
        let other = Ring { channel: 10, oldest: None, gone: Some("it left".into()), ..ring.clone() };
        let text = ShowRings {}.text(&json!({ "rings": [ring, other] }));
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            lines[0],
            "channel  queue   pid  uid     frames  used  depth  held  high  oldest  published  decided  wakeups  inspector"
        );
        assert_eq!(
            lines[1],
            "      1     12  4711    0  4096x1024     0      3     0     0    12ms          0        9        0  ids"
        );
        assert_eq!(lines[2], "         fanout flow, overload block; verdicts: 9 pass; lost: 2 no room");
        assert!(lines[4].ends_with("; it left"), "{text}");
        assert_eq!(ShowRings {}.text(&json!({ "rings": [] })), "no channels\n");
    }
}
