//! What a call on a handle is told, and says: Linux's MSG_ flags.

bitflags::bitflags! {
    /// Flags of one call, with Linux's numbers (include/linux/socket.h).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Flags: u32 {
        /// MSG_PEEK. Reads without taking: the next call reads the same.
        const PEEK = 0x2;
        /// MSG_TRUNC. Completion by a call: the message was longer than the buffer, and its rest is dropped.
        const TRUNC = 0x20;
        /// MSG_DONTWAIT. What would have to wait is [`super::Error::WouldBlock`].
        const DONTWAIT = 0x40;
        /// MSG_EOR. Sending on [`super::Kind::Seqpacket`]: the message ends here. Completion by a call: what was read ends the message.
        const EOR = 0x80;
        /// MSG_MORE. Sending on [`super::Kind::Dgram`]: more of this message follows.
        const MORE = 0x8000;
        /// MSG_BATCH. More messages follow: this one may leave with them.
        const BATCH = 0x4_0000;
    }
}
