//! Answers as text: a table for people. No IO.

use super::protocol::{Defaults, Frame, Lost, Ring, State as FrameState, Verdicts};
use super::records::{Changes, Neighbor, Pipe, Port, Queue, State, Stats, Table};
use crate::report::Rule;
use crate::ruleset_manager::Rechecks;

/// `towpath ctl show rings`: a line for each channel, and below it what is not zero.
pub fn rings(rings: &[Ring]) -> String {
    if rings.is_empty() {
        return "no channels\n".into();
    }
    let mut rows = vec![row([
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
    ])];
    let mut notes = vec![String::new()];
    for ring in rings {
        rows.push(row([
            &ring.channel.to_string(),
            &ring.queue.to_string(),
            &ring.pid.to_string(),
            &ring.uid.to_string(),
            &format!("{}x{}", ring.frame_nr, ring.frame_size),
            &ring.used.to_string(),
            &ring.depth.to_string(),
            &ring.held.to_string(),
            &ring.high_water.to_string(),
            &ring.oldest.map_or("-".into(), duration),
            &ring.published.to_string(),
            &ring.verdicts.decided.to_string(),
            &ring.wakeups.to_string(),
            &ring.name,
        ]));
        notes.push(note(ring));
    }
    let mut text = String::new();
    for (line, note) in table(&rows).into_iter().zip(notes) {
        text += &line;
        text.push('\n');
        text += &note;
    }
    text
}

/// `towpath ctl show frames`: a line for each message that is out.
pub fn frames(channel: u32, frames: &[Frame]) -> String {
    if frames.is_empty() {
        return format!("channel {channel}: every frame is free\n");
    }
    let mut rows = vec![row(["seq", "state", "length", "kind", "age", "first", "frames"])];
    for frame in frames {
        rows.push(row([
            &frame.seq.to_string(),
            match frame.state {
                FrameState::Valid => "VALID",
                FrameState::Skip => "SKIP",
                FrameState::Copy => "COPY",
                FrameState::Overdue => "OVERDUE",
            },
            &frame.len.map_or("-".into(), |len| len.to_string()),
            match frame.kind {
                super::protocol::Kind::Packet => "packet",
                super::protocol::Kind::Other => "-",
            },
            &frame.age.map_or("-".into(), duration),
            &frame.first.to_string(),
            &frame.frames.to_string(),
        ]));
    }
    table(&rows).into_iter().map(|line| line + "\n").collect()
}

/// `towpath ctl show rules`, and ipfw's `show` and `list`: with counters or without, with sets or without.
pub fn rules(rules: &[Rule], counters: bool, sets: bool) -> String {
    let width = |of: fn(&Rule) -> u64| rules.iter().map(|rule| of(rule).to_string().len()).max().unwrap_or(0);
    let (packets, bytes) = (width(|rule| rule.packets), width(|rule| rule.bytes));
    let mut text = String::new();
    for rule in rules {
        text += &format!("{:05} ", rule.number);
        if counters {
            text += &format!("{:>packets$} {:>bytes$} ", rule.packets, rule.bytes);
        }
        if sets {
            text += &format!("set {} ", rule.set);
        }
        text += &rule.text;
        text.push('\n');
    }
    text
}

/// `towpath ctl show states`: as ipfw's `-D list`.
pub fn states(states: &[State]) -> String {
    let mut text = format!("## Dynamic rules ({}):\n", states.len());
    for state in states {
        text += &state.text;
        text.push('\n');
    }
    text
}

/// `towpath ctl show tables`.
pub fn tables(tables: &[Table]) -> String {
    if tables.is_empty() {
        return "no tables\n".into();
    }
    let mut rows = vec![row(["type", "entries", "table"])];
    rows.extend(tables.iter().map(|t| row([t.kind.as_str(), &t.entries.to_string(), &t.name])));
    lines(&rows)
}

/// `towpath ctl show table NAME`, and ipfw's `table NAME list`.
pub fn entries(entries: &[(String, String)]) -> String {
    entries.iter().map(|(key, value)| format!("{key} {value}\n")).collect()
}

/// ipfw's `pipe show`.
pub fn pipes(pipes: &[Pipe]) -> String {
    if pipes.is_empty() {
        return "no pipes\n".into();
    }
    let line = |pipe: &Pipe| match pipe.rate {
        0 => format!("pipe {} unlimited burst {}\n", pipe.number, pipe.burst),
        rate => format!("pipe {} bw {rate}bit/s burst {}\n", pipe.number, pipe.burst),
    };
    pipes.iter().map(line).collect()
}

