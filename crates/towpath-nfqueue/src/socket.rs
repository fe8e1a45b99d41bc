//! The socket from which the program reads its packets.
//!
//! Two sockets of this process are connected to each other: the program's, and the sender's. Both are netlink sockets of the protocol
//! NETLINK_USERSOCK, so that the program's options of SOL_NETLINK work. Where netlink sockets are not permitted (seccomp), they are a pair
//! of Unix datagram sockets.
//!
//! A send waits while the program's receive buffer is full, so ENOBUFS never occurs.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::net::netlink::{self, SocketAddrNetlink};
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, SendFlags, SocketFlags, SocketType, bind, connect, getsockname, send, socket_with,
    socketpair,
};
use std::time::Duration;

/// Longest wait of one call of [`Sender::send`].
const WAIT: Duration = Duration::from_millis(100);

/// The end from which packets are sent to the program.
#[derive(Debug)]
pub(crate) struct Sender(OwnedFd);

/// The result of a send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// The datagram is in the program's receive buffer.
    Yes,
    /// The receive buffer is full.
    Full,
    /// The program has closed its socket.
    Closed,
}

/// Creates the program's socket and the sender.
pub(crate) fn pair() -> Result<(OwnedFd, Sender), Errno> {
    let (program, sender) = netlink_pair()
        .or_else(|_| socketpair(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None))?;
    set_socket_timeout(&sender, Timeout::Send, Some(WAIT))?;
    Ok((program, Sender(sender)))
}

fn netlink_pair() -> Result<(OwnedFd, OwnedFd), Errno> {
    let open = || {
        let protocol = Some(netlink::USERSOCK);
        let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
        // Port 0: the kernel chooses a free one.
        bind(&socket, &SocketAddrNetlink::new(0, 0))?;
        let address = SocketAddrNetlink::try_from(getsockname(&socket)?).map_err(|_| Errno::AFNOSUPPORT)?;
        Ok::<_, Errno>((socket, address))
    };
    let ((program, to), (sender, from)) = (open()?, open()?);
    // A connected netlink socket receives from its peer only. Any process could otherwise send packets to the program.
    connect(&program, &from)?;
    connect(&sender, &to)?;
    Ok((program, sender))
}

impl Sender {
    /// Sends a datagram; waits at most [`WAIT`].
    pub(crate) fn send(&self, datagram: &[u8]) -> Sent {
        match send(&self.0, datagram, SendFlags::NOSIGNAL) {
            Ok(_) => Sent::Yes,
            // ENOMEM: the kernel has no memory for the datagram now.
            Err(Errno::AGAIN | Errno::INTR | Errno::NOBUFS | Errno::NOMEM) => Sent::Full,
            Err(_) => Sent::Closed,
        }
    }
}

#[cfg(test)]
mod tests {
    use rustix::net::{RecvFlags, recv};

    use super::*;

    #[test]
    fn a_full_receive_buffer_makes_the_sender_wait() {
        let (program, sender) = pair().unwrap();
        let mut sent = 0;
        while sender.send(&[7; 4000]) == Sent::Yes {
            sent += 1;
        }
        assert!(sent > 0);
        let mut datagram = [0; 4096];
        for _ in 0..sent {
            let (length, _) = recv(&program, &mut datagram[..], RecvFlags::DONTWAIT).unwrap();
            assert_eq!(datagram[..length], [7; 4000]);
        }
        assert_eq!(recv(&program, &mut datagram[..], RecvFlags::DONTWAIT).unwrap_err(), Errno::AGAIN);
        assert_eq!(sender.send(&[7]), Sent::Yes);
        drop(program);
        assert_eq!(sender.send(&[7]), Sent::Closed);
    }

    /// Another netlink socket, which any process could open, cannot send to the program.
    #[test]
    fn only_the_sender_reaches_the_program() {
        let (program, _sender) = pair().unwrap();
        let address = SocketAddrNetlink::try_from(getsockname(&program).unwrap()).unwrap();
        let (other, _) = netlink_pair().unwrap();
        let sent = rustix::net::sendto(&other, &[7], SendFlags::DONTWAIT, &address);
        assert_eq!(sent, Err(Errno::CONNREFUSED));
    }
}
