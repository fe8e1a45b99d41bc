//! Standard error without a reader: `2>&1 | tee` that was ended, a logger that restarts. Commands end with their usual exit code, and an
//! engine continues.

use std::io::PipeWriter;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use towpath_port::netns::until;

use crate::support::Control;

/// A pipe whose reader has gone.
fn unread() -> PipeWriter {
    std::io::pipe().unwrap().1
}

fn towpath(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_towpath"));
    command.args(args).current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")).stderr(unread());
    command
}

#[test]
fn commands_end_as_they_would() {
    #[rustfmt::skip]
    let rows: [(&[&str], i32); 6] = [
        (&["frame", "examples/office.pcap", "--framing", "line", "--json"], 0),
        (&["frame", "/no/such", "--framing", "line"],                       2),
        (&["check", "/no/such"],                                            3),
        (&["ctl", "--socket", "/no/such", "show", "rings"],                 5),
        (&["run", "--check", "/no/such"],                                   6),
        (&["bpf", "check", "/no/such"],                                     1),
    ];
    for (args, code) in rows {
        let status = towpath(args).stdout(Stdio::null()).status().unwrap();
        assert_eq!(status.code(), Some(code), "{args:?}");
    }
    // A reader that closes standard output early is not an error.
    for action in ["check", "disasm", "stats"] {
        let program = "crates/towpath-bpf/tests/programs/thrift.o";
        let status = towpath(&["bpf", action, program]).stdout(unread()).status().unwrap();
        assert_eq!(status.code(), Some(0), "{action}");
    }
}

#[test]
fn an_engine_goes_on_reloads_and_ends() {
    let directory = tempfile::tempdir().unwrap();
    let worker = Path::new(env!("CARGO_BIN_EXE_towpath")).with_file_name("examples").join("mux_worker");
    let text = format!(
        "rules = \"r\"\n[mux.web]\nlisten = \"127.0.0.1:0\"\nframing = \"line\"\nworkers = 1\nworker = \"{}\"\n\
         [control]\nsocket = \"ctl.sock\"\n",
        worker.display()
    );
    let config = directory.path().join("t.toml");
    std::fs::write(&config, text).unwrap();
    let rules = |rule: &str| std::fs::write(directory.path().join("r"), rule).unwrap();
    rules("add 100 allow tcp from any to any\n");
    let mut engine = towpath(&["run", config.to_str().unwrap()]).stdout(Stdio::null()).spawn().unwrap();
    let control = Control::of(directory.path());
    until(|| control.ctl("show mux").status.success());
    rules("add 200 allow tcp from any to any\n");
    kill_process(Pid::from_child(&engine), Signal::HUP).unwrap();
    until(|| control.json("show rules --json")["rules"][0]["number"] == 200);
    kill_process(Pid::from_child(&engine), Signal::TERM).unwrap();
    assert_eq!(engine.wait().unwrap().code(), Some(0));
}
