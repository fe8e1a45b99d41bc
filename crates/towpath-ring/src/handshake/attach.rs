//! The client's side of the handshake: sends a hello, receives the descriptors, and verifies them before it maps
//! them.

use std::io::ErrorKind;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::SealFlags;

use crate::handshake::attach_error::AttachError;
use crate::handshake::messages::{Hello, NOTICE, Notice, Offer, Refusal, Reply, Terms, WELCOME, Welcome};
use crate::shm::abi::{self, Layout, MAGIC, VERSION};
use crate::shm::park::Fences;
use crate::shm::region::{Access, Payload, Words, in_huge_pages};
use crate::shm::sync::Ordering;
use crate::shm::sys::{self, Received, Sent};

/// Longest wait for the engine.
const PATIENCE: Duration = Duration::from_secs(15);
/// Engines in succession that may ask for a hello before one sends its memory.
const RENEWALS: u32 = 16;

/// Options of a client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Name that the engine displays; at most 32 bytes. The default is the program's name.
    pub name: String,
    /// Whether losses are reported as frames of [`Kind::GAP`](crate::Kind::GAP) and by
    /// [`Consumer::overrun`](crate::Consumer::overrun). The default is true. Without them (like `NETLINK_NO_ENOBUFS`
    /// of netlink(7)), [`Header::lost`](crate::Header::lost) still counts.
    pub gaps: bool,
    /// Whether a worker gets connection events ([`Worker::recv_event`](crate::Worker::recv_event)). The default is false. Other
    /// engines than a multiplexor ignore it.
    pub events: bool,
    /// Whether a worker takes messages in parts (`body=stream`, [`Message::more`](crate::Message::more)). A multiplexor with such a framing
    /// refuses workers that do not. The default is false.
    pub parts: bool,
}

impl Default for Options {
    fn default() -> Self {
        let name = std::env::args_os().next().unwrap_or_default();
        Self::named(&Path::new(&name).file_name().unwrap_or_default().to_string_lossy())
    }
}

impl Options {
    /// The defaults, with this name.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self { name: name.into(), gaps: true, events: false, parts: false }
    }
}

/// A lane, as received from the engine.
#[derive(Debug)]
pub(crate) struct Attached {
    pub(crate) socket: OwnedFd,
    /// Largest one-shot message.
    pub(crate) oneshot_max: u64,
    /// Longest replacement, in bytes.
    pub(crate) replacement_max: u32,
    /// Agreed scheme for the fences.
    pub(crate) fences: Fences,
    /// Whether the engine receives messages.
    pub(crate) messages: bool,
    pub(crate) memory: Memory,
}

/// The memory of a lane's rings.
#[derive(Debug)]
pub(crate) struct Memory {
    pub(crate) layout: Layout,
    /// Memory that the engine writes.
    pub(crate) theirs: Words,
    /// Memory that this process writes.
    pub(crate) own: Words,
    pub(crate) rx_payload: Payload,
    pub(crate) tx_payload: Payload,
}

/// Attaches to the engine at `path`. Returns the lanes in order; at least one.
pub(crate) fn attach(path: &Path, options: &Options) -> Result<Vec<Attached>, AttachError> {
    let socket = connect(path)?;
    renew(socket, path, options)
}

/// Greets the engine at the other end of `socket`, which listens at `path` or did so, and receives the memory that it sends.
pub(crate) fn renew(socket: OwnedFd, path: &Path, options: &Options) -> Result<Vec<Attached>, AttachError> {
    // Bounded: an engine could otherwise keep the client here.
    for _ in 0..RENEWALS {
        let fences = greet(&socket, options)?;
        let copy = socket.try_clone().map_err(system("receiving the engine's memory"))?;
        match receive(copy, path, fences) {
            Err(Stop::Renewed) => {}
            Err(Stop::Failed(error)) => return Err(error),
            Ok(lanes) => return Ok(lanes),
        }
    }
    Err(AttachError::Closed)
}

/// Why receiving memory ended early.
#[derive(Debug)]
pub(crate) enum Stop {
    /// Another engine wants a hello.
    Renewed,
    Failed(AttachError),
}

impl<E: Into<AttachError>> From<E> for Stop {
    fn from(error: E) -> Self {
        Self::Failed(error.into())
    }
}

fn connect(path: &Path) -> Result<OwnedFd, AttachError> {
    sys::connect(path, PATIENCE).map_err(|source| match source.kind() {
        // The engine does not accept connections.
        ErrorKind::WouldBlock => AttachError::TimedOut(PATIENCE.as_secs()),
        _ => AttachError::Connect { path: path.into(), source },
    })
}

