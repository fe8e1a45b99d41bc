//! Tests of the sender over real sockets: all kinds that support zero copy, those that refuse it, and misbehaving peers.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::checked::{PATIENCE, byte_at, pattern, zerocopy};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;
use towpath_send::{
    Buffer, Closed, CopyMode, LockedMemory, Options, PlainCause, PollSender, Pool, Region, SendError, Sender,
    Sent, Time, Unarmed,
};

fn pair(address: SocketAddr) -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind(SocketAddr::new(
        if address.is_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() },
        0,
    ))
    .unwrap();
    let mut to = address;
    to.set_port(listener.local_addr().unwrap().port());
    let sender = TcpStream::connect(to).unwrap();
    (sender, listener.accept().unwrap().0)
}

fn v4() -> (TcpStream, TcpStream) {
    pair(SocketAddr::from((Ipv4Addr::LOCALHOST, 0)))
}

/// Reads to the end, checks every byte against the pattern, and returns the number of bytes.
fn check(mut stream: impl Read + Send + 'static) -> JoinHandle<u64> {
    thread::spawn(move || {
        let (mut at, mut buffer) = (0, vec![0; 256 << 10]);
        loop {
            let len = stream.read(&mut buffer).unwrap();
            if len == 0 {
                return at;
            }
            for byte in &buffer[..len] {
                assert_eq!(*byte, byte_at(at), "byte {at}");
                at += 1;
            }
        }
    })
}

/// Checks the invariants of a connection that closed cleanly.
fn finished(closed: &Closed) {
    assert!(closed.finished);
    let counters = &closed.counters;
    assert_eq!((counters.completed, counters.duplicates, counters.unknown), (counters.numbers, 0, 0));
    assert_eq!(counters.tampered, 0);
    assert!(closed.remains.quarantine.is_empty() && closed.remains.unsent.is_empty());
}

/// The lengths of the kernel's own test, tools/testing/selftests/net/msg_zerocopy: zero, one, shorter than a header, a page,
/// odd lengths, large.
const LENGTHS: [usize; 9] = [0, 1, 13, 39, 4096, 4097, 65_535, 1 << 20, (8 << 20) + 3];

#[towpath_testenv::needs(ipv6)]
#[test]
fn tcp_of_every_family_corked_and_not() {
    let mapped = Ipv4Addr::LOCALHOST.to_ipv6_mapped();
    for address in [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into(), mapped.into()] {
        for corked in [false, true] {
            let (stream, peer) = pair(SocketAddr::new(address, 0));
            sockopt::set_tcp_cork(&stream, corked).unwrap();
            let reader = check(peer);
            let mut sender = Sender::new(stream, zerocopy()).unwrap();
            let mut at = 0;
            for len in LENGTHS {
                sender.send(pattern(at, len)).unwrap();
                at += len as u64;
            }
            let closed = sender.close(PATIENCE).unwrap();
            finished(&closed);
            assert_eq!(reader.join().unwrap(), at, "{address} corked {corked}");
            assert!(closed.counters.numbers >= 8, "one call for each length except 0: {address}");
            assert_eq!(closed.counters.zerocopy_bytes, at, "{address}");
        }
    }
}

