//! Tables on a model of the stream: messages that it may forget are gone for gates that join later.

use proptest::prelude::*;

use super::*;

/// Tables as maps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Maps {
    tables: BTreeMap<String, BTreeMap<String, String>>,
    /// The rules have no tables.
    none: bool,
}

fn entry(line: &str) -> (String, String) {
    let (key, value) = line.split_once(' ').unwrap_or((line, ""));
    (key.to_owned(), value.to_owned())
}

impl Entries for Maps {
    fn load(&mut self, table: &str, lines: &str) -> Result<(), String> {
        if self.none || lines.contains('!') {
            return Err("no".to_owned());
        }
        self.tables.insert(table.to_owned(), lines.lines().map(entry).collect());
        Ok(())
    }

    fn change(&mut self, table: &str, lines: &str) -> u64 {
        let Some(map) = self.tables.get_mut(table) else { return lines.lines().count() as u64 };
        for line in lines.lines() {
            match line.split_once(' ') {
                Some(("add", line)) => map.extend([entry(line)]),
                Some((_, key)) => {
                    map.remove(key);
                }
                None => {}
            }
        }
        0
    }
}

/// The stream of one table.
#[derive(Default)]
struct Stream {
    made: u64,
    last: u64,
    messages: Vec<(u64, String, Vec<u8>)>,
}

impl Stream {
    fn publish(&mut self, from: &str, publication: Publication) {
        let keep = publication.keep_from(self.last + 1);
        for bytes in publication.messages {
            self.last += 1;
            self.messages.push((self.last, from.to_owned(), bytes));
        }
        self.messages.retain(|(seq, ..)| *seq >= keep);
    }

    /// Sends the gate what it has not got.
    fn feed(&self, gate: &mut (Tables, Maps), connect: bool) {
        let after = if connect { gate.0.connect(self.made, self.last) } else { gate.0.seq() };
        let left: Vec<_> = self.messages.iter().filter(|(seq, ..)| *seq > after).collect();
        if left.is_empty() {
            gate.0.catch_up();
        }
        for (at, (seq, from, bytes)) in left.iter().enumerate() {
            gate.0.message(*seq, ("T", from), bytes, (left.len() - at - 1) as u64, &mut gate.1);
        }
    }
}

#[derive(Clone, Debug)]
enum Step {
    Add(u8, u8),
    Delete(u8),
    Load(Vec<u8>),
    /// A gate publishes a snapshot of what it has.
    Snapshot(usize),
    Feed,
    Reconnect,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..8_u8, any::<u8>()).prop_map(|(key, value)| Step::Add(key, value)),
        2 => (0..8_u8).prop_map(Step::Delete),
        1 => prop::collection::vec(0..8_u8, 0..4).prop_map(Step::Load),
        2 => (0..2_usize).prop_map(Step::Snapshot),
        3 => Just(Step::Feed),
        1 => Just(Step::Reconnect),
    ];
    prop::collection::vec(step, 1..60)
}

fn lines(map: Option<&BTreeMap<String, String>>) -> String {
    map.into_iter().flatten().map(|(key, value)| format!("{key} {value}\n")).collect()
}

proptest! {
    #[test]
    fn gates_that_join_at_any_time_have_the_same_entries(steps in steps()) {
        let mut stream = Stream::default();
        // The first gate sees each message at once, the second one when it is fed.
        let mut gates = [(Tables::default(), Maps::default()), (Tables::default(), Maps::default())];
        gates.iter_mut().for_each(|gate| stream.feed(gate, true));
        for (number, step) in steps.into_iter().enumerate() {
            let from = if number % 2 == 0 { "a" } else { "b" };
            match step {
                Step::Add(key, value) => stream.publish(from, change("T", &format!("add {key} {value}"))),
                Step::Delete(key) => stream.publish(from, change("T", &format!("delete {key}"))),
                Step::Load(keys) => {
                    let keys: String = keys.iter().map(|key| format!("{key} 1\n")).collect();
                    stream.publish(from, load("T", number as u64, &keys));
                }
                Step::Snapshot(gate) => {
                    // The second one may be behind: changes that it has not seen are in the stream before the snapshot.
                    let (tables, maps) = &gates[gate];
                    if tables.is_caught_up() && tables.seq() > 0 {
                        stream.publish(from, snapshot("T", tables.seq(), &lines(maps.tables.get("T"))));
                    }
                }
                Step::Feed => stream.feed(&mut gates[1], false),
                Step::Reconnect => stream.feed(&mut gates[1], true),
            }
            stream.feed(&mut gates[0], false);
            let mut joins = (Tables::default(), Maps::default());
            stream.feed(&mut joins, true);
            prop_assert_eq!(&joins.1, &gates[0].1);
        }
        stream.feed(&mut gates[1], false);
        prop_assert_eq!(&gates[1].1, &gates[0].1);
    }

    #[test]
    fn hostile_messages_are_bounded(bytes in prop::collection::vec(any::<Vec<u8>>(), 1..50), kind in 0_u8..3) {
        let mut tables = Tables::default();
        tables.connect(1, 1000);
        for (seq, bytes) in bytes.iter().enumerate() {
            let message = [MAGIC, &[VERSION, OLDEST, kind, 0][..], bytes].concat();
            tables.message(seq as u64 + 1, ("T", "a"), &message, 1, &mut Maps::default());
        }
        prop_assert!(tables.loads.len() <= LOADS);
    }
}

