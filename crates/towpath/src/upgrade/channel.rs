//! Transport of the messages: a SOCK_SEQPACKET socket. A packet is a message in JSON with at most one descriptor, or a part of an
//! item's bytes.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};

use super::message::Message;

/// Maximum size of a packet. A socket buffer of the default size (net.core.wmem_default, 208 KiB) takes several.
pub(super) const PACKET: usize = 32 << 10;
/// First byte of a packet.
const JSON: u8 = b'J';
const BYTES: u8 = b'B';
/// Descriptors that are received to be closed, if there are more than one.
const DESCRIPTORS: usize = 4;

/// A packet that was received.
#[derive(Debug)]
pub enum Packet {
    /// A message and its descriptor.
    Message(Message, Option<OwnedFd>),
    /// A part of an item's bytes.
    Bytes(Vec<u8>),
}

/// One end of the channel. It does not block.
#[derive(Debug)]
pub struct Channel {
    socket: OwnedFd,
}

impl Channel {
    /// A channel, and the end for another process, which blocks.
    ///
    /// # Errors
    /// Fails if there are no free descriptors.
    pub fn pair() -> io::Result<(Self, OwnedFd)> {
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        Ok((Self::new(ours)?, theirs))
    }

    /// The end of a channel that another process has made.
    ///
    /// # Errors
    /// Fails if the descriptor is closed.
    pub fn new(socket: OwnedFd) -> io::Result<Self> {
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Self { socket })
    }

    /// A second handle of this end.
    ///
    /// # Errors
    /// Fails if there are no free descriptors.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self { socket: self.socket.try_clone()? })
    }

    /// Sends a message, with a descriptor if it has one.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if the buffer is full, or if as many descriptors are in flight as the user may have (unix(7),
    /// ETOOMANYREFS): try again. [`io::ErrorKind::InvalidInput`] if the message is longer than a packet.
    pub fn send(&self, message: &Message, fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let json = serde_json::to_vec(message)?;
        if json.len() >= PACKET {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the message is longer than a packet"));
        }
        self.send_packet(JSON, &json, fd)
    }

    /// Sends the next part of an item's bytes. Returns the length of the part.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    pub fn send_bytes(&self, bytes: &[u8]) -> io::Result<usize> {
        let part = &bytes[..bytes.len().min(PACKET - 1)];
        self.send_packet(BYTES, part, None).map(|()| part.len())
    }

    fn send_packet(&self, kind: u8, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
        let fds: Vec<_> = fd.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
            return Err(io::Error::other("there is no space for a descriptor"));
        }
        let parts = [IoSlice::new(std::slice::from_ref(&kind)), IoSlice::new(bytes)];
        loop {
            match sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                Err(Errno::TOOMANYREFS | Errno::NOBUFS) => return Err(io::ErrorKind::WouldBlock.into()),
                sent => return sent.map(drop).map_err(Into::into),
            }
        }
    }

    /// Receives a packet. `None`: the other side has closed the channel.
    ///
    /// # Errors
    /// [`io::ErrorKind::WouldBlock`] if there is no packet. [`io::ErrorKind::InvalidData`] if it is not a valid one, or if its
    /// descriptor was lost for lack of free ones.
    pub fn receive(&self) -> io::Result<Option<Packet>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = vec![0; PACKET];
        let received = loop {
            let flags = RecvFlags::CMSG_CLOEXEC;
            match recvmsg(&self.socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
                // ECONNRESET: the other side has ended with unread packets. Those that it has sent follow, and then the end.
                Err(Errno::INTR | Errno::CONNRESET) => {}
                got => break got?,
            }
        };
        let fds = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        let mut fds: Vec<OwnedFd> = fds.flatten().collect();
        let whole = !received.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC) && fds.len() <= 1;
        bytes.truncate(received.bytes);
        match bytes.split_first() {
            None => Ok(None),
            Some((&JSON, json)) if whole => {
                let message = serde_json::from_slice(json)
                    .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
                Ok(Some(Packet::Message(message, fds.pop())))
            }
            Some((&BYTES, part)) if whole && fds.is_empty() => Ok(Some(Packet::Bytes(part.to_vec()))),
            Some(_) => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Waits for a message, for up to `limit`.
    ///
    /// # Errors
    /// As [`receive`](Self::receive); [`io::ErrorKind::UnexpectedEof`] if the channel was closed, [`io::ErrorKind::TimedOut`] after
    /// the limit.
    pub fn wait(&self, limit: Duration) -> io::Result<(Message, Option<OwnedFd>)> {
        let until = Instant::now() + limit;
        loop {
            match self.receive() {
                Ok(Some(Packet::Message(message, fd))) => return Ok((message, fd)),
                Ok(Some(Packet::Bytes(_))) => return Err(io::ErrorKind::InvalidData.into()),
                Ok(None) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error),
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            match poll(&mut [PollFd::new(&self.socket, PollFlags::IN)], Some(&left)) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(errno) => return Err(errno.into()),
            }
        }
    }
}

