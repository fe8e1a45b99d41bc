//! Loading and attaching the programs, by the process that has the privileges.
//!
//! The programs of all ports of an engine share the maps, so they are loaded once for each engine. During an upgrade, the launcher has those
//! of two engines, which share sockets: each engine has maps of its own, and the filter of a socket is that of the engine that receives.

use std::collections::HashSet;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use aya::maps::Map;
use aya::programs::{ProgramError, ProgramFd, SchedClassifier, SocketFilter};
use aya::{Ebpf, EbpfLoader};

use crate::host_filter::{Actions, Filter};
use crate::offload::Flows;
use crate::offload::deny::DENIED_MAX;
use crate::sys::WordMap;
use crate::{pins, sys};

/// BPF_PROG_TYPE_SOCKET_FILTER, BPF_TCX_INGRESS, BPF_F_BEFORE (linux/bpf.h).
const PROG_SOCKET_FILTER: u32 = 1;
const TCX_INGRESS: u32 = 46;
const BEFORE: u32 = 1 << 3;
/// BPF_PROG_TYPE_XDP, BPF_XDP, BPF_F_XDP_HAS_FRAGS, BPF_MAP_TYPE_DEVMAP_HASH.
const PROG_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
const HAS_FRAGS: u32 = 1 << 5;
const DEVMAP_HASH: u32 = 25;
/// Limit on interfaces, as in `bpf/offload_xdp.bpf.c`.
const INTERFACES: u32 = 1024;

/// Objects that are compiled from `bpf/offload.bpf.c` and `bpf/offload_xdp.bpf.c`.
#[derive(Clone, Copy, Debug)]
struct Objects {
    packet: &'static [u8],
    xdp: &'static [u8],
}

/// For x86, which carries out loads in their order.
#[cfg(target_arch = "x86_64")]
static OBJECTS: Objects = Objects {
    packet: aya::include_bytes_aligned!("../../bpf/offload.bpf.o"),
    xdp: aya::include_bytes_aligned!("../../bpf/offload_xdp.bpf.o"),
};

/// For processors that need barriers between loads.
#[cfg(any(test, not(target_arch = "x86_64")))]
static WEAK_OBJECTS: Objects = Objects {
    packet: aya::include_bytes_aligned!("../../bpf/offload.weak.bpf.o"),
    xdp: aya::include_bytes_aligned!("../../bpf/offload_xdp.weak.bpf.o"),
};

#[cfg(not(target_arch = "x86_64"))]
use WEAK_OBJECTS as OBJECTS;

/// The maps that the objects share. The XDP programs do not use `filters`.
const MAPS: [&str; 10] =
    ["flows", "slots", "epoch", "stats", "filters", "hosts", "nets", "ports", "denying", "denied"];
const FILTERS: usize = 4;

/// What a process has loaded.
struct Loaded {
    /// The process id of the engine.
    engine: u32,
    entries: u32,
    deny: bool,
    objects: Objects,
    /// Another engine was there before.
    replaces: bool,
    redirect: OwnedFd,
    filter: OwnedFd,
    /// In the order of [`MAPS`].
    maps: [OwnedFd; MAPS.len()],
    /// The interfaces to which XDP programs redirect.
    egress: WordMap,
}

/// By the engine and the number of entries: an engine has one, the tests of a process may have several.
static LOADED: Mutex<Vec<Loaded>> = Mutex::new(Vec::new());

/// The maps of an engine, which are loaded if they are not yet.
pub(crate) fn load(engine: u32, flows: Flows) -> io::Result<Vec<OwnedFd>> {
    with(engine, flows, |loaded| loaded.maps.iter().map(OwnedFd::try_clone).collect())
}

