//! A client that looks on: it sees what a group's listeners get, and nobody waits for it.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use crate::handshake::attach::{self, Options};
use crate::handshake::error::{AttachError, RecvError};
use crate::handshake::messages::{NOTICE, Terms};
use crate::lane::loss_record::Loss;
use crate::lane::taplog::{Look, Reader, Shape};
use crate::shm::abi;
use crate::shm::geometry::Geometry;
use crate::shm::header::{FLAG_INLINE, Header, Kind, Meta};
use crate::shm::park::{Fences, Sleeper};
use crate::shm::region::{Access, Payload, Words};
use crate::shm::sys::{self, Received};

/// Most messages read from the engine's socket at a time.
const NOTICES: usize = 64;

/// One message as a tap sees it: copies.
#[derive(Clone, Copy, Debug)]
pub struct Tapped<'a> {
    /// Its header. A gap record ([`Header::gap`]) says how many were lost here.
    pub header: Header,
    /// Its payload.
    pub payload: &'a [u8],
}

/// What an engine hands to a tap.
#[derive(Debug)]
pub(crate) struct Attached {
    pub(crate) socket: OwnedFd,
    pub(crate) area: Geometry,
    pub(crate) fences: Fences,
    pub(crate) log: Words,
    pub(crate) own: Words,
    pub(crate) payload: Payload,
}

/// A tap on a [`Group`](crate::Group): it copies what is published, from the moment it attached on. When it is too slow it
/// loses messages, in order and told by a gap record; it never slows the engine or a listener.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut tap = towpath_ring::Tap::attach("/run/towpath/group.sock")?;
/// while let Some(message) = tap.recv()? {
///     match message.header.gap() {
///         Some(gap) => println!("{} messages were too fast", gap.count),
///         None => println!("{} bytes", message.payload.len()),
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Tap {
    ring: Attached,
    reader: Reader,
    sleeper: Sleeper,
    /// The copy that is handed out.
    copy: Vec<u8>,
    lost: u64,
    received: u64,
    ended: bool,
}

impl Tap {
    /// Attaches to the group that listens at `path`.
    ///
    /// # Errors
    /// Each case of [`AttachError`] says what to do; an endpoint that is no group's refuses taps.
    pub fn attach(path: impl AsRef<Path>) -> Result<Self, AttachError> {
        Self::attach_with(path, &Options::default())
    }

    /// Attaches with [`Options`].
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    pub fn attach_with(path: impl AsRef<Path>, options: &Options) -> Result<Self, AttachError> {
        Ok(Self::over(attach::tap(path.as_ref(), options)?))
    }

    pub(crate) fn over(ring: Attached) -> Self {
        Self {
            reader: Reader::new(Shape { area: ring.area }, &ring.log),
            sleeper: Sleeper::new(abi::CLIENT_NEED_WAKEUP, ring.fences),
            copy: Vec::new(),
            lost: 0,
            received: 0,
            ended: false,
            ring,
        }
    }

    /// The next message, if it is there; a gap record in the place of those that were lost.
    ///
    /// # Errors
    /// [`RecvError`]: the engine wrote nonsense.
    pub fn try_recv(&mut self) -> Result<Option<Tapped<'_>>, RecvError> {
        let lost = match self.reader.next(&self.ring.log) {
            Look::Nothing => return Ok(None),
            Look::Lost(lost) => lost,
            Look::Found { seq, header, at, inline } => {
                if !self.reader.fits(&header, at) {
                    return Err(RecvError::Damaged(format!("message {seq} of {} bytes", header.len)));
                }
                let len = header.len as usize;
                self.copy.clear();
                let intact = if header.flags & FLAG_INLINE != 0 {
                    self.copy.extend_from_slice(&inline[..len]);
                    true
                } else {
                    let offset = at as usize * self.ring.area.frame_size as usize;
                    self.ring.payload.copy_out(offset, len, &mut self.copy);
                    self.reader.is_intact(&self.ring.log, seq, at, len)
                };
                if intact {
                    self.received += 1;
                    return Ok(Some(Tapped { header, payload: &self.copy }));
                }
                1
            }
        };
        self.lost += u64::from(lost);
        let record =
            Meta { kind: Kind::GAP, wire_len: lost, mark: Loss::Overwritten.code(), ..Meta::default() };
        Ok(Some(Tapped { header: record.header(0, FLAG_INLINE), payload: &[] }))
    }

    /// The next message; waits for it. None when the engine has ended the group.
    ///
    /// # Errors
    /// As [`try_recv`](Self::try_recv), or poll(2) failed.
    pub fn recv(&mut self) -> Result<Option<Tapped<'_>>, RecvError> {
        self.wait(None)?;
        self.try_recv()
    }

    /// The next message; waits at most `timeout`. None also when that has passed; [`is_ended`](Self::is_ended) tells.
    ///
    /// # Errors
    /// As [`recv`](Self::recv).
    pub fn recv_timeout(&mut self, timeout: Duration) -> Result<Option<Tapped<'_>>, RecvError> {
        self.wait(Instant::now().checked_add(timeout))?;
        self.try_recv()
    }

    fn wait(&mut self, end: Option<Instant>) -> Result<(), RecvError> {
        while !self.reader.is_ready(&self.ring.log) && !self.ended {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                break;
            }
            if self.arm() {
                sys::wait(&[self.ring.socket.as_fd()], left)?;
            }
            self.disarm()?;
        }
        Ok(())
    }

    /// For event loops: says that we are about to sleep on [`as_fd`](AsFd::as_fd). False when there is a message already.
    #[must_use]
    pub fn arm(&mut self) -> bool {
        self.sleeper.arm([&self.ring.own]) && !self.reader.is_ready(&self.ring.log) && !self.ended
    }

    /// For event loops: awake again; reads what rang.
    ///
    /// # Errors
    /// When the socket cannot be read.
    pub fn disarm(&mut self) -> Result<(), RecvError> {
        self.sleeper.disarm([&self.ring.own]);
        let mut message = [0; NOTICE];
        // Bounded: an engine that keeps ringing could otherwise keep us here.
        for _ in 0..NOTICES {
            match sys::recv(&self.ring.socket, &mut message)? {
                Received::Message(..) | Received::Short(_) => {}
                Received::Nothing => break,
                Received::End => {
                    self.ended = true;
                    break;
                }
            }
        }
        Ok(())
    }

    /// Whether the engine has ended the group.
    #[must_use]
    pub fn is_ended(&self) -> bool {
        self.ended
    }

    /// Messages received, and messages lost.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.received, self.lost)
    }
}

impl AsFd for Tap {
    /// Readable when the engine rings, which it does only between [`Tap::arm`] and [`Tap::disarm`].
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ring.socket.as_fd()
    }
}

/// Maps what came for a tap, the seals and sizes of which were verified.
pub(crate) fn map(
    socket: OwnedFd,
    terms: Terms,
    log: BorrowedFd<'_>,
    payload: BorrowedFd<'_>,
    own: BorrowedFd<'_>,
) -> std::io::Result<Attached> {
    let area = terms.layout.rx;
    let shape = Shape { area };
    Ok(Attached {
        socket,
        area,
        fences: terms.fences,
        log: Words::map(log, shape.bytes(), Access::Foreign)?,
        // Foreign: what is overwritten while we read it cannot be borrowed, only copied.
        payload: Payload::map(payload, area.bytes(), Access::Foreign)?,
        own: Words::map(own, abi::TAP_BYTES, Access::Own)?,
    })
}
