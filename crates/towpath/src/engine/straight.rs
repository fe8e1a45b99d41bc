//! The straight way of a live burst: packets whose states let them pass leave with no rule tried.
//!
//! What: for [`BURST`] packets at a time the states are fetched together, so that their cache misses overlap
//! ([`Walker::fetch`](towpath_gate::gate::Walker::fetch)); then each packet in its turn passes by its state, or takes the path of
//! `handle_packet`.
//!
//! Invariant: what passes here would have passed there, and left in the same order: nothing is in the window, nobody follows
//! packets, and the packet's interface has a way out without a second walk.

use towpath_gate::gate::BURST;
use towpath_gate::wire;

use super::{Edge, Engine, Meta};

impl<E: Edge> Engine<E> {
    /// Takes packets, with their places in the burst.
    pub(super) fn handle_packets<'a>(
        &mut self,
        mut packets: impl Iterator<Item = (usize, (&'a [u8], Meta))> + Clone,
    ) -> Result<(), E::Error> {
        if !self.live {
            return packets.try_for_each(|(index, (frame, meta))| self.handle_packet(index, frame, meta));
        }
        loop {
            let some = packets.clone().take(BURST);
            let straight = self.is_straight();
            if straight {
                // Nearly always of one interface: those of another walk.
                let interface = some.clone().next().map(|(_, (_, meta))| meta.interface);
                let recv = interface.and_then(|interface| self.arrivals.untagged(interface));
                let plain = |(_, (frame, meta)): (_, (&[u8], Meta))| {
                    let same = Some(meta.interface) == interface;
                    if same { wire::plain(meta.link, frame, meta.wire_len) } else { None }
                };
                self.walker.fetch(recv, some.clone().map(plain));
            }
            let mut count = 0;
            for (index, (frame, meta)) in some {
                if self.edge.takes(frame, &meta)
                    && !(straight && self.is_straight() && self.pass_straight(count, index, frame, &meta)?)
                {
                    self.handle_packet(index, frame, meta)?;
                }
                count += 1;
            }
            if count < BURST || packets.nth(BURST - 1).is_none() {
                return Ok(());
            }
        }
    }

    fn is_straight(&self) -> bool {
        self.window.is_empty() && self.traces.is_empty()
    }

    /// Lets the packet pass that was fetched `at`, if its state says so and no more is to be done.
    #[inline]
    fn pass_straight(
        &mut self,
        at: usize,
        index: usize,
        frame: &[u8],
        meta: &Meta,
    ) -> Result<bool, E::Error> {
        let Some(out) = self.arrivals.straight(meta.interface) else { return Ok(false) };
        if self.walker.pass(at, self.clock).is_none() {
            return Ok(false);
        }
        self.totals.packets += 1;
        self.totals.bytes += u64::from(meta.wire_len);
        self.totals.passed += 1;
        self.started.get_or_insert(self.clock);
        self.edge.pass(index, frame, &Meta { out, ..*meta })?;
        Ok(true)
    }
}
