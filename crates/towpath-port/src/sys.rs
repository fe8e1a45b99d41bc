//! System calls that rustix does not provide. Together with the drivers' rings, the only files of this crate with `unsafe`.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::mem::zeroed;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};

use libc::{c_int, c_ulong, socklen_t};

use crate::namespace;

/// Limit on messages per call of [`send_many`].
pub(crate) const MESSAGES: usize = 64;

/// A socket, closed on exec(2), that never blocks.
pub(crate) fn socket(domain: c_int, kind: c_int, protocol: c_int) -> io::Result<OwnedFd> {
    let kind = kind | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no memory is passed.
    let fd = checked(unsafe { libc::socket(domain, kind, protocol) })?;
    // SAFETY: the kernel just created this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Binds a packet socket to an interface (packet(7)); `protocol` is in native byte order.
pub(crate) fn bind_packet(fd: BorrowedFd<'_>, index: u32, protocol: u16) -> io::Result<()> {
    // SAFETY: a zeroed sockaddr_ll is valid.
    let mut address: libc::sockaddr_ll = unsafe { zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = protocol.to_be();
    address.sll_ifindex = index as i32;
    bind(fd, &address)
}

/// The interface that a packet socket is bound to; `None` after the interface has left the network namespace: it was deleted or moved.
pub(crate) fn bound_interface(fd: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    // SAFETY: a zeroed sockaddr_ll is valid.
    let mut address: libc::sockaddr_ll = unsafe { zeroed() };
    let mut len = size_of_val(&address) as socklen_t;
    let to: *mut libc::sockaddr_ll = &raw mut address;
    // SAFETY: the kernel writes at most `len` bytes to `address`, and the length.
    checked(unsafe { libc::getsockname(fd.as_raw_fd(), to.cast(), &mut len) })?;
    Ok(u32::try_from(address.sll_ifindex).ok().filter(|index| *index > 0))
}

/// Binds a netlink socket to groups (netlink(7)).
pub(crate) fn bind_netlink(fd: BorrowedFd<'_>, groups: u32) -> io::Result<()> {
    // SAFETY: a zeroed sockaddr_nl is valid.
    let mut address: libc::sockaddr_nl = unsafe { zeroed() };
    address.nl_family = libc::AF_NETLINK as u16;
    address.nl_groups = groups;
    bind(fd, &address)
}

fn bind<T>(fd: BorrowedFd<'_>, address: &T) -> io::Result<()> {
    let len = size_of::<T>() as socklen_t;
    // SAFETY: the kernel reads `len` bytes of `address`, which lives until the call returns; all of them are initialised, the
    // callers' types have no padding.
    checked(unsafe { libc::bind(fd.as_raw_fd(), std::ptr::from_ref(address).cast(), len) })?;
    Ok(())
}

/// setsockopt(2) with words in native byte order.
pub(crate) fn set(fd: BorrowedFd<'_>, level: c_int, name: c_int, words: &[u32]) -> io::Result<()> {
    let len = size_of_val(words) as socklen_t;
    // SAFETY: the kernel reads `len` bytes of `words`, which live until the call returns.
    checked(unsafe { libc::setsockopt(fd.as_raw_fd(), level, name, words.as_ptr().cast(), len) })?;
    Ok(())
}

/// getsockopt(2) of words in native byte order. Returns the number of bytes written.
pub(crate) fn get(fd: BorrowedFd<'_>, level: c_int, name: c_int, words: &mut [u32]) -> io::Result<usize> {
    let mut len = size_of_val(words) as socklen_t;
    let to = words.as_mut_ptr().cast();
    // SAFETY: the kernel writes at most `len` bytes to `words`, and the length.
    checked(unsafe { libc::getsockopt(fd.as_raw_fd(), level, name, to, &mut len) })?;
    Ok(len as usize)
}

/// The pending error of a socket (SO_ERROR), which this call clears.
pub(crate) fn pending_error(fd: BorrowedFd<'_>) -> io::Result<()> {
    let mut error = [0];
    get(fd, libc::SOL_SOCKET, libc::SO_ERROR, &mut error)?;
    if error[0] == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(error[0] as i32)) }
}

