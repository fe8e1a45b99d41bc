use std::net::{TcpListener, TcpStream};
use std::sync::{Mutex, OnceLock, Weak};
use std::time::Duration;

use super::*;
use crate::io::{Admission, Admit, Peer, Server, admission};
use crate::mux::Config;

fn server() -> Server {
    Server::new("line".parse().expect("a framing"), Config::default()).expect("epoll")
}

/// A connection, and the peer's end.
fn connection() -> (OwnedFd, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let peer = TcpStream::connect(listener.local_addr().expect("an address")).expect("it listens");
    (listener.accept().expect("it connected").0.into(), peer)
}

/// Something that epoll refuses to watch (epoll_ctl(2), EPERM).
fn file() -> OwnedFd {
    tempfile::tempfile().expect("a file").into()
}

/// The only listener found no descriptor.
fn starve(shared: &Shared, state: &mut State, work: &mut Work) -> Time {
    let listener = state.listeners.get(crate::io::listener::FIRST).expect("there is one");
    let failed = Some(rustix::io::Errno::MFILE);
    state.accepted(shared, Accepted { listener, passed: Vec::new(), denied: 0, reset: 0, failed }, work);
    state.listeners.due().expect("it is paused")
}

#[test]
fn listeners_go_on_when_a_descriptor_comes_back_or_a_moment_later() {
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
    assert_eq!(state.arrivals.handshakes_late, 1);
    assert_eq!(state.listeners.due(), None, "a handshake took too long");

    starve(shared, &mut state, &mut work);
    assert!(state.attach(shared, Arc::new(Link::new(file(), None, None)), None, &mut work).is_err());
    assert_eq!(state.listeners.due(), None, "a connection could not be attached");

    starve(shared, &mut state, &mut work);
    let (fd, _peer) = connection();
    let id = state.attach(shared, Arc::new(Link::new(fd, None, None)), None, &mut work).expect("epoll");
    let now = shared.now();
    state.mux.drain_psock(id, Some(now), now);
    state.pump(shared, &mut work);
    assert_eq!(state.listeners.due(), None, "a connection ended");
    assert_eq!(state.arrivals.refused, 4);
}

/// Looks whether the server's lock is free when it is told of an end.
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

/// A client that trusts nobody.
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
fn ends_are_told_without_the_servers_lock() {
    let server = server();
    let shared = &server.shared;
    let lock = Arc::new(Lock::default());
    lock.shared.set(Arc::downgrade(shared)).expect("once");
    let admission = Arc::clone(&lock) as Arc<dyn Admission>;
    let refused = |fd: OwnedFd, tls: Option<&Tls>| {
        let (passed, _peer) = connection();
        let entry = admission::admit(&admission, &passed, shared.start).expect("it passes");
        server.with(|state, work| state.admit(shared, (fd, Some(entry)), tls, None, work)).is_err()
    };
    let ways = [
        None,
        #[cfg(feature = "tls")]
        Some(tls()),
    ];
    for tls in &ways {
        assert!(refused(file(), tls.as_ref()), "epoll does not watch it");
    }
    server.drain(Some(Duration::ZERO));
    for tls in &ways {
        assert!(refused(connection().0, tls.as_ref()), "the mux drains");
    }
    assert_eq!(*lock.free.lock().expect("no panic"), vec![true; 2 * ways.len()]);
}
