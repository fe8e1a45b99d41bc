//! `towpath_sender_*`: TCP and UDP without copying what is sent.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::time::Duration;

use rustix::io::Errno;
use towpath_send::{Buffer, CopyMode, SendError, Time};

use crate::failure::{Failure, guard};
use crate::foreign::{Bytes, Room, duplicate};
use crate::ring::{self, Wait};

/// `towpath_sender`.
#[derive(Debug)]
pub struct Sender {
    sender: towpath_send::Sender,
    /// Buffers that are lent: queued and not given back. Who has so many gets no more.
    lent: usize,
    max: usize,
    /// An error that was found when there were ids to give, which it would have taken along.
    unsaid: Option<SendError>,
}

/// `struct towpath_sender_options`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Options {
    /// `enum towpath_choice`.
    pub choice: u32,
    /// UDP: bytes of a datagram.
    pub segment: u16,
    /// Whether checksums are compared.
    pub tamper_check: u16,
    /// Milliseconds that a peer may take nothing.
    pub stall: u32,
    /// Most buffers.
    pub max_buffers: u32,
    /// Most bytes that are pinned.
    pub max_pinned: u64,
}

/// `struct towpath_sender_counters`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Counters {
    /// Bytes without a copy.
    pub zerocopy_bytes: u64,
    /// Bytes that the kernel copied after all.
    pub copied_bytes: u64,
    /// Bytes that were sent plain.
    pub plain_bytes: u64,
    /// Zero-copy calls.
    pub calls: u64,
    /// Those that are completed.
    pub completed: u64,
    /// Those that were reported as copied.
    pub copied: u64,
    /// ENOBUFS.
    pub no_buffers: u64,
    /// Buffers that were changed.
    pub tampered: u64,
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_sender_open(
    fd: c_int,
    options: Option<&Options>,
    sender: Option<&mut MaybeUninit<*mut Sender>>,
) -> c_int {
    guard(|| {
        let into = sender.ok_or(Failure::null("there is no place for the sender"))?;
        let options = options.copied().unwrap_or_default().checked()?;
        let max = options.max_frames;
        let sender = towpath_send::Sender::new(duplicate(fd)?, options)?;
        into.write(Box::into_raw(Box::new(Sender { sender, lent: 0, max, unsaid: None })));
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_sender_queue(
    sender: Option<&mut Sender>,
    id: u64,
    bytes: Bytes,
    len: usize,
) -> c_int {
    guard(|| {
        let Sender { sender, lent, max, .. } = some(sender)?;
        let buffer = Buffer::owner(bytes.lend(len)?);
        if *lent >= *max {
            return Err(Failure::new(Errno::AGAIN, "too many buffers are lent: reclaim some"));
        }
        *lent += 1;
        sender.queue(id, buffer)?;
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_sender_flush(sender: Option<&mut Sender>) -> c_int {
    guard(|| {
        some(sender)?.sender.flush()?;
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_sender_reclaim(
    sender: Option<&mut Sender>,
    mut ids: Room<u64>,
    max: usize,
) -> c_int {
    guard(|| {
        let Sender { sender, lent, unsaid, .. } = some(sender)?;
        let mut count = 0;
        for id in ids.get(max.min(c_int::MAX as usize))? {
            match unsaid.take().map_or_else(|| sender.reclaim(), Err) {
                Ok(Some(done)) => id.write(done.token),
                Ok(None) => break,
                Err(error) if count == 0 => return Err(error.into()),
                Err(error) => {
                    *unsaid = Some(error);
                    break;
                }
            };
            *lent -= 1;
            count += 1;
        }
        Ok(count)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_sender_drain(sender: Option<&mut Sender>, timeout: c_int) -> c_int {
    guard(|| {
        let sender = &mut some(sender)?.sender;
        match Wait::from_millis(timeout)? {
            Wait::Most(patience) => Ok(sender.drain(patience)?.into()),
            Wait::Ever => loop {
                if sender.drain(LONG)? {
                    return Ok(1);
                }
            },
        }
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_sender_fd(sender: Option<&Sender>) -> c_int {
    guard(|| Ok(ring::fd(&sender.ok_or(Failure::NULL_HANDLE)?.sender)))
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_sender_counters(
    sender: Option<&Sender>,
    counters: Option<&mut MaybeUninit<Counters>>,
) -> c_int {
    guard(|| {
        let sender = sender.ok_or(Failure::NULL_HANDLE)?;
        let into = counters.ok_or(Failure::null("there is no place for the counters"))?;
        into.write(sender.sender.counters().into());
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_sender_close(
    sender: Option<Box<Sender>>,
    timeout: c_int,
    mut ids: Room<u64>,
    max: usize,
    pinned: Option<&mut MaybeUninit<usize>>,
) -> c_int {
    guard(|| {
        let Some(sender) = sender else { return Ok(1) };
        let patience = match Wait::for_end(timeout) {
            Ok(patience) => patience,
            Err(refused) => {
                // It stays C's, as it is.
                Box::leak(sender);
                return Err(refused);
            }
        };
        let closed = sender.sender.close(patience)?;
        let mut quarantine = closed.remains.quarantine;
        if let Some(pinned) = pinned {
            pinned.write(quarantine.len());
        }
        if let Ok(ids) = ids.get(max) {
            // What is in it is C's memory, so it need not stay there: C is told which.
            for (id, done) in ids.iter_mut().zip(std::iter::from_fn(|| quarantine.poll(EVER))) {
                id.write(done.token);
            }
        }
        Ok(closed.finished.into())
    })
}

/// A wait that has no end is made of these.
const LONG: Duration = Duration::from_secs(3600);
/// After any time in a quarantine.
const EVER: Time = Time::from_nanos(u64::MAX);

impl Options {
    fn checked(self) -> Result<towpath_send::Options, Failure> {
        let choice = match self.choice {
            0 => CopyMode::Adaptive,
            1 => CopyMode::Zerocopy,
            2 => CopyMode::Plain,
            _ => return Err(Failure::new(Errno::INVAL, "a choice that there is not")),
        };
        let defaults = towpath_send::Options::default();
        let stall = (self.stall > 0).then(|| Duration::from_millis(self.stall.into()));
        Ok(towpath_send::Options {
            choice,
            segment: (self.segment > 0).then_some(self.segment),
            tamper_check: self.tamper_check != 0,
            stall,
            max_frames: if self.max_buffers > 0 { self.max_buffers as usize } else { defaults.max_frames },
            max_pinned: if self.max_pinned > 0 { self.max_pinned } else { defaults.max_pinned },
            keep_done: true,
            ..defaults
        })
    }
}

impl From<&towpath_send::Counters> for Counters {
    fn from(counters: &towpath_send::Counters) -> Self {
        Self {
            zerocopy_bytes: counters.zerocopy_bytes,
            copied_bytes: counters.copied_bytes,
            plain_bytes: counters.plain_bytes(),
            calls: counters.numbers,
            completed: counters.completed,
            copied: counters.copied,
            no_buffers: counters.no_buffers,
            tampered: counters.tampered,
        }
    }
}

fn some(sender: Option<&mut Sender>) -> Result<&mut Sender, Failure> {
    sender.ok_or(Failure::NULL_HANDLE)
}
