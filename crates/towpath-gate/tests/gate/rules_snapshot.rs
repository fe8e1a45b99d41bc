//! Snapshots: which states are restored, to which rule they belong, and which files are rejected.

use std::time::Duration;

use towpath_gate::rules::Ruleset;
use towpath_gate::state;
use towpath_gate::state::{JournalRead, Kind, Listed};
use towpath_gate::{
    DEFAULT_DYNAMIC_RULE, Dir, Frame, Gate, Ports, Restored, Route, Routes, RuleRefs, SnapshotError,
    SnapshotWriter, Step, Walk,
};
use towpath_wire::{self as wire, LinkType, Time};

const THEN: Time = Time::from_secs(1_000);
const NOW: Time = Time::from_secs(9);

const RULES: &str = "add 100 allow tcp from any to any 443 keep-state :web strict\n\
     add 200 allow tcp from any to any 22 limit src-addr 4\n\
     add 300 allow udp from any to any keep-state lifetime 77\n";

fn gate(text: &str) -> Gate {
    let settings = state::Settings { dyn_sctp: true, ..state::Settings::default() };
    Gate::new(Ruleset::parse("t", text).ruleset.unwrap(), Ports::new(), settings, 7)
}

/// A segment or datagram from 10.0.0.1:4000 to 192.0.2.1, or in the other direction.
fn walk(gate: &mut Gate, back: bool, proto: u8, port: u16, fields: (u8, u32, u32), now: Time) -> Step {
    let (flags, seq, ack) = fields;
    let (mut ends, mut ports) = ([[10, 0, 0, 1], [192, 0, 2, 1]], [4000, port]);
    if back {
        ends.reverse();
        ports.reverse();
    }
    let mut upper: Vec<u8> = ports.iter().flat_map(|port: &u16| port.to_be_bytes()).collect();
    match proto {
        6 => {
            upper.extend(seq.to_be_bytes().into_iter().chain(ack.to_be_bytes()));
            upper.extend([0x50, flags, 16, 0, 0, 0, 0, 0]);
        }
        _ => upper.extend([0, 8, 0, 0]),
    }
    let mut frame = vec![0x45, 0, 0, 20 + upper.len() as u8, 0, 0, 0, 0, 64, proto, 0, 0];
    frame.extend(ends.into_iter().flatten().chain(upper));
    let packet = wire::parse(LinkType::RAW, &frame, frame.len() as u32).unwrap();
    gate.walk(&mut Walk::new(Dir::In, None, None), &packet, now)
}

/// A gate with three states, one of each rule.
fn filled() -> Gate {
    let mut gate = gate(RULES);
    for (back, flags, seq, ack) in
        [(false, 2, 99, 0), (true, 0x12, 499, 100), (false, 0x10, 100, 500), (true, 0x10, 500, 100)]
    {
        assert_eq!(walk(&mut gate, back, 6, 443, (flags, seq, ack), THEN), Step::Pass);
    }
    assert_eq!(walk(&mut gate, false, 6, 22, (2, 99, 0), THEN), Step::Pass);
    assert_eq!(walk(&mut gate, false, 17, 53, (0, 0, 0), THEN), Step::Pass);
    gate
}

fn snapshot(gate: &Gate) -> Vec<u8> {
    let mut file = Vec::new();
    gate.snapshot(THEN + Duration::from_secs(1), |piece| file.extend_from_slice(piece));
    file
}

/// States and parents, without the fields that differ between gates.
fn listed(gate: &Gate, now: Time) -> Vec<String> {
    let line = |listed: Listed| {
        let name = gate.flow_name(listed.name).to_owned();
        listed.line(gate.rule_number(listed.rule), |_| &name).verbose(true).to_string()
    };
    let mut lines: Vec<String> = gate.states().list(now).map(line).collect();
    lines.sort();
    lines
}

