#![allow(unsafe_code)]
//! Flood of UDP packets of many flows, sent through a packet socket into one end of a veth pair (packet(7)).

use std::io::{self, stdin};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result};
use rustix::net::netdevice::name_to_index;

use crate::mmsg::Batch;
use crate::packet;
use crate::peer::netns;
use crate::pin;
use crate::raw::say;

const FLOWS: u32 = 2000;
/// Packets per call.
pub(crate) const BATCH: usize = 64;

/// A generator that cycles through the flows.
pub(crate) struct Flood {
    socket: OwnedFd,
    batch: Batch,
    flows: u32,
    next: u32,
}

impl Flood {
    /// Creates a generator on `interface` with packets of `len` bytes, pinned to CPU `cpu`.
    pub(crate) fn start(interface: &str, flows: u32, len: usize, cpu: usize) -> Result<Self> {
        let socket = packet_socket(interface, libc::ETH_P_IP as u16).context("opening a packet socket")?;
        pin::to(cpu)?;
        let batch = Batch::new((0..BATCH).map(|_| packet::frame(len)).collect());
        Ok(Self { socket, batch, flows, next: 0 })
    }

    /// Sends the next [`BATCH`] packets.
    pub(crate) fn send(&mut self) -> Result<()> {
        for n in 0..BATCH {
            packet::set_flow(self.batch.buffer(n), self.next);
            self.next = (self.next + 1) % self.flows;
        }
        let mut sent = 0;
        while sent < BATCH {
            match self.batch.send(&self.socket, sent) {
                Ok(count) => sent += count,
                Err(error) if busy(&error) => {}
                Err(error) => return Err(error).context("sending packets"),
            }
        }
        Ok(())
    }
}

/// Sends packets of `len` bytes until the process is killed.
pub(crate) fn side(len: usize, cpu: usize) -> Result<()> {
    netns::unshare()?;
    say("ready")?;
    // The parent sends a line once the veth pair exists.
    stdin().read_line(&mut String::new())?;
    netns::up(netns::SENDER)?;
    let mut flood = Flood::start(netns::SENDER, FLOWS, len, cpu)?;
    loop {
        flood.send()?;
    }
}

/// Returns true if the error means a full device queue or socket buffer, after which sending may continue.
pub(crate) fn busy(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::EAGAIN))
}

/// A packet socket of `interface` that bypasses the queueing discipline and receives `protocol`; 0 receives nothing (packet(7)).
pub(crate) fn packet_socket(interface: &str, protocol: u16) -> io::Result<OwnedFd> {
    let socket = unbound_socket()?;
    bind(&socket, interface, protocol)?;
    set_option(&socket, libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, 1)?;
    Ok(socket)
}

/// A packet socket that receives nothing until it is bound.
pub(crate) fn unbound_socket() -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor, and no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Binds a packet socket to `interface` and `protocol`.
pub(crate) fn bind(socket: &OwnedFd, interface: &str, protocol: u16) -> io::Result<()> {
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: protocol.to_be(),
        sll_ifindex: name_to_index(socket, interface)?.cast_signed(),
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let len = size_of_val(&address) as libc::socklen_t;
    // SAFETY: the pointer and the length are those of `address`, which outlives the call.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) };
    if bound < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Packets that a packet socket has dropped since the last call because its buffer was full (PACKET_STATISTICS, packet(7)).
pub(crate) fn packet_drops(socket: &OwnedFd) -> io::Result<u64> {
    // struct tpacket_stats: packets, drops.
    let mut counters = [0_u32; 2];
    let mut len = size_of_val(&counters) as libc::socklen_t;
    let (level, name) = (libc::SOL_PACKET, libc::PACKET_STATISTICS);
    // SAFETY: the pointers and the length are those of `counters` and `len`, which outlive the call.
    let got = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, name, (&raw mut counters).cast(), &raw mut len)
    };
    if got < 0 { Err(io::Error::last_os_error()) } else { Ok(counters[1].into()) }
}

/// setsockopt(2) of an int.
pub(crate) fn set_option(socket: impl AsFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    let len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the pointer and the length are those of `value`, which outlives the call.
    let set =
        unsafe { libc::setsockopt(socket.as_fd().as_raw_fd(), level, name, (&raw const value).cast(), len) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
