//! Tests that the header and the code agree: sizes, offsets, constants, names, and the number of arguments of each function.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

use towpath_metrics::Metric;
use towpath_mux::mux::Order;
use towpath_ring::{EndCause, Inject, Kind, Loss, Ticket, group};
use towpath_send::CopyMode;

use crate::ring::RingStats;
use crate::{framing, inspector, metrics, mux, mux_event, mux_server, sender, worker, worker_event};

const HEADER: &str = include_str!("../include/towpath.h");
const SOURCES: &[&str] = &[
    include_str!("lib.rs"),
    include_str!("error.rs"),
    include_str!("inspector.rs"),
    include_str!("framing.rs"),
    include_str!("mux.rs"),
    include_str!("mux_event.rs"),
    include_str!("mux_server.rs"),
    include_str!("sender.rs"),
    include_str!("worker.rs"),
    include_str!("worker_event.rs"),
];

/// The structs of counters, whose tables state their fields: name, size, table.
const SUMMARIES: [(&str, usize, &[Metric]); 2] = [
    ("towpath_sender_counters", size_of::<towpath_send::Summary>(), towpath_send::Summary::TABLE),
    ("towpath_mux_counters", size_of::<towpath_mux::mux::Summary>(), towpath_mux::mux::Summary::TABLE),
];