#[test]
fn a_long_list_is_cut_at_the_ends_of_lines() {
    let list: String =
        (0..200_000).map(|at| format!("10.{}.{}.{} 7\n", at >> 16, at >> 8 & 255, at & 255)).collect();
    let publication = load("T", 1, &list);
    assert!(publication.messages.len() > 4);
    let mut text = String::new();
    for message in &publication.messages {
        let Some(Message::Part { lines, .. }) = decode(message) else { panic!("no part") };
        assert!(lines.len() <= LINES_MAX && lines.ends_with('\n'));
        text += lines;
    }
    assert_eq!(text, list);
    // An empty load has one part.
    assert_eq!(load("T", 1, "").messages.len(), 1);
    // A line without an end is cut, not lost in a loop.
    assert_eq!(chunks(&"x".repeat(LINES_MAX + 1)).count(), 2);
}

#[test]
fn loads_are_complete_or_refused() {
    let (mut tables, mut maps) = (Tables::default(), Maps::default());
    tables.connect(1, 0);
    let list: String = (0..100_000).map(|at| format!("{at} 12345678\n")).collect();
    let parts = load("T", 1, &list).messages;
    // Two gates at the same time, one of which loses a part.
    let mut seq = 0;
    for (at, part) in parts.iter().enumerate() {
        seq += 1;
        tables.message(seq, ("T", "a"), part, 0, &mut maps);
        if at != 1 {
            seq += 1;
            tables.message(seq, ("T", "b"), part, 0, &mut maps);
        }
    }
    let stats = tables.stats();
    assert_eq!((maps.tables["T"].len(), stats.loads, stats.loads_incomplete), (100_000, 1, 1));
    // A wrong entry: the table stays.
    tables.message(seq + 1, ("T", "a"), &load("T", 2, "!").messages[0], 0, &mut maps);
    assert_eq!((maps.tables["T"].len(), tables.stats().loads_refused), (100_000, 1));
    assert!(tables.take_problem().unwrap().contains("table T"));
    // Incomplete loads are bounded, and so are tables.
    for from in 0..100 {
        tables.message(seq + 2 + from, ("T", &from.to_string()), &parts[0], 0, &mut maps);
    }
    assert_eq!(tables.loads.len(), LOADS);
    for table in 0..1000 {
        let change = change("T", "add 1").messages;
        tables.message(seq + 1000 + table, (&table.to_string(), "a"), &change[0], 0, &mut maps);
    }
    assert_eq!((tables.tables.len(), tables.stats().messages_tables), (TABLES, 1001 - TABLES as u64));
    tables.message(seq + 2000, ("\u{1b}[2J", "a"), &change("T", "add 1").messages[0], 0, &mut maps);
    tables.message(seq + 2001, ("T", "\u{1b}"), &change("T", "add 1").messages[0], 0, &mut maps);
    assert_eq!(tables.stats().messages_malformed, 2);
}

#[test]
fn the_stream_is_read_again_when_the_rules_get_the_table() {
    let mut stream = Stream::default();
    stream.publish("a", change("T", "add 1 2"));
    let mut gate = (Tables::default(), Maps { none: true, ..Maps::default() });
    stream.feed(&mut gate, true);
    assert_eq!((gate.0.stats().refused, gate.1.tables.len()), (1, 0));
    gate.1.none = false;
    assert!(gate.0.rules_changed());
    stream.feed(&mut gate, true);
    assert_eq!(gate.1.tables["T"]["1"], "2");
    assert!(!gate.0.rules_changed());
}

/// Two parts.
fn long_load(value: u8) -> Publication {
    let lines: String = (0..LINES_MAX / 8).map(|key| format!("{key:06} {value}\n")).collect();
    load("T", value.into(), &lines)
}

#[test]
fn of_two_loads_at_the_same_time_all_gates_have_the_same() {
    // The second one to begin counts, also if it is the first one to end.
    two_loads([("a", 0), ("b", 0), ("b", 1), ("a", 1)]);
    two_loads([("a", 0), ("b", 0), ("a", 1), ("b", 1)]);
}

