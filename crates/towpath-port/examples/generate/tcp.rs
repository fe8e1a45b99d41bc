//! A TCP connection: the segments of both ends.

use etherparse::{TcpHeader, TcpOptionElement};

use super::frames::Path;

/// The end that opens the connection.
pub(crate) const CLIENT: usize = 0;
/// The other end.
pub(crate) const SERVER: usize = 1;

/// A connection, and what each end sends next.
#[derive(Debug)]
pub(crate) struct Connection {
    forward: Path,
    ports: (u16, u16),
    /// Next sequence number of the client and of the server.
    seq: [u32; 2],
}

impl Connection {
    pub(crate) fn new(forward: Path, ports: (u16, u16), seq: [u32; 2]) -> Self {
        Self { forward, ports, seq }
    }

    /// The most that one segment carries: a packet of 1,500 bytes.
    pub(crate) fn mss(&self) -> usize {
        if self.forward.from.ip.is_ipv4() { 1_460 } else { 1_440 }
    }

    /// The frame of the next segment of one side. `flags` are letters of `SAFPR`; `id` is the IPv4 identification.
    pub(crate) fn segment(&mut self, id: u16, side: usize, flags: &str, payload: &[u8]) -> Vec<u8> {
        let (path, ports) = match side {
            CLIENT => (self.forward, self.ports),
            _ => (self.forward.reverse(), (self.ports.1, self.ports.0)),
        };
        let mut header = TcpHeader::new(ports.0, ports.1, self.seq[side], 64_240);
        header.syn = flags.contains('S');
        header.ack = flags.contains('A');
        header.fin = flags.contains('F');
        header.psh = flags.contains('P');
        header.rst = flags.contains('R');
        if header.ack {
            header.acknowledgment_number = self.seq[1 - side];
        }
        if header.syn {
            let options = [
                TcpOptionElement::MaximumSegmentSize(self.mss() as u16),
                TcpOptionElement::SelectiveAcknowledgementPermitted,
                TcpOptionElement::Noop,
                TcpOptionElement::WindowScale(7),
            ];
            header.set_options(&options).expect("options that fit");
        }
        let taken = payload.len() as u32 + u32::from(header.syn) + u32::from(header.fin);
        self.seq[side] = self.seq[side].wrapping_add(taken);
        path.tcp(id, header, payload)
    }
}