#[towpath_testenv::needs(ipv6)]
#[test]
fn udp_with_and_without_segmentation() {
    for host in [SocketAddr::from((Ipv4Addr::LOCALHOST, 0)), SocketAddr::from((Ipv6Addr::LOCALHOST, 0))] {
        let peer = UdpSocket::bind(host).unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        let connected = || {
            let socket = UdpSocket::bind(host).unwrap();
            socket.connect(peer.local_addr().unwrap()).unwrap();
            socket
        };
        let mut buffer = vec![0; 70_000];
        for choice in [CopyMode::Zerocopy, CopyMode::Adaptive] {
            let mut sender = Sender::new(connected(), Options { choice, ..zerocopy() }).unwrap();
            for len in [0, 1, 7, 1472, 4096, 9001, 65_507 - 20] {
                sender.send(pattern(3, len)).unwrap();
                let got = peer.recv(&mut buffer).unwrap();
                assert!(buffer[..got] == pattern(3, len), "{len}");
            }
            let too_long = sender.send(vec![0; 66_000]);
            assert!(matches!(too_long, Err(SendError::TooLong { bytes: 66_000 })), "{too_long:?}");
            let counters = sender.counters();
            assert_eq!(
                counters.numbers == 0,
                choice == CopyMode::Adaptive,
                "without segmentation it is plain"
            );
        }

        let mut sender = Sender::new(connected(), Options { batch: 16, ..zerocopy() }).unwrap();
        let lengths: Vec<usize> = (0..20).map(|at| at * 237 % 1200).collect();
        for len in &lengths {
            sender.queue(0, pattern(3, *len)).unwrap();
        }
        sender.flush().unwrap();
        for len in &lengths {
            let got = peer.recv(&mut buffer).unwrap();
            assert!(buffer[..got] == pattern(3, *len), "{len} in a batch");
        }

        let segmented = Options { segment: Some(1400), ..zerocopy() };
        let mut sender = Sender::new(connected(), segmented).unwrap();
        let sent = pattern(0, 40 * 1400 + 17);
        sender.send(sent.clone()).unwrap();
        for segment in sent.chunks(1400) {
            let got = peer.recv(&mut buffer).unwrap();
            assert!(buffer[..got] == *segment);
        }
        finished(&sender.close(PATIENCE).unwrap());
    }
}

/// UDP_SEGMENT belongs to the socket, which its duplicates share.
#[test]
fn a_second_udp_sender_does_not_inherit_segmentation() {
    let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
    peer.set_read_timeout(Some(PATIENCE)).unwrap();
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.connect(peer.local_addr().unwrap()).unwrap();
    let received = |what: &str| {
        let mut buffer = [0; 10_000];
        let got = peer.recv(&mut buffer).unwrap();
        assert!(buffer[..got] == pattern(3, 5000), "{what}: {got} bytes");
    };
    let plain = Options { choice: CopyMode::Plain, ..Options::default() };
    let segmented = Options { segment: Some(1000), ..plain.clone() };
    let mut first = Sender::new(socket.try_clone().unwrap(), segmented.clone()).unwrap();
    first.send(pattern(3, 2000)).unwrap();
    for _ in 0..2 {
        assert_eq!(peer.recv(&mut [0; 10_000]).unwrap(), 1000);
    }
    let mut second = Sender::new(socket.try_clone().unwrap(), plain).unwrap();
    second.send(pattern(3, 5000)).unwrap();
    received("the second sender, while the first one exists");
    drop((second, first));
    finished(&Sender::new(socket.try_clone().unwrap(), segmented).unwrap().close(PATIENCE).unwrap());
    socket.send(&pattern(3, 5000)).unwrap();
    received("the socket after its senders");
}

#[towpath_testenv::needs(mptcp)]
#[test]
fn unsupported_sockets_are_sent_plain_or_fail() {
    let refused = |socket: OwnedFd, peer: OwnedFd, why: Unarmed| {
        let reader = check(std::fs::File::from(peer));
        let again = socket.try_clone().unwrap();
        let not = Sender::new(again, zerocopy());
        assert!(matches!(not, Err(SendError::NotSupported { why: said }) if said == why), "{not:?}");
        let adaptive = Options { choice: CopyMode::Adaptive, ..zerocopy() };
        let mut sender = Sender::new(socket, adaptive).unwrap();
        assert_eq!(sender.unarmed(), Some(why));
        sender.send(pattern(0, 1 << 20)).unwrap();
        let closed = sender.close(PATIENCE).unwrap();
        finished(&closed);
        assert_eq!((closed.counters.numbers, closed.counters.plain_bytes()), (0, 1 << 20));
        assert_eq!(reader.join().unwrap(), 1 << 20);
    };
    let (one, other) = UnixStream::pair().unwrap();
    refused(one.into(), other.into(), Unarmed::Refused);

    let mptcp =
        || rustix::net::socket(AddressFamily::INET, SocketType::STREAM, Some(rustix::net::ipproto::MPTCP));
    let (listener, socket) = (mptcp().unwrap(), mptcp().unwrap());
    rustix::net::bind(&listener, &SocketAddr::from((Ipv4Addr::LOCALHOST, 0))).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    rustix::net::connect(&socket, &rustix::net::getsockname(&listener).unwrap()).unwrap();
    refused(socket, rustix::net::accept(&listener).unwrap(), Unarmed::Mptcp);
}