/// One sendmmsg(2). Each message is the concatenation of two parts. Returns the number of messages sent, at least 1.
pub(crate) fn send_many(fd: BorrowedFd<'_>, messages: &[[&[u8]; 2]]) -> io::Result<usize> {
    // SAFETY: a zeroed mmsghdr is valid: an empty message.
    let mut headers: [libc::mmsghdr; MESSAGES] = unsafe { zeroed() };
    let mut parts = [[libc::iovec { iov_base: null_mut(), iov_len: 0 }; 2]; MESSAGES];
    for ((header, parts), message) in headers.iter_mut().zip(&mut parts).zip(messages) {
        let first = usize::from(message[0].is_empty());
        for (part, bytes) in parts.iter_mut().zip(message) {
            part.iov_base = bytes.as_ptr().cast_mut().cast();
            part.iov_len = bytes.len();
        }
        header.msg_hdr.msg_iov = parts[first..].as_mut_ptr();
        header.msg_hdr.msg_iovlen = 2 - first;
    }
    let count = messages.len().min(MESSAGES) as u32;
    // SAFETY: each header points to its parts, each part to bytes that are borrowed until this call returns; the kernel only reads them.
    let sent = unsafe { libc::sendmmsg(fd.as_raw_fd(), headers.as_mut_ptr(), count, libc::MSG_DONTWAIT) };
    checked(sent).map(|sent| sent as usize)
}

/// Receives messages with one recvmmsg(2) that does not block, at most one for each element of `lens`. Each message is written to the
/// next `stride` bytes of `memory`, and its length to `lens`. The length of a truncated message is above `stride`. Returns the number
/// of messages.
pub(crate) fn receive_many(
    fd: BorrowedFd<'_>,
    memory: &mut [u8],
    stride: usize,
    lens: &mut [u32],
) -> io::Result<usize> {
    // SAFETY: a zeroed mmsghdr is valid: an empty message.
    let mut headers: [libc::mmsghdr; MESSAGES] = unsafe { zeroed() };
    let mut parts = [libc::iovec { iov_base: null_mut(), iov_len: 0 }; MESSAGES];
    let mut count = 0;
    for ((header, part), bytes) in
        headers.iter_mut().zip(&mut parts).zip(memory.chunks_exact_mut(stride)).take(lens.len())
    {
        part.iov_base = bytes.as_mut_ptr().cast();
        part.iov_len = bytes.len();
        header.msg_hdr.msg_iov = part;
        header.msg_hdr.msg_iovlen = 1;
        count += 1;
    }
    // MSG_TRUNC: the length is the message's own, also when that is more than fits.
    let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
    let (fd, headers_at) = (fd.as_raw_fd(), headers.as_mut_ptr());
    // SAFETY: each header points to one part, and the parts to pieces of `memory` that do not overlap and are borrowed mutably until
    // this call returns.
    let came = checked(unsafe { libc::recvmmsg(fd, headers_at, count, flags, null_mut()) })? as usize;
    for (len, header) in lens.iter_mut().zip(&headers[..came]) {
        *len = header.msg_len;
    }
    Ok(came)
}

/// The result of an interface request (netdevice(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    Index(u32),
    Flags(i32),
    Mtu(u32),
    /// ARPHRD_ type and address.
    Hardware(u16, [u8; 6]),
}

/// One of the SIOCGIF requests about the interface `name`, in the socket's network namespace.
pub(crate) fn interface(fd: BorrowedFd<'_>, request: c_ulong, name: &str) -> io::Result<Answer> {
    let mut asked = named(name)?;
    // SAFETY: the kernel reads and writes one ifreq, which lives until the call returns.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), request, &raw mut asked) })?;
    Ok(match request {
        libc::SIOCGIFINDEX => {
            // SAFETY: all values of the union's members are valid, and this request wrote this member.
            Answer::Index(unsafe { asked.ifr_ifru.ifru_ifindex } as u32)
        }
        libc::SIOCGIFFLAGS => {
            // SAFETY: as above.
            Answer::Flags(unsafe { asked.ifr_ifru.ifru_flags }.into())
        }
        libc::SIOCGIFMTU => {
            // SAFETY: as above.
            Answer::Mtu(unsafe { asked.ifr_ifru.ifru_mtu } as u32)
        }
        _ => {
            // SAFETY: as above.
            let address = unsafe { asked.ifr_ifru.ifru_hwaddr };
            Answer::Hardware(address.sa_family, std::array::from_fn(|at| address.sa_data[at] as u8))
        }
    })
}

