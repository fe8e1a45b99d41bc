#![allow(unsafe_code)]
//! XDP programs that pass every packet or redirect it to a socket, and a tc program that redirects every packet to an interface. They are
//! loaded and attached by bpf(2) without clang or object files.
//!
//! References: bpf(2); include/uapi/linux/bpf.h, `union bpf_attr` for BPF_PROG_LOAD and BPF_LINK_CREATE.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use anyhow::{Context, Result};

const BPF_MAP_CREATE: i64 = 0;
const BPF_MAP_UPDATE_ELEM: i64 = 2;
const BPF_PROG_LOAD: i64 = 5;
const BPF_LINK_CREATE: i64 = 28;
const BPF_PROG_TYPE_XDP: u32 = 6;
const BPF_XDP: u32 = 37;
const BPF_PROG_TYPE_SCHED_CLS: u32 = 3;
const BPF_TCX_INGRESS: u32 = 46;
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

fn index(device: &str) -> Result<u32> {
    let socket = rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)?;
    Ok(rustix::net::netdevice::name_to_index(&socket, device)?)
}

/// Drops every packet received on `device` by a generic XDP program, until the returned link is closed.
pub(crate) fn drop_all(device: &str) -> Result<OwnedFd> {
    attach((BPF_PROG_TYPE_XDP, BPF_XDP), device, &DROP, 0, XDP_FLAGS_SKB_MODE)
}

/// Redirects packets received on queue 0 of `device` to `socket` by a generic XDP program, until the returned link is closed.
pub(crate) fn redirect(device: &str, socket: &OwnedFd) -> Result<OwnedFd> {
    let create = MapCreate { map_type: BPF_MAP_TYPE_XSKMAP, key_size: 4, value_size: 4, max_entries: 1 };
    let map = bpf(BPF_MAP_CREATE, &create).context("making a map of sockets")?;
    let (key, value) = (0_u32, socket.as_raw_fd());
    let update = MapUpdate {
        map_fd: map.as_raw_fd() as u32,
        padding: 0,
        key: (&raw const key) as u64,
        value: (&raw const value) as u64,
        flags: 0,
    };
    // SAFETY: the kernel reads `update`, a struct without padding, and the four bytes at each of its pointers.
    let done = unsafe {
        libc::syscall(libc::SYS_bpf, BPF_MAP_UPDATE_ELEM, &raw const update, size_of::<MapUpdate>())
    };
    if done < 0 {
        return Err(io::Error::last_os_error()).context("giving the map its socket");
    }
    let map = u64::from(map.as_raw_fd() as u32);
    // r2 = 0; r1 = map (in two halves); r3 = XDP_PASS; call bpf_redirect_map (51); exit.
    let program = [0x02b7, map << 32 | 0x1118, 0, 0x0000_0002_0000_03b7, 51 << 32 | 0x85, 0x95];
    attach((BPF_PROG_TYPE_XDP, BPF_XDP), device, &program, 0, XDP_FLAGS_SKB_MODE)
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
