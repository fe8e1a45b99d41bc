use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

use super::*;
use crate::io::link::ReadOutcome;
use crate::io::listener::Accepted;
use crate::io::tls::{HandshakeStep, Tls};
use crate::io::{Admission, Admit, Peer, Server, admission};
use crate::mux::{Config, Order};

fn server() -> Server {
    Server::new("line".parse().expect("a framing"), Config::new(Order::None)).expect("epoll")
}

/// A connection and its peer.
fn connection() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let peer = TcpStream::connect(listener.local_addr().expect("an address")).expect("it listens");
    (listener.accept().expect("it connected").0.into(), peer)
}

/// A Unix pair: written bytes arrive before write(2) returns, unlike with TCP.
fn pair() -> (OwnedFd, UnixStream) {
    let (one, peer) = UnixStream::pair().expect("sockets");
    one.set_nonblocking(true).expect("a socket");
    (one.into(), peer)
}

/// A descriptor that epoll refuses (epoll_ctl(2), EPERM).
fn file() -> OwnedFd {
    tempfile::tempfile().expect("a file").into()
}

/// The only listener runs out of descriptors.
fn starve(shared: &Shared, state: &mut State, work: &mut Work) -> Time {
    let listener = state.listeners.get(crate::io::listener::FIRST).expect("there is one");
    let failed = Some(rustix::io::Errno::MFILE);
    state.accepted(shared, Accepted { listener, passed: Vec::new(), denied: 0, reset: 0, failed }, work);
    state.listeners.due().expect("it is paused")
}

#[test]
fn paused_listeners_resume_with_a_free_descriptor_or_after_a_pause() {
    let server = server();
    server.listen("127.0.0.1:0").expect("a port");
    let shared = &server.shared;
    let mut state = shared.lock();
    let mut work = Work::default();

    let due = starve(shared, &mut state, &mut work);
    assert_eq!(state.poll_timeout(), Some(due));
    state.handle_timeout(shared, due, &mut work);
    assert_eq!((state.listeners.due(), state.poll_timeout()), (None, None), "after a moment");

    starve(shared, &mut state, &mut work);
    let (fd, _peer) = connection();
    let until = shared.now();
    let link = Arc::new(Link::new(fd, None, None));
    state.handshakes.begin(&shared.epoll, link, None, until).expect("epoll");
    state.handle_timeout(shared, until, &mut work);
    assert_eq!(state.accept_stats.handshakes_late, 1);
    assert_eq!(state.listeners.due(), None, "a handshake took too long");

    starve(shared, &mut state, &mut work);
    assert!(state.attach(shared, Arc::new(Link::new(file(), None, None)), None, None, &mut work).is_err());
    assert_eq!(state.listeners.due(), None, "a connection could not be attached");

    starve(shared, &mut state, &mut work);
    let (fd, _peer) = connection();
    let id = state.attach(shared, Arc::new(Link::new(fd, None, None)), None, None, &mut work).expect("epoll");
    let now = shared.now();
    state.mux.drain_psock(id, Some(now), now);
    state.pump(shared, &mut work);
    assert_eq!(state.listeners.due(), None, "a connection ended");
    assert_eq!(state.accept_stats.refused, 4);
}

/// Policy that checks whether the server's lock is free when a connection ends.
#[derive(Debug, Default)]
struct Lock {
    shared: OnceLock<Weak<Shared>>,
    free: Mutex<Vec<bool>>,
}

impl Admission for Lock {
    fn admit(&self, _: &Peer, _: Time) -> Admit {
        Admit::Pass
    }

    fn closed(&self, _: &Peer, _: Time) {
        let shared = self.shared.get().and_then(Weak::upgrade).expect("it is there");
        let free = shared.state.try_lock().is_ok();
        self.free.lock().expect("no panic").push(free);
    }
}