#[test]
fn a_file_is_rejected() {
    let file = std::fs::File::open("/dev/null").unwrap();
    assert!(matches!(Sender::new(file, Options::default()), Err(SendError::NotASocket(_))));
}

/// Random lengths, from frames of a pool, queued for gathering. `TOWPATH_SEND_MESSAGES` sets the number of messages.
#[test]
fn random_message_sizes_arrive_intact() {
    let messages = std::env::var("TOWPATH_SEND_MESSAGES").ok().and_then(|text| text.parse().ok());
    let messages: u64 = messages.unwrap_or(20_000);
    let kinds = [
        (0, 1, CopyMode::Zerocopy),
        (0, 16, CopyMode::Zerocopy),
        (64 << 10, 1, CopyMode::Zerocopy),
        (64 << 10, 1, CopyMode::Adaptive),
    ];
    for (gather, batch, choice) in kinds {
        let (stream, peer) = v4();
        let reader = check(peer);
        let options = Options { gather, batch, choice, max_frames: 200, min_zerocopy: 512, ..zerocopy() };
        let mut pool = Pool::new(202, 32 << 10, true).unwrap();
        let mut sender = Sender::new(stream, options).unwrap();
        let source = pattern(0, 64 << 10);
        let (mut at, mut random) = (0_u64, 1_u64);
        for _ in 0..messages / kinds.len() as u64 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            // Short and long messages are equally likely.
            let len = (random >> 33) as usize % (1 << (1 + (random >> 20) % 15));
            let mut frame = pool.take().expect("max_frames is less than the pool");
            // Every byte encodes its position.
            match usize::try_from(at).ok().and_then(|at| source.get(at..at + len)) {
                Some(bytes) => frame.put(bytes),
                None => frame.put(&pattern(at, len)),
            };
            sender.queue(0, frame).unwrap();
            at += len as u64;
        }
        let closed = sender.close(PATIENCE).unwrap();
        finished(&closed);
        assert_eq!(reader.join().unwrap(), at);
        assert_eq!(closed.counters.zerocopy_bytes + closed.counters.plain_bytes(), at);
    }
}

/// A pool with one frame more than `max_frames` never runs empty.
#[test]
fn empty_messages_return_their_frames() {
    let (stream, peer) = v4();
    let reader = check(peer);
    let mut pool = Pool::new(3, 1, false).unwrap();
    let mut sender = Sender::new(stream, Options { max_frames: 2, ..zerocopy() }).unwrap();
    for _ in 0..100 {
        sender.queue(0, pool.take().expect("at most two frames are in use")).unwrap();
    }
    finished(&sender.close(PATIENCE).unwrap());
    assert_eq!(reader.join().unwrap(), 0);
}

