//! `towpath send` and `towpath recv`, run as processes.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Output, Stdio};

use serde_json::Value;

fn towpath() -> Command {
    Command::new(env!("CARGO_BIN_EXE_towpath"))
}

/// A receiver, and its address.
struct Receiver {
    child: Child,
    stderr: BufReader<ChildStderr>,
    address: String,
}

impl Receiver {
    fn start(out: &Path) -> Self {
        let mut child = towpath()
            .args(["recv", "--listen", "127.0.0.1:0", "--json", "--timeout", "120", "--out"])
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

    /// Its exit code, standard output and standard error.
    fn finish(mut self) -> (Option<i32>, String, String) {
        let (mut printed, mut errors) = (String::new(), String::new());
        self.child.stdout.take().expect("a pipe").read_to_string(&mut printed).expect("text");
        self.stderr.read_to_string(&mut errors).expect("text");
        (self.child.wait().expect("its end").code(), printed, errors)
    }
}

fn send(file: &Path, to: &str, more: &[&str]) -> Output {
    let mut command = towpath();
    command.arg("send").arg(file).args(["--to", to, "--timeout", "120"]).args(more);
    command.output().expect("towpath starts")
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn json(text: &[u8]) -> Value {
    serde_json::from_slice(text).unwrap_or_else(|error| panic!("{error}: {}", String::from_utf8_lossy(text)))
}

/// A file of `len` pseudorandom bytes.
fn file(directory: &Path, len: usize) -> std::path::PathBuf {
    let path = directory.join("sent");
    let bytes: Vec<u8> =
        (0..len as u64).map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect();
    std::fs::write(&path, bytes).expect("a file");
    path
}

#[test]
fn a_file_arrives_complete_in_every_mode() {
    let directory = tempfile::tempdir().expect("a directory");
    for (len, more) in [
        (0, &["--mode", "zerocopy"][..]),
        (1, &["--mode", "zerocopy"]),
        (5_000_001, &["--mode", "zerocopy"]),
        (5_000_001, &["--mode", "zerocopy", "--message", "1000"]),
        (5_000_001, &["--mode", "plain"]),
        (100_000_001, &["--mode", "compare"]),
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
        // The header, the records and the checksum are sent too.
        let around = if len == 0 { 32 } else { 40 };
        assert_eq!(ways("zerocopy_bytes") + ways("plain_bytes"), len as u64 + around);
        let compare = more.contains(&"compare");
        let zerocopy = more.contains(&"zerocopy") && len > 100_000 || compare;
        if more.is_empty() {
            // A transfer of more than a second probes again whether the kernel copies.
            assert_eq!(ways("zerocopy_bytes"), ways("copied_bytes"), "{report}");
            assert!(report["plain"]["copying"].as_u64() > Some(0), "{report}");
        } else {
            assert_eq!(ways("zerocopy_bytes") > 0, zerocopy, "{report}");
        }
        if compare {
            // Alternating parts of 32 MiB; the third is shorter.
            assert!(ways("plain_bytes") > 32 << 20 && ways("zerocopy_bytes") > 32 << 20, "{report}");
            assert_eq!(report["plain"]["as-asked"], 32 << 20, "{report}");
            assert!(report["plain_cpu_seconds"].as_f64() > Some(0.0), "{report}");
            assert!(report["zerocopy_cpu_seconds"].as_f64() > Some(0.0), "{report}");
        }
    }
}

#[test]
fn the_report_has_bytes_by_path_and_advice() {
    let directory = tempfile::tempdir().expect("a directory");
    let receiver = Receiver::start(&directory.path().join("received"));
    let output = send(&file(directory.path(), 1 << 20), &receiver.address, &[]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    for part in [
        "sent 1.00 MiB in ",
        "zero copy ",
        "plain ",
        "  copying ",
        "CPU       sender",
        "advice: the receiver is on this machine",
    ] {
        assert!(text.contains(part), "{part:?} is not in:\n{text}");
    }
    assert_eq!(receiver.finish().0, Some(0));
}

#[test]
fn both_ends_report_a_full_disk() {
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
            b"twpsend2\x10\0\0\0\0\0\0\0\x10\0\0\0\0\0\0\0half of it",
            "ended the connection after 10 of 16 bytes; nothing is kept",
        ),
        (b"twpsend2\x02\0\0\0\0\0\0\0\x02\0\0\0\0\0\0\0ok\0\0\0\0\0\0\0\0wrongsum", "damaged in transit"),
        (b"twpsend2\x02\0\0\0\0\0\0\0\0\0\0\0\0\0\0\x80", "ended the connection after 0 of 2 bytes"),
        (b"twpsend2\x02\0\0\0\0\0\0\0\x03\0\0\0\0\0\0\x80", "sends more than it announced"),
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
fn other_clients_do_not_end_the_wait() {
    let directory = tempfile::tempdir().expect("a directory");
    let out = directory.path().join("received");
    let mut receiver = Receiver::start(&out);
    let connect = || TcpStream::connect(&receiver.address).expect("a connection");
    // More silent clients than may wait at once; the receiver closes the oldest one.
    let mut silent: Vec<_> = (0..20).map(|_| connect()).collect();
    assert_eq!(silent[0].read(&mut [0]).expect("its end"), 0);
    for says in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"twpsend1\0\0\0\0\0\0\0\0", b"twpsendx", b""] {
        let mut stream = connect();
        stream.write_all(says).expect("it listens");
        // It may have ended the connection already.
        let _ = stream.shutdown(std::net::Shutdown::Write);
        // The end, or a reset because of unread bytes.
        assert!(!matches!(stream.read(&mut [0]), Ok(1..)));
    }
    let sent = file(directory.path(), 100_000);
    let output = send(&sent, &receiver.address, &[]);
    assert!(output.status.success(), "{}", errors(&output));
    let mut said = String::new();
    for _ in 0..5 {
        receiver.stderr.read_line(&mut said).expect("a line");
    }
    assert!(said.contains("is not `towpath send`: its first bytes are \"\"; still waiting"), "{said}");
    let (code, _, rest) = receiver.finish();
    said += &rest;
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("its first bytes are \"GET / HTTP/1.1..\"; still waiting"), "{said}");
    assert!(std::fs::read(&sent).expect("a file") == std::fs::read(&out).expect("a file"));
}

#[test]
fn a_stream_goes_from_standard_input_to_standard_output() {
    let directory = tempfile::tempdir().expect("a directory");
    for len in [0, 1, 3_000_001] {
        let sent = file(directory.path(), len);
        let mut receiver = Receiver::start(Path::new("-"));
        let mut stdout = receiver.child.stdout.take().expect("a pipe");
        let got = std::thread::spawn(move || {
            let mut got = Vec::new();
            stdout.read_to_end(&mut got).map(|_| got)
        });
        let output = towpath()
            .args(["send", "-", "--json", "--to", &receiver.address])
            .stdin(std::fs::File::open(&sent).expect("a file"))
            .output()
            .expect("towpath starts");
        assert!(output.status.success(), "{}", errors(&output));
        assert_eq!(json(&output.stdout)["bytes"], len);
        let got = got.join().expect("it does not panic").expect("bytes");
        assert!(got == std::fs::read(&sent).expect("a file"), "{len}");
        let mut said = String::new();
        receiver.stderr.read_to_string(&mut said).expect("text");
        assert_eq!(receiver.child.wait().expect("its end").code(), Some(0), "{said}");
        assert_eq!(json(said.as_bytes())["bytes"], len, "the report is on standard error");
    }
}

#[test]
fn holes_stay_holes() {
    use std::os::unix::fs::{FileExt, MetadataExt};

    let directory = tempfile::tempdir().expect("a directory");
    let (sent, out) = (directory.path().join("sparse"), directory.path().join("received"));
    let file = std::fs::File::create(&sent).expect("a file");
    file.write_all_at(&[7; 5000], 16 << 20).expect("bytes");
    file.write_all_at(b"before the last hole", 40 << 20).expect("bytes");
    file.set_len(64 << 20).expect("a length");
    for out in [out.as_path(), Path::new("-")] {
        let mut receiver = Receiver::start(out);
        let mut stdout = receiver.child.stdout.take().expect("a pipe");
        let got = std::thread::spawn(move || {
            let mut got = Vec::new();
            stdout.read_to_end(&mut got).map(|_| got)
        });
        let output = send(&sent, &receiver.address, &["--json"]);
        assert!(output.status.success(), "{}", errors(&output));
        let got = got.join().expect("it does not panic").expect("bytes");
        assert_eq!(receiver.child.wait().expect("its end").code(), Some(0));
        let report = json(&output.stdout);
        assert_eq!((&report["bytes"], &report["changed"]), (&(64 << 20).into(), &false.into()));
        let got = if out == Path::new("-") { got } else { std::fs::read(out).expect("a file") };
        assert!(got == std::fs::read(&sent).expect("a file"));
        if file.metadata().expect("a file").blocks() < 1000 {
            // The file system has holes.
            assert!(report["hole_bytes"].as_u64() > Some(60 << 20), "{report}");
            assert!(out == Path::new("-") || std::fs::metadata(out).expect("a file").blocks() < 1000);
        }
    }
}

#[test]
fn the_sender_reports_a_peer_that_is_not_a_receiver() {
    let directory = tempfile::tempdir().expect("a directory");
    let sent = file(directory.path(), 100_000);
    for (says, expected) in [
        (&b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"[..], "it is not `towpath recv`"),
        (b"", "without an answer"),
        // A receiver that sends keepalives, then reports a full disk.
        (b"\0\0\0twprecv1\x02\0\0\0\0\0\0\0aaaaaaaabbbbbbbbcccccccc", "the receiver's disk is full"),
        (b"\0\0\0twprecv1\x02", "its answer is truncated"),
        (b"\0\0", "without an answer"),
    ] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address").to_string();
        let stranger = std::thread::spawn(move || {
            let mut stream = listener.accept().expect("the sender").0;
            stream.read_exact(&mut vec![0; 100_040]).expect("all of it");
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

#[test]
fn a_received_file_has_the_permissions_of_a_new_file_or_of_the_replaced_one() {
    use std::os::unix::fs::PermissionsExt;

    let directory = tempfile::tempdir().expect("a directory");
    let (sent, out) = (file(directory.path(), 1000), directory.path().join("received"));
    let mode = |path: &Path| std::fs::metadata(path).expect("a file").permissions().mode() & 0o777;
    for before in [None, Some(0o640), Some(0o666)] {
        if let Some(before) = before {
            std::fs::set_permissions(&out, PermissionsExt::from_mode(before)).expect("its owner");
        }
        let receiver = Receiver::start(&out);
        assert!(send(&sent, &receiver.address, &[]).status.success());
        assert_eq!(receiver.finish().0, Some(0));
        assert_eq!(mode(&out), before.unwrap_or(mode(&sent)));
    }
}

#[test]
fn a_receiver_that_is_killed_leaves_nothing_behind() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut receiver = Receiver::start(&directory.path().join("received"));
    let mut stream = TcpStream::connect(&receiver.address).expect("a connection");
    stream.write_all(b"twpsend2\0\0\0\x10\0\0\0\0\0\0\0\x10\0\0\0\0").expect("it listens");
    // More bytes than the socket buffers hold, so the receiver has written a part.
    stream.write_all(&vec![7; 64 << 20]).expect("it takes");
    let (sent, address) = (file(&tempfile::tempdir().expect("a directory").keep(), 1000), &receiver.address);
    let second = send(&sent, address, &[]);
    assert!(errors(&second).contains("is `towpath recv` running there?"), "one sender, and no second");
    std::fs::remove_dir_all(sent.parent().expect("its directory")).expect("the sender's file");
    receiver.child.kill().expect("it runs");
    receiver.child.wait().expect("its end");
    let left: Vec<_> = std::fs::read_dir(directory.path()).expect("a directory").collect();
    // On a file system without O_TMPFILE, the file of a killed program remains.
    if makes_nameless_files(directory.path()) {
        assert!(left.is_empty(), "{left:?}");
    }
}

/// Whether the file system makes files without names (O_TMPFILE).
fn makes_nameless_files(directory: &Path) -> bool {
    use rustix::fs::{Mode, OFlags, open};
    open(directory, OFlags::TMPFILE | OFlags::WRONLY, Mode::RUSR | Mode::WUSR).is_ok()
}

#[test]
fn invalid_arguments_fail_before_any_wait() {
    let directory = tempfile::tempdir().expect("a directory");
    let fifo = directory.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let output = send(&fifo, "127.0.0.1:1", &[]);
    assert!(errors(&output).contains("not a file"), "{}", errors(&output));
    let output = send(directory.path(), "127.0.0.1:1", &[]);
    assert!(errors(&output).contains("a directory; one file is sent. Use rsync"), "{}", errors(&output));
    let missing = directory.path().join("missing/file");
    let rows = [
        (fifo.as_path(), "127.0.0.1:0", 1, "this FIFO has no reader"),
        (missing.as_path(), "127.0.0.1:0", 1, "missing/file: No such file or directory"),
        (Path::new("copy"), "9000", 64, "expected ADDRESS:PORT"),
        (Path::new("copy"), "127.0.0.1", 64, "expected ADDRESS:PORT"),
    ];
    for (out, listen, code, expected) in rows {
        let output = towpath()
            .current_dir(directory.path())
            .args(["recv", "--listen", listen, "--out"])
            .arg(out)
            .output()
            .expect("towpath starts");
        assert_eq!(output.status.code(), Some(code), "{}", errors(&output));
        assert!(errors(&output).contains(expected), "{expected:?} is not in {}", errors(&output));
    }
}
