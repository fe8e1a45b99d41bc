use super::super::sample::FlowPart;
use super::super::views::tests::sample;
use super::*;

const SIZE: (usize, usize) = LEAST;

fn model() -> Model {
    let mut model = Model::new("/run/towpath/control.sock", 1.0);
    for n in 1..=2 {
        let mut sample = sample(n);
        sample.flows = Some(Ok(FlowPart { states: vec![state(1, n), state(2, 5 * n)], swept: true }));
        model.handle_sample(sample);
    }
    model
}

fn state(port: u16, n: u64) -> Value {
    json!({ "proto": 6, "src": "10.0.0.1", "src_port": 4000 + port, "dst": "192.0.2.1", "dst_port": 22,
            "name": "default", "zone": 0, "rule": 100, "kind": "state", "expire": 300, "text": "x",
            "packets": [10 * n, 0], "bytes": [1000 * n, 0] })
}

fn text(model: &mut Model) -> String {
    let lines = model.lines(SIZE.0, SIZE.1);
    assert_eq!(lines.len(), SIZE.1);
    for line in &lines {
        assert!(line.text.chars().count() <= SIZE.0, "{}", line.text);
        assert!(!line.text.chars().any(char::is_control), "{:?}", line.text);
    }
    lines.iter().map(|line| format!("{}\n", line.text)).collect()
}

fn type_words(model: &mut Model, words: &str) {
    words.chars().for_each(|c| model.handle_key(Key::Char(c)));
}

fn commands(model: &mut Model) -> Vec<Command> {
    std::iter::from_fn(|| model.poll_command()).collect()
}

fn chosen(model: &mut Model) -> Vec<String> {
    let lines = model.lines(SIZE.0, SIZE.1);
    lines.into_iter().filter(|line| line.style == Style::Selected).map(|line| line.text).collect()
}

#[test]
fn every_view_is_shown_and_says_what_to_read() {
    let mut model = model();
    assert!(text(&mut model).contains("packets 50/s  passed 45/s  dropped 5/s"));
    let _ = commands(&mut model);
    let rows = [
        ('2', "allow udp from any to any", vec![Part::Stats, Part::Rules], false),
        ('3', "tcp 10.0.0.1:4002 <-> 192.0.2.1:22", vec![Part::Stats], true),
        ('4', "ips", vec![Part::Stats, Part::Queues, Part::Rings], false),
        ('5', "web worker 0, pid 9 ready", vec![Part::Stats, Part::Mux], false),
        ('6', "no_route", vec![Part::Stats, Part::Ports, Part::Queues], false),
        ('1', "af_packet", vec![Part::Stats, Part::Ports], false),
    ];
    for (key, words, parts, flows) in rows {
        model.handle_key(Key::Char(key));
        assert!(text(&mut model).contains(words), "{key}");
        let wanted = Wanted { running: true, parts, flows, filter: None };
        assert_eq!(commands(&mut model), [Command::Read(wanted)]);
    }
    model.handle_key(Key::Char('?'));
    assert!(text(&mut model).contains("any key: back"));
    model.handle_key(Key::Enter);
    assert!(!model.is_over());
    model.handle_key(Key::Char('q'));
    assert!(model.is_over());
}

#[test]
fn the_selection_follows_its_row() {
    let mut model = model();
    model.handle_key(Key::Char('3'));
    // By bits per second: 4002 before 4001.
    assert!(chosen(&mut model)[0].contains(":4002"));
    model.handle_key(Key::Down);
    assert!(chosen(&mut model)[0].contains(":4001"));
    let mut next = sample(3);
    next.flows = Some(Ok(FlowPart { states: vec![state(1, 900), state(2, 15)], swept: true }));
    model.handle_sample(next);
    assert!(chosen(&mut model)[0].contains(":4001"));
    assert!(text(&mut model).lines().nth(4).unwrap().contains(":4001"));
    // It ends: the row at its place is selected.
    let mut next = sample(4);
    next.flows = Some(Ok(FlowPart { states: vec![state(2, 20)], swept: true }));
    model.handle_sample(next);
    assert!(chosen(&mut model)[0].contains(":4002"));
    for key in [Key::End, Key::PageDown, Key::PageUp, Key::Home, Key::Up] {
        model.handle_key(key);
        assert_eq!(chosen(&mut model).len(), 1);
    }
}

