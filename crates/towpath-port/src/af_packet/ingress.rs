//! The program of an exclusive port: it drops, for the network stack, the packets that the port has.
//!
//! A frame passes the packet sockets of its interface first, and then the ingress hook (net/core/dev.c,
//! `__netif_receive_skb_core`: `ptype_all`, then `sch_handle_ingress`). A program at this hook drops what is not in the
//! [`Filter`](crate::host_filter::Filter) of the port. A second program, a filter of the packet socket, drops what is for the
//! machine alone.
//!
//! A tcx link (Linux 6.6) attaches the program. It ends with its last descriptor, so after the process has ended for any reason, the
//! network stack gets the packets again (fail open). A link that is pinned in a BPF file system stays (fail closed). Before Linux 6.6, a
//! filter attaches the program and stays in both cases. With fail open, its program passes all packets after the process has ended
//! ([`clsact`]).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use crate::host_filter::{Actions, Filter};
use crate::{clsact, pins, sys};

/// BPF_PROG_TYPE_SOCKET_FILTER, BPF_PROG_TYPE_SCHED_CLS, BPF_TCX_INGRESS (linux/bpf.h).
const PROG_SOCKET_FILTER: u32 = 1;
const PROG_SCHED_CLS: u32 = 3;
const TCX_INGRESS: u32 = 46;
/// Results of the program: the next program decides (TC_ACT_UNSPEC), or drop (TC_ACT_SHOT; linux/pkt_cls.h). enum tcx_action_base has the
/// same values.
const NEXT: i32 = -1;
const DROP: i32 = 2;
const INGRESS: Actions = Actions { host: NEXT, both: NEXT, port: DROP };
/// The results of a socket filter: the bytes of the packet that the socket gets.
const NOTHING: i32 = 0;
const EVERYTHING: i32 = -1;
/// The filter of the sockets.
pub(super) const FILTER: Actions = Actions { host: NOTHING, both: EVERYTHING, port: EVERYTHING };

/// The programs on an interface.
#[derive(Debug)]
pub(super) struct Ingress {
    hook: Hook,
    /// The filter of the sockets, unless they get all packets.
    filter: Option<OwnedFd>,
}

/// How the first program is attached.
#[derive(Debug)]
enum Hook {
    /// Closing the link detaches the program, unless the link is pinned.
    Link(OwnedFd),
    /// Before Linux 6.6.
    Clsact(clsact::Attached),
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
    /// The program stays when the process ends.
    pub(super) closed: bool,
}

impl Attach<'_> {
    /// Loads the programs and attaches the first one. It replaces the one that an earlier engine left. Returns the descriptors of
    /// [`Ingress::of`].
    pub(super) fn attach(&self) -> io::Result<Vec<OwnedFd>> {
        let hook = match self.link() {
            // The kernel has no tcx.
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => self.clsact()?,
            hook => hook?,
        };
        let filter = match self.host.is_empty() {
            true => None,
            false => Some(sys::bpf_load(PROG_SOCKET_FILTER, &self.compile(FILTER, None), 0, 0)?),
        };
        Ok(std::iter::once(hook).chain(filter).collect())
    }

    fn compile(&self, actions: Actions, heartbeat: Option<BorrowedFd<'_>>) -> Vec<u64> {
        self.host.compile(self.header, self.me, actions, heartbeat)
    }

    /// Attaches the program by a link.
    fn link(&self) -> io::Result<OwnedFd> {
        #[cfg(test)]
        if tests::WITHOUT_TCX.get() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let program = sys::bpf_load(PROG_SCHED_CLS, &self.compile(INGRESS, None), 0, TCX_INGRESS)?;
        let link = sys::bpf_link(program.as_fd(), self.index, TCX_INGRESS, 0)?;
        if self.closed {
            pins::replace(self.pin, link.as_fd())?;
        } else {
            // Without the permission to look into the file system, the process has pinned nothing.
            pins::remove(self.pin).or_else(|error| match error.kind() {
                io::ErrorKind::PermissionDenied => Ok(false),
                _ => Err(error),
            })?;
        }
        Ok(link)
    }

    /// Attaches the program by a filter. Returns the map of its heartbeat, which the program of a closed port does not read.
    fn clsact(&self) -> io::Result<OwnedFd> {
        let map = clsact::heartbeat()?;
        let code = self.compile(INGRESS, (!self.closed).then(|| map.as_fd()));
        let program = sys::bpf_load(PROG_SCHED_CLS, &code, 0, 0)?;
        clsact::attach(self.index, program.as_fd())?;
        Ok(map)
    }
}

impl Ingress {
    /// Takes over programs that another process may have attached to the interface `index`: the link or the map of the heartbeat, and
    /// the filter of the sockets.
    pub(super) fn of(index: u32, closed: bool, descriptors: Vec<OwnedFd>) -> io::Result<Self> {
        let mut descriptors = descriptors.into_iter();
        let hook = descriptors.next().ok_or(io::ErrorKind::InvalidData)?;
        let hook = match clsact::memory(hook.as_fd()) {
            Ok(memory) => Hook::Clsact(clsact::Attached::of(index, memory, closed)?),
            Err(_) => Hook::Link(hook),
        };
        Ok(Self { hook, filter: descriptors.next() })
    }

    /// Returns true if the program is attached to the interface `index`.
    pub(super) fn is_on(&self, index: u32) -> bool {
        match &self.hook {
            Hook::Link(link) => sys::bpf_link_interface(link.as_fd()).is_ok_and(|on| on == Some(index)),
            Hook::Clsact(attached) => attached.is_on(index),
        }
    }

    /// Keeps from a socket the packets that are for the machine alone.
    pub(super) fn filter(&self, socket: BorrowedFd<'_>) -> io::Result<()> {
        use std::os::fd::AsRawFd;
        let Some(filter) = &self.filter else { return Ok(()) };
        sys::set(socket, libc::SOL_SOCKET, sys::SO_ATTACH_BPF, &[filter.as_raw_fd() as u32])
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::Cell;

    thread_local! {
        /// Attach programs by a filter, as before Linux 6.6.
        pub(in crate::af_packet) static WITHOUT_TCX: Cell<bool> = const { Cell::new(false) };
    }
}