/// C expressions with their values in Rust.
fn numbers() -> Vec<(String, u64)> {
    let mut rows = Vec::new();
    macro_rules! layout {
        ($name:literal, $type:ty, $($field:ident),*) => {
            rows.push((format!("sizeof(struct {})", $name), size_of::<$type>() as u64));
            $(rows.push((
                format!("offsetof(struct {}, {})", $name, stringify!($field)),
                offset_of!($type, $field) as u64,
            ));)*
        };
    }
    layout!("towpath_ticket", Ticket, lane, seq, at);
    layout!(
        "towpath_frame",
        inspector::Frame,
        payload,
        len,
        time,
        wire_len,
        kind,
        queue,
        mark,
        port,
        hash,
        pid,
        uid,
        gid,
        lost,
        ingress,
        egress,
        link_type,
        network,
        data,
        hook,
        bridged,
        ticket
    );
    layout!("towpath_ring_stats", RingStats, received, lost, sleeps, wakeups, oneshots);
    layout!("towpath_unsent", worker::Unsent, connection, bytes, len, error, reserved);
    layout!(
        "towpath_framing_state",
        framing::FramingState,
        messages,
        need,
        skip,
        trim,
        mark,
        hash,
        cb,
        reserved
    );
    layout!(
        "towpath_tls_options",
        mux_server::TlsOptions,
        certificate,
        key,
        client_ca,
        roots,
        name,
        handshake_time,
        client_optional,
        starttls,
        reserved
    );
    layout!(
        "towpath_connect_options",
        mux_server::ConnectOptions<'_>,
        tls,
        timeout,
        pause,
        pause_most,
        reserved
    );
    layout!(
        "towpath_mux_ended",
        mux_event::MuxEnded,
        connection,
        cause,
        error,
        bytes,
        length,
        unsent,
        rest,
        rest_len,
        fd,
        reserved,
        peer,
        text
    );
    layout!(
        "towpath_mux_event",
        mux_event::MuxEvent,
        kind,
        reserved,
        connection,
        bytes,
        len,
        sent,
        peer,
        text
    );
    layout!(
        "towpath_connection_info",
        mux_event::Info,
        peer,
        local,
        listener,
        server_name,
        protocol,
        client_names,
        tls,
        starttls
    );
    layout!("towpath_connection", worker::Connection, index, generation);
    layout!(
        "towpath_message",
        worker::Message,
        bytes,
        len,
        payload,
        payload_len,
        time,
        connection,
        mark,
        hash,
        part,
        more,
        cut,
        ticket
    );
    layout!(
        "towpath_worker_event",
        worker_event::WorkerEvent,
        kind,
        resumed,
        tls,
        starttls,
        message,
        peer,
        local,
        listener,
        server_name,
        protocol,
        client_names,
        cause,
        error,
        bytes,
        length,
        text
    );
    layout!(
        "towpath_sender_options",
        sender::Options,
        choice,
        segment,
        tamper_check,
        stall,
        max_buffers,
        max_pinned
    );
    layout!(
        "towpath_mux_options",
        mux::Options,
        message_max,
        head_max,
        connection_bytes,
        send_bytes,
        send_most,
        mux_bytes,
        head_time,
        body_time,
        rate,
        idle,
        send_time,
        order,
        in_flight,
        rebalance
    );
    layout!("towpath_metric", metrics::Metric, group, name, unit, help, value, kind, reserved);
    for (name, size, table) in SUMMARIES {
        rows.push((format!("sizeof(struct {name})"), size as u64));
        let field =
            |(at, row): (usize, &Metric)| (format!("offsetof(struct {name}, {})", row.name), 8 * at as u64);
        rows.extend(table.iter().enumerate().map(field));
    }
    layout!(
        "towpath_mux_message",
        mux::Received,
        length,
        skip,
        trim,
        connection,
        flags,
        mark,
        hash,
        reserved
    );
    let place = |order| mux::ORDERS.iter().position(|other| *other == order).unwrap() as u64 + 1;
    let constants = [
        ("TOWPATH_COUNTER", metrics::COUNTER.into()),
        ("TOWPATH_GAUGE", metrics::GAUGE.into()),
        ("TOWPATH_ORDER_DEFAULT", 0),
        ("TOWPATH_ORDER_NONE", place(Order::None)),
        ("TOWPATH_ORDER_REPLIES", place(Order::Replies)),
        ("TOWPATH_ORDER_SERIAL", place(Order::Serial)),
        ("TOWPATH_ORDER_STICKY", place(Order::Sticky)),
        ("TOWPATH_ORDER_KEY", place(Order::Key)),
        ("TOWPATH_ADMIT_PASS", mux_server::PASS as u64),
        ("TOWPATH_ADMIT_DENY", mux_server::DENY as u64),
        ("TOWPATH_ADMIT_RESET", mux_server::RESET as u64),
        ("TOWPATH_ON_UNDONE", mux_event::UNDONE.into()),
        ("TOWPATH_ON_UNDELIVERED", mux_event::UNDELIVERED.into()),
        ("TOWPATH_ON_SEND_ROOM", mux_event::SEND_ROOM.into()),
        ("TOWPATH_ON_NOT_ATTACHED", mux_event::NOT_ATTACHED.into()),
        ("TOWPATH_CONNECTED", mux::CONNECTED.into()),
        ("TOWPATH_ROOM", mux::ROOM.into()),
        ("TOWPATH_ADAPTIVE", CopyMode::Adaptive as u64),
        ("TOWPATH_ZEROCOPY", CopyMode::Zerocopy as u64),
        ("TOWPATH_PLAIN", CopyMode::Plain as u64),
        ("TOWPATH_PACKET", Kind::PACKET.0.into()),
        ("TOWPATH_MESSAGE", Kind::MESSAGE.0.into()),
        ("TOWPATH_EVENT", Kind::EVENT.0.into()),
        ("TOWPATH_DUMP", Kind::DUMP.0.into()),
        ("TOWPATH_DONE", Kind::DONE.0.into()),
        ("TOWPATH_ERROR", Kind::ERROR.0.into()),
        ("TOWPATH_GAP", Kind::GAP.0.into()),
        ("TOWPATH_GROUP_STATES", group::STATES.into()),
        ("TOWPATH_GROUP_EVENTS", group::EVENTS.into()),
        ("TOWPATH_GROUP_PACKETS", group::PACKETS.into()),
        ("TOWPATH_EVENTS", worker_event::EVENTS.into()),
        ("TOWPATH_PARTS", worker_event::PARTS.into()),
        ("TOWPATH_ON_MESSAGE", Kind::MESSAGE.0.into()),
        ("TOWPATH_ON_OPENED", Kind::OPENED.0.into()),
        ("TOWPATH_ON_ENDED", Kind::ENDED.0.into()),
        ("TOWPATH_NO_GAPS", inspector::NO_GAPS.into()),
        ("TOWPATH_INJECT_FORWARD", Inject::Forward as u64),
        ("TOWPATH_INJECT_BACK", Inject::Back as u64),
        ("TOWPATH_FLOW", inspector::FLOW.into()),
        ("TOWPATH_LOST_NO_ROOM", Loss::NoRoom.code().into()),
        ("TOWPATH_LOST_OLDEST", Loss::Oldest.code().into()),
        ("TOWPATH_LOST_DROPPED", Loss::Dropped.code().into()),
        ("TOWPATH_LOST_PASSED", Loss::Passed.code().into()),
        ("TOWPATH_LOST_HANDED_ON", Loss::HandedOn.code().into()),
        ("TOWPATH_LOST_TOO_LARGE", Loss::TooLarge.code().into()),
        ("TOWPATH_LOST_OVERWRITTEN", Loss::Overwritten.code().into()),
        ("TOWPATH_LOST_LIMITED", Loss::Limited.code().into()),
    ];
    rows.extend(constants.map(|(name, value)| (name.to_owned(), value)));
    let causes = EndCause::ALL.iter().map(|cause| (cause.name().to_uppercase(), cause.code()));
    rows.extend(causes.map(|(name, code)| (format!("TOWPATH_END_{name}"), code.into())));
    rows
}

