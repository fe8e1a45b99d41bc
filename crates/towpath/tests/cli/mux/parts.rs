//! `body=stream`: uploads that reach a worker process in parts.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::thread;

use rustix::process::Signal;

use super::daemon::{Mux, example, kill};

const STREAM: [&str; 4] = ["--framing", "http1 body=stream", "--workers", "1"];

fn start(more: &[&str]) -> Mux {
    Mux::start(&example("upload_worker").to_string(), &[&STREAM, more].concat())
}

/// Reads a response. Returns its status and its body, or `None` at the end of the connection.
fn response(stream: &mut TcpStream) -> Option<(u16, String)> {
    let (mut head, mut byte) = (Vec::new(), [0]);
    while !head.ends_with(b"\r\n\r\n") {
        if stream.read(&mut byte).unwrap_or(0) == 0 {
            return None;
        }
        head.push(byte[0]);
    }
    let head = String::from_utf8(head).expect("text");
    let status = head.split(' ').nth(1).and_then(|word| word.parse().ok()).expect("a status");
    let length = head.split("Content-Length: ").nth(1).and_then(|rest| rest.split('\r').next());
    let mut body = vec![0; length.map_or(0, |length| length.parse().expect("a number"))];
    stream.read_exact(&mut body).expect("the body");
    Some((status, String::from_utf8(body).expect("text")))
}

/// Process id of the worker, messages that it has begun, and those that were cut.
fn state(mux: &Mux) -> (u32, u32, u32) {
    let mut stream = mux.connect();
    stream.write_all(b"GET /state HTTP/1.1\r\nHost: a\r\n\r\n").expect("open");
    let (_, body) = response(&mut stream).expect("an answer");
    let numbers: Vec<u32> = body.split(' ').map(|word| word.parse().expect("a number")).collect();
    (numbers[0], numbers[1], numbers[2])
}

/// Waits for a state of the worker.
fn until(mux: &Mux, what: impl Fn((u32, u32, u32)) -> bool) -> (u32, u32, u32) {
    loop {
        let state = state(mux);
        if what(state) {
            return state;
        }
    }
}

/// Words that differ in every upload and at every place.
fn body(seed: u64, bytes: usize) -> Vec<u8> {
    (0..bytes as u64 / 8)
        .flat_map(|at| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed).to_le_bytes())
        .collect()
}

/// The checksum of the worker.
fn checksum(bytes: &[u8]) -> u64 {
    let word = |word: &[u8]| u64::from_le_bytes(word.try_into().expect("8 bytes"));
    bytes.chunks_exact(8).map(word).fold(0, |sum: u64, word| sum.rotate_left(7).wrapping_mul(3) ^ word)
}

/// Maximum of the resident memory of a process in KiB.
fn peak(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a line");
    line.trim().trim_end_matches(" kB").parse().expect("a number")
}

/// The front has less than an eighth of the bytes at any time.
#[test]
fn two_hundred_uploads_of_8_mib_arrive_whole_in_bounded_memory() {
    const UPLOADS: u64 = 200;
    const BYTES: usize = 8 << 20;
    let mux = start(&[]);
    let all = body(0, BYTES);
    // All are begun before any ends.
    let barrier = std::sync::Barrier::new(UPLOADS as usize);
    thread::scope(|scope| {
        for seed in 0..UPLOADS {
            let (mux, all, barrier) = (&mux, &all, &barrier);
            scope.spawn(move || {
                let mut stream = mux.connect();
                let path = format!("POST /{seed} HTTP/1.1\r\nHost: a\r\nContent-Length: {BYTES}\r\n\r\n");
                stream.write_all(path.as_bytes()).expect("open");
                // Each upload has its own bytes: the first word.
                stream.write_all(&seed.to_le_bytes()).expect("open");
                barrier.wait();
                stream.write_all(&all[8..]).expect("open");
                let (status, answer) = response(&mut stream).expect("an answer");
                assert_eq!(status, 200);
                let words: Vec<&str> = answer.split(' ').collect();
                let mut own = all.clone();
                own[..8].copy_from_slice(&seed.to_le_bytes());
                assert_eq!(words[..2], [BYTES.to_string(), format!("{:x}", checksum(&own))], "upload {seed}");
                assert!(words[2].parse::<u32>().expect("a number") >= 32, "{answer}");
            });
        }
    });
    let (_, begun, cut) = state(&mux);
    assert_eq!((begun, cut), (UPLOADS as u32, 0));
    let peak = peak(mux.pid());
    assert!(peak < UPLOADS * (BYTES as u64 >> 13), "{peak} KiB");
    let (code, log) = mux.finish();
    assert_eq!(code, Some(0), "{log}");
}

/// Chunks of any size, in writes of any size; messages before and after it are whole.
#[test]
fn a_chunked_upload_arrives_as_it_was_sent() {
    let mux = start(&[]);
    let mut stream = mux.connect();
    let body = body(7, 600_000);
    let mut raw = Vec::new();
    for chunk in [&body[..1], &body[1..400_000], &body[400_000..]] {
        raw.extend(format!("{:x}\r\n", chunk.len()).as_bytes());
        raw.extend_from_slice(chunk);
        raw.extend(b"\r\n");
    }
    raw.extend(b"0\r\n\r\n");
    let get = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n";
    let mut sent = get.to_vec();
    sent.extend(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n");
    sent.extend_from_slice(&raw);
    sent.extend(get);
    let mut writer = stream.try_clone().expect("a descriptor");
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut rest = &sent[..];
            for size in (1..).map(|at: usize| at * 997) {
                let (some, left) = rest.split_at(size.min(rest.len()));
                writer.write_all(some).expect("open");
                rest = left;
                if rest.is_empty() {
                    break;
                }
            }
        });
        let whole = raw.len() / 8 * 8;
        for expected in [(0, 0), (raw.len(), checksum(&raw[..whole])), (0, 0)] {
            let (status, answer) = response(&mut stream).expect("an answer");
            let words: Vec<&str> = answer.split(' ').collect();
            assert_eq!(status, 200);
            assert_eq!(words[..2], [expected.0.to_string(), format!("{:x}", expected.1)]);
        }
    });
}