/// The number of receive queues of the interface `name` (ETHTOOL_GCHANNELS).
pub(crate) fn receive_queues(fd: BorrowedFd<'_>, name: &str) -> io::Result<u32> {
    // linux/ethtool.h, linux/sockios.h.
    const ETHTOOL_GCHANNELS: u32 = 0x3c;
    const SIOCETHTOOL: c_ulong = 0x8946;
    // struct ethtool_channels: command; the maxima of rx, tx, other and combined; their counts.
    let mut channels = [0_u32; 9];
    channels[0] = ETHTOOL_GCHANNELS;
    let mut request = named(name)?;
    request.ifr_ifru.ifru_data = channels.as_mut_ptr().cast();
    // SAFETY: the kernel reads and writes one ifreq and the structure that it points to, which live until the call returns.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), SIOCETHTOOL, &raw mut request) })?;
    Ok(channels[5] + channels[8])
}

/// A request about the interface `name`. The error is InvalidInput if no interface can have this name.
fn named(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: a zeroed ifreq is valid: its name is empty.
    let mut request: libc::ifreq = unsafe { zeroed() };
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains('\0') {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

/// Binds an XDP socket to one queue of an interface.
pub(crate) fn bind_xdp(fd: BorrowedFd<'_>, index: u32, queue: u32, flags: u16) -> io::Result<()> {
    // SAFETY: a zeroed sockaddr_xdp is valid.
    let mut address: libc::sockaddr_xdp = unsafe { zeroed() };
    address.sxdp_family = libc::AF_XDP as u16;
    address.sxdp_flags = flags;
    address.sxdp_ifindex = index;
    address.sxdp_queue_id = queue;
    bind(fd, &address)
}

/// Wakes the kernel for an XDP socket's rings: an empty sendto(2) or recvfrom(2).
pub(crate) fn kick(fd: BorrowedFd<'_>, send: bool) -> io::Result<()> {
    let (fd, none, flags) = (fd.as_raw_fd(), null_mut(), libc::MSG_DONTWAIT);
    let done = if send {
        // SAFETY: no memory is passed.
        unsafe { libc::sendto(fd, none, 0, flags, null_mut(), 0) }
    } else {
        // SAFETY: no memory is passed.
        unsafe { libc::recvfrom(fd, none, 0, flags, null_mut(), null_mut()) }
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// SO_ATTACH_BPF (asm-generic/socket.h).
pub(crate) const SO_ATTACH_BPF: c_int = 50;

/// enum bpf_cmd (linux/bpf.h).
const MAP_CREATE: u32 = 0;
const MAP_LOOKUP_ELEM: u32 = 1;
const MAP_UPDATE_ELEM: u32 = 2;
const MAP_DELETE_ELEM: u32 = 3;
const PROG_LOAD: u32 = 5;
const OBJ_PIN: u32 = 6;
const OBJ_GET: u32 = 7;
const OBJ_GET_INFO_BY_FD: u32 = 15;
const MAP_UPDATE_BATCH: u32 = 26;
const LINK_CREATE: u32 = 28;
const LINK_UPDATE: u32 = 29;
const LINK_DETACH: u32 = 34;

/// bpf(2).
///
/// # Safety
///
/// Each pointer in `attribute`, the `union bpf_attr` of `command`, points to memory that the kernel may access as the command does, until
/// the call returns.
unsafe fn bpf_do(command: u32, attribute: &[u64]) -> io::Result<c_int> {
    let len = size_of_val(attribute);
    // SAFETY: the kernel reads `len` bytes of `attribute`. The caller guarantees the memory behind its pointers.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, attribute.as_ptr(), len) };
    checked(done as c_int)
}

/// bpf(2) with a command that creates a descriptor (closed on exec(2), as all of bpf's are).
///
/// # Safety
///
/// As [`bpf_do`], and the command returns a new descriptor.
unsafe fn bpf_new(command: u32, attribute: &[u64]) -> io::Result<OwnedFd> {
    // SAFETY: the caller guarantees the memory behind the pointers.
    let fd = unsafe { bpf_do(command, attribute) }?;
    // SAFETY: the kernel just created this descriptor, as the caller guarantees, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A map whose keys and values have four bytes.
#[derive(Debug)]
pub(crate) struct WordMap(OwnedFd);

impl WordMap {
    /// Creates a map of `kind` (enum bpf_map_type).
    pub(crate) fn new(kind: u32, entries: u32) -> io::Result<Self> {
        const WORD: u32 = 4;
        // bpf_attr: map_type, key_size; value_size, max_entries.
        let attribute = [pair(kind, WORD), pair(WORD, entries)];
        // SAFETY: no pointers; MAP_CREATE returns a new descriptor.
        unsafe { bpf_new(MAP_CREATE, &attribute) }.map(Self)
    }

    /// A map that another process created.
    ///
    /// # Errors
    ///
    /// Fails if the descriptor is not a map, or its keys or values have another size.
    pub(crate) fn of(map: OwnedFd) -> io::Result<Self> {
        // struct bpf_map_info: type, id; key_size, value_size. The kernel writes as many bytes as `info_len`.
        let mut info = [0_u64; 2];
        // bpf_attr: bpf_fd, info_len; info.
        let length = size_of_val(&info) as u32;
        let attribute = [pair(map.as_raw_fd() as u32, length), info.as_mut_ptr() as u64];
        // SAFETY: the kernel reads and writes `length` bytes of `info`, which lives until the call returns.
        unsafe { bpf_do(OBJ_GET_INFO_BY_FD, &attribute) }?;
        if info[1] != pair(4, 4) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        Ok(Self(map))
    }

    /// Sets one entry.
    pub(crate) fn set(&self, key: u32, value: u32) -> io::Result<()> {
        // bpf_attr: map_fd, key, value, flags.
        let attribute = [self.0.as_raw_fd() as u64, &raw const key as u64, &raw const value as u64, 0];
        // SAFETY: the kernel reads four bytes each, the sizes that `new` gives and `of` checks, of `key` and `value`, which live until the call returns.
        unsafe { bpf_do(MAP_UPDATE_ELEM, &attribute) }.map(drop)
    }
}

impl From<WordMap> for OwnedFd {
    fn from(map: WordMap) -> Self {
        map.0
    }
}

impl AsFd for WordMap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Creates an array of one value of 8 bytes that processes can map (Linux 5.5).
pub(crate) fn bpf_shared_word() -> io::Result<OwnedFd> {
    /// BPF_MAP_TYPE_ARRAY, BPF_F_MMAPABLE (linux/bpf.h).
    const ARRAY: u32 = 2;
    const MMAPABLE: u32 = 1 << 10;
    // bpf_attr: map_type, key_size; value_size, max_entries; map_flags, inner_map_fd.
    let attribute = [pair(ARRAY, 4), pair(8, 1), pair(MMAPABLE, 0)];
    // SAFETY: no pointers; MAP_CREATE returns a new descriptor.
    unsafe { bpf_new(MAP_CREATE, &attribute) }
}

/// Writes entries to the map with one call (Linux 5.6): keys of `key` bytes, values of `value` bytes. Returns the number of entries
/// that were written, and the error of the next one.
///
/// # Panics
/// Panics if there is another number of values than of keys.
pub(crate) fn bpf_update_batch(
    map: BorrowedFd<'_>,
    keys: &[u8],
    key: usize,
    values: &[u8],
    value: usize,
) -> (usize, io::Result<()>) {
    let count = keys.len() / key;
    assert_eq!((keys.len(), values.len()), (count * key, count * value), "each key has a value");
    // bpf_attr, batch: in_batch; out_batch; keys; values; count, map_fd; elem_flags; flags.
    let mut attribute = [
        0,
        0,
        keys.as_ptr() as u64,
        values.as_ptr() as u64,
        pair(count as u32, map.as_raw_fd() as u32),
        0,
        0,
    ];
    let len = size_of_val(&attribute);
    let at = attribute.as_mut_ptr();
    // SAFETY: the kernel reads `count` keys and values, which live until the call returns, and writes the count to `attribute`. The sizes
    // are those of the map: the callers' maps are of the object of this crate.
    let done = unsafe { libc::syscall(libc::SYS_bpf, MAP_UPDATE_BATCH, at, len) };
    let done = checked(done as c_int).map(drop);
    let [a, b, c, d, ..] = attribute[4].to_ne_bytes();
    let written = u32::from_ne_bytes([a, b, c, d]) as usize;
    // Before Linux 6.8, an error ahead of the first entry leaves the count as it was.
    let written = if written < count { written } else { 0 };
    (if done.is_ok() { count } else { written }, done)
}

/// Removes the entry of a key.
pub(crate) fn bpf_delete(map: BorrowedFd<'_>, key: &[u8]) -> io::Result<()> {
    // bpf_attr: map_fd; key.
    let attribute = [map.as_raw_fd() as u64, key.as_ptr() as u64];
    // SAFETY: the kernel reads a key, which lives until the call returns; its size is that of the callers' maps.
    unsafe { bpf_do(MAP_DELETE_ELEM, &attribute) }.map(drop)
}

/// Reads the words of an entry of a per-CPU array: those of a value for each possible CPU.
pub(crate) fn bpf_lookup_words(map: BorrowedFd<'_>, index: u32, words: &mut [u64]) -> io::Result<()> {
    // bpf_attr: map_fd; key; value; flags.
    let attribute = [map.as_raw_fd() as u64, &raw const index as u64, words.as_mut_ptr() as u64, 0];
    // SAFETY: the kernel reads the index and writes a value for each possible CPU; the caller's slice has as many words.
    unsafe { bpf_do(MAP_LOOKUP_ELEM, &attribute) }.map(drop)
}

/// Sets an entry of an array of programs.
pub(crate) fn bpf_set_program(map: BorrowedFd<'_>, index: u32, program: BorrowedFd<'_>) -> io::Result<()> {
    let value = program.as_raw_fd();
    // bpf_attr: map_fd, key, value, flags.
    let attribute = [map.as_raw_fd() as u64, &raw const index as u64, &raw const value as u64, 0];
    // SAFETY: the kernel reads four bytes each of `index` and `value`, which live until the call returns.
    unsafe { bpf_do(MAP_UPDATE_ELEM, &attribute) }.map(drop)
}

/// The error of a program that the kernel's verifier refuses. The kernel returns EACCES, as it does for some missing privileges.
pub(crate) const REFUSED_BY_VERIFIER: i32 = libc::ENOEXEC;

/// Loads a program. Fails with [`REFUSED_BY_VERIFIER`] if the verifier refuses it.
pub(crate) fn bpf_load(kind: u32, code: &[u64], flags: u32, attach_type: u32) -> io::Result<OwnedFd> {
    let loaded = bpf_load_with_log(kind, code, (flags, attach_type), &mut []);
    if loaded.as_ref().is_err_and(|error| error.raw_os_error() == Some(libc::EACCES)) {
        // Only the verifier writes a log.
        let mut log = vec![0; 1 << 16];
        let again = bpf_load_with_log(kind, code, (flags, attach_type), &mut log);
        if again.is_err() && log[0] != 0 {
            return Err(io::Error::from_raw_os_error(REFUSED_BY_VERIFIER));
        }
    }
    loaded
}

/// Puts an error of [`bpf_load`] in words, for messages that have the error of the system.
pub(crate) fn bpf_reason(error: io::Error) -> io::Error {
    match error.raw_os_error() {
        Some(REFUSED_BY_VERIFIER) => io::Error::other(REFUSED_IN_WORDS),
        _ => error,
    }
}

/// [`REFUSED_BY_VERIFIER`] in words.
pub(crate) const REFUSED_IN_WORDS: &str =
    "the kernel's verifier refuses a program of this version: please report it with the output of `uname -r`";

fn bpf_load_with_log(
    kind: u32,
    code: &[u64],
    (flags, attach_type): (u32, u32),
    log: &mut [u8],
) -> io::Result<OwnedFd> {
    let license = c"Dual MIT/GPL";
    let log_at = if log.is_empty() { 0 } else { log.as_mut_ptr() as u64 };
    // bpf_attr: prog_type, insn_cnt; insns; license; log_level, log_size; log_buf; kern_version, prog_flags; prog_name (16 bytes);
    // prog_ifindex, expected_attach_type.
    let attribute = [
        pair(kind, code.len() as u32),
        code.as_ptr() as u64,
        license.as_ptr() as u64,
        pair(u32::from(!log.is_empty()), log.len() as u32),
        log_at,
        pair(0, flags),
        u64::from_ne_bytes(*b"towpath\0"),
        0,
        pair(0, attach_type),
    ];
    // SAFETY: the kernel reads `code.len()` instructions of 8 bytes and a terminated string, and writes at most `log.len()` bytes of the log;
    // all of them live until the call returns. PROG_LOAD returns a new descriptor.
    unsafe { bpf_new(PROG_LOAD, &attribute) }
}

/// Attaches a program to an interface.
pub(crate) fn bpf_link(
    program: BorrowedFd<'_>,
    index: u32,
    attach_type: u32,
    flags: u32,
) -> io::Result<OwnedFd> {
    // bpf_attr: prog_fd, target_ifindex; attach_type, flags.
    let attribute = [pair(program.as_raw_fd() as u32, index), pair(attach_type, flags)];
    // SAFETY: no pointers: the attachment to an interface takes none behind these members. LINK_CREATE returns a new descriptor.
    unsafe { bpf_new(LINK_CREATE, &attribute) }
}

/// Replaces the program of a link.
pub(crate) fn bpf_relink(link: BorrowedFd<'_>, program: BorrowedFd<'_>) -> io::Result<()> {
    // bpf_attr: link_fd, new_prog_fd; flags, old_prog_fd.
    let attribute = [pair(link.as_raw_fd() as u32, program.as_raw_fd() as u32), 0];
    // SAFETY: no pointers.
    unsafe { bpf_do(LINK_UPDATE, &attribute) }.map(drop)
}

/// The interface that a link of an XDP or tcx program is attached to; `None` if it was deleted or the link was detached.
pub(crate) fn bpf_link_interface(link: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    // struct bpf_link_info: type, id; prog_id; then for both kinds the interface. The kernel writes as many bytes as `info_len`.
    let mut info = [0_u64; 4];
    // bpf_attr: bpf_fd, info_len; info.
    let length = size_of_val(&info) as u32;
    let attribute = [pair(link.as_raw_fd() as u32, length), info.as_mut_ptr() as u64];
    // SAFETY: the kernel reads and writes `length` bytes of `info`, which lives until the call returns.
    unsafe { bpf_do(OBJ_GET_INFO_BY_FD, &attribute) }?;
    let [a, b, c, d, ..] = info[2].to_ne_bytes();
    Ok(Some(u32::from_ne_bytes([a, b, c, d])).filter(|index| *index > 0))
}

/// Detaches a link from its interface, for all that have a descriptor of it (Linux 5.9).
pub(crate) fn bpf_detach(link: BorrowedFd<'_>) -> io::Result<()> {
    // bpf_attr: link_fd.
    let attribute = [pair(link.as_raw_fd() as u32, 0)];
    // SAFETY: no pointers.
    unsafe { bpf_do(LINK_DETACH, &attribute) }.map(drop)
}

/// Pins `fd` at a path of a bpf file system.
pub(crate) fn bpf_pin(path: &Path, fd: BorrowedFd<'_>) -> io::Result<()> {
    let path = CString::new(path.as_os_str().as_encoded_bytes())?;
    // bpf_attr: pathname; bpf_fd, file_flags.
    let attribute = [path.as_ptr() as u64, fd.as_raw_fd() as u64];
    // SAFETY: the kernel reads a terminated string, which lives until the call returns.
    unsafe { bpf_do(OBJ_PIN, &attribute) }.map(drop)
}

/// Opens the object pinned at a path.
pub(crate) fn bpf_path(path: &Path) -> io::Result<OwnedFd> {
    let path = CString::new(path.as_os_str().as_encoded_bytes())?;
    // SAFETY: the kernel reads a terminated string, which lives until the call returns. OBJ_GET returns a new descriptor.
    unsafe { bpf_new(OBJ_GET, &[path.as_ptr() as u64, 0]) }
}

/// Two 32-bit members of a bpf_attr.
fn pair(low: u32, high: u32) -> u64 {
    let ([a, b, c, d], [e, f, g, h]) = (low.to_ne_bytes(), high.to_ne_bytes());
    u64::from_ne_bytes([a, b, c, d, e, f, g, h])
}

/// TUNSETIFF on /dev/net/tun: attaches the descriptor to a TUN or TAP interface, which is created if it does not exist. Returns its name.
pub(crate) fn tun_attach(fd: BorrowedFd<'_>, name: &str, flags: c_int) -> io::Result<String> {
    let mut request = named(name)?;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: the kernel reads and writes one ifreq, which lives until the call returns.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETIFF, &raw mut request) })?;
    Ok(request.ifr_name.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8 as char).collect())
}

/// The name of the interface that the descriptor is attached to (TUNGETIFF).
pub(crate) fn tun_name(fd: BorrowedFd<'_>) -> io::Result<String> {
    // SAFETY: a zeroed ifreq is valid: its name is empty.
    let mut request: libc::ifreq = unsafe { zeroed() };
    // SAFETY: the kernel writes one ifreq, which lives until the call returns.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNGETIFF, &raw mut request) })?;
    Ok(request.ifr_name.iter().take_while(|byte| **byte != 0).map(|byte| *byte as u8 as char).collect())
}

/// TUNSETOFFLOAD: the offloads that the process accepts.
pub(crate) fn tun_offload(fd: BorrowedFd<'_>, flags: u32) -> io::Result<()> {
    // SAFETY: the argument is a number.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETOFFLOAD, c_ulong::from(flags)) })?;
    Ok(())
}

/// TUNSETPERSIST: whether the interface stays when its last descriptor is closed.
pub(crate) fn tun_persist(fd: BorrowedFd<'_>, on: bool) -> io::Result<()> {
    // SAFETY: the argument is a number.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETPERSIST, c_ulong::from(on)) })?;
    Ok(())
}

/// TUNSETSNDBUF: bytes written and not yet taken in by the network.
pub(crate) fn tun_send_buffer(fd: BorrowedFd<'_>, bytes: c_int) -> io::Result<()> {
    // SAFETY: the kernel reads one int, which lives until the call returns.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), libc::TUNSETSNDBUF, &raw const bytes) })?;
    Ok(())
}

/// Brings the interface `name` up.
pub(crate) fn interface_up(fd: BorrowedFd<'_>, name: &str) -> io::Result<()> {
    let Answer::Flags(flags) = interface(fd, libc::SIOCGIFFLAGS, name)? else { return Ok(()) };
    let mut request = named(name)?;
    request.ifr_ifru.ifru_flags = (flags | libc::IFF_UP) as libc::c_short;
    // SAFETY: the kernel reads one ifreq, which lives until the call returns.
    checked(unsafe { libc::ioctl(fd.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) })?;
    Ok(())
}

/// Moves the calling thread into a new network namespace.
pub(crate) fn unshare_network() -> io::Result<()> {
    unshare(&[namespace::Kind::Network])
}

/// Moves the calling thread into new namespaces.
pub(crate) fn unshare(kinds: &[namespace::Kind]) -> io::Result<()> {
    let flag = |kind: &namespace::Kind| match kind {
        namespace::Kind::Network => libc::CLONE_NEWNET,
        namespace::Kind::Ipc => libc::CLONE_NEWIPC,
        namespace::Kind::Uts => libc::CLONE_NEWUTS,
        namespace::Kind::Cgroup => libc::CLONE_NEWCGROUP,
    };
    let flags = kinds.iter().map(flag).fold(0, |flags, flag| flags | flag);
    // SAFETY: these flags change which network, names, cgroups and System V objects the thread sees. Shared memory of System V that the
    // process has attached stays attached. Nothing changes about its descriptors.
    checked(unsafe { libc::unshare(flags) })?;
    Ok(())
}

/// Moves the process, which must have one thread, into a new user namespace.
pub(crate) fn unshare_user() -> io::Result<()> {
    // SAFETY: CLONE_NEWUSER changes the process's credentials and capabilities, not its memory or descriptors.
    checked(unsafe { libc::unshare(libc::CLONE_NEWUSER) })?;
    Ok(())
}

/// Sets the user and the group of all threads of the process, without supplementary groups. The C library's functions change every
/// thread; the system calls change one.
pub(crate) fn set_user(user: u32, group: u32) -> io::Result<()> {
    // SAFETY: the list has no entry, so no memory is read.
    checked(unsafe { libc::setgroups(0, std::ptr::null()) })?;
    // SAFETY: the arguments are numbers.
    checked(unsafe { libc::setresgid(group, group, group) })?;
    // SAFETY: as above.
    checked(unsafe { libc::setresuid(user, user, user) })?;
    Ok(())
}

/// Marks all descriptors from `first` on as closed on exec(2) (close_range(2), Linux 5.11).
pub(crate) fn close_on_exec(first: u32) -> io::Result<()> {
    // SAFETY: the flag is set and nothing is closed, so descriptors that others own stay valid.
    let done = unsafe { libc::syscall(libc::SYS_close_range, first, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    checked(done as c_int)?;
    Ok(())
}

/// Maximum number of descriptors that [`inherited`] takes.
const INHERITED: u32 = 1024;

/// Takes the descriptors 3 to 3 + `count` - 1, which nothing in this process has opened, and marks them as closed on exec(2). Only the
/// first call returns them.
pub(crate) fn inherited(count: u32) -> Vec<OwnedFd> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    // Relaxed: only the exchange itself counts.
    if TAKEN.swap(true, Ordering::Relaxed) {
        return Vec::new();
    }
    let take = |fd: c_int| {
        // SAFETY: no memory is passed. A descriptor that is not open is an error.
        checked(unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) }).ok()?;
        // SAFETY: the descriptor is open. It was passed at exec(2): the process calls this before it opens descriptors, so nothing
        // else owns it, and it is taken once.
        Some(unsafe { OwnedFd::from_raw_fd(fd) })
    };
    (0..count.min(INHERITED)).filter_map(|at| take(3 + at as c_int)).collect()
}

