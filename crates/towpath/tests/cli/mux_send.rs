//! Zero-copy replies of `towpath mux`: whole, in order, counted; with peers that do not read, and with a mux
//! that is killed while the kernel sends.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::example::example;

const FRAMING: &str = "offset=0 length=4 be adjust=4";

struct Mux {
    child: Child,
    address: String,
    control: PathBuf,
    _directory: tempfile::TempDir,
}

impl Mux {
    /// Both workers send on each connection.
    fn start(how: &str) -> Self {
        Self::start_with(how, &["--workers", "2", "--order", "replies"])
    }

    /// One worker alone sends on each connection.
    fn alone(how: &str) -> Self {
        Self::start_with(how, &["--workers", "1"])
    }

    /// A connection stays with its worker.
    fn sticky(how: &str) -> Self {
        Self::start_with(how, &["--workers", "2", "--order", "sticky"])
    }

    fn start_with(how: &str, more: &[&str]) -> Self {
        let bin = Path::new(env!("CARGO_BIN_EXE_towpath"));
        let directory = tempfile::tempdir().expect("a directory");
        let control = directory.path().join("control.sock");
        let mut child = Command::new(bin)
            .args(["mux", "127.0.0.1:0", "--framing", FRAMING, "--send", how])
            .args(more)
            .arg("--worker")
            .arg(example("mux_worker"))
            .arg("--control")
            .arg(&control)
            .stderr(Stdio::piped())
            .spawn()
            .expect("towpath starts");
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let mut line = || lines.next().expect("a line").expect("text");
        let address = line().strip_prefix("listening on ").expect("an address").to_owned();
        while !line().contains(" attached") {}
        // Drain its log so that it does not block.
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address, control, _directory: directory }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).expect("it listens");
        stream.set_read_timeout(Some(Duration::from_secs(120))).expect("a timeout");
        stream
    }

    fn show(&self) -> serde_json::Value {
        let output = Command::new(env!("CARGO_BIN_EXE_towpath"))
            .args(["ctl", "show", "send", "--json", "--socket"])
            .arg(&self.control)
            .output()
            .expect("towpath starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let all: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        all["send"].clone()
    }

    /// Queries it until the condition holds, for up to two minutes.
    fn until(&self, what: impl Fn(&serde_json::Value) -> bool) -> serde_json::Value {
        let begin = std::time::Instant::now();
        while begin.elapsed() < Duration::from_secs(120) {
            let send = self.show();
            if what(&send) {
                return send;
            }
        }
        panic!("it stays {}", self.show());
    }
}

impl Drop for Mux {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Bytes that identify their message and position.
fn body(number: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at * 7 + at / 251 + number * 13) as u8).collect()
}

fn ask(stream: &mut TcpStream, number: usize, len: usize) {
    let body = body(number, len);
    stream.write_all(&(len as u32).to_be_bytes()).expect("it is open");
    stream.write_all(&body).expect("it is open");
}

/// Sends requests from another thread, because the mux does not read a peer that has much to receive. Ends
/// with the connection.
fn ask_all(stream: &TcpStream, lengths: &[(usize, usize)]) -> std::thread::JoinHandle<()> {
    let (mut stream, lengths) = (stream.try_clone().expect("a descriptor"), lengths.to_vec());
    std::thread::spawn(move || {
        for (number, len) in lengths {
            let asked = [&(len as u32).to_be_bytes()[..], &body(number, len)].concat();
            if stream.write_all(&asked).is_err() {
                return;
            }
        }
    })
}

/// The worker replies with its process id, which is returned, a space and the request.
fn answer(stream: &mut TcpStream, number: usize, len: usize) -> String {
    let mut header = [0; 4];
    stream.read_exact(&mut header).expect("an answer");
    let mut answer = vec![0; u32::from_be_bytes(header) as usize];
    stream.read_exact(&mut answer).expect("all of it");
    let space = answer.iter().position(|byte| *byte == b' ').expect("a process id");
    assert!(answer[space + 1..] == body(number, len), "answer {number}, of {len} bytes");
    String::from_utf8_lossy(&answer[..space]).into_owned()
}

const LENGTHS: [usize; 9] = [1, 100_000, 16, 16_384, 0, 300_000, 65_536, 5, 1_000_000];

