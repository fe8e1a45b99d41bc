//! Evaluation of the rules for one packet.
//!
//! [`Walker::walk`] is the whole path: find the next rule that may match, evaluate it, run its action. Each kind
//! of action has one small function. The order inside a rule is that of ipfw: `prob`, then the state lookup
//! (check-state, keep-state, limit), then the body, then the installation of a state, then log, tag and action. A
//! packet that has a state runs log, tag and action of the rule that created the state, and counts for that rule.

use std::net::IpAddr;
use std::sync::Arc;

use super::generation::Generation;
use super::index::Candidate;
use super::insn::all_hold;
use super::log::{LogEntry, SuppressedBy, refused_word};
use super::program::{CompiledAction, CompiledRule, Jump, StateInstall};
use super::reply::{reset, unreach};
use super::step::{DropReason, Reject, Step};
use super::walk::{CALL_DEPTH, Dir, LookupCache, Walk};
use super::walker::Walker;
use crate::rules::option::Arg;
use crate::rules::table::Value;
use crate::rules::{NextHop, ReturnTo};
use crate::state::{Direction, Ends, Flow, Install, Lookup, Name, Origin, Quoted, Refused};
use towpath_wire::{Addresses, Fragment, Packet, Time, ext6, proto};

/// Result of evaluating one rule.
pub(super) enum RuleResult {
    /// The rule does not match, or it leaves the decision to later rules.
    NoMatch,
    /// The action of the rule at this position runs: the rule itself, or the rule of the state that was found.
    Run(usize),
    /// The packet is dropped: its state could not be installed, or it exceeded the jump limit.
    Drop(DropReason),
}

/// Where evaluation continues after an action.
pub(super) enum Next {
    /// At the rule at this position.
    Rule(usize),
    /// Nowhere: the walk ends or pauses with this step.
    Stop(Step),
}

impl Walker {
    /// Evaluates the rules for a packet. A new walk starts at the first rule; a walk that returned
    /// [`Step::Divert`], [`Step::Tee`] or [`Step::Reassemble`] continues at the rule after it.
    ///
    /// `now` must not decrease between calls.
    pub fn walk(&mut self, walk: &mut Walk, packet: &Packet<'_>, now: Time) -> Step {
        let dir = walk.dir;
        let mut key = None;
        self.walk_rules(walk, packet, now, |generation, at, cache| {
            // Most walks end with a state at their first rule: the packet key is built only when a rule is
            // searched.
            let index = &generation.program.index;
            if index.looks_up_at(at, cache) {
                return Candidate { position: at, certain: false };
            }
            index.next(at, key.get_or_insert_with(|| index.packet_key(packet, dir)), packet, cache)
        })
    }

    /// Evaluates the rules one after the other, without the index. The tests compare it with [`Walker::walk`].
    #[doc(hidden)]
    pub fn walk_linear(&mut self, walk: &mut Walk, packet: &Packet<'_>, now: Time) -> Step {
        self.walk_rules(walk, packet, now, |_, position, _| Candidate { position, certain: false })
    }

    /// The loop of a walk. `candidate` returns the first rule at or after a position that may match.
    #[inline]
    fn walk_rules(
        &mut self,
        walk: &mut Walk,
        packet: &Packet<'_>,
        now: Time,
        mut candidate: impl FnMut(&Generation, usize, LookupCache) -> Candidate,
    ) -> Step {
        self.catch_up();
        if walk.stopped.is_none() {
            walk.enter_zone(&self.generation.ports);
            if let Some(reason) = self.generation.early_drop(packet) {
                return Step::Drop(reason);
            }
        }
        let mut at = self.generation.resume(walk);
        loop {
            let found = candidate(&self.generation, at, walk.cache);
            at = found.position;
            let mut tablearg = None;
            let next = match self.try_rule(found, walk, packet, now, &mut tablearg) {
                RuleResult::NoMatch if at == self.generation.program.default => {
                    Next::Stop(Step::Drop(DropReason::Deny))
                }
                RuleResult::NoMatch => Next::Rule(at + 1),
                RuleResult::Run(position) => self.run(position, walk, packet, now, tablearg),
                RuleResult::Drop(reason) => {
                    self.count(at, packet, now);
                    self.generation.stop(at, walk, Step::Drop(reason))
                }
            };
            match next {
                Next::Rule(position) => at = position,
                // The most frequent end: a constant, instead of a copy of bytes that were just written.
                Next::Stop(Step::Pass) => return Step::Pass,
                Next::Stop(step) => return step,
            }
        }
    }

