//! `libnetfilter_queue.so.1`: the interface of libnetfilter_queue, served by a Towpath engine.
//!
//! A program that is linked to libnetfilter_queue receives its packets from an engine's queue instead of a kernel queue.
// Exported C symbols, which no Rust code imports, and the dereferencing of pointers from C.
#![allow(unsafe_code, unreachable_pub)]

/// The attributes of a packet: `struct nfq_data`.
mod data;
/// errno(3).
mod errno;
/// Types of pointer arguments.
mod memory;
/// `nfq_nlmsg_*`.
mod nlmsg;
/// `pktb_*`, `nfq_ip_*`, `nfq_ip6_*`, `nfq_tcp_*` and `nfq_udp_*`.
mod packet;
/// `nfq_snprintf_xml`.
mod xml;
