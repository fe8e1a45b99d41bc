//! Clients that pass a descriptor whose close blocks. What must hold: the engine's thread does not close it.
//!
//! The order proves it: after many packets of an honest client, the close has not finished, and it finishes when the
//! test ends its cause.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use crate::handshake::attach::{Options, attach};
use crate::handshake::messages::Notice;
use crate::reaper::{ACCEPT_DESCRIPTORS, Limits, Reaper};
use crate::shm::seq::Seq;
use crate::shm::sys;
use crate::{Allow, Channel, Config, Consumer, Death, Endpoint, Meta, Verdict};

/// Much longer than the test.
const LINGER: Duration = Duration::from_secs(600);
const PACKETS: u32 = 2000;

/// A TCP socket with unsent data and `SO_LINGER`; the close of `passed` sleeps until `reader` is dropped.
struct Lingering {
    passed: OwnedFd,
    reader: TcpStream,
}

impl Lingering {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut writer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (reader, _) = listener.accept().unwrap();
        writer.set_nonblocking(true).unwrap();
        while writer.write(&[0; 1 << 16]).is_ok() {}
        rustix::net::sockopt::set_socket_linger(&writer, Some(LINGER)).unwrap();
        Self { passed: writer.into(), reader }
    }

    /// Passes the socket with `message`; returns whether the kernel took it.
    fn pass(self, over: &OwnedFd, message: &[u8]) -> (bool, TcpStream) {
        let sent = sys::tests::try_send_copies(over, message, self.passed.as_fd(), 1);
        // The copy in flight becomes the last one; without one, this process would sleep.
        if !sent {
            rustix::net::sockopt::set_socket_linger(&self.passed, None).unwrap();
        }
        (sent, self.reader)
    }
}

struct World {
    _directory: tempfile::TempDir,
    path: PathBuf,
    endpoint: Endpoint,
    reaper: Reaper,
    honest: (Channel, Consumer),
}

impl World {
    /// An engine with an honest client, on a kernel that refuses descriptors before the attach or on an `old` one.
    fn new(old: bool) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let reaper = Reaper::new(Limits::default());
        let config =
            Config { reaper: reaper.clone(), violations_max: 0, deadline: None, ..crate::mock::config() };
        ACCEPT_DESCRIPTORS.set(old);
        let mut endpoint = Endpoint::bind(&path, config).unwrap();
        ACCEPT_DESCRIPTORS.set(false);
        let at = path.clone();
        let client = thread::spawn(move || Consumer::attach_as(at, "honest").unwrap());
        let channel = accept(&mut endpoint);
        let honest = (channel, client.join().unwrap());
        Self { _directory: directory, path, endpoint, reaper, honest }
    }

    /// Packets of the honest client, with the engine's other work between them.
    fn packets(&mut self) {
        for _ in 0..PACKETS {
            let (channel, client) = &mut self.honest;
            let sent = channel.send(b"packet", &Meta::default()).unwrap();
            let frame = client.try_recv().unwrap().expect("a frame");
            client.verdict(frame, Verdict::Pass);
            client.flush();
            assert_eq!(
                channel.poll_verdicts(0, |seq, d| assert_eq!((seq, d.verdict), (sent, Verdict::Pass))),
                1
            );
            assert!(self.endpoint.accept().unwrap().is_none());
        }
    }

    /// The close sleeps on a helper; it ends with its cause.
    fn assert_closed_by_a_helper(&mut self, reader: TcpStream) {
        self.packets();
        while self.reaper.stats().busy == 0 {
            thread::yield_now();
        }
        self.packets();
        let stats = self.reaper.stats();
        assert_eq!((stats.busy, stats.saturated), (1, 0), "{stats:?}");
        drop(reader);
        while self.reaper.stats().pending > 0 {
            thread::yield_now();
        }
    }
}

fn accept(endpoint: &mut Endpoint) -> Channel {
    loop {
        if let Some(channel) = endpoint.accept().unwrap() {
            return channel;
        }
        endpoint.wait(Some(Duration::from_secs(5))).unwrap();
    }
}

fn hostile(world: &mut World) -> (Channel, OwnedFd) {
    let path = world.path.clone();
    let client = thread::spawn(move || attach(&path, &Options::named("hostile")).unwrap().remove(0).socket);
    let channel = accept(&mut world.endpoint);
    (channel, client.join().unwrap())
}

#[test]
fn a_client_passes_a_socket_that_lingers_where_none_is_expected() {
    let mut world = World::new(false);
    let (mut channel, socket) = hostile(&mut world);
    let (sent, reader) = Lingering::new().pass(&socket, &Notice::Doorbell.emit());
    assert!(sent);
    assert!(channel.check_peer());
    channel.poll_verdicts(0, |_, _| {});
    assert_eq!(channel.death(), Some(Death::Violations));
    drop(channel);
    assert_eq!(world.reaper.stats().passed_descriptors, 1);
    world.assert_closed_by_a_helper(reader);
}

#[test]
fn a_client_passes_a_socket_that_lingers_as_a_message() {
    for read in [false, true] {
        let mut world = World::new(false);
        let (mut channel, socket) = hostile(&mut world);
        let notice = Notice::OneShot { seq: Seq(1), len: 100 };
        let (sent, reader) = Lingering::new().pass(&socket, &notice.emit());
        assert!(sent);
        // Received and kept for its frame, or unread in the socket.
        if read {
            assert!(channel.check_peer());
        }
        drop(channel);
        world.assert_closed_by_a_helper(reader);
    }
}

#[test]
fn before_the_attach_descriptors_are_refused_or_closed_by_a_helper() {
    for old in [false, true] {
        for allowed in [false, true] {
            let mut world = World::new(old);
            if !allowed {
                world.endpoint.set_allow(Allow::Users(Vec::new()));
            }
            let socket = sys::connect(&world.path, Duration::from_secs(60)).unwrap();
            let (sent, reader) = Lingering::new().pass(&socket, b"no hello");
            let supported = sys::set_passrights(socket.as_fd(), true).is_ok();
            assert_eq!(sent, old || !supported);
            assert!(world.endpoint.accept().unwrap().is_none());
            if sent {
                world.assert_closed_by_a_helper(reader);
            }
            let stats = world.endpoint.stats();
            assert_eq!(stats.not_permitted, u64::from(!allowed));
            drop(socket);
        }
    }
}

#[test]
fn a_listener_with_an_unread_descriptor_is_closed_by_a_helper() {
    let World { _directory, endpoint, reaper, path, honest: (mut channel, mut client) } = World::new(true);
    let socket = sys::connect(&path, Duration::from_secs(60)).unwrap();
    let (sent, reader) = Lingering::new().pass(&socket, b"no hello");
    assert!(sent);
    drop(endpoint);
    while reaper.stats().busy == 0 {
        thread::yield_now();
    }
    channel.send(b"packet", &Meta::default()).unwrap();
    assert!(client.try_recv().unwrap().is_some());
    assert_eq!(reaper.stats().busy, 1);
    drop(reader);
    while reaper.stats().pending > 0 {
        thread::yield_now();
    }
}