/// `towpath ctl show settings`, and `sysctl`: as sysctl(8) prints them.
pub fn settings(settings: &[(String, u64)]) -> String {
    settings.iter().map(|(name, value)| format!("net.inet.ip.fw.{name}: {value}\n")).collect()
}

/// `towpath ctl show queues`.
pub fn queues(queues: &[Queue]) -> String {
    if queues.is_empty() {
        return "no queues\n".into();
    }
    let mut rows = vec![row([
        "queue",
        "inspectors",
        "open",
        "high",
        "frames",
        "passed",
        "dropped",
        "replaced",
        "lost",
        "by flow",
        "lost by",
    ])];
    for queue in queues {
        let c = &queue.counters;
        let by = [
            (c.lost_by.overdue, "overdue"),
            (c.lost_by.garbage, "garbage"),
            (c.lost_by.died, "died"),
            (c.lost_by.overload, "overload"),
            (c.lost_by.no_listener, "no inspector"),
        ];
        let by: Vec<String> =
            by.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
        let number = |n: u64| n.to_string();
        rows.push(row([
            &c.number.to_string(),
            &number(queue.inspectors),
            &number(queue.open),
            &number(queue.high_water),
            &number(c.frames),
            &number(c.passed),
            &number(c.dropped),
            &number(c.replaced),
            &number(c.lost),
            &number(c.by_flow),
            &if by.is_empty() { "-".to_owned() } else { by.join(", ") },
        ]));
    }
    lines(&rows)
}

/// `towpath ctl show ports`.
pub fn ports(ports: &[Port]) -> String {
    let mut rows = vec![row(["port", "driver", "state", "received", "bytes", "sent", "bytes", "lost"])];
    for port in ports {
        let lost: Vec<String> = port.lost.iter().map(|(reason, n)| format!("{n} {reason}")).collect();
        rows.push(row([
            port.name.as_str(),
            &port.driver,
            &port.state,
            &port.received.to_string(),
            &port.received_bytes.to_string(),
            &port.sent.to_string(),
            &port.sent_bytes.to_string(),
            &if lost.is_empty() { "-".to_owned() } else { lost.join(", ") },
        ]));
    }
    let mut text = lines(&rows);
    // As ip-neighbour(8) writes them.
    for port in ports {
        for Neighbor { address, mac, state } in &port.neighbors {
            let at = mac.as_ref().map(|mac| format!(" lladdr {mac}")).unwrap_or_default();
            text += &format!("{address} dev {}{at} {state}\n", port.name);
        }
    }
    text
}

/// `towpath ctl show stats`: a name and a number each line.
pub fn stats(stats: &Stats) -> String {
    let mut rows = vec![
        ("packets", stats.packets),
        ("bytes", stats.bytes),
        ("passed", stats.passed),
        ("dropped", stats.dropped),
    ];
    let by_reason: Vec<_> =
        stats.dropped_by.iter().map(|(reason, count)| (format!("  {reason}"), *count)).collect();
    rows.extend(by_reason.iter().map(|(reason, count)| (&**reason, *count)));
    rows.extend([
        ("rejected", stats.rejected),
        ("  answered", stats.replies.sent),
        ("waiting", stats.waiting),
        ("inspected", stats.inspected),
        ("states", stats.states.left),
        ("  most", stats.states.peak),
        ("  made", stats.states.created),
        ("  unreplied", stats.states.unreplied),
        ("  expired", stats.states.expired),
        ("  removed", stats.states.removed),
        ("  evicted", stats.states.evicted),
        ("  unfit", stats.states.unfit),
        ("  waiting", stats.states.waiting),
        ("  at most", stats.states.max),
    ]);
    if stats.recheck != Rechecks::default() {
        let going = if stats.recheck.running { "rechecking" } else { "rechecked" };
        rows.extend([(going, stats.recheck.looked), ("  dropped", stats.recheck.dropped)]);
    }
    let refused = stats.states.refused.rows();
    rows.push(("refused", refused.iter().map(|(_, count)| count).sum()));
    let why = ["  full", "  over limit", "  over rate", "  limits", "  source", "  invalid", "  first SYN"];
    rows.extend(why.into_iter().zip(refused.map(|(_, count)| count)));
    rows.iter().map(|(name, value)| format!("{name:<12}{value:>16}\n")).collect()
}