/// A client without trusted certificates.
#[cfg(feature = "tls")]
fn tls() -> Tls {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(rustls::RootCertStore::empty())
        .with_no_client_auth();
    Tls::client_with(Arc::new(config), "localhost".try_into().expect("a name"))
}

#[test]
fn admission_learns_of_ends_without_the_lock() {
    let server = server();
    let shared = &server.shared;
    let lock = Arc::new(Lock::default());
    lock.shared.set(Arc::downgrade(shared)).expect("once");
    let admission = Arc::clone(&lock) as Arc<dyn Admission>;
    let refused = |fd: OwnedFd, tls: Option<&Tls>| {
        let (passed, _peer) = connection();
        let entry = admission::admit(&admission, &passed, shared.start).expect("it passes");
        server
            .shared
            .with(|state, work| state.admit(shared, (fd, Some(entry), None), tls, None, work))
            .is_err()
    };
    let ways = [
        None,
        #[cfg(feature = "tls")]
        Some(tls()),
    ];
    for tls in &ways {
        assert!(refused(file(), tls.as_ref()), "epoll refuses it");
    }
    server.drain(Some(Duration::ZERO));
    for tls in &ways {
        assert!(refused(connection().0, tls.as_ref()), "the mux drains");
    }
    assert_eq!(*lock.free.lock().expect("no panic"), vec![true; 2 * ways.len()]);
}

/// Returns true if the eventfd was written since the last call.
fn was_notified(shared: &Shared) -> bool {
    rustix::io::read(&shared.eventfd, &mut [0; 8]).is_ok()
}

#[test]
fn an_earlier_deadline_wakes_the_poller() {
    let server = server();
    let shared = &server.shared;
    let (fd, _peer) = connection();
    let id = server.attach(fd, b"x\n").expect("epoll");
    shared.lock().pollers.sleeps_until = Some(FOREVER);
    server.drain_psock(id, Some(Duration::from_secs(1)));
    assert!(was_notified(shared), "the sleeper knew of no deadline");
    let due = shared.lock().poll_timeout().expect("the deadline");
    shared.lock().pollers.sleeps_until = Some(due);
    server.drain_psock(id, Some(Duration::from_secs(100)));
    assert!(!was_notified(shared), "the sleeper knows this deadline");
    shared.lock().pollers.sleeps_until = None;
    server.drain_psock(id, Some(Duration::from_millis(1)));
    assert!(!was_notified(shared), "the poller is awake");
}

#[test]
fn a_message_wakes_a_sleeping_driver() {
    let server = server();
    let shared = &server.shared;
    let mut driver = server.driver().expect("a driver");
    let worker = driver.change(|mux, now| mux.clone_worker(1, now));
    driver.change(|mux, now| mux.poll_messages(worker, now, &mut Vec::new()));
    shared.lock().pollers.sleeps_until = Some(FOREVER);
    let (fd, _peer) = connection();
    server.attach(fd, b"x\n").expect("epoll");
    assert!(was_notified(shared));
    assert!(shared.lock().worker_wanted);
}

#[test]
fn a_sleeping_leader_reads_what_a_helper_leaves() {
    let server = server();
    let shared = &server.shared;
    let (fd, _peer) = connection();
    let id = server.attach(fd, b"").expect("epoll");
    let now = shared.now();
    let mut state = shared.lock();
    state.pollers.sleeps_until = Some(FOREVER);
    state.handle_ready(id, EventFlags::IN, now);
    for (runs, rings) in [(false, false), (true, true)] {
        let mut work = Work::default();
        state.ensure_reader(now, runs, &mut work);
        assert_eq!(work.notify, rings, "a run: {runs}");
    }
}

