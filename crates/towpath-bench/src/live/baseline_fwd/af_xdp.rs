#![allow(unsafe_code)]
//! Bridge between XDP sockets in copy mode with a shared UMEM: frames are sent from where they were received
//! (Documentation/networking/af_xdp.rst).

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::sync::atomic::Ordering;

use anyhow::{Context, Result};
use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketType};

use super::Forward;
use super::area::{Area, Plain};
use crate::xdp;

const FRAME: u64 = 4096;
const FRAMES: u64 = 16_384;
const RING: u32 = 4096;
const BATCH: u32 = 64;

pub(super) struct Bridge {
    ends: [End; 2],
    free: Vec<u64>,
    _memory: Area,
}

struct End {
    received: Ring,
    sent: Ring,
    fill: Ring,
    completed: Ring,
    /// Transmit descriptors that the kernel has not completed.
    outstanding: u32,
    socket: OwnedFd,
    _link: OwnedFd,
}

/// A ring; `ours` is this side's counter (net/xdp/xsk_queue.h).
struct Ring {
    area: Area,
    ours: u32,
    counter: usize,
    other: usize,
    entries: usize,
    produces: bool,
}

/// `struct xdp_desc`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Descriptor {
    address: u64,
    len: u32,
    options: u32,
}

impl Plain for Descriptor {}

impl Bridge {
    pub(super) fn open(devices: [&str; 2]) -> Result<Self> {
        let memory = Area::fresh((FRAMES * FRAME) as usize)?;
        let first =
            End::open(devices[0], &memory, None).with_context(|| format!("opening {}", devices[0]))?;
        let second = End::open(devices[1], &memory, Some(&first.socket))
            .with_context(|| format!("opening {}", devices[1]))?;
        let mut bridge = Self {
            ends: [first, second],
            free: (0..FRAMES).map(|frame| frame * FRAME).collect(),
            _memory: memory,
        };
        for end in &mut bridge.ends {
            end.refill(&mut bridge.free, RING);
        }
        Ok(bridge)
    }
}

impl Forward for Bridge {
    fn turn(&mut self) -> Result<bool> {
        let mut any = false;
        for from in 0..2 {
            let (left, right) = self.ends.split_at_mut(1);
            let (end, other) =
                if from == 0 { (&mut left[0], &mut right[0]) } else { (&mut right[0], &mut left[0]) };
            end.collect(&mut self.free);
            end.refill(&mut self.free, BATCH);
            let count = end.received.ready().min(BATCH);
            if count > 0 {
                any = true;
                let room = other.sent.ready();
                for n in 0..count {
                    let descriptor: Descriptor = end.received.get(n);
                    if n < room {
                        other.sent.set(n, Descriptor { options: 0, ..descriptor });
                    } else {
                        self.free.push(descriptor.address & !(FRAME - 1));
                    }
                }
                end.received.advance(count);
                other.sent.advance(count.min(room));
                other.outstanding += count.min(room);
            }
            end.kick();
        }
        Ok(any)
    }

    fn sources(&self) -> [BorrowedFd<'_>; 2] {
        self.ends.each_ref().map(|end| end.socket.as_fd())
    }
}

