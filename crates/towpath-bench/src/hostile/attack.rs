//! The attackers. Each is a process that attacks until its time is over, and then exits without closing anything. Its time begins with its
//! first operation.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use towpath_ring::{Consumer, Decision, Verdict};

use super::pass_on::{self, COLLECTED, How};
use super::raw_ring::{self, DOORBELL, ONESHOT, RawRing, notice};
use crate::peer::netns;
use crate::raw::say;

/// User id of the attackers if this program runs as root: the overflow uid, which owns no files.
pub(super) const OTHER_USER: u32 = 65534;
/// Unit of [`cpu_ticks`]: USER_HZ of include/asm-generic/param.h is 100.
pub(super) const TICK: Duration = Duration::from_millis(10);
/// Operations done.
static COUNT: AtomicU64 = AtomicU64::new(0);
/// Longest time until the first operation, and until the first memory of a mode that collects it, on a busy machine.
const BEGIN: Duration = Duration::from_secs(20);
/// Pause after a refusal: an attacker that is barred or over its quota tries again.
const REFUSED: Duration = Duration::from_millis(1);
/// Length of long replacements; the engine permits packets of a frame.
const LONG: usize = 60_000;
/// Connections that `slots` and `control-idle` hold.
const SLOTS: usize = 200;
const IDLE: usize = 40;
/// Connections that `worker-unread` holds without reading, and for how long.
const UNREAD: usize = 4;
const HELD: Duration = Duration::from_secs(2);

/// The order of an attacker.
#[derive(Debug, clap::Args)]
pub(crate) struct Attack {
    /// One of [`super::MODES`].
    mode: String,
    /// The engine's directory.
    directory: PathBuf,
    /// Address of the mux with the hostile worker.
    mux: String,
    milliseconds: u64,
    /// `other-user` or `same-user`.
    user: String,
    /// Lanes of each ring to attack.
    lanes: u32,
    /// The process whose network namespace to join; 0: none.
    netns_pid: u32,
    /// The part of the time in which the mode `busy` is busy.
    share: f64,
}

/// Runs an attacker. Prints the number of operations, the bytes of memory that it has collected, its CPU time in [`TICK`]s, and the
/// milliseconds since its start.
pub(crate) fn side(order: &Attack) -> Result<()> {
    let Attack { mode, directory, mux, milliseconds, user, lanes, netns_pid, share } = order;
    if *netns_pid != 0 {
        netns::join(*netns_pid)?;
    }
    if user == "other-user" {
        become_other_user()?;
    }
    // `exit` below ends the process without closing anything first, as a kill does.
    let (time, begun) = (Duration::from_millis(*milliseconds), Instant::now());
    let collects = [super::PASS_ON, super::REOPEN].contains(&&**mode);
    thread::spawn(move || {
        let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let begins = || count(&COUNT) > 0 && (!collects || count(&COLLECTED) > 0);
        while !begins() && begun.elapsed() < BEGIN {
            thread::sleep(REFUSED);
        }
        thread::sleep(time);
        let counts = [&COUNT, &COLLECTED].map(count);
        let spent = [cpu_ticks().unwrap_or(0), begun.elapsed().as_millis() as u64];
        let mut numbers = counts.into_iter().chain(spent);
        let said = numbers.try_for_each(|number| say(&number.to_string()));
        std::process::exit(i32::from(said.is_err()));
    });
    let at = |name: &str| directory.join(name);
    let (queue, other, control) = (at("attacked.sock"), at("other.sock"), at("ctl.sock"));
    let attacked = &Target { queue: &queue, lanes: *lanes };
    match mode.as_str() {
        super::BUSY => busy(*share),
        "attach" => attach(&[queue, at("ctl.sock.ring")]),
        "refusals" | "log-stops" => refusals(&queue),
        "slots" => slots(&queue),
        "doorbells" => doorbells(attacked),
        "words" => words(attacked),
        "descriptors" => descriptors(attacked),
        "linger" => linger(&queue, &at("ctl.sock.ring"), &control),
        "slow" => inspect(attacked, Inspector::Slow),
        "hold-replace" => inspect(attacked, Inspector::HoldReplace),
        "queues" => inspect(attacked, Inspector::Queues),
        "may-queue" => {
            let lanes = *lanes;
            thread::spawn(move || inspect(&Target { queue: &other, lanes }, Inspector::MayQueue));
            inspect(attacked, Inspector::MayQueue)
        }
        "punch" => punch(attacked),
        "handles" => handles(attacked),
        "watchers" => watchers(&at("watched.sock")),
        super::PASS_ON => pass_on::collect(&queue, How::Descriptors, did),
        super::REOPEN => pass_on::collect(&queue, How::Paths, did),
        "control" => requests(&control),
        "control-idle" => idle_control(&control),
        "control-unread" => unread_answers(&control),
        "trickle" => trickle(mux),
        "worker" | "worker-late" | "worker-linger" | "worker-parts" | "worker-empty" => messages(mux),
        "worker-unread" => unread_messages(mux),
        other => bail!("unknown mode {other:?}"),
    }
}

