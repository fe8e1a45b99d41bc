//! The connections: a server that echoes, and a client that sends a byte on each every 100 ms.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketType, bind, connect, socket};

/// Time between two bytes of a connection.
const PACE: Duration = Duration::from_millis(100);

/// Longest wait for a byte, after which the end is looked for.
const TURN: Duration = Duration::from_millis(10);

/// What the stage and a thread of connections tell each other. Clones share it.
#[derive(Clone, Debug, Default)]
pub(super) struct Exchange(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    /// When the routes changed.
    changed: Mutex<Option<Instant>>,
    answered: AtomicUsize,
    ended: AtomicBool,
}

impl Exchange {
    /// The routes lead through the other gate.
    pub(super) fn change(&self) {
        *self.0.changed.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    fn changed(&self) -> Option<Instant> {
        *self.0.changed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of connections on which a byte came back since.
    pub(super) fn answered(&self) -> usize {
        // Relaxed, here and below: no other data depends on it.
        self.0.answered.load(Ordering::Relaxed)
    }

    /// Ends the thread.
    pub(super) fn end(&self) {
        self.0.ended.store(true, Ordering::Relaxed);
    }

    fn is_ended(&self) -> bool {
        self.0.ended.load(Ordering::Relaxed)
    }
}

/// The addresses of the client.
pub(super) fn clients() -> impl Iterator<Item = Ipv4Addr> + Clone {
    (1..=64).map(|host| Ipv4Addr::new(10, 77, 100, host))
}

pub(super) fn listen(address: Ipv4Addr, port: u16) -> io::Result<TcpListener> {
    TcpListener::bind((address, port))
}

/// Accepts the connections and sends back what comes, until the end.
pub(super) fn echo(listener: &TcpListener, connections: usize, exchange: &Exchange) -> io::Result<()> {
    let mut streams = Vec::with_capacity(connections);
    for _ in 0..connections {
        streams.push(ready(listener.accept()?.0)?);
    }
    while !exchange.is_ended() {
        for at in readable(&streams, TURN)? {
            let mut bytes = [0; 64];
            match streams[at].read(&mut bytes) {
                // The buffer of the socket has room for the few bytes of the client.
                Ok(read @ 1..) => {
                    let _ = streams[at].write_all(&bytes[..read]);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Ok(_) | Err(_) => return Ok(()),
            }
        }
    }
    Ok(())
}

/// Opens the connections and sends on them until the end. Returns the wait of each connection that has continued since the routes
/// changed: from the change, or from a byte that was sent afterwards, until it came back.
pub(super) fn client(
    server: SocketAddrV4,
    connections: usize,
    exchange: &Exchange,
) -> io::Result<Vec<Duration>> {
    let from = clients().cycle().take(connections);
    let streams = from.map(|address| ready(open(address, server)?));
    let mut streams = streams.collect::<io::Result<Vec<_>>>()?;
    let mut sent = vec![None::<Instant>; connections];
    let mut waits = vec![None; connections];
    let mut paces = Instant::now();
    while !exchange.is_ended() {
        if paces.elapsed() >= PACE {
            paces = Instant::now();
            for (stream, sent) in streams.iter_mut().zip(&mut sent) {
                if sent.is_none() && stream.write_all(b"t").is_ok() {
                    *sent = Some(Instant::now());
                }
            }
        }
        for at in readable(&streams, TURN)? {
            // A connection that was reset stays without an answer.
            if !matches!(streams[at].read(&mut [0; 64]), Ok(1..)) {
                continue;
            }
            let (Some(sent), Some(changed)) = (sent[at].take(), exchange.changed()) else { continue };
            if waits[at].is_none() {
                waits[at] = Some(sent.max(changed).elapsed());
                exchange.0.answered.fetch_add(1, Ordering::Relaxed);
            }
        }
    }
    Ok(waits.into_iter().flatten().collect())
}

/// Opens a connection from an address.
fn open(from: Ipv4Addr, to: SocketAddrV4) -> io::Result<TcpStream> {
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None)?;
    bind(&socket, &SocketAddrV4::new(from, 0))?;
    connect(&socket, &to)?;
    Ok(socket.into())
}

fn ready(stream: TcpStream) -> io::Result<TcpStream> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// The streams that can be read, after waiting at most `time` for one.
fn readable(streams: &[TcpStream], time: Duration) -> io::Result<Vec<usize>> {
    let mut fds: Vec<_> = streams.iter().map(|stream| PollFd::new(stream, PollFlags::IN)).collect();
    let time = Timespec { tv_sec: 0, tv_nsec: time.subsec_nanos().into() };
    match poll(&mut fds, Some(&time)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    Ok((0..fds.len()).filter(|at| !fds[*at].revents().is_empty()).collect())
}
