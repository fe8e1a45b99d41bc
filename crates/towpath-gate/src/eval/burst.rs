//! The fast path of a burst: packets that an existing state passes without evaluating a rule.
//!
//! Most packets belong to a flow that has a state. Most rulesets start with check-state, or with a few rules that
//! do not match most packets, then check-state or keep-state ([`super::stateless_prefix`]). The rule of the state
//! usually only allows. For such a packet the result of the walk is known: the state is refreshed and counts, the
//! rule counts, and the packet passes. All other packets walk.
//!
//! Invariant: [`Walker::try_pass`] has the same effect as [`Walker::walk`], or no effect. The caller calls it for
//! each packet in order, so that a packet finds a state that an earlier packet of the same burst created.

use super::port::PortId;
use super::program::Program;
use super::stateless_prefix::PlainPacket;
use super::walker::Walker;
use crate::state::{Ends, Flow, RuleId, Segment};
use towpath_wire::Time;

pub use crate::state::BURST;

impl Walker {
    /// Prefetches the states of up to [`BURST`] packets into the cache, so that the cache misses of
    /// [`Walker::try_pass`] overlap.
    ///
    /// `recv` is the port on which the packets were received. `packets` yields the flow and segment of each
    /// packet, from [`towpath_wire::plain`]. `None` marks a packet that must walk: a packet that `plain` rejects,
    /// a packet with a zone of its own ([`Walk::with_zone`](super::walk::Walk::with_zone)), or a packet of another port.
    ///
    /// ```
    /// use towpath_gate::{Dir, Gate, Ports, Step, Walk};
    /// use towpath_wire::{self as wire, LinkType, Time};
    /// use towpath_gate::rules::Ruleset;
    /// use towpath_gate::state;
    ///
    /// let text = "add check-state\nadd 200 allow udp from any to any 53 keep-state";
    /// let rules = Ruleset::parse("t", text).ruleset.unwrap();
    /// let mut gate = Gate::new(rules, Ports::new(), state::Settings::default(), 0x5eed);
    /// let mut walker = gate.walker().unwrap();
    /// # let mut frame = [0; 42];
    /// # frame[12..14].copy_from_slice(&[0x08, 0x00]);
    /// # frame[14..34].copy_from_slice(&[0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2]);
    /// # frame[34..40].copy_from_slice(&[4, 0, 0, 53, 0, 8]);
    /// let (burst, now) = ([&frame[..]; 3], Time::from_secs(1));
    ///
    /// walker.prefetch(None, burst.iter().map(|frame| wire::plain(LinkType::ETHERNET, frame, 42)));
    /// let steps = burst.iter().enumerate().map(|(at, frame)| {
    ///     if walker.try_pass(at, now).is_some() {
    ///         return Step::Pass;
    ///     }
    ///     let packet = wire::parse(LinkType::ETHERNET, frame, 42).unwrap();
    ///     walker.walk(&mut Walk::new(Dir::In, None, None), &packet, now)
    /// });
    /// assert!(steps.eq([Step::Pass; 3]));
    ///
    /// // Now there is a state, and no rule has to be tried.
    /// walker.prefetch(None, burst.iter().map(|frame| wire::plain(LinkType::ETHERNET, frame, 42)));
    /// assert_eq!([0, 1, 2].map(|at| walker.try_pass(at, now)), [Some(200); 3]);
    /// assert_eq!(gate.show()[1].packets, 6);
    /// ```
    #[inline]
    pub fn prefetch(&mut self, recv: Option<PortId>, packets: impl Iterator<Item = Option<(Flow, Segment)>>) {
        self.catch_up();
        self.fetched = self.version;
        let generation = &self.generation;
        let zone = recv.map_or(0, |port| generation.ports.zone(port));
        let prefix = generation.program.prefix.as_ref().filter(|prefix| !prefix.is_empty());
        // A single chain for both cases keeps the closure inlined in its only loop. The rare condition gets a
        // copy, so that the packet itself stays in registers.
        self.states.fetch(packets.map(|packet| {
            let packet = packet.map(|(flow, segment)| (Flow { zone, ..flow }, segment));
            packet.filter(|&(flow, segment)| {
                !has_scope_zone(&flow)
                    && prefix
                        .is_none_or(|prefix| prefix.misses(generation, &PlainPacket { flow, segment, recv }))
            })
        }));
    }

    /// Passes packet `at` of the prefetched burst if it has a state and the rule of that state only allows.
    /// Returns the number of that rule. Returns `None` without any effect if the packet must go through
    /// [`Walker::walk`].
    ///
    /// Call it once per packet, in the order of the packets. The result is valid for incoming packets before their
    /// first rule: without tags, with mark 0 and the zone of their port. Rules that a reload replaced after [`Walker::prefetch`]
    /// still apply until a packet of the burst walks.
    #[inline]
    pub fn try_pass(&mut self, at: usize, now: Time) -> Option<u32> {
        // A new program may have other rules before the first lookup.
        if self.fetched != self.version {
            return None;
        }
        let program = &self.generation.program;
        let lookup = program.prefix.as_ref()?.lookup;
        let (position, bytes) = self.states.pass(at, lookup, now, |rule| program.passes(rule))?;
        self.counts.count(position, bytes, now);
        Some(program.rules[position].number)
    }
}

impl Program {
    /// Returns the position of the rule if it only allows.
    #[inline(always)]
    fn passes(&self, rule: RuleId) -> Option<usize> {
        self.passing.position(rule)
    }
}

/// Returns true if the key of the flow includes a scope zone: the port of a link-local address.
#[inline]
fn has_scope_zone(flow: &Flow) -> bool {
    match flow.ends {
        Ends::V4(..) => false,
        Ends::V6(src, dst, _) => src.is_unicast_link_local() || dst.is_unicast_link_local(),
    }
}
