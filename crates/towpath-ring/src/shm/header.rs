#[cfg(not(loom))]
use std::os::fd::AsFd;

/// Content of a frame.
///
/// Towpath uses the numbers below 0x8000. Programs may use the others for messages of their own protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Kind(pub u16);

impl Kind {
    /// A packet of [`Header::wire_len`] bytes that begins with its link header.
    pub const PACKET: Self = Self(0);
    /// A message.
    pub const MESSAGE: Self = Self(1);
    /// An event notification.
    pub const EVENT: Self = Self(2);
    /// A part of the answer to a dump request.
    pub const DUMP: Self = Self(3);
    /// The end of a dump (`NLMSG_DONE`).
    pub const DONE: Self = Self(4);
    /// A refused request; [`Header::mark`] is the error number (errno(3)). For a worker: a message that it sent and
    /// that was not delivered; the payload is the message, and [`Header::port`] and [`Header::group`] name the
    /// connection.
    pub const ERROR: Self = Self(5);
    /// TX only: the new payload of a packet.
    pub const REPLACEMENT: Self = Self(6);
    /// TX only: a dump request.
    pub const REQUEST: Self = Self(7);
    /// RX only: a loss record. [`Header::loss_record`] returns the number of lost frames and the reason.
    pub const GAP: Self = Self(8);
    /// TX only: the answer to the message whose sequence number is in [`Header::port`], on the connection of that
    /// message. If that frame has several messages ([`Self::MESSAGES`]), [`Header::group`] is the number of messages
    /// answered so far, and [`Header::mark`] is the number of replies in this frame.
    pub const REPLY: Self = Self(9);
    /// RX only: several messages of one connection; [`Header::mark`] is their number. See
    /// [`Channel::send_batch`](crate::Channel::send_batch).
    pub const MESSAGES: Self = Self(10);
    /// TX only: a part of the answer to the first message without an answer in the frame in [`Header::port`]. The answer
    /// ends with [`Self::REPLY`], which may be empty. [`Header::group`] is the number of this message in its frame, from 1,
    /// or 0.
    pub const REPLY_PART: Self = Self(11);
    /// RX only: a connection was opened. [`Header::port`] and [`Header::group`] name it, and the payload has its addresses
    /// ([`OpenedInfo`](crate::OpenedInfo)). It is answered and released like a message.
    pub const OPENED: Self = Self(12);
    /// RX only: a connection ended. [`Header::port`] and [`Header::group`] name it, [`Header::mark`] is the cause
    /// ([`EndedInfo`](crate::EndedInfo)).
    pub const ENDED: Self = Self(13);
    /// TX only, without a payload: close the connection in [`Header::port`] and [`Header::group`] when everything that was written before
    /// is sent. [`Header::mark`] is the sequence number of the message whose answer is the last one, or 0.
    pub const CLOSE: Self = Self(14);
    /// TX only, without a payload: reset the connection in [`Header::port`] and [`Header::group`].
    pub const RESET: Self = Self(15);
    /// RX only: a part of a message; others follow, all for this worker. [`Header::wire_len`] is the number of the part, from 1. The other
    /// fields are those of the message. Only for a worker that attached with [`Options::parts`](crate::Options::parts).
    pub const MESSAGE_PART: Self = Self(16);
    /// RX only: the last part of a message, see [`Self::MESSAGE_PART`].
    pub const MESSAGE_END: Self = Self(17);
    /// RX only, without a payload: the connection ended before the last part of a message, see [`Self::MESSAGE_PART`]. No part follows.
    pub const MESSAGE_CUT: Self = Self(18);

    /// Returns true for a message and its parts.
    #[cfg(not(loom))]
    pub(crate) const fn is_message(self) -> bool {
        matches!(self, Self::MESSAGE | Self::MESSAGE_PART | Self::MESSAGE_END | Self::MESSAGE_CUT)
    }
}

// The order of the words in shared memory, so that copying them is seven loads and seven stores.
/// The header of a frame.
///
/// In RX frames, the engine writes it; clients trust it as far as they trust the engine. In TX frames, the engine
/// checks a private copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Header {
    /// Payload bytes in the frame.
    pub len: u32,
    /// Content of the payload.
    pub kind: Kind,
    /// Location of the payload: `FLAG_*`.
    pub(crate) flags: u16,
    /// Bytes of the packet on the wire. `len` is smaller if the packet was truncated.
    pub wire_len: u32,
    /// Multicast group or queue; 0 for no group.
    pub group: u32,
    /// Nanoseconds since the epoch.
    pub time: u64,
    /// The packet's mark.
    pub mark: u32,
    /// Port of the packet, or connection of the message.
    pub port: u32,
    /// Process id of the sender in the engine's PID namespace. A packet has no sender: see [`Header::interfaces`].
    pub pid: u32,
    /// User id of the sender.
    pub uid: u32,
    /// Group id of the sender.
    pub gid: u32,
    /// Flow hash; both directions of a flow have the same.
    pub hash: u32,
    /// Offsets of the packet's layers.
    pub layers: Layers,
    /// Frames lost for this client between the previous frame and this one; 65535 stands for 65535 or more.
    pub lost: u16,
}

