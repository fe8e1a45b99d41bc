//! Linux's MSG_ flags.

bitflags::bitflags! {
    /// Flags of a call, with Linux's values (include/linux/socket.h).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct Flags: u32 {
        /// MSG_PEEK: reads without consuming.
        const PEEK = 0x2;
        /// MSG_TRUNC, returned: the message was longer than the buffer, and the rest was dropped.
        const TRUNC = 0x20;
        /// MSG_DONTWAIT: returns [`super::Error::WouldBlock`] instead of waiting.
        const DONTWAIT = 0x40;
        /// MSG_EOR: ends a message when sending on [`super::Kind::Seqpacket`]. Returned: the bytes read end
        /// the message.
        const EOR = 0x80;
        /// MSG_MORE: when sending on [`super::Kind::Dgram`], more of the message follows.
        const MORE = 0x8000;
        /// MSG_BATCH: more messages follow, and this one may be sent together with them.
        const BATCH = 0x4_0000;
    }
}
