//! `libnetfilter_queue.so.1`: the interface of libnetfilter_queue, served by a Towpath engine.
//!
//! A program that is linked to libnetfilter_queue receives its packets from an engine's queue instead of a kernel queue.
#![allow(unsafe_code)]
// The names that C links to are `pub`, in private modules.
#![allow(unreachable_pub)]

/// The attributes of a packet: `struct nfq_data`.
mod data;
/// errno(3).
mod errno;
/// Return values, errno and panics.
mod ffi;
/// Programs that fork.
mod fork;
/// `nfq_get_*`.
mod get;
/// `nfq_open` to `nfq_close`: handles, queues and verdicts.
mod handle;
/// Types of pointer arguments.
mod memory;
/// Messages to the program.
mod message;
/// The handle that `nfq_nfnlh` returns.
mod nfnl;
/// `nfq_nlmsg_*`.
mod nlmsg;
/// `pktb_*`, `nfq_ip_*`, `nfq_ip6_*`, `nfq_tcp_*`, `nfq_udp_*` and `nfq_icmp_*`.
mod packet;
/// The engine's sockets of queues.
mod place;
/// The thread that moves packets from the rings to the program's socket.
mod pump;
/// Packets and verdicts of one queue.
mod queue;
/// The program's socket.
mod socket;
/// `nfq_snprintf_xml`.
mod xml;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks a mutex. A panic of another holder does not matter: each holder leaves the data valid between its steps.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
