//! Raw sockets (raw(7)) for replies to rejected packets. The kernel routes the replies and applies its OUTPUT rules.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddrV4, SocketAddrV6};
use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType, ipproto, sendto, socket_with};

/// One socket for IPv4, and one for IPv6 if the kernel supports it.
#[derive(Debug)]
pub(super) struct RawSocket {
    v4: OwnedFd,
    v6: Option<OwnedFd>,
}

impl RawSocket {
    /// Opens the sockets. Needs CAP_NET_RAW in the user namespace of the network namespace.
    pub(super) fn open() -> Result<Vec<OwnedFd>, Errno> {
        Ok([Some(raw(AddressFamily::INET)?), raw(AddressFamily::INET6).ok()].into_iter().flatten().collect())
    }

    /// Takes the descriptors that [`open`](Self::open) returned.
    pub(super) fn of(descriptors: Vec<OwnedFd>) -> Option<Self> {
        let mut descriptors = descriptors.into_iter();
        Some(Self { v4: descriptors.next()?, v6: descriptors.next() })
    }

    /// Sends a packet that begins with its IP header. The kernel fills in the IPv4 checksum.
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

/// IPPROTO_RAW: packets include their IP header, and nothing is received.
fn raw(family: AddressFamily) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    socket_with(family, SocketType::RAW, flags, Some(ipproto::RAW))
}
