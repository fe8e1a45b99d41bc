//! The servers: Towpath's mux and three baselines: connections pinned to threads, threads on one epoll with EPOLLONESHOT, and one reader
//! with a central queue. The baselines parse messages in place in their read buffers.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use anyhow::Result;
use rustix::event::epoll::{self, EventData, EventFlags};
use towpath_mux::mux::{Config, Order};

use super::{Job, whole};

/// Server types.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Towpath,
    Pinned,
    Oneshot,
    Central,
    /// `towpath mux` with worker processes.
    Rings,
    /// As `Towpath`, with `in-flight` set: one connection occupies at most all workers but one.
    Share,
    /// As `Towpath`, for the load without the flooding peer.
    Alone,
}

impl Kind {
    pub(crate) const ALL: [Self; 4] = [Self::Towpath, Self::Pinned, Self::Oneshot, Self::Central];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Towpath => "towpath",
            Self::Pinned => "pinned epoll",
            Self::Oneshot => "shared epoll, oneshot",
            Self::Central => "central queue",
            Self::Rings => "towpath, processes",
            Self::Share => "towpath, in-flight",
            Self::Alone => "towpath, alone",
        }
    }
}

/// Guard of a running server; stops it on drop.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    /// Messages that the workers have received.
    pub(crate) got: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    server: Option<towpath_mux::io::Server>,
    _front: Option<super::rings::Front>,
    threads: Vec<JoinHandle<()>>,
}