/// A worker that is not the leader reads two sockets: it gets a batch of one, and the leader takes the
/// messages of the other at once.
#[test]
fn a_sleeping_leader_takes_messages_behind_a_helpers_batch() {
    use std::io::Write;

    let server = server();
    let shared = &server.shared;
    let (leader, helper) = (server.worker().expect("a worker"), server.worker().expect("a worker"));
    let mut peers = Vec::new();
    for _ in 0..2 {
        let (fd, mut peer) = pair();
        let id = server.attach(fd, b"short\n").expect("epoll");
        peer.write_all(b"1\n2\n3\n4\n").expect("room");
        peers.push(peer);
        let mut state = shared.lock();
        let (now, mut batch) = (shared.now(), Vec::new());
        state.handle_ready(id, EventFlags::IN, now);
        for worker in [&leader, &helper] {
            state.mux.poll_messages(worker.id(), now, &mut batch);
            batch.drain(..).for_each(|message| assert!(state.mux.done(worker.id(), message.ticket(), now)));
            state.mux.poll_messages(worker.id(), now, &mut batch);
        }
    }
    let mut state = shared.lock();
    (state.pollers.leader, state.pollers.sleeps_until) = (Some(leader.id()), Some(FOREVER));
    drop(state);
    let mut work = Work::default();
    assert!(crate::io::reader::read(shared, &[], &mut work, Some(helper.id())), "it got a batch");
    assert_eq!(shared.lock().mux.queued(), 4);
    assert!(work.notify);
}

/// No helper is woken that would compete for processors. A watchdog is appointed instead.
#[test]
fn helpers_are_limited_by_processors() {
    let server = server();
    let shared = &server.shared;
    let (fd, _peer) = connection();
    let id = server.attach(fd, b"").expect("epoll");
    let workers: Vec<_> = (0..2).map(|_| server.worker().expect("a worker")).collect();
    let mut state = shared.lock();
    for worker in &workers {
        state.mux.poll_messages(worker.id(), shared.now(), &mut Vec::new());
    }
    state.pollers.leader = Some(workers[0].id());
    for (helpers, helps) in [(0, false), (1, true)] {
        let (mut work, now) = (Work::default(), shared.now());
        state.pollers = Pollers::new(2 * (helpers + 1));
        state.pollers.leader = Some(workers[0].id());
        state.pollers.parked = vec![workers[1].id()];
        state.ready.clear();
        state.sockets[id].queued = false;
        state.handle_ready(id, EventFlags::IN, now);
        state.ensure_reader(now + Duration::from_secs(1), true, &mut work);
        assert_eq!(
            (state.pollers.helper.is_some(), state.pollers.watchdog.is_some()),
            (helps, !helps),
            "{helpers} may"
        );
    }
    drop(state);
}

/// A read ends after bytes that carried descriptors (unix(7)).
#[test]
fn bytes_after_descriptors_are_read() {
    use std::io::{IoSlice, Write};
    use std::mem::MaybeUninit;

    use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};

    let (own, mut peer) = std::os::unix::net::UnixStream::pair().expect("sockets");
    own.set_nonblocking(true).expect("a socket");
    let other = file();
    let fds = [other.as_fd()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)), "it fits");
    sendmsg(&peer, &[IoSlice::new(b"ab")], &mut control, SendFlags::empty()).expect("room");
    peer.write_all(b"cd").expect("room");
    let mut buffer = Vec::with_capacity(64);
    let came = Link::new(own.into(), None, None).read(&mut buffer).expect("a socket");
    assert_eq!((&buffer[..], came), (&b"abcd"[..], ReadOutcome::WouldBlock));
}