#[test]
fn replies_of_any_length_arrive_in_order_on_every_path() {
    type Start = fn(&str) -> Mux;
    let starts: [(Start, bool); 3] = [(Mux::start, false), (Mux::alone, true), (Mux::sticky, true)];
    let hows = ["zerocopy", "adaptive", "plain"];
    for (how, (start, alone)) in hows.into_iter().flat_map(|how| starts.map(|start| (how, start))) {
        let mux = start(how);
        let mut streams = [mux.connect(), mux.connect()];
        for round in 0..5 {
            let lengths: Vec<_> =
                LENGTHS.into_iter().enumerate().map(|(at, len)| (round + at, len)).collect();
            let askers = streams.each_ref().map(|stream| ask_all(stream, &lengths));
            for stream in &mut streams {
                for (at, len) in LENGTHS.into_iter().enumerate() {
                    answer(stream, round + at, len);
                }
            }
            askers.into_iter().for_each(|asker| asker.join().expect("everything was read"));
        }
        let send = mux.until(|send| send["totals"]["numbers"] == send["totals"]["completed"]);
        assert_eq!((&send["choice"], &send["connections"]), (&how.into(), &2.into()), "{send}");
        // From the workers' frames, if no other worker sends on the connection.
        assert_eq!(send["lent_bytes"].as_u64() > Some(1_000_000), alone && how != "plain", "{send}");
        let totals = &send["totals"];
        let zerocopy = totals["zerocopy_bytes"].as_u64().expect("a number");
        match how {
            "zerocopy" => {
                assert!(zerocopy > 10_000_000 && totals["numbers"].as_u64() > Some(30), "{send}");
                // Loopback always copies, and reports it.
                assert!(totals["copied_bytes"].as_u64() > Some(0), "{send}");
            }
            // After a while it probes again whether the kernel copies; all zero-copy sends are probes, and
            // loopback copies them.
            "adaptive" => assert_eq!(totals["copied"], totals["numbers"], "{send}"),
            _ => assert_eq!(zerocopy, 0, "{send}"),
        }
        assert_eq!((&totals["duplicates"], &totals["unknown"]), (&0.into(), &0.into()));
        let [one, other] = &send["senders"].as_array().expect("a list")[..] else { panic!("{send}") };
        assert!(one["peer"] != other["peer"] && one["outstanding"] == 0, "{send}");
        // Ended connections are in the sums.
        drop(streams);
        let gone = mux.until(|send| send["senders"] == serde_json::json!([]) && send["lingering"] == 0);
        assert_eq!(&gone["totals"]["zerocopy_bytes"], &totals["zerocopy_bytes"]);
    }
}

#[test]
fn a_peer_that_does_not_read_delays_only_its_replies() {
    for mux in [Mux::start("zerocopy"), Mux::alone("zerocopy"), Mux::sticky("zerocopy")] {
        stuck_peer(&mux);
    }
}

fn stuck_peer(mux: &Mux) {
    let stuck = mux.connect();
    let asker = ask_all(&stuck, &[0, 1, 2, 3].map(|number| (number, 3_000_000)));
    mux.until(|send| send["senders"][0]["pinned"].as_u64() > Some(0));
    let mut other = mux.connect();
    for number in 0..50 {
        ask(&mut other, number, 200_000);
        answer(&mut other, number, 200_000);
    }
    // It ends with replies in flight: they are completed, or reset and quarantined.
    stuck.shutdown(std::net::Shutdown::Both).expect("it is open");
    drop(stuck);
    asker.join().expect("it ends with its connection");
    let send =
        mux.until(|send| send["lingering"] == 0 && send["senders"].as_array().map(Vec::len) == Some(1));
    assert_eq!(send["totals"]["unknown"], 0);
    ask(&mut other, 51, 200_000);
    answer(&mut other, 51, 200_000);
}

#[test]
fn replies_of_a_killed_worker_are_sent() {
    let sticky = ["--workers", "2", "--order", "sticky", "--on-worker-end", "move"];
    for mux in [Mux::alone("zerocopy"), Mux::start_with("zerocopy", &sticky)] {
        killed_worker(&mux);
    }
}

fn killed_worker(mux: &Mux) {
    let stuck = mux.connect();
    // More than the peer's window, of which a quarter of the worker's frames is leased.
    let asked: Vec<_> = (0..60).map(|number| (number, 100_000)).collect();
    let asker = ask_all(&stuck, &asked);
    mux.until(|send| {
        // More than the reply that is read before the first worker is killed.
        send["lent_bytes"].as_u64() > Some(250_000) && send["senders"][0]["pinned"].as_u64() > Some(0)
    });
    // Replies of the killed worker, whichever it is, and of the next one.
    let mut stuck = stuck;
    let worker = answer(&mut stuck, asked[0].0, asked[0].1);
    let killed = Command::new("kill").args(["-9", &worker]).status().expect("kill");
    assert!(killed.success());
    let mut other = mux.connect();
    ask(&mut other, 1, 200_000);
    assert_ne!(answer(&mut other, 1, 200_000), worker, "another one sits there");
    // The process has exited; its leased memory stays mapped.
    let workers: Vec<_> = asked[1..].iter().map(|&(number, len)| answer(&mut stuck, number, len)).collect();
    assert!(workers.contains(&worker), "what it had answered is there");
    asker.join().expect("everything was read");
    mux.until(|send| send["totals"]["numbers"] == send["totals"]["completed"]);
}

