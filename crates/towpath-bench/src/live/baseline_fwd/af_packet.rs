#![allow(unsafe_code)]
//! Bridge between packet sockets: receives by TPACKET_V3 and sends from the same blocks by sendmmsg
//! (Documentation/networking/packet_mmap.rst).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result};
use rustix::net::sockopt::set_socket_send_buffer_size_force;

use super::Forward;
use super::area::Area;
use crate::peer::flood::{bind, busy, packet_socket, set_option, unbound_socket};

const BLOCK: usize = 1 << 20;
const BLOCKS: usize = 32;
/// Messages per sendmmsg call.
const BATCH: usize = 64;
/// Length of `struct virtio_net_hdr`.
const VNET: usize = 10;
/// Number of send attempts on a full interface before packets are dropped.
const PATIENCE: u32 = 3;

/// Field offsets in a block (`struct tpacket_block_desc`) and before a packet (`struct tpacket3_hdr`).
mod at {
    pub(super) const STATUS: usize = 8;
    pub(super) const PACKETS: usize = 12;
    pub(super) const FIRST: usize = 16;
    pub(super) const NEXT: usize = 0;
    pub(super) const LEN: usize = 12;
    pub(super) const MAC: usize = 24;
}

pub(super) struct Bridge {
    ends: [End; 2],
    slices: Box<[libc::iovec]>,
    headers: Box<[libc::mmsghdr]>,
    /// Length of the header sent before each packet.
    before: usize,
}

struct End {
    incoming: OwnedFd,
    outgoing: OwnedFd,
    ring: Area,
    block: usize,
}

impl Bridge {
    pub(super) fn open(devices: [&str; 2], offload: bool) -> Result<Self> {
        let [a, b] =
            devices.map(|device| End::open(device, offload).with_context(|| format!("opening {device}")));
        let mut slices: Box<[libc::iovec]> =
            (0..BATCH).map(|_| libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }).collect();
        let headers = slices
            .iter_mut()
            .map(|slice| {
                // SAFETY: a struct of numbers and pointers, for which zero is valid.
                let mut header: libc::mmsghdr = unsafe { std::mem::zeroed() };
                header.msg_hdr.msg_iov = slice;
                header.msg_hdr.msg_iovlen = 1;
                header
            })
            .collect();
        Ok(Self { ends: [a?, b?], slices, headers, before: if offload { VNET } else { 0 } })
    }

    /// Forwards the packets of the block at `offset` of end `from` to the other end.
    fn carry(&mut self, from: usize, offset: usize) -> Result<()> {
        let ring = &self.ends[from].ring;
        let packets = ring.read::<u32>(offset + at::PACKETS);
        let mut packet = offset + ring.read::<u32>(offset + at::FIRST) as usize;
        let mut filled = 0;
        for _ in 0..packets {
            let ring = &self.ends[from].ring;
            let len = ring.read::<u32>(packet + at::LEN) as usize + self.before;
            let mac = usize::from(ring.read::<u16>(packet + at::MAC)) - self.before;
            self.slices[filled] = libc::iovec { iov_base: ring.at(packet + mac, len).cast(), iov_len: len };
            packet += ring.read::<u32>(packet + at::NEXT) as usize;
            filled += 1;
            if filled == BATCH {
                self.send(1 - from, filled)?;
                filled = 0;
            }
        }
        self.send(1 - from, filled)
    }

    fn send(&mut self, to: usize, count: usize) -> Result<()> {
        let (socket, mut sent, mut tries) = (self.ends[to].outgoing.as_raw_fd(), 0, 0);
        while sent < count {
            let headers = &mut self.headers[sent..count];
            // SAFETY: each header points to its slice, owned by self; each slice points into a ring that self maps.
            let taken = unsafe { libc::sendmmsg(socket, headers.as_mut_ptr(), headers.len() as u32, 0) };
            if let Ok(taken) = usize::try_from(taken) {
                (sent, tries) = (sent + taken, 0);
                continue;
            }
            let error = io::Error::last_os_error();
            tries += 1;
            if tries > PATIENCE || !busy(&error) {
                sent += 1;
            }
        }
        Ok(())
    }
}

impl Forward for Bridge {
    fn turn(&mut self) -> Result<bool> {
        let mut any = false;
        for from in 0..2 {
            let offset = self.ends[from].block * BLOCK;
            // Acquire: pairs with the kernel's release of the block.
            let status = self.ends[from].ring.word(offset + at::STATUS).load(Ordering::Acquire);
            if status & libc::TP_STATUS_USER == 0 {
                continue;
            }
            any = true;
            self.carry(from, offset)?;
            let end = &mut self.ends[from];
            // Release: pairs with the kernel's read of the status; this process no longer accesses the block.
            end.ring.word(offset + at::STATUS).store(libc::TP_STATUS_KERNEL, Ordering::Release);
            end.block = (end.block + 1) % BLOCKS;
        }
        Ok(any)
    }

    fn sources(&self) -> [BorrowedFd<'_>; 2] {
        self.ends.each_ref().map(|end| end.incoming.as_fd())
    }
}

impl End {
    fn open(device: &str, offload: bool) -> Result<Self> {
        let (incoming, outgoing) = (unbound_socket()?, packet_socket(device, 0)?);
        for (name, value) in [(libc::PACKET_VERSION, 2), (libc::PACKET_IGNORE_OUTGOING, 1)] {
            set_option(&incoming, libc::SOL_PACKET, name, value)?;
        }
        if offload {
            set_option(&incoming, libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
            set_option(&outgoing, libc::SOL_PACKET, libc::PACKET_VNET_HDR, 1)?;
        }
        let request = libc::tpacket_req3 {
            tp_block_size: BLOCK as u32,
            tp_block_nr: BLOCKS as u32,
            tp_frame_size: 2048,
            tp_frame_nr: (BLOCK / 2048 * BLOCKS) as u32,
            tp_retire_blk_tov: 1,
            tp_sizeof_priv: 0,
            tp_feature_req_word: 0,
        };
        let len = size_of_val(&request) as u32;
        let option = (&raw const request).cast();
        // SAFETY: the pointer and the length are those of `request`, which outlives the call.
        let set = unsafe {
            libc::setsockopt(incoming.as_raw_fd(), libc::SOL_PACKET, libc::PACKET_RX_RING, option, len)
        };
        if set < 0 {
            return Err(io::Error::last_os_error()).context("PACKET_RX_RING");
        }
        let ring = Area::of(&incoming, BLOCK * BLOCKS, 0)?;
        let _ = set_socket_send_buffer_size_force(&outgoing, 16 << 20);
        bind(&incoming, device, libc::ETH_P_ALL as u16)?;
        Ok(Self { incoming, outgoing, ring, block: 0 })
    }
}
