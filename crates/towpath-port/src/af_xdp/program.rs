//! The XDP program that redirects frames to the sockets: six instructions, assembled here and loaded with bpf(2).
//!
//! ```text
//! r2 = ctx->rx_queue_index
//! r1 = the map of sockets
//! r3 = the action for a queue without a socket: XDP_PASS or XDP_DROP
//! return bpf_redirect_map(r1, r2, r3)
//! ```
//!
//! A BPF link attaches it. The link ends when its last descriptor is closed, so after the process has ended for any reason, the
//! interface works as before (fail open). A link that is pinned in a bpf file system persists. With `XDP_DROP` the interface then
//! drops all frames (fail closed) until the port is opened again or the pin is removed.
//!
//! With flow offload, the program is that of `bpf/offload_xdp.bpf.c`, which redirects the frames of decided flows to their egress
//! interface, and all others as this one does. Its link is pinned if flows outlive the process. An engine that takes a port over puts its
//! own program into the link, because each engine has maps of its own.
//!
//! References: linux/bpf.h, Documentation/bpf/map_xskmap.rst.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use super::{After, Config};
use crate::offload::{self, Flows};
use crate::sys::{self, WordMap};
use crate::{Object, Opener, pins};

/// BPF_MAP_TYPE_XSKMAP, BPF_PROG_TYPE_XDP, BPF_XDP (attach type), BPF_F_XDP_HAS_FRAGS.
const XSKMAP: u32 = 17;
const PROG_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
const HAS_FRAGS: u32 = 1 << 5;
/// linux/if_link.h.
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;
/// enum xdp_action.
const XDP_DROP: i32 = 1;
const XDP_PASS: i32 = 2;

/// Limit on queues per program.
pub(super) const QUEUES: u32 = 64;

/// A loaded and attached program with its map of sockets.
#[derive(Debug)]
pub(super) struct Program {
    map: WordMap,
    /// Closing it detaches the program, unless it is pinned.
    link: OwnedFd,
    /// The program for flows.
    flows: Option<OwnedFd>,
    /// A pinned link would stay: the program is detached. Not one that another process has attached, or uses now: it may continue.
    ends: AtomicBool,
}

/// Parameters of the attachment.
#[derive(Clone, Copy, Debug)]
pub(super) struct Attach<'a> {
    pub(super) index: u32,
    /// Native mode; otherwise generic mode.
    pub(super) native: bool,
    /// Support frames of several buffers.
    pub(super) frags: bool,
    /// Path where the link is pinned. Frames without a socket are then dropped.
    pub(super) pin: Option<&'a Path>,
}

impl Program {
    /// Loads and attaches the program. Returns the map of sockets and the link.
    pub(super) fn attach(attach: Attach<'_>) -> io::Result<Vec<OwnedFd>> {
        let map = WordMap::new(XSKMAP, QUEUES)?;
        let program = load(map.as_fd(), attach)?;
        let link = attach.link(program.as_fd())?;
        Ok(vec![map.into(), link])
    }

    /// Loads the program for flows of an engine. Returns the map of sockets and the program.
    pub(super) fn load_for_flows(
        (engine, flows): (u32, Flows),
        attach: Attach<'_>,
    ) -> io::Result<Vec<OwnedFd>> {
        let map = WordMap::new(XSKMAP, QUEUES)?;
        let Attach { index, frags, pin, .. } = attach;
        let xdp = offload::Xdp { index, sockets: map.as_fd(), closed: pin.is_some(), frags };
        let program = offload::load_xdp(engine, flows, xdp)?;
        Ok(vec![map.into(), program])
    }

    /// As [`load_for_flows`](Self::load_for_flows), and attaches the program. Returns also the link, and the link again if it stays with
    /// the entries of a process that is killed; `pin` is its file in an open port.
    pub(super) fn attach_for_flows(
        (engine, flows): (u32, Flows),
        attach: Attach<'_>,
        pin: &Path,
    ) -> io::Result<Vec<OwnedFd>> {
        let mut descriptors = Self::load_for_flows((engine, flows), attach)?;
        let link = attach.link(descriptors[1].as_fd())?;
        let stays = flows.outlive && (attach.pin.is_some() || pins::replace(pin, link.as_fd()).is_ok());
        let again = stays.then(|| link.try_clone()).transpose()?;
        descriptors.extend([link].into_iter().chain(again));
        Ok(descriptors)
    }

    /// Gets the attached program of a port.
    pub(super) fn open(config: &Config, opener: &Opener) -> io::Result<Self> {
        let (frags, closed) = (config.multi_buffer, config.after != After::Pass);
        let Some(flows) = config.flows else {
            let [map, link] = opener.open_all(&Object::XdpProgram { frags })?;
            return Ok(Self { map: WordMap::of(map)?, link, flows: None, ends: AtomicBool::new(false) });
        };
        let object = Object::XdpFlowProgram { engine: std::process::id(), frags, attach: true };
        let mut descriptors = opener.open(&object)?.into_iter();
        let mut next = || descriptors.next().ok_or(io::ErrorKind::InvalidData);
        let (map, program, link) = (next()?, next()?, next()?);
        if flows.outlive && next().is_err() {
            log::warn!(
                "`{}`: offloaded flows end with the engine: `fail = \"open\"` needs a BPF file system at /sys/fs/bpf",
                config.interface
            );
        }
        Ok(Self { map: WordMap::of(map)?, link, flows: Some(program), ends: AtomicBool::new(!closed) })
    }

