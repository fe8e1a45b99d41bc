//! Standard error is not read: its reader has ended (`2>&1 | tee`) or has stopped reading. Commands end with the code that they would
//! have, and an engine continues.

use std::io::{PipeWriter, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::example::example;
use crate::support::{Control, free, until};

/// A pipe whose reader has closed it.
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
    let worker = example("mux_worker");
    let text = format!(
        "rules = \"r\"\n[mux.web]\nlisten = \"127.0.0.1:0\"\nframing = \"line\"\nworkers = 1\nworker = \"{}\"\n\
         [control]\nsocket = \"ctl.sock\"\n",
        worker
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

/// A full pipe that stays open: the end that is not read, and the write end.
fn full() -> (std::io::PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&writer, true).unwrap();
    while writer.write(&[b'.'; 4096]).is_ok() {}
    while writer.write(b".").is_ok() {}
    rustix::io::ioctl_fionbio(&writer, false).unwrap();
    (reader, writer)
}

#[test]
fn a_full_pipe_stops_neither_messages_nor_control_nor_the_end_and_lost_lines_are_counted() {
    let directory = tempfile::tempdir().unwrap();
    let worker = example("mux_worker");
    // The line with the port number of `127.0.0.1:0` cannot be read.
    let at = free();
    let text = format!(
        "rules = \"r\"\n[mux.web]\nlisten = \"{at}\"\nframing = \"offset=0 length=4 be adjust=4\"\nworkers = 1\n\
         worker = \"{}\"\n[control]\nsocket = \"ctl.sock\"\n",
        worker
    );
    let config = directory.path().join("t.toml");
    std::fs::write(&config, text).unwrap();
    std::fs::write(directory.path().join("r"), "add 100 allow log tcp from any to any\n").unwrap();
    let (_reader, writer) = full();
    let mut command = Command::new(env!("CARGO_BIN_EXE_towpath"));
    command.args(["run", config.to_str().unwrap()]).stdout(Stdio::null()).stderr(writer);
    let mut engine = command.spawn().unwrap();
    let control = Control::of(directory.path());
    until(|| control.ctl("show mux").status.success());
    let lines = |outcome: &str| control.json("show stats --json")["stats"]["log"][outcome].as_u64().unwrap();
    // Each connection causes a line of the `log` rule.
    until(|| {
        for _ in 0..300 {
            drop(TcpStream::connect(at).unwrap());
        }
        lines("lost") > 0
    });
    assert_eq!(lines("written"), 0);
    let metrics = control.ctl("metrics");
    assert!(String::from_utf8_lossy(&metrics.stdout).contains("towpath_log_lines_total{outcome=\"lost\"}"));
    // A message reaches the worker, and its answer returns.
    let mut client = TcpStream::connect(at).unwrap();
    client.write_all(b"\0\0\0\x02hi").unwrap();
    let mut length = [0; 4];
    client.read_exact(&mut length).unwrap();
    let mut answer = vec![0; u32::from_be_bytes(length) as usize];
    client.read_exact(&mut answer).unwrap();
    assert!(answer.ends_with(b" hi"), "{}", String::from_utf8_lossy(&answer));
    drop(client);
    kill_process(Pid::from_child(&engine), Signal::TERM).unwrap();
    let mut code = None;
    until(|| {
        code = engine.try_wait().unwrap();
        code.is_some()
    });
    assert_eq!(code.unwrap().code(), Some(0));
}
