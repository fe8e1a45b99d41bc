//! The straight mode of a live burst: packets whose states let them pass, or send them to an inspector, do so with no rule tried.
//!
//! What: for [`BURST`] packets at a time the states are fetched together, so that their cache misses overlap
//! ([`Walker::prefetch`](towpath_gate::Walker::fetch)); then each packet in its turn goes by its state, or walks. One that passes, while nothing
//! is in the reorder, and whose interface has a mode out without a second walk, is not even looked at; every other one takes the path
//! of `handle_packet`, with the first step of its walk known or not.
//!
//! Invariant: what passes here would have passed there, and left in the same order. Who follows packets sees them walk.

use towpath_gate::{BURST, PortId};
use towpath_wire as wire;

use super::{Engine, Meta, PacketIo};

impl<E: PacketIo> Engine<E> {
    /// Takes packets, with their places in the burst.
    pub(super) fn handle_packets<'a>(
        &mut self,
        mut packets: impl Iterator<Item = (usize, (&'a [u8], Meta))> + Clone,
    ) -> Result<(), E::Error> {
        if !self.live {
            return packets
                .try_for_each(|(index, (frame, meta))| self.handle_packet(None, index, frame, meta));
        }
        loop {
            let some = packets.clone().take(BURST);
            // Where packets wait and none before these went by its state, these will hardly.
            let fetched =
                self.traces.is_empty() && (self.reorder.is_empty() || std::mem::take(&mut self.by_states));
            if fetched {
                // Nearly always of one interface: those of another walk.
                let interface = some.clone().next().map(|(_, (_, meta))| meta.interface);
                let recv = interface.and_then(|interface| self.topology.untagged(interface));
                let plain = |(_, (frame, meta)): (_, (&[u8], Meta))| {
                    let same = Some(meta.interface) == interface;
                    if same { wire::plain(meta.link, frame, meta.wire_len) } else { None }
                };
                self.walker.prefetch(recv, some.clone().map(plain));
            }
            let mut count = 0;
            for (index, (frame, meta)) in some {
                let at = count;
                count += 1;
                if !self.io.takes(frame, &meta) {
                    continue;
                }
                // A packet asks once: where it may pass here, it is asked for by `pass` alone.
                let out =
                    self.topology.straight(meta.interface).filter(|_| fetched && self.reorder.is_empty());
                match out {
                    Some(out) if self.pass_straight((at, out), index, frame, &meta)? => {}
                    _ => self.handle_packet(fetched.then_some(at), index, frame, meta)?,
                }
            }
            if count < BURST || packets.nth(BURST - 1).is_none() {
                return Ok(());
            }
        }
    }

    /// Lets the packet pass by `out` that was fetched `at`, if its state says so and no more is to be done.
    #[inline]
    fn pass_straight(
        &mut self,
        (at, out): (usize, Option<PortId>),
        index: usize,
        frame: &[u8],
        meta: &Meta,
    ) -> Result<bool, E::Error> {
        if self.walker.try_pass(at, self.clock).is_none() {
            return Ok(false);
        }
        self.totals.packets += 1;
        self.totals.bytes += u64::from(meta.wire_len);
        self.totals.passed += 1;
        self.started.get_or_insert(self.clock);
        self.io.pass(index, frame, &Meta { out, ..*meta })?;
        Ok(true)
    }
}
