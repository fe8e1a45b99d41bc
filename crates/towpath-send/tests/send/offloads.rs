//! The matrix of the kernel's own test (tools/testing/selftests/net/msg_zerocopy.sh): TCP and UDP, corked and uncorked, segmented,
//! all lengths, between two network namespaces, with the offloads of both ends on and off.
//!
//! Requires root, `ip`, `unshare`, `nsenter` and `ethtool`.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::checked::{PATIENCE, pattern, zerocopy};
use rustix::net::sockopt;
use rustix::thread::{CpuSet, sched_setaffinity};
use towpath_send::{Options, Sender};

const PORT: u16 = 9000;
/// Zero, one, shorter than a header, a page, odd, longer than a segment, the maximum of one packet, many packets.
const LENGTHS: [usize; 8] = [0, 1, 17, 4096, 9001, 65_483, 65_536, 1 << 20];
const DATAGRAMS: [usize; 6] = [0, 1, 17, 1472, 4096, 65_507];
/// With UDP_SEGMENT: total length and segment size.
const SEGMENTED: (usize, u16) = (40 * 1400 + 17, 1400);

/// ethtool(8)'s feature names of the sending and of the receiving end.
const SEND: [&str; 5] = ["sg", "tso", "gso", "tx", "tx-udp-segmentation"];
const RECEIVE: [&str; 2] = ["gro", "rx"];

/// A process of this program in a separate network namespace, controlled by lines on its standard input.
struct Side(Child, BufReader<std::process::ChildStdout>);

impl Side {
    fn start(role: &str) -> Self {
        let program = std::env::current_exe().unwrap();
        let mut child = Command::new("unshare")
            .args(["--net"])
            .arg(program)
            .args(["--exact", role, "--ignored", "--nocapture"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let mut side = Self(child, lines);
        assert!(side.wait_for("here"), "unshare(1) makes a network namespace");
        side
    }

    fn send_line(&mut self, line: &str) {
        writeln!(self.0.stdin.as_mut().unwrap(), "{line}").unwrap();
    }

    /// Reads until the line `word`. Returns false at the end of the output.
    fn wait_for(&mut self, word: &str) -> bool {
        // The test harness writes on the same line.
        self.1.by_ref().lines().map_while(Result::ok).any(|line| line.ends_with(word))
    }

    fn inside(&self, words: &[&str]) -> bool {
        let pid = self.0.id().to_string();
        let run = Command::new("nsenter").args(["--net", "--target", &pid]).args(words).output();
        run.is_ok_and(|output| output.status.success())
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_for_line() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim().to_owned()
}

#[towpath_testenv::needs(netns, "nsenter", "ethtool")]
#[test]
fn offload_matrix() {
    let (mut receiver, mut sender) =
        (Side::start("offloads::receiving_end"), Side::start("offloads::sending_end"));
    let pids = [sender.0.id(), receiver.0.id()].map(|pid| pid.to_string());
    let pair =
        ["link", "add", "tps0", "netns", &pids[0], "type", "veth", "peer", "name", "tps1", "netns", &pids[1]];
    assert!(Command::new("ip").args(pair).output().unwrap().status.success());
    for (side, device, address) in [(&sender, "tps0", "10.98.0.1/24"), (&receiver, "tps1", "10.98.0.2/24")] {
        assert!(side.inside(&["ip", "address", "add", address, "dev", device]));
        assert!(side.inside(&["ip", "link", "set", device, "up"]));
    }
    receiver.send_line("go");
    assert!(receiver.wait_for("listening"));
    for (send, receive) in [("on", "on"), ("on", "off"), ("off", "on"), ("off", "off")] {
        for name in SEND {
            // Some of them are fixed on some kernels.
            sender.inside(&["ethtool", "-K", "tps0", name, send]);
        }
        for name in RECEIVE {
            receiver.inside(&["ethtool", "-K", "tps1", name, receive]);
        }
        sender.send_line("go");
        assert!(sender.wait_for("sent"), "offloads of the sender {send}, of the receiver {receive}");
    }
}

/// Accepts connections and datagrams, and replies with the number of correct bytes.
#[test]
#[ignore = "run by another test, in a separate namespace"]
fn receiving_end() {
    println!("\nhere");
    wait_for_line();
    let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, PORT));
    let (listener, datagrams) = (TcpListener::bind(any).unwrap(), UdpSocket::bind(any).unwrap());
    std::thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while let Ok((len, from)) = datagrams.recv_from(&mut buffer) {
            let right = buffer[..len] == pattern(0, len);
            datagrams.send_to(&if right { len as u32 } else { u32::MAX }.to_ne_bytes(), from).unwrap();
        }
    });
    println!("\nlistening");
    for stream in listener.incoming() {
        let (mut stream, mut got) = (stream.unwrap(), Vec::new());
        stream.read_to_end(&mut got).unwrap();
        let expected: Vec<u8> = LENGTHS.into_iter().flat_map(|len| pattern(0, len)).collect();
        stream.write_all(&[u8::from(got == expected)]).unwrap();
    }
}