#[test]
fn overwriting_a_frame_in_flight_is_detected() {
    let fd = rustix::fs::memfd_create("frames", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let len = 16 << 20;
    rustix::fs::ftruncate(&fd, len as u64).unwrap();
    let region = Region::map(&fd, len).unwrap();
    let (stream, mut peer) = v4();
    let mut sender = Sender::new(stream, Options { keep_done: true, ..zerocopy() }).unwrap();
    let part = len / 64;
    let mut queued = 0;
    for n in 0..64 {
        sender
            .queue(n, Buffer::region(&region, n as usize * part..(n as usize + 1) * part).unwrap())
            .unwrap();
        queued += 1;
    }
    // The peer reads nothing: the last frame is still in user space or in the socket's queue.
    rustix::io::pwrite(&fd, &[1; 100], len as u64 - 100).unwrap();
    let reader = thread::spawn(move || {
        let mut all = Vec::new();
        peer.read_to_end(&mut all).map(|_| all)
    });
    let closed = sender.close(PATIENCE).unwrap();
    assert!(closed.finished);
    assert_eq!(closed.counters.tampered, 1);
    assert_eq!(closed.remains.done.len(), queued);
    let all = reader.join().unwrap().unwrap();
    assert_eq!((all.len(), all[len - 101], all[len - 1]), (len, 0, 1), "only the overwritten bytes differ");
}

fn assert_all_accounted_for(closed: &Closed, pushed: usize) {
    let remains = &closed.remains;
    assert!(!closed.finished);
    assert_eq!(remains.done.len() + remains.unsent.len() + remains.quarantine.len(), pushed);
    let counters = &closed.counters;
    assert_eq!(counters.numbers, counters.completed + counters.abandoned);
    assert!(remains.quarantine.len() as u64 <= counters.abandoned);
}

#[test]
fn a_reset_is_an_error_and_frames_are_accounted_for() {
    for choice in [CopyMode::Zerocopy, CopyMode::Plain] {
        let (stream, mut peer) = v4();
        let options = Options { choice, keep_done: true, ..zerocopy() };
        let mut sender = Sender::new(stream, options).unwrap();
        let reset = thread::spawn(move || {
            peer.read_exact(&mut vec![0; 3 << 20]).unwrap();
            sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
        });
        let mut pushed = 0;
        let error = loop {
            pushed += 1;
            match sender.send(vec![7; 256 << 10]) {
                Ok(()) if pushed % 64 == 0 => {
                    while sender.reclaim().unwrap().is_some_and(|_| {
                        pushed -= 1;
                        true
                    }) {}
                }
                Ok(()) => {}
                Err(error) => break error,
            }
        };
        assert!(matches!(error, SendError::Gone(_)), "{error}");
        reset.join().unwrap();
        assert_all_accounted_for(&sender.close(PATIENCE).unwrap(), pushed);
    }
}

#[test]
fn discarded_data_is_not_reported_as_sent() {
    for choice in [CopyMode::Zerocopy, CopyMode::Plain] {
        for error_taken in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            // Much less than is sent, so the rest cannot be acknowledged.
            sockopt::set_socket_recv_buffer_size(&listener, 16 << 10).unwrap();
            let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let peer = listener.accept().unwrap().0;
            let mut sender = Sender::new(stream, Options { choice, keep_done: true, ..zerocopy() }).unwrap();
            sender.queue(1, vec![7; 256 << 10]).unwrap();
            // The kernel has accepted all data, and the peer has read none of it.
            sender.flush().unwrap();
            sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
            drop(peer);
            while !polled(&sender).contains(PollFlags::HUP) {}
            if error_taken {
                // The error is reported repeatedly, even after another owner took SO_ERROR.
                let _ = sockopt::socket_error(&sender);
                for _ in 0..2 {
                    let error = sender.drain(PATIENCE).expect_err("the connection was reset");
                    assert!(matches!(error, SendError::Gone(_)), "{error}");
                }
            }
            let closed = sender.close(PATIENCE).unwrap();
            assert!(!closed.finished, "{choice:?}, error_taken: {error_taken}");
            assert_all_accounted_for(&closed, 1);
        }
    }
    let (stream, peer) = UnixStream::pair().unwrap();
    let mut sender = Sender::new(stream, Options { choice: CopyMode::Plain, ..zerocopy() }).unwrap();
    sender.queue(1, vec![7; 10_000]).unwrap();
    sender.flush().unwrap();
    drop(peer);
    assert!(!sender.close(PATIENCE).unwrap().finished, "the peer has read nothing");
}

/// Another owner of the socket shuts it down, and the peer closes in response.
#[test]
fn a_shutdown_by_another_owner_is_no_reset() {
    let (stream, mut peer) = v4();
    let mut shared = stream.try_clone().unwrap();
    let mut sender = Sender::new(stream, zerocopy()).unwrap();
    sender.send(pattern(0, 100_000)).unwrap();
    let reader = thread::spawn(move || peer.read_to_end(&mut Vec::new()).unwrap());
    assert!(sender.drain(PATIENCE).unwrap());
    shared.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(reader.join().unwrap(), 100_000);
    assert_eq!(shared.read(&mut [0]).unwrap(), 0, "the peer has disconnected");
    assert!(sender.drain(PATIENCE).unwrap());
    finished(&sender.close(PATIENCE).unwrap());
}

