//! The tables of the book against the tables of the code.

use std::collections::BTreeSet;
use std::path::Path;

use towpath_engine::DropReason;

fn page(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/book/src").join(name);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

#[test]
fn the_page_of_the_log_has_its_targets() {
    let text = page("reference/log.md");
    let section = text.split_once("<!-- targets -->\n").unwrap().1.split_once("<!-- end -->").unwrap().0;
    let rows = towpath::logging::NAMED.map(|(name, lines)| format!("| `{name}` | {lines} |\n"));
    assert_eq!(section, format!("| target | lines |\n|---|---|\n{}", rows.concat()));
}

#[test]
fn drop_reasons_are_documented() {
    let text = page("reference/metrics.md");
    let section = text.split_once("## Drop reasons").expect("the section").1;
    let section = section.split_once("<!-- end -->").expect("the end of the table").0;
    let rows: Vec<&str> = section.lines().filter(|line| line.starts_with("| `")).collect();
    let expected: Vec<String> =
        DropReason::ALL.iter().map(|reason| format!("| `{}` | {} |", reason.name(), reason.help())).collect();
    assert_eq!(rows, expected);
}

#[test]
fn the_checks_of_doctor_are_documented() {
    let text = page("reference/config.md");
    let table = text
        .split_once("<!-- checks -->")
        .expect("the table")
        .1
        .split_once("<!-- end -->")
        .expect("its end")
        .0;
    let cells = table
        .lines()
        .filter(|line| line.starts_with("| `"))
        .map(|line| line.split('|').nth(1).unwrap_or_default());
    let names: Vec<&str> = cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).collect();
    assert_eq!(names, towpath::doctor::CHECKS);
}

/// Every call of a worker and of a mux is in the table of interfaces, and the table names no others.
#[test]
fn the_table_of_interfaces_is_complete() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read =
        |path: &str| std::fs::read_to_string(crates.join(path)).unwrap_or_else(|e| panic!("{path}: {e}"));
    let page = page("reference/interfaces.md");
    let (_, ring) = page.split_once("## Clients of the engine's ring").expect("the section");
    let (ring, text) = ring.split_once("\n## ").expect("another section");
    let cells = |column: usize| -> BTreeSet<String> {
        let rows = text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| purpose"));
        let cells = rows.map(move |row| row.split('|').nth(column).unwrap_or_default());
        cells.flat_map(|cell| cell.split('`').skip(1).step_by(2)).map(str::to_owned).collect()
    };

    let header = read("towpath-capi/include/towpath.h");
    // A client of the ring needs some of an inspector's calls.
    let stub = read("towpath-py/towpath.pyi");
    let client = read("towpath-ring/src/client/mod.rs") + &read("towpath-ring/src/client/send.rs");
    let client = client + &read("towpath-ring/src/lane/loss_record.rs");
    for row in ring.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| purpose")) {
        let names =
            |column: usize| row.split('|').nth(column).unwrap_or_default().split('`').skip(1).step_by(2);
        let last = |name: &str| name.rsplit(['.', ':']).next().unwrap_or_default().to_owned();
        for name in names(2) {
            assert!(client.contains(&format!("fn {}(", last(name))), "Rust: {name}");
        }
        for name in names(3) {
            assert!(header.contains(name), "C: {name}");
        }
        for name in names(4) {
            assert!(
                stub.contains(&format!("class {}", last(name)))
                    || stub.contains(&format!("def {}(", last(name))),
                "Python: {name}"
            );
        }
    }
    let words = header.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '(');
    let functions =
        words.filter_map(|word| word.strip_prefix("towpath_")?.split_once('(').map(|(name, _)| name));
    let ours = ["worker_", "mux_", "reply_", "framing_", "connector_"];
    let functions = functions.filter(|name| ours.iter().any(|prefix| name.starts_with(prefix)));
    assert_eq!(functions.map(str::to_owned).collect::<BTreeSet<_>>(), cells(3), "C");

    // Attributes of messages and events, and `with`, are not calls.
    let (mut methods, mut class, mut property) = (BTreeSet::new(), "", false);
    for line in stub.lines() {
        if let Some(name) = line.strip_prefix("class ") {
            class = name.split(['(', ':']).next().unwrap_or_default();
            if ["Worker", "Mux", "Framing"].contains(&class) {
                methods.insert(class.to_owned());
            }
        }
        let method = line.strip_prefix("    def ").and_then(|rest| rest.split_once('('));
        let of_ours = ["Worker", "Mux", "Delivery", "Framing", "Connector"].contains(&class);
        let counters = class == "Mux" && line.contains("def counters");
        if let Some((name, _)) = method.filter(|_| of_ours && (!property || counters)) {
            methods.insert(format!("{class}.{name}"));
        }
        property = line.trim() == "@property";
    }
    for name in ["new", "enter", "exit", "iter", "aiter"] {
        methods.retain(|method| !method.ends_with(&format!("__{name}__")));
    }
    assert_eq!(methods, cells(4), "Python");

    let sources = [
        "towpath-ring/src/client/worker.rs",
        "towpath-ring/src/client/worker/event.rs",
        "towpath-ring/src/client/worker/message.rs",
        "towpath-ring/src/client/worker/reply.rs",
        "towpath-ring/src/client/worker/turn.rs",
        "towpath-mux/src/framing/mod.rs",
        "towpath-mux/src/io/mod.rs",
        "towpath-mux/src/io/hand_over.rs",
        "towpath-mux/src/io/connector.rs",
        "towpath-mux/src/io/tls/config.rs",
        "towpath-mux/src/io/socket/mod.rs",
        "towpath-mux/src/io/socket/receive.rs",
        "towpath-mux/src/io/socket/send.rs",
        "towpath-mux/src/io/socket/arm.rs",
    ];
    let sources = sources.map(read).concat();
    for call in cells(2) {
        let name = call.rsplit("::").next().unwrap_or_default();
        assert!(sources.contains(&format!("fn {name}(")), "Rust: {call}");
    }
}