#[test]
#[ignore = "run by another test, in a separate namespace"]
fn sending_end() {
    println!("\nhere");
    let to = SocketAddr::from((Ipv4Addr::new(10, 98, 0, 2), PORT));
    while wait_for_line() == "go" {
        for corked in [false, true] {
            for batch in [1, 16] {
                stream(to, corked, batch);
            }
        }
        datagrams(to);
        println!("\nsent");
    }
}

fn stream(to: SocketAddr, corked: bool, batch: usize) {
    let stream = TcpStream::connect(to).unwrap();
    sockopt::set_tcp_cork(&stream, corked).unwrap();
    let mut answers = stream.try_clone().unwrap();
    let mut sender = Sender::new(stream, Options { batch, ..zerocopy() }).unwrap();
    for len in LENGTHS {
        sender.queue(0, pattern(0, len)).unwrap();
    }
    let closed = sender.close(PATIENCE).unwrap();
    assert!(closed.finished && closed.counters.tampered == 0, "{closed:?}");
    assert_eq!(closed.counters.completed, closed.counters.numbers);
    assert_eq!(closed.counters.zerocopy_bytes, LENGTHS.iter().sum::<usize>() as u64);
    let mut right = [0];
    answers.read_exact(&mut right).unwrap();
    assert_eq!(right, [1], "corked {corked}, {batch} at once");
}

fn datagrams(to: SocketAddr) {
    let connected = || {
        let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
        socket.connect(to).unwrap();
        socket.set_read_timeout(Some(PATIENCE)).unwrap();
        (socket.try_clone().unwrap(), socket)
    };
    let answer = |answers: &UdpSocket, len: usize| {
        let mut said = [0; 4];
        // A completion of io_uring interrupts a receive with a timeout, which is then not restarted (signal(7)).
        let received = loop {
            match answers.recv(&mut said) {
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                received => break received.unwrap(),
            }
        };
        assert_eq!(received, said.len());
        assert_eq!(u32::from_ne_bytes(said), len as u32);
    };
    let (answers, socket) = connected();
    let mut sender = Sender::new(socket, zerocopy()).unwrap();
    for len in DATAGRAMS {
        sender.send(pattern(0, len)).unwrap();
        answer(&answers, len);
    }
    drain(&mut sender, to);

    let (bytes, segment) = SEGMENTED;
    let (answers, socket) = connected();
    let mut sender = Sender::new(socket, Options { segment: Some(segment), ..zerocopy() }).unwrap();
    let whole = pattern(0, segment.into());
    let sent: Vec<u8> = whole.iter().copied().cycle().take(bytes).collect();
    sender.send(sent).unwrap();
    for part in [segment.into()]
        .repeat(bytes / usize::from(segment))
        .into_iter()
        .chain([bytes % usize::from(segment)])
    {
        answer(&answers, part);
    }
    drain(&mut sender, to);
}

/// Waits for the completions. The kernel frees a received skb on the CPU that sent it, when the next packet arrives there
/// (`skb_attempt_defer_free`), so this sends packets on an otherwise idle machine.
fn drain(sender: &mut Sender, to: SocketAddr) {
    let other = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
    let deadline = Instant::now() + PATIENCE;
    while !sender.drain(Duration::from_millis(100)).unwrap() {
        assert!(Instant::now() < deadline, "{:?}", sender.counters());
        for cpu in std::thread::available_parallelism().iter().flat_map(|cpus| 0..cpus.get()) {
            let mut cpus = CpuSet::new();
            cpus.set(cpu);
            let _ = std::thread::scope(|scope| {
                scope
                    .spawn(|| sched_setaffinity(None, &cpus).map(|()| other.send_to(&pattern(0, 1), to)))
                    .join()
            });
        }
    }
}