fn greet(socket: &OwnedFd, options: &Options) -> Result<Fences, AttachError> {
    let fences = Fences::offer();
    let Options { name, gaps, events, parts } = options.clone();
    let hello = Hello { version: VERSION, gaps, events, parts, fences, name }.emit();
    // The result is ignored: an engine that refuses a connection answers and closes before it reads the hello, and the answer is
    // still readable.
    let _: Sent = sys::send(socket, &hello, &[]).map_err(system("sending the hello"))?;
    Ok(fences)
}

/// Receives the memory that the engine at the other end of `socket`, which listens at `path`, sends to a client that
/// offered `fences`.
pub(crate) fn receive(socket: OwnedFd, path: &Path, fences: Fences) -> Result<Vec<Attached>, Stop> {
    // One time limit for all messages together: an engine could otherwise send each message just before its limit.
    let end = Instant::now() + PATIENCE;
    let (terms, fds) = terms(&socket, path, fences, end)?;
    // An engine could otherwise make the client wait for lanes forever, and fill its descriptor table.
    if !(1..=abi::MAX_LANES).contains(&terms.lanes) {
        return Err(AttachError::Unsafe(format!("{} lanes", terms.lanes)).into());
    }
    terms.layout.check()?;
    let memory = map(terms.layout, descriptors(fds)?)?;
    let mut rest = Vec::new();
    for number in 1..terms.lanes {
        let mut message = [0; WELCOME];
        let (len, fds) = next(&socket, &mut message, end)?;
        let [engine, rx, client, tx, bell] = descriptors(fds)?;
        match Offer::parse(&message[..len]) {
            Ok(Offer { lane, layout }) if lane == number => {
                let memory = map(layout, [engine, rx, client, tx])?;
                rest.push(lane_of(bell, &terms, memory));
            }
            _ => return Err(AttachError::Unsafe(format!("lane {number} is missing")).into()),
        }
    }
    let mut lanes = vec![lane_of(socket, &terms, memory)];
    lanes.extend(rest);
    Ok(lanes)
}

fn lane_of(socket: OwnedFd, terms: &Terms, memory: Memory) -> Attached {
    let Terms { oneshot_max, replacement_max, fences, messages, .. } = *terms;
    Attached { socket, oneshot_max, replacement_max, fences, messages, memory }
}

fn terms(socket: &OwnedFd, path: &Path, fences: Fences, end: Instant) -> Result<(Terms, Vec<OwnedFd>), Stop> {
    let (welcome, fds) = welcome(socket, path, end)?;
    match welcome.answer {
        // An engine cannot agree on a scheme that this client did not offer.
        Reply::Attached(terms) => Ok((Terms { fences: terms.fences.and(fences), ..terms }, fds)),
        Reply::Refused(Refusal::Version, _) => {
            Err(AttachError::Version { engine: welcome.version, client: VERSION }.into())
        }
        Reply::Refused(Refusal::NotPermitted, text) => Err(AttachError::NotPermitted(text).into()),
        Reply::Refused(Refusal::Limit, text) => Err(AttachError::Limit(text).into()),
        Reply::Refused(Refusal::Failed, text) => Err(AttachError::Engine(text).into()),
    }
}

fn descriptors<const N: usize>(fds: Vec<OwnedFd>) -> Result<[OwnedFd; N], AttachError> {
    let count = fds.len();
    fds.try_into().map_err(|_| AttachError::Unsafe(format!("{count} descriptors instead of {N}")))
}

fn welcome(socket: &OwnedFd, path: &Path, end: Instant) -> Result<(Welcome, Vec<OwnedFd>), Stop> {
    let mut bytes = [0; WELCOME];
    let (len, fds) = next(socket, &mut bytes, end)?;
    let welcome = Welcome::parse(&bytes[..len]).map_err(|_| AttachError::NotTowpath(path.into()))?;
    Ok((welcome, fds))
}

