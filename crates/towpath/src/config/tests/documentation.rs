//! The documentation of the keys.

use super::*;

/// Puts the tables of [`keys::KEYS`] into the documentation with `TOWPATH_WRITE_DOCS=1`; compares them otherwise.
#[test]
fn the_documentation_has_the_table_of_keys() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/book/src/reference/run.md");
    let text = std::fs::read_to_string(&path).unwrap();
    let (mut expected, mut rest, mut tables) = (String::new(), text.as_str(), Vec::new());
    while let Some((before, after)) = rest.split_once("<!-- keys: ") {
        let (name, after) = after.split_once(" -->\n").unwrap();
        let (_, after) = after.split_once("<!-- end -->").unwrap();
        let table = if name == "top" { "" } else { name };
        expected += &format!("{before}<!-- keys: {name} -->\n{}<!-- end -->", keys::markdown(table));
        tables.push(table);
        rest = after;
    }
    expected += rest;
    if std::env::var_os("TOWPATH_WRITE_DOCS").is_some() {
        std::fs::write(&path, &expected).unwrap();
        return;
    }
    assert!(expected == text, "run.md differs from KEYS: run this test once with TOWPATH_WRITE_DOCS=1");
    for key in keys::KEYS {
        assert!(tables.contains(&key.table), "run.md has no table of [{}]", key.table);
    }
}

/// A documented default in backquotes is the value that an absent key has.
#[test]
fn documented_defaults_hold() {
    let drivers = [
        ("af_packet", "offload"),
        ("af_xdp", "mode zero-copy"),
        ("nfqueue", "queue copy-range gso queue-length conntrack repeat"),
    ];
    for key in keys::KEYS {
        let Some(value) = key.default.strip_prefix('`').and_then(|rest| rest.strip_suffix('`')) else {
            continue;
        };
        let driver = drivers.iter().find(|(_, names)| names.split(' ').any(|name| name == key.name));
        let driver = driver.filter(|_| key.table == "port").map_or("af_packet", |(driver, _)| *driver);
        let text = |written: &str| {
            let line = |table: &str| if key.table == table { written } else { "" };
            format!(
                "rules = \"r\"\n{}\n[port.a]\ndriver = \"{driver}\"\naddress = \"10.0.0.1\"\n{}\n[port.b]\n\
                 driver = \"af_packet\"\n[port.c]\ndriver = \"af_packet\"\n[[bridge]]\nports = [\"b\", \"c\"]\n{}\n\
                 {}[queue.1]\nsocket = \"s\"\n{}\n[mux.m]\nlisten = \"unix:u\"\nframing = \"line\"\n\
                 worker = \"w\"\nremote = \"jobs\"\n{}\n[engine]\n{}\n[control]\nsocket = \"c\"\n{}\n[metrics]\nlisten = \"unix:m\"\n{}\n\
                 [ipfix]\ncollector = \"c:1\"\n{}\n[events]\noutput = \"e\"\n{}\n[fleet]\nservers = \"nats://s:1\"\ngroup = \"g\"\ngate = \"a\"\n{}\n[log]\n{}\n",
                line(""),
                line("port"),
                line("bridge"),
                if driver == "nfqueue" { "" } else { "[[route]]\nto = \"10.0.0.0/8\"\nport = \"a\"\n" },
                line("queue"),
                line("mux"),
                line("engine"),
                line("control"),
                line("metrics"),
                line("ipfix"),
                line("events"),
                line("fleet"),
                line("log"),
            )
        };
        let absent =
            Config::parse("t", &text("")).unwrap_or_else(|errors| panic!("{}: {errors:?}", text("")));
        let written = text(&format!("{} = {value}", key.name));
        let present = Config::parse("t", &written).unwrap_or_else(|errors| panic!("{written}: {errors:?}"));
        assert_eq!(format!("{absent:?}"), format!("{present:?}"), "[{}] {}", key.table, key.name);
    }
}
