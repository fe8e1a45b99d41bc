//! The engine of a replay, and its surroundings: the captures that it writes.
//!
//! The program `towpath` is optimized for size. What it calls for each burst is therefore compiled here, as in `live.rs`.

use std::time::Instant;

use towpath_gate::{PortId, Walker};
use towpath_port::pcap::{Resolution, Writer};
use towpath_port::{Burst, Error, Frame};
use towpath_wire::Time;

use crate::egress::QueryServer;
use crate::engine::Engine;
use crate::introspect::Introspect;
use crate::meta::Meta;
use crate::packet_io::PacketIo;
use crate::queue::{Policy, Queue, RingChannel};
use crate::topology::Topology;

/// An engine that replays captures, with inspectors on rings.
pub type ReplayEngine = Engine<ReplayIo>;

/// After an interruption, each reading of the clock advances it by `HOURS` (nanoseconds, longer than any deadline), by `FAR` in total
/// at most. All pending inspector deadlines then expire at once.
const HOURS: u64 = 1 << 44;
const FAR: u64 = 1 << 62;

/// The surroundings of a replay's engine: clock, output captures, queries.
pub struct ReplayIo {
    start: Instant,
    out: Option<Writer>,
    replies: Option<Writer>,
    /// The first error of writing `replies`, or of closing an output.
    failed: Option<Error>,
    queries: Box<dyn QueryServer>,
    is_interrupted: Box<dyn Fn() -> bool>,
    /// Nanoseconds that the clock has been advanced since the interruption.
    hurry: u64,
}

impl ReplayIo {
    /// Creates the surroundings. Packets that pass are written to `out`, and answers to rejected packets to `replies`.
    ///
    /// When `is_interrupted` returns true, the outputs are closed, and packets that inspectors hold are decided by default.
    pub fn new(
        out: Option<Writer>,
        replies: Option<Writer>,
        queries: Box<dyn QueryServer>,
        is_interrupted: Box<dyn Fn() -> bool>,
    ) -> Self {
        Self { start: Instant::now(), out, replies, failed: None, queries, is_interrupted, hurry: 0 }
    }

    /// Sets the resolution of the outputs' time stamps.
    pub fn set_resolution(&mut self, resolution: Resolution) {
        [&mut self.out, &mut self.replies]
            .into_iter()
            .flatten()
            .for_each(|file| file.set_resolution(resolution));
    }

    /// Finishes the outputs early; later packets are not written.
    pub fn close(&mut self) {
        for output in [self.out.take(), self.replies.take()].into_iter().flatten() {
            if let Err(error) = output.finish() {
                self.failed.get_or_insert(error);
            }
        }
    }

    /// Finishes the outputs. One without packets is still a valid capture.
    ///
    /// # Errors
    ///
    /// Returns the first error of writing an output.
    pub fn finish(mut self) -> Result<(), Error> {
        self.close();
        self.failed.map_or(Ok(()), Err)
    }
}

impl PacketIo for ReplayIo {
    type Channel = RingChannel;
    type Error = Error;

    fn now(&mut self) -> u64 {
        let now = u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        if !(self.is_interrupted)() {
            return now;
        }
        // Verdicts from here on result from expired deadlines and must not appear in the outputs.
        self.close();
        self.hurry = (self.hurry + HOURS).min(FAR);
        now.saturating_add(self.hurry)
    }

    fn send(&mut self, frame: &[u8], meta: &Meta) -> Result<(), Error> {
        let Some(out) = &mut self.out else { return Ok(()) };
        out.write(captured(frame, meta), None)
    }

    fn reply(&mut self, _port: PortId, frame: &[u8], meta: &Meta) -> bool {
        let Some(replies) = &mut self.replies else { return false };
        match replies.write(captured(frame, meta), None) {
            Ok(()) => true,
            Err(error) => {
                self.failed.get_or_insert(error);
                false
            }
        }
    }

    fn serve_queries(&mut self, engine: &mut dyn Introspect) -> u64 {
        self.queries.serve(engine)
    }
}

/// A frame for writing to a capture.
fn captured<'a>(bytes: &'a [u8], meta: &Meta) -> Frame<'a> {
    Frame {
        bytes,
        wire_len: meta.wire_len,
        time_ns: meta.time,
        link: meta.link,
        interface: meta.interface,
        meta: Default::default(),
    }
}

impl ReplayEngine {
    /// Creates the engine ([`new`](Self::new)).
    pub fn replay(
        io: ReplayIo,
        walker: Walker,
        topology: Topology,
        queues: Vec<Queue<RingChannel>>,
        unserved: Policy,
    ) -> Self {
        Self::new(io, walker, topology, queues, unserved)
    }

    /// Processes a burst of a capture, with the time of each packet ([`set_times`](Self::set_times)).
    ///
    /// # Errors
    ///
    /// Returns an error of writing an output.
    pub fn process_captured(&mut self, burst: &Burst, times: &[Time]) -> Result<(), Error> {
        self.set_times(times);
        self.process_burst(burst.iter().map(|frame| (frame.bytes, Meta::received(&frame, frame.interface))))
    }

    /// Collects verdicts and serves queries while no packet arrives ([`idle`](Self::idle)).
    ///
    /// # Errors
    ///
    /// Returns an error of writing an output.
    pub fn process_verdicts(&mut self) -> Result<(), Error> {
        self.idle()
    }

    /// Waits until every packet is decided ([`finish`](Self::finish)).
    ///
    /// # Errors
    ///
    /// Returns an error of writing an output.
    pub fn process_rest(&mut self) -> Result<(), Error> {
        self.finish()
    }
}