/// sched_getattr(2) of the calling thread.
pub(crate) fn scheduling() -> io::Result<libc::sched_attr> {
    // SAFETY: a sched_attr of zeroes is one.
    let mut attributes: libc::sched_attr = unsafe { zeroed() };
    let size = size_of_val(&attributes);
    // SAFETY: the kernel writes at most `size` bytes to `attributes`, which lives until the call returns.
    let result = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) };
    checked(result as c_int)?;
    Ok(attributes)
}

/// sched_setattr(2) of the calling thread. `attributes` are those of [`scheduling`], with changes.
pub(crate) fn set_scheduling(attributes: &libc::sched_attr) -> io::Result<()> {
    // SAFETY: the kernel reads as many bytes of `attributes` as their size says, which sched_getattr(2) has set.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, std::ptr::from_ref(attributes), 0) };
    checked(result as c_int).map(drop)
}

/// Handles SIGSYS: writes a line, then ends the process by the same signal.
pub(crate) fn report_forbidden_calls() -> io::Result<()> {
    // SAFETY: a zeroed sigaction is valid: no flags, an empty mask.
    let mut action: libc::sigaction = unsafe { zeroed() };
    action.sa_sigaction = forbidden_call as *const () as usize;
    // The default action is back while the handler runs.
    action.sa_flags = libc::SA_SIGINFO | libc::SA_RESETHAND | libc::SA_NODEFER;
    // SAFETY: the kernel reads `action`. The handler calls functions of signal-safety(7) only.
    checked(unsafe { libc::sigaction(libc::SIGSYS, &raw const action, null_mut()) })?;
    Ok(())
}

