//! Listening sockets.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::epoll;
use rustix::io::{Errno, fcntl_dupfd_cloexec};
use rustix::net::{AddressFamily, SocketFlags, SocketType, accept_with, socket_with, sockopt};

use super::admission::{Admission, Admit, Entry, admit};
use super::closer;
use super::tls::Tls;
use crate::Time;

/// Event data of the first listener; the index is added. Connections are above 2^32.
pub(super) const FIRST: u64 = 16;
/// Maximum number of connections accepted at once.
const BURST: usize = 64;
/// Backlog of listen(2), limited by net.core.somaxconn (4096 since Linux 5.4). When it is full, the kernel
/// drops SYNs, and peers retry after a second.
const BACKLOG: i32 = 4096;
/// Pause of accepting after descriptors ran out, unless a connection ends before.
const PAUSE: Duration = Duration::from_millis(100);
/// Minimum interval of the warning about that.
const QUIET: Duration = Duration::from_secs(1);

/// The listeners of a server.
#[derive(Debug, Default)]
pub(super) struct Listeners {
    all: Vec<Arc<Listener>>,
    /// Policy for TCP peers.
    pub(super) admission: Option<Arc<dyn Admission>>,
    /// End of the pause after descriptors ran out. Listeners are not watched meanwhile.
    paused: Option<Time>,
    /// Another process accepts connections: see [`super::Server::suspend_listening`].
    suspended: bool,
    /// Earliest time of the next warning.
    quiet: Time,
    /// See [`super::Server::set_descriptor_limit`].
    pub(super) limit: Option<RawFd>,
}

/// A listening socket.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) fd: OwnedFd,
    pub(super) tcp: bool,
    /// TLS for accepted connections.
    pub(super) tls: Option<Tls>,
    /// Its address, as text.
    pub(super) name: Arc<str>,
}

towpath_metrics::metrics! {
    /// Counters of listeners and handshakes ([`super::Server::accept_stats`]).
    pub struct AcceptStats in "mux_accept" {
        /// Connections accepted by listeners.
        pub accepted: counter connections,
        /// Accepted connections that the admission policy closed.
        pub denied: counter connections as "refused": "Connections that were not attached, by reason." (reason = "denied"),
        /// Accepted connections that the admission policy reset.
        pub reset: counter connections as "refused" (reason = "reset"),
        /// Connections that could not be attached, and failures to accept one for lack of descriptors or memory.
        pub refused: counter connections as "refused" (reason = "failed"),
        /// TLS handshakes that failed, inbound and outbound.
        pub handshakes_failed: counter connections as "handshakes": "TLS handshakes that did not complete, by result." (result = "failed"),
        /// TLS handshakes that took too long or were dropped in favour of newer ones.
        pub handshakes_late: counter connections as "handshakes" (result = "late"),
        /// Connections closed before their peers had everything: after 30 s, at the drain deadline, or above 1024 lingering.
        pub cut_short: counter connections,
    }
}

/// Result of accepting.
pub(super) struct Accepted {
    pub(super) listener: Arc<Listener>,
    pub(super) passed: Vec<(OwnedFd, Option<Entry>)>,
    pub(super) denied: u64,
    pub(super) reset: u64,
    /// The error that stopped accepting.
    pub(super) failed: Option<Errno>,
}