/// The attackers' queue, and how many lanes of a ring they attack.
struct Target<'a> {
    queue: &'a Path,
    lanes: u32,
}

fn become_other_user() -> Result<()> {
    use rustix::process::{Gid, Uid};
    // The side has no other thread yet, so the calling thread is the process.
    rustix::thread::set_thread_groups(&[]).context("dropping groups")?;
    let (uid, gid) = (Uid::from_raw(OTHER_USER), Gid::from_raw(OTHER_USER));
    rustix::thread::set_thread_res_gid(gid, gid, gid).context("changing the group")?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).context("changing the user")
}

fn did() {
    COUNT.fetch_add(1, Ordering::Relaxed);
}

/// Numbers for the attackers: Knuth's MMIX generator (The Art of Computer Programming, volume 2, 3.3.4).
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0 ^ self.0 >> 33
    }

    pub(super) fn below(&mut self, end: usize) -> usize {
        (self.next() >> 8) as usize % end
    }
}

/// Computes and makes system calls for this share of each millisecond. Never yields the CPU (sched_yield(2)), because no attacker does.
fn busy(share: f64) -> Result<()> {
    const PERIOD: Duration = Duration::from_millis(5);
    let mut random = Random(1);
    loop {
        let begun = Instant::now();
        compute(&mut random);
        while begun.elapsed() < PERIOD.mul_f64(share) {
            compute(&mut random);
        }
        thread::sleep(PERIOD.saturating_sub(begun.elapsed()));
    }
}

fn compute(random: &mut Random) {
    for _ in 0..10_000 {
        std::hint::black_box(random.next());
    }
    std::hint::black_box(rustix::process::getppid());
    did();
}

/// CPU time of this process and of its children that have ended, in [`TICK`]s.
fn cpu_ticks() -> Result<u64> {
    let [own, children] = process_ticks("self")?;
    Ok(own + children)
}

/// CPU time of a process and of its children that have ended, in [`TICK`]s (utime, stime, cutime and cstime of proc_pid_stat(5)).
pub(super) fn process_ticks(process: &str) -> Result<[u64; 2]> {
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name may contain spaces.
    let (_, fields) = stat.rsplit_once(')').context("no name in the file stat")?;
    let times: Vec<u64> =
        fields.split_whitespace().skip(11).take(4).map(str::parse).collect::<Result<_, _>>()?;
    ensure!(times.len() == 4, "too few fields in the file stat");
    Ok([times[0] + times[1], times[2] + times[3]])
}

/// Attaches and ends, in a loop.
fn attach(paths: &[PathBuf]) -> Result<()> {
    for path in paths.iter().cycle() {
        did();
        if RawRing::attach(path, 1).is_err() {
            thread::sleep(REFUSED);
        }
    }
    Ok(())
}

/// Sends messages that are not a valid hello.
fn refusals(path: &Path) -> Result<()> {
    let mut random = Random(2);
    loop {
        did();
        let Ok(socket) = raw_ring::connect(path) else {
            thread::sleep(REFUSED);
            continue;
        };
        let mut hello: Vec<u8> = std::iter::repeat_with(|| random.next() as u8).take(64).collect();
        if random.below(2) == 0 {
            // Another version of the ABI.
            hello[..4].copy_from_slice(b"TPRG");
        }
        raw_ring::send(&socket, &hello, &[]);
    }
}

