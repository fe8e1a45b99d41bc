#![allow(unsafe_code)]
//! XDP programs that pass every packet, or redirect it to a socket; tc programs that redirect every packet to an interface; and programs of
//! both kinds that look a packet's flow up first. They are loaded and attached by bpf(2) without clang or object files.
//!
//! References: bpf(2); include/uapi/linux/bpf.h, `union bpf_attr` for BPF_PROG_LOAD and BPF_LINK_CREATE.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result};

use crate::packet;

const BPF_MAP_CREATE: i64 = 0;
const BPF_MAP_LOOKUP_ELEM: i64 = 1;
const BPF_MAP_UPDATE_ELEM: i64 = 2;
const BPF_MAP_GET_NEXT_ID: i64 = 12;
const BPF_MAP_GET_FD_BY_ID: i64 = 14;
const BPF_OBJ_GET_INFO_BY_FD: i64 = 15;
const BPF_PROG_LOAD: i64 = 5;
const BPF_LINK_CREATE: i64 = 28;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
const BPF_TCX_INGRESS: u32 = 46;
const BPF_MAP_TYPE_HASH: u32 = 1;
const BPF_MAP_TYPE_XSKMAP: u32 = 17;
/// The program supports fragments. veth requires it for an MTU above a page.
const BPF_F_XDP_HAS_FRAGS: u32 = 1 << 5;
/// Requires XDP support of the driver (include/uapi/linux/if_link.h).
const XDP_FLAGS_DRV_MODE: u32 = 1 << 2;
const XDP_FLAGS_SKB_MODE: u32 = 1 << 1;

/// `r0 = XDP_PASS; exit`.
const PASS: [u64; 2] = [0x0000_0002_0000_00b7, 0x0000_0000_0000_0095];
/// `r0 = XDP_DROP; exit`.
const DROP: [u64; 2] = [0x0000_0001_0000_00b7, 0x0000_0000_0000_0095];

/// The first fields of `union bpf_attr` for BPF_PROG_LOAD; the kernel treats the others as zero.
#[repr(C)]
struct Load {
    prog_type: u32,
    insn_cnt: u32,
    insns: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log_buf: u64,
    kern_version: u32,
    prog_flags: u32,
}

#[repr(C)]
struct MapCreate {
    map_type: u32,
    key_size: u32,
    value_size: u32,
    max_entries: u32,
    map_flags: u32,
}

#[repr(C)]
struct MapUpdate {
    map_fd: u32,
    padding: u32,
    key: u64,
    value: u64,
    flags: u64,
}

#[repr(C)]
struct LinkCreate {
    prog_fd: u32,
    target_ifindex: u32,
    attach_type: u32,
    flags: u32,
}

#[repr(C)]
struct Info {
    fd: u32,
    len: u32,
    info: u64,
}

/// Attaches a native XDP program that passes every packet received on `device`, until the returned link is closed.
pub(crate) fn pass(device: &str) -> Result<OwnedFd> {
    attach((BPF_PROG_TYPE_XDP, BPF_XDP), device, &PASS, BPF_F_XDP_HAS_FRAGS, XDP_FLAGS_DRV_MODE)
}

/// Redirects every packet received on `from` to `to` by a tc program (tcx, Linux 6.6), until the returned link is closed.
pub(crate) fn redirect_to(from: &str, to: &str) -> Result<OwnedFd> {
    let to = u64::from(index(to)?);
    // r1 = to; r2 = 0; call bpf_redirect (23); exit.
    let program = [to << 32 | 0x01b7, 0x02b7, 23 << 32 | 0x85, 0x95];
    attach((BPF_PROG_TYPE_SCHED_CLS, BPF_TCX_INGRESS), from, &program, 0, 0)
}