    /// Takes over a program that another process attached, by its map and its link. With offload, it gets a program of its own, with a map
    /// of its own, which [`resume`](Self::resume) attaches.
    ///
    /// # Errors
    ///
    /// Fails if the first descriptor is not a map of 32-bit keys and values, and if the opener does.
    pub(super) fn adopt([map, link]: [OwnedFd; 2], config: &Config, opener: &Opener) -> io::Result<Self> {
        let ends = AtomicBool::new(false);
        if config.flows.is_none() {
            return Ok(Self { map: WordMap::of(map)?, link, flows: None, ends });
        }
        let (engine, frags) = (std::process::id(), config.multi_buffer);
        let [map, program] = opener.open_all(&Object::XdpFlowProgram { engine, frags, attach: false })?;
        Ok(Self { map: WordMap::of(map)?, link, flows: Some(program), ends })
    }

    /// The program of this process decides on the frames from now on. All its sockets are in its map.
    pub(super) fn resume(&self) -> io::Result<()> {
        match &self.flows {
            Some(program) => sys::bpf_relink(self.link.as_fd(), program.as_fd()),
            None => Ok(()),
        }
    }

    /// Copies of its map and its link, for another process, which may continue the program.
    pub(super) fn descriptors(&self) -> io::Result<[OwnedFd; 2]> {
        // Relaxed: the last socket is dropped after this.
        self.ends.store(false, Ordering::Relaxed);
        Ok([self.map.as_fd().try_clone_to_owned()?, self.link.try_clone()?])
    }

    /// Detaches the program, also where other sockets have it: the interface can get another one. A pinned program stays.
    pub(super) fn detach(&self, is_pinned: bool) {
        if !is_pinned {
            // A link of a deleted interface is detached already.
            let _ = sys::bpf_detach(self.link.as_fd());
        }
    }

    /// Redirects frames of `queue` to `socket`.
    pub(super) fn serve(&self, queue: u32, socket: BorrowedFd<'_>) -> io::Result<()> {
        self.map.set(queue, socket.as_raw_fd() as u32)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Relaxed: as in `descriptors`.
        if self.ends.load(Ordering::Relaxed) {
            // The file of a pinned link has no effect afterwards; the next engine removes it.
            self.detach(false);
        }
    }
}

impl Attach<'_> {
    fn link(self, program: BorrowedFd<'_>) -> io::Result<OwnedFd> {
        match self.pin {
            Some(pin) => pinned(program, self, pin),
            None => link(program, self),
        }
    }
}

fn load(map: BorrowedFd<'_>, attach: Attach<'_>) -> io::Result<OwnedFd> {
    let miss = if attach.pin.is_some() { XDP_DROP } else { XDP_PASS };
    // struct bpf_insn: code, registers (source, destination), offset, immediate.
    let instruction = |code: u8, registers: u8, offset: i16, immediate: i32| {
        let [a, b] = offset.to_ne_bytes();
        let [c, d, e, f] = immediate.to_ne_bytes();
        u64::from_ne_bytes([code, registers, a, b, c, d, e, f])
    };
    let code = [
        instruction(0x61, 0x12, 16, 0), // r2 = *(u32 *)(r1 + 16), xdp_md.rx_queue_index
        instruction(0x18, 0x11, 0, map.as_raw_fd()), // r1 = map (BPF_PSEUDO_MAP_FD)
        instruction(0, 0, 0, 0),        // second slot
        instruction(0xb7, 0x03, 0, miss), // r3 = miss
        instruction(0x85, 0, 0, 51),    // call bpf_redirect_map
        instruction(0x95, 0, 0, 0),     // exit
    ];
    sys::bpf_load(PROG_XDP, &code, if attach.frags { HAS_FRAGS } else { 0 }, ATTACH_XDP)
}

fn link(program: BorrowedFd<'_>, attach: Attach<'_>) -> io::Result<OwnedFd> {
    let mode = if attach.native { XDP_FLAGS_DRV_MODE } else { XDP_FLAGS_SKB_MODE };
    sys::bpf_link(program, attach.index, ATTACH_XDP, mode)
}

/// Updates the link pinned at `pin` with the program, or creates and pins a new link.
fn pinned(program: BorrowedFd<'_>, attach: Attach<'_>, pin: &Path) -> io::Result<OwnedFd> {
    if let Ok(old) = sys::bpf_path(pin) {
        // The file of an interface that has another name now leads elsewhere.
        let is_on_it = sys::bpf_link_interface(old.as_fd()).is_ok_and(|on| on == Some(attach.index));
        if is_on_it && sys::bpf_relink(old.as_fd(), program).is_ok() {
            return Ok(old);
        }
        // The link of a deleted interface, or of another program.
        rustix::fs::unlink(pin)?;
    }
    let link = link(program, attach)?;
    sys::bpf_pin(pin, link.as_fd())?;
    Ok(link)
}
