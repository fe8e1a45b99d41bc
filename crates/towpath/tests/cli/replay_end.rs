//! `towpath replay` ends by a signal in any phase, and leaves no socket, directory or process.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, getpgid, kill_process, test_kill_process};
use towpath_port::netns::until;
use towpath_port::pcap::{Reader, Writer};
use towpath_port::{Burst, Port, Received};
use towpath_ring::Consumer;

use crate::child::assert_runs;

/// A replay whose temporary directories are in a directory of the test.
struct Replay {
    directory: tempfile::TempDir,
    child: Child,
}

/// A process for a queue that writes its socket's path and its process id, and then sleeps.
const TELLS: &str = "1=sh -c 'echo $TOWPATH_SOCKET $$ > said.new; mv said.new said; exec sleep 600'";

impl Replay {
    fn start(arguments: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("tmp")).unwrap();
        fs::write(directory.path().join("r.ipfw"), "add inspect 1 ip from any to any\n").unwrap();
        let child = Command::new(env!("CARGO_BIN_EXE_towpath"))
            .args(["replay", "--rules", "r.ipfw"])
            .args(arguments)
            .current_dir(directory.path())
            .env("TMPDIR", directory.path().join("tmp"))
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self { directory, child }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Where its inspector is to attach, and its process.
    fn inspector(&self) -> (PathBuf, Pid) {
        until(|| {
            assert_runs(&self.child);
            self.path("said").exists()
        });
        let said = fs::read_to_string(self.path("said")).unwrap();
        let (socket, pid) = said.trim().rsplit_once(' ').unwrap();
        (socket.into(), Pid::from_raw(pid.parse().unwrap()).unwrap())
    }

    /// Sends the signal. The replay reports its name and leaves no file.
    fn end(self, signal: Signal, name: &str) {
        // A signal that was ignored when the tests began (nohup(1), a shell's `&`) stays ignored.
        let (signal, name) = if is_ignored(signal) { (Signal::TERM, "SIGTERM") } else { (signal, name) };
        kill_process(Pid::from_child(&self.child), signal).unwrap();
        let output = self.child.wait_with_output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(128 + signal.as_raw()), "{said}");
        assert!(said.contains(&format!("the replay was ended by {name}")), "{said}");
        let left =
            |path: &Path| fs::read_dir(path).unwrap().map(|file| file.unwrap().path()).collect::<Vec<_>>();
        assert_eq!(left(&self.directory.path().join("tmp")), Vec::<PathBuf>::new());
        let mut left = left(self.directory.path());
        left.retain(|path| !["tmp", "r.ipfw", "said"].iter().any(|name| path.ends_with(name)));
        assert_eq!(left, Vec::<PathBuf>::new());
    }
}

fn is_ignored(signal: Signal) -> bool {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:")).unwrap();
    u64::from_str_radix(mask.trim(), 16).unwrap() >> (signal.as_raw() - 1) & 1 == 1
}

/// Returns true for a valid capture without packets. A file of 0 bytes is not a capture.
fn is_empty_capture(path: &PathBuf) -> bool {
    let mut capture = Reader::open(path).unwrap();
    capture.receive(&mut Burst::new(1)).unwrap() == Received::End
}

fn office() -> String {
    format!("{}/../../examples/office.pcap", env!("CARGO_MANIFEST_DIR"))
}

/// A terminal's ^C reaches the replay only: the inspector has a separate process group and ends with the replay.
#[test]
fn while_its_inspector_has_not_attached() {
    let outputs = tempfile::tempdir().unwrap();
    let [out, replies] = ["out.pcap", "replies.pcapng"].map(|name| outputs.path().join(name));
    let written = [out.to_str().unwrap(), "--replies", replies.to_str().unwrap()];
    let arguments = ["--queue", TELLS, "--states-out", "states", &office(), "--out"];
    let replay = Replay::start(&[&arguments[..], &written].concat());
    let (_, pid) = replay.inspector();
    assert_eq!(getpgid(Some(pid)).unwrap(), pid);
    replay.end(Signal::TERM, "SIGTERM");
    assert!(test_kill_process(pid).is_err());
    assert!([out, replies].iter().all(is_empty_capture));
}

#[test]
fn while_it_waits_for_a_verdict() {
    let outputs = tempfile::tempdir().unwrap();
    let [out, replies] = ["out.pcap", "replies.pcapng"].map(|name| outputs.path().join(name));
    let written = [out.to_str().unwrap(), "--replies", replies.to_str().unwrap()];
    let arguments = ["--queue", TELLS, "--deadline", "3600", &office(), "--out"];
    let replay = Replay::start(&[&arguments[..], &written].concat());
    let (socket, pid) = replay.inspector();
    let mut inspector = Consumer::attach(socket).unwrap();
    assert!(inspector.recv().unwrap().is_some());
    replay.end(Signal::INT, "SIGINT");
    assert!(test_kill_process(pid).is_err());
    assert!([out, replies].iter().all(is_empty_capture));
}

#[test]
fn while_more_of_the_capture_is_to_come() {
    let mut replay = Replay::start(&["--control", "ctl.sock", "-"]);
    let empty = tempfile::NamedTempFile::new().unwrap();
    Writer::create(empty.path()).unwrap().finish().unwrap();
    replay.child.stdin.as_mut().unwrap().write_all(&fs::read(empty.path()).unwrap()).unwrap();
    let socket = replay.path("ctl.sock");
    until(|| {
        assert_runs(&replay.child);
        socket.exists()
    });
    // Held open until it has ended.
    let input = replay.child.stdin.take();
    replay.end(Signal::HUP, "SIGHUP");
    drop(input);
}
