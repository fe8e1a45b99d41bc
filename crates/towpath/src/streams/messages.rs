//! Messages in the streams of a capture: one assembler per direction.

use std::collections::HashMap;

use towpath_mux::Time;
use towpath_mux::assembler::{self, Assembler, Event, Failure, Gap};
use towpath_mux::framing::{Framing, State};

use super::{Chunk, Ending, Way};

/// Maximum number of bytes in all assemblers. A direction that exceeds it is abandoned.
const MOST_HELD: usize = 256 << 20;

/// An event of a direction.
#[derive(Debug, PartialEq, Eq)]
pub enum Found<'a> {
    /// A whole message.
    Message {
        /// Position from the start of the direction, in bytes.
        offset: u64,
        /// The message.
        bytes: &'a [u8],
    },
    /// A gap in the capture damaged a message of known length. The next one follows it.
    Lost {
        /// Position of the message.
        offset: u64,
        /// Its length in bytes.
        length: usize,
        /// Number of bytes that the capture does not have.
        missing: u64,
    },
    /// A gap hides the start of the next message. The last event.
    Hole {
        /// Position of the gap, or of the message that it damaged.
        offset: u64,
        /// Number of bytes that the capture does not have.
        missing: u64,
    },
    /// The framing refuses the bytes. The last event.
    Failed(Failure),
    /// Another protocol begins ([`Step::GiveBack`](towpath_mux::framing::Step::GiveBack)). The last event.
    GivenBack {
        /// Position.
        offset: u64,
        /// The bytes there, as far as the current segment has them.
        bytes: &'a [u8],
    },
    /// All directions together hold too many bytes. The last event.
    GivenUp {
        /// Position of the incomplete message.
        offset: u64,
    },
    /// The direction has ended.
    End {
        /// Position after the last message.
        offset: u64,
        /// Number of bytes of an incomplete message.
        inside: usize,
        /// Its length, if known.
        length: Option<usize>,
        /// Why it ended.
        ending: Ending,
    },
}

/// Frames the directions of streams.
#[derive(Debug)]
pub struct Messages {
    framings: [Framing; 2],
    /// `None` after the last event of a direction.
    ways: HashMap<(u64, u8), Option<Assembler>>,
    held: usize,
}

impl Messages {
    /// Frames the client's bytes with `request` and the server's with `reply`.
    ///
    /// The client sent the first packet of a stream. If the handshake was not captured, it has the higher
    /// port.
    pub fn new(request: Framing, reply: Framing) -> Self {
        Self { framings: [request, reply], ways: HashMap::new(), held: 0 }
    }

    /// Takes the next part of a direction and passes events to `out`.
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
            // The framing limits the length of a message.
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

/// Returns true after the last event.
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
    // The framing of a capture has no timeouts.
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

    /// The framing's limit applies, also above the assembler's default.
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