/// What commands changed, as `towpath check --against` says it.
pub fn changes(changes: &Changes) -> String {
    let mut text = String::new();
    text.extend(changes.removed.iter().map(|rule| format!("- {rule}\n")));
    text.extend(changes.added.iter().map(|rule| format!("+ {rule}\n")));
    text.extend(changes.tables.iter().map(|table| format!("~ table {table}\n")));
    if changes.states_dropped > 0 {
        text += &format!("{} states dropped\n", changes.states_dropped);
    }
    text
}

fn lines(rows: &[Vec<String>]) -> String {
    table(rows).into_iter().map(|line| line + "\n").collect()
}

/// What a channel did, as far as it is not zero.
fn note(ring: &Ring) -> String {
    let Verdicts { cumulative, pass, drop, reject, replace, flow, .. } = ring.verdicts;
    let Defaults { overdue, garbage, drained } = ring.defaults;
    let Lost { no_room, oldest, dropped, passed, handed_on, too_large, other } = ring.lost;
    let groups: [(&str, &[(u64, &str)]); 4] = [
        (
            "verdicts",
            &[
                (pass, "pass"),
                (drop, "drop"),
                (reject, "reject"),
                (replace, "replace"),
                (cumulative, "cumulative"),
                (flow, "for the flow"),
            ],
        ),
        ("by default", &[(overdue, "overdue"), (garbage, "garbage"), (drained, "left by the dead")]),
        (
            "lost",
            &[
                (no_room, "no room"),
                (oldest, "oldest"),
                (dropped, "dropped"),
                (passed, "passed"),
                (handed_on, "handed on"),
                (too_large, "too large"),
                (other, "other"),
            ],
        ),
        (
            "also",
            &[
                (ring.full, "times full"),
                (ring.late, "late verdicts"),
                (ring.violations, "violations"),
                (ring.oneshots, "one-shots"),
                (ring.gaps, "gap records"),
                (ring.traces.into(), "traces"),
            ],
        ),
    ];
    let pages = if ring.huge_pages { ", huge pages" } else { "" };
    let mut text = format!("         fanout {}, overload {}{pages}", ring.fanout, ring.overload);
    for (name, counts) in groups {
        let counts: Vec<String> =
            counts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
        if !counts.is_empty() {
            text += &format!("; {name}: {}", counts.join(", "));
        }
    }
    if let Some(gone) = &ring.gone {
        text += &format!("; {gone}");
    }
    text + "\n"
}

fn row<const N: usize>(cells: [&str; N]) -> Vec<String> {
    cells.map(str::to_owned).to_vec()
}

/// Lines with the columns under each other, numbers to the right; the last column as it is.
pub(super) fn table(rows: &[Vec<String>]) -> Vec<String> {
    let columns = rows.first().map_or(0, Vec::len);
    let widths: Vec<usize> =
        (0..columns).map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0)).collect();
    rows.iter()
        .map(|row| {
            let mut line = String::new();
            for (column, cell) in row.iter().enumerate() {
                if column > 0 {
                    line.push_str("  ");
                }
                match column + 1 == columns {
                    true => line += cell,
                    false => line += &format!("{cell:>width$}", width = widths[column]),
                }
            }
            line
        })
        .collect()
}

/// Nanoseconds in the unit that leaves at most four digits before the point.
pub(super) fn duration(nanos: u64) -> String {
    match nanos {
        0..10_000 => format!("{nanos}ns"),
        10_000..10_000_000 => format!("{}us", nanos / 1_000),
        10_000_000..10_000_000_000 => format!("{}ms", nanos / 1_000_000),
        _ => format!("{}s", nanos / 1_000_000_000),
    }
}

#[cfg(test)]
mod tests {
    use super::super::protocol::Kind;
    use super::*;

    #[test]
    fn rings_are_a_table_with_what_happened_below() {
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
        let text = rings(&[ring, other]);
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
        assert_eq!(rings(&[]), "no channels\n");
    }

    #[test]
    fn frames_are_in_the_words_of_memory_mapped_netlink() {
        let frame = Frame {
            seq: 7,
            first: 40,
            frames: 2,
            state: FrameState::Skip,
            len: Some(1500),
            kind: Kind::Packet,
            age: Some(9_999),
        };
        let overdue = Frame { state: FrameState::Overdue, len: None, kind: Kind::Other, age: None, ..frame };
        assert_eq!(
            frames(3, &[frame, overdue]),
            "seq    state  length    kind     age  first  frames\n  \
               7     SKIP    1500  packet  9999ns     40  2\n  \
               7  OVERDUE       -       -       -     40  2\n"
        );
        assert_eq!(frames(3, &[]), "channel 3: every frame is free\n");
    }
}
