//! What can happen in the world.

/// One operation: what, and two numbers that say at whom and how much. Any values make sense.
pub type Op = [u8; 3];

/// What operations there are; the first byte of an [`Op`] modulo their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Act {
    Attach,
    Arrive,
    Flood,
    Eof,
    Reset,
    Unattach,
    Clone,
    Leave,
    Die,
    Disable,
    Poll,
    Done,
    DoneSilently,
    HandBack,
    Transmit,
    Block,
    WriteFails,
    Pass,
    Send,
    DeadlineDrain,
}

pub(super) const ACTS: [Act; 32] = [
    Act::Attach,
    Act::Arrive,
    Act::Flood,
    Act::Eof,
    Act::Reset,
    Act::Unattach,
    Act::Clone,
    Act::Leave,
    Act::Die,
    Act::Disable,
    Act::Poll,
    Act::Done,
    Act::DoneSilently,
    Act::HandBack,
    Act::Transmit,
    Act::Block,
    Act::WriteFails,
    Act::Pass,
    Act::Send,
    Act::DeadlineDrain,
    // What happens often, oftener.
    Act::Arrive,
    Act::Arrive,
    Act::Flood,
    Act::Poll,
    Act::Poll,
    Act::Poll,
    Act::Done,
    Act::Done,
    Act::Done,
    Act::Transmit,
    Act::Transmit,
    Act::Send,
];