#[towpath_testenv::needs("cc")]
#[test]
fn c_layouts_and_constants_match() {
    compare(Command::new("cc").arg("-std=c11"));
}

#[towpath_testenv::needs("c++")]
#[test]
fn cxx_layouts_and_constants_match() {
    compare(Command::new("c++").args(["-x", "c++", "-D_Static_assert=static_assert", "-std=c++17"]));
}

/// Compiles the header with static assertions of these values.
fn compare(compiler: &mut Command) {
    let directory = tempfile::tempdir().unwrap();
    let (source, object) = (directory.path().join("numbers.c"), directory.path().join("numbers.o"));
    let mut text = String::from("#include <towpath.h>\n");
    for (expression, value) in numbers() {
        writeln!(text, "_Static_assert({expression} == {value}u, \"{expression}\");").unwrap();
    }
    writeln!(
        text,
        "_Static_assert(sizeof(TOWPATH_VERSION) == sizeof(\"{}\"), \"\");",
        env!("CARGO_PKG_VERSION")
    )
    .unwrap();
    std::fs::write(&source, text).unwrap();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    compiler.args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-c", "-I"]).arg(&include);
    let output = compiler.arg(&source).arg("-o").arg(&object).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Puts the fields of the tables into the header with `TOWPATH_WRITE_DOCS=1`; compares them otherwise.
#[test]
fn the_header_has_the_fields_of_the_tables() {
    let mut expected = HEADER.to_owned();
    for (name, _, table) in SUMMARIES {
        let start = format!("struct {name} {{\n");
        let (before, rest) = expected.split_once(&start).unwrap();
        let (_, after) = rest.split_once("};").unwrap();
        let width = table.iter().map(|row| row.name.len()).max().unwrap() + 1;
        let mut fields = String::new();
        for row in table {
            writeln!(fields, "    uint64_t {:<width$} /* {} */", format!("{};", row.name), row.help).unwrap();
        }
        expected = format!("{before}{start}{fields}}};{after}");
    }
    if std::env::var_os("TOWPATH_WRITE_DOCS").is_some() {
        std::fs::write(Path::new(env!("CARGO_MANIFEST_DIR")).join("include/towpath.h"), expected).unwrap();
        return;
    }
    assert!(expected == HEADER, "towpath.h differs: run this test once with TOWPATH_WRITE_DOCS=1");
}

#[test]
fn the_header_declares_exactly_the_exported_functions() {
    let mut of_header = BTreeMap::new();
    for statement in without_comments(HEADER).split(';') {
        let Some((before, rest)) = statement.split_once('(') else { continue };
        let name = before.rsplit([' ', '*', '\n']).next().unwrap();
        if name.starts_with("towpath_") && !before.contains("typedef") {
            of_header.insert(name.to_owned(), arguments(rest));
        }
    }
    let mut of_code = BTreeMap::new();
    for source in SOURCES {
        for function in source.split("#[unsafe(no_mangle)]").skip(1) {
            let (_, function) = function.split_once("pub extern \"C\" fn ").unwrap();
            let (name, rest) = function.split_once('(').unwrap();
            of_code.insert(name.to_owned(), arguments(rest));
        }
    }
    assert_eq!(of_header, of_code);
    assert!(of_code.len() > 20);
}

#[test]
fn the_examples_are_short() {
    let examples = [
        include_str!("../examples/inspector.c"),
        include_str!("../examples/mux.c"),
        include_str!("../examples/sender.c"),
        include_str!("../examples/worker.c"),
    ];
    for example in examples {
        assert!(example.lines().count() < 100);
    }
}

/// Counts the arguments up to the closing bracket.
fn arguments(text: &str) -> usize {
    let (mut depth, mut commas, mut last) = (1, 0, String::new());
    for letter in text.chars() {
        match letter {
            '(' | '<' => depth += 1,
            '>' if !last.ends_with('-') => depth -= 1,
            ')' => depth -= 1,
            ',' if depth == 1 => {
                commas += 1;
                last.clear();
                continue;
            }
            _ => {}
        }
        if depth == 0 {
            break;
        }
        last.push(letter);
    }
    commas + usize::from(!matches!(last.trim(), "" | "void"))
}

fn without_comments(text: &str) -> String {
    let mut code = String::new();
    for (index, piece) in text.split("/*").enumerate() {
        code += if index == 0 { piece } else { piece.split_once("*/").unwrap().1 };
    }
    code.lines().filter(|line| !line.starts_with('#')).map(|line| format!("{line}\n")).collect()
}