impl Listeners {
    pub(super) fn add(&mut self, epoll: &OwnedFd, listener: Listener) -> io::Result<()> {
        let data = epoll::EventData::new_u64(FIRST + self.all.len() as u64);
        // The standard library listens with a backlog of 128; listen(2) again changes it.
        rustix::net::listen(&listener.fd, BACKLOG)?;
        epoll::add(epoll, &listener.fd, data, epoll::EventFlags::IN)?;
        self.all.push(Arc::new(listener));
        Ok(())
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Arc<Listener>> {
        self.all.iter()
    }

    pub(super) fn close(&mut self) {
        // Connections that were not accepted may have unread descriptors. The duplicate is closed last.
        let unix = self.all.iter().filter(|listener| !listener.tcp);
        let unix: Vec<_> = unix.filter_map(|listener| listener.fd.try_clone().ok()).collect();
        // Event data contains the index, so all listeners are removed together.
        self.all.clear();
        self.suspended = false;
        closer::close(u32::MAX, unix);
        self.paused = None;
    }

    /// Pauses accepting for [`PAUSE`] or until a connection ends, because epoll would report waiting
    /// connections repeatedly. Descriptors may become free in other ways, too. Returns true if a warning
    /// is due.
    pub(super) fn pause(&mut self, epoll: &OwnedFd, now: Time) -> bool {
        self.paused = Some(now + PAUSE);
        self.watch(epoll, epoll::EventFlags::empty());
        let say = now >= self.quiet;
        if say {
            self.quiet = now + QUIET;
        }
        say
    }

    pub(super) fn resume(&mut self, epoll: &OwnedFd) {
        if self.paused.take().is_some() && !self.suspended {
            self.watch(epoll, epoll::EventFlags::IN);
        }
    }

    /// Stops or resumes accepting.
    pub(super) fn suspend(&mut self, epoll: &OwnedFd, suspend: bool) {
        self.suspended = suspend;
        let accepts = !suspend && self.paused.is_none();
        self.watch(epoll, if accepts { epoll::EventFlags::IN } else { epoll::EventFlags::empty() });
    }

    /// End of the pause.
    pub(super) const fn due(&self) -> Option<Time> {
        self.paused
    }

    fn watch(&self, epoll: &OwnedFd, flags: epoll::EventFlags) {
        for (at, listener) in self.all.iter().enumerate() {
            let _ = epoll::modify(epoll, &listener.fd, epoll::EventData::new_u64(FIRST + at as u64), flags);
        }
    }

    pub(super) fn get(&self, data: u64) -> Option<Arc<Listener>> {
        self.all.get(usize::try_from(data.checked_sub(FIRST)?).ok()?).cloned()
    }
}

/// Listens on the first of these addresses that can be bound, and returns it.
pub(super) fn bind(addresses: impl ToSocketAddrs) -> io::Result<(OwnedFd, SocketAddr)> {
    let mut refused = io::Error::new(io::ErrorKind::InvalidInput, "the name has no address");
    for address in addresses.to_socket_addrs()? {
        match bind_one(address) {
            Ok(bound) => return Ok(bound),
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

fn bind_one(address: SocketAddr) -> io::Result<(OwnedFd, SocketAddr)> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let fd = socket_with(family, SocketType::STREAM, flags, None)?;
    // Connections of an earlier process may be in TIME_WAIT.
    sockopt::set_socket_reuseaddr(&fd, true)?;
    if let SocketAddr::V6(six) = address
        && six.ip().to_ipv4_mapped().is_none()
    {
        // Otherwise the socket would also take the port on IPv4 and show those peers as ::ffff:192.0.2.1
        // (ipv6(7), IPV6_V6ONLY).
        sockopt::set_ipv6_v6only(&fd, true)?;
    }
    rustix::net::bind(&fd, &address)?;
    rustix::net::listen(&fd, BACKLOG)?;
    let own = SocketAddr::try_from(rustix::net::getsockname(&fd)?)?;
    Ok((fd, own))
}

/// Accepts waiting connections without blocking, and applies the admission policy.
pub(super) fn accept(
    listener: Arc<Listener>,
    admission: Option<&Arc<dyn Admission>>,
    limit: Option<RawFd>,
    start: Instant,
) -> Accepted {
    let (mut passed, mut denied, mut reset, mut failed) = (Vec::new(), 0, 0, None);
    while passed.len() + ((denied + reset) as usize) < BURST {
        if limit.is_some_and(|limit| !has_below(&listener.fd, limit)) {
            failed = Some(Errno::MFILE);
            break;
        }
        let socket = match accept_with(&listener.fd, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC) {
            Ok(socket) => socket,
            Err(Errno::INTR | Errno::CONNABORTED) => continue,
            Err(Errno::AGAIN) => break,
            Err(errno) => {
                failed = Some(errno);
                break;
            }
        };
        let asked = admission.filter(|_| listener.tcp).map(|admission| admit(admission, &socket, start));
        let entry = match asked.transpose() {
            Ok(entry) => entry,
            Err(refusal) => {
                denied += u64::from(refusal != Admit::Reset);
                reset += u64::from(refusal == Admit::Reset);
                continue;
            }
        };
        if listener.tcp {
            // Replies are whole messages; delaying them to fill a segment gains nothing.
            let _ = sockopt::set_tcp_nodelay(&socket, true);
        }
        passed.push((socket, entry));
    }
    Accepted { listener, passed, denied, reset, failed }
}

/// Returns true if a descriptor below `limit` is free: a new one has the lowest free number (fcntl(2),
/// F_DUPFD).
fn has_below(fd: &OwnedFd, limit: RawFd) -> bool {
    fcntl_dupfd_cloexec(fd, 0).is_ok_and(|free| free.as_raw_fd() < limit)
}
