//! Runs `tests/test_towpath.py`: the module in a Python process, against real engines.

#[path = "../../towpath-capi/tests/engine/mod.rs"]
mod engine;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use towpath_port::netns::{until, within};

#[towpath_testenv::needs(python, "openssl")]
#[test]
fn the_module_in_python() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = tempfile::tempdir().expect("a directory");
    let built = std::env::current_exe().expect("this test").with_file_name("");
    let status = Command::new(here.join("install")).arg(directory.path()).arg(built).status().expect("sh");
    assert!(status.success());
    let output = Command::new("python3")
        .args(["-B", "-X", "dev", "-m", "unittest", "-v", "test_towpath"])
        .current_dir(here.join("tests"))
        .env("PYTHONPATH", directory.path())
        .env("TOWPATH", engine::towpath().get_program())
        .output()
        .expect("python3 starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    // unittest also succeeds if it finds no tests.
    assert!(said.contains("test_verdicts_of_every_kind"), "{said}");
}

/// The example writes each flow, with its packets, to SQLite.
#[towpath_testenv::needs(python, netns)]
#[test]
fn flows_are_followed_into_sqlite() {
    within(|| {
        let here = Path::new(env!("CARGO_MANIFEST_DIR"));
        let directory = tempfile::tempdir().expect("a directory");
        let built = std::env::current_exe().expect("this test").with_file_name("");
        let status =
            Command::new(here.join("install")).arg(directory.path()).arg(built).status().expect("sh");
        assert!(status.success());
        let engine = engine::Running::start();
        let database = engine.ring().with_file_name("flows.db");
        let mut follower = Command::new("python3")
            .arg(here.join("examples/follow_flows.py"))
            .args([engine.ring(), database.clone()])
            .env("PYTHONPATH", directory.path())
            .stderr(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let mut said = BufReader::new(follower.stderr.take().expect("its output")).lines();
        assert_eq!(said.next().expect("a line").expect("text"), "follow-flows: the engine sends events");
        (7001..=7005).for_each(|port| engine.flow(port));
        let query = "import sqlite3, sys; print(list(sqlite3.connect(sys.argv[1]).execute(\
            'select dst, dst_port, proto, rule, packets_out from flows where dst_port > 7000 order by dst_port')))";
        let rows = || {
            let output =
                Command::new("python3").args(["-c", query]).arg(&database).output().expect("python3 starts");
            String::from_utf8_lossy(&output.stdout).into_owned()
        };
        let row = |port: u16| format!("('10.9.0.2', {port}, 17, 100, 1)");
        let expected = format!("[{}]\n", (7001..=7005).map(row).collect::<Vec<_>>().join(", "));
        until(|| rows() == expected);
        // The example ends with the engine.
        drop(engine);
        assert!(follower.wait().expect("its end").success(), "{:?}", said.collect::<Vec<_>>());
    });
}