/// Two workers continue a handshake. Bytes that followed it are available to either of them, also while
/// records wait to be written.
#[cfg(feature = "tls")]
#[test]
fn bytes_after_the_handshake_are_kept() {
    use std::io::{Read, Write};

    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let directory = tempfile::tempdir().expect("a directory");
    let (cert, key) = (directory.path().join("cert.pem"), directory.path().join("key.pem"));
    std::fs::write(&cert, made.cert.pem()).expect("a file");
    std::fs::write(&key, made.signing_key.serialize_pem()).expect("a file");
    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).expect("a certificate");
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = "localhost".try_into().expect("a name");
    let mut client = rustls::ClientConnection::new(Arc::new(config), name).expect("a client");

    let server = server();
    let shared = &server.shared;
    let (own, mut peer) = std::os::unix::net::UnixStream::pair().expect("sockets");
    own.set_nonblocking(true).expect("a socket");
    let session = Tls::server(&cert, &key).expect("both are good").session().expect("a session");
    let link = Arc::new(Link::new(own.into(), Some(session), None));
    let mut state = shared.lock();
    state.handshakes.begin(&shared.epoll, Arc::clone(&link), None, FOREVER).expect("epoll");
    let ready = |state: &State| state.handshakes.ready().iter().map(|&(key, _)| key).collect::<Vec<_>>();
    assert_eq!(ready(&state), [0]);
    assert!(ready(&state).is_empty(), "a worker handles it");
    state.handshakes.wait(0, true).expect("epoll");
    assert_eq!(ready(&state), [0]);

    while client.is_handshaking() {
        while client.wants_write() {
            client.write_tls(&mut peer).expect("room");
        }
        assert!(matches!(link.advance_handshake(), HandshakeStep::More { write: false }));
        client.read_tls(&mut peer).expect("an answer");
        client.process_new_packets().expect("a good handshake");
    }
    let mut full = 0;
    while let Ok(wrote) = rustix::io::write(&*link, &[0; 4096]) {
        full += wrote;
    }
    client.writer().write_all(b"hello\n").expect("memory");
    while client.wants_write() {
        client.write_tls(&mut peer).expect("room");
    }
    assert!(
        matches!(link.advance_handshake(), HandshakeStep::More { write: true }),
        "its tickets find no room"
    );
    peer.read_exact(&mut vec![0; full]).expect("what was in their way");
    let (first, second) = (link.advance_handshake(), link.advance_handshake());
    let mut work = Work::default();
    state.handshake_advanced(shared, 0, second, &mut work);
    state.handshake_advanced(shared, 0, first, &mut work);
    assert_eq!(state.mux.queued(), 1);
}

/// The task that replies may be another than the task that waits for messages.
#[cfg(feature = "tokio")]
#[tokio::test]
async fn a_reply_wakes_the_task_that_waits_for_credit() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::{Context, Poll, Wake, Waker};

    use futures_core::Stream;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    let server = server();
    let mut messages = server.messages(1).expect("a runtime");
    let (fd, _peer) = connection();
    server.attach(fd, b"first\nsecond\n").expect("epoll");
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    let next = |messages: &mut _| {
        let messages: std::pin::Pin<&mut crate::io::Messages> = std::pin::Pin::new(messages);
        messages.poll_next(&mut Context::from_waker(&waker))
    };
    let Poll::Ready(Some(Ok(first))) = next(&mut messages) else { panic!("there is one") };
    loop {
        // It may poll once more before it sleeps.
        woken.0.store(0, Ordering::Relaxed);
        assert!(next(&mut messages).is_pending(), "it holds its maximum");
        if woken.0.load(Ordering::Relaxed) == 0 {
            break;
        }
    }
    messages.reply(crate::io::Reply::none(&first)).expect("it holds it");
    assert_eq!(woken.0.load(Ordering::Relaxed), 1);
    let Poll::Ready(Some(Ok(second))) = next(&mut messages) else { panic!("there is room") };
    assert_eq!(second.payload(), b"second");
}

/// Events wait for the application and keep no task busy.
#[cfg(feature = "tokio")]
#[tokio::test]
async fn events_do_not_keep_the_stream_busy() {
    use std::task::Poll;

    let server = server();
    let mut driver = server.driver().expect("a driver");
    server.shared.lock().push_event(Event::WriteSpace, &mut Work::default());
    assert!(!driver.wait(Some(Duration::ZERO), |_| {}).expect("epoll"), "there is nothing to do");
    drop(driver);
    server.shared.lock().mode = Mode::Workers;
    let mut messages = server.messages(1).expect("a runtime");
    server.shared.notify();
    let mut next = std::pin::pin!(messages.recv());
    let waits = std::future::poll_fn(|cx| Poll::Ready(next.as_mut().poll(cx).is_pending())).await;
    assert!(waits, "there is no message");
    assert!(matches!(server.poll_event(), Some(Event::WriteSpace)));
}

