//! ICMP errors belong to the flow whose packet they quote.
//!
//! A router that cannot deliver a packet reports that to the sender and quotes the beginning of the packet (RFC 792;
//! RFC 4443, section 2.4 (c)). The quote has the flow, in the packet's direction. An error neither refreshes a state
//! nor counts in it, because any host on the path can send it.

use crate::state::Flow;
use towpath_wire::{self as wire, Addresses, Fragment, LinkType, Packet, proto};

/// The packet that an ICMP error quotes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quoted {
    /// The flow of the quoted packet, in that packet's direction.
    pub flow: Flow,
    /// Its TCP sequence number.
    pub tcp_seq: Option<u32>,
}

impl Quoted {
    /// The quote in `packet`, if it is an ICMP or ICMPv6 error whose quote has a flow and whose destination is the
    /// sender of the quoted packet. Redirects and errors about errors do not count.
    ///
    /// The scope zone of the addresses and the zone are 0, as in [`Packet::flow`].
    pub fn of(packet: &Packet<'_>) -> Option<Self> {
        let error = match packet.proto {
            // Destination unreachable, source quench, time exceeded, parameter problem.
            proto::ICMP => matches!(packet.icmp_type, 3 | 4 | 11 | 12),
            // RFC 4443, 2.1: "Error messages are identified as such by a zero in the high-order bit".
            proto::ICMP6 => packet.icmp_type < 128,
            _ => false,
        };
        if !error || packet.fragment == Fragment::Later {
            return None;
        }
        // A quote is a truncated packet: its lengths may exceed what is quoted.
        let quote = wire::parse(LinkType::RAW, packet.payload(), u32::from(u16::MAX) + 40).ok()?;
        if quote.fragment == Fragment::Later || !sent_by_receiver(&quote, packet) {
            return None;
        }
        let flow = quote.flow()?;
        let query = match quote.proto {
            proto::ICMP | proto::ICMP6 => quote.icmp_echo_id().is_some(),
            _ => true,
        };
        let tcp_seq = (quote.proto == proto::TCP && quote.transport_len >= 8).then_some(quote.tcp_seq);
        query.then_some(Self { flow, tcp_seq })
    }
}

/// Returns true if the quoted packet's source is the error's destination.
fn sent_by_receiver(quote: &Packet<'_>, error: &Packet<'_>) -> bool {
    match (quote.addresses, error.addresses) {
        (Addresses::V4(sender, _), Addresses::V4(_, receiver)) => sender == receiver,
        (Addresses::V6(sender, _), Addresses::V6(_, receiver)) => sender == receiver,
        _ => false,
    }
}