#[test]
fn columns_are_sorted_in_turn() {
    let mut model = model();
    model.handle_key(Key::Char('3'));
    let mut headers = Vec::new();
    for _ in 0..9 {
        headers.push(text(&mut model).lines().nth(3).unwrap().trim().to_owned());
        model.handle_key(Key::Char('s'));
    }
    let marked =
        headers.iter().filter(|header| header.contains(['v', '^']) && header.contains("bit/s")).count();
    assert!(headers[0].contains("bit/sv") && headers[1].contains("packetsv"), "{headers:?}");
    assert!(headers[2].contains("bytesv") && headers[3].contains("rule^"), "{headers:?}");
    assert_eq!(headers[8], headers[0]);
    assert!(marked > 0);
    model.handle_key(Key::Char('r'));
    assert!(text(&mut model).contains("packets^"));
}

#[test]
fn a_pause_keeps_the_screen() {
    let mut model = model();
    let _ = commands(&mut model);
    model.handle_key(Key::Char('p'));
    let [Command::Read(wanted)] = &commands(&mut model)[..] else { panic!("no command") };
    assert!(!wanted.running);
    let before = text(&mut model);
    assert!(before.contains("PAUSED"));
    model.handle_sample(sample(9));
    assert_eq!(text(&mut model), before);
    model.handle_key(Key::Char(' '));
    model.handle_sample(sample(9));
    assert!(text(&mut model).contains("running"));
}

#[test]
fn the_engine_may_go_and_come_back() {
    let mut model = model();
    model.handle_gone("cannot connect to /x: \u{1b}[2J");
    let gone = text(&mut model);
    assert!(gone.contains("NO ENGINE") && gone.contains("cannot connect to /x: \\u{1b}[2J"), "{gone}");
    // The last values stay.
    assert!(gone.contains("af_packet"));
    model.handle_sample(sample(1));
    let back = text(&mut model);
    assert!(back.contains("running") && back.contains("packets -/s"), "{back}");
}

#[test]
fn a_filter_is_words_or_a_request() {
    let mut model = model();
    model.handle_key(Key::Char('2'));
    model.handle_key(Key::Char('/'));
    type_words(&mut model, "DENY");
    model.handle_key(Key::Enter);
    let rules = text(&mut model);
    assert!(
        rules.contains("65535") && !rules.contains("allow udp") && rules.contains("filter: DENY"),
        "{rules}"
    );
    // Esc while writing restores the filter, then removes it.
    model.handle_key(Key::Char('/'));
    type_words(&mut model, "xyz");
    assert!(text(&mut model).contains("none that the filter accepts"));
    model.handle_key(Key::Escape);
    assert!(text(&mut model).contains("65535"));
    model.handle_key(Key::Escape);
    assert!(text(&mut model).contains("allow udp"));

    model.handle_key(Key::Char('3'));
    model.handle_key(Key::Char('/'));
    let _ = commands(&mut model);
    type_words(&mut model, ":4001");
    assert!(text(&mut model).contains(":4001") && !text(&mut model).contains(":4002"));
    (0..5).for_each(|_| model.handle_key(Key::Backspace));
    type_words(&mut model, "tcp :22");
    let last = commands(&mut model).pop();
    let Some(Command::Read(Wanted { filter: Some(filter), .. })) = last else { panic!("{last:?}") };
    assert_eq!(filter, json!({ "flow": "tcp :22" }));
    (0..7).for_each(|_| model.handle_key(Key::Backspace));
    type_words(&mut model, "10.0.0.0/8");
    let last = commands(&mut model).pop();
    let Some(Command::Read(Wanted { filter: Some(filter), .. })) = last else { panic!("{last:?}") };
    assert_eq!(filter, json!({ "address": "10.0.0.0/8" }));
}

#[test]
fn a_state_ends_after_a_question() {
    let mut model = model();
    model.handle_key(Key::Char('3'));
    let _ = commands(&mut model);
    for (key, ends) in [(Key::Char('n'), false), (Key::Enter, false), (Key::Char('y'), true)] {
        model.handle_key(Key::Char('e'));
        assert!(text(&mut model).contains("End tcp 10.0.0.1:4002 <-> 192.0.2.1:22? y"));
        model.handle_key(key);
        let expected = Command::End("6 10.0.0.1 4002 <-> 192.0.2.1 22 :default zone 0".to_owned());
        assert_eq!(commands(&mut model), if ends { vec![expected] } else { vec![] });
    }
    model.handle_message("1 state ended");
    assert!(text(&mut model).contains("1 state ended"));
    model.handle_key(Key::Char('1'));
    model.handle_key(Key::Char('e'));
    assert!(text(&mut model).contains("only a flow has a state"));
}

