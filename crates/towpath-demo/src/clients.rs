//! Clients that work through all scenes: requests over persistent TCP connections, and queries over UDP.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::network::{CLIENT, NAMES, Network, SERVER, WEB};
use super::{Failure, doing};

/// Bytes of a request and of its answer; the first eight bytes of both are the request's number.
const REQUEST: usize = 64;
const ANSWER: usize = 1024;
/// Persistent connections: fewer than the limit for one source.
const CONNECTIONS: u64 = 4;
/// Pause between two requests.
const REST: Duration = Duration::from_millis(2);
/// Timeout of a request.
const PATIENCE: Duration = Duration::from_secs(20);
/// A query is repeated after this time, as a resolver does, and at most this often.
const AGAIN: Duration = Duration::from_secs(1);
const TIMES: u32 = 20;

/// Client threads that run until told to stop.
#[derive(Debug)]
pub(super) struct Clients {
    over: Arc<AtomicBool>,
    /// Relaxed throughout: independent counters, exact once the threads are joined.
    tally: Arc<Tally>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Tally {
    requests: AtomicU64,
    answers: AtomicU64,
    questions: AtomicU64,
    replies: AtomicU64,
    repeated: AtomicU64,
    slowest_us: AtomicU64,
    trouble: Mutex<Option<String>>,
}

/// Results of the clients.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Work {
    /// TCP requests.
    pub(crate) requests: u64,
    pub(crate) answers: u64,
    /// UDP queries.
    pub(crate) questions: u64,
    pub(crate) replies: u64,
    /// Repeated queries.
    pub(crate) repeated: u64,
    /// Longest wait in microseconds.
    pub(crate) slowest_us: u64,
    /// The first error.
    pub(crate) trouble: Option<String>,
}

impl Clients {
    /// Starts the servers and the clients.
    pub(super) fn start(network: &Network) -> Result<Self, Failure> {
        network.inside.run(serve)?;
        let mut clients = Self { over: Arc::default(), tally: Arc::default(), threads: Vec::new() };
        for _ in 0..CONNECTIONS {
            let (over, tally) = (Arc::clone(&clients.over), Arc::clone(&clients.tally));
            clients.threads.push(network.outside.start(move || tally.note(requests(&over, &tally))));
        }
        let (over, tally) = (Arc::clone(&clients.over), Arc::clone(&clients.tally));
        clients.threads.push(network.outside.start(move || tally.note(questions(&over, &tally))));
        Ok(clients)
    }

    /// Results so far.
    pub(super) fn work(&self) -> Work {
        let tally = &self.tally;
        Work {
            requests: tally.requests.load(Relaxed),
            answers: tally.answers.load(Relaxed),
            questions: tally.questions.load(Relaxed),
            replies: tally.replies.load(Relaxed),
            repeated: tally.repeated.load(Relaxed),
            slowest_us: tally.slowest_us.load(Relaxed),
            trouble: tally.trouble.lock().expect("no thread panics while holding the lock").clone(),
        }
    }

    /// Stops the clients. Returns the results.
    pub(super) fn end(mut self) -> Work {
        self.over.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            // A panicked thread leaves more requests than answers.
            let _ = thread.join();
        }
        self.work()
    }
}

impl Drop for Clients {
    fn drop(&mut self) {
        self.over.store(true, Relaxed);
    }
}

impl Tally {
    fn note(&self, result: std::io::Result<()>) {
        if let Err(error) = result {
            self.trouble
                .lock()
                .expect("no thread panics while holding the lock")
                .get_or_insert(error.to_string());
        }
    }

    fn waited(&self, since: Instant) {
        self.slowest_us.fetch_max(since.elapsed().as_micros() as u64, Relaxed);
    }
}

/// Starts the servers; their threads end with the process.
fn serve() -> Result<(), Failure> {
    let web = TcpListener::bind((Ipv4Addr::UNSPECIFIED, WEB)).map_err(doing("the web server"))?;
    let names = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, NAMES)).map_err(doing("the name server"))?;
    thread::spawn(move || {
        for stream in web.incoming().flatten() {
            thread::spawn(move || answer(stream));
        }
    });
    thread::spawn(move || {
        let mut question = [0; REQUEST];
        while let Ok((len, from)) = names.recv_from(&mut question) {
            // A repeated query is answered again.
            let _ = names.send_to(&question[..len], from);
        }
    });
    Ok(())
}

fn answer(mut stream: TcpStream) {
    let mut request = [0; REQUEST];
    let mut answer = [b'.'; ANSWER];
    while stream.read_exact(&mut request).is_ok() {
        answer[..8].copy_from_slice(&request[..8]);
        if stream.write_all(&answer).is_err() {
            return;
        }
    }
}

fn requests(over: &AtomicBool, tally: &Tally) -> std::io::Result<()> {
    let mut stream = TcpStream::connect_timeout(&SocketAddr::from((SERVER, WEB)), PATIENCE)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    let (mut request, mut answer) = ([0; REQUEST], [0; ANSWER]);
    while !over.load(Relaxed) {
        let number = tally.requests.fetch_add(1, Relaxed).to_be_bytes();
        request[..8].copy_from_slice(&number);
        let begun = Instant::now();
        stream.write_all(&request)?;
        stream.read_exact(&mut answer)?;
        if answer[..8] != number {
            return Err(std::io::Error::new(ErrorKind::InvalidData, "another request's answer came"));
        }
        tally.waited(begun);
        tally.answers.fetch_add(1, Relaxed);
        thread::sleep(REST);
    }
    Ok(())
}

fn questions(over: &AtomicBool, tally: &Tally) -> std::io::Result<()> {
    let socket = UdpSocket::bind((CLIENT, 0))?;
    socket.connect((SERVER, NAMES))?;
    socket.set_read_timeout(Some(AGAIN))?;
    let mut reply = [0; REQUEST];
    while !over.load(Relaxed) {
        let number = tally.questions.fetch_add(1, Relaxed).to_be_bytes();
        let begun = Instant::now();
        let mut times = 1;
        socket.send(&number)?;
        loop {
            match socket.recv(&mut reply) {
                Ok(len) if reply[..len] == number => break,
                // A late answer to a repeated query.
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock && times < TIMES => {
                    times += 1;
                    tally.repeated.fetch_add(1, Relaxed);
                    socket.send(&number)?;
                }
                Err(error) => return Err(error),
            }
        }
        tally.waited(begun);
        tally.replies.fetch_add(1, Relaxed);
        thread::sleep(REST);
    }
    Ok(())
}