#[test]
fn a_worker_that_modifies_leased_frames_corrupts_only_its_replies() {
    let mux = Mux::start_with("zerocopy", &["--workers", "1", "--send-check"]);
    let mut stuck = mux.connect();
    let asked: Vec<_> = (0..12).map(|number| (number, 100_000)).collect();
    let asker = ask_all(&stuck, &asked);
    mux.until(|send| {
        send["lent_bytes"].as_u64() > Some(0) && send["senders"][0]["pinned"].as_u64() > Some(0)
    });
    let mut other = mux.connect();
    other.write_all(b"\0\0\0\x08scribble").expect("it is open");
    let mut header = [0; 4];
    other.read_exact(&mut header).expect("an answer");
    let mut said = vec![0; u32::from_be_bytes(header) as usize];
    other.read_exact(&mut said).expect("all of it");
    let worker = String::from_utf8_lossy(&said).trim_end_matches(" scribble").to_owned();
    for number in 0..20 {
        ask(&mut other, number, 50_000 * (number % 3));
        assert_eq!(answer(&mut other, number, 50_000 * (number % 3)), worker, "it goes on");
    }
    // The connection of these replies gets the right number of bytes.
    let right: Vec<u8> = asked
        .iter()
        .flat_map(|&(number, len)| {
            let answer = [worker.as_bytes(), b" ", &body(number, len)].concat();
            [&(answer.len() as u32).to_be_bytes()[..], &answer].concat()
        })
        .collect();
    let mut got = vec![0; right.len()];
    stuck.read_exact(&mut got).expect("all of it");
    asker.join().expect("everything was read");
    let spoilt = got.iter().zip(&right).filter(|(got, right)| got != right).count();
    assert!(spoilt > 0, "some of it was leased");
    assert!(got.iter().zip(&right).all(|(got, right)| got == right || *got == b'!'));
    // Later replies are right there, too.
    ask(&mut stuck, 99, 100_000);
    answer(&mut stuck, 99, 100_000);
    // The write was detected.
    let send = mux.until(|send| send["totals"]["numbers"] == send["totals"]["completed"]);
    assert!(send["totals"]["tampered"].as_u64() > Some(0), "{send}");
}

#[test]
fn leased_frames_are_released() {
    let mux = Mux::alone("zerocopy");
    let mut stream = mux.connect();
    // Twenty times its ring.
    for number in 0..200 {
        ask(&mut stream, number, 100_000);
        answer(&mut stream, number, 100_000);
    }
    let send = mux.until(|send| send["totals"]["numbers"] == send["totals"]["completed"]);
    assert!(send["lent_bytes"].as_u64() > Some(10_000_000), "{send}");
}

#[test]
fn a_killed_mux_has_sent_correct_bytes() {
    // The kernel sends from the memory of the mux and of the worker.
    for mux in [Mux::start("zerocopy"), Mux::alone("zerocopy"), Mux::sticky("zerocopy")] {
        killed(mux);
    }
}

fn killed(mut mux: Mux) {
    let mut stream = mux.connect();
    let asker = ask_all(&stream, &[0, 1, 2].map(|number| (number, 2_000_000)));
    mux.until(|send| send["senders"][0]["pinned"].as_u64() > Some(0));
    mux.child.kill().expect("it is there");
    mux.child.wait().expect("its end");
    // The process is gone; pinned pages keep their content.
    let mut got = Vec::new();
    let _ = stream.read_to_end(&mut got);
    asker.join().expect("it ends with its connection");
    assert!(!got.is_empty());
    let mut rest = &got[..];
    for number in 0..3 {
        let Some((header, behind)) = rest.split_at_checked(4) else { return };
        let len = u32::from_be_bytes(header.try_into().expect("four")) as usize;
        let answer = &behind[..len.min(behind.len())];
        let Some(space) = answer.iter().position(|byte| *byte == b' ') else { return };
        let echo = &answer[space + 1..];
        assert!(*echo == body(number, 2_000_000)[..echo.len()], "answer {number}");
        rest = &behind[answer.len()..];
    }
}