/// Readable when there is a packet, or the other side has closed the channel.
impl AsFd for Channel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channels() -> (Channel, Channel) {
        let (one, other) = Channel::pair().unwrap();
        (one, Channel::new(other).unwrap())
    }

    /// The other side has been dropped. A child that another test has forked holds a copy of it until it calls execve(2).
    fn ends(channel: &Channel) {
        let error = channel.wait(Duration::from_secs(120)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof);
        assert!(channel.receive().unwrap().is_none());
    }

    #[test]
    fn messages_arrive_with_their_descriptor() {
        let (one, other) = channels();
        let item = Message::Item { detail: serde_json::json!({ "used": true }), bytes: 3 };
        one.send(&Message::Ready, None).unwrap();
        one.send(&item, Some(one.as_fd())).unwrap();
        assert_eq!(one.send_bytes(&[7; 2 * PACKET]).unwrap(), PACKET - 1);
        assert!(matches!(other.receive().unwrap(), Some(Packet::Message(Message::Ready, None))));
        let Some(Packet::Message(got, Some(_))) = other.receive().unwrap() else { panic!("no descriptor") };
        assert_eq!(got, item);
        let Some(Packet::Bytes(bytes)) = other.receive().unwrap() else { panic!("no bytes") };
        assert_eq!(bytes, [7; PACKET - 1]);
        assert_eq!(other.receive().unwrap_err().kind(), io::ErrorKind::WouldBlock);
        assert_eq!(other.wait(Duration::ZERO).unwrap_err().kind(), io::ErrorKind::TimedOut);
        drop(one);
        ends(&other);
    }

    #[test]
    fn packets_of_a_side_that_has_ended_with_unread_ones_arrive() {
        let (one, other) = channels();
        other.send(&Message::Ready, None).unwrap();
        one.send(&Message::Go, Some(one.as_fd())).unwrap();
        one.send_bytes(b"bytes").unwrap();
        drop(one);
        assert!(matches!(other.receive().unwrap(), Some(Packet::Message(Message::Go, Some(_)))));
        assert!(matches!(other.receive().unwrap(), Some(Packet::Bytes(_))));
        ends(&other);
    }

    #[test]
    fn a_full_channel_does_not_block() {
        let (one, other) = channels();
        let mut sent = 0;
        let error = loop {
            match one.send_bytes(&[0; PACKET]) {
                Ok(_) => sent += 1,
                Err(error) => break error,
            }
        };
        assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
        assert!(sent >= 2, "{sent}");
        other.receive().unwrap();
        one.send(&Message::Done, None).unwrap();
    }

    #[test]
    fn invalid_packets_are_refused() {
        let (one, other) = channels();
        for bytes in [&b"?"[..], b"J", b"J{\"type\":\"no\"}", &[JSON; PACKET + 1]] {
            rustix::net::send(&one, bytes, SendFlags::NOSIGNAL).unwrap();
            assert_eq!(other.receive().unwrap_err().kind(), io::ErrorKind::InvalidData, "{}", bytes.len());
        }
        let long = Message::Refused { reason: "x".repeat(PACKET) };
        assert_eq!(one.send(&long, None).unwrap_err().kind(), io::ErrorKind::InvalidInput);
    }
}
