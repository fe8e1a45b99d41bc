//! Compiles C programs against the header and the library, and runs them with real engines.

mod engine;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use engine::towpath;

/// A directory with the library under its link name, and the compiled programs.
struct CompileDir {
    directory: tempfile::TempDir,
}

fn crate_path(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// The path of a library of this crate, next to this test's executable.
fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("this test");
    test.with_file_name(name)
}

impl CompileDir {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        for (name, as_name) in [
            ("libtowpath_capi.so", "libtowpath.so"),
            ("libtowpath_capi.so", "libtowpath.so.1"),
            ("libtowpath_capi.a", "static/libtowpath.a"),
        ] {
            let to = directory.path().join(as_name);
            std::fs::create_dir_all(to.parent().expect("a directory")).expect("a directory");
            std::os::unix::fs::symlink(built(name), to).expect("a link");
        }
        Self { directory }
    }

    fn compile(&self, source: &str, libraries: &[&str]) -> PathBuf {
        let program = self.directory.path().join(Path::new(source).file_stem().expect("a name"));
        let here = self.directory.path().display();
        let output = Command::new("cc")
            .args(["-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic", "-D_POSIX_C_SOURCE=200809L", "-I"])
            .arg(crate_path("include"))
            .arg(crate_path(source))
            .arg("-o")
            .arg(&program)
            .arg(format!("-Wl,-rpath,{here}"))
            .args(libraries)
            .output()
            .expect("cc starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        program
    }

    fn program(&self, source: &str) -> PathBuf {
        self.compile(source, &[&format!("-L{}", self.directory.path().display()), "-ltowpath"])
    }
}