fn two_loads(order: [(&str, usize); 4]) {
    let (mut stream, mut early) = (Stream::default(), (Tables::default(), Maps::default()));
    stream.feed(&mut early, true);
    let (one, two) = (long_load(1), long_load(2));
    assert_eq!((one.messages.len(), two.messages.len()), (2, 2));
    // The stream forgets what is before the first part of each load once that is complete.
    let mut first = [0; 2];
    for (from, part) in order {
        let mut message = if from == "a" { one.clone() } else { two.clone() };
        message.messages = vec![message.messages.swap_remove(part)];
        message.forget = Forget::Nothing;
        stream.publish(from, message);
        let at = usize::from(from == "b");
        if part == 0 {
            first[at] = stream.last;
        } else {
            stream.messages.retain(|(seq, ..)| *seq >= first[at]);
        }
        stream.feed(&mut early, false);
        let mut late = (Tables::default(), Maps::default());
        stream.feed(&mut late, true);
        assert_eq!(late.1, early.1);
    }
    assert_eq!(early.1.tables["T"]["000007"], "2");
}

#[test]
fn a_load_that_is_not_complete_is_not_cut_by_a_snapshot() {
    let (mut tables, mut maps) = (Tables::default(), Maps::default());
    tables.connect(1, 0);
    let lines = format!("add 1 {}\n", "2".repeat(1000)).repeat(LINES_MAX / 1007);
    for seq in 1..20 {
        tables.message(seq, ("T", "a"), &change("T", &lines).messages[0], 0, &mut maps);
    }
    let load = long_load(1);
    tables.message(20, ("T", "b"), &load.messages[0], 0, &mut maps);
    assert_eq!(tables.poll_compaction("a"), None);
    tables.message(21, ("T", "b"), &load.messages[1], 0, &mut maps);
    assert_eq!((tables.poll_compaction("a"), tables.stats().loads), (None, 1));
    tables.message(22, ("T", "b"), &load.messages[0], 0, &mut maps);
    for seq in 23..40 {
        tables.message(seq, ("T", "a"), &change("T", &lines).messages[0], 0, &mut maps);
    }
    assert_eq!(tables.poll_compaction("a"), None);
    // The gate that loads has gone.
    for seq in 40..60 {
        tables.message(seq, ("T", "a"), &change("T", &lines).messages[0], 0, &mut maps);
    }
    assert_eq!(tables.poll_compaction("a"), Some(("T".to_owned(), 59)));
    // After the snapshot, its last part is dropped here as well as at gates that join.
    tables.message(60, ("T", "a"), &snapshot("T", 59, "1 2").messages[0], 0, &mut maps);
    tables.message(61, ("T", "b"), &load.messages[1], 0, &mut maps);
    let stats = tables.stats();
    assert_eq!((stats.loads, stats.loads_incomplete, maps.tables["T"].len()), (1, 1, LINES_MAX / 8 + 1));
}

#[test]
fn a_change_that_is_not_kept_is_not_lost_with_a_snapshot() {
    let (mut tables, mut maps) = (Tables::default(), Maps::default());
    tables.connect(1, 1000);
    let lines = format!("add 1 {}\n", "2".repeat(LINES_MAX - 10));
    let kept = (LOG_MAX / lines.len()) as u64;
    for seq in 1..=kept {
        tables.message(seq, ("T", "a"), &change("T", &lines).messages[0], 1, &mut maps);
    }
    tables.message(
        kept + 1,
        ("T", "a"),
        &change("T", &lines.replace("add 1", "add 3")).messages[0],
        1,
        &mut maps,
    );
    tables.message(kept + 2, ("T", "b"), &snapshot("T", kept, "1 2").messages[0], 1, &mut maps);
    assert_eq!(maps.tables["T"].len(), 2);
    // One of messages that follow it.
    tables.message(kept + 3, ("T", "b"), &snapshot("T", kept + 3, "1 2").messages[0], 1, &mut maps);
    assert_eq!((maps.tables["T"].len(), tables.stats().messages_malformed), (2, 1));
}

/// A gate that has read 22 messages, of which the last one is the first part of a load.
fn of_a_stream() -> (Tables, Maps) {
    let mut gate = (Tables::default(), Maps::default());
    let mut stream = Stream { made: 1, ..Stream::default() };
    (0..20).for_each(|key| stream.publish("a", change("T", &format!("add {key} 1"))));
    stream.publish("a", load("T", 1, "7 1"));
    stream.feed(&mut gate, true);
    let first_part = load("T", 1, &"1 2\n".repeat(LINES_MAX)).messages.remove(0);
    gate.0.message(22, ("T", "a"), &first_part, 0, &mut gate.1);
    assert_eq!(gate.0.loads.len(), 1);
    gate
}

