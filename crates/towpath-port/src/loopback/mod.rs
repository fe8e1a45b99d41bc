use std::collections::VecDeque;

use crate::{
    Burst, Caps, Error, Frame, LinkType, MAX_FRAME, Meta, Port, Received, Segmentation, Stats, TxDrop,
};

/// A port in memory: frames sent to it are received from it, in order.
///
/// It holds up to `capacity` frames. When full, it accepts no further frames.
///
/// ```
/// use towpath_port::{Burst, Frame, LinkType, Loopback, Port, Received};
///
/// let mut port = Loopback::new("lo0", 16);
/// let frame = Frame::new(b"hello", LinkType::RAW);
/// assert_eq!(port.send(&mut std::iter::once(frame))?, 1);
///
/// let mut burst = Burst::new(8);
/// assert_eq!(port.receive(&mut burst)?, Received::Frames);
/// assert_eq!(burst.frame(0).bytes, b"hello");
/// # Ok::<(), towpath_port::Error>(())
/// ```
#[derive(Debug)]
pub struct Loopback {
    name: String,
    queue: VecDeque<Held>,
    /// Buffers of received frames, for reuse.
    spare: Vec<Vec<u8>>,
    capacity: usize,
    closed: bool,
    stats: Stats,
}

#[derive(Debug)]
struct Held {
    bytes: Vec<u8>,
    wire_len: u32,
    time_ns: u64,
    link: LinkType,
    interface: u32,
    meta: Meta,
}

impl Loopback {
    /// A loopback port for up to `capacity` frames.
    pub fn new(name: impl Into<String>, capacity: usize) -> Self {
        Self {
            name: name.into(),
            queue: VecDeque::new(),
            spare: Vec::new(),
            capacity,
            closed: false,
            stats: Stats::default(),
        }
    }

    /// The number of frames sent and not yet received.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Returns true if no frame is waiting.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Closes the port for sending: [`Port::receive`] returns [`Received::End`] once the queue is empty.
    pub fn close(&mut self) {
        self.closed = true;
    }
}

impl Port for Loopback {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> Caps {
        Caps {
            receive: true,
            send: true,
            ends: true,
            timestamps: true,
            checksum: true,
            segmentation: Segmentation::ALL,
            ..Caps::default()
        }
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
        burst.clear();
        while let Some(held) = self.queue.front() {
            if burst.push(held.frame()).is_err() {
                break;
            }
            self.stats.count_received(held.bytes.len());
            self.spare.extend(self.queue.pop_front().map(|held| held.bytes));
        }
        Ok(match (burst.is_empty(), self.closed) {
            (false, _) => Received::Frames,
            (true, false) => Received::Nothing,
            (true, true) => Received::End,
        })
    }

    fn send<'a>(&mut self, frames: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error> {
        let mut sent = 0;
        while !self.closed && self.queue.len() < self.capacity {
            let Some(frame) = frames.next() else { break };
            let len = frame.bytes.len();
            if len > MAX_FRAME {
                return Err(Error::TooLong { name: self.name.clone(), len, max: MAX_FRAME });
            }
            let mut bytes = self.spare.pop().unwrap_or_default();
            bytes.clear();
            bytes.extend_from_slice(frame.bytes);
            let Frame { wire_len, time_ns, link, interface, meta, .. } = frame;
            self.queue.push_back(Held {
                bytes,
                wire_len: wire_len.max(len as u32),
                time_ns,
                link,
                interface,
                meta,
            });
            self.stats.count_sent(len);
            sent += 1;
        }
        Ok(sent)
    }

    /// A full queue takes no more frames; none is dropped.
    fn take_refused(&mut self, _: &mut dyn FnMut(TxDrop, &[u8])) {}

    fn stats(&mut self) -> Stats {
        self.stats
    }
}

impl Held {
    fn frame(&self) -> Frame<'_> {
        let Self { bytes, wire_len, time_ns, link, interface, meta } = self;
        Frame {
            bytes,
            wire_len: *wire_len,
            time_ns: *time_ns,
            link: *link,
            interface: *interface,
            meta: *meta,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn full_takes_no_more_and_leaves_the_rest_with_the_sender() {
        let mut port = Loopback::new("lo0", 2);
        let frame = Frame::new(b"x", LinkType::RAW);
        let mut frames = std::iter::repeat_n(frame, 5);
        assert_eq!(port.send(&mut frames).unwrap(), 2);
        assert_eq!(frames.len(), 3);
        assert_eq!(port.len(), 2);
    }

    #[test]
    fn closed_is_the_end_once_empty() {
        let mut port = Loopback::new("lo0", 2);
        let frame = Frame::new(b"x", LinkType::RAW);
        port.send(&mut std::iter::once(frame)).unwrap();
        port.close();
        let mut burst = Burst::new(4);
        assert_eq!(port.receive(&mut burst).unwrap(), Received::Frames);
        assert_eq!(port.receive(&mut burst).unwrap(), Received::End);
    }
}