/// Receives the next message with its descriptors; waits until `end`.
fn next(socket: &OwnedFd, into: &mut [u8], end: Instant) -> Result<(usize, Vec<OwnedFd>), Stop> {
    loop {
        match sys::recv_with_fds(socket, into).map_err(system("waiting for the engine"))? {
            Received::Message(len, fds) if len == NOTICE && fds.is_empty() => {
                match Notice::parse(&into[..len]) {
                    // Of the engine that this client had before.
                    Ok(Notice::Doorbell) => continue,
                    Ok(Notice::Renew) => return Err(Stop::Renewed),
                    _ => return Ok((len, fds)),
                }
            }
            Received::Message(len, fds) => return Ok((len, fds)),
            Received::Short(..) => {
                return Err(system("receiving the engine's memory")(sys::no_descriptor()).into());
            }
            Received::End => return Err(AttachError::Closed.into()),
            Received::Nothing => {}
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(AttachError::TimedOut(PATIENCE.as_secs()).into());
        }
        sys::wait(&[socket.as_fd()], Some(left)).map_err(system("waiting for the engine"))?;
    }
}

/// Verifies and maps the rings of a lane.
pub(crate) fn map(layout: Layout, fds: [OwnedFd; 4]) -> Result<Memory, AttachError> {
    layout.check()?;
    if !layout.records.is_power_of_two() || layout.records > Layout::MAX_RECORDS {
        return Err(AttachError::Unsafe(format!("{} records", layout.records)));
    }
    let [engine, rx, client, tx] = fds;
    verify("header", &engine, sys::READ_ONLY, layout.engine_bytes())?;
    verify_area("payload", &rx, sys::READ_ONLY, layout.rx.bytes())?;
    verify("client", &client, sys::WRITABLE, layout.client_bytes())?;
    verify("transmit", &tx, sys::WRITABLE, layout.tx.bytes())?;
    let mapping = system("mapping the ring");
    let theirs = Words::map(engine.as_fd(), layout.engine_bytes(), Access::Lent).map_err(&mapping)?;
    let own = Words::map(client.as_fd(), layout.client_bytes(), Access::Own).map_err(&mapping)?;
    let rx_payload = Payload::map(rx.as_fd(), layout.rx.bytes(), Access::Lent).map_err(&mapping)?;
    let tx_payload = Payload::map(tx.as_fd(), layout.tx.bytes(), Access::Own).map_err(&mapping)?;
    // Relaxed: written before the descriptors were sent.
    let ident = theirs.word(abi::IDENT).load(Ordering::Relaxed);
    if ident != u64::from(MAGIC) | u64::from(VERSION) << 32 {
        return Err(AttachError::Unsafe(format!("its first word is {ident:#x}")));
    }
    Ok(Memory { layout, theirs, own, rx_payload, tx_payload })
}

/// Like [`verify_area`], and refuses huge pages. The kernel would extend a mapping to a multiple of the huge page size, over other
/// mappings. An engine could also punch a hole into huge pages that this process writes; a write would then raise SIGBUS if no huge
/// page is free.
fn verify(which: &str, fd: &OwnedFd, seals: SealFlags, bytes: usize) -> Result<(), AttachError> {
    verify_area(which, fd, seals, bytes)?;
    if in_huge_pages(fd.as_fd()).map_err(system("checking the pages of the ring's memory"))? {
        return Err(AttachError::Unsafe(format!("the {which} memory is in huge pages")));
    }
    Ok(())
}

/// Verifies seals and size. Memory that can shrink would kill this process with SIGBUS; memory with other writers
/// would change during a read. It may be in huge pages.
fn verify_area(which: &str, fd: &OwnedFd, seals: SealFlags, bytes: usize) -> Result<(), AttachError> {
    let (found, size) = sys::sealed(fd.as_fd())
        .map_err(|e| AttachError::Unsafe(format!("the {which} memory is not a memfd: {e}")))?;
    if !found.contains(seals) {
        return Err(AttachError::Unsafe(format!(
            "the {which} memory lacks seals {:?}",
            seals.difference(found)
        )));
    }
    if size != bytes as u64 {
        return Err(AttachError::Unsafe(format!("the {which} memory has {size} bytes instead of {bytes}")));
    }
    Ok(())
}

fn system(doing: &'static str) -> impl Fn(std::io::Error) -> AttachError {
    move |source| AttachError::System { doing, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[towpath_testenv::needs(hugetlb)]
    #[test]
    fn only_the_payload_may_be_in_huge_pages() {
        let fd = sys::tests::hugetlb(2 << 20);
        sys::seal(&fd, sys::READ_ONLY).unwrap();
        verify_area("payload", &fd, sys::READ_ONLY, 2 << 20).unwrap();
        let refused = verify("header", &fd, sys::READ_ONLY, 2 << 20).unwrap_err();
        assert!(matches!(&refused, AttachError::Unsafe(why) if why.contains("huge pages")), "{refused}");
    }
}
