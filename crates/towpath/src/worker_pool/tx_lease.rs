//! TX leases: replies that the kernel sends from the worker's own TX frames.
//!
//! The pool otherwise copies what a worker writes, and uses the copy. It does not read the bytes of a leased
//! frame, so that a worker that changes them corrupts only its own replies. Leases are therefore used only on
//! connections that one worker alone sends on: the only worker, or the worker of a connection under
//! [`Order::Sticky`](towpath_mux::mux::Order::Sticky). A connection moves to another worker only when the
//! previous one holds none of its messages: all replies of the previous worker are complete, and a late write
//! by it changes only bytes of these replies. Where bytes must be read (TLS, no zero-copy), they are copied.
//!
//! A frame is leased from [`TxLeases::lend`] until its last owner (the multiplexor, the sender, a quarantine)
//! drops it. [`TxLeases::give_back`] then releases it to the client. If the client has gone before, the
//! memory stays mapped until the last lease is dropped, and no process writes it.
//!
//! Bounds: a connection may lease a quarter of a worker's frames, all connections together half of them.
//! Further replies are copied, so that no peer can block a worker.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use towpath_mux::mux::{self, psock};
use towpath_ring::reaper::{PeerKey, Reaped, Reaper};
use towpath_ring::{Channel, TxFrame};
use towpath_send::{Lent, Region};

/// The leases of one worker.
#[derive(Debug)]
pub(super) struct TxLeases {
    region: SharedRegion,
    back: ReturnQueue,
    /// Leased bytes per connection, and in total.
    lent: HashMap<psock::Id, usize>,
    all: usize,
}

/// The mapped memory. A helper thread unmaps it: that takes long for a large region.
type SharedRegion = Arc<Reaped<Region>>;

/// Frames whose leases were dropped.
type ReturnQueue = Arc<Mutex<Vec<(psock::Id, TxFrame)>>>;

/// A leased frame.
#[derive(Debug)]
pub(super) struct TxLease {
    region: SharedRegion,
    span: Range<usize>,
    /// `None` after the release.
    frame: Option<(psock::Id, TxFrame)>,
    back: ReturnQueue,
}

/// The unsent part of a frame.
#[derive(Debug)]
pub(super) struct Rest {
    tx_lease: Arc<TxLease>,
    sent: usize,
}

impl TxLeases {
    /// Maps the memory of the channel's client. `None` if that fails.
    pub(super) fn of(channel: &Channel, peer: PeerKey) -> Option<Self> {
        let (fd, len) = channel.tx_area().ok()?;
        let region = Region::map(&fd, len).inspect_err(|error| {
            tracing::warn!("cannot map a worker's TX memory, so its replies are copied: {error}")
        });
        let region = Arc::new(Reaper::shared().wrap(peer, region.ok()?));
        Some(Self { region, back: ReturnQueue::default(), lent: HashMap::new(), all: 0 })
    }

    /// Returns true if `bytes` more may be leased for this connection.
    pub(super) fn has_room(&self, psock: psock::Id, bytes: usize) -> bool {
        let of_it = self.lent.get(&psock).copied().unwrap_or(0);
        of_it + bytes <= self.region.len() / 4 && self.all + bytes <= self.region.len() / 2
    }

    /// Leases a frame.
    pub(super) fn lend(&mut self, psock: psock::Id, frame: TxFrame) -> Arc<TxLease> {
        let span = frame.span();
        *self.lent.entry(psock).or_default() += span.len();
        self.all += span.len();
        let (region, back) = (self.region.clone(), self.back.clone());
        Arc::new(TxLease { region, span, frame: Some((psock, frame)), back })
    }

    /// Returns true if leases were dropped.
    pub(super) fn has_back(&self) -> bool {
        self.all > 0 && !self.back.lock().unwrap_or_else(PoisonError::into_inner).is_empty()
    }

    /// Releases frames whose leases were dropped. Returns true if there were any.
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
    /// The bytes after the first `sent`.
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
