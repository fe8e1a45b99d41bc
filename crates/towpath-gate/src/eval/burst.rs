//! Bursts: packets whose states let them pass are done with no rule tried.
//!
//! What: nearly every packet belongs to a flow with a state, most rulesets begin with check-state, or with rules that are
//! about few packets and then check-state or keep-state ([`super::stateless_prefix`]), and what the state's rule says is most often
//! allow and nothing else. For these the walk is known beforehand: the state counts and is refreshed, the rule counts, the
//! packet passes. All others take the walk.
//!
//! Invariant: [`Walker::try_pass`] does what [`Walker::walk`] would have done, or nothing. It is called for each packet in its
//! turn, so that a packet finds the state that one before it in its burst has made.

use super::port::PortId;
use super::program::Program;
use super::stateless_prefix::PlainPacket;
use super::walker::Walker;
use crate::state::{Ends, Flow, RuleId, Segment};
use towpath_wire::Time;

pub use crate::state::BURST;

impl Walker {
    /// Has the states of these packets on their way to the cache, of as many as a [`BURST`] has, so that the cache misses
    /// of [`Walker::try_pass`] overlap. They have come in by the port `recv`. [`towpath_wire::plain`] says what a packet's flow
    /// is; `None` is a packet that has to walk in any case, and so has one of another tenant, or that came by another port.
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
        let live = &self.live;
        let opening = live.program.opening.as_ref().filter(|opening| !opening.is_first());
        // One chain for both cases, so that it becomes part of the only loop that it is used in. What is asked about rarely gets a
        // copy: the packet itself stays in registers.
        self.states.fetch(packets.map(|packet| {
            packet.filter(|&(flow, segment)| {
                !has_zone(&flow)
                    && opening
                        .is_none_or(|opening| opening.is_for(live, &PlainPacket { flow, segment, recv }))
            })
        }));
    }

    /// Lets packet `at` of those that were fetched pass, if it has a state and that is all there is to do: the number of
    /// the rule that made the state. With `None` nothing has happened, and the packet is to [`Walker::walk`].
    ///
    /// To be asked once for a packet, in the order of the packets. Rules that a reload replaced since these packets were
    /// fetched still let pass, until one of them walks. What it says is for packets without tags, with the mark 0, of
    /// tenant 0, before their first rule: as they come in.
    #[inline]
    pub fn try_pass(&mut self, at: usize, now: Time) -> Option<u32> {
        // Another program has other rules before the lookup.
        if self.fetched != self.version {
            return None;
        }
        let program = &self.live.program;
        let lookup = program.opening.as_ref()?.lookup;
        let (position, bytes) = self.states.pass(at, lookup, now, |rule| program.passes(rule))?;
        self.counts.count(position, bytes, now);
        Some(program.rules[position].number)
    }
}

impl Program {
    /// The position of the rule, if it lets pass and does nothing else.
    #[inline(always)]
    fn passes(&self, rule: RuleId) -> Option<usize> {
        self.passing.position(rule)
    }
}

/// Whether the flow's key has more than the packet says: the port that a link-local address is at.
#[inline]
fn has_zone(flow: &Flow) -> bool {
    match flow.ends {
        Ends::V4(..) => false,
        Ends::V6(src, dst, _) => src.is_unicast_link_local() || dst.is_unicast_link_local(),
    }
}