#[test]
fn a_flow_has_its_rule_and_its_trace() {
    let mut model = model();
    model.handle_key(Key::Char('3'));
    let _ = commands(&mut model);
    model.handle_key(Key::Enter);
    let [Command::Read(wanted)] = &commands(&mut model)[..] else { panic!("no command") };
    assert_eq!(wanted.parts, [Part::Stats, Part::Rules]);
    let detail = text(&mut model);
    assert!(detail.contains("src_port       4002"), "{detail}");
    assert!(detail.contains("its rule: 00100 allow udp from any to any (14 packets)"), "{detail}");
    model.handle_key(Key::Char('t'));
    assert_eq!(commands(&mut model), [Command::Trace(json!({ "flow": "6 10.0.0.1:4002 192.0.2.1:22" }))]);
    model.handle_trace((0..2 * TRACE).map(|n| format!("packet {n} \u{1b}]0;x\u{7}")).collect());
    model.handle_trace_end("the engine has ended");
    let traced = text(&mut model);
    assert!(traced.contains("1000 packets, the newest first; ended: the engine has ended"), "{traced}");
    assert!(traced.contains("flows: tcp 10.0.0.1:4002 <-> 192.0.2.1:22"), "{traced}");
    assert!(traced.contains("packet 999 \\u{1b}]0;x\\u{7}"), "{traced}");
    model.handle_key(Key::Escape);
    assert_eq!(commands(&mut model)[0], Command::StopTrace);
    // Lines that arrive late belong to no trace.
    model.handle_trace(vec!["late".into()]);
    assert!(!text(&mut model).contains("late"));
}

#[test]
fn drop_reasons_and_rules_are_followed_and_ports_are_not() {
    let rows = [
        ('6', "engine rule", Some(json!({ "drop": "rule" }))),
        ('6', "queue 1", None),
        ('2', "deny", Some(json!({ "rule": 65535 }))),
        ('1', "lan", None),
        ('4', "ips", None),
    ];
    for (view, words, expected) in rows {
        let mut model = model();
        model.handle_key(Key::Char(view));
        model.handle_key(Key::Char('/'));
        type_words(&mut model, words.split(' ').next_back().unwrap_or_default());
        model.handle_key(Key::Enter);
        let _ = commands(&mut model);
        model.handle_key(Key::Char('t'));
        let traces: Vec<Command> =
            commands(&mut model).into_iter().filter(|command| !matches!(command, Command::Read(_))).collect();
        assert_eq!(traces, expected.map(Command::Trace).into_iter().collect::<Vec<_>>(), "{words}");
    }
}

#[test]
fn hostile_names_and_many_long_rows_stay_on_the_screen() {
    let mut model = model();
    let mut hostile = sample(3);
    let rules: Vec<Value> = (0..200)
        .map(|n| json!({ "number": n, "set": 0, "packets": n, "bytes": 0, "text": format!("{n} \u{1b}[31m{}\n", "long ".repeat(99)) }))
        .collect();
    hostile.parts.insert(Part::Rules, Ok(json!({ "rules": rules, "more": false })));
    hostile.parts.insert(Part::Mux, Err("\u{1b}[2J".into()));
    model.handle_sample(hostile);
    model.handle_key(Key::Char('2'));
    for key in [Key::Home, Key::PageDown, Key::Down, Key::Up, Key::End, Key::PageUp] {
        model.handle_key(key);
        text(&mut model);
        assert!(!chosen(&mut model).is_empty());
    }
    for key in ['1', '3', '4', '5', '6'] {
        model.handle_key(Key::Char(key));
        text(&mut model);
    }
    // A small terminal, and none at all.
    for (width, height) in [(79, 24), (80, 23), (10, 3), (1, 1), (0, 0), (300, 100)] {
        let lines = model.lines(width, height);
        assert_eq!(lines.len(), height);
    }
}
