//! The part of a state that follows an SCTP association, with `dyn_sctp` on, and the lifetime that a packet gives it.
//!
//! The first chunk of a packet determines what it does to the association: chunks that open and close it come alone
//! or first (RFC 9260, 5.1 and 6.10). Verification tags and checksums are not checked. As with a TCP reset in ipfw's
//! tracking, a sender that forges addresses and ports can end the state, but not the association.

use crate::state::Direction;

/// Chunk types, RFC 9260 section 3.2.
const INIT: u8 = 1;
const ABORT: u8 = 6;
const SHUTDOWN: u8 = 7;
const SHUTDOWN_ACK: u8 = 8;
const COOKIE_ECHO: u8 = 10;
const COOKIE_ACK: u8 = 11;
const SHUTDOWN_COMPLETE: u8 = 14;

/// The phase of the association.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Its beginning was not seen.
    #[default]
    Unknown,
    /// This side has sent an INIT.
    Opening(Direction),
    /// This side has returned the cookie, which is not acknowledged yet.
    Cookie(Direction),
    /// Both sides agree. This side sent the last packet.
    Established(Direction),
    /// One side is closing it.
    Shutdown,
    /// It is closed.
    Closed,
    /// It was aborted.
    Aborted,
}

/// The lifetime that a packet gives, by ipfw's names for TCP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Life {
    Short,
    Syn,
    Ack,
    Fin,
    Rst,
}

impl Phase {
    /// Every phase, in the order of their numbers.
    const ALL: [Self; 10] = [
        Self::Unknown,
        Self::Opening(Direction::Forward),
        Self::Opening(Direction::Reverse),
        Self::Cookie(Direction::Forward),
        Self::Cookie(Direction::Reverse),
        Self::Established(Direction::Forward),
        Self::Established(Direction::Reverse),
        Self::Shutdown,
        Self::Closed,
        Self::Aborted,
    ];

    /// The phase as a number below 16.
    pub(crate) fn bits(self) -> u64 {
        Self::ALL.iter().position(|&phase| phase == self).unwrap_or(0) as u64
    }

    /// The phase with this number.
    pub(crate) fn from_bits(bits: u64) -> Self {
        Self::ALL.get(bits as usize).copied().unwrap_or_default()
    }

    /// Applies a packet. Returns the lifetime to refresh with, or `None` when the state keeps its expiry.
    pub(crate) fn packet(&mut self, direction: Direction, chunk: Option<u8>) -> Option<Life> {
        let before = *self;
        *self = match (before, chunk) {
            // Whatever came before: the next association often has the same ports.
            (Self::Unknown | Self::Opening(_) | Self::Closed | Self::Aborted, Some(INIT)) => {
                Self::Opening(direction)
            }
            (_, Some(ABORT)) => Self::Aborted,
            // The side that sent the INIT returns the other side's cookie.
            (Self::Opening(side), Some(COOKIE_ECHO)) if side == direction => Self::Cookie(direction),
            (Self::Cookie(side), Some(COOKIE_ACK)) if side != direction => Self::Established(direction),
            (Self::Established(_) | Self::Cookie(_), Some(SHUTDOWN | SHUTDOWN_ACK)) => Self::Shutdown,
            (Self::Shutdown, Some(SHUTDOWN_COMPLETE)) => Self::Closed,
            (Self::Established(_), _) => Self::Established(direction),
            _ => before,
        };
        match *self {
            Self::Unknown => Some(Life::Short),
            Self::Opening(_) | Self::Cookie(_) => Some(Life::Syn),
            // As with TCP, traffic in one direction alone does not keep it alive.
            Self::Established(_) => (*self != before).then_some(Life::Ack),
            // The three packets of the shutdown are repeated until they are answered (RFC 9260, 9.2).
            Self::Shutdown => (before != Self::Shutdown).then_some(Life::Syn),
            Self::Closed => Some(Life::Fin),
            Self::Aborted => Some(Life::Rst),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::Direction::{Forward, Reverse};

    const DATA: u8 = 0;
    const INIT_ACK: u8 = 2;
    const SACK: u8 = 3;

    /// Packets, each with the lifetime that it gives.
    type Story = &'static [(Direction, u8, Option<Life>)];

    const OPEN: Story = &[
        (Forward, INIT, Some(Life::Syn)),
        (Reverse, INIT_ACK, Some(Life::Syn)),
        (Forward, COOKIE_ECHO, Some(Life::Syn)),
        (Reverse, COOKIE_ACK, Some(Life::Ack)),
    ];

    #[test]
    fn stories() {
        let stories: &[(&str, Story)] = &[
            (
                "data",
                &[
                    (Forward, DATA, Some(Life::Ack)),
                    (Forward, DATA, None),
                    (Reverse, SACK, Some(Life::Ack)),
                    (Reverse, INIT, None),
                ],
            ),
            (
                "shut down",
                &[
                    (Forward, SHUTDOWN, Some(Life::Syn)),
                    (Forward, SHUTDOWN, None),
                    (Reverse, SHUTDOWN_ACK, None),
                    (Forward, SHUTDOWN_COMPLETE, Some(Life::Fin)),
                    (Forward, DATA, Some(Life::Fin)),
                    (Reverse, INIT, Some(Life::Syn)),
                ],
            ),
            (
                "aborted",
                &[
                    (Reverse, ABORT, Some(Life::Rst)),
                    (Forward, DATA, Some(Life::Rst)),
                    (Forward, INIT, Some(Life::Syn)),
                ],
            ),
        ];
        for (title, story) in stories {
            let mut phase = Phase::default();
            for (i, &(direction, chunk, life)) in OPEN.iter().chain(*story).enumerate() {
                assert_eq!(phase.packet(direction, Some(chunk)), life, "{title}: packet {i}");
            }
        }
    }

    #[test]
    fn every_phase_has_a_number() {
        for (number, phase) in Phase::ALL.into_iter().enumerate() {
            assert_eq!((phase.bits(), Phase::from_bits(number as u64)), (number as u64, phase));
        }
    }

    #[test]
    fn an_association_without_its_beginning_is_like_other_protocols() {
        let mut phase = Phase::default();
        for (direction, chunk) in [(Forward, Some(DATA)), (Reverse, Some(COOKIE_ACK)), (Forward, None)] {
            assert_eq!(phase.packet(direction, chunk), Some(Life::Short));
        }
    }

    #[test]
    fn only_the_expected_side_advances_the_handshake() {
        let mut phase = Phase::default();
        let story = [(Forward, INIT), (Reverse, COOKIE_ECHO), (Forward, COOKIE_ECHO), (Forward, COOKIE_ACK)];
        for (direction, chunk) in story {
            assert_eq!(phase.packet(direction, Some(chunk)), Some(Life::Syn));
        }
    }
}
