//! `towpath ctl` with a running `towpath replay`: queries, traces, and hostile clients.
//!
//! The engine runs for as long as its standard input, a capture, is open. No test waits for a fixed time: a query is
//! repeated until it has the expected result.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Output, Stdio};

use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};
use serde_json::{Value, json};
use towpath_port::pcap::Reader;
use towpath_port::{Burst, Port, Received};

use crate::child::assert_runs;
use crate::example::example;

/// Maximum number of repetitions of a query. Each one starts a process, so all of them take minutes.
const TRIES: usize = 20_000;

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn troublesome(words: &str) -> String {
    format!("1={} {words}", example("troublesome"))
}

/// A replay whose capture is still being made.
struct Engine {
    directory: tempfile::TempDir,
    child: Child,
    capture: Option<ChildStdin>,
    packets: u32,
}

impl Engine {
    fn start(more: &[&str]) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let rules = directory.path().join("rules.ipfw");
        fs::write(&rules, "add inspect 1 udp from any to any\nadd allow ip from any to any\n").unwrap();
        let socket = directory.path().join("ctl.sock");
        let child = Command::new(env!("CARGO_BIN_EXE_towpath"))
            .args(["replay", "-", "--json", "--deadline", "600", "--rules", rules.to_str().unwrap()])
            .args(["--control", socket.to_str().unwrap()])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut engine = Self { directory, child, capture: None, packets: 0 };
        engine.capture = engine.child.stdin.take();
        // pcap, microseconds, version 2.4, Ethernet.
        let mut header = Vec::new();
        for word in [0xa1b2_c3d4, 4 << 16 | 2, 0, 0, 262_144, 1u32] {
            header.extend(word.to_le_bytes());
        }
        engine.write(&header);
        // Up, with its inspectors.
        engine.until(&["show", "rings", "--json"], |output| output.status.success());
        engine
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("ctl.sock")
    }

    fn write(&mut self, bytes: &[u8]) {
        let capture = self.capture.as_mut().expect("the capture is open");
        capture.write_all(bytes).unwrap();
        capture.flush().unwrap();
    }

    /// Adds `n` UDP packets, each of another flow.
    fn packets(&mut self, n: u32) {
        let mut records = Vec::new();
        for _ in 0..n {
            let mut frame = vec![0; 12];
            frame.extend([0x08, 0x00, 0x45, 0, 0, 46, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
            frame.extend((1024 + (self.packets % 60_000) as u16).to_be_bytes());
            frame.extend([0, 53, 0, 26, 0, 0]);
            frame.extend(format!("payload {:010}", self.packets).as_bytes());
            for word in [0, self.packets, frame.len() as u32, frame.len() as u32] {
                records.extend(word.to_le_bytes());
            }
            records.extend(&frame);
            self.packets += 1;
        }
        self.write(&records);
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_towpath"));
        command.args(["ctl", "--socket", self.socket().to_str().unwrap()]).args(args);
        command
    }

    fn ctl(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    fn json(&self, args: &[&str]) -> Value {
        let output = self.ctl(&[args, &["--json"]].concat());
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// The first channel.
    fn ring(&self) -> Value {
        self.json(&["show", "rings"])["rings"][0].clone()
    }

    fn until(&self, args: &[&str], done: impl Fn(&Output) -> bool) {
        let mut tries = (0..TRIES).map(|_| {
            let output = self.ctl(args);
            assert_runs(&self.child);
            output
        });
        let last = tries.find(|output| done(output));
        assert!(last.is_some(), "{args:?} never came to an end: {}", text(&self.ctl(args).stderr));
    }

    fn until_ring(&self, done: impl FnMut(&Value) -> bool) -> Value {
        let found = (0..TRIES).map(|_| self.ring()).find(done);
        found.unwrap_or_else(|| panic!("it never came to this: {}", self.ring()))
    }

    /// Ends the capture. Returns the report and the standard error output.
    fn finish(mut self) -> (Value, String) {
        self.capture = None;
        let mut said = String::new();
        let mut report = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut report).unwrap();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert!(self.child.wait().unwrap().success(), "{said}");
        assert!(!self.socket().exists(), "the socket is removed");
        (serde_json::from_str(&report).unwrap(), said)
    }

    /// Sends these bytes on a separate connection. Returns the answers that are JSON.
    fn say(&self, bytes: &[u8]) -> Vec<Value> {
        let mut stream = UnixStream::connect(self.socket()).unwrap();
        stream.set_read_timeout(Some(std::time::Duration::from_secs(60))).unwrap();
        // The engine may close before it has read everything.
        let _ = stream.write_all(bytes);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut said = Vec::new();
        let _ = stream.read_to_end(&mut said);
        let mut answers = Vec::new();
        let mut rest = &said[..];
        while let Some((length, after)) = rest.split_first_chunk::<4>() {
            let (message, after) = after.split_at(u32::from_le_bytes(*length) as usize);
            answers
                .extend((message[0] == 1).then(|| serde_json::from_slice::<Value>(&message[1..]).unwrap()));
            rest = after;
        }
        answers
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Encodes a request (docs/book/src/reference/ctl.md, "Protocol").
fn request(object: &Value) -> Vec<u8> {
    let object = object.to_string();
    [&(object.len() as u32 + 1).to_le_bytes()[..], &[1], object.as_bytes()].concat()
}

fn kill(pid: u64, signal: &str) {
    assert!(Command::new("kill").args([signal, &pid.to_string()]).status().unwrap().success());
}

#[test]
fn rings_and_frames_of_an_inspector_that_holds() {
    let mut engine = Engine::start(&["--queue", &troublesome("stall 2")]);
    engine.packets(10);
    let ring = engine.until_ring(|ring| ring["depth"] == 8 && ring["verdicts"]["pass"] == 2);
    for (key, value) in [
        ("channel", json!(1)),
        ("queue", json!(1)),
        ("used", json!(8)),
        ("published", json!(10)),
        ("bytes", json!(600)),
        ("fanout", json!("flow")),
        ("overload", json!("block")),
        ("frame_nr", json!(4096)),
        ("violations", json!(0)),
        ("gone", Value::Null),
    ] {
        assert_eq!(ring[key], value, "{key}: {ring}");
    }
    assert!(ring["oldest"].as_u64().unwrap() > 0, "{ring}");
    assert!(ring["high_water"].as_u64().unwrap() >= 8, "{ring}");
    let frames = engine.json(&["show", "frames", "1"]);
    let frames = frames["frames"].as_array().unwrap();
    assert_eq!(frames.len(), 8);
    assert!(frames.iter().all(|frame| frame["state"] == "VALID" && frame["len"] == 60), "{frames:?}");
    assert_eq!(frames[0]["seq"].as_u64().unwrap() + 7, frames[7]["seq"].as_u64().unwrap());
    let table = text(&engine.ctl(&["show", "frames", "1"]).stdout);
    assert_eq!((table.lines().count(), table.matches("VALID").count()), (9, 8), "{table}");
    let table = text(&engine.ctl(&["show", "rings"]).stdout);
    assert!(table.contains("verdicts: 2 pass"), "{table}");
    let output = engine.ctl(&["show", "frames", "7"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("there is no channel 7"), "{}", text(&output.stderr));

    // The ring of a killed inspector is still shown, and its frames were decided.
    kill(ring["pid"].as_u64().unwrap(), "-KILL");
    let ring = engine.until_ring(|ring| !ring["gone"].is_null());
    assert_eq!((ring["depth"].clone(), ring["defaults"]["drained"].clone()), (json!(0), json!(8)));
    let (report, _) = engine.finish();
    assert_eq!((&report["passed"], &report["dropped"]), (&json!(2), &json!(8)));
    assert_eq!(report["queues"][0]["lost_by"]["died"], 8);
}

#[test]
fn a_trace_is_a_capture_of_packets_and_verdicts() {
    let inspect = "1=towpath inspect --queue 1 --match 3$ --verdict drop";
    let mut engine = Engine::start(&["--queue", inspect]);
    let out = engine.directory.path().join("trace.pcapng");
    let mut trace = engine.command(&["trace", "1", "--count", "5", "--out", out.to_str().unwrap()]);
    let trace = trace.stderr(Stdio::piped()).spawn().unwrap();
    engine.until_ring(|ring| ring["traces"] == 1);
    engine.packets(20);
    let trace = trace.wait_with_output().unwrap();
    assert!(trace.status.success(), "{}", text(&trace.stderr));
    assert!(text(&trace.stderr).contains("5 packets traced, 0 left out"), "{}", text(&trace.stderr));

    let mut reader = Reader::open(&out).unwrap();
    let mut burst = Burst::new(64);
    assert_eq!(reader.receive(&mut burst).unwrap(), Received::Frames);
    let payloads: Vec<String> = burst.iter().map(|frame| text(&frame.bytes[42..])).collect();
    assert_eq!(payloads, (0..5).map(|n| format!("payload {n:010}")).collect::<Vec<_>>());
    assert_eq!(burst.iter().map(|frame| frame.time_ns).collect::<Vec<_>>(), [0, 1000, 2000, 3000, 4000]);
    assert!(reader.warning().is_none());
    let capture = text(&fs::read(&out).unwrap());
    assert_eq!(
        (capture.matches(": pass, after ").count(), capture.matches(": drop, after ").count()),
        (4, 1)
    );
    assert!(capture.contains("cap0"), "the port's name");
    if let Ok(output) = Command::new("capinfos").arg(&out).output() {
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    let (report, _) = engine.finish();
    assert_eq!(report["passed"], 18);
}

#[test]
fn a_trace_that_is_hardly_read_slows_no_packet_and_a_killed_one_ends() {
    let inspect = "1=towpath inspect --queue 1 --match x --verdict drop";
    let mut engine = Engine::start(&["--queue", inspect]);
    let silent = UnixStream::connect(engine.socket()).unwrap();
    (&silent).write_all(&request(&json!({"towpath": 1, "do": "trace", "channel": 1}))).unwrap();
    let mut killed = engine.command(&["trace", "1"]).stdout(Stdio::piped()).spawn().unwrap();
    engine.until_ring(|ring| ring["traces"] == 2);
    engine.packets(100);
    killed.kill().unwrap();
    killed.wait().unwrap();
    // A small part of the trace. On a busy machine the test takes longer than the ten seconds in which a client must take something.
    let mut said = Vec::new();
    let take = |said: &mut Vec<u8>| drop((&silent).take(8 << 10).read_to_end(said));
    silent.set_nonblocking(true).unwrap();
    for _ in 0..200 {
        engine.packets(1000);
        take(&mut said);
    }
    let ring = engine.until_ring(|ring| {
        take(&mut said);
        ring["published"].as_u64() >= Some(200_100) && ring["traces"] == 1
    });
    assert_eq!(ring["lost"]["no_room"], 0);
    // At the end of the capture, the client gets the number of missed packets.
    engine.capture = None;
    silent.set_nonblocking(false).unwrap();
    (&silent).read_to_end(&mut said).unwrap();
    let said = text(&said);
    let dropped = said.rfind("\"dropped\":").map(|at| said[at + 10..].split([',', '}']).next());
    let dropped = dropped.flatten().and_then(|n| n.parse::<u64>().ok());
    assert!(dropped > Some(100_000), "{dropped:?}");
    let (report, _) = engine.finish();
    assert_eq!(report["passed"], 200_100);
}

#[test]
fn garbage_on_the_socket_is_answered_or_closed_and_the_engine_goes_on() {
    let mut engine = Engine::start(&["--queue", "1=towpath inspect --queue 1 --match x --verdict drop"]);
    assert_eq!(engine.ring()["name"], "towpath-inspect");
    let rows: &[(Vec<u8>, &str, &str)] = &[
        (request(&json!({"towpath": 2, "do": "show-rings"})), "version", "version 1, the client 2"),
        (request(&json!({"towpath": 1, "do": "fly"})), "request", "fly"),
        (request(&json!({"do": "show-rings"})), "request", "towpath"),
        (request(&json!([1, 2])), "request", "towpath"),
        (b"GET / HTTP/1.0\r\n\r\n".to_vec(), "too-long", "67108864 bytes"),
        (vec![0xff; 100_000], "too-long", "67108864 bytes"),
        (vec![0; 100_000], "request", "JSON"),
        ([&9u32.to_le_bytes()[..], &[1], b"\xff\xfe{{{{{{"].concat(), "request", "not JSON"),
    ];
    for (bytes, code, words) in rows {
        let answers = engine.say(bytes);
        let answer = answers.first().unwrap_or_else(|| panic!("{code}: no answer"));
        assert_eq!((&answer["answer"], &answer["code"]), (&json!("error"), &json!(code)), "{answer}");
        assert!(answer["message"].as_str().unwrap().contains(words), "{answer}");
    }
    // Half a request, then the end of the stream: no answer.
    assert_eq!(engine.say(&request(&json!({"towpath": 1, "do": "show-rings"}))[..20]), Vec::<Value>::new());
    // Many requests in succession.
    let many = request(&json!({"towpath": 1, "do": "show-rings"})).repeat(200);
    assert_eq!(engine.say(&many).len(), 200);
    // Random bytes.
    let mut noise: u64 = 0x9e37_79b9_7f4a_7c15;
    for _ in 0..300 {
        let bytes: Vec<u8> = (0..noise % 700)
            .map(|_| {
                noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (noise >> 56) as u8
            })
            .collect();
        noise = noise.wrapping_add(1);
        engine.say(&bytes);
    }
    engine.packets(100);
    engine.until_ring(|ring| ring["verdicts"]["pass"] == 100);
    assert_eq!(engine.finish().0["passed"], 100);
}

#[test]
fn hundreds_of_connections_get_an_answer_or_a_refusal() {
    let mut engine = Engine::start(&["--queue", "1=towpath inspect --queue 1 --match x --verdict drop"]);
    let ask = request(&json!({"towpath": 1, "do": "show-rings"}));
    // Clients that connect and send nothing; the first ones keep their slots.
    let silent: Vec<UnixStream> = (0..300).map_while(|_| UnixStream::connect(engine.socket()).ok()).collect();
    assert!(silent.len() > 64, "{}", silent.len());
    let answers = engine.say(&ask);
    assert!(answers.is_empty() || answers[0]["code"] == "busy", "{answers:?}");
    let output = engine.ctl(&["show", "rings"]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("64 clients"), "{}", text(&output.stderr));
    drop(silent);
    engine.until(&["show", "rings"], |output| output.status.success());
    engine.packets(10);
    assert_eq!(engine.finish().0["passed"], 10);
}

#[towpath_testenv::needs(root)]
#[test]
fn a_refused_client_is_named_in_the_log() {
    let engine = Engine::start(&[]);
    // The program is in a directory where every user can execute it. The socket file admits every user, so that only the engine
    // refuses.
    let program = engine.directory.path().join("towpath");
    // Copied by another process: a child that another test forks meanwhile would keep this process's descriptor open for writing.
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_towpath")).arg(&program).status().unwrap();
    assert!(copied.success());
    for (path, mode) in [(engine.directory.path(), 0o755), (&program, 0o755), (&engine.socket(), 0o666)] {
        fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    }
    let ctl = |mode| {
        fs::set_permissions(engine.socket(), fs::Permissions::from_mode(mode)).unwrap();
        let mut command = Command::new(&program);
        command.args(["ctl", "--socket", engine.socket().to_str().unwrap(), "show", "rings"]);
        let output = command.uid(65_534).gid(65_534).current_dir("/").output().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    let (code, said) = ctl(0o666);
    assert_eq!(code, Some(5), "{said}");
    assert!(said.contains("user 65534 has no access to the engine of user 0"), "{said}");
    let (code, said) = ctl(0o600);
    assert_eq!(code, Some(5), "{said}");
    assert!(said.contains("only the engine's user and root may"), "{said}");
    let (_, said) = engine.finish();
    assert!(said.contains("warning: control: refused process"), "{said}");
    assert!(said.contains("of user 65534"), "{said}");
}

#[test]
fn a_socket_is_one_engines() {
    let engine = Engine::start(&[]);
    let rules = engine.directory.path().join("rules.ipfw");
    let office = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/office.pcap");
    let replay = |socket: &Path| {
        Command::new(env!("CARGO_BIN_EXE_towpath"))
            .args(["replay", office.to_str().unwrap(), "--rules", rules.to_str().unwrap()])
            .args(["--control", socket.to_str().unwrap()])
            .output()
            .unwrap()
    };
    let stale = engine.directory.path().join("stale.sock");
    // Bound, and not listening: a child that another test has forked would hold a listener until it calls execve(2).
    let bound = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    rustix::net::bind(&bound, &SocketAddrUnix::new(&stale).unwrap()).unwrap();
    drop(bound);
    let rows = [
        (engine.socket(), Some(5), "another engine listens on"),
        (rules.clone(), Some(5), "exists and is not a socket"),
        (engine.directory.path().join("none/ctl.sock"), Some(5), "cannot listen on"),
        (stale.clone(), Some(0), ""),
    ];
    for (socket, code, words) in rows {
        let output = replay(&socket);
        assert_eq!(output.status.code(), code, "{}: {}", socket.display(), text(&output.stderr));
        assert!(text(&output.stderr).contains(words), "{}", text(&output.stderr));
    }
    assert!(rules.exists() && !stale.exists());
    assert!(engine.ctl(&["show", "rings"]).status.success(), "the first engine has its socket");
    let socket = engine.socket();
    engine.finish();
    let output = Command::new(env!("CARGO_BIN_EXE_towpath"))
        .args(["ctl", "--socket", socket.to_str().unwrap(), "show", "rings"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(5));
    assert!(text(&output.stderr).contains("no engine is there"), "{}", text(&output.stderr));
    let output = Command::new(env!("CARGO_BIN_EXE_towpath"))
        .args(["ctl", "--socket", socket.to_str().unwrap(), "dump", "states"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(5), "{}", text(&output.stderr));
}

#[test]
fn an_inspector_beyond_the_limit_gets_the_limit_and_its_holders() {
    let output = Command::new(env!("CARGO_BIN_EXE_towpath"))
        .args(["replay", "/dev/null", "--rules", "/dev/null"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "an empty file is no capture");
    let directory = tempfile::tempdir().unwrap();
    let rules = directory.path().join("rules.ipfw");
    fs::write(&rules, "add allow ip from any to any\n").unwrap();
    let office = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/office.pcap");
    let output = Command::new(env!("CARGO_BIN_EXE_towpath"))
        .args(["replay", office.to_str().unwrap(), "--rules", rules.to_str().unwrap()])
        .args(["--queue", "1=towpath inspect --queue 1 --match x --verdict drop"])
        .args(["--queue-policy", "1=workers:64"])
        .output()
        .unwrap();
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{said}");
    assert!(said.contains("268435456 bytes for user"), "{said}");
    assert!(said.contains("held by: "), "{said}");
}

/// A file of more entries than a request of 4 KiB or a page of a listing has room for.
#[test]
fn a_table_is_loaded_from_a_file_and_listed_in_pages() {
    let engine = Engine::start(&[]);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("feed.txt");
    let path = file.to_str().unwrap();
    let run = |words: &[&str], code| {
        let output = engine.ctl(words);
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(code), "{words:?}: {out}{err}");
        (out, err)
    };
    let net = |n: u32| format!("{}/24", std::net::Ipv4Addr::from_bits(0x0a00_0000 + (n << 8)));
    let entries: String = (0..20_000).map(|n| format!("{} {}\n", net(n), n % 10)).collect();
    std::fs::write(&file, format!("# a feed\n{entries}")).unwrap();
    let (_, err) = run(&["table", "T", "load", path], 1);
    assert!(err.contains("the table T does not exist; create it first"), "{err}");
    run(&["table", "T", "create", "type", "addr"], 0);
    run(&["add", "150", "deny", "ip", "from", "table(T)", "to", "any"], 0);
    assert_eq!(run(&["ipfw", "-n", "table", "T", "load", path], 0).0, "~ table T\n");
    assert_eq!(run(&["table", "T", "list"], 0).0, "");
    assert_eq!(run(&["table", "T", "load", path], 0).0, "~ table T\n");
    assert_eq!(run(&["table", "T", "list"], 0).0, entries);
    let json: Value = serde_json::from_str(&run(&["show", "table", "T", "--json"], 0).0).unwrap();
    assert_eq!((&json["name"], json["entries"].as_array().unwrap().len()), (&json!("T"), 20_000));
    assert_eq!(json["entries"][19_999], json!([net(19_999), "9"]));
    let json: Value = serde_json::from_str(&run(&["table", "all", "list", "--json"], 0).0).unwrap();
    assert_eq!(json["tables"][0]["entries"].as_array().unwrap().len(), 20_000);
    // All of a file or nothing.
    std::fs::write(&file, "10.0.0.0/24\n10.0.0.0/24\n10.0.0.300\n").unwrap();
    let (_, err) = run(&["table", "T", "load", path], 1);
    assert!(err.contains(&format!("{path}:2:1: ")) && err.contains(&format!("{path}:3:1: ")), "{err}");
    assert_eq!(run(&["table", "T", "list"], 0).0, entries);
    std::fs::write(&file, "10.0.0.0/24 1\n10.0.0.0/24 2\n").unwrap();
    run(&["ipfw", "-q", "table", "T", "load", path], 0);
    run(&["table", "U", "create", "type", "addr"], 0);
    run(&["table", "T", "swap", "U"], 0);
    assert_eq!(
        run(&["table", "all", "list"], 0).0,
        "--- table(T), set(0) ---\n--- table(U), set(0) ---\n10.0.0.0/24 2\n"
    );
    run(&["table", "T", "load"], 64);
    assert!(run(&["table", "T", "load", "/no/file"], 1).1.contains("/no/file: No such file"));
    // Rule files name files relative to their directory.
    let rules = directory.path().join("rules.ipfw");
    std::fs::write(&rules, "table T create type addr\ntable T load feed.txt\n").unwrap();
    let check = || {
        let output = Command::new(env!("CARGO_BIN_EXE_towpath")).arg("check").arg(&rules).output().unwrap();
        (output.status.code(), text(&output.stdout) + &text(&output.stderr))
    };
    let (code, said) = check();
    assert!(
        code == Some(3) && said.contains("feed.txt:2:1: \"10.0.0.0/24\": the entry already exists"),
        "{said}"
    );
    std::fs::write(&file, "10.0.0.0/24 1\n").unwrap();
    let (code, said) = check();
    assert!(code == Some(0) && said.contains("table T add 10.0.0.0/24 1\n"), "{said}");
}

#[test]
fn rules_tables_and_settings_change_while_it_runs() {
    let engine = Engine::start(&[]);
    let said = |words: &str| {
        let words: Vec<&str> = words.split_whitespace().collect();
        let output = engine.ctl(&words);
        (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
    };
    let ok = |words: &str| {
        let (code, out, err) = said(words);
        assert_eq!((code, err.as_str()), (0, ""), "{words}: {out}");
        out
    };
    assert_eq!(
        ok("ipfw list"),
        "00100 inspect 1 udp from any to any\n00200 allow ip from any to any\n65535 deny ip from any to any\n"
    );
    assert_eq!(ok("add 150 deny tcp from any to any 25"), "+ 00150 deny tcp from any to any 25\n");
    assert_eq!(ok("ipfw -q add 160 set 3 count ip from any to any"), "");
    assert_eq!(ok("ipfw -S list 160"), "00160 set 3 count ip from any to any\n");
    // All commands or none take effect; every error has its position.
    let (code, _, err) = said("add 170 alow ip from any to any");
    assert_eq!(
        (code, err.as_str()),
        (1, "towpath: command:1:9: unknown action \"alow\"; did you mean \"allow\"?\n")
    );
    // A rule that does not exist is an error without -q, and nothing else of the command is carried out.
    let absent = "towpath: command:1:12: rule 151 does not exist\n";
    assert_eq!(said("delete 150 151"), (1, String::new(), absent.to_owned()));
    assert_eq!(said("ipfw set 3 delete 150").0, 1);
    assert_eq!(ok("ipfw list 150"), "00150 deny tcp from any to any 25\n");
    assert_eq!(ok("ipfw -q delete 151"), "");
    // The rules of one set, and when each rule saw its last packet: never.
    assert_eq!(ok("set 3 list"), "00160 count ip from any to any\n");
    assert_eq!(
        (ok("ipfw set 3 show"), ok("set 4 show")),
        ("00160 0 0 count ip from any to any\n".to_owned(), String::new())
    );
    assert_eq!(said("set 32 show").0, 64);
    assert_eq!(ok("ipfw -t list 160"), format!("00160 {:20} count ip from any to any\n", ""));
    assert_eq!(ok("ipfw -T list 160"), "00160          0 count ip from any to any\n");
    ok("set disable 3");
    ok("delete 150");
    let rules: Value = serde_json::from_str(&ok("show rules --json")).unwrap();
    let numbers: Vec<u64> =
        rules["rules"].as_array().unwrap().iter().map(|r| r["number"].as_u64().unwrap()).collect();
    assert_eq!(numbers, [100, 160, 200, 65535]);
    ok("table T create type addr valtype tag");
    ok("ipfw table T add 10.0.0.0/8 5 192.0.2.1 6");
    // Adding an existing entry and deleting a missing one are errors without -q.
    for words in ["table T add 192.0.2.1 7", "table T delete 192.0.2.2"] {
        assert_eq!(said(&format!("ipfw {words}")).0, 1, "{words}");
        assert_eq!(said(&format!("ipfw -n -q {words}")).0, 0, "{words}");
        ok(&format!("ipfw -q {words}"));
    }
    assert_eq!(ok("ipfw table T lookup 192.0.2.1"), "192.0.2.1/32 7\n");
    ok("ipfw -qf table T add 192.0.2.1 6");
    assert_eq!(ok("show table T"), "10.0.0.0/8 5\n192.0.2.1/32 6\n");
    assert_eq!(said("show table U").0, 1);
    // `--json` before or after the words.
    for (words, what) in [
        ("table T add 10.1.0.0/16 7 --json", "changes"),
        ("ipfw --json table all list", "tables"),
        ("ipfw table T list --json", "entries"),
    ] {
        let answer: Value = serde_json::from_str(&ok(words)).unwrap();
        assert!(!answer[what].is_null(), "{words}: {answer}");
    }
    // Commands that only show, in the words of ctl and of ipfw.
    assert_eq!(ok("table T lookup 10.1.2.3"), "10.1.0.0/16 7\n");
    assert_eq!(ok("ipfw table T lookup 10.2.0.1"), "10.0.0.0/8 5\n");
    assert_eq!(
        ok("table T lookup 10.2.0.1 --json"),
        "{\"key\":\"10.0.0.0/8\",\"name\":\"T\",\"value\":\"5\"}\n"
    );
    for (words, code, what) in [
        ("table T lookup 192.0.2.2", 1, "192.0.2.2 is not in table T"),
        ("table T lookup lan", 1, "is not a valid address or prefix"),
        ("table T lookup", 64, "table NAME lookup KEY"),
        ("table U lookup 10.0.0.1", 1, "there is no table U"),
        ("table U info", 1, "there is no table U"),
        ("ipfw pipe show 9", 1, "there is no such pipe"),
    ] {
        let (exit, out, err) = said(words);
        assert_eq!((exit, out.as_str()), (code, ""), "{words}: {err}");
        assert!(err.contains(what), "{words}: {err}");
    }
    for words in ["table T info", "table T detail", "ipfw table all info"] {
        assert_eq!(ok(words), ok("show tables"), "{words}");
    }
    assert_eq!(
        ok("table all list"),
        "--- table(T), set(0) ---\n10.0.0.0/8 5\n10.1.0.0/16 7\n192.0.2.1/32 6\n"
    );
    assert_eq!(ok("set show"), "set 0\nset 3\nset 31\n");
    assert_eq!(ok("ipfw pipe show"), "no pipes\n");
    ok("ipfw pipe 1 config bw 8Mbit/s burst 1000");
    assert_eq!(ok("ipfw pipe show 1"), "pipe 1 bw 8000000bit/s burst 1000\n");
    assert_eq!(ok("ipfw pipe 1 show"), ok("ipfw pipe show 1"));
    // -n reads and changes nothing.
    let rules = ok("ipfw list");
    assert_eq!(ok("ipfw -n add 500 allow tcp from any to any"), "+ 00500 allow tcp from any to any\n");
    let (code, _, err) = said("ipfw -n add garbage");
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("command:1:5: "), "{err}");
    ok("ipfw -n flush");
    ok("ipfw -n table T flush");
    assert_eq!((ok("ipfw list"), ok("table T lookup 10.2.0.1")), (rules, "10.0.0.0/8 5\n".to_owned()));
    assert_eq!(ok("sysctl net.inet.ip.fw.dyn_max=77"), "net.inet.ip.fw.dyn_max: 1048576 -> 77\n");
    assert_eq!(ok("sysctl dyn_max"), "net.inet.ip.fw.dyn_max: 77\n");
    assert!(said("sysctl dyn_mx=1").2.contains("there is no setting `dyn_mx`; did you mean `dyn_max`?"));
    // All requested settings, in the given order; none if one of them is wrong.
    assert_eq!(
        ok("sysctl dyn_max dyn_udp_lifetime=11 dyn_udp_lifetime"),
        "net.inet.ip.fw.dyn_max: 77\nnet.inet.ip.fw.dyn_udp_lifetime: 10 -> 11\nnet.inet.ip.fw.dyn_udp_lifetime: 11\n"
    );
    for wrong in ["dyn_mx=1", "dyn_mx", "dyn_keepalive=7", "dyn_count=1", "dyn_max=x"] {
        assert_ne!(said(&format!("sysctl dyn_max=5 {wrong}")).0, 0, "{wrong}");
        assert_eq!(ok("sysctl dyn_max"), "net.inet.ip.fw.dyn_max: 77\n", "{wrong}");
    }
    assert_eq!(ok("show states"), "## Dynamic rules (0):\n");
    assert_eq!(
        ok("show states --address 10.0.0.0/8 --port 53 --rule 100 --name a"),
        "## Dynamic rules (0):\n"
    );
    assert!(said("show states --address 10.0.0").2.contains("`10.0.0` is not a prefix"));
    assert_eq!(
        said("delete state tcp 10.0.0.1:1 10.0.0.2:2").2,
        "towpath: there is no state of `tcp 10.0.0.1:1 10.0.0.2:2`\n"
    );
    assert_eq!(said("delete state tcp 10.0.0.1:1").0, 64);
    let stats: Value = serde_json::from_str(&ok("show stats --json")).unwrap();
    assert_eq!(stats["stats"]["packets"], json!(0));
    assert_eq!(stats["stats"]["states"]["max"], json!(77));
    let metrics = ok("metrics");
    let documented = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/reference/metrics.md");
    let documented = std::fs::read_to_string(documented).unwrap();
    for family in metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()) {
        let known = [format!("`{family}`"), format!("`{family}_total`")];
        assert!(family == "towpath_build" || known.iter().any(|name| documented.contains(name)), "{family}");
    }
    assert!(metrics.ends_with("# EOF\n"), "{metrics}");
    for line in [
        "towpath_engine_packets_total{} 0",
        "# TYPE towpath_rule_bytes counter",
        "towpath_states_max_states{} 77",
    ] {
        assert!(metrics.lines().any(|other| other == line), "{line}: {metrics}");
    }
    assert_eq!(ok("show top"), "## Dynamic rules (0):\n");
    let explained = ok("explain in cap0 udp 10.0.0.1:1 > 10.0.0.2:9");
    assert!(explained.starts_with("in cap0\n") && explained.contains("\nin cap0: "), "{explained}");
    assert_eq!(said("explain in nope udp 10.0.0.1:1 > 10.0.0.2:9").0, 1);
    let (code, _, err) = said("dump states");
    assert_eq!(code, 1, "{err}");
    assert!(err.contains("this engine has no dumps") && err.contains("show states"), "{err}");
    assert_eq!(ok("show queues"), "no queues\n");
    let (code, _, err) = said("show ports");
    assert_eq!((code, err.as_str()), (1, "towpath: this engine has no live ports\n"));
    ok("flush");
    assert_eq!(ok("ipfw list"), "65535 deny ip from any to any\n");
    engine.finish();
}

#[test]
fn events_come_as_they_happen() {
    let mut engine = Engine::start(&[]);
    assert!(
        engine.ctl(&["add", "50", "allow", "udp", "from", "any", "to", "any", "keep-state"]).status.success()
    );
    let mut watching =
        engine.command(&["events", "--json", "--count", "3"]).stdout(Stdio::piped()).spawn().unwrap();
    // The start of the watch is unknown: packets are sent until the client has enough events.
    while watching.try_wait().unwrap().is_none() {
        engine.packets(1);
        // Slowly, because a flow that already has a state causes no event, and there are 60,000 flows.
        engine.ctl(&["show", "stats"]);
    }
    let mut lines = String::new();
    watching.stdout.take().unwrap().read_to_string(&mut lines).unwrap();
    let events: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(events.len(), 3);
    assert!(events.iter().all(|event| event["what"] == "created" && event["state"]["rule"] == 50), "{lines}");
    let top: Value = engine.json(&["show", "top", "--count", "2"]);
    assert_eq!(top["states"].as_array().unwrap().len(), 2, "{top}");
    engine.finish();
}