/// Entries of the map of [`decide_flows`], as in an engine's default.
const ENTRIES: u32 = 65_536;
/// Bytes of a key of an engine's flow map.
const KEY: usize = 44;
/// Entries of the map of [`drop_sources`], and the bytes of its keys, as in an engine.
const SOURCES: u32 = 1 << 18;
const SOURCE_KEY: usize = 20;
const BPF_F_NO_PREALLOC: u32 = 1;

/// A hook, and what a program finds there: the type of the program and of the link, flags of both, the offsets of the packet's start, of its
/// end and of the ingress interface in the context, and the result that drops a packet.
#[derive(Debug)]
pub(crate) struct Hook {
    kind: (u32, u32),
    flags: (u32, u32),
    context: [i16; 3],
    drop: i32,
}

impl Hook {
    /// Generic XDP (`struct xdp_md`): XDP_DROP.
    pub(crate) const XDP: Self = Self {
        kind: (BPF_PROG_TYPE_XDP, BPF_XDP),
        flags: (BPF_F_XDP_HAS_FRAGS, XDP_FLAGS_SKB_MODE),
        context: [0, 4, 12],
        drop: 1,
    };
    /// tc ingress (tcx, Linux 6.6; `struct __sk_buff`): TC_ACT_SHOT.
    pub(crate) const TC: Self = Self {
        kind: (BPF_PROG_TYPE_SCHED_CLS, BPF_TCX_INGRESS),
        flags: (0, 0),
        context: [76, 80, 40],
        drop: 2,
    };
}

/// Redirects the packets of the first `flows` flows of the generator ([`crate::packet::set_flow`]) from `from` to `to`, or drops them without
/// `to`, and drops all others, until the returned link is closed. The map and its key are those of an engine's flow offload.
pub(crate) fn decide_flows(hook: &Hook, from: &str, to: Option<&str>, flows: u32) -> Result<OwnedFd> {
    let create = MapCreate {
        map_type: BPF_MAP_TYPE_HASH,
        key_size: KEY as u32,
        value_size: 4,
        max_entries: ENTRIES,
        map_flags: 0,
    };
    let map = bpf(BPF_MAP_CREATE, &create).context("making a map of flows")?;
    let ingress = index(from)?;
    let mut frame = packet::frame(64);
    for flow in 0..flows {
        packet::set_flow(&mut frame, flow);
        let part = |at: usize| [frame[at], frame[at + 1], frame[at + 2], frame[at + 3]];
        update(&map, &key([part(26), part(30)], ingress, part(34)), flow)?;
    }
    let to = to.map(index).transpose()?.map(u32::cast_signed);
    let code = lookup_and_decide(hook, map.as_raw_fd(), to);
    attach(hook.kind, from, &code, hook.flags.0, hook.flags.1)
}

/// Drops the packets from the first `sources` IPv4 addresses of 10.0.0.0/8, and passes all others, by a generic XDP program, until the
/// returned link is closed. The map and its key are those of an engine's rules that deny by a table.
pub(crate) fn drop_sources(from: &str, sources: u32) -> Result<OwnedFd> {
    let create = MapCreate {
        map_type: BPF_MAP_TYPE_HASH,
        key_size: SOURCE_KEY as u32,
        value_size: 4,
        max_entries: SOURCES,
        map_flags: BPF_F_NO_PREALLOC,
    };
    let map = bpf(BPF_MAP_CREATE, &create).context("making a map of sources")?;
    for source in 0..sources {
        let mut key = [0; SOURCE_KEY];
        key[..4].copy_from_slice(&4_u32.to_ne_bytes());
        key[4..8].copy_from_slice(&(10 << 24 | source).to_be_bytes());
        update(&map, &key, 1)?;
    }
    let code = lookup_source_and_drop(map.as_raw_fd());
    attach((BPF_PROG_TYPE_XDP, BPF_XDP), from, &code, BPF_F_XDP_HAS_FRAGS, XDP_FLAGS_SKB_MODE)
}

