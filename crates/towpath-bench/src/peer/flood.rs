#![allow(unsafe_code)]
//! A flood of UDP packets over 2,000 flows, sent through a packet socket into one end of a veth pair (packet(7)).

use std::io::{self, stdin};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result};
use rustix::net::netdevice::name_to_index;

use crate::mmsg::Batch;
use crate::packet;
use crate::peer::netns;
use crate::pin;
use crate::raw::say;

const FLOWS: u16 = 2000;
const BATCH: usize = 64;

/// Sends packets of `len` bytes until it is killed.
pub(crate) fn side(len: usize, cpu: usize) -> Result<()> {
    netns::unshare()?;
    say("ready")?;
    // The word comes when the veth pair is there.
    stdin().read_line(&mut String::new())?;
    netns::up(netns::SENDER)?;
    let socket = packet_socket(netns::SENDER).context("opening a packet socket")?;
    pin::to(cpu)?;
    let mut batch = Batch::new((0..BATCH).map(|_| packet::frame(len)).collect());
    let mut flows = (0..FLOWS).cycle();
    loop {
        for (n, flow) in (0..BATCH).zip(&mut flows) {
            packet::set_flow(batch.buffer(n), flow);
        }
        let mut sent = 0;
        while sent < BATCH {
            match batch.send(&socket, sent) {
                Ok(count) => sent += count,
                Err(error) if busy(&error) => {}
                Err(error) => return Err(error).context("sending packets"),
            }
        }
    }
}

/// The device's queue or the socket's buffer is full: the flood goes on when there is room.
pub(crate) fn busy(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOBUFS | libc::EAGAIN))
}

pub(crate) fn packet_socket(interface: &str) -> io::Result<OwnedFd> {
    // SAFETY: takes no pointers.
    let fd = unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just gave this descriptor to us alone.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: (libc::ETH_P_IP as u16).to_be(),
        sll_ifindex: name_to_index(&socket, interface)?.cast_signed(),
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    let len = size_of_val(&address) as libc::socklen_t;
    // SAFETY: the pointer and the length are those of `address`, which outlives the call.
    let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) };
    if bound < 0 {
        return Err(io::Error::last_os_error());
    }
    set_option(&socket, libc::SOL_PACKET, libc::PACKET_QDISC_BYPASS, 1)?;
    Ok(socket)
}

/// setsockopt(2) of an int.
pub(crate) fn set_option(socket: impl AsFd, level: i32, name: i32, value: i32) -> io::Result<()> {
    let len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: the pointer and the length are those of `value`, which outlives the call.
    let set =
        unsafe { libc::setsockopt(socket.as_fd().as_raw_fd(), level, name, (&raw const value).cast(), len) };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
