//! Waiting for a sender among other clients: a port scanner, a health check, or `nc`.
//!
//! A client is a sender when it has sent the header. Other clients are refused, and the wait goes on. A client has [`PATIENCE`];
//! at most [`CLIENTS`] may be silent at once, and the oldest one is refused for a new one.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use towpath::output::say;

use crate::cli::transfer::{HEADER, HEADER_BYTES, Header};

/// Time from the connection to the end of the header.
const PATIENCE: Duration = Duration::from_secs(5);
/// Maximum number of clients that have not sent a header.
const CLIENTS: usize = 16;
/// Number of refused clients that are reported.
const REPORTED: u64 = 10;

struct Client {
    stream: TcpStream,
    from: SocketAddr,
    said: Vec<u8>,
    until: Instant,
}

enum Step {
    Wait,
    Sender(Header),
    Refuse,
}

/// Waits for a sender. Returns its connection, which blocks, its address and its header.
pub(super) fn accept(listener: &TcpListener) -> io::Result<(TcpStream, SocketAddr, Header)> {
    listener.set_nonblocking(true)?;
    let (mut clients, mut refused) = (VecDeque::<Client>::new(), 0);
    let mut refuse = |client: &Client| {
        refused += 1;
        if refused <= REPORTED {
            let last = if refused == REPORTED { "; further ones are not reported" } else { "" };
            say(format_args!(
                "{} is not `towpath send`: its first bytes are {:?}; still waiting{last}",
                client.from,
                first_words(&client.said)
            ));
        }
    };
    loop {
        wait(listener, &clients)?;
        loop {
            match listener.accept() {
                Ok((stream, from)) => {
                    stream.set_nonblocking(true)?;
                    if clients.len() == CLIENTS
                        && let Some(oldest) = clients.pop_front()
                    {
                        refuse(&oldest);
                    }
                    clients.push_back(Client {
                        stream,
                        from,
                        said: Vec::new(),
                        until: Instant::now() + PATIENCE,
                    });
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The client has gone (accept(2) lists errors of the network that are to be retried).
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let now = Instant::now();
        for _ in 0..clients.len() {
            let Some(mut client) = clients.pop_front() else { break };
            match client.read() {
                Step::Sender(header) => {
                    client.stream.set_nonblocking(false)?;
                    return Ok((client.stream, client.from, header));
                }
                Step::Wait if now < client.until => clients.push_back(client),
                Step::Wait | Step::Refuse => refuse(&client),
            }
        }
    }
}

/// Waits for a connection, for bytes of a client, or until a client has used up its time.
fn wait(listener: &TcpListener, clients: &VecDeque<Client>) -> io::Result<()> {
    let now = Instant::now();
    let left = clients.iter().map(|client| client.until.saturating_duration_since(now)).min();
    // Rounded up, so that the time is over after the wait.
    let left = left.map(|left| left + Duration::from_millis(1));
    let timeout =
        left.map(|left| Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() });
    let mut fds = vec![PollFd::new(listener, PollFlags::IN)];
    fds.extend(clients.iter().map(|client| PollFd::new(&client.stream, PollFlags::IN)));
    match poll(&mut fds, timeout.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

impl Client {
    fn read(&mut self) -> Step {
        let mut bytes = [0; HEADER_BYTES];
        loop {
            let missing = HEADER_BYTES - self.said.len();
            match self.stream.read(&mut bytes[..missing]) {
                Ok(0) => return Step::Refuse,
                Ok(len) => self.said.extend_from_slice(&bytes[..len]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Step::Wait,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(_) => return Step::Refuse,
            }
            if !self.said.iter().zip(&HEADER).all(|(said, expected)| said == expected) {
                return Step::Refuse;
            }
            if let Some(header) = self.said.first_chunk() {
                return Header::parse(header).map_or(Step::Refuse, Step::Sender);
            }
        }
    }
}

/// The first bytes from an unknown client; non-printable bytes appear as dots.
fn first_words(words: &[u8]) -> String {
    words.iter().map(|byte| if matches!(byte, b' '..=b'~') { char::from(*byte) } else { '.' }).collect()
}
