//! What commands that read captures share: each packet with its time, and what of the captures could not be used.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use towpath::link::link;
use towpath::timeline::{JUDGES, Timeline};
use towpath_gate::Time;
use towpath_gate::packet::Link;
use towpath_port::{Burst, Error, Frame, LinkType, Port, Received, pcap};

use crate::command::warn;

/// Frames of one burst.
pub(crate) const BURST: usize = 64;

/// Captures that are read one behind the other.
#[derive(Default)]
pub(crate) struct Captured {
    timeline: Timeline,
    stamps: Vec<u64>,
    times: Vec<Time>,
    /// Frames whose link header nobody reads.
    unread: BTreeMap<LinkType, u64>,
    warnings: Vec<String>,
}

impl Captured {
    /// The next capture begins.
    pub(crate) fn begin(&mut self) {
        self.timeline.begin();
    }

    /// The time of each packet of a burst, for states. `next` is the burst behind it, empty at the end; none where that is not
    /// known yet.
    pub(crate) fn times(&mut self, burst: &Burst, next: Option<&Burst>) -> &[Time] {
        let Self { timeline, stamps, times, unread, .. } = self;
        stamps.clear();
        for frame in burst.iter() {
            stamps.push(frame.time_ns);
            if link(frame.link) == Link::Other {
                *unread.entry(frame.link).or_default() += 1;
            }
        }
        stamps.extend(next.into_iter().flat_map(Burst::iter).take(JUDGES).map(|frame| frame.time_ns));
        times.clear();
        times.extend((0..burst.len()).map(|at| timeline.at(stamps[at], &stamps[at + 1..], next.is_none())));
        times
    }

    /// The capture has been read, as far as anybody wanted it.
    pub(crate) fn end(&mut self, reader: &pcap::Reader) {
        self.warnings.extend(reader.warning().map(pcap::Warning::to_string));
        self.warnings.extend(self.timeline.trouble().told(reader.name()));
    }

    /// Reads a capture: each frame, with its time. What `each` breaks with, if it does.
    pub(crate) fn read<B>(
        &mut self,
        path: &Path,
        mut each: impl FnMut(&Frame<'_>, Time) -> ControlFlow<B>,
    ) -> Result<Option<B>, Error> {
        let mut reader = pcap::Reader::open(path)?;
        let [mut burst, mut next] = [Burst::new(BURST), Burst::new(BURST)];
        let mut broken = None;
        self.begin();
        let mut received = reader.receive(&mut burst)?;
        while received == Received::Frames && broken.is_none() {
            // If this fails, it does so behind the packets that were read before.
            let behind = reader.receive(&mut next);
            let times = self.times(&burst, Some(&next));
            broken = burst.iter().zip(times).find_map(|(frame, time)| each(&frame, *time).break_value());
            received = behind?;
            std::mem::swap(&mut burst, &mut next);
        }
        self.end(&reader);
        Ok(broken)
    }

    /// Tells what could not be used; `unread` says what became of packets that begin as nobody knows.
    pub(crate) fn tell(&self, unread: &str) {
        self.warnings.iter().for_each(warn);
        for (link, frames) in &self.unread {
            let (packets, begin) = if *frames == 1 { ("packet", "begins") } else { ("packets", "begin") };
            warn(format_args!(
                "{frames} {packets} {begin} with a link header that is not read, {link}: {unread}"
            ));
        }
    }
}

/// What packets are to rules that begin with a link header that is not read.
pub(crate) const NOT_IP: &str = "to the rules that is not IP";
