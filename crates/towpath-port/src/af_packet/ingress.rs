//! The program of an exclusive port: it drops, for the network stack, the packets that the port has.
//!
//! A frame passes the packet sockets of its interface first, and then the ingress hook (net/core/dev.c,
//! `__netif_receive_skb_core`: `ptype_all`, then `sch_handle_ingress`). A program at this hook drops what is not in the
//! [`Filter`](crate::host_filter::Filter) of the port. A second program, a filter of the packet socket, drops what is for the
//! machine alone.
//!
//! A tcx link (Linux 6.6) attaches the program. It ends with its last descriptor, so after the process has ended for any reason, the
//! network stack has the packets again (fail open). A link that is pinned in a BPF file system stays (fail closed).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use crate::host_filter::{Actions, Filter};
use crate::{pins, sys};

/// BPF_PROG_TYPE_SOCKET_FILTER, BPF_PROG_TYPE_SCHED_CLS, BPF_TCX_INGRESS (linux/bpf.h).
const PROG_SOCKET_FILTER: u32 = 1;
const PROG_SCHED_CLS: u32 = 3;
const TCX_INGRESS: u32 = 46;
/// enum tcx_action_base: the next program decides; drop.
const TCX_NEXT: i32 = -1;
const TCX_DROP: i32 = 2;
/// The results of a socket filter: the bytes of the packet that the socket gets.
const NOTHING: i32 = 0;
const EVERYTHING: i32 = -1;
/// SO_ATTACH_BPF (asm-generic/socket.h).
const SO_ATTACH_BPF: i32 = 50;

/// The programs on an interface.
#[derive(Debug)]
pub(super) struct Ingress {
    /// Closing it detaches the program, unless it is pinned.
    link: OwnedFd,
    /// The filter of the sockets, unless they get all packets.
    filter: Option<OwnedFd>,
}

/// Parameters of the attachment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attach<'a> {
    pub(super) index: u32,
    /// Length of the link header.
    pub(super) header: i32,
    /// The packets that the network stack gets.
    pub(super) host: &'a Filter,
    /// The interface's addresses in the kernel.
    pub(super) me: &'a [IpAddr],
    /// The file of the link.
    pub(super) pin: &'a Path,
    /// Pin the link: the program stays when the process ends.
    pub(super) closed: bool,
}

impl Ingress {
    /// Loads the programs and attaches the first one. It replaces the one that an earlier engine pinned.
    pub(super) fn attach(attach: Attach<'_>) -> io::Result<Self> {
        let Attach { index, header, host, me, pin, closed } = attach;
        let ingress = Actions { host: TCX_NEXT, both: TCX_NEXT, port: TCX_DROP };
        let socket = Actions { host: NOTHING, both: EVERYTHING, port: EVERYTHING };
        let program = sys::bpf_load(PROG_SCHED_CLS, &host.compile(header, me, ingress), 0, TCX_INGRESS)?;
        let filter = match host.is_empty() {
            true => None,
            false => Some(sys::bpf_load(PROG_SOCKET_FILTER, &host.compile(header, me, socket), 0, 0)?),
        };
        let link = sys::bpf_link(program.as_fd(), index, TCX_INGRESS, 0)?;
        if closed {
            pins::replace(pin, link.as_fd())?;
        } else {
            // Without the permission to look into the file system, the process has pinned nothing.
            pins::remove(pin).or_else(|error| match error.kind() {
                io::ErrorKind::PermissionDenied => Ok(false),
                _ => Err(error),
            })?;
        }
        Ok(Self { link, filter })
    }

    /// Takes over programs that another process attached: the link, and the filter of the sockets.
    pub(super) fn of(descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let mut descriptors = descriptors.into_iter();
        let link = descriptors.next().ok_or(io::ErrorKind::InvalidData)?;
        Ok(Self { link, filter: descriptors.next() })
    }

    pub(super) fn into_descriptors(self) -> Vec<OwnedFd> {
        std::iter::once(self.link).chain(self.filter).collect()
    }

    /// Returns true if the program is attached to the interface `index`.
    pub(super) fn is_on(&self, index: u32) -> bool {
        sys::bpf_link_interface(self.link.as_fd()).is_ok_and(|on| on == Some(index))
    }

    /// Keeps from a socket the packets that are for the machine alone.
    pub(super) fn filter(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        let Some(filter) = &self.filter else { return Ok(()) };
        sys::set(socket, libc::SOL_SOCKET, SO_ATTACH_BPF, &[filter.as_raw_fd() as u32])
    }
}
