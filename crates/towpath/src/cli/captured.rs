//! Reading captures, shared by several commands: packets with their times, and warnings about unusable parts of the captures.

use std::collections::BTreeMap;
use std::ops::ControlFlow;
use std::path::Path;

use towpath_engine::capture_clock::{CaptureClock, JUDGES};
use towpath_port::{Burst, Error, Frame, Port, Received, pcap};
use towpath_wire::{LinkType, Time};

use crate::cli::warn;

/// Frames per burst.
pub(crate) const BURST: usize = 64;

/// State across captures that are read one after the other.
#[derive(Default)]
pub(crate) struct Captured {
    clock: CaptureClock,
    stamps: Vec<u64>,
    times: Vec<Time>,
    /// Frames whose link type is not supported, by link type.
    unread: BTreeMap<LinkType, u64>,
    warnings: Vec<String>,
}

impl Captured {
    /// Starts the next capture.
    pub(crate) fn begin(&mut self) {
        self.clock.begin();
    }

    /// Returns the time of each packet of a burst, for state timeouts. `next` is the following burst (empty at the end of the capture), or
    /// `None` if it is not known yet.
    pub(crate) fn times(&mut self, burst: &Burst, next: Option<&Burst>) -> &[Time] {
        let Self { clock, stamps, times, unread, .. } = self;
        stamps.clear();
        for frame in burst.iter() {
            stamps.push(frame.time_ns);
            if !frame.link.is_supported() {
                *unread.entry(frame.link).or_default() += 1;
            }
        }
        stamps.extend(next.into_iter().flat_map(Burst::iter).take(JUDGES).map(|frame| frame.time_ns));
        times.clear();
        times.extend((0..burst.len()).map(|at| clock.at(stamps[at], &stamps[at + 1..], next.is_none())));
        times
    }

    /// Ends a capture; it need not have been read to its end.
    pub(crate) fn end(&mut self, reader: &pcap::Reader) {
        self.warnings.extend(reader.warning().map(pcap::Warning::to_string));
        self.warnings.extend(self.clock.trouble().messages(reader.name()));
    }

    /// Reads a capture and calls `each` with every frame and its time. Returns the break value of `each`, if any.
    pub(crate) fn read<B>(
        &mut self,
        path: &Path,
        each: impl FnMut(&Frame<'_>, Time) -> ControlFlow<B>,
    ) -> Result<Option<B>, Error> {
        let mut reader = pcap::Reader::open(path)?;
        // With a file, the next burst can be read ahead. With a pipe, reading ahead could block.
        let file = reader.progress().total.is_some();
        let broken = self.take(&mut reader, file, each)?;
        self.end(&reader);
        Ok(broken)
    }

    /// Reads all frames of a port. If `ahead` is true, the following burst is read before the current one is processed.
    fn take<B>(
        &mut self,
        port: &mut impl Port,
        ahead: bool,
        mut each: impl FnMut(&Frame<'_>, Time) -> ControlFlow<B>,
    ) -> Result<Option<B>, Error> {
        let [mut burst, mut next] = [Burst::new(BURST), Burst::new(BURST)];
        self.begin();
        let mut received = port.receive(&mut burst)?;
        while received == Received::Frames {
            let behind = ahead.then(|| port.receive(&mut next));
            let times = self.times(&burst, ahead.then_some(&next));
            let broken = burst.iter().zip(times).find_map(|(frame, time)| each(&frame, *time).break_value());
            // After a break, an error in the following burst does not matter.
            if broken.is_some() {
                return Ok(broken);
            }
            received = behind.unwrap_or_else(|| port.receive(&mut next))?;
            std::mem::swap(&mut burst, &mut next);
        }
        Ok(None)
    }

    /// Prints the warnings. `unread` states how packets with an unsupported link type were treated.
    pub(crate) fn tell(&self, unread: &str) {
        self.warnings.iter().for_each(warn);
        for (link, frames) in &self.unread {
            let (packets, begin) = if *frames == 1 { ("packet", "begins") } else { ("packets", "begin") };
            warn(format_args!(
                "{frames} {packets} {begin} with a link header that is not supported, {link}: {unread}"
            ));
        }
    }
}

/// How the rules see packets with an unsupported link type.
pub(crate) const NOT_IP: &str = "to the rules that is not IP";

#[cfg(test)]
mod tests {
    use std::io;

    use towpath_port::{Caps, Stats, TxDrop};

    use super::*;

    /// Returns one packet, and then an error.
    struct Fails(bool);

    impl Port for Fails {
        fn name(&self) -> &str {
            "fails"
        }

        fn caps(&self) -> Caps {
            Caps::default()
        }

        fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
            burst.clear();
            if std::mem::replace(&mut self.0, true) {
                return Err(Error::Io { name: "fails".into(), source: io::ErrorKind::Other.into() });
            }
            burst.push(Frame::new(&[0; 60], LinkType::ETHERNET)).unwrap();
            Ok(Received::Frames)
        }

        fn send<'a>(&mut self, _: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error> {
            Ok(0)
        }

        fn take_refused(&mut self, _: &mut dyn FnMut(TxDrop, &[u8])) {}

        fn stats(&mut self) -> Stats {
            Stats::default()
        }
    }

    #[test]
    fn an_error_behind_the_packet_that_was_wanted_is_nothing() {
        for ahead in [false, true] {
            let taken = Captured::default().take(&mut Fails(false), ahead, |_, _| ControlFlow::Break(7));
            assert_eq!(taken.unwrap(), Some(7), "{ahead}");
            let mut seen = 0;
            let all = Captured::default().take(&mut Fails(false), ahead, |_, _| {
                seen += 1;
                ControlFlow::<()>::Continue(())
            });
            assert!(all.is_err() && seen == 1, "{ahead}: {seen}");
        }
    }
}