/// Attaches the program for flows at the ingress hook of the interface `index`, before other programs, and returns its link and the
/// filter for the sockets. The sockets do not receive what `host` keeps from them; `header` and `me` as for
/// [`Filter::compile`]. If the entries outlive the process, the link is pinned at `pin` and returned again; without a BPF file system it
/// is not, nor in an engine that has replaced another.
pub(crate) fn attach(
    engine: u32,
    flows: Flows,
    (index, pin): (u32, &Path),
    host: Option<(&Filter, Actions, &[std::net::IpAddr])>,
) -> io::Result<Vec<OwnedFd>> {
    with(engine, flows, |loaded| {
        let filter = match host {
            Some((host, actions, me)) => {
                let code = host.compile_before(14, me, actions, loaded.maps[FILTERS].as_fd());
                sys::bpf_load(PROG_SOCKET_FILTER, &code, 0, 0)?
            }
            None => loaded.filter.try_clone()?,
        };
        // A killed engine's program would forward by entries of its own. A running one's, which this engine replaces, ends with it; if
        // this engine failed, its pinned program would stay beside that one.
        if !loaded.replaces {
            let _ = pins::remove(pin);
        }
        loaded.egress.set(index, index)?;
        let link = sys::bpf_link(loaded.redirect.as_fd(), index, TCX_INGRESS, BEFORE)?;
        let pinned = flows.outlive && !loaded.replaces && pins::replace(pin, link.as_fd()).is_ok();
        let again = pinned.then(|| link.try_clone()).transpose()?;
        Ok([link, filter].into_iter().chain(again).collect())
    })
}

/// An XDP program for flows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Xdp<'a> {
    /// The index of its interface.
    pub(crate) index: u32,
    /// The map of its sockets.
    pub(crate) sockets: BorrowedFd<'a>,
    /// Frames of queues without a socket are dropped.
    pub(crate) closed: bool,
    /// Support frames of several buffers.
    pub(crate) frags: bool,
}

/// Loads the XDP program for an interface. Programs of other interfaces may redirect to it from now on.
pub(crate) fn load_xdp(engine: u32, flows: Flows, xdp: Xdp<'_>) -> io::Result<OwnedFd> {
    with(engine, flows, |loaded| {
        let program = loaded.load_xdp(xdp)?;
        loaded.egress.set(xdp.index, xdp.index)?;
        Ok(program)
    })
}

/// Loads the programs for processors that need barriers, on this one.
#[cfg(test)]
pub(super) fn load_weak(flows: Flows, xdp: Xdp<'_>) -> io::Result<()> {
    Loaded::new(0, flows, WEAK_OBJECTS)?.load_xdp(xdp).map(drop)
}

fn with<T>(engine: u32, flows: Flows, use_it: impl FnOnce(&Loaded) -> io::Result<T>) -> io::Result<T> {
    let Flows { entries, deny, .. } = flows;
    let mut all = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
    let is_it = |loaded: &&Loaded| (loaded.engine, loaded.entries, loaded.deny) == (engine, entries, deny);
    if let Some(loaded) = all.iter().find(is_it) {
        return use_it(loaded);
    }
    // The engine before may still run. Those before that have ended.
    let before = all.iter().map(|loaded| loaded.engine).rfind(|other| *other != engine);
    all.retain(|loaded| loaded.engine == engine || Some(loaded.engine) == before);
    let loaded = Loaded { replaces: before.is_some(), ..Loaded::new(engine, flows, OBJECTS)? };
    let used = use_it(&loaded);
    all.push(loaded);
    used
}