fn polled(sender: &Sender) -> PollFlags {
    let mut fds = [PollFd::new(sender, PollFlags::empty())];
    poll(&mut fds, None).unwrap();
    fds[0].revents()
}

#[test]
fn a_stalled_peer_holds_only_its_own_frames() {
    for choice in [CopyMode::Zerocopy, CopyMode::Plain] {
        const BUFFERS: usize = 16;
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        sockopt::set_socket_recv_buffer_size(&listener, 16 << 10).unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        sockopt::set_socket_send_buffer_size(&stream, 64 << 10).unwrap();
        let peer = listener.accept().unwrap().0;
        let stall = Some(Duration::from_millis(50));
        let mut sender =
            Sender::new(stream, Options { choice, stall, keep_done: true, ..zerocopy() }).unwrap();
        // Much more than the buffers of both sockets hold, so that a busy machine that stalls the transfer earlier does not complete it
        // later.
        (0..BUFFERS).for_each(|_| sender.queue(0, vec![7; 256 << 10]).unwrap());
        let error = sender.flush().expect_err("the peer does not read");
        assert!(matches!(error, SendError::Stalled(_)), "{error}");
        assert_all_accounted_for(&sender.close(Duration::from_millis(10)).unwrap(), BUFFERS);
        drop(peer);
    }
}

#[test]
fn close_waits_for_completions() {
    let (stream, peer) = v4();
    let mut sender = Sender::new(stream, Options { keep_done: true, ..zerocopy() }).unwrap();
    for n in 0..8 {
        sender.queue(n, pattern(n << 20, 1 << 20)).unwrap();
    }
    let reader = thread::spawn(move || check(peer).join().unwrap());
    let closed = sender.close(PATIENCE).unwrap();
    finished(&closed);
    let mut tokens: Vec<_> = closed.remains.done.iter().map(|done| done.token).collect();
    tokens.sort_unstable();
    assert_eq!(tokens, (0..8).collect::<Vec<_>>());
    assert_eq!(reader.join().unwrap(), 8 << 20);
}

