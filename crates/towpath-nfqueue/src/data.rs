//! Netlink attributes: the layout, and the attributes of a packet, which C knows as `struct nfq_data`.

/// Bytes of an attribute's header: the length with the header, then the type (struct nlattr of linux/netlink.h).
pub(crate) const HEADER: usize = 4;
/// The type without its flags NLA_F_NESTED and NLA_F_NET_BYTEORDER (linux/netlink.h).
const TYPE_MASK: u16 = 0x3fff;

/// The attributes of a packet (`enum nfqnl_attr_type` of linux/netfilter/nfnetlink_queue.h). Numbers are in network byte order.
pub(crate) mod nfqa {
    /// No attribute.
    pub(crate) const UNSPEC: u16 = 0;
    /// `struct nfqnl_msg_packet_hdr`: id, EtherType, hook.
    pub(crate) const PACKET_HDR: u16 = 1;
    /// `struct nfqnl_msg_verdict_hdr`: verdict, id.
    pub(crate) const VERDICT_HDR: u16 = 2;
    /// The mark, 32 bits.
    pub(crate) const MARK: u16 = 3;
    /// `struct nfqnl_msg_packet_timestamp`: seconds and microseconds, 64 bits each.
    pub(crate) const TIMESTAMP: u16 = 4;
    /// Index of the ingress interface, 32 bits.
    pub(crate) const IFINDEX_INDEV: u16 = 5;
    /// Index of the egress interface, 32 bits.
    pub(crate) const IFINDEX_OUTDEV: u16 = 6;
    /// Index of the bridge's ingress port, 32 bits.
    pub(crate) const IFINDEX_PHYSINDEV: u16 = 7;
    /// Index of the bridge's egress port, 32 bits.
    pub(crate) const IFINDEX_PHYSOUTDEV: u16 = 8;
    /// `struct nfqnl_msg_packet_hw`: the hardware address of the sender.
    pub(crate) const HWADDR: u16 = 9;
    /// The packet from its IP header on.
    pub(crate) const PAYLOAD: u16 = 10;
    /// Connection tracking data (nfnetlink_conntrack.h).
    pub(crate) const CT: u16 = 11;
    /// Bytes of the packet, if the payload is a part of it, 32 bits.
    pub(crate) const CAP_LEN: u16 = 13;
    /// `NFQA_SKB_` bits, 32 bits.
    pub(crate) const SKB_INFO: u16 = 14;
    /// Connection tracking expectation (nfnetlink_conntrack.h).
    pub(crate) const EXP: u16 = 15;
    /// User id of the socket, 32 bits.
    pub(crate) const UID: u16 = 16;
    /// Group id of the socket, 32 bits.
    pub(crate) const GID: u16 = 17;
    /// Security context, text.
    pub(crate) const SECCTX: u16 = 18;
    /// The largest type that a packet's table has (NFQA_PRIORITY).
    pub(crate) const MAX: u16 = 21;
    /// Of this library, without a value: `nfq_handle_packet` takes the payload from the ring.
    pub(crate) const PAYLOAD_IN_RING: u16 = 0x3f00;
}

/// One attribute of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Attribute<'a> {
    /// Type without flags.
    pub(crate) kind: u16,
    /// Offset of the header in the message's attributes.
    pub(crate) at: usize,
    /// The value without header and padding.
    pub(crate) value: &'a [u8],
}

/// Iterates over the attributes in `bytes`: the bytes of a message after its `struct nfgenmsg`.
///
/// It ends at the first attribute that is shorter than its header or longer than the rest of the message.
pub(crate) fn attributes(bytes: &[u8]) -> impl Iterator<Item = Attribute<'_>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let rest = bytes.get(at..)?;
        let (length, rest_of_header) = rest.split_first_chunk::<2>()?;
        let kind = u16::from_ne_bytes(*rest_of_header.first_chunk::<2>()?) & TYPE_MASK;
        let length = usize::from(u16::from_ne_bytes(*length));
        let attribute = Attribute { kind, at, value: rest.get(HEADER..length)? };
        at += length.next_multiple_of(4);
        Some(attribute)
    })
}

/// The attributes of a packet by type, borrowed from its message. C has it as the opaque `struct nfq_data`.
///
/// `nfq_handle_packet` parses a message, passes a pointer to this table to the program's callback, and the functions `nfq_get_*` and
/// `nfq_snprintf_xml` read it. The pointer is valid during the callback.
#[derive(Clone, Debug)]
pub struct Attributes<'a> {
    values: [Option<&'a [u8]>; nfqa::MAX as usize + 1],
}

impl<'a> Attributes<'a> {
    /// Parses the bytes of a message after its `struct nfgenmsg`. Of several attributes of a type, the last one counts; types above
    /// [`nfqa::MAX`] are skipped.
    pub(crate) fn parse(bytes: &'a [u8]) -> Self {
        let mut values = [None; nfqa::MAX as usize + 1];
        for attribute in attributes(bytes) {
            if let Some(value) = values.get_mut(usize::from(attribute.kind)) {
                *value = Some(attribute.value);
            }
        }
        Self { values }
    }

    /// Adds or replaces the payload.
    pub(crate) fn set_payload(&mut self, payload: &'a [u8]) {
        self.values[usize::from(nfqa::PAYLOAD)] = Some(payload);
    }

    /// The value of the attribute with this type ([`nfqa`]), `None` if the message has none.
    pub(crate) fn get(&self, kind: u16) -> Option<&'a [u8]> {
        *self.values.get(usize::from(kind))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_by_type() {
        // Mark 7 with padding before it, then one of an unknown type, then the mark again with the flag of nested attributes.
        let message = [
            &[5, 0, 18, 0, 9, 0, 0, 0][..],
            &[8, 0, 3, 0, 0, 0, 0, 7],
            &[4, 0, 99, 0],
            &[8, 0, 3, 0x80, 0, 0, 0, 8],
        ]
        .concat();
        if cfg!(target_endian = "big") {
            return;
        }
        let attributes = Attributes::parse(&message);
        assert_eq!(attributes.get(nfqa::SECCTX), Some(&[9][..]));
        assert_eq!(attributes.get(nfqa::MARK), Some(&[0, 0, 0, 8][..]));
        assert_eq!(
            (attributes.get(nfqa::PAYLOAD), attributes.get(99), attributes.get(u16::MAX)),
            (None, None, None)
        );
    }

    #[test]
    fn invalid_lengths_end_the_message() {
        let valid = [8, 0, 3, 0, 0, 0, 0, 7];
        for (rest, known) in [
            // Shorter than the header; beyond the end; without a type.
            (&[3, 0, 18, 0, 9, 0, 0, 0][..], 1),
            (&[0, 0, 18, 0], 1),
            (&[9, 0, 18, 0, 9, 0, 0, 0], 1),
            (&[4, 0, 18], 1),
            (&[4, 0], 1),
            (&[4], 1),
            // The padding of the last attribute may be missing.
            (&[5, 0, 18, 0, 9], 2),
        ] {
            assert_eq!(attributes(&[&valid[..], rest].concat()).count(), known, "{rest:?}");
        }
    }
}
