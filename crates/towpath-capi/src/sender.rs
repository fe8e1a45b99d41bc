//! `towpath_sender_*`: TCP and UDP transmission without copying.

use std::ffi::c_int;
use std::mem::MaybeUninit;
use std::time::Duration;

use rustix::io::Errno;
use towpath_send::{Buffer, CopyMode, SendError, Summary, Time};

use crate::error::{Failure, guard};
use crate::ffi::{Bytes, Room, duplicate};
use crate::metrics::{self, Metric};
use crate::ring::{self, Wait};

/// `towpath_sender`.
#[derive(Debug)]
pub struct Sender {
    sender: towpath_send::Sender,
    /// Buffers on loan: queued and not yet reclaimed.
    lent: usize,
    /// Limit on buffers on loan (`max_buffers`); further sends fail.
    max: usize,
    /// An error found by `reclaim` together with ids. The next call reports it.
    pending_error: Option<SendError>,
}

/// `struct towpath_sender_options`.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct Options {
    /// `enum towpath_choice`.
    pub choice: u32,
    /// UDP: size of a datagram in bytes.
    pub segment: u16,
    /// 1: compare checksums.
    pub tamper_check: u16,
    /// Limit in milliseconds on the time without progress of the peer.
    pub stall: u32,
    /// Limit on buffers held.
    pub max_buffers: u32,
    /// Limit on pinned bytes.
    pub max_pinned: u64,
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_sender_open(
    fd: c_int,
    options: Option<&Options>,
    sender: Option<&mut MaybeUninit<*mut Sender>>,
) -> c_int {
    guard(|| {
        let into = sender.ok_or(Failure::null("the pointer to the sender is NULL"))?;
        let options = options.copied().unwrap_or_default().checked()?;
        let max = options.max_frames;
        let sender = towpath_send::Sender::new(duplicate(fd)?, options)?;
        into.write(Box::into_raw(Box::new(Sender { sender, lent: 0, max, pending_error: None })));
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
            return Err(Failure::new(Errno::AGAIN, "max_buffers are on loan; reclaim some"));
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
        let Sender { sender, lent, pending_error, .. } = some(sender)?;
        let mut count = 0;
        for id in ids.get(max.min(c_int::MAX as usize))? {
            match pending_error.take().map_or_else(|| sender.reclaim(), Err) {
                Ok(Some(done)) => id.write(done.token),
                Ok(None) => break,
                Err(error) if count == 0 => return Err(error.into()),
                Err(error) => {
                    *pending_error = Some(error);
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
            Wait::Forever => loop {
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
    counters: Option<&mut MaybeUninit<Summary>>,
) -> c_int {
    guard(|| {
        let sender = sender.ok_or(Failure::NULL_HANDLE)?;
        let into = counters.ok_or(Failure::null("the pointer to the counters is NULL"))?;
        into.write(sender.sender.counters().into());
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_sender_metrics(
    sender: Option<&Sender>,
    mut metrics: Room<Metric>,
    max: usize,
) -> c_int {
    guard(|| {
        let sender = sender.ok_or(Failure::NULL_HANDLE)?;
        metrics::write(&[sender.sender.counters()], &mut metrics, max)
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
        let patience = match Wait::for_close(timeout) {
            Ok(patience) => patience,
            Err(refused) => {
                // The call failed, so the handle stays valid for the caller.
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
            // The memory belongs to the C program, which gets the ids, so the quarantine need not hold it longer.
            for (id, done) in ids.iter_mut().zip(std::iter::from_fn(|| quarantine.poll(EVER))) {
                id.write(done.token);
            }
        }
        Ok(closed.finished.into())
    })
}

/// An infinite wait consists of waits of this length.
const LONG: Duration = Duration::from_secs(3600);
/// Later than the end of any hold time.
const EVER: Time = Time::from_nanos(u64::MAX);

impl Options {
    fn checked(self) -> Result<towpath_send::Options, Failure> {
        let choice = match self.choice {
            0 => CopyMode::Adaptive,
            1 => CopyMode::Zerocopy,
            2 => CopyMode::Plain,
            _ => return Err(Failure::new(Errno::INVAL, "unknown copy mode")),
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

fn some(sender: Option<&mut Sender>) -> Result<&mut Sender, Failure> {
    sender.ok_or(Failure::NULL_HANDLE)
}