/// The key of a UDP flow of IPv4 without a VLAN: addresses, interface, ports.
fn key([src, dst]: [[u8; 4]; 2], ingress: u32, ports: [u8; 4]) -> [u8; KEY] {
    let mut key = [0; KEY];
    key[..4].copy_from_slice(&src);
    key[16..20].copy_from_slice(&dst);
    key[32..36].copy_from_slice(&ingress.to_ne_bytes());
    key[36..40].copy_from_slice(&ports);
    key[42..].copy_from_slice(&[17, 4]);
    key
}

/// The flow map of an engine.
pub(crate) struct FlowMap(OwnedFd);

impl FlowMap {
    /// That of the engine that was started last.
    pub(crate) fn newest() -> Result<Self> {
        let (mut id, mut newest) = (0_u32, None);
        loop {
            // start_id, next_id, open_flags.
            let mut next = [id, 0, 0];
            let len = size_of_val(&next);
            // SAFETY: the kernel reads and writes the three words of `next`.
            let done = unsafe { libc::syscall(libc::SYS_bpf, BPF_MAP_GET_NEXT_ID, next.as_mut_ptr(), len) };
            if done < 0 {
                break;
            }
            id = next[1];
            // map_id, next_id, open_flags. The map may have ended.
            let Ok(map) = bpf(BPF_MAP_GET_FD_BY_ID, &[id, 0, 0]) else { continue };
            // struct bpf_map_info: type, id, key_size, value_size, max_entries, map_flags, name (16 bytes).
            let mut info = [0_u32; 10];
            let query = Info {
                fd: map.as_raw_fd() as u32,
                len: size_of_val(&info) as u32,
                info: info.as_mut_ptr() as u64,
            };
            let len = size_of_val(&query);
            // SAFETY: the kernel reads `query`, and writes `query.len` bytes to `info`.
            let done = unsafe { libc::syscall(libc::SYS_bpf, BPF_OBJ_GET_INFO_BY_FD, &raw const query, len) };
            let flows = [u32::from_ne_bytes(*b"flow"), u32::from_ne_bytes(*b"s\0\0\0")];
            if done >= 0 && info[2] == KEY as u32 && info[6..8] == flows {
                newest = Some(Self(map));
            }
        }
        newest.context("no engine has a flow map")
    }

    /// Returns true if the map has the UDP flow with these ports.
    pub(crate) fn has(&self, src: Ipv4Addr, dst: Ipv4Addr, ingress: u32, ports: (u16, u16)) -> Result<bool> {
        let ([a, b], [c, d]) = (ports.0.to_be_bytes(), ports.1.to_be_bytes());
        let key = key([src.octets(), dst.octets()], ingress, [a, b, c, d]);
        let mut value = 0_u32;
        let lookup = MapUpdate {
            map_fd: self.0.as_raw_fd() as u32,
            padding: 0,
            key: key.as_ptr() as u64,
            value: (&raw mut value) as u64,
            flags: 0,
        };
        let len = size_of_val(&lookup);
        // SAFETY: the kernel reads `lookup` and the `KEY` bytes of the key, and writes the four of the value.
        let found = unsafe { libc::syscall(libc::SYS_bpf, BPF_MAP_LOOKUP_ELEM, &raw const lookup, len) } >= 0;
        let error = io::Error::last_os_error();
        match found || error.raw_os_error() == Some(libc::ENOENT) {
            true => Ok(found),
            false => Err(error).context("reading the flow map"),
        }
    }
}

/// Codes of instructions (Documentation/bpf/standardization/instruction-set.rst).
const LOAD4: u8 = 0x61;
const LOAD1: u8 = 0x71;
const STORE8: u8 = 0x7b;
const STORE4: u8 = 0x63;
const STORE1: u8 = 0x73;
const SET: u8 = 0xb7;
const MOVE: u8 = 0xbf;
const ADD: u8 = 0x07;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;