    /// Evaluates one rule. Sets `tablearg` to the value of the last table entry that matched.
    #[inline]
    pub(super) fn try_rule(
        &mut self,
        Candidate { position: at, certain }: Candidate,
        walk: &mut Walk,
        packet: &Packet<'_>,
        now: Time,
        tablearg: &mut Option<Value>,
    ) -> RuleResult {
        let rule = &self.generation.program.rules[at];
        if !rule.enabled {
            return RuleResult::NoMatch;
        }
        let lookup = rule.lookup.filter(|lookup| walk.cache.needs(*lookup));
        if let Some(lookup) = lookup {
            if rule.prob != 0 && self.random.next() >= rule.prob {
                return RuleResult::NoMatch;
            }
            if let Some(position) = self.look_up(lookup, walk, packet, now) {
                // Two check-state rules, each with an action that jumps back to the other, would form an endless loop.
                if !walk.jump() {
                    return RuleResult::Drop(DropReason::Loop);
                }
                return RuleResult::Run(position);
            }
        }
        let rule = &self.generation.program.rules[at];
        if matches!(rule.action, CompiledAction::CheckState) {
            return RuleResult::NoMatch;
        }
        if !certain {
            let context = self.generation.context(packet);
            let mut found = None;
            if !all_hold(self.generation.program.insns_of(rule), &context, walk, rule.number, &mut found) {
                return RuleResult::NoMatch;
            }
            *tablearg = found.copied();
        }
        if lookup.is_none() && rule.prob != 0 && self.random.next() >= rule.prob {
            return RuleResult::NoMatch;
        }
        if rule.install.is_some()
            && let Err(reason) = self.install(at, walk, packet, now, *tablearg)
        {
            return RuleResult::Drop(reason);
        }
        if self.generation.program.rules[at].defer { RuleResult::NoMatch } else { RuleResult::Run(at) }
    }

    /// Looks up the state of the packet. Returns the position of the rule that created it.
    #[inline]
    fn look_up(&mut self, lookup: Lookup, walk: &mut Walk, packet: &Packet<'_>, now: Time) -> Option<usize> {
        walk.cache = match lookup {
            Lookup::Any => LookupCache::Any,
            Lookup::Named(name) => LookupCache::Named(name),
        };
        let found = self.find_state(lookup, walk, packet, now);
        if found.is_none() && !self.generation.left_names.is_empty() {
            return self.find_left_state(lookup, walk, packet, now);
        }
        found
    }

    /// Looks up a state of a deleted rule that a re-check has not handed over yet, under the names of these rules. A current rule
    /// may use such a name for its own states: those are not found.
    #[cold]
    fn find_left_state(
        &mut self,
        lookup: Lookup,
        walk: &mut Walk,
        packet: &Packet<'_>,
        now: Time,
    ) -> Option<usize> {
        let Lookup::Named(wanted) = lookup else { return None };
        let left = Arc::clone(&self.generation.left_names);
        for name in left.iter().copied().filter(|name| *name != wanted) {
            if self.is_left(name, walk, packet, now)
                && let Some(position) = self.find_state(Lookup::Named(name), walk, packet, now)
            {
                return Some(position);
            }
        }
        // It may have been handed over since the first lookup.
        self.find_state(lookup, walk, packet, now)
    }

    /// Returns true if the packet's state under `name` belongs to a deleted rule. The state does not change.
    fn is_left(&mut self, name: Name, walk: &Walk, packet: &Packet<'_>, now: Time) -> bool {
        let lookup = Lookup::Named(name);
        let Some(flow) = flow_of(packet, walk) else { return false };
        let fragment =
            if packet.fragment == Fragment::Later { self.generation.fragment_of(packet) } else { None };
        let rule = match fragment {
            Some(id) => self.states.peek_fragment(&flow, id, lookup, now).map(|(state, ..)| state.rule),
            None => self.states.peek(&flow, lookup, now).map(|hit| hit.rule),
        };
        let rule = rule.or_else(|| {
            let quoted = self.generation.quoted_flow(packet, walk)?;
            self.states.peek(&quoted.flow, lookup, now).map(|hit| hit.rule)
        });
        rule.is_some_and(|rule| self.generation.program.is_hidden(rule))
    }

