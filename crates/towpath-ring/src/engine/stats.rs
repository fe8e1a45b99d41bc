//! What an engine's end of a channel counts.

use crate::lane::loss_record::Loss;

/// What a channel has done, and what is under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ChannelStats {
    /// Frames published.
    pub published: u64,
    /// Bytes of payload published.
    pub bytes: u64,
    /// Frames that the client decided.
    pub decided: u64,
    /// Of these, by a cumulative verdict.
    pub cumulative: u64,
    /// Frames decided by default because they were overdue.
    pub overdue: u64,
    /// Frames decided by default because the client's answer had no meaning.
    pub invalid: u64,
    /// Frames that came back undecided when the client was gone.
    pub drained: u64,
    /// Frames that are out and undecided now.
    pub out: u32,
    /// Of these, held.
    pub held: u32,
    /// Most frames that were out at a time.
    pub high_water: u32,
    /// Holds beyond the quota, not honoured.
    pub holds_refused: u64,
    /// VerdictReader for frames that had been decided without the client.
    pub late: u64,
    /// Words from the client that have no meaning.
    pub violations: u64,
    /// Messages received from the client, replacements not counted.
    pub messages: u64,
    /// Times that a message found no room.
    pub full: u64,
    /// Messages that travelled to the client in a memory of their own.
    pub oneshots: u64,
    /// Of these, because held frames left no gap that was large enough.
    pub oneshots_held: u64,
    /// Messages and replacements that came from the client in a memory of their own.
    pub oneshots_in: u64,
    /// Frames meant for this client that were lost ([`Channel::lose`](crate::Channel::lose)).
    pub lost: u64,
    /// The same by reason, in the order of [`Loss::ALL`].
    pub lost_by: [u64; Loss::ALL.len()],
    /// LossRecord records published; they count as frames published and, later, as decided.
    pub gaps: u64,
    /// Doorbells rung.
    pub wakeups: u64,
    /// Whether the payload towards the client is in huge pages.
    pub huge_pages: bool,
    /// How far the client says it has read: its own claim.
    pub consumed: u32,
}
