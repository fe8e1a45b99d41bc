//! What a port or a capture says that its frames begin with, in the gate's words.

use towpath_port::{Header, LinkType};
use towpath_wire::Link;

/// A link type, as the gate knows it.
pub fn link(link: LinkType) -> Link {
    match link.header() {
        Header::Ethernet => Link::Ethernet,
        Header::Ip => Link::Ip,
        Header::Null => Link::Null,
        Header::Sll => Link::Sll,
        Header::Sll2 => Link::Sll2,
        Header::Ppp => Link::Ppp,
        Header::PppEther => Link::PppEther,
        Header::CiscoHdlc => Link::CiscoHdlc,
        Header::FrameRelay => Link::FrameRelay,
        Header::Fddi => Link::Fddi,
        Header::Nflog => Link::Nflog,
        Header::Pflog => Link::Pflog,
        Header::Pktap => Link::Pktap,
        Header::Wlan => Link::Wlan,
        Header::Radiotap => Link::Radiotap,
        Header::Other => Link::Other,
    }
}