#[test]
fn another_stream_begins_with_its_own_numbers() {
    let mut gate = of_a_stream();
    // The server may have another clock than before.
    let mut other = Stream::default();
    // The messages before the snapshot are forgotten.
    other.publish("b", change("T", "add 8 1"));
    other.publish("b", snapshot("T", 1, "8 1"));
    other.publish("b", change("T", "add 9 1"));
    other.feed(&mut gate, true);
    assert_eq!(lines(gate.1.tables.get("T")), "8 1\n9 1\n");
    assert!(gate.0.loads.is_empty());
}

#[test]
fn another_stream_may_have_more_messages() {
    let mut gate = of_a_stream();
    let mut other = Stream { made: 2, ..Stream::default() };
    (0..30).for_each(|key| other.publish("b", change("T", &format!("add {key} 2"))));
    other.feed(&mut gate, true);
    assert_eq!(gate.1.tables["T"].values().filter(|value| *value == "2").count(), 30);
    // The same stream is not read twice.
    let messages = gate.0.stats().messages;
    other.publish("b", change("T", "add 30 2"));
    other.feed(&mut gate, true);
    assert_eq!((gate.0.stats().messages, gate.1.tables["T"].len()), (messages + 1, 31));
}

#[test]
fn many_changes_are_worth_a_snapshot() {
    let (mut tables, mut maps) = (Tables::default(), Maps::default());
    tables.connect(1, 0);
    let lines = "add 1 2\n".repeat(LINES_MAX / 8);
    for seq in 1..20 {
        tables.message(seq, ("T", "a"), &change("T", &lines).messages[0], 0, &mut maps);
        assert_eq!(tables.poll_compaction("b"), None);
        if let Some((table, upto)) = tables.poll_compaction("a") {
            assert_eq!((&*table, upto), ("T", seq));
            return;
        }
    }
    panic!("no snapshot after 10 MB of changes");
}

/// A gate whose process ends, and another one that has its entries and its position.
fn restarted((tables, maps): &(Tables, Maps)) -> (Tables, Maps) {
    let mut gate = (Tables::default(), maps.clone());
    gate.0.restore(&tables.position().unwrap());
    gate
}

#[test]
fn another_process_continues_with_the_next_message() {
    let mut stream = Stream { made: 1, ..Stream::default() };
    let mut gate = (Tables::default(), Maps::default());
    (0..20).for_each(|key| stream.publish("a", change("T", &format!("add {key} 1"))));
    stream.feed(&mut gate, true);
    let mut next = restarted(&gate);
    assert_eq!(next.0.position(), None, "it has not caught up");
    (10..30).for_each(|key| stream.publish("b", change("T", &format!("add {key} 2"))));
    stream.feed(&mut next, true);
    stream.feed(&mut gate, false);
    assert_eq!((&next.1, next.0.stats().messages), (&gate.1, 20));
    assert_eq!(next.0.position(), gate.0.position());
    // The stream has forgotten what was after it: a snapshot follows.
    let mut next = restarted(&gate);
    stream.publish("a", change("T", "add 99 1"));
    stream.feed(&mut gate, false);
    stream.publish("a", snapshot("T", stream.last, &lines(gate.1.tables.get("T"))));
    stream.feed(&mut next, true);
    assert_eq!(next.1, gate.1);
    // Another stream, and one that this process has never seen: from the beginning.
    for made in [1, 2] {
        let mut next = restarted(&gate);
        let mut other = Stream { made, ..Stream::default() };
        (0..50).for_each(|key| other.publish("b", change("T", &format!("add {key} 3"))));
        other.feed(&mut next, true);
        let again = usize::from(made == 2) * 50;
        let new = if again > 0 { again } else { 50 - gate.0.seq() as usize };
        assert_eq!(next.0.stats().messages, new as u64);
    }
}

#[test]
fn a_load_whose_first_part_came_to_the_process_before_is_read_again() {
    let mut stream = Stream { made: 1, ..Stream::default() };
    let mut gate = (Tables::default(), Maps::default());
    let load = long_load(1);
    let part = |at: usize| Publication {
        messages: vec![load.messages[at].clone()],
        forget: Forget::Nothing,
        ..load.clone()
    };
    stream.publish("a", change("T", "add 1 2"));
    stream.publish("a", part(0));
    stream.feed(&mut gate, true);
    let mut next = restarted(&gate);
    stream.publish("a", part(1));
    stream.feed(&mut gate, false);
    stream.feed(&mut next, true);
    assert!(next.0.take_again());
    stream.feed(&mut next, true);
    assert!(!next.0.take_again());
    assert_eq!((&next.1, next.1.tables["T"].len()), (&gate.1, LINES_MAX / 8));
}
