//! Bits of [`Packet::ext6`](crate::Packet::ext6): IPv6 extension headers, with ipfw's values (ip_fw.h, `EXT_*`).

/// Fragment header, that of an atomic fragment included.
pub const FRAG: u16 = 0x1;
/// Hop-by-hop options.
pub const HOPOPT: u16 = 0x2;
/// Routing header of any type.
pub const ROUTE: u16 = 0x4;
/// Authentication header.
pub const AH: u16 = 0x8;
/// Encapsulating security payload; the headers after it are encrypted.
pub const ESP: u16 = 0x10;
/// Destination options.
pub const DSTOPT: u16 = 0x20;
/// Routing header of type 0 (source route, deprecated by RFC 5095).
pub const RTHDR0: u16 = 0x40;
/// Routing header of type 2 (mobile IPv6).
pub const RTHDR2: u16 = 0x80;
/// A next header, or a routing type, that IANA has not assigned (or keeps for experiments).
///
/// It may be an extension header that hides an upper layer; ipfw denies such packets by default. This definition is
/// narrower than ipfw's, where every number outside a short list is unknown.
pub const UNKNOWN: u16 = 0x100;