/// Holds connections and never sends a hello.
fn slots(path: &Path) -> Result<()> {
    let mut held = VecDeque::new();
    loop {
        did();
        match raw_ring::connect(path) {
            Ok(socket) => held.push_back(socket),
            Err(_) => thread::sleep(REFUSED),
        }
        if held.len() > SLOTS {
            held.pop_front();
        }
    }
}

/// Attaches whenever the engine permits it, and calls `turn` until the engine ends the channel.
fn attached(target: &Target<'_>, mut turn: impl FnMut(&RawRing) -> bool) -> Result<()> {
    loop {
        did();
        let Ok(ring) = RawRing::attach(target.queue, target.lanes) else {
            thread::sleep(REFUSED);
            continue;
        };
        while ring.is_open() && (0..256).all(|_| turn(&ring)) {
            did();
        }
    }
}

fn doorbells(target: &Target<'_>) -> Result<()> {
    attached(target, |ring| raw_ring::send(&ring.socket, &notice(DOORBELL, 0, 0), &[]))
}

/// Writes random words over all memory that a client may write.
fn words(target: &Target<'_>) -> Result<()> {
    let mut random = Random(3);
    attached(target, |ring| {
        let word = match random.below(3) {
            0 => random.next(),
            1 => random.next() % 64,
            // A verdict for one of the first messages.
            _ => (random.next() % 64) | ((random.next() % 9) << 32) | ((random.next() % 16) << 48),
        };
        ring.write(random.below(ring.words()), word);
        random.below(1000) > 0 || raw_ring::send(&ring.socket, &notice(DOORBELL, 0, 0), &[])
    })
}

/// Announces payloads and passes anything instead.
fn descriptors(target: &Target<'_>) -> Result<()> {
    let fds = raw_ring::any_descriptors()?;
    let mut random = Random(4);
    attached(target, |ring| {
        let count = random.below(fds.len() + 1);
        let seq = random.below(4) as u32;
        raw_ring::send(&ring.socket, &notice(ONESHOT, seq, random.next()), &raw_ring::borrowed(&fds[..count]))
    })
}

/// Frees the pages of all memory that it may (FALLOC_FL_PUNCH_HOLE of fallocate(2)). The next access of the engine to a page
/// allocates it again, and waits while a hole is made there (`shmem_fault` of mm/shmem.c).
fn punch(target: &Target<'_>) -> Result<()> {
    use rustix::fs::{FallocateFlags, fallocate};
    attached(target, |ring| {
        for memory in ring.memories() {
            let len = rustix::fs::fstat(memory).map_or(0, |stat| stat.st_size.cast_unsigned());
            // Refused for memory that only the engine writes.
            let _ = fallocate(memory, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, len);
        }
        true
    })
}

/// Changes everything that a descriptor of the engine permits: size, seals, locks, leases, flags and buffers.
fn handles(target: &Target<'_>) -> Result<()> {
    use rustix::fs::{
        FlockOperation, OFlags, SealFlags, fcntl_add_seals, fcntl_lock, fcntl_setfl, flock, ftruncate,
    };
    use rustix::net::sockopt;
    let mut random = Random(7);
    // Most calls are refused.
    attached(target, |ring| {
        for memory in ring.memories() {
            let _ = match random.below(6) {
                0 => ftruncate(memory, random.next() % (1 << 32)),
                1 => fcntl_add_seals(memory, SealFlags::from_bits_retain(random.next() as u32 % 64)),
                2 => flock(memory, FlockOperation::NonBlockingLockExclusive),
                3 => fcntl_lock(memory, FlockOperation::NonBlockingLockExclusive),
                4 => fcntl_setfl(memory, OFlags::from_bits_retain(random.next() as u32)),
                _ => rustix::fs::fchmod(memory, rustix::fs::Mode::empty()),
            };
        }
        let socket = &ring.socket;
        let _ = match random.below(4) {
            0 => rustix::io::ioctl_fionbio(socket, random.below(2) == 0),
            1 => sockopt::set_socket_recv_buffer_size(socket, random.below(1 << 16)),
            2 => sockopt::set_socket_passcred(socket, random.below(2) == 0),
            _ => sockopt::set_socket_linger(socket, Some(Duration::from_secs(5))),
        };
        // At last, it receives nothing any more.
        random.below(1000) > 0 || rustix::net::shutdown(socket, rustix::net::Shutdown::Read).is_ok()
    })
}

