//! `libnetfilter_queue.so.1`: the interface of libnetfilter_queue, served by a Towpath engine.
//!
//! A program that is linked to libnetfilter_queue receives its packets from an engine's queue instead of a kernel queue.
#![allow(unsafe_code)]

/// The attributes of a packet: `struct nfq_data`.
mod data;
/// errno(3).
mod errno;
/// Types of pointer arguments.
mod memory;
/// `pktb_*`, `nfq_ip_*`, `nfq_ip6_*`, `nfq_tcp_*`, `nfq_udp_*` and `nfq_icmp_*`.
mod packet;
