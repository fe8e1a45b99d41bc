#![allow(unsafe_code)]
//! Minimal zero-copy sender: send(2) from a rotation of frames. It reads the error queue after `read_every` calls, or when the
//! next frame is still in use. It has no policy, budget, quota or second connection. The cost of `towpath-send` above this
//! sender is its overhead; the cost of this sender is the kernel's.

use std::mem::zeroed;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SendFlags, Shutdown, send, shutdown};
use towpath_send::{Event, Frame, parse};

/// Maximum of outstanding notification numbers; a power of two.
const NUMBERS: usize = 1 << 16;

/// Buffer for the control messages of one entry; 128 bytes suffice.
#[repr(align(8))]
struct Control([u8; 128]);

/// A connection and its frames.
pub(crate) struct Sender {
    socket: OwnedFd,
    frames: Vec<Frame>,
    /// For each frame, the number of outstanding calls that use it.
    held: Vec<u32>,
    /// Frame of each notification number, indexed by its lower bits.
    of: Vec<u32>,
    issued: u32,
    completed: u32,
    /// The next frame to send.
    next: usize,
    since: usize,
    read_every: usize,
    /// Calls whose completion has the code COPIED.
    pub(crate) copied: u64,
}

impl Sender {
    /// Creates a sender of `frames`, which the caller has filled.
    pub(crate) fn new(socket: OwnedFd, frames: Vec<Frame>, read_every: usize) -> Result<Self> {
        let on: libc::c_int = 1;
        let (fd, value, len) = (socket.as_raw_fd(), (&raw const on).cast(), size_of_val(&on));
        // SAFETY: the kernel reads `len` bytes of `on`, which lives until the call returns.
        let set = unsafe {
            libc::setsockopt(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY, value, len as libc::socklen_t)
        };
        ensure!(set == 0, "SO_ZEROCOPY: {}", std::io::Error::last_os_error());
        let held = vec![0; frames.len()];
        Ok(Self {
            socket,
            frames,
            held,
            of: vec![0; NUMBERS],
            issued: 0,
            completed: 0,
            next: 0,
            since: 0,
            read_every,
            copied: 0,
        })
    }

    /// Number of zero-copy calls.
    pub(crate) fn numbers(&self) -> u64 {
        self.issued.into()
    }

    /// Sends `total` bytes in whole frames. Fails after `patience` without progress.
    pub(crate) fn run(&mut self, total: u64, zerocopy: bool, patience: Duration) -> Result<()> {
        let mut flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        if zerocopy {
            flags |= SendFlags::from_bits_retain(libc::MSG_ZEROCOPY as u32);
        }
        let mut sent = 0;
        while sent < total {
            let frame = self.next;
            if self.since >= self.read_every || self.held[frame] > 0 {
                self.read()?;
            }
            while self.held[frame] > 0 {
                self.wait(PollFlags::empty(), patience)?;
                self.read()?;
            }
            let mut from = 0;
            while from < self.frames[frame].len() {
                match send(&self.socket, &self.frames[frame][from..], flags) {
                    Ok(bytes) => {
                        from += bytes;
                        if zerocopy {
                            self.of[self.issued as usize % NUMBERS] = frame as u32;
                            self.issued = self.issued.wrapping_add(1);
                            self.held[frame] += 1;
                            self.since += 1;
                        }
                    }
                    Err(Errno::AGAIN) => {
                        if zerocopy {
                            self.read()?;
                        }
                        self.wait(PollFlags::OUT, patience)?;
                    }
                    Err(error) => return Err(error).context("sending"),
                }
            }
            sent += from as u64;
            self.next = (frame + 1) % self.frames.len();
        }
        Ok(())
    }

    /// Shuts down the sending side and waits for all completions.
    pub(crate) fn finish(&mut self, patience: Duration) -> Result<()> {
        shutdown(&self.socket, Shutdown::Write)?;
        while self.completed != self.issued {
            self.wait(PollFlags::empty(), patience)?;
            self.read()?;
        }
        Ok(())
    }

    /// Reads the error queue until it is empty.
    fn read(&mut self) -> Result<()> {
        self.since = 0;
        let mut control = Control([0; 128]);
        loop {
            // SAFETY: an all-zero msghdr is valid: it has no address, data or control buffer.
            let mut message: libc::msghdr = unsafe { zeroed() };
            message.msg_control = control.0.as_mut_ptr().cast();
            message.msg_controllen = control.0.len();
            let flags = libc::MSG_ERRQUEUE | libc::MSG_DONTWAIT;
            // SAFETY: the kernel writes at most `msg_controllen` bytes into `control`, borrowed mutably until it returns.
            let got = unsafe { libc::recvmsg(self.socket.as_raw_fd(), &mut message, flags) };
            if got < 0 {
                return Ok(());
            }
            let len = message.msg_controllen.min(control.0.len());
            let Some(Event::Zerocopy(range)) = parse(&control.0[..len]) else { continue };
            for at in 0..range.count() as u32 {
                let frame = self.of[range.first.wrapping_add(at) as usize % NUMBERS];
                self.held[frame as usize] -= 1;
                self.completed = self.completed.wrapping_add(1);
                self.copied += u64::from(range.copied);
            }
        }
    }

    /// Waits for `events`, at most `patience`.
    fn wait(&self, events: PollFlags, patience: Duration) -> Result<()> {
        let patience = Timespec { tv_sec: patience.as_secs() as i64, tv_nsec: 0 };
        let ready = poll(&mut [PollFd::new(&self.socket, events)], Some(&patience))?;
        ensure!(ready > 0, "the receiver accepts no data");
        Ok(())
    }
}
