//! Runs a C program on the queue of an engine that the test plays: restarts, deadlines, flags and errors.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use towpath_ring::{Channel, Config, Decision, Endpoint, Interfaces, Kind, Layers, Meta, Seq, Verdict};

struct Program {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

struct World {
    directory: tempfile::TempDir,
}

/// An IPv4 packet without a link header.
const PACKET: [u8; 28] =
    [0x45, 0, 0, 28, 0, 0, 0, 0, 9, 17, 0, 0, 10, 1, 1, 1, 10, 2, 2, 2, 0, 7, 0, 9, 0, 8, 0, 0];

impl World {
    fn new() -> Self {
        Self { directory: tempfile::tempdir().unwrap() }
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("queue-1.sock")
    }

    /// The engine's socket; frames are overdue after a second of the clock that polls state.
    fn endpoint(&self) -> Endpoint {
        Endpoint::bind(self.socket(), Config::default()).unwrap()
    }

    /// An engine, and a program that has opened queue 1.
    fn opened() -> (Self, Endpoint, Channel, Program) {
        let world = Self::new();
        let mut endpoint = world.endpoint();
        let mut program = world.start();
        program.request("open 1");
        let channel = accept(&mut endpoint);
        assert_eq!(program.line(), "open 0 0");
        (world, endpoint, channel, program)
    }

    /// Starts `console.c`, which executes the calls that its standard input names.
    fn start(&self) -> Program {
        let program = self.directory.path().join("console");
        let output = Command::new("cc")
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&program)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/console.c"))
            .args(["-lnetfilter_queue", "-lnfnetlink"])
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let mut process = Command::new(&program)
            .env("LD_PRELOAD", std::env::current_exe().unwrap().with_file_name("libnetfilter_queue.so"))
            .env("TOWPATH_NFQUEUE", self.directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (input, output) = (process.stdin.take().unwrap(), process.stdout.take().unwrap());
        Program { process, input, output: BufReader::new(output) }
    }
}

impl Program {
    /// Requests a call.
    fn request(&mut self, call: &str) {
        writeln!(self.input, "{call}").unwrap();
    }