    fn find_state(
        &mut self,
        lookup: Lookup,
        walk: &mut Walk,
        packet: &Packet<'_>,
        now: Time,
    ) -> Option<usize> {
        let flow = flow_of(packet, walk)?;
        let fragment =
            if packet.fragment == Fragment::Whole { None } else { self.generation.fragment_of(packet) };
        let hit = match (packet.fragment, fragment) {
            (Fragment::Later, Some(id)) => {
                self.states.lookup_fragment(&flow, id, lookup, packet.counted_bytes(), now)
            }
            _ => None,
        };
        let hit = hit.or_else(|| self.states.lookup(&flow, lookup, &packet.segment(), now));
        let hit = match hit {
            Some(hit) => hit,
            None => self.states.lookup_related(&self.generation.quoted_flow(packet, walk)?, lookup, now)?,
        };
        if let (Fragment::First, Some(id)) = (packet.fragment, fragment) {
            self.states.note_fragment(&flow, id, now);
        }
        walk.answers = (hit.direction == Direction::Reverse).then_some(hit.rule);
        self.generation.program.position_of(hit.rule)
    }

    /// Installs the state of a rule with a state option.
    fn install(
        &mut self,
        at: usize,
        walk: &Walk,
        packet: &Packet<'_>,
        now: Time,
        tablearg: Option<Value>,
    ) -> Result<(), DropReason> {
        let rule = &self.generation.program.rules[at];
        let Some((name, install)) = rule.install_of(walk, tablearg) else { return Ok(()) };
        let flow = flow_of(packet, walk).ok_or(DropReason::NotIp)?;
        let made = self.states.install(&flow, name, &packet.segment(), rule.id, &install, now);
        if made.is_ok()
            && packet.fragment == Fragment::First
            && let Some(id) = self.generation.fragment_of(packet)
        {
            self.states.note_fragment(&flow, id, now);
        }
        match made {
            Ok(_) => Ok(()),
            Err(refused) => {
                self.log_refused(at, refused, walk, packet, now);
                Err(DropReason::NoState(refused))
            }
        }
    }

    /// Logs a packet whose state was refused, at most once per second, whether or not the rule has `log` (as ipfw
    /// does).
    #[cold]
    fn log_refused(&mut self, at: usize, refused: Refused, walk: &Walk, packet: &Packet<'_>, now: Time) {
        let Some(word) = refused_word(refused) else { return };
        let number = self.generation.program.rules[at].number;
        if !self.shared.refusals.take(now) {
            return self.log.suppress(now, Some(number), SuppressedBy::Rate(word), 1);
        }
        let port = if walk.dir == Dir::In { walk.recv } else { walk.xmit };
        self.log.put_packet(LogEntry::new(now, Some(number), word, walk.dir, port, packet), packet);
    }

    /// Runs the action of a rule: count, log, tag, action.
    pub(super) fn run(
        &mut self,
        at: usize,
        walk: &mut Walk,
        packet: &Packet<'_>,
        now: Time,
        tablearg: Option<Value>,
    ) -> Next {
        self.count(at, packet, now);
        let rule = &self.generation.program.rules[at];
        let act = rule.action;
        if rule.only_allows() {
            return self.generation.stop(at, walk, Step::Pass);
        }
        if rule.log.is_some() {
            self.log_packet(at, walk, packet, now);
        }
        if !self.generation.tag(at, walk, tablearg) {
            self.slot.count_tag();
        }
        match act {
            CompiledAction::Pipe(arg) => {
                self.police(at, walk, packet, now, number(arg, tablearg, |value| value.pipe))
            }
            _ => self.generation.act(at, walk, packet, tablearg),
        }
    }

    /// Counts the packet for a rule. The size is the length of the IP packet, or of the frame on the wire if it is
    /// not IP.
    #[inline]
    fn count(&self, at: usize, packet: &Packet<'_>, now: Time) {
        self.counts.count(at, packet.counted_bytes(), now);
    }

    fn police(&self, at: usize, walk: &mut Walk, packet: &Packet<'_>, now: Time, pipe: u32) -> Next {
        let step = match self.generation.pipes.get(&pipe) {
            None => Step::Drop(DropReason::NoPipe),
            // Routed packets pass the rules twice.
            Some(_) if walk.charged_pipe == pipe => Step::Pass,
            Some(bucket) => match bucket.take(packet.counted_bytes().into(), now) {
                true => Step::Pass,
                false => Step::Drop(DropReason::Policed),
            },
        };
        walk.charged_pipe = pipe;
        self.generation.stop(at, walk, step)
    }

