#![allow(unsafe_code)]
//! Forwarder between two TUN devices: one packet per read and write (Documentation/networking/tuntap.rst).

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;

use anyhow::{Context, Result, ensure};

use super::Forward;

/// Reads from one device before the direction changes.
const BATCH: usize = 64;
/// Offloads of linux/if_tun.h: TUN_F_CSUM, _TSO4, _TSO6, _USO4, _USO6.
const UNDONE: libc::c_ulong = 0x01 | 0x02 | 0x04 | 0x20 | 0x40;
/// Maximum packet length plus `struct virtio_net_hdr`.
const ROOM: usize = 65_536 + 10;

pub(super) struct Pair {
    devices: [File; 2],
    packet: Box<[u8]>,
}

impl Pair {
    pub(super) fn open(names: [&str; 2], offload: bool) -> Result<Self> {
        let [a, b] = names.map(|name| device(name, offload));
        Ok(Self { devices: [a?, b?], packet: vec![0; ROOM].into() })
    }
}

impl Forward for Pair {
    fn turn(&mut self) -> Result<bool> {
        let mut any = false;
        for (from, to) in [(0, 1), (1, 0)] {
            for _ in 0..BATCH {
                let len = match (&self.devices[from]).read(&mut self.packet) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    len => len.context("reading from a TUN device")?,
                };
                any = true;
                // Packets that the kernel refuses are dropped, as on a wire.
                let _ = (&self.devices[to]).write(&self.packet[..len]);
            }
        }
        Ok(any)
    }

    fn sources(&self) -> [BorrowedFd<'_>; 2] {
        self.devices.each_ref().map(File::as_fd)
    }
}

fn device(name: &str, offload: bool) -> Result<File> {
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open("/dev/net/tun");
    let file = file.context("opening /dev/net/tun")?;
    // SAFETY: a struct of numbers, for which zero is valid.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    ensure!(name.len() < request.ifr_name.len(), "the name {name} is too long");
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    let header = if offload { libc::IFF_VNET_HDR } else { 0 };
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI | header) as i16;
    // SAFETY: the kernel reads and writes one `ifreq`, which outlives the call.
    let set = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &raw mut request) };
    ensure!(set == 0, "attaching to {name}: {}", std::io::Error::last_os_error());
    if offload {
        // SAFETY: the argument is a number.
        let set = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, UNDONE) };
        ensure!(set == 0, "TUNSETOFFLOAD of {name}: {}", std::io::Error::last_os_error());
    }
    Ok(file)
}