impl Loaded {
    fn new(engine: u32, Flows { entries, deny, .. }: Flows, objects: Objects) -> io::Result<Self> {
        let denied = if deny { DENIED_MAX as u32 } else { 1 };
        let mut object = EbpfLoader::new()
            .set_max_entries("flows", entries)
            .set_max_entries("slots", entries)
            .set_max_entries("hosts", denied)
            .set_max_entries("nets", denied)
            .load(objects.packet)
            .map_err(error_of)?;
        let filter: &mut SocketFilter = program(&mut object, "flow_filter")?;
        filter.load().map_err(error_of)?;
        let filter = descriptor(filter.fd().map_err(error_of)?)?;
        let redirect: &mut SchedClassifier = program(&mut object, "flow_redirect")?;
        redirect.load().map_err(error_of)?;
        let redirect = descriptor(redirect.fd().map_err(error_of)?)?;
        let mut map = |name: &str| {
            let missing = || io::Error::other(format!("the object has no map `{name}`"));
            match object.take_map(name).ok_or_else(missing)? {
                Map::HashMap(map)
                | Map::Array(map)
                | Map::PerCpuArray(map)
                | Map::ProgramArray(map)
                | Map::LpmTrie(map) => map.fd().as_fd().try_clone_to_owned(),
                _ => Err(missing()),
            }
        };
        let maps = MAPS.iter().map(|name| map(name)).collect::<io::Result<Vec<_>>>()?;
        let maps: [OwnedFd; MAPS.len()] = maps.try_into().map_err(|_| io::ErrorKind::InvalidData)?;
        sys::bpf_set_program(maps[FILTERS].as_fd(), 0, filter.as_fd())?;
        let egress = WordMap::new(DEVMAP_HASH, INTERFACES)?;
        Ok(Self { engine, entries, deny, objects, replaces: false, redirect, filter, maps, egress })
    }

    fn load_xdp(&self, xdp: Xdp<'_>) -> io::Result<OwnedFd> {
        let code = self.xdp_code(xdp)?;
        sys::bpf_load(PROG_XDP, &code, if xdp.frags { HAS_FRAGS } else { 0 }, ATTACH_XDP)
    }

    /// The instructions of an XDP program with these maps. aya itself would give each program maps of its own.
    fn xdp_code(&self, xdp: Xdp<'_>) -> io::Result<Vec<u64>> {
        let mut object = aya_obj::Object::parse(self.objects.xdp).map_err(error_of)?;
        let sections: HashSet<usize> = object.functions.keys().map(|(section, _)| *section).collect();
        let declared = object.maps.clone();
        let maps = MAPS.into_iter().zip(self.maps.iter().map(AsFd::as_fd));
        let maps = maps.chain([("sockets", xdp.sockets), ("egress", self.egress.as_fd())]);
        let maps = maps.filter_map(|(name, fd)| Some((name, fd.as_raw_fd(), declared.get(name)?)));
        object.relocate_maps(maps, &sections).map_err(error_of)?;
        let name = if xdp.closed { "flow_closed" } else { "flow_open" };
        let program = object.programs.get(name).and_then(|it| object.functions.get(&it.function_key()));
        let missing = || io::Error::other(format!("the object has no program `{name}`"));
        // struct bpf_insn: code, registers (destination in the lower half), offset, immediate.
        let word = |it: &aya_obj::generated::bpf_insn| {
            let ([a, b], [c, d, e, f]) = (it.off.to_ne_bytes(), it.imm.to_ne_bytes());
            u64::from_ne_bytes([it.code, it.dst_reg() | it.src_reg() << 4, a, b, c, d, e, f])
        };
        Ok(program.ok_or_else(missing)?.instructions.iter().map(word).collect())
    }
}

fn program<'o, P>(object: &'o mut Ebpf, name: &str) -> io::Result<&'o mut P>
where
    &'o mut P: TryFrom<&'o mut aya::programs::Program, Error = aya::programs::ProgramError>,
{
    let missing = || io::Error::other(format!("the object has no program `{name}`"));
    object.program_mut(name).ok_or_else(missing)?.try_into().map_err(error_of)
}

fn descriptor(fd: &ProgramFd) -> io::Result<OwnedFd> {
    let fd: BorrowedFd<'_> = fd.as_fd();
    fd.try_clone_to_owned()
}

/// The system's error behind an error of the loader.
fn error_of(error: impl std::error::Error + 'static) -> io::Error {
    let mut source: Option<&dyn std::error::Error> = Some(&error);
    while let Some(at) = source {
        if let Some(ProgramError::LoadError { io_error, verifier_log }) = at.downcast_ref()
            && io_error.raw_os_error() == Some(libc::EACCES)
            && !verifier_log.to_string().is_empty()
        {
            return io::Error::from_raw_os_error(sys::REFUSED_BY_VERIFIER);
        }
        if let Some(number) = at.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
            return io::Error::from_raw_os_error(number);
        }
        source = at.source();
    }
    io::Error::other(error.to_string())
}
