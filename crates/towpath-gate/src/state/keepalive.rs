//! Keepalives: TCP segments that both ends of an idle connection must answer.
//!
//! What: a scan checks all states, some in each call, and starts every [`KEEPALIVE_PERIOD`] seconds. A state that has seen
//! both SYNs and expires within [`KEEPALIVE_INTERVAL`] causes one segment to each end whose acknowledgement number is known. The
//! answer refreshes the state as any packet does: a state lives on if both ends answer.
//!
//! Reference: ipfw's `dyn_send_keepalive`. Deviations: ipfw sends none to the end whose acknowledgement was accepted last, so that an end
//! whose peer is gone never learns it. No keepalive is sent for a connection that both sides have closed or one has
//! reset. ipfw may send one during the last second of the state.

use std::net::IpAddr;
use std::time::Duration;

use towpath_wire::{LinkType, Time, checksum};

use super::table::family::Family;
use super::table::key::{FlowKey, Key};
use super::table::live_filter::LiveFilter;
use super::tcp::{ACK, SYN};
use super::{Direction, Ends, Flow, KEEPALIVE_PERIOD};

/// States that expire sooner than this get a keepalive. A hidden constant in ipfw.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);

const TCP: u8 = 6;

/// One keepalive: an ACK without payload, with window 0, whose sequence number is one less than the next one of its sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keepalive {
    /// From one end of the connection to the other.
    pub flow: Flow,
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number.
    pub ack: u32,
}

impl Keepalive {
    /// Replaces the contents of `out` with the IP packet: 40 bytes for IPv4, 60 for IPv6.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.clear();
        match self.flow.ends {
            Ends::V4(src, dst) => {
                // IPTOS_LOWDELAY and Don't Fragment, as ipfw sets them.
                out.extend([0x45, 0x10, 0, 40, 0, 0, 0x40, 0, 64, TCP, 0, 0]);
                out.extend(src.octets().iter().chain(&dst.octets()));
            }
            Ends::V6(src, dst, _) => {
                out.extend([0x60, 0, 0, 0, 0, 20, TCP, 64]);
                out.extend(src.octets().iter().chain(&dst.octets()));
            }
        }
        out.extend(self.flow.src_port.to_be_bytes());
        out.extend(self.flow.dst_port.to_be_bytes());
        out.extend(self.seq.to_be_bytes());
        out.extend(self.ack.to_be_bytes());
        out.extend([0x50, ACK, 0, 0, 0, 0, 0, 0]);
        let len = out.len() as u32;
        let filled = checksum::fill(LinkType::RAW, out, len);
        debug_assert!(filled, "the packet is complete");
    }

    /// The destination address.
    pub fn to(&self) -> IpAddr {
        self.flow.ends.addresses().1
    }
}

/// The address families in the order of a scan.
const FAMILIES: u8 = 2;

/// The position of a scan.
#[derive(Debug, Default)]
pub(crate) struct KeepaliveScan {
    began: Time,
    /// 0 IPv4, 1 IPv6, 2 done.
    family: u8,
    slot: u32,
}

impl KeepaliveScan {
    /// Returns true if the scan has slots left to look at, after starting the next scan if it is time.
    pub(crate) fn is_due(&mut self, now: Time) -> bool {
        if self.family < FAMILIES {
            return true;
        }
        let due = now >= self.began + Duration::from_secs(KEEPALIVE_PERIOD.into());
        if due {
            *self = Self { began: now, ..Self::default() };
        }
        due
    }

    /// Looks at up to `budget` slots of `family`, the one with `number`, unless the scan is elsewhere.
    pub(crate) fn run<const N: usize>(
        &mut self,
        (number, family): (u8, &Family<N>),
        live: LiveFilter<'_>,
        budget: &mut u32,
        send: &mut impl FnMut(Keepalive),
    ) where
        Key<N>: FlowKey,
    {
        if self.family != number {
            return;
        }
        let (from, len) = (self.slot, family.slab.len());
        let to = from.saturating_add(*budget).min(len);
        let soon = live.now + KEEPALIVE_INTERVAL;
        // Most slots need no look at the state.
        for slot in (from..to).filter(|&slot| family.may_have_expired(slot, soon)) {
            keepalives(family, slot, live, soon, send);
        }
        *budget -= to.saturating_sub(from).min(*budget);
        self.slot = to;
        if to == len {
            (self.family, self.slot) = (self.family + 1, 0);
        }
    }
}

/// Sends the keepalives of one state, if it is an established connection that expires before `soon`.
fn keepalives<const N: usize>(
    family: &Family<N>,
    slot: u32,
    live: LiveFilter<'_>,
    soon: Time,
    send: &mut impl FnMut(Keepalive),
) where
    Key<N>: FlowKey,
{
    let entry = family.entry(slot);
    let tcp = entry.tcp();
    let flow = entry.key().flow(entry.header().forward());
    let both = u32::from(SYN) | u32::from(SYN) << 8;
    let established = flow.proto == TCP && tcp.seen & both == both && !tcp.ended();
    if !established || !live.accepts(entry) || entry.expires(live.now) >= soon {
        return;
    }
    let [forward, reverse] = tcp.ack;
    for (side, own, other) in [(Direction::Forward, forward, reverse), (Direction::Reverse, reverse, forward)]
    {
        if own > 0 {
            // Toward this side, with the other one as its source.
            let flow = if side == Direction::Forward { flow.reversed() } else { flow };
            send(Keepalive { flow, seq: own.wrapping_sub(1), ack: other });
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::state::limits::rule_counts::RemovedRules;
    use crate::state::table::memory::Pages;

    #[test]
    fn a_scan_visits_each_slot_once_per_period() {
        let (v4, v6) = (Family::<2>::new(1, Pages::Base), Family::<6>::new(1, Pages::Base));
        (0..10).for_each(|_| _ = v4.slab.alloc_one());
        (0..3).for_each(|_| _ = v6.slab.alloc_one());
        let mut scan = KeepaliveScan::default();
        let mut calls = |seconds| {
            let now = Time::from_secs(seconds);
            let live = LiveFilter::new(now, RemovedRules::NONE);
            let mut calls = 0;
            while scan.is_due(now) {
                let mut budget = 4;
                scan.run((0, &v4), live, &mut budget, &mut |_| {});
                scan.run((1, &v6), live, &mut budget, &mut |_| {});
                calls += 1;
            }
            calls
        };
        // 4, 4, 2 + 2, 1 slots. The first scan counts from time 0.
        assert_eq!([100, 100, 104, 105].map(&mut calls), [8, 0, 0, 4]);
    }
}
