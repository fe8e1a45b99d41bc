//! The messages in the streams of a capture: an assembler for each direction.

use std::collections::HashMap;

use towpath_mux::Time;
use towpath_mux::assembler::{self, Assembler, Event, Failure, Gap};
use towpath_mux::framing::{Framing, State};

use super::{Chunk, Ending, Way};

/// Bytes that all assemblers together may hold; a direction that goes beyond it is given up.
const MOST_HELD: usize = 256 << 20;

/// What a direction gave.
#[derive(Debug, PartialEq, Eq)]
pub enum Found<'a> {
    /// A whole message.
    Message {
        /// Where it starts, in bytes from the direction's first.
        offset: u64,
        /// All of it.
        bytes: &'a [u8],
    },
    /// A hole in the capture took a message of known length; the next one follows it.
    Lost {
        /// Where the message starts.
        offset: u64,
        /// Its length in bytes.
        length: usize,
        /// Bytes that the capture does not have.
        missing: u64,
    },
    /// A hole in the capture hides where the next message starts: nothing comes after it.
    Hole {
        /// Where the hole, or the message that it cuts, starts.
        offset: u64,
        /// Bytes that the capture does not have.
        missing: u64,
    },
    /// The framing refuses the bytes: nothing comes after it.
    Failed(Failure),
    /// The framing gives the connection back: nothing comes after it.
    GivenBack {
        /// From where on.
        offset: u64,
        /// The bytes there, as far as they are in the segment at hand.
        bytes: &'a [u8],
    },
    /// More is held for all directions than is allowed: nothing comes after it.
    GivenUp {
        /// Where the message starts that this direction was waiting for.
        offset: u64,
    },
    /// The direction is over.
    End {
        /// Where its last message ended.
        offset: u64,
        /// Bytes of a message that was not whole.
        inside: usize,
        /// The length that this one had announced, if that was known.
        length: Option<usize>,
        /// Why it is over.
        ending: Ending,
    },
}

/// Frames the directions of streams.
#[derive(Debug)]
pub struct Messages {
    framings: [Framing; 2],
    /// `None` once nothing more comes out of a direction.
    ways: HashMap<(u64, u8), Option<Assembler>>,
    held: usize,
}

impl Messages {
    /// Frames what clients send with `request`, what servers send with `reply`.
    ///
    /// The client is who sent the first packet of a stream; when the handshake was not captured, who has the higher port.
    pub fn new(request: Framing, reply: Framing) -> Self {
        Self { framings: [request, reply], ways: HashMap::new(), held: 0 }
    }

    /// Takes what comes next in a direction; what is found goes to `out` in order.
    pub fn handle_chunk(&mut self, way: &Way, chunk: Chunk<'_>, out: &mut impl FnMut(&Way, Found<'_>)) {
        let key = (way.stream, way.direction);
        if let Chunk::End(_) = chunk
            && !self.ways.contains_key(&key)
        {
            return;
        }
        let framings = &self.framings;
        let assembler = self.ways.entry(key).or_insert_with(|| {
            let framing = framings[usize::from(!way.is_client())].clone();
            let state = State { midstream: way.midstream, ..State::default() };
            // How long a message may be is the framing's to say.
            let limits = assembler::Limits { message: MOST_HELD, ..assembler::Limits::default() };
            Some(Assembler::with_state(framing, limits, state))
        });
        let Some(open) = assembler else { return };
        let before = open.held();
        let over = match chunk {
            Chunk::Data(bytes) => feed(open, bytes, &mut |found| out(way, found)),
            Chunk::Gap(missing) => {
                let offset = open.offset();
                match open.handle_gap(missing) {
                    Gap::Lost { offset, length } => out(way, Found::Lost { offset, length, missing }),
                    Gap::Over => out(way, Found::Hole { offset, missing }),
                }
                open.is_over()
            }
            Chunk::End(ending) => {
                open.handle_end();
                drain(open, ending, &mut |found| out(way, found));
                true
            }
        };
        let after = if over { 0 } else { open.held() };
        self.held = self.held - before + after;
        if over {
            *assembler = None;
        } else if self.held > MOST_HELD {
            out(way, Found::GivenUp { offset: open.offset() });
            self.held -= after;
            *assembler = None;
        }
        if let Chunk::End(_) = chunk {
            self.ways.remove(&key);
        }
    }
}

/// True when nothing more comes.
fn feed(assembler: &mut Assembler, mut bytes: &[u8], out: &mut impl FnMut(Found<'_>)) -> bool {
    while !bytes.is_empty() {
        let took = assembler.handle_bytes(bytes);
        bytes = &bytes[took..];
        drain(assembler, Ending::Capture, out);
        if assembler.is_over() {
            return true;
        }
    }
    false
}

fn drain(assembler: &mut Assembler, ending: Ending, out: &mut impl FnMut(Found<'_>)) {
    // A capture's framing has no deadline.
    while let Some(event) = assembler.poll(Time::default()) {
        out(match event {
            Event::Message(message) => Found::Message { offset: message.offset, bytes: message.bytes },
            Event::GiveBack { offset, bytes } => Found::GivenBack { offset, bytes },
            Event::Failed(failure) => Found::Failed(failure),
            Event::End { offset, inside, length } => Found::End { offset, inside, length, ending },
        });
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    /// A framing's own bound holds, above the assembler's default too.
    #[test]
    fn long_messages() {
        let ends = [SocketAddr::from(([192, 0, 2, 1], 4242)), SocketAddr::from(([192, 0, 2, 2], 80))];
        let way = Way { stream: 0, direction: 0, src: ends[0], dst: ends[1], midstream: false };
        let length = 20usize << 20;
        for (text, expected) in [("length=4 max=20M", length), ("length=4 max=19M", 0), ("length=4", 0)] {
            let framing = Framing::parse(text).expect("a framing");
            let mut messages = Messages::new(framing.clone(), framing);
            let mut found = 0;
            let mut take = |_: &Way, what: Found<'_>| match what {
                Found::Message { bytes, .. } => found += bytes.len(),
                Found::Failed(failure) => assert!(failure.to_string().contains("EMSGSIZE"), "{failure}"),
                other => panic!("{other:?}"),
            };
            messages.handle_chunk(&way, Chunk::Data(&(length as u32).to_be_bytes()), &mut take);
            messages.handle_chunk(&way, Chunk::Data(&vec![0; length - 4]), &mut take);
            assert_eq!(found, expected, "{text}");
        }
    }
}