/// Attaches as often as the engine permits to a queue that copies every packet to each of its inspectors, and reads nothing.
fn watchers(path: &Path) -> Result<()> {
    let mut watchers: Vec<RawRing> = Vec::new();
    loop {
        did();
        match RawRing::attach(path, 1) {
            Ok(ring) => watchers.push(ring),
            Err(_) => thread::sleep(REFUSED * 10),
        }
        watchers.retain(RawRing::is_open);
    }
}

/// Passes sockets whose last close blocks: before and after acceptance, to the ring of dumps, and to the control socket.
fn linger(queue: &Path, dump: &Path, control: &Path) -> Result<()> {
    // The other ends, which never read.
    let mut peers = VecDeque::new();
    for turn in 0_u64.. {
        did();
        let (socket, peer) = raw_ring::lingering()?;
        peers.push_back(peer);
        if peers.len() > 100 {
            peers.pop_front();
        }
        let fds = [socket.as_fd()];
        match turn % 4 {
            0 => {
                if let Ok(early) = raw_ring::connect(queue) {
                    raw_ring::send(&early, b"no hello", &fds);
                }
            }
            1 | 2 => {
                let path = if turn % 4 == 1 { queue } else { dump };
                if let Ok(ring) = RawRing::attach(path, 1) {
                    raw_ring::send(&ring.socket, &notice(DOORBELL, 0, 0), &fds);
                    raw_ring::send(&ring.socket, &notice(ONESHOT, 1, 100), &fds);
                }
            }
            _ => {
                // Fails for a user without access.
                if let Ok(stream) = UnixStream::connect(control) {
                    raw_ring::send(&stream, b"{}\n", &fds);
                }
            }
        }
        drop(socket);
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// An inspector that keeps the protocol, and harms anyway.
enum Inspector {
    /// Never answers.
    Slow,
    /// Holds a packet and replaces the others by long ones.
    HoldReplace,
    /// Sends every flow to another queue.
    Queues,
    /// Sends packets to the queues that its queue may name, and to the honest inspector's.
    MayQueue,
}

fn inspect(target: &Target<'_>, how: Inspector) -> Result<()> {
    let mut random = Random(5);
    loop {
        let Ok(mut queue) = Consumer::attach_as(target.queue, "hostile") else {
            did();
            thread::sleep(REFUSED);
            continue;
        };
        queue.set_send_timeout(Some(Duration::from_millis(10)));
        let mut held = Vec::new();
        while !queue.is_ended() {
            did();
            let Ok(frame) = queue.recv_timeout(Duration::from_millis(10)) else { break };
            let Some(frame) = frame else { continue };
            if frame.id().lane >= target.lanes {
                queue.verdict(frame, Verdict::Pass);
                continue;
            }
            match how {
                Inspector::Slow => held.push(frame),
                Inspector::HoldReplace if held.len() < 4 => {
                    queue.hold(&frame);
                    held.push(frame);
                }
                Inspector::HoldReplace => {
                    let len = if random.below(4) == 0 { 1400 } else { LONG };
                    // Refused without room: the engine's default decides the packet.
                    let _ = queue.replace(frame, &vec![0x45; len]);
                }
                Inspector::Queues | Inspector::MayQueue => {
                    let number = random.next() as u16;
                    let to = if let Inspector::MayQueue = how { 1 + number % 3 } else { number };
                    let decision = Decision::from(Verdict::Queue(to));
                    queue.verdict(frame, if random.below(2) == 0 { decision.for_flow() } else { decision });
                }
            }
        }
    }
}

/// Sends long, nested and meaningless requests.
fn requests(path: &Path) -> Result<()> {
    let mut random = Random(6);
    loop {
        did();
        let Ok(mut stream) = UnixStream::connect(path) else {
            thread::sleep(REFUSED);
            continue;
        };
        stream.set_write_timeout(Some(Duration::from_millis(100)))?;
        stream.set_read_timeout(Some(Duration::from_millis(100)))?;
        let request: Vec<u8> = match random.below(5) {
            0 => vec![b'['; 1 << 20],
            1 => b"{\"a\":".repeat(100_000),
            2 => vec![b'x'; 1 << 20],
            3 => std::iter::repeat_with(|| random.next() as u8).take(5000).collect(),
            _ => b"{\"show\":\"stats\",\"unknown\":{\"x\":[1,2,3]}}\n".repeat(50),
        };
        // The engine may refuse the rest.
        let _ = stream.write_all(&request);
        let _ = stream.read(&mut [0; 4096]);
    }
}

/// Holds connections, and sends single bytes on some of them.
fn idle_control(path: &Path) -> Result<()> {
    let mut held: VecDeque<UnixStream> = VecDeque::new();
    loop {
        did();
        if held.len() < IDLE
            && let Ok(stream) = UnixStream::connect(path)
        {
            stream.set_nonblocking(true)?;
            held.push_back(stream);
        }
        // A connection that the engine has closed is replaced.
        held.retain_mut(|stream| {
            !matches!(stream.read(&mut [0; 64]), Ok(0))
                && (stream.as_raw_fd() % 4 != 0 || stream.write(b" ").is_ok())
        });
        thread::sleep(Duration::from_millis(20));
    }
}

/// Sends valid requests and reads no answer.
fn unread_answers(path: &Path) -> Result<()> {
    const REQUESTS: [&str; 4] = ["show-rules", "show-states", "show-stats", "events"];
    let mut held: VecDeque<UnixStream> = VecDeque::new();
    for turn in 0_usize.. {
        did();
        if held.len() == IDLE {
            held.pop_front();
        }
        if let Ok(mut stream) = UnixStream::connect(path) {
            stream.set_nonblocking(true)?;
            let body = format!(r#"{{"towpath":1,"do":"{}"}}"#, REQUESTS[turn % REQUESTS.len()]);
            let request = [&(body.len() as u32 + 1).to_le_bytes()[..], &[1], body.as_bytes()].concat();
            // Until the engine reads no more, or closes the connection.
            while (0..1000).all(|_| stream.write_all(&request).is_ok()) {
                did();
            }
            held.push_back(stream);
        }
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

/// Sends single bytes of messages on many connections, and some of them end within a message.
fn trickle(address: &str) -> Result<()> {
    let mut random = Random(8);
    let mut held: VecDeque<TcpStream> = VecDeque::new();
    loop {
        did();
        if held.len() < SLOTS
            && let Ok(mut stream) = TcpStream::connect(address)
        {
            stream.set_nodelay(true)?;
            stream.set_nonblocking(true)?;
            // The first bytes of a message's length: 16 KiB.
            if stream.write(&[0, 0, 64]).is_ok() {
                held.push_back(stream);
            }
        }
        held.retain_mut(|stream| stream.write(&[0]).is_ok() && random.below(500) > 0);
        thread::sleep(Duration::from_millis(5));
    }
}

/// Asks the mux whose worker is hostile.
fn messages(address: &str) -> Result<()> {
    loop {
        did();
        let Ok(mut stream) = TcpStream::connect(address) else {
            thread::sleep(REFUSED);
            continue;
        };
        stream.set_read_timeout(Some(Duration::from_millis(50)))?;
        for _ in 0..16 {
            did();
            if stream.write_all(&[0, 0, 0, 4, 1, 2, 3, 4]).is_err() || stream.read(&mut [0; 64]).is_err() {
                break;
            }
        }
    }
}

/// Sends a message on each of some connections of the mux and reads no answer.
fn unread_messages(address: &str) -> Result<()> {
    loop {
        let connect = || TcpStream::connect(address).ok();
        let mut streams: Vec<TcpStream> = std::iter::repeat_with(connect).take(UNREAD).flatten().collect();
        for stream in &mut streams {
            did();
            // Fails if the mux has ended the connection.
            let _ = stream.write_all(&[0, 0, 0, 4, 1, 2, 3, 4]);
        }
        thread::sleep(HELD);
    }
}