    /// The next line of the program.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    /// The result of a call.
    fn call(&mut self, call: &str) -> String {
        self.request(call);
        self.line()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The program's channel, when it has attached.
fn accept(endpoint: &mut Endpoint) -> Channel {
    for _ in 0..1000 {
        if let Some(channel) = endpoint.accept().unwrap() {
            return channel;
        }
        endpoint.wait(Some(Duration::from_millis(20))).unwrap();
    }
    panic!("the program did not attach");
}

fn send(channel: &mut Channel, meta: &Meta) -> Seq {
    send_bytes(channel, meta, &PACKET)
}

fn send_bytes(channel: &mut Channel, meta: &Meta, packet: &[u8]) -> Seq {
    let layers = Layers { link: 101, network: 0, payload: 28 };
    let seq = channel.send(packet, &Meta { kind: Kind::PACKET, layers, ..*meta }).unwrap();
    channel.kick();
    seq
}

/// Polls at `now` until there is a verdict.
fn verdict(channel: &mut Channel, now: u64) -> (Seq, Decision<'static>) {
    let mut found = None;
    for _ in 0..1000 {
        channel.poll_verdicts(now, |seq, decision| {
            let verdict = match decision.verdict {
                Verdict::Replace(bytes) => Verdict::Replace(Box::leak(bytes.to_vec().into_boxed_slice())),
                Verdict::Queue(number) => Verdict::Queue(number),
                Verdict::Pass => Verdict::Pass,
                Verdict::Repeat => Verdict::Repeat,
                _ => Verdict::Drop,
            };
            let Decision { mark, mask, flow, cause, .. } = decision;
            found = Some((seq, Decision { verdict, mark, mask, flow, cause }));
        });
        if let Some(found) = found {
            return found;
        }
        channel.wait(Some(Duration::from_millis(20))).unwrap();
    }
    panic!("no verdict");
}

/// The program goes on when the engine has restarted; ids continue, and packets of the engine that ended are unknown.
#[towpath_testenv::needs(libnetfilter_queue)]
#[test]
fn the_library_attaches_to_a_restarted_engine() {
    let (world, mut endpoint, mut channel, mut program) = World::opened();
    send(&mut channel, &Meta::default());
    assert_eq!(program.call("recv"), "1 hook=0 in=0 out=0 phys=0,0 mark=0 len=28");
    for id in [2, 4, 6] {
        drop(channel);
        drop(endpoint);
        endpoint = world.endpoint();
        channel = accept(&mut endpoint);
        let seq = send(&mut channel, &Meta::default());
        assert_eq!(program.call("recv"), format!("{id} hook=0 in=0 out=0 phys=0,0 mark=0 len=28"));
        assert_eq!(program.call(&format!("verdict {} 1", id - 1)), "verdict -1 2", "ENOENT");
        assert_eq!(program.call(&format!("verdict {id} 1")), "verdict 32 0");
        assert_eq!(verdict(&mut channel, 1), (seq, Verdict::Pass.into()));
        send(&mut channel, &Meta::default());
        assert_eq!(program.call("recv"), format!("{} hook=0 in=0 out=0 phys=0,0 mark=0 len=28", id + 1));
    }
}

/// The library copies large payloads from the ring while `nfq_handle_packet` reads the messages, and only then.
#[towpath_testenv::needs(libnetfilter_queue)]
#[test]
fn a_large_payload_stays_in_the_ring_if_the_library_handles_the_messages() {
    let (world, endpoint, mut channel, mut program) = World::opened();
    let large: Vec<u8> = PACKET.iter().copied().cycle().take(9000).collect();
    let mut id = 0;
    let mut exchange = |program: &mut Program, channel: &mut Channel, read: &str| {
        id += 1;
        let seq = send_bytes(channel, &Meta::default(), &large);
        let said = program.call(read);
        let bytes: usize = program.call("bytes").split(' ').nth(1).unwrap().parse().unwrap();
        assert_eq!(program.call(&format!("verdict {id} 1")), "verdict 32 0");
        assert_eq!(verdict(channel, 1).0, seq);
        (said, bytes)
    };
    let line = |id: u32| format!("{id} hook=0 in=0 out=0 phys=0,0 mark=0 len=9000");
    for id in 1..=16 {
        let (said, bytes) = exchange(&mut program, &mut channel, "recv");
        assert_eq!((said, bytes > 9000), (line(id), true));
    }
    for id in 17..=20 {
        let (said, bytes) = exchange(&mut program, &mut channel, "recv");
        assert_eq!((said, bytes < 200), (line(id), true), "{bytes}");
    }
    // The program parses the messages itself from here on. The library knows it after a number of them.
    for _ in 0..257 {
        exchange(&mut program, &mut channel, "raw");
    }
    assert!(exchange(&mut program, &mut channel, "raw").1 > 9000);
    assert_eq!(exchange(&mut program, &mut channel, "recv").0, line(279));
    // An engine that ends: the program has no callback for a payload that is gone.
    for _ in 0..16 {
        exchange(&mut program, &mut channel, "recv");
    }
    send_bytes(&mut channel, &Meta::default(), &large);
    assert_eq!(program.call("wait"), "wait 1 0");
    drop((channel, endpoint));
    let mut endpoint = world.endpoint();
    let mut channel = accept(&mut endpoint);
    program.request("recv");
    send(&mut channel, &Meta::default());
    assert_eq!(program.call("recv"), "297 hook=0 in=0 out=0 phys=0,0 mark=0 len=28");
}

/// A daemon that forks after it has opened its queue has the queue in the last process; a child beside a running process changes nothing.
#[towpath_testenv::needs(libnetfilter_queue)]
#[test]
fn a_daemon_has_its_queue_after_it_has_forked() {
    let (_world, mut endpoint, mut channel, mut program) = World::opened();
    assert_eq!(program.call("child"), "child 0 0");
    send(&mut channel, &Meta::default());
    assert_eq!(program.call("recv"), "1 hook=0 in=0 out=0 phys=0,0 mark=0 len=28");
    program.request("daemon");
    let mut channel = accept(&mut endpoint);
    assert_ne!(channel.peer().pid, program.process.id());
    assert_eq!(program.line(), "daemon 0 0");
    for id in [2, 3] {
        let seq = send(&mut channel, &Meta::default());
        assert_eq!(program.call("recv"), format!("{id} hook=0 in=0 out=0 phys=0,0 mark=0 len=28"));
        assert_eq!(program.call(&format!("verdict {id} 1")), "verdict 32 0");
        assert_eq!(verdict(&mut channel, 1), (seq, Verdict::Pass.into()));
    }
    assert_eq!(program.call("verdict 1 1"), "verdict -1 2", "ENOENT: it was the parent's");
}

/// A verdict for a packet that got the default verdict of the engine is ENOENT, and returns its memory.
#[towpath_testenv::needs(libnetfilter_queue)]
#[test]
fn a_verdict_for_an_overdue_packet_is_enoent() {
    let (_world, _endpoint, mut channel, mut program) = World::opened();
    let first = send(&mut channel, &Meta::default());
    assert!(program.call("recv").starts_with("1 "));
    channel.poll_verdicts(1, |_, _| panic!("no verdict yet"));
    let (seq, decision) = verdict(&mut channel, 3_000_000_000);
    assert_eq!((seq, decision.verdict, decision.cause), (first, Verdict::Drop, towpath_ring::Cause::Overdue));
    assert_eq!(program.call("verdict 1 1"), "verdict -1 2");
    let second = send(&mut channel, &Meta::default());
    assert!(program.call("recv").starts_with("2 "));
    assert_eq!(program.call("verdict 2 1"), "verdict 32 0");
    assert_eq!(verdict(&mut channel, 3_000_000_001).0, second);
    assert_eq!(channel.stats().late, 1, "the memory of the first packet was returned");
}

/// The attributes are those of the frame's header, and every verdict reaches the engine as its own.
#[towpath_testenv::needs(libnetfilter_queue)]
#[test]
fn attributes_and_verdicts() {
    let (_world, _endpoint, mut channel, mut program) = World::opened();
    let interfaces = Interfaces { ingress: 3, egress: 4, hook: 2, bridged: true };
    let rows = [
        ("verdict ID 0", "32", Decision::from(Verdict::Drop)),
        ("verdict ID 1", "32", Verdict::Pass.into()),
        ("verdict ID 4", "32", Verdict::Repeat.into()),
        ("verdict ID 5", "32", Verdict::Pass.into()),
        // NF_QUEUE_NR(9).
        ("verdict ID 589827", "32", Verdict::Queue(9).into()),
        ("mark ID 1 7", "40", Decision::from(Verdict::Pass).with_mark(7, u32::MAX)),
        ("oldmark ID 1 7", "40", Decision::from(Verdict::Pass).with_mark(7_u32.to_be(), u32::MAX)),
        ("batchmark ID 1 8", "40", Decision::from(Verdict::Pass).with_mark(8, u32::MAX)),
        ("replace ID abc 9", "47", Decision::from(Verdict::Replace(b"abc")).with_mark(9, u32::MAX)),
    ];
    for (id, (call, sent, decision)) in (1..).zip(rows) {
        let meta = Meta { mark: 5, sender: Some(interfaces.into()), ..Meta::default() };
        let seq = send(&mut channel, &meta);
        assert_eq!(program.call("recv"), format!("{id} hook=2 in=3 out=4 phys=3,4 mark=5 len=28"));
        let name = call.split(' ').next().unwrap();
        assert_eq!(program.call(&call.replace("ID", &id.to_string())), format!("{name} {sent} 0"));
        assert_eq!(verdict(&mut channel, 1), (seq, decision), "{call}");
    }
    // Flags that need the kernel, an unknown one, and unknown modes.
    for (call, result) in [
        ("flags 2 2", "flags -1 95"),
        ("flags 16 16", "flags -1 95"),
        ("flags 32 32", "flags -1 22"),
        ("flags 13 13", "flags 0 0"),
        ("mode 3", "mode -1 22"),
        ("maxlen 1", "maxlen 0 0"),
        ("open 1", "open -1 16"),
        ("open 2", "open -1 2"),
    ] {
        assert_eq!(program.call(call), result);
    }
    // NFQA_CFG_F_FAIL_OPEN: beyond `maxlen`, packets pass without the program.
    let first = send(&mut channel, &Meta::default());
    assert!(program.call("recv").starts_with("10 "));
    let second = send(&mut channel, &Meta::default());
    assert_eq!(verdict(&mut channel, 1), (second, Verdict::Pass.into()));
    // The copy mode NONE drops packets.
    assert_eq!(program.call("verdict 10 1"), "verdict 32 0");
    assert_eq!(verdict(&mut channel, 1).0, first);
    assert_eq!(program.call("mode 0"), "mode 0 0");
    let third = send(&mut channel, &Meta::default());
    assert_eq!(verdict(&mut channel, 1), (third, Verdict::Drop.into()));
}

/// Without an engine, a queue does not exist.
#[towpath_testenv::needs(libnetfilter_queue)]
#[test]
fn without_an_engine_a_queue_does_not_exist() {
    let world = World::new();
    assert_eq!(world.start().call("open 1"), "open -1 2");
    drop(world.endpoint());
    assert_eq!(world.start().call("open 1"), "open -1 2");
}

/// A queue that is destroyed and created again keeps its channel and its packets: those in the socket, and those without a verdict.
#[towpath_testenv::needs(libnetfilter_queue)]
#[test]
fn a_queue_that_is_created_again_loses_no_packet() {
    let (_world, _endpoint, mut channel, mut program) = World::opened();
    let packet = |id| format!("{id} hook=0 in=0 out=0 phys=0,0 mark=0 len=28");
    let mut next = 1;
    for _ in 0..20 {
        // The program has read the first packet and not the second one.
        let first = send(&mut channel, &Meta::default());
        assert_eq!(program.call("recv"), packet(next));
        let second = send(&mut channel, &Meta::default());
        assert_eq!(program.call("wait"), "wait 1 0");
        assert_eq!(program.call("destroy"), "destroy 0 0");
        assert_eq!(program.call("open 1"), "open 0 0");
        assert_eq!([program.call("recv"), program.call("recv")], [packet(next + 1), packet(next)]);
        let third = send(&mut channel, &Meta::default());
        assert_eq!(program.call("recv"), packet(next + 2));
        for (id, seq) in (next..).zip([first, second, third]) {
            assert_eq!(program.call(&format!("verdict {id} 1")), "verdict 32 0");
            assert_eq!(verdict(&mut channel, 1), (seq, Verdict::Pass.into()));
        }
        next += 3;
    }
    // Without the second call, the channel ends.
    assert_eq!(program.call("destroy"), "destroy 0 0");
    while !channel.is_dead() {
        channel.wait(Some(Duration::from_millis(20))).unwrap();
        channel.check_peer();
    }
}