#[test]
fn saved_states_are_restored() {
    let old = filled();
    // Additional rules, so that all rule ids differ.
    let mut new = gate(&format!("add 50 count ip from any to any keep-state :first\n{RULES}"));
    let restored = new.restore(&snapshot(&old), NOW).unwrap();
    assert_eq!(restored, Restored { states: 3, unchecked: true, ..Restored::default() });
    let parents = |lines: Vec<String>| -> Vec<String> {
        // A parent is created again, with a new lifetime.
        lines.into_iter().filter(|line| !line.contains("PARENT")).collect()
    };
    assert_eq!(parents(listed(&new, NOW)), parents(listed(&old, THEN + Duration::from_secs(1))));
    let parent =
        |gate: &Gate| gate.states().list(NOW).find(|state| matches!(state.kind, Kind::Parent { .. }));
    assert_eq!(parent(&new).map(|parent| parent.kind), Some(Kind::Parent { count: 1 }));
    assert_eq!(new.states().counters().unreplied, 2);
    // The connections continue: inside the window, and outside.
    assert_eq!(walk(&mut new, false, 6, 443, (0x10, 100, 500), NOW), Step::Pass);
    let invalid = walk(&mut new, false, 6, 443, (0x10, 900_000, 500), NOW);
    assert!(matches!(invalid, Step::Drop(_)), "{invalid}");
    let again = new.restore(&snapshot(&old), NOW).unwrap();
    assert_eq!(again, Restored { existing: 3, unchecked: true, ..Restored::default() });
    // The state keeps the lifetime of its rule.
    assert_eq!(walk(&mut new, true, 17, 53, (0, 0, 0), NOW), Step::Pass);
    assert!(listed(&new, NOW).iter().any(|line| line.contains("(77s) STATE udp")));
}

#[test]
fn states_without_a_rule_get_the_default_dynamic_rule() {
    let mut new = gate("add 100 deny ip from any to any keep-state");
    let restored = new.restore(&snapshot(&filled()), NOW).unwrap();
    assert_eq!(restored, Restored { default_dynamic: 3, unchecked: true, ..Restored::default() });
    assert!(
        new.states().list(NOW).all(|state| state.rule == DEFAULT_DYNAMIC_RULE && state.kind == Kind::State)
    );
    // The default dynamic rule allows them, under the names of the states.
    assert_eq!(walk(&mut new, true, 17, 53, (0, 0, 0), NOW), Step::Pass);
    assert_eq!(new.states().parents(), 0);
}

#[test]
fn restore_respects_the_limits() {
    let mut new = gate(RULES);
    let settings = state::Settings { dyn_max: 2, ..state::Settings::default() };
    new.states_mut().set_settings(settings);
    let restored = new.restore(&snapshot(&filled()), NOW).unwrap();
    assert_eq!(restored, Restored { states: 2, refused: 1, ..Restored::default() });
}

/// The frames of a snapshot: kind and content.
fn frames(snapshot: &[u8]) -> Vec<(u8, Vec<u8>)> {
    let (mut rest, mut frames) = (&snapshot[12..], Vec::new());
    while let Some((length, after)) = rest.split_first_chunk() {
        let (payload, after) = after[4..].split_at(u32::from_le_bytes(*length) as usize);
        frames.push((payload[0], payload[1..].to_vec()));
        rest = after;
    }
    frames
}

/// A snapshot of these frames, with correct checksums.
fn file(frames: &[(u8, Vec<u8>)]) -> Vec<u8> {
    let kinds = [Frame::Rules, Frame::Held, Frame::Complete, Frame::Changes, Frame::Gap, Frame::End];
    let mut file = Vec::new();
    let mut writer = SnapshotWriter::begin(&mut file);
    for (kind, content) in frames {
        writer.frame(kinds[usize::from(*kind) - 1], content, &mut file);
    }
    file
}