#[test]
fn sending_continues_without_locked_memory() {
    // The limit is per process, so the test runs in a separate process.
    let program = std::env::current_exe().unwrap();
    let words = ["--exact", "sockets::with_little_locked_memory", "--ignored", "--nocapture"];
    let output = Command::new(program).args(words).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
#[ignore = "run by another test, in a separate process"]
fn with_little_locked_memory() {
    // The capability is per thread.
    let limit = Rlimit { current: Some(256 << 10), maximum: getrlimit(Resource::Memlock).maximum };
    setrlimit(Resource::Memlock, limit).unwrap();
    let mut sets = rustix::thread::capabilities(None).unwrap();
    sets.effective.remove(CapabilitySet::IPC_LOCK);
    rustix::thread::set_capabilities(None, sets).unwrap();
    // First with an unknown limit, so that the kernel refuses; then with the real one.
    for locked in [Some(Arc::new(LockedMemory::of_rlimit(None))), None] {
        let known = locked.is_none();
        let (stream, peer) = v4();
        let reader = check(peer);
        let mut sender = Sender::new(stream, Options { locked, ..zerocopy() }).unwrap();
        for n in 0..24 {
            sender.send(pattern(n << 20, 1 << 20)).unwrap();
        }
        let closed = sender.close(PATIENCE).unwrap();
        finished(&closed);
        assert_eq!(reader.join().unwrap(), 24 << 20);
        if !known {
            assert!(closed.counters.no_buffers > 0, "1 MiB exceeds the locked memory");
        }
    }
}

/// Runs the ignored test `name` in a network namespace with `optmem` bytes of option memory.
fn in_namespace(name: &str, optmem: u32) {
    let script = format!(
        "ip link set lo up && echo {optmem} > /proc/sys/net/core/optmem_max && exec \"$0\" --exact {name} --ignored --nocapture"
    );
    let program = std::env::current_exe().unwrap();
    let words = ["--net", "sh", "-c", &script];
    let output = Command::new("unshare").args(words).arg(program).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && said.contains("1 passed"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}

#[towpath_testenv::needs(netns)]
#[test]
fn sending_continues_without_option_memory() {
    in_namespace("sockets::with_little_option_memory", 1500);
}

#[test]
#[ignore = "run by another test, in a separate namespace"]
fn with_little_option_memory() {
    let (stream, peer) = v4();
    let mut sender = Sender::new(stream, Options { stall: None, ..zerocopy() }).unwrap();
    // The peer reads nothing until the groups are exhausted.
    let mut queued = 0;
    while sender.counters().numbers < 8 && queued < 64 {
        sender.queue(0, pattern(queued << 20, 1 << 20)).unwrap();
        queued += 1;
    }
    let reader = check(peer);
    for n in queued..64 {
        sender.send(pattern(n << 20, 1 << 20)).unwrap();
    }
    let closed = sender.close(PATIENCE).unwrap();
    finished(&closed);
    assert_eq!(reader.join().unwrap(), 64 << 20);
    assert_eq!(closed.counters.zerocopy_bytes + closed.counters.plain_bytes(), 64 << 20);
    let short = [PlainCause::Budget, PlainCause::NoBuffers].map(|cause| closed.counters.plain_for(cause));
    assert!(short.iter().sum::<u64>() > 0, "option memory was not exhausted");
}

/// A loopback connection starts in copying mode and reports the reason.
#[test]
fn local_destinations_start_in_copying_mode() {
    let (stream, peer) = v4();
    let reader = check(peer);
    // The time is constant: a second later the sender would probe.
    let now = Time::default();
    let mut sender =
        PollSender::new(stream, Options { choice: CopyMode::Adaptive, ..zerocopy() }, now).unwrap();
    assert_eq!(sender.mode(), towpath_send::Mode::Copying);
    assert!(sender.push(0, pattern(0, 4 << 20)).is_ok());
    while sender.poll_send(now).unwrap() != Sent::Flushed {
        thread::yield_now();
    }
    sender.shutdown().unwrap();
    assert_eq!(reader.join().unwrap(), 4 << 20);
    assert_eq!(sender.counters().switched_local, 1);
    assert_eq!(sender.counters().numbers, 0);
}

/// Sending and receiving share the socket.
#[test]
fn receiving_is_unaffected() {
    let (stream, mut peer) = v4();
    let mut answers = stream.try_clone().unwrap();
    let mut sender = Sender::new(stream, zerocopy()).unwrap();
    for n in 0..100_u8 {
        sender.send(vec![n; 1000]).unwrap();
        let mut got = [0; 1000];
        peer.read_exact(&mut got).unwrap();
        peer.write_all(&got[..1]).unwrap();
        answers.read_exact(&mut got[..1]).unwrap();
        assert_eq!(got[0], n);
    }
    assert!(sender.drain(PATIENCE).unwrap());
}

/// A datagram above the maximum length fails, and later ones are sent.
#[test]
fn an_oversized_datagram_does_not_block_later_ones() {
    for (choice, batch) in [(CopyMode::Plain, 1), (CopyMode::Plain, 8), (CopyMode::Zerocopy, 1)] {
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(peer.local_addr().unwrap()).unwrap();
        let options = Options { choice, batch, keep_done: true, ..zerocopy() };
        let mut sender = PollSender::new(socket, options, Time::default()).unwrap();
        for (token, len) in [(1, 100), (2, 70_000), (3, 200), (4, 70_001), (5, 300)] {
            assert!(sender.push(token, pattern(token, len)).is_ok());
        }
        let mut refused = Vec::new();
        while let Err(error) = sender.poll_send(Time::default()) {
            let SendError::TooLong { bytes } = error else { panic!("{error}") };
            refused.push(bytes);
        }
        assert_eq!(refused, [70_000, 70_001], "{choice:?}");
        let mut buffer = [0; 1000];
        for (token, len) in [(1, 100), (3, 200), (5, 300)] {
            assert_eq!(peer.recv(&mut buffer).unwrap(), len);
            assert_eq!(buffer[..len], pattern(token, len));
        }
        while sender.outstanding() > 0 {
            sender.handle_error_queue(Time::default()).unwrap();
            thread::yield_now();
        }
        let mut done: Vec<_> = std::iter::from_fn(|| sender.poll_done()).map(|done| done.token).collect();
        done.sort_unstable();
        assert_eq!(done, [1, 2, 3, 4, 5]);
        let counters = sender.counters();
        assert_eq!((counters.too_long, counters.too_long_bytes), (2, 140_001));
        assert_eq!(counters.zerocopy_bytes + counters.plain_bytes(), 600);
        assert_eq!((sender.held(), sender.unsent()), (0, 0));
    }
}

/// The kernel cuts a buffer into at most 64 or 128 datagrams and fails with EINVAL for more. Only that buffer fails; later buffers and
/// zero copy continue.
#[test]
fn too_many_segments_do_not_block_later_buffers() {
    for choice in [CopyMode::Plain, CopyMode::Zerocopy] {
        let peer = UdpSocket::bind("127.0.0.1:0").unwrap();
        peer.set_read_timeout(Some(PATIENCE)).unwrap();
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(peer.local_addr().unwrap()).unwrap();
        let segmented = Options { choice, segment: Some(10), ..zerocopy() };
        let mut sender = Sender::new(socket, segmented).unwrap();
        let mut buffer = [0; 100];
        for _ in 0..2 {
            sender.send(pattern(1, 25)).unwrap();
            for len in [10, 10, 5] {
                assert_eq!(peer.recv(&mut buffer).unwrap(), len);
            }
            let refused = sender.send(pattern(2, 6000));
            assert!(matches!(refused, Err(SendError::TooLong { bytes: 6000 })), "{refused:?}");
        }
        let closed = sender.close(PATIENCE).unwrap();
        finished(&closed);
        let counters = closed.counters;
        assert_eq!((counters.too_long, counters.too_long_bytes), (2, 12_000));
        assert_eq!(counters.numbers, if choice == CopyMode::Zerocopy { 2 } else { 0 });
    }
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let none = Sender::new(socket, Options { segment: Some(0), ..zerocopy() });
    assert!(matches!(none, Err(SendError::Segmentation(_))), "{none:?}");
}

/// SO_ERROR is reported once. It must not be lost with simultaneous completions, or by `read_completions`.
#[test]
fn an_error_is_reported_after_simultaneous_completions() {
    let (stream, peer) = v4();
    let now = Time::default();
    let mut sender = PollSender::new(stream, zerocopy(), now).unwrap();
    assert!(sender.push(0, pattern(0, 50_000)).is_ok());
    assert_eq!(sender.poll_send(now).unwrap(), Sent::Flushed);
    assert!(sender.outstanding() > 0);
    sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
    drop(peer);
    let mut fds = [PollFd::new(&sender, PollFlags::empty())];
    while !fds[0].revents().contains(PollFlags::HUP) {
        poll(&mut fds, None).unwrap();
    }
    sender.handle_error_queue(now).expect("completions");
    assert_eq!(sender.outstanding(), 0);
    sender.read_completions(now).expect("read_completions leaves the error pending");
    let error = sender.handle_error_queue(now).expect_err("the reset");
    assert!(
        matches!(&error, SendError::Gone(source) if source.kind() == std::io::ErrorKind::ConnectionReset),
        "{error}"
    );
    sender.handle_error_queue(now).expect("the error was reported");
}

#[test]
fn acked_counts_tcp_acknowledgements() {
    let (stream, mut peer) = v4();
    let mut sender = PollSender::new(stream, zerocopy(), Time::default()).unwrap();
    let before = sender.acked().expect("TCP");
    assert!(sender.push(0, pattern(0, 5000)).is_ok());
    sender.poll_send(Time::default()).unwrap();
    peer.read_exact(&mut [0; 5000]).unwrap();
    while sender.acked().expect("TCP") < before + 5000 {
        thread::yield_now();
    }
    let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
    udp.connect("127.0.0.1:9").unwrap();
    assert_eq!(PollSender::new(udp, zerocopy(), Time::default()).unwrap().acked(), None);
}