impl Drop for Running {
    fn drop(&mut self) {
        // Relaxed: a flag that threads poll; joining the threads orders everything else.
        self.stop.store(true, Ordering::Relaxed);
        if let Some(server) = &self.server {
            server.drain(Some(std::time::Duration::from_secs(1)));
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// Starts a server with this many workers.
pub(crate) fn start(kind: Kind, workers: usize, job: Job) -> Result<Running> {
    let (got, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    if matches!(kind, Kind::Towpath | Kind::Share | Kind::Alone) {
        let in_flight = (kind == Kind::Share).then(|| workers - 1);
        let config = Config { in_flight, ..Config::new(Order::None) };
        let server = towpath_mux::io::Server::new("length=4 be adjust=4".parse()?, config)?;
        let address = server.listen("127.0.0.1:0")?;
        let mut threads = Vec::new();
        for _ in 0..workers {
            let (mut worker, got) = (server.worker()?.taking(16), Arc::clone(&got));
            threads.push(std::thread::Builder::new().name("server".into()).spawn(move || {
                // An error here ends the run.
                let _ = worker.serve(|message, answer| {
                    if job.run(message.bytes()) {
                        answer.extend_from_slice(message.bytes());
                    }
                    // Relaxed: a count that is read only as a rate.
                    got.fetch_add(1, Ordering::Relaxed);
                });
            })?);
        }
        return Ok(Running { address, got, stop, server: Some(server), _front: None, threads });
    }
    if kind == Kind::Rings {
        let (front, address) = super::rings::start(workers)?;
        return Ok(Running { address, got, stop, server: None, _front: Some(front), threads: Vec::new() });
    }
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    listener.set_nonblocking(true)?;
    let loops = if kind == Kind::Pinned { workers } else { 1 };
    let epolls =
        (0..loops).map(|_| epoll::create(epoll::CreateFlags::CLOEXEC)).collect::<Result<Vec<_>, _>>()?;
    let shared = Arc::new(Shared {
        epolls,
        connections: Mutex::default(),
        queue: Mutex::default(),
        filled: Condvar::new(),
        job,
        got: Arc::clone(&got),
        stop: Arc::clone(&stop),
        oneshot: kind == Kind::Oneshot,
    });
    let mut threads = vec![spawn(&shared, move |shared| shared.accept(&listener))];
    match kind {
        Kind::Central => {
            threads.push(spawn(&shared, |shared| shared.poll(0, true)));
            threads.extend((0..workers).map(|_| spawn(&shared, Shared::serve_queue)));
        }
        _ => threads
            .extend((0..workers).map(|at| spawn(&shared, move |shared| shared.poll(at % loops, false)))),
    }
    Ok(Running { address, got, stop, server: None, _front: None, threads })
}

fn spawn(shared: &Arc<Shared>, run: impl FnOnce(&Shared) + Send + 'static) -> JoinHandle<()> {
    let shared = Arc::clone(shared);
    std::thread::spawn(move || run(&shared))
}

struct Shared {
    epolls: Vec<std::os::fd::OwnedFd>,
    connections: Mutex<HashMap<u64, Arc<Connection>>>,
    queue: Mutex<VecDeque<(Arc<Connection>, Vec<u8>)>>,
    filled: Condvar,
    job: Job,
    got: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    oneshot: bool,
}

struct Connection {
    socket: TcpStream,
    /// Received bytes of an incomplete message.
    rest: Mutex<Vec<u8>>,
    /// Serializes writers.
    write: Mutex<()>,
}

impl Shared {
    fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    fn flags(&self) -> EventFlags {
        if self.oneshot { EventFlags::IN | EventFlags::ONESHOT } else { EventFlags::IN }
    }

    fn accept(&self, listener: &TcpListener) {
        let mut count = 0;
        while !self.stopped() {
            let Ok((socket, _)) = listener.accept() else {
                std::thread::sleep(std::time::Duration::from_millis(1));
                continue;
            };
            let ready = socket.set_nonblocking(true).and_then(|()| socket.set_nodelay(true));
            let key = socket.as_raw_fd() as u64;
            let connection = Arc::new(Connection { socket, rest: Mutex::default(), write: Mutex::default() });
            let epoll = &self.epolls[count % self.epolls.len()];
            count += 1;
            self.connections.lock().expect("no panic").insert(key, Arc::clone(&connection));
            if ready.is_ok() {
                let _ = epoll::add(epoll, &connection.socket, EventData::new_u64(key), self.flags());
            }
        }
    }

    /// Runs a thread on an epoll: reads, then serves or queues the messages.
    fn poll(&self, at: usize, queue: bool) {
        let mut room = [std::mem::MaybeUninit::<epoll::Event>::uninit(); 32];
        let mut buffer = vec![0; 64 << 10];
        let mut known: HashMap<u64, Arc<Connection>> = HashMap::new();
        let timeout = rustix::event::Timespec { tv_sec: 0, tv_nsec: 50_000_000 };
        while !self.stopped() {
            // One event at a time if threads share the epoll: a batch would leave other threads idle.
            let most = if self.oneshot { 1 } else { 32 };
            let Ok((events, _)) = epoll::wait(&self.epolls[at], &mut room[..most], Some(&timeout)) else {
                continue;
            };
            for event in events.iter() {
                let key = event.data.u64();
                let connection = known
                    .entry(key)
                    .or_insert_with(|| Arc::clone(&self.connections.lock().expect("no panic")[&key]));
                let open = self.read(connection, &mut buffer, queue);
                if open && self.oneshot {
                    let _ = epoll::modify(
                        &self.epolls[at],
                        &connection.socket,
                        EventData::new_u64(key),
                        self.flags(),
                    );
                }
                if !open {
                    let _ = epoll::delete(&self.epolls[at], &connection.socket);
                    known.remove(&key);
                }
            }
        }
    }

    /// Reads once, then serves or queues the complete messages. Returns true if the connection is open.
    fn read(&self, connection: &Arc<Connection>, buffer: &mut [u8], queue: bool) -> bool {
        let mut rest = connection.rest.lock().expect("no panic");
        let held = rest.len();
        buffer[..held].copy_from_slice(&rest);
        let came = match (&connection.socket).read(&mut buffer[held..]) {
            Ok(0) => return false,
            Ok(came) => came,
            Err(error) => return error.kind() == ErrorKind::WouldBlock,
        };
        let (mut at, end) = (0, held + came);
        let mut answers = Vec::new();
        while let Some(length) = whole(&buffer[at..end]) {
            let message = &buffer[at..at + length];
            at += length;
            if queue {
                self.queue.lock().expect("no panic").push_back((Arc::clone(connection), message.to_vec()));
                self.filled.notify_one();
                continue;
            }
            if self.job.run(message) {
                answers.extend_from_slice(message);
            }
            self.got.fetch_add(1, Ordering::Relaxed);
        }
        rest.clear();
        rest.extend_from_slice(&buffer[at..end]);
        answers.is_empty() || write_all(&connection.socket, &answers).is_ok()
    }

    fn serve_queue(&self) {
        while !self.stopped() {
            let queue = self.queue.lock().expect("no panic");
            let patience = std::time::Duration::from_millis(50);
            let (mut queue, _) =
                self.filled.wait_timeout_while(queue, patience, |queue| queue.is_empty()).expect("no panic");
            let Some((connection, message)) = queue.pop_front() else { continue };
            drop(queue);
            if self.job.run(&message) {
                let _one = connection.write.lock().expect("no panic");
                let _ = write_all(&connection.socket, &message);
            }
            self.got.fetch_add(1, Ordering::Relaxed);
        }
    }
}

/// Writes everything and waits for buffer space, because these servers have no output queue.
fn write_all(mut socket: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match socket.write(bytes) {
            Ok(wrote) => bytes = &bytes[wrote..],
            Err(error) if error.kind() == ErrorKind::WouldBlock => std::thread::yield_now(),
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
