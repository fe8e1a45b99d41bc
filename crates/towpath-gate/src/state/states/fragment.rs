//! Later fragments and their states.

use towpath_wire::Time;

use super::{AddressFamily, States};
use crate::state::table::key::{Key, Side, with_key};
use crate::state::{Ends, Flow, Hit, Lookup};

impl States {
    /// Records that the first fragment of the datagram `id` of this flow had the flow's ports.
    pub fn note_fragment(&mut self, flow: &Flow, id: u32, now: Time) {
        self.shared.fragments.note(self.datagram(flow, id), (flow.src_port, flow.dst_port), now);
    }

    /// Finds the live state of a later fragment of the datagram `id`, if its first fragment was recorded. The state counts the
    /// fragment. It is not refreshed: the first fragment did that.
    pub fn lookup_fragment(
        &mut self,
        flow: &Flow,
        id: u32,
        lookup: Lookup,
        bytes: u32,
        now: Time,
    ) -> Option<Hit> {
        self.begin(now);
        let (src_port, dst_port) = self.shared.fragments.find(self.datagram(flow, id), now)?;
        let flow = &self.key_flow_owned(Flow { src_port, dst_port, ..*flow });
        with_key!(flow, |key, side| self.count_fragment((&key, side), lookup, bytes, now))
    }

    fn count_fragment<const N: usize>(
        &self,
        (key, side): (&Key<N>, Side),
        lookup: Lookup,
        bytes: u32,
        now: Time,
    ) -> Option<Hit>
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let index = &Key::<N>::local(self).index;
        let slot = family.find(index, index.probe(key), key, lookup, self.live(now))?;
        let entry = family.entry(slot);
        let header = entry.header();
        let direction = side.direction(header.forward());
        self.count_packet(entry, slot, direction, bytes);
        Some(Hit { rule: header.rule(), direction })
    }

    /// The hash that identifies a datagram: of everything but its ports.
    pub(super) fn datagram(&self, flow: &Flow, id: u32) -> u64 {
        let ([a, b, c, d], zone) = match flow.ends {
            Ends::V4(src, dst) => ([0, src.to_bits().into(), 0, dst.to_bits().into()], 0),
            Ends::V6(src, dst, zone) => {
                let halves = |ip: std::net::Ipv6Addr| [(ip.to_bits() >> 64) as u64, ip.to_bits() as u64];
                let ([a, b], [c, d]) = (halves(src), halves(dst));
                ([a, b, c, d], zone)
            }
        };
        let rest = u64::from(id) << 32 | u64::from(flow.zone) << 8 | u64::from(flow.proto);
        self.shared.secret.hash(&[a, b, c, d, rest, u64::from(zone)])
    }
}
