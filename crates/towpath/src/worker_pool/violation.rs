//! Violations by worker processes: their reasons, and their counters.
//!
//! Policy: the first violation detaches the process. Nothing that it wrote afterwards is read. Its unanswered messages go
//! to other workers, and the slot is barred before its next process starts (`worker_slot.rs`).

use thiserror::Error;

/// Number of parts without bytes in one answer. Further ones are work without an effect.
pub(super) const EMPTY_PARTS: u16 = 1024;

/// How a worker process exceeded its authority.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Violation {
    /// It answered a message that it does not hold: it had released it, or never received it.
    #[error("it answered a message that it does not hold")]
    Unheld,
    /// It answered a message a second time.
    #[error(
        "it answered a message again; --worker-may push permits it, and parts of one answer are sent as parts"
    )]
    Again,
    /// It sent more answers than there are messages in a frame.
    #[error("it sent more answers than it has messages; --worker-may push permits it")]
    Answers,
    /// It sent too many parts without bytes for one answer.
    #[error("it sent more than {EMPTY_PARTS} parts without bytes for an answer; leave them out")]
    EmptyParts,
    /// It sent a message to a connection that it received no message from, or ended it.
    #[error(
        "it sent a message to a connection that it received no message from; --worker-may push permits it"
    )]
    Connection,
    /// It sent a message without a connection in connected mode.
    #[error("it sent a message without a connection; --worker-may push permits it")]
    Push,
    /// It wrote a frame of a kind that workers do not send, or the end of a connection with a payload.
    #[error("it sent a frame that is neither an answer nor a message nor the end of a connection")]
    Frame,
    /// It broke the ring's protocol.
    #[error("it broke the protocol of the ring")]
    Ring,
}

towpath_metrics::metrics! {
    /// Violations by worker processes. Each of them detaches the process.
    pub struct Violations in "mux" {
        /// Answers to messages that the worker does not hold: released before, or never received.
        pub unheld: counter events as "worker_violations": "Worker processes that were detached for a violation, by reason." (reason = "unheld"),
        /// Further answers to a message that was answered.
        pub again: counter events as "worker_violations" (reason = "again"),
        /// Frames with more answers than messages.
        pub answers: counter events as "worker_violations" (reason = "answers"),
        /// Answers with too many parts without bytes.
        pub empty_parts: counter events as "worker_violations" (reason = "empty_parts"),
        /// Messages to connections that the worker received no message from.
        pub connection: counter events as "worker_violations" (reason = "connection"),
        /// Messages without a connection, in connected mode.
        pub push: counter events as "worker_violations" (reason = "push"),
        /// Frames that are neither an answer, nor a message, nor the end of a connection.
        pub frame: counter events as "worker_violations" (reason = "frame"),
        /// Invalid words in the ring, invalid messages on its socket, and doorbells beyond the budget.
        pub ring: counter events as "worker_violations" (reason = "ring"),
        /// Starts of workers that were delayed because of violations, or because too many processes ended.
        pub barred: counter events as "worker_barred",
    }
}

impl Violations {
    pub(super) const fn count(&mut self, violation: Violation) {
        let counter = match violation {
            Violation::Unheld => &mut self.unheld,
            Violation::Again => &mut self.again,
            Violation::Answers => &mut self.answers,
            Violation::EmptyParts => &mut self.empty_parts,
            Violation::Connection => &mut self.connection,
            Violation::Push => &mut self.push,
            Violation::Frame => &mut self.frame,
            Violation::Ring => &mut self.ring,
        };
        *counter += 1;
    }
}