/// Offsets of a packet's layers in its frame, from the engine's parser.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Layers {
    /// Link type, as in pcap files (`LINKTYPE_*`).
    pub link: u16,
    /// Offset of the network header, after the link header.
    pub network: u16,
    /// Offset of the transport payload; the frame's length if there is no payload.
    pub payload: u16,
}

/// The interfaces of a packet, as the engine knows them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Interfaces {
    /// Index of the interface that received the packet; 0 if it has none.
    pub ingress: u32,
    /// Index of the interface by which the packet leaves; 0 if that is not known yet.
    pub egress: u32,
    /// The netfilter hook that corresponds to the packet's place in the engine (`NF_INET_`, linux/netfilter.h).
    pub hook: u8,
    /// The packet is bridged: both interfaces are ports of a bridge.
    pub bridged: bool,
}

/// The payload is beside the header.
pub(crate) const FLAG_INLINE: u16 = 1;
/// The payload is in a sealed memfd, sent over the socket.
pub(crate) const FLAG_ONESHOT: u16 = 2;
/// The data changed during the dump (`NLM_F_DUMP_INTR`).
pub(crate) const FLAG_INTERRUPTED: u16 = 4;

impl Header {
    /// Returns true if the data changed during this dump. Its parts may be inconsistent.
    #[must_use]
    pub const fn interrupted(&self) -> bool {
        self.flags & FLAG_INTERRUPTED != 0
    }

    /// The process that sent the message; zeros for a packet.
    #[must_use]
    pub fn sender(&self) -> Credentials {
        let Self { pid, uid, gid, .. } = *self;
        if self.kind == Kind::PACKET { Credentials::default() } else { Credentials { pid, uid, gid } }
    }

    /// The interfaces of a packet; zeros for a message.
    #[must_use]
    pub fn interfaces(&self) -> Interfaces {
        if self.kind != Kind::PACKET {
            return Interfaces::default();
        }
        let bridged = self.gid & BRIDGED != 0;
        Interfaces { ingress: self.pid, egress: self.uid, hook: self.gid as u8, bridged }
    }
}

/// Bit of [`Header::gid`] of a packet: [`Interfaces::bridged`]. Bits 0-7 are the hook.
const BRIDGED: u32 = 1 << 8;

/// A packet has its interfaces in the place of a sender.
impl From<Interfaces> for Credentials {
    fn from(of: Interfaces) -> Self {
        let gid = u32::from(of.hook) | if of.bridged { BRIDGED } else { 0 };
        Self { pid: of.ingress, uid: of.egress, gid }
    }
}

/// Header fields that the producer sets. The ring adds the length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// Content of the payload.
    pub kind: Kind,
    /// Bytes on the wire; 0 means the length of the payload.
    pub wire_len: u32,
    /// Nanoseconds since the epoch.
    pub time: u64,
    /// The packet's mark.
    pub mark: u32,
    /// Port of the packet, or connection of the message.
    pub port: u32,
    /// Multicast group or queue; 0 for no group.
    pub group: u32,
    /// Flow hash.
    pub hash: u32,
    /// Offsets of the packet's layers.
    pub layers: Layers,
    /// Sender, if it is a local process; for a packet its [`Interfaces`].
    pub sender: Option<Credentials>,
}

/// Identity of a process, as the kernel reports it (`SO_PEERCRED`, socket(7)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Credentials {
    /// Process id; 0 for a process outside of this PID namespace.
    pub pid: u32,
    /// Effective user id at connect(2).
    pub uid: u32,
    /// Effective group id at connect(2).
    pub gid: u32,
}

#[cfg(not(loom))]
impl Credentials {
    /// Returns the credentials of the peer of a connected Unix socket.
    ///
    /// # Errors
    /// getsockopt(2) failed.
    pub fn of(socket: impl AsFd) -> std::io::Result<Self> {
        let (pid, uid, gid) = crate::shm::sys::peer(socket.as_fd())?;
        Ok(Self { pid, uid, gid })
    }
}

impl Meta {
    #[inline(always)]
    pub(crate) fn header(&self, len: usize, flags: u16) -> Header {
        let len = len as u32;
        let sender = self.sender.unwrap_or(Credentials { pid: 0, uid: 0, gid: 0 });
        Header {
            len,
            kind: self.kind,
            flags,
            wire_len: if self.wire_len == 0 { len } else { self.wire_len },
            group: self.group,
            time: self.time,
            mark: self.mark,
            port: self.port,
            pid: sender.pid,
            uid: sender.uid,
            gid: sender.gid,
            hash: self.hash,
            layers: self.layers,
            lost: 0,
        }
    }
}