/// An instruction.
fn one(code: u8, to: u8, from: u8, offset: i16, number: i32) -> u64 {
    let ([a, b], [c, d, e, f]) = (offset.to_ne_bytes(), number.to_ne_bytes());
    u64::from_ne_bytes([code, to | from << 4, a, b, c, d, e, f])
}

/// The program of [`drop_sources`]. r2 is the frame; the key is at r10 - 24.
fn lookup_source_and_drop(map: i32) -> Vec<u64> {
    vec![
        one(LOAD4, 2, 1, 0, 0), // xdp_md.data
        one(LOAD4, 3, 1, 4, 0), // xdp_md.data_end
        one(MOVE, 4, 2, 0, 0),
        one(ADD, 4, 0, 0, 34),
        one(0x2d, 4, 3, 16, 0), // if r4 > r3, pass
        one(SET, 1, 0, 0, 0),
        one(STORE8, 10, 1, -24, 0),
        one(STORE8, 10, 1, -16, 0),
        one(STORE4, 10, 1, -8, 0),
        one(SET, 1, 0, 0, 4),
        one(STORE4, 10, 1, -24, 0),
        one(LOAD4, 1, 2, 26, 0),
        one(STORE4, 10, 1, -20, 0),
        one(MOVE, 2, 10, 0, 0),
        one(ADD, 2, 0, 0, -24),
        one(0x18, 1, 1, 0, map), // r1 = map
        0,
        one(CALL, 0, 0, 0, 1), // bpf_map_lookup_elem
        one(0x15, 0, 0, 2, 0), // if r0 == 0, pass
        one(SET, 0, 0, 0, 1),  // XDP_DROP
        one(EXIT, 0, 0, 0, 0),
        one(SET, 0, 0, 0, 2), // XDP_PASS
        one(EXIT, 0, 0, 0, 0),
    ]
}

/// The program of [`decide_flows`]. r6 is the context, r2 the frame.
fn lookup_and_decide(hook: &Hook, map: i32, to: Option<i32>) -> Vec<u64> {
    let [start, end, ingress] = hook.context;
    let mut code = vec![
        one(MOVE, 6, 1, 0, 0),
        one(LOAD4, 2, 1, start, 0),
        one(LOAD4, 3, 1, end, 0),
        one(MOVE, 4, 2, 0, 0),
        one(ADD, 4, 0, 0, 42),
        0, // if r4 > r3, drop
        one(SET, 1, 0, 0, 0),
    ];
    // The key is at r10 - 48.
    code.extend([-48, -40, -32, -24, -16].map(|at| one(STORE8, 10, 1, at, 0)));
    code.push(one(STORE4, 10, 1, -8, 0));
    for (from, register, at) in [(26, 2, -48), (30, 2, -32), (ingress, 6, -16), (34, 2, -12)] {
        code.extend([one(LOAD4, 1, register, from, 0), one(STORE4, 10, 1, at, 0)]);
    }
    code.extend([
        one(LOAD1, 1, 2, 23, 0),
        one(STORE1, 10, 1, -6, 0),
        one(SET, 1, 0, 0, 4),
        one(STORE1, 10, 1, -5, 0),
        one(MOVE, 2, 10, 0, 0),
        one(ADD, 2, 0, 0, -48),
        one(0x18, 1, 1, 0, map), // r1 = map
        0,
        one(CALL, 0, 0, 0, 1), // bpf_map_lookup_elem
    ]);
    if let Some(to) = to {
        code.extend([
            one(0x15, 0, 0, 4, 0), // if r0 == 0, drop
            one(SET, 1, 0, 0, to),
            one(SET, 2, 0, 0, 0),
            one(CALL, 0, 0, 0, 23), // bpf_redirect
            one(EXIT, 0, 0, 0, 0),
        ]);
    } else {
        // if r0 == 0, XDP_ABORTED: the kernel counts unknown flows apart
        code.extend([one(0x55, 0, 0, 2, 0), one(SET, 0, 0, 0, 0), one(EXIT, 0, 0, 0, 0)]);
    }
    code.extend([one(SET, 0, 0, 0, hook.drop), one(EXIT, 0, 0, 0, 0)]);
    let drop = code.len() as i16 - 2;
    code[5] = one(0x2d, 4, 3, drop - 6, 0);
    code
}