    fn log_packet(&mut self, at: usize, walk: &Walk, packet: &Packet<'_>, now: Time) {
        let rule = &self.generation.program.rules[at];
        let Some(log) = &rule.log else { return };
        let limit = match log.take(self.generation.settings.verbose_limit) {
            Ok(limit) => limit,
            Err(limit) => return self.log.suppress(now, Some(rule.number), SuppressedBy::Limit(limit), 1),
        };
        let port = if walk.dir == Dir::In { walk.recv } else { walk.xmit };
        let entry = LogEntry::new(now, Some(rule.number), log_word(rule), walk.dir, port, packet);
        self.log.put_packet(LogEntry { limit, ..entry }, packet);
    }
}

impl CompiledRule {
    /// Returns the name and the arguments of the state that the rule installs for a packet; `None` if it installs none.
    #[inline]
    pub(super) fn install_of(&self, walk: &Walk, tablearg: Option<Value>) -> Option<(Name, Install)> {
        let StateInstall { name, mut install, limit_tablearg } = self.install.as_deref().copied()?;
        if limit_tablearg && let Some(limit) = &mut install.limit {
            limit.max = tablearg.map_or(0, |value| value.limit);
        }
        install.timeout = walk.timeout;
        install.origin = Origin::new(walk.dir == Dir::Out, walk.recv.map(|port| port.0));
        Some((name, install))
    }
}

impl Generation {
    /// Returns the reason to drop a packet before the first rule, as ipfw does.
    pub(super) fn early_drop(&self, packet: &Packet<'_>) -> Option<DropReason> {
        let four = matches!(packet.addresses, Addresses::V4(..));
        if four && packet.proto == proto::TCP && packet.fragment_offset == 1 {
            return Some(DropReason::TinyFragment);
        }
        if packet.ext6 & ext6::UNKNOWN != 0 && self.settings.deny_unknown_exthdrs {
            return Some(DropReason::UnknownHeader);
        }
        None
    }

    /// Returns the position at which a walk starts or continues.
    pub(super) fn resume(&self, walk: &Walk) -> usize {
        let Some((id, number)) = walk.stopped else { return 0 };
        match self.program.position_of(id) {
            Some(position) => self.program.next(position),
            // The rule was deleted: continue at the next rule number, as ipfw does.
            None => self.program.position_from(number.saturating_add(1)),
        }
    }

    /// Returns the fragment identification of the datagram if fragments are tracked.
    #[cold]
    pub(super) fn fragment_of(&self, packet: &Packet<'_>) -> Option<u32> {
        packet.fragment_id().filter(|_| self.settings.fragments)
    }

    /// Returns the flow that an ICMP error quotes, if related packets use states.
    pub(super) fn quoted_flow(&self, packet: &Packet<'_>, walk: &Walk) -> Option<Quoted> {
        if !self.settings.related || !matches!(packet.proto, proto::ICMP | proto::ICMP6) {
            return None;
        }
        let mut quoted = Quoted::of(packet)?;
        quoted.flow = placed(quoted.flow, walk);
        Some(quoted)
    }

    /// Adds or removes the tag of the rule. Returns false if the packet has no room for the tag.
    pub(super) fn tag(&self, at: usize, walk: &mut Walk, tablearg: Option<Value>) -> bool {
        let Some((remove, tag)) = self.program.rules[at].tag else { return true };
        let tag = number(tag, tablearg, |value| value.tag) as u16;
        if remove {
            walk.untag(tag);
            return true;
        }
        tag == 0 || walk.tag(tag)
    }

