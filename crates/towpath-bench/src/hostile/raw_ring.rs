#![allow(unsafe_code)]
//! A client of a ring that does not use the client library: it sends any messages and writes any words (docs: Ring ABI).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

/// Bytes of a hello and of a welcome.
const HELLO: usize = 64;
const WELCOME: usize = 512;
/// Descriptors of a lane: four memories, and a socket for all but the first lane.
const FDS: usize = 5;
/// Descriptors of a lane that are memory.
pub(super) const MEMORIES: usize = 4;
/// Index of the memory that the client writes.
const CLIENT: usize = 2;
/// Time limit of the handshake.
const PATIENCE: Timespec = Timespec { tv_sec: 2, tv_nsec: 0 };

/// A message of the control socket: kind, sequence number, length.
pub(super) fn notice(kind: u16, seq: u32, len: u64) -> [u8; 16] {
    let mut out = [0; 16];
    out[..2].copy_from_slice(&kind.to_le_bytes());
    out[4..8].copy_from_slice(&seq.to_le_bytes());
    out[8..].copy_from_slice(&len.to_le_bytes());
    out
}

/// Kinds of messages.
pub(super) const DOORBELL: u16 = 1;
pub(super) const ONESHOT: u16 = 2;

/// Connects to a ring's socket, without a handshake. The socket does not block.
pub(super) fn connect(path: &Path) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?).context("connecting")?;
    Ok(socket)
}

/// Sends a message with descriptors; false if the peer is gone or takes no descriptors.
pub(super) fn send(socket: impl AsFd, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> bool {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return false;
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut control, flags) {
        Ok(_) | Err(rustix::io::Errno::AGAIN | rustix::io::Errno::TOOMANYREFS) => true,
        Err(_) => false,
    }
}

/// Says hello. Returns the socket, and the descriptors of each lane.
pub(super) fn greet(path: &Path) -> Result<(OwnedFd, Vec<Vec<OwnedFd>>)> {
    let socket = connect(path)?;
    let mut hello = [0; HELLO];
    hello[..4].copy_from_slice(b"TPRG");
    hello[4..6].copy_from_slice(&towpath_ring::VERSION.to_le_bytes());
    hello[32..39].copy_from_slice(b"hostile");
    ensure!(send(&socket, &hello, &[]), "saying hello");
    let mut welcome = [0; WELCOME];
    let mut lanes = vec![receive(&socket, &mut welcome)?];
    if welcome[6] != 0 || lanes[0].len() <= CLIENT {
        bail!("refused: {}", String::from_utf8_lossy(&welcome[64..]).trim_end_matches('\0'));
    }
    for _ in 1..u32::from_le_bytes([welcome[8], welcome[9], welcome[10], welcome[11]]) {
        lanes.push(receive(&socket, &mut [0; WELCOME])?);
    }
    Ok((socket, lanes))
}

/// Receives a message with its descriptors.
pub(super) fn receive(socket: &OwnedFd, into: &mut [u8]) -> Result<Vec<OwnedFd>> {
    let mut ready = [PollFd::new(socket, PollFlags::IN)];
    ensure!(poll(&mut ready, Some(&PATIENCE))? > 0, "no answer");
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FDS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = rustix::net::recvmsg(socket, &mut [IoSliceMut::new(into)], &mut control, flags)?;
    ensure!(received.bytes > 0, "the end of the socket");
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            fds.extend(rights);
        }
    }
    Ok(fds)
}

/// An attached client: the socket, and the memory of some lanes that it may write.
pub(super) struct RawRing {
    pub(super) socket: OwnedFd,
    lanes: Vec<Mapping>,
    /// The descriptors of each lane.
    fds: Vec<Vec<OwnedFd>>,
}

/// The memory of a lane that the client writes.
struct Mapping {
    base: NonNull<AtomicU64>,
    len: usize,
}

impl RawRing {
    /// Says hello and maps the memory of the first `lanes` lanes.
    pub(super) fn attach(path: &Path, lanes: u32) -> Result<Self> {
        let (socket, fds) = greet(path)?;
        let map = |fds: &Vec<OwnedFd>| Mapping::new(fds.get(CLIENT).context("no memory")?);
        let lanes = fds.iter().take(lanes as usize).map(map).collect::<Result<_>>()?;
        Ok(Self { socket, lanes, fds })
    }

    /// The memories of the lanes to attack.
    pub(super) fn memories(&self) -> impl Iterator<Item = &OwnedFd> {
        self.fds.iter().take(self.lanes.len()).flat_map(|fds| fds.iter().take(MEMORIES))
    }

    /// Number of words that the client may write, of all lanes.
    pub(super) fn words(&self) -> usize {
        self.lanes.iter().map(Mapping::words).sum()
    }

    /// Writes a word.
    pub(super) fn write(&self, mut index: usize, word: u64) {
        for lane in &self.lanes {
            match index.checked_sub(lane.words()) {
                Some(rest) => index = rest,
                None => return lane.write(index, word),
            }
        }
        panic!("the index is beyond the last word");
    }

    /// False if the engine has ended the channel.
    pub(super) fn is_open(&self) -> bool {
        let mut state = [PollFd::new(&self.socket, PollFlags::RDHUP)];
        poll(&mut state, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready == 0)
    }
}

impl Mapping {
    fn new(memory: &OwnedFd) -> Result<Self> {
        let len = usize::try_from(rustix::fs::fstat(memory)?.st_size)?;
        // SAFETY: a new mapping at an address that the kernel chooses overlaps no other.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, memory, 0)
        };
        let base = NonNull::new(base.context("mapping the ring")?.cast()).context("mmap gave address 0")?;
        Ok(Self { base, len })
    }

    fn words(&self) -> usize {
        self.len / 8
    }

    fn write(&self, index: usize, word: u64) {
        assert!(index < self.words());
        // SAFETY: the assertion above checked that `index` is inside the mapping.
        let at = unsafe { self.base.add(index) };
        // SAFETY: the mapping lives as long as self; the engine also accesses its words as atomics.
        unsafe { at.as_ref() }.store(word, Ordering::Release);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and len are those of mmap, and no reference outlives self.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// A TCP socket whose close waits up to 5 s for a peer that does not read (SO_LINGER of socket(7)), and that peer.
pub(super) fn lingering() -> Result<(OwnedFd, std::net::TcpStream)> {
    use std::io::Write;
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let mut ours = std::net::TcpStream::connect(listener.local_addr()?)?;
    let (theirs, _) = listener.accept()?;
    // A small buffer: an attacker passes many of these.
    rustix::net::sockopt::set_socket_send_buffer_size(&ours, 4096)?;
    ours.set_nonblocking(true)?;
    while ours.write(&[0; 65536]).is_ok() {}
    // The socket of the last copy blocks: a non-blocking one would not wait.
    ours.set_nonblocking(false)?;
    rustix::net::sockopt::set_socket_linger(&ours, Some(Duration::from_secs(5)))?;
    Ok((ours.into(), theirs))
}

/// A descriptor of each kind that a process can pass.
pub(super) fn any_descriptors() -> Result<Vec<OwnedFd>> {
    use rustix::fs::{MemfdFlags, memfd_create};
    let shrinking = memfd_create("hostile", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let (reader, writer) = std::io::pipe()?;
    let null = std::fs::File::open("/dev/null")?;
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC)?;
    Ok(vec![shrinking, reader.into(), writer.into(), null.into(), event])
}

/// All descriptors, borrowed.
pub(super) fn borrowed(fds: &[OwnedFd]) -> Vec<BorrowedFd<'_>> {
    fds.iter().map(AsFd::as_fd).collect()
}