extern "C" fn forbidden_call(signal: c_int, info: *const libc::siginfo_t, _: *const libc::c_void) {
    // `_sifields._sigsys._syscall` on 64-bit systems (include/uapi/asm-generic/siginfo.h).
    const SYSCALL: usize = 24;
    // SAFETY: the kernel passes a siginfo_t of 128 bytes, whose words are aligned.
    let number = unsafe { info.wrapping_byte_add(SYSCALL).cast::<i32>().read() };
    let mut name = [0_u8; 16];
    // SAFETY: the kernel writes 16 bytes, the last one is zero.
    unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    let name = &name[..name.iter().position(|byte| *byte == 0).unwrap_or(0)];
    let (mut digits, mut at, mut rest) = ([0_u8; 10], 10, number.unsigned_abs());
    while at == 10 || rest > 0 {
        at -= 1;
        digits[at] = b'0' + (rest % 10) as u8;
        rest /= 10;
    }
    let parts: [&[u8]; 5] = [
        b"towpath: sandbox: thread ",
        name,
        b" made system call ",
        &digits[at..],
        b", which its role does not make: the process ends (ausyscall(8) names it; `sandbox` of [engine])\n",
    ];
    for part in parts {
        // SAFETY: the kernel reads the bytes of `part`. A failed write changes nothing.
        unsafe { libc::write(libc::STDERR_FILENO, part.as_ptr().cast(), part.len()) };
    }
    // SAFETY: no memory is passed. The action is the default one: the process ends.
    unsafe { libc::raise(signal) };
}

fn checked(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}
