#[cfg(not(loom))]
use std::os::fd::AsFd;

/// What a frame carries.
///
/// Numbers below 0x8000 are Towpath's; the rest are free for programs that use the ring for their own messages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Kind(pub u16);

impl Kind {
    /// A packet of [`Header::wire_len`] bytes, link header first.
    pub const PACKET: Self = Self(0);
    /// A message.
    pub const MESSAGE: Self = Self(1);
    /// An event: something happened, nobody asked.
    pub const EVENT: Self = Self(2);
    /// Part of the answer to a dump request.
    pub const DUMP: Self = Self(3);
    /// End of a dump (`NLMSG_DONE`).
    pub const DONE: Self = Self(4);
    /// A request was refused: [`Header::mark`] is the error's number (errno(3)). To a worker: nobody took a message that it sent,
    /// whose bytes these are, and whose address is in [`Header::port`] and [`Header::group`].
    pub const ERROR: Self = Self(5);
    /// TX only: the payload that takes the place of a packet's.
    pub const REPLACEMENT: Self = Self(6);
    /// TX only: asks for a dump.
    pub const REQUEST: Self = Self(7);
    /// RX only: frames for this client were lost; [`Header::loss_record`] says how many and why.
    pub const GAP: Self = Self(8);
    /// TX only: answers the message whose number is in [`Header::port`], on the connection that it came from.
    /// Of several messages in a frame ([`Self::MESSAGES`]), [`Header::group`] says how many are answered then, from the first on, and
    /// [`Header::mark`] with how many replies.
    pub const REPLY: Self = Self(9);
    /// RX only: several messages of one connection, as many as [`Header::mark`] says; see
    /// [`Channel::send_batch`](crate::Channel::send_batch).
    pub const MESSAGES: Self = Self(10);
}

/// What stands before a frame's payload.
///
/// On the RX lane the engine writes it and clients may believe it as far as they trust the engine; on the TX lane the
/// engine believes nothing of it.
// The order of the words in shared memory, so that copying them is seven loads and seven stores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Header {
    /// Bytes of payload in the frame.
    pub len: u32,
    /// What the payload is.
    pub kind: Kind,
    /// Where the payload is: bits of `FLAG_*`.
    pub(crate) flags: u16,
    /// Bytes that the packet had on the wire; `len` is less when it was cut.
    pub wire_len: u32,
    /// The multicast group or queue that the frame was sent to; 0 for none.
    pub group: u32,
    /// Nanoseconds since the epoch.
    pub time: u64,
    /// The packet's mark.
    pub mark: u32,
    /// The port that the packet came from, or the connection that the message belongs to.
    pub port: u32,
    /// Process id of the sender, as the engine's namespace sees it; 0 for the network.
    pub pid: u32,
    /// User id of the sender, likewise.
    pub uid: u32,
    /// Group id of the sender, likewise.
    pub gid: u32,
    /// Hash of the packet's flow; the same in both directions.
    pub hash: u32,
    /// Where a packet's layers begin.
    pub layers: Layers,
    /// The gap record: how many frames for this client were lost between the one before and this one; 65535 stands for
    /// that many or more.
    pub lost: u16,
}

/// Where a packet's layers begin in its frame, as the engine's parser found them, so that no client has to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct Layers {
    /// Link type: the number that pcap files have for it.
    pub link: u16,
    /// Offset of what follows the link header: the IP header of an IP packet.
    pub network: u16,
    /// Offset of the upper layer's payload; the frame's length when it has none.
    pub payload: u16,
}

/// The payload lies beside the header.
pub(crate) const FLAG_INLINE: u16 = 1;
/// The payload is in a sealed memfd of its own, sent over the socket.
pub(crate) const FLAG_ONESHOT: u16 = 2;
/// A dump saw the data change under it (`NLM_F_DUMP_INTR`).
pub(crate) const FLAG_INTERRUPTED: u16 = 4;

impl Header {
    /// Whether the data changed while this dump ran, so that its parts may not fit together.
    #[must_use]
    pub const fn interrupted(&self) -> bool {
        self.flags & FLAG_INTERRUPTED != 0
    }
}

/// What the producer says about a message; the ring adds the length.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Meta {
    /// What the payload is.
    pub kind: Kind,
    /// Bytes on the wire; 0 means as many as the payload has.
    pub wire_len: u32,
    /// Nanoseconds since the epoch.
    pub time: u64,
    /// The packet's mark.
    pub mark: u32,
    /// The port that the packet came from, or the connection that the message belongs to.
    pub port: u32,
    /// Multicast group or queue; 0 for none.
    pub group: u32,
    /// Hash of the flow.
    pub hash: u32,
    /// Where a packet's layers begin.
    pub layers: Layers,
    /// Who sent it, when that was a local process.
    pub sender: Option<Credentials>,
}

/// Who a process is, as the kernel says (`SO_PEERCRED`, socket(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// Process id; 0 for one that is outside our PID namespace.
    pub pid: u32,
    /// Effective user id when it connected.
    pub uid: u32,
    /// Effective group id when it connected.
    pub gid: u32,
}

#[cfg(not(loom))]
impl Credentials {
    /// Who is at the other end of a connected Unix socket.
    ///
    /// # Errors
    /// When getsockopt(2) fails.
    pub fn of(socket: impl AsFd) -> std::io::Result<Self> {
        crate::shm::sys::peer(socket.as_fd())
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
