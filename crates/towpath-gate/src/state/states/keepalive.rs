//! Keepalives: segments that make the ends of a silent TCP connection say that they are still there.
//!
//! What: in a round of [`KEEPALIVE_PERIOD`] all states are looked at, so many with each call. One that has seen both SYNs
//! and ends within [`KEEPALIVE_INTERVAL`] gets one segment toward each side whose acknowledgement was not the last to be
//! accepted. Its answer is a packet like others, and refreshes the state.
//!
//! As ipfw's `dyn_send_keepalive`; a connection that both sides have closed, or one has reset, gets none here, though for the
//! second that its state lives on ipfw may send one.

use std::net::IpAddr;
use std::time::Duration;

use super::{AddressFamily, States, TCP};
use crate::state::table::key::{FlowKey, Key};
use crate::state::tcp::{ACK, ACK_FWD, ACK_REV, SYN};
use crate::state::{Direction, Ends, Flow, KEEPALIVE_PERIOD};
use towpath_wire::{LinkType, Time, checksum};

/// States that end sooner than this are asked for; ipfw has it as a hidden constant.
pub const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(20);

/// How far the round is.
#[derive(Debug, Default)]
pub(super) struct Round {
    began: Time,
    part: u8,
    slot: u32,
}

/// Parts of a round: IPv4, IPv6.
const PARTS: u8 = 2;

/// One segment: an ACK without payload, of a window of zero, that is one behind.
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
    /// Writes the IP packet into `out`, in place of what is there: 40 bytes for IPv4, 60 for IPv6.
    pub fn write(&self, out: &mut Vec<u8>) {
        out.clear();
        match self.flow.ends {
            Ends::V4(src, dst) => {
                // IPTOS_LOWDELAY and Don't Fragment, as ipfw has it.
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
        let right = checksum::fill(LinkType::RAW, out, len);
        debug_assert!(right, "a packet made here is whole");
    }

    /// Who it is for.
    pub fn to(&self) -> IpAddr {
        match self.flow.ends {
            Ends::V4(_, dst) => dst.into(),
            Ends::V6(_, dst, _) => dst.into(),
        }
    }
}

impl States {
    /// Gives the keepalives that are due, looking at no more than `budget` slots. To be called by one worker only, once
    /// per burst or from time to time; a round begins every [`KEEPALIVE_PERIOD`] seconds, if the one before is over.
    /// None while `dyn_keepalive` is off.
    pub fn keepalives(&mut self, now: Time, budget: usize, mut send: impl FnMut(Keepalive)) {
        self.begin(now);
        if !self.settings.dyn_keepalive {
            return;
        }
        if self.round.part == PARTS {
            let next = self.round.began + Duration::from_secs(KEEPALIVE_PERIOD.into());
            if now < next {
                return;
            }
            self.round = Round { began: now, ..Round::default() };
        }
        let mut budget = u32::try_from(budget).unwrap_or(u32::MAX);
        if self.round.part == 0 {
            self.ask::<2>(now, &mut budget, &mut send);
        }
        if self.round.part == 1 {
            self.ask::<6>(now, &mut budget, &mut send);
        }
    }

    fn ask<const N: usize>(&mut self, now: Time, budget: &mut u32, send: &mut impl FnMut(Keepalive))
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let (from, len) = (self.round.slot, family.slab.len());
        let to = from.saturating_add(*budget).min(len);
        for slot in from..to {
            let soon = now + KEEPALIVE_INTERVAL;
            // Most slots need no look at the state.
            if !family.may_be_over(slot, soon) {
                continue;
            }
            let entry = family.entry(slot);
            let (key, header, tcp) = (entry.key(), entry.header(), entry.tcp());
            let flow = key.flow(header.forward());
            let both = u32::from(SYN) | u32::from(SYN) << 8;
            let established = flow.proto == TCP && tcp.seen & both == both && !tcp.ended();
            if !established || !self.living(now).has(entry) || entry.end(now) >= soon {
                continue;
            }
            let [forward, reverse] = tcp.ack;
            let sides = [
                (Direction::Forward, ACK_FWD, forward, reverse),
                (Direction::Reverse, ACK_REV, reverse, forward),
            ];
            for (side, mark, own, other) in sides {
                if tcp.seen & mark == 0 && own > 0 {
                    // Toward this side, as if from the other one.
                    let flow = if side == Direction::Forward { flow.reversed() } else { flow };
                    send(Keepalive { flow, seq: own.wrapping_sub(1), ack: other });
                }
            }
        }
        *budget -= to.saturating_sub(from).min(*budget);
        self.round.slot = to;
        if to == len {
            (self.round.part, self.round.slot) = (self.round.part + 1, 0);
        }
    }
}
