//! The channel to one inspector.

use std::convert::Infallible;

use rustix::fd::{BorrowedFd, OwnedFd};
use towpath_ring::{
    ChannelStats, Credentials, Decision, FrameOut, Geometry, Header, Loss, Meta, ReserveError, Seq,
};

use crate::drop_reason::DropReason;

/// A channel to one inspector. Sequence numbers increase.
pub trait Channel {
    /// Publishes a frame.
    ///
    /// # Errors
    ///
    /// The ring has no room.
    fn publish(&mut self, frame: &[u8], meta: &Meta) -> Result<Seq, ReserveError>;

    /// Counts a frame that the inspector does not get, and tells the inspector with the next gap record.
    fn lose(&mut self, loss: Loss);

    /// Wakes the inspector if it sleeps and frames were published.
    fn kick(&mut self);

    /// Passes each decided frame to `each`, once: the inspector's decision, or why it did not decide
    /// ([`Overdue`](DropReason::Overdue), [`InvalidVerdict`](DropReason::InvalidVerdict),
    /// [`InspectorDied`](DropReason::InspectorDied)). Returns the number of frames.
    fn poll(&mut self, now: u64, each: &mut dyn FnMut(Seq, Result<Decision<'_>, DropReason>)) -> usize;

    /// Returns true if the inspector may send packets of its own.
    fn may_inject(&self) -> bool {
        false
    }

    /// Passes each packet that the inspector sends to `each`, a bounded number.
    fn poll_injected(&mut self, each: &mut dyn FnMut(&Header, &[u8])) {
        let _ = each;
    }

    /// Sleeps until [`poll`](Self::poll) may have something, a frame is overdue, or the time is `until`. May return early.
    fn wait(&mut self, now: u64, until: u64);

    /// Asks the inspector to signal [`descriptor`](Self::descriptor) with its next verdict. Returns false if
    /// [`poll`](Self::poll) has something already.
    fn arm(&mut self) -> bool {
        true
    }

    /// Ends [`arm`](Self::arm), and checks whether the inspector is alive.
    fn disarm(&mut self) {}

    /// Ends [`arm`](Self::arm) if [`descriptor`](Self::descriptor) was not ready: makes no system call.
    fn disarm_unready(&mut self) {
        self.disarm();
    }

    /// Returns true if the inspector last ran on the CPU of the calling thread: it decides nothing while this thread runs.
    fn shares_cpu(&self) -> bool {
        false
    }

    /// The descriptor to poll for reading while armed.
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// When the oldest frame is overdue, in nanoseconds of the wall clock.
    fn deadline(&self) -> Option<u64> {
        None
    }

    /// The number of overdue frames that the inspector has not returned.
    fn unreturned(&self) -> u32;

    /// The number of frames that the inspector has returned so far, in time or too late.
    fn returned(&self) -> u64 {
        0
    }

    /// Returns true if the inspector has not been told of a loss ([`lose`](Self::lose)) that [`kick`](Self::kick) may tell.
    fn has_losses(&self) -> bool {
        false
    }

    /// Returns true if the inspector is known to be dead. It gets no more frames.
    fn is_dead(&self) -> bool;

    /// The peer and the ring. `None` for a channel without them.
    fn about(&self) -> Option<About> {
        None
    }

    /// The frames of the ring that are not free.
    fn frames(&self) -> Vec<FrameOut> {
        Vec::new()
    }

    /// Returns true while the inspector has a frame, overdue ones included.
    fn has_frames(&self) -> bool {
        !self.frames().is_empty()
    }

    /// Detaches the inspector.
    fn detach(&mut self) {}

    /// Gives up an inspector that has no frame, for another engine ([`towpath_ring::Channel::hand_over`]).
    fn hand_over(&mut self) -> Option<OwnedFd> {
        None
    }

    /// How the inspector was detached. `None` until [`poll`](Self::poll) has returned every frame that it had.
    fn detached(&mut self) -> Option<Detached>;
}

/// The channel type of an engine without inspectors.
impl Channel for Infallible {
    fn publish(&mut self, _frame: &[u8], _meta: &Meta) -> Result<Seq, ReserveError> {
        match *self {}
    }

    fn lose(&mut self, _loss: Loss) {
        match *self {}
    }

    fn kick(&mut self) {
        match *self {}
    }

    fn poll(&mut self, _now: u64, _each: &mut dyn FnMut(Seq, Result<Decision<'_>, DropReason>)) -> usize {
        match *self {}
    }

    fn wait(&mut self, _now: u64, _until: u64) {
        match *self {}
    }

    fn unreturned(&self) -> u32 {
        match *self {}
    }

    fn returned(&self) -> u64 {
        match *self {}
    }

    fn is_dead(&self) -> bool {
        match *self {}
    }

    fn detached(&mut self) -> Option<Detached> {
        match *self {}
    }
}

/// The peer of a channel, and the channel's ring.
#[derive(Clone, Debug)]
pub struct About {
    /// The peer's process and user.
    pub peer: Credentials,
    /// The peer's name for itself.
    pub name: String,
    /// The ring towards the peer.
    pub geometry: Geometry,
    /// The channel's counters.
    pub stats: ChannelStats,
}

/// How an inspector was detached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detached {
    /// The reason, as text.
    pub why: String,
    /// The inspector violated the protocol: its verdicts for flows no longer count.
    pub distrusted: bool,
}