/// A client that waits for `100 Continue` for ever gets it, however short its body is.
#[test]
fn a_short_upload_that_waits_for_100_continue_goes_on() {
    let mux = start(&[]);
    let mut stream = mux.connect();
    for body in [&b"x"[..], &[b'y'; 60_000]] {
        let head =
            format!("PUT / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).expect("open");
        assert_eq!(response(&mut stream).expect("an answer").0, 100);
        stream.write_all(body).expect("open");
        let (status, answer) = response(&mut stream).expect("an answer");
        assert_eq!((status, answer.split(' ').next()), (200, Some(&*body.len().to_string())));
    }
}

/// curl would send the body after its own timeout, which is set to more than its limit for everything.
#[towpath_testenv::needs("curl")]
#[test]
fn curl_does_not_wait_with_a_short_body() {
    let mux = start(&[]);
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("body");
    std::fs::write(&file, [b'z'; 3000]).expect("a file");
    for arguments in [&["-T"][..], &["-H", "Transfer-Encoding: chunked", "-T"]] {
        let output = std::process::Command::new("curl")
            .args(["-sSv", "-H", "Expect: 100-continue", "--expect100-timeout", "100", "--max-time", "90"])
            .args(arguments)
            .args([file.as_os_str(), format!("http://{}/file", mux.address).as_ref()])
            .output()
            .expect("curl runs");
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && log.contains("< HTTP/1.1 100 Continue"), "{log}");
        let answer = String::from_utf8_lossy(&output.stdout);
        assert!(arguments.len() > 1 || answer.starts_with("3000 "), "{answer}");
    }
}

#[test]
fn a_worker_that_dies_in_the_middle_of_a_message_ends_its_connection() {
    let mut mux = start(&["--redeliver", "5"]);
    let mut stream = mux.connect();
    stream
        .write_all(b"POST / HTTP/1.1\r\nExpect: 100-continue\r\nContent-Length: 1000000\r\n\r\n")
        .expect("open");
    assert_eq!(response(&mut stream).expect("an answer").0, 100);
    // A message that the worker has not begun when it dies goes to the next worker.
    let (worker, begun, _) = until(&mux, |(_, begun, _)| begun == 1);
    assert_eq!(begun, 1);
    kill(worker, Signal::KILL);
    mux.until("was given up: 1 workers died with it");
    mux.until("ended: ");
    assert_eq!(response(&mut stream), None);
    let (other, begun, _) = state(&mux);
    assert!(other != worker && begun == 0, "the message is not given again");
    let mut stream = mux.connect();
    stream.write_all(b"POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\nab").expect("open");
    assert_eq!(response(&mut stream).expect("an answer").0, 200);
}

#[test]
fn an_upload_that_stops_is_cut_at_the_time_limit() {
    let mut mux = start(&["--message-time", "1"]);
    let begin = b"POST / HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n";
    let mut stops = mux.connect();
    stops.write_all(&[&begin[..], &[b'x'; 40_000]].concat()).expect("open");
    mux.until("did not arrive in time");
    until(&mux, |(_, begun, cut)| (begun, cut) == (1, 1));
    assert_eq!(response(&mut stops), None);
    // The peer closes its side in the middle.
    let mut closes = mux.connect();
    closes.write_all(&[&begin[..], &[b'x'; 40_000]].concat()).expect("open");
    closes.shutdown(Shutdown::Write).expect("open");
    until(&mux, |(_, begun, cut)| (begun, cut) == (2, 2));
    assert_eq!(response(&mut closes), None);
}

#[test]
fn a_worker_refuses_an_upload_at_its_first_part() {
    let mux = start(&[]);
    let mut stream = mux.connect();
    stream.write_all(b"POST /refuse HTTP/1.1\r\nContent-Length: 1000000\r\n\r\n").expect("open");
    assert_eq!(response(&mut stream).expect("an answer").0, 413);
    assert_eq!(response(&mut stream), None);
    until(&mux, |(_, begun, cut)| (begun, cut) == (1, 1));
}

#[test]
fn an_upload_in_progress_ends_before_the_drain() {
    let mux = start(&[]);
    let mut stream = mux.connect();
    let body = body(3, 1 << 20);
    stream
        .write_all(format!("PUT / HTTP/1.1\r\nContent-Length: {}\r\n\r\n", body.len()).as_bytes())
        .expect("open");
    until(&mux, |(_, begun, _)| begun == 1);
    mux.signal(Signal::TERM);
    while TcpStream::connect(&mux.address).is_ok() {}
    stream.write_all(&body).expect("open");
    let (status, answer) = response(&mut stream).expect("an answer");
    assert!(
        status == 200 && answer.starts_with(&format!("{} {:x} ", body.len(), checksum(&body))),
        "{answer}"
    );
    assert_eq!(mux.ended().0, Some(0));
}

#[test]
fn a_worker_that_takes_no_parts_is_refused() {
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_towpath"))
        .args(["mux", "127.0.0.1:0", "--worker", &format!("{} whole", example("upload_worker"))])
        .args(STREAM)
        .output()
        .expect("towpath starts");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && errors.contains("does not take messages in parts"), "{errors}");
}
