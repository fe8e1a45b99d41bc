//! Packets of our own (raw(7)): answers to those that a rule rejected. The kernel routes them, and its OUTPUT rules see them.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV4, SocketAddrV6};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, sendto, socket_with};

/// A socket for each version of IP, as far as this kernel has it.
#[derive(Debug)]
pub(super) struct Replies {
    v4: OwnedFd,
    v6: Option<OwnedFd>,
}

impl Replies {
    /// Needs CAP_NET_RAW in the network namespace's user namespace.
    pub(super) fn open() -> Result<Self, Errno> {
        Ok(Self { v4: raw(AddressFamily::INET)?, v6: raw(AddressFamily::INET6).ok() })
    }

    /// Sends a packet that begins with its IP header. The kernel puts IPv4's checksum right.
    pub(super) fn send(&self, packet: &[u8]) -> Result<(), Errno> {
        let flags = SendFlags::DONTWAIT;
        match packet.first().map(|first| first >> 4) {
            // Destination Address: RFC 791 section 3.1, RFC 8200 section 3.
            Some(4) => {
                let to: [u8; 4] = *packet.get(16..).and_then(<[u8]>::first_chunk).ok_or(Errno::INVAL)?;
                sendto(&self.v4, packet, flags, &SocketAddrV4::new(Ipv4Addr::from(to), 0))?;
            }
            Some(6) => {
                let socket = self.v6.as_ref().ok_or(Errno::AFNOSUPPORT)?;
                let to: [u8; 16] = *packet.get(24..).and_then(<[u8]>::first_chunk).ok_or(Errno::INVAL)?;
                sendto(socket, packet, flags, &SocketAddrV6::new(Ipv6Addr::from(to), 0, 0, 0))?;
            }
            _ => return Err(Errno::INVAL),
        }
        Ok(())
    }
}

/// IPPROTO_RAW: the header comes with the packet, and nothing is received.
fn raw(family: AddressFamily) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(family, SocketType::RAW, flags, Some(ipproto::RAW))
}