#[test]
fn a_damaged_base_changes_nothing() {
    let good = snapshot(&filled());
    let all = frames(&good);
    assert_eq!(all.iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), [1, 2, 3, 6]);
    assert_eq!(file(&all), good);
    let base = good.len() - 9;
    let mut new = gate(RULES);
    for cut in 0..base {
        let expected = match cut {
            0..8 => SnapshotError::BadMagic,
            _ => SnapshotError::Truncated,
        };
        assert_eq!(new.restore(&good[..cut], NOW), Err(expected), "cut at {cut}");
    }
    for at in 0..base {
        let mut bad = good.clone();
        bad[at] ^= 0x40;
        assert!(new.restore(&bad, NOW).is_err(), "changed at {at}");
    }
    // With correct checksums any other content is read without harm.
    for (frame, (_, content)) in all.iter().enumerate() {
        for at in 0..content.len() {
            let mut bad = all.clone();
            bad[frame].1[at] ^= 0x40;
            let _ = gate(RULES).restore(&file(&bad), NOW);
            bad[frame].1.truncate(at);
            let _ = gate(RULES).restore(&file(&bad), NOW);
        }
    }
    // Frames that are missing, twice, or in another order.
    let without = |frame: usize| [&all[..frame], &all[frame + 1..]].concat();
    for frames in [without(0), without(2), [&all[..1], &all[..]].concat(), vec![all[1].clone()]] {
        assert!(new.restore(&file(&frames), NOW).is_err(), "{frames:?}");
    }
    // A frame that was cut out with its checksum is missing in the next one's.
    let skipped = [&good[..12], &good[12 + 8 + 1 + all[0].1.len()..]].concat();
    assert_eq!(new.restore(&skipped, NOW), Err(SnapshotError::Checksum));
    // A length of which the file has no part, and one that no frame has.
    for (length, error) in [(1 << 20, SnapshotError::Truncated), (u32::MAX, SnapshotError::Checksum)] {
        let mut bad = good.clone();
        bad[12..16].copy_from_slice(&length.to_le_bytes());
        assert_eq!(new.restore(&bad, NOW), Err(error));
    }
    assert!(new.states().is_empty());
    let mut next = good.clone();
    for version in [0, 4, 6] {
        next[8] = version;
        let wrong = SnapshotError::Version(version.into());
        assert_eq!(new.restore(&next, NOW), Err(wrong));
        assert!(wrong.to_string().contains(&format!("version {version}")));
    }
}

/// A base and changes, as an engine writes them while it runs: every part of the changes that is whole is used.
#[test]
fn changes_follow_a_base_and_a_torn_end_is_cut() {
    let mut old = gate(RULES);
    let mut journal = old.states().journal();
    assert_eq!(walk(&mut old, false, 17, 53, (0, 0, 0), THEN), Step::Pass);
    let mut refs = RuleRefs::default();
    old.update_refs(&mut refs);
    let mut all = frames(&snapshot(&old));
    all.pop();
    while let JournalRead::Change(_) = journal.read() {}
    // One change in each frame: a connection begins, is established, the first state is removed, another one is made.
    let steps: [&dyn Fn(&mut Gate); 5] = [
        &|gate| _ = walk(gate, false, 6, 22, (2, 99, 0), THEN),
        &|gate| _ = walk(gate, true, 6, 22, (0x12, 499, 100), THEN),
        &|gate| _ = walk(gate, false, 6, 22, (0x10, 100, 500), THEN),
        &|gate| {
            let first = gate.states().list(THEN).find(|state| state.flow.proto == 17).unwrap();
            assert!(gate.remove_state(&first.flow, first.name, THEN));
        },
        &|gate| _ = walk(gate, false, 17, 54, (0, 0, 0), THEN),
    ];
    for step in steps {
        step(&mut old);
        let mut content = vec![0];
        while let JournalRead::Change(event) = journal.read() {
            old.snapshot_change(&refs, &event, &mut content);
        }
        all.push((4, content));
    }
    let lines = |gate: &Gate| -> Vec<String> {
        let lines = listed(gate, NOW).into_iter().filter(|line| !line.contains("PARENT"));
        lines.map(|line| line.split_once(" state ").unwrap().0.to_owned()).collect()
    };
    let mut expected = Vec::new();
    for count in 3..=all.len() {
        let mut new = gate(RULES);
        let restored = new.restore(&file(&all[..count]), NOW).unwrap();
        assert!(restored.killed && restored.cut == 0 && !restored.unchecked, "{restored:?}");
        expected.push(lines(&new));
    }
    assert_eq!(expected.iter().map(Vec::len).collect::<Vec<_>>(), [1, 2, 2, 2, 1, 2]);
    assert!(expected[2][0].contains("(20s) LIMIT tcp") && expected[3][0].contains("(300s) LIMIT tcp"));
    // The last state is the one that exists: the first one was removed.
    assert!(expected[5][1].contains(" 54 "), "{expected:?}");
    // Cut at every byte, and changed at every byte.
    let whole = file(&all);
    let base = file(&all[..3]).len();
    let ends: Vec<usize> = (3..=all.len()).map(|count| file(&all[..count]).len()).collect();
    for cut in base..whole.len() {
        let complete = ends.iter().filter(|end| **end <= cut).count() - 1;
        let mut changed = whole.clone();
        changed[cut] ^= 0x10;
        for (bytes, rest) in
            [(&whole[..cut], cut - ends[complete]), (&changed[..], whole.len() - ends[complete])]
        {
            let mut new = gate(RULES);
            let restored = new.restore(bytes, NOW).unwrap();
            assert_eq!((lines(&new), restored.cut), (expected[complete].clone(), rest as u64), "at {cut}");
        }
    }
    // A gap is told, and so are states that were not checked.
    for more in [(5, Vec::new()), (4, vec![1])] {
        let restored =
            gate(RULES).restore(&file(&[&all[..], std::slice::from_ref(&more)].concat()), NOW).unwrap();
        assert_eq!((restored.gap, restored.unchecked), (more.0 == 5, true));
    }
}