/// The number of failed handshakes is up to peers. They must not displace abandoned messages.
#[test]
fn failed_handshakes_do_not_displace_abandoned_messages() {
    let server = server();
    let mut state = server.shared.lock();
    let mut work = Work::default();
    let now = Time::default();
    let psock = state
        .mux
        .attach("line".parse().expect("a framing"), crate::assembler::Limits::default(), now)
        .expect("it is open");
    state.mux.handle_bytes(psock, b"x\n", now);
    let worker = state.mux.clone_worker(1, now);
    let mut batch = Vec::new();
    state.mux.poll_messages(worker, now, &mut batch);
    state.push_event(Event::Undone(batch.remove(0)), &mut work);
    for _ in 0..2048 {
        state.push_event(Event::NotAttached { peer: None, why: String::new() }, &mut work);
    }
    assert!(matches!(state.notices.pop_event(), Some(Event::Undone(_))));
}

/// Descriptors above the limit are not for connections.
#[test]
fn listeners_respect_the_descriptor_limit() {
    let server = server();
    let address = server.listen("127.0.0.1:0").expect("a port");
    let mut driver = server.driver().expect("a driver");
    server.set_descriptor_limit(0);
    let _peer = TcpStream::connect(address).expect("the kernel has it");
    while server.accept_stats().refused == 0 {
        driver.wait(None, |_| {}).expect("epoll");
    }
    assert_eq!(server.accept_stats().accepted, 0);
    server.set_descriptor_limit(i32::MAX);
    while server.accept_stats().accepted == 0 {
        driver.wait(None, |_| {}).expect("epoll");
    }
}

/// A zero-copy sender that reads its error queue in parts.
#[derive(Debug)]
struct Parts(Arc<std::sync::atomic::AtomicUsize>);

impl crate::io::ZerocopySenders for Parts {
    fn min_bytes(&self) -> usize {
        0
    }

    fn open(&self, _: std::os::fd::BorrowedFd<'_>) -> Option<Box<dyn crate::io::ZerocopySender>> {
        Some(Box::new(Self(Arc::clone(&self.0))))
    }
}

impl crate::io::ZerocopySender for Parts {
    fn write(&mut self, transmit: &mut Transmit) -> crate::mux::Outcome {
        let length = transmit.slices(usize::MAX).map(<[u8]>::len).sum();
        transmit.advance(length);
        crate::mux::Outcome::Taken
    }

    fn handle_error_queue(&mut self) -> Result<bool, i32> {
        // Relaxed: one thread.
        Ok(self.0.fetch_sub(1, std::sync::atomic::Ordering::Relaxed) == 1)
    }
}

/// EPOLLERR is reported once (EPOLLET).
#[test]
fn the_error_queue_is_read_until_empty() {
    let left = Arc::new(std::sync::atomic::AtomicUsize::new(3));
    let server = server();
    server.set_zerocopy(Arc::new(Parts(Arc::clone(&left))));
    let (fd, _peer) = connection();
    let id = server.attach(fd, b"").expect("epoll");
    server.shared.change(|mux| mux.forward(id, &b"x\n"[..], Time::default())).expect("it is open");
    let events = [(data(id).u64(), EventFlags::ERR)];
    crate::io::reader::read(&server.shared, &events, &mut Work::default(), None);
    assert_eq!(left.load(std::sync::atomic::Ordering::Relaxed), 0);
    assert!(server.poll_ended().is_none(), "the connection is open");
}