pub(crate) fn index(device: &str) -> Result<u32> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)?;
    Ok(rustix::net::netdevice::name_to_index(&socket, device)?)
}

/// Drops every packet received on `device` by a generic XDP program, until the returned link is closed.
pub(crate) fn drop_all(device: &str) -> Result<OwnedFd> {
    attach((BPF_PROG_TYPE_XDP, BPF_XDP), device, &DROP, 0, XDP_FLAGS_SKB_MODE)
}

/// Redirects packets received on queue 0 of `device` to `socket` by a generic XDP program, until the returned link is closed.
pub(crate) fn redirect(device: &str, socket: &OwnedFd) -> Result<OwnedFd> {
    let create =
        MapCreate { map_type: BPF_MAP_TYPE_XSKMAP, key_size: 4, value_size: 4, max_entries: 1, map_flags: 0 };
    let map = bpf(BPF_MAP_CREATE, &create).context("making a map of sockets")?;
    update(&map, &0_u32.to_ne_bytes(), socket.as_raw_fd() as u32)?;
    let map = u64::from(map.as_raw_fd() as u32);
    // r2 = 0; r1 = map (in two halves); r3 = XDP_PASS; call bpf_redirect_map (51); exit.
    let program = [0x02b7, map << 32 | 0x1118, 0, 0x0000_0002_0000_03b7, 51 << 32 | 0x85, 0x95];
    attach((BPF_PROG_TYPE_XDP, BPF_XDP), device, &program, 0, XDP_FLAGS_SKB_MODE)
}

/// Sets an entry of a map with keys of `N` bytes and values of four.
fn update<const N: usize>(map: &OwnedFd, key: &[u8; N], value: u32) -> Result<()> {
    let update = MapUpdate {
        map_fd: map.as_raw_fd() as u32,
        padding: 0,
        key: key.as_ptr() as u64,
        value: (&raw const value) as u64,
        flags: 0,
    };
    // SAFETY: the kernel reads `update`, a struct without padding, the `N` bytes of the key, and the four of the value. The callers' maps have
    // keys and values of these sizes.
    let done = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_MAP_UPDATE_ELEM, &raw const update, size_of::<MapUpdate>())
    };
    if done < 0 {
        return Err(io::Error::last_os_error()).context("writing to a BPF map");
    }
    Ok(())
}

fn attach(
    (prog_type, attach_type): (u32, u32),
    device: &str,
    code: &[u64],
    flags: u32,
    mode: u32,
) -> Result<OwnedFd> {
    let license = c"MIT";
    let load = Load {
        prog_type,
        insn_cnt: code.len() as u32,
        insns: code.as_ptr() as u64,
        license: license.as_ptr() as u64,
        log_level: 0,
        log_size: 0,
        log_buf: 0,
        kern_version: 0,
        prog_flags: flags,
    };
    let program = bpf(BPF_PROG_LOAD, &load).context("loading a BPF program")?;
    let target_ifindex = index(device)?;
    let link = LinkCreate { prog_fd: program.as_raw_fd() as u32, target_ifindex, attach_type, flags: mode };
    bpf(BPF_LINK_CREATE, &link).with_context(|| format!("attaching a BPF program to {device}"))
}

fn bpf<T>(command: i64, attr: &T) -> io::Result<OwnedFd> {
    // SAFETY: the kernel reads `size_of::<T>()` bytes of `attr`, a struct without padding, and the memory at its pointers: a program of the
    // given length and a terminated string. All of them outlive the call, and the kernel writes nothing.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, command, &raw const *attr, size_of::<T>()) };
    let fd = i32::try_from(fd).unwrap_or(-1);
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor, and no other code owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