/// After a kill, a state has no windows and no acknowledgement numbers: those of the last interval would refuse today's segments.
#[test]
fn a_strict_connection_continues_after_a_kill() {
    let all = frames(&snapshot(&filled()));
    let far = (0x10, 900_000, 5_000_500);
    for (frames, killed) in [(&all[..], false), (&all[..3], true)] {
        let mut new = gate(RULES);
        assert_eq!(new.restore(&file(frames), NOW).unwrap().killed, killed);
        let step = walk(&mut new, false, 6, 443, far, NOW);
        assert_eq!(step == Step::Pass, killed, "{step:?}");
    }
}

/// States that no re-check has covered.
#[test]
fn unchecked_states_are_marked() {
    let mut saved = Vec::new();
    filled().snapshot_of(THEN, true, |piece| saved.extend_from_slice(piece));
    let restored = |file: &[u8]| gate(RULES).restore(file, NOW);
    assert_eq!(restored(&saved), Ok(Restored { states: 3, unchecked: true, ..Restored::default() }));
    let mut all = frames(&saved);
    all[0].1[0] = 2;
    assert_eq!(restored(&file(&all)), Err(SnapshotError::Malformed(12)));
    all[0].1[0] = 0;
    assert_eq!(restored(&file(&all)), Ok(Restored { states: 3, ..Restored::default() }));
}

/// The rules are the same, but something else that decides which states they create is not.
#[test]
fn states_under_other_conditions_are_unchecked() {
    let text = |table: &str, more: &str| format!("table 1 create type addr\n{table}{RULES}{more}");
    let set = |more: &str| text("", more);
    let rows = [
        (set(""), set(""), false),
        (set(""), set("set disable 0\n"), true),
        (set("set disable 4\n"), set("set disable 4\n"), false),
        (set("set disable 4\n"), set(""), true),
        (set(""), text("table 1 add 10.0.0.0/8\n", ""), true),
        (text("table 1 add 10.0.0.0/8\n", ""), text("table 1 add 10.0.0.0/8\n", ""), false),
        (text("table 1 add 10.0.0.0/8\n", ""), text("table 1 add 10.0.0.0/8 7\n", ""), true),
    ];
    for (old, new, unchecked) in rows {
        let restored = gate(&new).restore(&snapshot(&gate(&old)), NOW).unwrap();
        assert_eq!(restored.unchecked, unchecked, "{old}\n{new}");
    }
    // Ports: zones and addresses, by name.
    type Row = (&'static str, u16, &'static str);
    let ports = |rows: &[Row]| {
        let mut ports = Ports::new();
        for (name, zone, address) in rows {
            let port = ports.add(name, address.parse().into_iter().collect());
            ports.set_zone(port, *zone);
        }
        let mut gate = gate(RULES);
        gate.set_ports(ports);
        gate
    };
    let rows: [(&[Row], bool); 6] = [
        (&[("em0", 7, "10.0.0.1"), ("em1", 0, "10.0.1.1")], false),
        (&[("em1", 0, "10.0.1.1"), ("em0", 7, "10.0.0.1")], false),
        (&[("em0", 8, "10.0.0.1"), ("em1", 0, "10.0.1.1")], true),
        (&[("em0", 7, "10.0.0.2"), ("em1", 0, "10.0.1.1")], true),
        (&[("em0", 7, "10.0.0.1"), ("em1", 0, "10.0.1.1"), ("em2", 0, "")], false),
        (&[("em0", 7, "10.0.0.1"), ("em1", 0, "10.0.1.1"), ("em2", 1, "")], true),
    ];
    let saved = snapshot(&ports(rows[0].0));
    for (row, unchecked) in rows {
        assert_eq!(ports(row).restore(&saved, NOW).unwrap().unchecked, unchecked, "{row:?}");
    }
}

