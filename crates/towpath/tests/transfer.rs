//! `towpath send` and `towpath recv`, from the outside.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use serde_json::Value;

fn towpath() -> Command {
    Command::new(env!("CARGO_BIN_EXE_towpath"))
}

/// A receiver that listens, and where.
struct Receiver {
    child: Child,
    stderr: BufReader<ChildStderr>,
    address: String,
}

impl Receiver {
    fn start(out: &Path) -> Self {
        let mut child = towpath()
            .args(["recv", "--listen", "127.0.0.1:0", "--json", "--timeout", "20", "--out"])
            .arg(out)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("towpath starts");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("a line");
        let address =
            line.strip_prefix("listening on ").unwrap_or_else(|| panic!("{line}")).trim().to_owned();
        Self { child, stderr, address }
    }

    /// Its exit code, what it printed, and its errors.
    fn finish(mut self) -> (Option<i32>, String, String) {
        let (mut printed, mut errors) = (String::new(), String::new());
        self.child.stdout.take().expect("a pipe").read_to_string(&mut printed).expect("text");
        self.stderr.read_to_string(&mut errors).expect("text");
        (self.child.wait().expect("its end").code(), printed, errors)
    }
}

fn send(file: &Path, to: &str, more: &[&str]) -> Output {
    let mut command = towpath();
    command.arg("send").arg(file).args(["--to", to, "--timeout", "20"]).args(more);
    command.output().expect("towpath starts")
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(text: &[u8]) -> Value {
    serde_json::from_slice(text).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(text)))
}

/// Bytes of which no two parts are alike.
fn file(directory: &Path, len: usize) -> std::path::PathBuf {
    let path = directory.join("sent");
    let bytes: Vec<u8> =
        (0..len as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    std::fs::write(&path, bytes).expect("a file");
    path
}

#[test]
fn a_file_arrives_whole_whichever_way_it_goes() {
    let directory = tempfile::tempdir().expect("a directory");
    for (len, more) in [
        (0, &["--mode", "zerocopy"][..]),
        (1, &["--mode", "zerocopy"]),
        (5_000_001, &["--mode", "zerocopy"]),
        (5_000_001, &["--mode", "zerocopy", "--message", "1000"]),
        (5_000_001, &["--mode", "plain"]),
        (5_000_001, &[]),
    ] {
        let (sent, out) = (file(directory.path(), len), directory.path().join("received"));
        std::fs::write(&out, "what was there before").expect("a file");
        let receiver = Receiver::start(&out);
        let output = send(&sent, &receiver.address, &[&["--json"], more].concat());
        assert!(output.status.success(), "{}", errors(&output));
        let (code, printed, said) = receiver.finish();
        assert_eq!(code, Some(0), "{said}");
        assert!(std::fs::read(&sent).expect("a file") == std::fs::read(&out).expect("a file"));

        let (report, received) = (json(&output.stdout), json(printed.as_bytes()));
        assert_eq!((&report["bytes"], &received["bytes"]), (&len.into(), &len.into()));
        assert_eq!(report["checksum"], received["checksum"]);
        let ways = |way: &str| report[way].as_u64().expect("a number");
        // The header and the checksum are sent too.
        assert_eq!(ways("zerocopy_bytes") + ways("plain_bytes"), len as u64 + 24);
        let zerocopy = more.contains(&"zerocopy") && len > 100_000;
        assert_eq!(ways("zerocopy_bytes") > 0, zerocopy, "{report}");
    }
}

#[test]
fn the_report_tells_what_went_which_way_and_what_to_do() {
    let directory = tempfile::tempdir().expect("a directory");
    let receiver = Receiver::start(&directory.path().join("received"));
    let output = send(&file(directory.path(), 1 << 20), &receiver.address, &[]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for part in [
        "sent 1.00 MiB in ",
        "zero copy 0 B",
        "  copying 1.00 MiB",
        "CPU       sender",
        "advice: the receiver is on this machine",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    assert_eq!(receiver.finish().0, Some(0));
}

#[test]
fn a_full_disk_is_told_at_both_ends() {
    if !Path::new("/dev/full").exists() {
        return println!("skipped: no /dev/full");
    }
    let directory = tempfile::tempdir().expect("a directory");
    let receiver = Receiver::start(Path::new("/dev/full"));
    let output = send(&file(directory.path(), 30_000_000), &receiver.address, &[]);
    assert_eq!(output.status.code(), Some(1));
    assert!(errors(&output).contains("the receiver's disk is full"), "{}", errors(&output));
    let (code, _, said) = receiver.finish();
    assert_eq!(code, Some(1));
    assert!(said.contains("No space left"), "{said}");
}

#[test]
fn a_sender_that_stops_leaves_no_file() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("received");
    let rows: [(&[u8], &str); 4] = [
        (
            b"twpsend1\x10\0\0\0\0\0\0\0half of it",
            "ended the connection after 10 of 16 bytes; nothing is kept",
        ),
        (b"twpsend1\x02\0\0\0\0\0\0\0okwrongsum", "damaged on the way"),
        (b"GET / HTTP/1.1\r\n\r\n", "is no `towpath send`: what it says first is \"GET / HTTP/1.1..\""),
        (b"", "is no `towpath send`"),
    ];
    for (says, expected) in rows {
        let receiver = Receiver::start(&out);
        let mut stream = TcpStream::connect(&receiver.address).expect("a connection");
        stream.write_all(says).expect("it listens");
        drop(stream);
        let (code, _, said) = receiver.finish();
        assert_eq!(code, Some(1), "{said}");
        assert!(said.contains(expected), "{expected:?} is not in {said}");
        assert!(!out.exists());
    }
}

#[test]
fn a_stranger_at_the_other_end_is_told() {
    let directory = tempfile::tempdir().expect("a directory");
    let sent = file(directory.path(), 100_000);
    for (says, expected) in [
        (&b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"[..], "it is no `towpath recv`"),
        (b"", "without an answer"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address").to_string();
        let stranger = std::thread::spawn(move || {
            let mut stream = listener.accept().expect("the sender").0;
            stream.read_exact(&mut vec![0; 100_024]).expect("all of it");
            stream.write_all(says).expect("it listens");
        });
        let output = send(&sent, &address, &[]);
        stranger.join().expect("the stranger");
        assert_eq!(output.status.code(), Some(1));
        assert!(errors(&output).contains(expected), "{}", errors(&output));
    }
    let output = send(&sent, "127.0.0.1:1", &[]);
    assert!(errors(&output).contains("is `towpath recv` running there?"), "{}", errors(&output));
    let output = send(&directory.path().join("missing"), "127.0.0.1:1", &[]);
    assert!(errors(&output).contains("missing: No such file"), "{}", errors(&output));
}
