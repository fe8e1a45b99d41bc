//! Answers that leave from where their worker wrote them: its TX frames, lent until the kernel is done with them.
//!
//! Only on connections that one worker alone holds (DESIGN.md, rule 1 and its exception): where there is one worker, or where all
//! messages of a connection go to the same ([`Order::Sticky`](towpath_mux::mux::Order::Sticky)). A connection gets another worker only when
//! the one before has nothing of it in hand: what that has lent is behind it then, and whole answers of its own, so that it can spoil
//! nothing else by it. Nothing here looks at the bytes; what has to be looked at, for TLS or because there is no other way out, is copied.
//!
//! A frame is out from [`TxLeases::lend`] until the last of those who have it (the multiplexor, the sender, a quarantine) drops it,
//! and is then reported to its client by [`TxLeases::give_back`]. When the client is gone before that, nobody is reported: the memory stays
//! mapped for as long as somebody has a frame of it, and nobody writes it any more.
//!
//! A worker's frames are a bounded good: a connection whose peer does not read has a quarter of them at most, all together half.
//! What is beyond is copied, so no peer holds up a worker.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use towpath_mux::mux::{self, psock};
use towpath_ring::{Channel, TxFrame};
use towpath_send::{Lent, Region};

/// What a worker has lent.
#[derive(Debug)]
pub(super) struct TxLeases {
    region: Region,
    back: ReturnQueue,
    /// Bytes of each connection, and of all.
    lent: HashMap<psock::Id, usize>,
    all: usize,
}

/// Frames that nobody has any more.
type ReturnQueue = Arc<Mutex<Vec<(psock::Id, TxFrame)>>>;

/// One frame.
#[derive(Debug)]
pub(super) struct TxLease {
    region: Region,
    span: Range<usize>,
    /// None when it has been given back.
    frame: Option<(psock::Id, TxFrame)>,
    back: ReturnQueue,
}

/// What is left of a frame to be sent.
#[derive(Debug)]
pub(super) struct Rest {
    tx_lease: Arc<TxLease>,
    sent: usize,
}

impl TxLeases {
    /// Of the client of `channel`; none when its memory cannot be mapped.
    pub(super) fn of(channel: &Channel) -> Option<Self> {
        let (fd, len) = channel.tx_area().ok()?;
        let region = Region::map(&fd, len).inspect_err(|error| log::warn!("answers are copied: {error}"));
        Some(Self { region: region.ok()?, back: ReturnQueue::default(), lent: HashMap::new(), all: 0 })
    }

    /// Whether `bytes` more may be lent for this connection.
    pub(super) fn has_room(&self, psock: psock::Id, bytes: usize) -> bool {
        let of_it = self.lent.get(&psock).copied().unwrap_or(0);
        of_it + bytes <= self.region.len() / 4 && self.all + bytes <= self.region.len() / 2
    }

    /// Lends a frame.
    pub(super) fn lend(&mut self, psock: psock::Id, frame: TxFrame) -> Arc<TxLease> {
        let span = frame.span();
        *self.lent.entry(psock).or_default() += span.len();
        self.all += span.len();
        let (region, back) = (self.region.clone(), self.back.clone());
        Arc::new(TxLease { region, span, frame: Some((psock, frame)), back })
    }

    /// Whether there is something that nobody has any more.
    pub(super) fn has_back(&self) -> bool {
        self.all > 0 && !self.back.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Gives back to the client what nobody has any more; whether there was anything.
    pub(super) fn give_back(&mut self, channel: &mut Channel) -> bool {
        if self.all == 0 {
            return false;
        }
        let mut back = self.back.lock().unwrap_or_else(PoisonError::into_inner);
        let any = !back.is_empty();
        for (psock, frame) in back.drain(..) {
            let bytes = frame.span().len();
            self.all -= bytes;
            if let Some(lent) = self.lent.get_mut(&psock) {
                *lent -= bytes;
                if *lent == 0 {
                    self.lent.remove(&psock);
                }
            }
            channel.give_back(frame);
        }
        any
    }
}

impl mux::Lease for TxLease {
    fn len(&self) -> usize {
        self.span.len()
    }

    fn copy(&self) -> Bytes {
        let mut copy = vec![0; self.span.len()];
        self.region.copy_out(self.span.start, &mut copy);
        copy.into()
    }
}

impl Drop for TxLease {
    fn drop(&mut self) {
        self.back.lock().unwrap_or_else(PoisonError::into_inner).extend(self.frame.take());
    }
}

impl Rest {
    /// What is behind the first `sent` bytes.
    pub(super) fn of(tx_lease: Arc<TxLease>, sent: usize) -> Self {
        Self { tx_lease, sent }
    }
}

impl Lent for Rest {
    fn region(&self) -> &Region {
        &self.tx_lease.region
    }

    fn span(&self) -> Range<usize> {
        self.tx_lease.span.start + self.sent..self.tx_lease.span.end
    }
}