/// Routes decide which states are created only by the rules that test them.
#[test]
fn states_under_other_routes_are_unchecked() {
    let routed = |more: &str, net: &str, port: &str, connected: bool| {
        let mut gate = gate(&format!("{RULES}{more}"));
        let mut ports = Ports::new();
        ["em0", "em1"].into_iter().for_each(|name| _ = ports.add(name, Vec::new()));
        let mut routes = Routes::new();
        let port = ports.find(port).unwrap();
        let gateway = towpath_gate::Gateway::OnLink;
        routes.add(net.parse().unwrap(), 8, Route { port, connected, gateway });
        gate.set_ports(ports);
        gate.set_routes(routes);
        gate
    };
    let tests = "add 50 deny ip from any to any not antispoof\n";
    let rows = [
        (tests, ("10.0.0.0", "em0", true), false),
        (tests, ("11.0.0.0", "em0", true), true),
        (tests, ("10.0.0.0", "em1", true), true),
        (tests, ("10.0.0.0", "em0", false), true),
        (tests, ("2001::", "em0", true), true),
        ("", ("11.0.0.0", "em1", false), false),
    ];
    for (more, (net, port, connected), unchecked) in rows {
        let saved = snapshot(&routed(more, "10.0.0.0", "em0", true));
        let restored = routed(more, net, port, connected).restore(&saved, NOW).unwrap();
        assert_eq!(restored.unchecked, unchecked, "{more}{net} {port} {connected}");
    }
}

/// A line at the top of an unnumbered file renumbers the rules: the states still belong to them. The snapshot contains the
/// first packet of each state.
#[test]
fn states_of_an_edited_file_are_restored() {
    let rules = RULES.replace("100 ", "").replace("200 ", "").replace("300 ", "in recv em0 ");
    let rules = rules
        .replace("add in recv em0 allow udp from any to any", "add allow udp from any to any in recv em0");
    let gate = |text: &str, ports: &[&str]| {
        let mut gate = gate(text);
        let mut named = Ports::new();
        for port in ports {
            named.add(port, Vec::new());
        }
        gate.set_ports(named);
        gate
    };
    let mut old = gate(&rules, &["em0", "em1"]);
    let frame =
        [0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 192, 0, 2, 1, 4, 0, 0, 53, 0, 8, 0, 0];
    let packet = wire::parse(LinkType::RAW, &frame, 28).unwrap();
    let port = old.ports().find("em0");
    assert_eq!(old.walk(&mut Walk::new(Dir::In, port, None), &packet, THEN), Step::Pass);
    // Another number for the same port, or no such port; and a rule that refuses packets of the port.
    let rows: [(&[&str], &str, usize); 4] = [
        (&["em1", "em0"], "", 0),
        (&["em1", "em0"], "add deny ip from any to any recv em0\n", 1),
        (&["em1", "em0"], "add deny ip from any to any recv em1\n", 0),
        (&["em1"], "add count ip from any to any\n", 0),
    ];
    for (ports, more, dropped) in rows {
        let text = format!("{more}{rules}");
        let mut new = gate(&text, ports);
        let restored = new.restore(&snapshot(&old), NOW).unwrap();
        assert_eq!((restored.states, restored.unchecked), (1, !more.is_empty()), "{text}");
        let ruleset = Ruleset::parse("t", &text).ruleset.unwrap();
        let diff = new.reload(ruleset, towpath_gate::StatePolicy::Recheck, NOW);
        assert_eq!((diff.states_dropped, diff.states_handed), (dropped, 0), "{text}");
    }
}
