//! Where the first packet of a state was received. A later evaluation of that packet needs it in addition to the flow
//! ([`Gate::creating_rule`](crate::Gate::creating_rule)).

/// The direction of a state's first packet and the port that received it, in 8 bits.
///
/// Ports are numbered as in [`PortId`](crate::PortId). A state records the first [`Origin::PORTS`] ports; a later port is
/// [`RecordedPort::Unrecorded`].
///
/// ```
/// use towpath_gate::state::{Origin, RecordedPort};
///
/// let origin = Origin::new(true, Some(3));
/// assert_eq!((origin.outgoing(), origin.port()), (Some(true), RecordedPort::Port(3)));
/// let origin = Origin::new(false, Some(Origin::PORTS));
/// assert_eq!((origin.outgoing(), origin.port()), (Some(false), RecordedPort::Unrecorded));
/// assert_eq!(Origin::UNRECORDED.outgoing(), None);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Origin(u8);

/// The port that received the first packet of a state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordedPort {
    /// The state does not record it.
    Unrecorded,
    /// The packet was received on no port.
    None,
    /// The number of the port.
    Port(u16),
}

/// Codes above 0: the direction in the low bit of `code - 1`, and above it no port, a port that is not recorded, or
/// the port's number plus 2.
const NO_PORT: u8 = 0;
const UNRECORDED_PORT: u8 = 1;
const FIRST_PORT: u8 = 2;

impl Origin {
    /// Nothing is recorded.
    pub const UNRECORDED: Self = Self(0);

    /// The number of ports that a state can record.
    pub const PORTS: u16 = 125;

    /// The origin of a packet: `outgoing` if it was about to be transmitted, and the port that received it.
    pub const fn new(outgoing: bool, port: Option<u16>) -> Self {
        let port = match port {
            None => NO_PORT,
            Some(port) if port < Self::PORTS => FIRST_PORT + port as u8,
            Some(_) => UNRECORDED_PORT,
        };
        Self(1 + (port << 1) + outgoing as u8)
    }

    /// As [`Origin::new`], without the port.
    pub const fn without_port(outgoing: bool) -> Self {
        Self(1 + (UNRECORDED_PORT << 1) + outgoing as u8)
    }

    /// Whether the packet was outgoing; `None` if the state does not record it.
    pub const fn outgoing(self) -> Option<bool> {
        match self.0 {
            0 => None,
            code => Some((code - 1) & 1 == 1),
        }
    }

    /// The port that received the packet.
    pub const fn port(self) -> RecordedPort {
        match self.0 {
            0 => RecordedPort::Unrecorded,
            code => match (code - 1) >> 1 {
                NO_PORT => RecordedPort::None,
                UNRECORDED_PORT => RecordedPort::Unrecorded,
                port => RecordedPort::Port((port - FIRST_PORT) as u16),
            },
        }
    }

    pub(crate) const fn to_bits(self) -> u8 {
        self.0
    }

    pub(crate) const fn from_bits(bits: u8) -> Self {
        Self(bits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_origin_reads_back() {
        for outgoing in [false, true] {
            let of = |origin: Origin| (Origin::from_bits(origin.to_bits()).outgoing(), origin.port());
            assert_eq!(of(Origin::new(outgoing, None)), (Some(outgoing), RecordedPort::None));
            assert_eq!(of(Origin::without_port(outgoing)), (Some(outgoing), RecordedPort::Unrecorded));
            for port in 0..Origin::PORTS {
                assert_eq!(of(Origin::new(outgoing, Some(port))), (Some(outgoing), RecordedPort::Port(port)));
            }
            for port in [Origin::PORTS, u16::MAX] {
                assert_eq!(Origin::new(outgoing, Some(port)), Origin::without_port(outgoing));
            }
        }
    }
}