    /// Runs the action proper. Changes only the walk, so that `explain` can use it too. A pipe is assumed to pass
    /// the packet.
    pub(super) fn act(
        &self,
        at: usize,
        walk: &mut Walk,
        packet: &Packet<'_>,
        tablearg: Option<Value>,
    ) -> Next {
        let queue = |arg| number(arg, tablearg, |value| value.divert) as u16;
        match self.program.rules[at].action {
            CompiledAction::Allow | CompiledAction::Pipe(_) => self.stop(at, walk, Step::Pass),
            CompiledAction::Deny => self.stop(at, walk, Step::Drop(DropReason::Deny)),
            CompiledAction::Unreach { code, mtu } => {
                self.stop(at, walk, Step::Reject(unreach(packet, Reject::Unreach { code, mtu })))
            }
            CompiledAction::Unreach6(code) => {
                self.stop(at, walk, Step::Reject(unreach(packet, Reject::Unreach6 { code })))
            }
            CompiledAction::Reset => self.stop(at, walk, Step::Reject(reset(packet, Reject::Reset, false))),
            CompiledAction::Reset6 => self.stop(at, walk, Step::Reject(reset(packet, Reject::Reset, true))),
            CompiledAction::Abort => self.stop(at, walk, Step::Reject(reset(packet, Reject::Abort, false))),
            CompiledAction::Abort6 => self.stop(at, walk, Step::Reject(reset(packet, Reject::Abort, true))),
            // The rule of a state always has another action; check-state creates no states.
            CompiledAction::Count | CompiledAction::CheckState => self.next_rule(at),
            CompiledAction::Skipto(jump) => self.skipto(at, jump, tablearg),
            CompiledAction::Call(jump) => self.call(at, walk, jump, tablearg),
            CompiledAction::Return(to) => self.return_to(at, walk, to),
            CompiledAction::Inspect(arg) => self.stop(at, walk, Step::Inspect(queue(arg))),
            CompiledAction::Divert(arg) => self.stop(at, walk, Step::Divert(queue(arg))),
            CompiledAction::Tee(arg) => self.stop(at, walk, Step::Tee(queue(arg))),
            // The next hop applies to the direction that the rule matched. Reply packets are routed.
            CompiledAction::Forward(_) if walk.answers == Some(self.program.rules[at].id) => {
                self.stop(at, walk, Step::Pass)
            }
            CompiledAction::Forward(hop) => self.stop(at, walk, forward(hop, packet, tablearg)),
            // IPv4 only, as in ipfw. IPv6 fragments continue at the next rule, and those in PPPoE, whose length would be wrong.
            CompiledAction::Reass if is_ip4_fragment(packet) => self.stop(at, walk, Step::Reassemble),
            CompiledAction::Reass => self.next_rule(at),
            CompiledAction::SetDscp(arg) => {
                walk.edits.dscp = Some(number(arg, tablearg, |value| value.dscp) as u8 & 63);
                self.next_rule(at)
            }
            CompiledAction::SetMark(arg) => {
                walk.mark = number(arg, tablearg, |value| value.mark);
                self.next_rule(at)
            }
            CompiledAction::SetConnmark(mark) => {
                walk.connmark = walk.connmark.map(|_| mark);
                self.next_rule(at)
            }
            CompiledAction::TcpSetMss(mss) => {
                walk.edits.mss = Some(walk.edits.mss.map_or(mss, |earlier| earlier.min(mss)));
                self.next_rule(at)
            }
            CompiledAction::SetZone(zone) => {
                if walk.zone != zone {
                    // Each zone has its own states: no lookup was in this one.
                    (walk.zone, walk.cache) = (zone, LookupCache::Empty);
                }
                self.next_rule(at)
            }
            CompiledAction::StateTimeout(seconds) => {
                walk.timeout = Some(seconds);
                self.next_rule(at)
            }
        }
    }

    #[inline]
    pub(super) fn stop(&self, at: usize, walk: &mut Walk, step: Step) -> Next {
        let rule = &self.program.rules[at];
        walk.stopped = Some((rule.id, rule.number));
        Next::Stop(step)
    }

    /// Continues at the rule after this one.
    fn next_rule(&self, at: usize) -> Next {
        Next::Rule(self.program.next(at))
    }

    /// Jumps forward only. A target that is not ahead means the next rule number.
    fn skipto(&self, at: usize, jump: Jump, tablearg: Option<Value>) -> Next {
        let rule = &self.program.rules[at];
        let position = match jump {
            Jump::To(position) => position as usize,
            Jump::Tablearg => {
                let number = tablearg.map_or(0, |value| value.skipto);
                let order = crate::rules::order;
                let ahead = order(number) > order(rule.number);
                self.program.position_from(if ahead { number } else { rule.number.saturating_add(1) })
            }
        };
        Next::Rule(position)
    }

    fn call(&self, at: usize, walk: &mut Walk, jump: Jump, tablearg: Option<Value>) -> Next {
        if usize::from(walk.depth) == CALL_DEPTH {
            return self.stop(at, walk, Step::Drop(DropReason::CallDepth));
        }
        if !walk.jump() {
            return self.stop(at, walk, Step::Drop(DropReason::Loop));
        }
        walk.stack[usize::from(walk.depth)] = self.program.rules[at].id;
        walk.depth += 1;
        Next::Rule(match jump {
            Jump::To(position) => position as usize,
            Jump::Tablearg => self.program.position_from(tablearg.map_or(0, |value| value.skipto)),
        })
    }