impl End {
    fn open(device: &str, memory: &Area, shared: Option<&OwnedFd>) -> Result<Self> {
        // SAFETY: the call takes no pointers.
        let fd = unsafe { libc::socket(libc::AF_XDP, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error()).context("an XDP socket");
        }
        // SAFETY: the kernel has just created this descriptor, and no other code owns it.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        if shared.is_none() {
            // SAFETY: a struct of numbers, for which zero is valid.
            let mut umem: libc::xdp_umem_reg = unsafe { std::mem::zeroed() };
            (umem.addr, umem.len, umem.chunk_size) = (memory.base() as u64, FRAMES * FRAME, FRAME as u32);
            set(&socket, libc::XDP_UMEM_REG, &umem)?;
        }
        for ring in
            [libc::XDP_UMEM_FILL_RING, libc::XDP_UMEM_COMPLETION_RING, libc::XDP_RX_RING, libc::XDP_TX_RING]
        {
            set(&socket, ring, &RING)?;
        }
        // SAFETY: as above.
        let mut at: libc::xdp_mmap_offsets = unsafe { std::mem::zeroed() };
        let mut len = size_of_val(&at) as libc::socklen_t;
        let (fd, option) = (socket.as_raw_fd(), (&raw mut at).cast());
        // SAFETY: the kernel writes at most `len` bytes to `at`.
        let got =
            unsafe { libc::getsockopt(fd, libc::SOL_XDP, libc::XDP_MMAP_OFFSETS, option, &raw mut len) };
        if got < 0 {
            return Err(io::Error::last_os_error()).context("XDP_MMAP_OFFSETS");
        }
        let ring =
            |at: &libc::xdp_ring_offset, page, entry, produces| Ring::map(&socket, at, page, entry, produces);
        let received = ring(&at.rx, libc::XDP_PGOFF_RX_RING as u64, 16, false)?;
        let sent = ring(&at.tx, libc::XDP_PGOFF_TX_RING as u64, 16, true)?;
        let fill = ring(&at.fr, libc::XDP_UMEM_PGOFF_FILL_RING, 8, true)?;
        let completed = ring(&at.cr, libc::XDP_UMEM_PGOFF_COMPLETION_RING, 8, false)?;
        let address = libc::sockaddr_xdp {
            sxdp_family: libc::AF_XDP as u16,
            sxdp_flags: if shared.is_some() {
                libc::XDP_SHARED_UMEM
            } else {
                libc::XDP_COPY | libc::XDP_USE_NEED_WAKEUP
            },
            sxdp_ifindex: index(device)?,
            sxdp_queue_id: 0,
            sxdp_shared_umem_fd: shared.map_or(0, |fd| fd.as_raw_fd() as u32),
        };
        let len = size_of_val(&address) as libc::socklen_t;
        // SAFETY: the pointer and the length are those of `address`, which outlives the call.
        let bound = unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), len) };
        if bound < 0 {
            return Err(io::Error::last_os_error()).context("binding");
        }
        let link = xdp::redirect(device, &socket)?;
        Ok(Self { received, sent, fill, completed, outstanding: 0, socket, _link: link })
    }

    /// Reclaims the frames of completed transmissions.
    fn collect(&mut self, free: &mut Vec<u64>) {
        let done = self.completed.ready().min(BATCH);
        for n in 0..done {
            free.push(self.completed.get::<u64>(n) & !(FRAME - 1));
        }
        self.completed.advance(done);
        self.outstanding -= done;
    }

    /// Gives free frames to the fill ring.
    fn refill(&mut self, free: &mut Vec<u64>, most: u32) {
        let room = self.fill.ready().min(most);
        let mut given = 0;
        while given < room
            && let Some(frame) = free.pop()
        {
            self.fill.set(given, frame);
            given += 1;
        }
        self.fill.advance(given);
    }

    /// Requests transmission of queued descriptors. EAGAIN is common; the next call retries.
    fn kick(&self) {
        if self.outstanding > 0 {
            // SAFETY: the call has no data and no address.
            unsafe {
                libc::sendto(
                    self.socket.as_raw_fd(),
                    std::ptr::null(),
                    0,
                    libc::MSG_DONTWAIT,
                    std::ptr::null(),
                    0,
                )
            };
        }
    }
}

impl Ring {
    fn map(
        socket: &OwnedFd,
        at: &libc::xdp_ring_offset,
        page: u64,
        entry: usize,
        produces: bool,
    ) -> Result<Self> {
        let area = Area::of(socket, at.desc as usize + RING as usize * entry, page)?;
        let (producer, consumer) = (at.producer as usize, at.consumer as usize);
        let (counter, other) = if produces { (producer, consumer) } else { (consumer, producer) };
        Ok(Self { area, ours: 0, counter, other, entries: at.desc as usize, produces })
    }

    /// Number of entries available to this side.
    #[inline]
    fn ready(&self) -> u32 {
        // Acquire: pairs with the kernel's release; the kernel no longer accesses the entries before this counter.
        let other = self.area.word(self.other).load(Ordering::Acquire);
        if self.produces { RING - self.ours.wrapping_sub(other) } else { other.wrapping_sub(self.ours) }
    }

    #[inline]
    fn place<T>(&self, ahead: u32) -> usize {
        self.entries + (self.ours.wrapping_add(ahead) % RING) as usize * size_of::<T>()
    }

    #[inline]
    fn get<T: Plain>(&self, ahead: u32) -> T {
        self.area.read(self.place::<T>(ahead))
    }

    #[inline]
    fn set<T: Plain>(&self, ahead: u32, value: T) {
        self.area.write(self.place::<T>(ahead), value);
    }

    #[inline]
    fn advance(&mut self, by: u32) {
        self.ours = self.ours.wrapping_add(by);
        // Release: pairs with the kernel's acquire; this process no longer accesses the entries before this counter.
        self.area.word(self.counter).store(self.ours, Ordering::Release);
    }
}

fn index(device: &str) -> Result<u32> {
    // XDP sockets do not support this ioctl.
    let socket = rustix::net::socket(AddressFamily::INET, SocketType::DGRAM, None)?;
    name_to_index(&socket, device).with_context(|| format!("finding {device}"))
}

fn set<T>(socket: &OwnedFd, name: i32, value: &T) -> Result<()> {
    let len = size_of::<T>() as libc::socklen_t;
    // SAFETY: the pointer and the length are those of `value`, a struct of numbers, which outlives the call.
    let set =
        unsafe { libc::setsockopt(socket.as_raw_fd(), libc::SOL_XDP, name, (&raw const *value).cast(), len) };
    if set < 0 {
        Err(io::Error::last_os_error()).with_context(|| format!("XDP option {name}"))
    } else {
        Ok(())
    }
}