/// Events caused by another thread end the wait.
#[test]
fn an_event_wakes_a_sleeping_driver() {
    let server = server();
    let shared = &server.shared;
    let mut driver = server.driver().expect("a driver");
    let (fd, _peer) = connection();
    let id = server.attach(fd, b"").expect("epoll");
    let (fd, _other) = connection();
    let link = Arc::new(Link::new(fd, None, None));
    server.shared.with(|state, work| {
        state.pollers.sleeps_until = Some(FOREVER);
        state.handshakes.begin(&shared.epoll, link, None, shared.now()).expect("epoll");
        state.handle_timeout(shared, shared.now(), work);
    });
    assert!(was_notified(shared));
    assert!(matches!(driver.poll_event(), Some(Event::NotAttached { .. })));

    shared.lock().pollers.sleeps_until = Some(FOREVER);
    server.drain_psock(id, Some(Duration::ZERO));
    assert!(was_notified(shared));
    // The connection ended while the driver was awake: it does not sleep.
    driver.wait(None, |_| {}).expect("epoll");
    assert!(server.poll_ended().is_some());
}

#[test]
fn a_gathering_driver_writes_when_all_is_answered_or_before_it_sleeps() {
    let server = server();
    let mut driver = server.driver().expect("a driver");
    driver.gather();
    let (fd, peer) = pair();
    peer.set_nonblocking(true).expect("a socket");
    let shared = Arc::clone(&server.shared);
    let psock = server
        .shared
        .with(|state, work| state.attach(&shared, Arc::new(Link::new(fd, None, None)), None, None, work))
        .expect("epoll");
    let (worker, mut batch) = driver.change(|mux, mut now| {
        // Trains the core: messages take a microsecond.
        let (worker, mut batch) = (mux.clone_worker(64, now), Vec::new());
        let learned = mux.attach("line".parse().expect("a framing"), Default::default(), now).expect("open");
        mux.handle_bytes(learned, "x\n".repeat(100).as_bytes(), now);
        while mux.poll_messages(worker, now, &mut batch) > 0 {
            for message in batch.drain(..) {
                now = now + Duration::from_micros(1);
                mux.done(worker, message.ticket(), now);
            }
        }
        assert!(mux.quick_batch().is_some());
        mux.handle_bytes(psock, b"a\nb\nc\n", now);
        mux.poll_messages(worker, now, &mut batch);
        (worker, batch)
    });
    assert_eq!(batch.len(), 3);
    let mut answer = |driver: &mut crate::io::Driver| {
        let message = batch.remove(0);
        driver.change(|mux, now| {
            mux.reply(worker, message.ticket(), message.bytes().clone(), now).expect("it is there");
            mux.done(worker, message.ticket(), now);
        });
    };
    let came = || {
        let mut bytes = [0; 16];
        (&peer)
            .read(&mut bytes)
            .map_or(String::new(), |count| String::from_utf8_lossy(&bytes[..count]).into())
    };
    answer(&mut driver);
    assert_eq!(came(), "", "more messages are outstanding");
    driver.wait(Some(Duration::ZERO), |_| {}).expect("epoll");
    assert_eq!(came(), "", "an awake driver comes again");
    assert!(driver.poll_timeout().is_some_and(|due| due <= Instant::now()), "the driver must not sleep");
    driver.wait(Some(Duration::from_nanos(1)), |_| {}).expect("epoll");
    assert_eq!(came(), "a\n", "held-back data is sent before a sleep");
    answer(&mut driver);
    answer(&mut driver);
    assert_eq!(came(), "b\nc\n", "all messages are answered");
}