    /// Returns to the rule after the last call, or continues at the next rule if there was no call.
    fn return_to(&self, at: usize, walk: &mut Walk, to: ReturnTo) -> Next {
        let Some(depth) = walk.depth.checked_sub(1) else { return self.next_rule(at) };
        if !walk.jump() {
            return self.stop(at, walk, Step::Drop(DropReason::Loop));
        }
        walk.depth = depth;
        let Some(caller) = self.program.position_of(walk.stack[usize::from(depth)]) else {
            return self.stop(at, walk, Step::Drop(DropReason::Reloaded));
        };
        Next::Rule(match to {
            ReturnTo::NextRule => self.program.next(caller),
            ReturnTo::NextRulenum => {
                self.program.position_from(self.program.rules[caller].number.saturating_add(1))
            }
        })
    }
}

/// Returns the number in the rule, or the column of the table value for `tablearg` (0 without a value).
fn number(arg: Arg, tablearg: Option<Value>, column: impl Fn(&Value) -> u32) -> u32 {
    match arg {
        Arg::Number(number) => number,
        Arg::Tablearg => tablearg.as_ref().map_or(0, column),
    }
}

/// Returns the flow by which the state of a packet is looked up.
#[inline]
pub(super) fn flow_of(packet: &Packet<'_>, walk: &Walk) -> Option<Flow> {
    packet.flow().map(|flow| placed(flow, walk))
}

/// Adds the zone of the walk to a flow. A link-local address gets the scope zone of its port.
#[inline]
fn placed(mut flow: Flow, walk: &Walk) -> Flow {
    flow.zone = walk.zone;
    if let Ends::V6(src, dst, zone) = &mut flow.ends
        && (src.is_unicast_link_local() || dst.is_unicast_link_local())
    {
        let port = if walk.dir == Dir::In { walk.recv } else { walk.xmit };
        *zone = port.map_or(0, |port| u32::from(port.0) + 1);
    }
    flow
}

fn forward(hop: NextHop, packet: &Packet<'_>, tablearg: Option<Value>) -> Step {
    let hop: Option<(IpAddr, Option<u16>)> = match hop {
        NextHop::Address(ip, port) => Some((ip, port)),
        NextHop::Tablearg => tablearg.and_then(|value| match packet.addresses {
            Addresses::V4(..) => value.ipv4.map(|ip| (ip.into(), None)),
            Addresses::V6(..) => value.ipv6.map(|ip| (ip.into(), None)),
            Addresses::None => None,
        }),
    };
    match (hop, packet.addresses) {
        (Some((ip @ IpAddr::V4(_), port)), Addresses::V4(..))
        | (Some((ip @ IpAddr::V6(_), port)), Addresses::V6(..)) => Step::Forward(ip, port),
        // The next hop is of the other address family: ipfw drops such a packet too.
        _ => Step::Drop(DropReason::NoNextHop),
    }
}

/// Returns ipfw's word for the action in its log.
fn log_word(rule: &CompiledRule) -> &'static str {
    match rule.action {
        CompiledAction::Allow => "Accept",
        CompiledAction::Deny => "Deny",
        CompiledAction::Unreach { code: 1, .. } => "Reject",
        CompiledAction::Unreach { .. } => "Unreach",
        CompiledAction::Unreach6(_) => "Unreach6",
        CompiledAction::Reset | CompiledAction::Reset6 => "Reset",
        CompiledAction::Abort | CompiledAction::Abort6 => "Abort",
        CompiledAction::Count => "Count",
        CompiledAction::CheckState => "CheckState",
        CompiledAction::Skipto(_) => "SkipTo",
        CompiledAction::Call(_) => "Call",
        CompiledAction::Return(_) => "Return",
        CompiledAction::Inspect(_) => "Inspect",
        CompiledAction::Divert(_) => "Divert",
        CompiledAction::Tee(_) => "Tee",
        CompiledAction::Pipe(_) => "Pipe",
        CompiledAction::Forward(_) => "Forward",
        CompiledAction::Reass => "Reass",
        CompiledAction::SetDscp(_) => "SetDscp",
        CompiledAction::SetMark(_) => "SetMark",
        CompiledAction::SetConnmark(_) => "SetConnmark",
        CompiledAction::TcpSetMss(_) => "TcpSetMss",
        CompiledAction::StateTimeout(_) => "StateTimeout",
        CompiledAction::SetZone(_) => "SetZone",
    }
}

fn is_ip4_fragment(packet: &Packet<'_>) -> bool {
    packet.fragment != Fragment::Whole
        && matches!(packet.addresses, Addresses::V4(..))
        && !packet.is_encapsulated()
}
