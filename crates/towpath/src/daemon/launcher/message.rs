//! Requests and replies: 284 bytes and up to [`DESCRIPTORS`] descriptors, in one packet of a SOCK_SEQPACKET socket.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

/// Bytes of a message.
const SIZE: usize = 4 + 4 * 3 + 8 + 4 + TEXT;
/// Bytes of its text.
pub(super) const TEXT: usize = 256;
/// Descriptors of a message.
pub(super) const DESCRIPTORS: usize = 66;

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Reply: done.
    Done = 0,
    /// Reply: the first number is errno(3) or 0; the text is added to it or is the error.
    Failed = 1,
    /// Read the configuration again; its hash must be `digest`.
    Adopt = 2,
    /// Start the program `digest` with the socket `text`. Reply: process id and user, and a pidfd.
    Start = 3,
    /// The exit status of the process of the first number. Reply: 1 and wait(2)'s status, or 0.
    Status = 4,
    /// Kill the process of the first number.
    Kill = 5,
    /// Open an object of a port (`object.rs`). Reply: the descriptors.
    Open = 6,
    /// Start the program of the first number in `upgrade` of [engine] as the next version of the engine, with --json if the second number
    /// is 1. Descriptors: its standard input and output. Reply: its process id; a pidfd, and a further connection to the launcher.
    Upgrade = 7,
}

/// A request or a reply.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Message {
    pub(super) kind: Kind,
    pub(super) numbers: [u32; 3],
    pub(super) digest: u64,
    pub(super) text: Vec<u8>,
}

impl Message {
    pub(super) const fn new(kind: Kind) -> Self {
        Self { kind, numbers: [0; 3], digest: 0, text: Vec::new() }
    }

    /// The reply of an error.
    pub(super) fn failed(error: &io::Error) -> Self {
        let (errno, text) = match error.raw_os_error() {
            Some(errno) => (errno.cast_unsigned(), String::new()),
            None => (0, error.to_string()),
        };
        let mut text = text.into_bytes();
        text.truncate(TEXT);
        Self { numbers: [errno, 0, 0], text, ..Self::new(Kind::Failed) }
    }

    /// The reply, or the error that it reports.
    pub(super) fn checked(self) -> io::Result<Self> {
        match self.kind {
            Kind::Done => Ok(self),
            _ if self.numbers[0] != 0 => Err(io::Error::from_raw_os_error(self.numbers[0].cast_signed())),
            _ => Err(io::Error::other(String::from_utf8_lossy(&self.text).into_owned())),
        }
    }

    fn to_bytes(&self) -> [u8; SIZE] {
        let mut bytes = [0; SIZE];
        let len = self.text.len().min(TEXT);
        let head =
            [&(self.kind as u32).to_ne_bytes()[..], &self.numbers.map(u32::to_ne_bytes).concat()].concat();
        let head = [head, self.digest.to_ne_bytes().to_vec(), (len as u32).to_ne_bytes().to_vec()].concat();
        bytes[..head.len()].copy_from_slice(&head);
        bytes[head.len()..head.len() + len].copy_from_slice(&self.text[..len]);
        bytes
    }

    /// `None`: not a message.
    fn from_bytes(bytes: &[u8; SIZE]) -> Option<Self> {
        let number = |at: usize| bytes[at..].first_chunk().map_or(0, |number| u32::from_ne_bytes(*number));
        let kinds =
            [Kind::Done, Kind::Failed, Kind::Adopt, Kind::Start, Kind::Status, Kind::Kill, Kind::Open];
        let kind = *kinds.iter().chain(&[Kind::Upgrade]).nth(number(0) as usize)?;
        let digest = u64::from_ne_bytes(*bytes[16..].first_chunk()?);
        let text = bytes[28..].get(..number(24) as usize)?.to_vec();
        Some(Self { kind, numbers: [number(4), number(8), number(12)], digest, text })
    }

    /// Sends the message.
    pub(super) fn send(&self, socket: impl AsFd, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
            return Err(io::Error::other("too many descriptors"));
        }
        let bytes = self.to_bytes();
        loop {
            match sendmsg(&socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
                Err(Errno::INTR) => {}
                done => return done.map(drop).map_err(Into::into),
            }
        }
    }

    /// Receives a message. `None`: the other side has ended.
    pub(super) fn receive(socket: impl AsFd) -> io::Result<Option<(Self, Vec<OwnedFd>)>> {
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut bytes = [0; SIZE];
        let received = loop {
            let flags = RecvFlags::CMSG_CLOEXEC;
            match recvmsg(&socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, flags) {
                Err(Errno::INTR) => {}
                done => break done?,
            }
        };
        let descriptors = control
            .drain()
            .filter_map(|message| match message {
                RecvAncillaryMessage::ScmRights(descriptors) => Some(descriptors),
                _ => None,
            })
            .flatten()
            .collect();
        match received.bytes {
            0 => Ok(None),
            SIZE if !received.flags.contains(ReturnFlags::CTRUNC) => {
                let message = Self::from_bytes(&bytes).ok_or(io::ErrorKind::InvalidData)?;
                Ok(Some((message, descriptors)))
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;

    use super::*;

    #[test]
    fn messages_arrive_with_their_descriptors() {
        let (one, other) = UnixDatagram::pair().unwrap();
        let message = Message {
            numbers: [1, 2, 3],
            digest: u64::MAX - 1,
            text: b"/run/x".to_vec(),
            ..Message::new(Kind::Start)
        };
        message.send(&one, &[one.as_fd(), other.as_fd()]).unwrap();
        let (got, descriptors) = Message::receive(&other).unwrap().unwrap();
        assert_eq!((got, descriptors.len()), (message, 2));
    }

    #[test]
    fn invalid_messages_are_refused() {
        let (one, other) = UnixDatagram::pair().unwrap();
        let valid = Message::new(Kind::Kill).to_bytes();
        let mut kind = valid;
        kind[..4].copy_from_slice(&8u32.to_ne_bytes());
        let mut long = valid;
        long[24..28].copy_from_slice(&257u32.to_ne_bytes());
        for bytes in [&kind[..], &long, &valid[1..]] {
            one.send(bytes).unwrap();
            assert!(Message::receive(&other).is_err());
        }
    }

    #[test]
    fn errors_keep_their_number_or_text() {
        for error in [io::Error::from_raw_os_error(2), io::Error::other("no such program")] {
            let text = error.to_string();
            assert_eq!(Message::failed(&error).checked().unwrap_err().to_string(), text);
        }
    }
}