#[towpath_testenv::needs("cc")]
#[test]
fn invalid_calls_fail() {
    let dir = CompileDir::new();
    let output = Command::new(dir.program("tests/refusals.c")).output().expect("starting the program");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn replay(rules: &Path, command: &str, mark: Option<&Path>) -> Value {
    let mut replay = towpath();
    replay.arg("replay").arg(crate_path("../../examples/office.pcap")).arg("--rules").arg(rules);
    replay.args(["--json", "--deadline", "60", "--queue", &format!("1={command}")]);
    if let Some(mark) = mark {
        replay.env("TOWPATH_MARK", mark);
    }
    let output = replay.output().expect("towpath starts");
    assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("a report")
}

fn number(queue: &Value, key: &str) -> u64 {
    queue[key].as_u64().unwrap_or_else(|| panic!("{key} of {queue}"))
}

#[towpath_testenv::needs("cc")]
#[test]
fn c_and_rust_inspectors_return_the_same_verdicts() {
    let dir = CompileDir::new();
    let rules = crate_path("../../examples/office.ipfw");
    let inspector = dir.program("examples/inspector.c");
    let ours = replay(&rules, &format!("{} password=", inspector.display()), None);
    let peers = replay(&rules, "towpath inspect --queue 1 --match password= --verdict drop", None);
    for key in ["packets", "passed", "dropped"] {
        assert_eq!(ours[key], peers[key], "{key}");
    }
    let (ours, peers) = (&ours["queues"][0], &peers["queues"][0]);
    for key in ["frames", "passed", "dropped", "lost"] {
        assert_eq!(number(ours, key), number(peers, key), "{key}");
    }
    assert!(number(ours, "dropped") > 0 && number(ours, "passed") > 0);
}

#[towpath_testenv::needs("cc")]
#[test]
fn verdicts_of_every_kind() {
    let dir = CompileDir::new();
    let rules = dir.directory.path().join("rules.ipfw");
    std::fs::write(&rules, "add inspect 1 ip4 from any to any\nadd allow all from any to any\n")
        .expect("rules");
    let program = dir.program("tests/verdicts.c");
    let mark = dir.directory.path().join("mark");
    for mode in ["single", "upto", "hold", "upper", "loop"] {
        let report = replay(&rules, &format!("{} {mode}", program.display()), Some(&mark));
        let queue = &report["queues"][0];
        let frames = number(queue, "frames");
        let [passed, dropped, replaced, lost] =
            ["passed", "dropped", "replaced", "lost"].map(|key| number(queue, key));
        assert!(frames > 100 && lost == 0, "{mode}: {queue}");
        match mode {
            "single" => assert_eq!((dropped, passed), (frames.div_ceil(2), frames / 2)),
            "upto" => assert!(dropped > 0 && passed == frames - dropped, "{queue}"),
            "upper" => assert_eq!(replaced, frames),
            _ => assert_eq!(passed, frames, "{mode}"),
        }
        std::fs::remove_file(&mark).unwrap_or_else(|_| panic!("{mode} did not complete"));
    }
}

/// Lines; the payload excludes the line end.
const FRAMING: &str = r#"delimiter="\n" strip=delimiter"#;

struct Front {
    child: Child,
    stderr: BufReader<ChildStderr>,
    address: String,
}

impl Front {
    fn start(worker: &str) -> Self {
        Self::with(worker, &[])
    }

    /// Starts a mux with further arguments.
    fn with(worker: &str, more: &[&str]) -> Self {
        Self::framed(FRAMING, worker, more)
    }

    fn framed(framing: &str, worker: &str, more: &[&str]) -> Self {
        let mut child = towpath()
            .args([
                "mux",
                "127.0.0.1:0",
                "--framing",
                framing,
                "--order",
                "replies",
                "--workers",
                "2",
                "--worker",
            ])
            .arg(worker)
            .args(more)
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

    fn connect(&self) -> BufReader<TcpStream> {
        let stream = TcpStream::connect(&self.address).expect("connecting to the mux");
        stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
        BufReader::new(stream)
    }

    /// Reads lines until one contains `text`, and returns it.
    fn until(&mut self, text: &str) -> String {
        let mut line = String::new();
        while !line.contains(text) {
            line.clear();
            assert!(self.stderr.read_line(&mut line).expect("text") > 0, "it ended without {text}");
        }
        line
    }

    /// Drains the mux and checks its report for success.
    fn finish(mut self, messages: u64) {
        let pid = Pid::from_raw(self.child.id() as i32).expect("a process");
        kill_process(pid, Signal::TERM).expect("signalling the mux");
        let mut said = String::new();
        self.stderr.read_to_string(&mut said).expect("text");
        assert_eq!(self.child.wait().expect("waiting for the end").code(), Some(0), "{said}");
        let noun = if messages == 1 { "message" } else { "messages" };
        assert!(said.contains(&format!("{messages} {noun}: {messages} done")), "{said}");
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            let mut said = String::new();
            let _ = self.stderr.read_to_string(&mut said);
            eprintln!("output: {said}");
        }
    }
}

fn line(stream: &mut BufReader<TcpStream>) -> String {
    let mut line = String::new();
    stream.read_line(&mut line).expect("an answer");
    line
}

#[towpath_testenv::needs("cc")]
#[test]
fn c_workers_answer_messages() {
    let dir = CompileDir::new();
    let program = dir.program("tests/messages.c");
    for mode in ["wait", "loop", "signal", "full", "serve"] {
        let front = Front::start(&format!("{} {mode}", program.display()));
        let mut stream = front.connect();
        let long = "x".repeat(100_000);
        for text in ["hello", "", &long] {
            writeln!(stream.get_mut(), "{text}").expect("writing to the connection");
            let mut answers = [line(&mut stream), line(&mut stream)];
            answers.sort();
            assert_eq!(answers, [format!("a {text}\n"), "sent\n".into()], "{mode}");
        }
        let asked: String = (0..500).map(|n| format!("{n}\n")).collect();
        stream.get_mut().write_all(asked.as_bytes()).expect("writing to the connection");
        let answers: String = (0..1000).map(|_| line(&mut stream)).collect();
        let expected: String = (0..500).map(|n| format!("a {n}\n")).collect();
        // A message of the other worker may leave between two parts of an answer.
        assert_eq!(answers.replace("sent\n", ""), expected, "{mode}");
        drop(stream);
        front.finish(503);
    }
}

#[towpath_testenv::needs("cc")]
#[test]
fn c_workers_get_events_and_close_connections() {
    let dir = CompileDir::new();
    let program = dir.program("tests/messages.c");
    let front = Front::start(&format!("{} events", program.display()));
    let mut observer = front.connect();
    line(&mut observer);
    let mut ends = std::collections::BTreeSet::new();
    for (words, last) in [("quit", "bye\n"), ("reset", ""), ("", "")] {
        let mut stream = front.connect();
        let local = stream.get_ref().local_addr().expect("an address");
        let greeting = line(&mut stream);
        assert!(greeting.starts_with(&format!("hello {local} 127.0.0.1:")), "{greeting}");
        assert!(greeting.ends_with(" 0///\n"), "{greeting}");
        if !words.is_empty() {
            writeln!(stream.get_mut(), "{words}").expect("writing to the connection");
            let mut rest = String::new();
            let end = stream.read_to_string(&mut rest);
            assert_eq!((end.is_err(), &*rest), (words == "reset", last), "{words}");
        }
    }
    // Closed by a worker, reset by a worker, closed by the peer.
    while ends.len() < 3 {
        writeln!(observer.get_mut(), "ends").expect("writing to the connection");
        ends.extend(line(&mut observer).split_whitespace().map(str::to_owned));
    }
    assert_eq!(ends.into_iter().collect::<Vec<_>>(), ["0", "16", "17"]);
}

/// The client's certificate is also the CA.
#[towpath_testenv::needs("cc", "openssl")]
#[test]
fn c_workers_get_the_names_of_tls() {
    let dir = CompileDir::new();
    let program = dir.program("tests/messages.c");
    let file = |name: &str| dir.directory.path().join(name).to_str().expect("UTF-8").to_owned();
    let (cert, key) = (file("cert.pem"), file("key.pem"));
    certificate(dir.directory.path(), "DNS:device.example,URI:urn:device:7");
    let files = format!("{cert},{key}");
    let front =
        Front::with(&format!("{} events", program.display()), &["--tls", &files, "--tls-client-ca", &cert]);
    // timeout(1): if the worker cannot start, s_client waits forever.
    let mut client = Command::new("timeout")
        .args([
            "60",
            "openssl",
            "s_client",
            "-quiet",
            "-connect",
            &front.address,
            "-cert",
            &cert,
            "-key",
            &key,
        ])
        .args(["-servername", "mux.example"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("openssl starts");
    let mut greeting = String::new();
    let mut lines = BufReader::new(client.stdout.take().expect("a pipe"));
    lines.read_line(&mut greeting).expect("text");
    // With -quiet, s_client does not end with its input. timeout(1) passes SIGTERM on to it.
    let id = rustix::process::Pid::from_child(&client);
    rustix::process::kill_process(id, rustix::process::Signal::TERM).expect("it runs");
    client.wait().expect("it ends");
    assert!(greeting.ends_with(" 1/mux.example//device.example,urn:device:7\n"), "{greeting}");
}

#[towpath_testenv::needs("cc")]
#[test]
fn c_workers_get_their_unsent_messages() {
    let dir = CompileDir::new();
    let program = dir.program("tests/messages.c");
    let front = Front::start(&format!("{} unsent", program.display()));
    let mut kept = front.connect();
    writeln!(kept.get_mut(), "keep").expect("writing to the connection");
    assert_eq!(line(&mut kept), "kept\n");
    drop(kept);
    // The worker that kept the connection sends until the mux has seen its end.
    let mut stream = front.connect();
    for word in ["send", "unsent"].iter().cycle() {
        writeln!(stream.get_mut(), "{word}").expect("writing to the connection");
        let answer = line(&mut stream);
        if answer == "unsent late\n" {
            break;
        }
        assert!(["none\n", "sent\n"].contains(&&*answer), "{answer}");
    }
}

const STREAM: &str = "http1 body=stream";

/// Sends the head of an upload, and the rest when the worker has answered its first part. Returns the first two words of the answer, and
/// the number of parts.
fn upload(stream: &mut BufReader<TcpStream>, head: &str, rest: &[u8]) -> (String, u32) {
    write!(stream.get_mut(), "POST / HTTP/1.1\r\nHost: a\r\n{head}\r\n\r\n").expect("open");
    assert_eq!(line(stream) + &line(stream), "HTTP/1.1 100 Continue\r\n\r\n");
    stream.get_mut().write_all(rest).expect("open");
    assert_eq!(line(stream), "HTTP/1.1 200 OK\r\n");
    let length = line(stream).trim().strip_prefix("Content-Length: ").expect("it is the only field").parse();
    assert_eq!(line(stream), "\r\n");
    let mut text = vec![0; length.expect("a number")];
    stream.read_exact(&mut text).expect("the body");
    let text = String::from_utf8(text).expect("text");
    let (sum, parts) = text.rsplit_once(' ').expect("three words");
    (sum.to_owned(), parts.parse().expect("a number"))
}

/// The number of bytes and their FNV-1a.
fn checksum(bytes: &[u8]) -> String {
    let add = |sum: u64, byte: &u8| (sum ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
    format!("{} {:x}", bytes.len(), bytes.iter().fold(0xcbf2_9ce4_8422_2325, add))
}

#[towpath_testenv::needs("cc")]
#[test]
fn c_workers_get_uploads_of_8_mib_in_parts() {
    const BYTES: usize = 8 << 20;
    let dir = CompileDir::new();
    let program = dir.program("tests/parts.c");
    let body: Vec<u8> =
        (0..BYTES as u64 / 8).flat_map(|at| at.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes()).collect();
    // The chunk lines and the trailers are bytes of the message.
    let mut chunks = Vec::new();
    for chunk in [&body[..1], &body[1..5_000_000], &body[5_000_000..]] {
        write!(chunks, "{:x}\r\n", chunk.len()).expect("memory");
        chunks.extend_from_slice(chunk);
        chunks.extend(b"\r\n");
    }
    chunks.extend(b"0\r\nChecked: no\r\n\r\n");
    for mode in ["recv", "serve"] {
        let front = Front::framed(STREAM, &format!("{} {mode}", program.display()), &[]);
        let mut stream = front.connect();
        for (head, rest) in
            [(format!("Content-Length: {BYTES}"), &body), ("Transfer-Encoding: chunked".into(), &chunks)]
        {
            let (sum, parts) = upload(&mut stream, &head, rest);
            assert_eq!(sum, checksum(rest), "{mode}: {head}");
            // The head alone, and parts of up to 256 KiB.
            assert!(parts > 32, "{mode}: {head}: {parts}");
        }
        drop(stream);
        front.finish(2);
    }
}

#[towpath_testenv::needs("cc")]
#[test]
fn c_workers_learn_that_an_upload_was_cut() {
    let dir = CompileDir::new();
    let program = dir.program("tests/parts.c");
    for mode in ["recv", "serve"] {
        let mut front = Front::framed(STREAM, &format!("{} {mode}", program.display()), &[]);
        let mut stream = front.connect();
        write!(stream.get_mut(), "POST / HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n").expect("open");
        assert_eq!(line(&mut stream), "HTTP/1.1 100 Continue\r\n");
        drop(stream);
        assert_eq!(front.until("cut after"), "cut after 0 bytes\n");
        // The worker continues with the next upload.
        let (sum, parts) = upload(&mut front.connect(), "Content-Length: 100000", &[b'x'; 100_000]);
        assert_eq!(sum, checksum(&[b'x'; 100_000]), "{mode}");
        assert!(parts > 1, "{mode}");
    }
}

#[towpath_testenv::needs("cc")]
#[test]
fn c_workers_without_parts_are_refused() {
    let dir = CompileDir::new();
    let program = dir.program("tests/parts.c");
    let output = towpath()
        .args([
            "mux",
            "127.0.0.1:0",
            "--framing",
            STREAM,
            "--worker",
            &format!("{} whole", program.display()),
        ])
        .output()
        .expect("towpath starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("C: TOWPATH_PARTS"), "{said}");
}

#[towpath_testenv::needs("cc")]
#[test]
fn the_worker_example_links_shared_and_static() {
    let dir = CompileDir::new();
    let library = dir.directory.path().join("static/libtowpath.a").display().to_string();
    // docs/book/src/reference/c.md lists the libraries that the archive needs.
    let linked = ["shared", "static"].map(|how| match how {
        "static" => dir.compile(
            "examples/worker.c",
            &[&library, "-lgcc_s", "-lutil", "-lrt", "-lpthread", "-lm", "-ldl"],
        ),
        _ => dir.program("examples/worker.c"),
    });
    for program in linked {
        let front = Front::start(&program.display().to_string());
        let mut stream = front.connect();
        stream.get_mut().write_all(b"hello\n").expect("writing to the connection");
        assert_eq!(line(&mut stream), "HELLO\n");
        drop(stream);
        front.finish(1);
    }
}

#[towpath_testenv::needs("cc")]
#[test]
fn the_installed_files_suffice() {
    let dir = CompileDir::new();
    let prefix = dir.directory.path().join("installed");
    let script = Command::new(crate_path("install")).arg(&prefix).arg(built("")).output().expect("sh");
    assert!(script.status.success(), "{}", String::from_utf8_lossy(&script.stderr));
    let config = std::fs::read_to_string(prefix.join("lib/pkgconfig/towpath.pc")).expect("towpath.pc");
    assert!(config.contains(&format!("Version: {}\n", env!("CARGO_PKG_VERSION"))), "{config}");
    // Like pkg-config, which may not be installed.
    let flags: Vec<&str> = config
        .lines()
        .filter_map(|line| line.strip_prefix("Cflags: ").or(line.strip_prefix("Libs: ")))
        .flat_map(|flags| flags.split(' '))
        .collect();
    let program = prefix.join("refusals");
    let output = Command::new("cc")
        .arg(crate_path("tests/refusals.c"))
        .arg("-D_GNU_SOURCE")
        .arg("-o")
        .arg(&program)
        .args(flags)
        .output()
        .expect("cc");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let status = Command::new(program)
        .env("LD_LIBRARY_PATH", prefix.join("lib"))
        .status()
        .expect("starting the program");
    assert!(status.success());
}

#[towpath_testenv::needs("cc")]
#[test]
fn each_buffer_is_reclaimed_once() {
    let dir = CompileDir::new();
    let program = dir.program("tests/lending.c");
    for choice in ["0", "1", "2"] {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = listener.local_addr().expect("an address").port().to_string();
        let lending = Command::new(&program)
            .args([&port, choice, "100"])
            .stdin(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("starting the program");
        let mut all = Vec::new();
        listener.accept().expect("accepting the connection").0.read_to_end(&mut all).expect("bytes");
        let output = lending.wait_with_output().expect("waiting for the end");
        assert!(output.status.success(), "{choice}: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(all.len(), 100 * 100_000);
        assert!(all.chunks(100_000).enumerate().all(|(n, bytes)| bytes.iter().all(|&byte| byte == n as u8)));
    }
}

#[towpath_testenv::needs("cc")]
#[test]
fn a_sender_reports_a_reset() {
    let dir = CompileDir::new();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port().to_string();
    let program = dir.program("tests/lending.c");
    let lending = Command::new(program)
        .args([&port, "1"])
        .stdin(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .expect("starting the program");
    let (stream, _) = listener.accept().expect("accepting the connection");
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).expect("SO_LINGER");
    drop(stream);
    let output = lending.wait_with_output().expect("waiting for the end");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[towpath_testenv::needs("cc")]
#[test]
fn the_sender_example() {
    let dir = CompileDir::new();
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port().to_string();
    let file = dir.directory.path().join("libtowpath.so");
    let program = dir.program("examples/sender.c");
    let sending = Command::new(program)
        .args(["127.0.0.1", &port])
        .arg(&file)
        .stdout(Stdio::piped())
        .spawn()
        .expect("starting the program");
    let mut all = Vec::new();
    listener.accept().expect("accepting the connection").0.read_to_end(&mut all).expect("bytes");
    let output = sending.wait_with_output().expect("waiting for the end");
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains(" plain"));
    assert!(all == std::fs::read(file).expect("the file"));
}

#[towpath_testenv::needs("cc")]
#[test]
fn mux_handles() {
    let dir = CompileDir::new();
    let output = Command::new(dir.program("tests/handles.c")).output().expect("starting the program");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// Makes a self-signed certificate with these names, `cert.pem` with `key.pem`.
fn certificate(directory: &Path, names: &str) {
    let output = Command::new("openssl")
        .args(
            "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -keyout key.pem -out cert.pem"
                .split(' '),
        )
        .args(["-addext", &format!("subjectAltName={names}")])
        // rustls refuses the certificate of an authority as that of a server.
        .args(["-addext", "basicConstraints=critical,CA:FALSE"])
        .current_dir(directory)
        .output()
        .expect("openssl starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[towpath_testenv::needs("cc", "openssl")]
#[test]
fn mux_framings_listeners_and_events() {
    let dir = CompileDir::new();
    let program = dir.program("tests/server.c");
    let directory = tempfile::tempdir().expect("a directory");
    certificate(directory.path(), "DNS:localhost,IP:127.0.0.1");
    // Another one, for renewals.
    for name in ["cert.pem", "key.pem"] {
        std::fs::rename(directory.path().join(name), directory.path().join(format!("other-{name}")))
            .expect("it is there");
    }
    certificate(directory.path(), "DNS:localhost,IP:127.0.0.1");
    let output = Command::new(program).current_dir(directory.path()).output().expect("starting the program");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[towpath_testenv::needs("cc")]
#[test]
fn the_mux_example() {
    let dir = CompileDir::new();
    let mut server = Command::new(dir.program("examples/mux.c"))
        .arg("127.0.0.1:0")
        .stdout(Stdio::piped())
        .spawn()
        .expect("starting the program");
    let mut said = String::new();
    BufReader::new(server.stdout.take().expect("a pipe")).read_line(&mut said).expect("a line");
    let port = said.trim().strip_prefix("port ").expect("the port");
    let stream = TcpStream::connect(format!("127.0.0.1:{port}")).expect("connecting to the mux");
    stream.set_read_timeout(Some(Duration::from_secs(60))).expect("a timeout");
    let mut stream = BufReader::new(stream);
    let answers: Vec<String> = ["hello", "world"]
        .map(|text| {
            writeln!(stream.get_mut(), "{text}").expect("writing to the connection");
            line(&mut stream)
        })
        .into();
    server.kill().expect("stopping the program");
    server.wait().expect("waiting for the end");
    assert_eq!(answers, ["HELLO\n", "WORLD\n"]);
}

/// The example prints the states that exist, and then each change.
#[towpath_testenv::needs("cc", netns)]
#[test]
fn the_example_follows_states() {
    towpath_port::netns::within(|| {
        let dir = CompileDir::new();
        let program = dir.program("examples/follow.c");
        let engine = engine::Running::start();
        engine.flow(7001);
        let mut follower =
            Command::new(program).arg(engine.ring()).stdout(Stdio::piped()).spawn().expect("a program");
        let lines = BufReader::new(follower.stdout.take().expect("its output")).lines();
        let mut lines =
            lines.map(|line| serde_json::from_str::<Value>(&line.expect("a line")).expect("JSON"));
        // The state is in the dump or, if its packet arrived later, an event.
        let first = lines.by_ref().find(|line| {
            let states = line["states"].as_array().cloned().unwrap_or_default();
            line["dst_port"] == 7001 || states.iter().any(|state| state["dst_port"] == 7001)
        });
        assert!(first.is_some());
        engine.flow(7002);
        let event = lines.by_ref().find(|line| line["dst_port"] == 7002).expect("an event");
        assert_eq!((&event["event"], &event["rule"]), (&"created".into(), &100.into()));
        drop(engine);
        assert!(follower.wait().expect("its end").success());
    });
}