/// Dropping an armed socket removes its registrations.
#[test]
fn an_armed_socket_can_be_dropped() {
    use crate::io::{Flags, Kind, To};
    use crate::mux::Bound;

    let config = Config { connected: true, send_bytes: Bound::of(4096), ..Config::new(Order::None) };
    let server = Server::new("line".parse().expect("a framing"), config).expect("epoll");
    let mut socket = server.socket(Kind::Dgram).expect("a handle");
    let (ours, _peer) = std::os::unix::net::UnixStream::pair().expect("a pair");
    socket.attach(ours, "line".parse().expect("a framing")).expect("it is attached");
    while socket.send(To::Any, &[b'x'; 1024], Flags::DONTWAIT).is_ok() {}
    let mut armed = socket.try_clone().expect("another handle");
    assert!(armed.arm(Some(To::Any)));
    assert_eq!(server.shared.lock().write_space_waiters.len(), 1);
    drop(armed);
    assert!(server.shared.lock().write_space_waiters.is_empty());
    assert_eq!(server.shared.lock().workers.len(), 1);
}

/// Two threads that wait for write space would wake each other forever if an unsuccessful check woke waiting
/// threads.
#[test]
fn an_unsuccessful_send_wakes_no_thread() {
    use crate::io::{Error, Flags, Kind, To};
    use crate::mux::Bound;

    let config = Config { connected: true, send_bytes: Bound::of(4096), ..Config::new(Order::None) };
    let server = Server::new("line".parse().expect("a framing"), config).expect("epoll");
    // No thread is started; the test handles the sockets.
    server.shared.lock().mode = Mode::Sockets(0);
    let mut socket = server.socket(Kind::Dgram).expect("a handle");
    let (ours, mut peer) = std::os::unix::net::UnixStream::pair().expect("a pair");
    let id = socket.attach(ours, "line".parse().expect("a framing")).expect("it is attached");
    let message = [b'x'; 1024];
    let mut sent = 0;
    while let Ok(bytes) = socket.send(To::Any, &message, Flags::DONTWAIT) {
        sent += bytes;
    }
    let waits = || server.shared.lock().waiters.len();
    let other = std::thread::spawn(|| {}).thread().clone();
    server.shared.lock().waiters.push(other);
    for to in [To::Any, To::Psock(id)] {
        assert!(matches!(socket.send(to, &message, Flags::DONTWAIT), Err(Error::WouldBlock)));
        assert_eq!(waits(), 1, "{to:?}: nothing has changed");
    }
    // A thread does not register itself twice.
    socket.set_send_timeout(Some(Duration::from_millis(1)));
    for _ in 0..3 {
        assert!(matches!(socket.send(To::Any, &message, Flags::empty()), Err(Error::WouldBlock)));
        assert!(waits() <= 2);
    }
    assert!(matches!(socket.send(To::Any, &message, Flags::DONTWAIT), Err(Error::WouldBlock)));
    assert_eq!(waits(), 1, "only the other thread waits");

    // Read what the socket accepts until everything is sent.
    peer.set_nonblocking(true).expect("a mode");
    let (mut got, mut bytes) = (0, vec![0; 1 << 16]);
    while got < sent {
        match peer.read(&mut bytes) {
            Ok(count) => got += count,
            Err(_) => server.shared.change(|mux| mux.handle_writable(id, Time::default())),
        }
    }
    assert_eq!(waits(), 0, "there is write space");
}

#[test]
fn apply_defers_writes() {
    let server = server();
    let mut driver = server.driver().expect("a driver");
    let (fd, peer) = pair();
    peer.set_nonblocking(true).expect("a socket");
    let psock = server.attach(fd, b"").expect("epoll");
    let came = || {
        let mut bytes = [0; 16];
        (&peer).read(&mut bytes).unwrap_or(0)
    };
    let flush: fn(&mut crate::io::Driver) = |driver| driver.flush();
    let wait: fn(&mut crate::io::Driver) = |driver| {
        driver.wait(Some(Duration::ZERO), |_| {}).expect("epoll");
    };
    for write in [flush, wait] {
        driver.apply(|mux, now| mux.forward(psock, &b"x\n"[..], now)).expect("it is open");
        assert_eq!(came(), 0);
        assert!(driver.poll_timeout().is_some_and(|due| due <= Instant::now()), "the driver must not sleep");
        write(&mut driver);
        assert_eq!(came(), 2);
    }
}
