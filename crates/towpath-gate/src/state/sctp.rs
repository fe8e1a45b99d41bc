//! What a state remembers of an SCTP association, with `dyn_sctp` on, and which lifetime a packet gives it.
//!
//! The first chunk of a packet says what it does to the association: those that open and close it come alone or first
//! (RFC 9260, 5.1 and 6.10). Neither verification tags nor checksums are looked at: as with a TCP reset in ipfw's way,
//! whoever can forge the addresses and ports can end the state, not the association.

use crate::state::Direction;

/// Chunk types, RFC 9260 section 3.2.
const INIT: u8 = 1;
const ABORT: u8 = 6;
const SHUTDOWN: u8 = 7;
const SHUTDOWN_ACK: u8 = 8;
const COOKIE_ECHO: u8 = 10;
const COOKIE_ACK: u8 = 11;
const SHUTDOWN_COMPLETE: u8 = 14;

/// How far the association has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Its beginning was not seen.
    #[default]
    Unknown,
    /// An INIT was seen, from this side.
    Opening(Direction),
    /// Its cookie came back from this side, and awaits the acknowledgement.
    Cookie(Direction),
    /// Both sides agree. A packet came from this side last.
    Established(Direction),
    /// One side wants to end it.
    Shutdown,
    /// It has ended.
    Closed,
    /// It was aborted.
    Aborted,
}

/// The lifetime that a packet gives, by the names that ipfw has for TCP.
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

    /// Takes a packet in. The lifetime to refresh with, or `None` when the state keeps the expiry that it has.
    pub(crate) fn packet(&mut self, direction: Direction, chunk: Option<u8>) -> Option<Life> {
        let before = *self;
        *self = match (before, chunk) {
            // Whatever came before; the ports of the next association are often the same.
            (Self::Unknown | Self::Opening(_) | Self::Closed | Self::Aborted, Some(INIT)) => {
                Self::Opening(direction)
            }
            (_, Some(ABORT)) => Self::Aborted,
            // The side that sent the INIT returns the other's cookie.
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
            // As with TCP, traffic in one direction only does not keep it alive.
            Self::Established(_) => (*self != before).then_some(Life::Ack),
            // The three packets of the end are repeated until they are answered (RFC 9260, 9.2).
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
    fn without_its_beginning_it_is_like_any_other_protocol() {
        let mut phase = Phase::default();
        for (direction, chunk) in [(Forward, Some(DATA)), (Reverse, Some(COOKIE_ACK)), (Forward, None)] {
            assert_eq!(phase.packet(direction, chunk), Some(Life::Short));
        }
    }

    #[test]
    fn only_the_right_side_agrees() {
        let mut phase = Phase::default();
        let story = [(Forward, INIT), (Reverse, COOKIE_ECHO), (Forward, COOKIE_ECHO), (Forward, COOKIE_ACK)];
        for (direction, chunk) in story {
            assert_eq!(phase.packet(direction, Some(chunk)), Some(Life::Syn));
        }
    }
}
