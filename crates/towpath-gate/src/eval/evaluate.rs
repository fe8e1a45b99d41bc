//! The walk of a packet through the rules.
//!
//! [`Walker::walk`] is the whole path: find the next rule that may matter, try it, run its action. What a rule's action
//! does is in one small function per kind of instruction. ipfw's order inside a rule is kept: prob, then the lookup of
//! a state (check-state, keep-state, limit), then the body, then the installation of a state, then log, tag, action. A
//! state that is found runs the log, tag and action of the rule that made it, and counts there.

use std::net::IpAddr;

use super::generation::Generation;
use super::index::Candidate;
use super::insn::all_hold;
use super::log::{LogEntry, refused_word};
use super::program::{CompiledAction, CompiledRule, Jump, StateInstall};
use super::reply::{reset, unreach};
use super::walk::{CALL_DEPTH, Dir, DropReason, LookupCache, Reject, Step, Walk};
use super::walker::Walker;
use crate::rules::option::Arg;
use crate::rules::table::Value;
use crate::rules::{NextHop, ReturnTo};
use crate::state::{Direction, Ends, Flow, Lookup, Quoted, Refused};
use towpath_wire::{Addresses, Fragment, Packet, Time, ext6, proto};

/// What trying a rule came to.
pub(super) enum RuleResult {
    /// It says nothing about this packet.
    Miss,
    /// The action of the rule at this position runs, its own or that of a state's rule.
    Run(usize),
    /// A state could not be installed.
    Refused(DropReason),
}

/// Where an action leads.
pub(super) enum Next {
    /// To the rule at this position.
    Rule(usize),
    /// Out of the rules, for now or for good.
    Stop(Step),
}

impl Walker {
    /// Takes a packet through the rules: from the first, or, with a walk that stopped at a divert or tee, on from the
    /// next one. `now` never goes back.
    pub fn walk(&mut self, walk: &mut Walk, packet: &Packet<'_>, now: Time) -> Step {
        let dir = walk.dir;
        let mut lanes = None;
        self.walk_rules(walk, packet, now, |live, at, memo| {
            // A state ends most walks at their first rule: nothing is put together before that.
            let index = &live.program.index;
            if index.probes_at(at, memo) {
                return Candidate { position: at, holds: false };
            }
            index.next(at, lanes.get_or_insert_with(|| index.lanes(packet, dir)), packet, memo)
        })
    }

    /// The same, one rule after the other: what the index must agree with.
    #[doc(hidden)]
    pub fn walk_linear(&mut self, walk: &mut Walk, packet: &Packet<'_>, now: Time) -> Step {
        self.walk_rules(walk, packet, now, |_, position, _| Candidate { position, holds: false })
    }

    /// The walk; `candidate` gives the first position from one on whose rule may matter.
    #[inline]
    fn walk_rules(
        &mut self,
        walk: &mut Walk,
        packet: &Packet<'_>,
        now: Time,
        mut candidate: impl FnMut(&Generation, usize, LookupCache) -> Candidate,
    ) -> Step {
        self.catch_up();
        if walk.stopped.is_none()
            && let Some(reason) = self.live.refuse_unseen(packet)
        {
            return Step::Drop(reason);
        }
        let mut at = self.live.resume(walk);
        loop {
            let found = candidate(&self.live, at, walk.memo);
            at = found.position;
            let mut tablearg = None;
            let next = match self.try_rule(found, walk, packet, now, &mut tablearg) {
                RuleResult::Miss if at == self.live.program.default => {
                    Next::Stop(Step::Drop(DropReason::Deny))
                }
                RuleResult::Miss => Next::Rule(at + 1),
                RuleResult::Run(position) => self.run(position, walk, packet, now, tablearg),
                RuleResult::Refused(reason) => {
                    self.count(at, packet, now);
                    self.live.stop(at, walk, Step::Drop(reason))
                }
            };
            match next {
                Next::Rule(position) => at = position,
                // Most end here: said anew, and not copied from where its bytes have just been written.
                Next::Stop(Step::Pass) => return Step::Pass,
                Next::Stop(step) => return step,
            }
        }
    }

    /// Tries one rule. `tablearg` becomes the value of the last table that matched.
    #[inline]
    pub(super) fn try_rule(
        &mut self,
        Candidate { position: at, holds }: Candidate,
        walk: &mut Walk,
        packet: &Packet<'_>,
        now: Time,
        tablearg: &mut Option<Value>,
    ) -> RuleResult {
        let rule = &self.live.program.rules[at];
        if !rule.enabled {
            return RuleResult::Miss;
        }
        let lookup = rule.probe.filter(|lookup| walk.memo.needs(*lookup));
        if let Some(lookup) = lookup {
            if rule.prob != 0 && self.random.next() >= rule.prob {
                return RuleResult::Miss;
            }
            if let Some(position) = self.look_up(lookup, walk, packet, now) {
                // States of two names, each behind the other's check-state, could send a packet round for ever.
                if !walk.jump() {
                    return RuleResult::Refused(DropReason::Loop);
                }
                return RuleResult::Run(position);
            }
        }
        let rule = &self.live.program.rules[at];
        if matches!(rule.act, CompiledAction::CheckState) {
            return RuleResult::Miss;
        }
        if !holds {
            let sight = self.live.sight(packet);
            let mut found = None;
            if !all_hold(self.live.program.insns_of(rule), &sight, walk, rule.number, &mut found) {
                return RuleResult::Miss;
            }
            *tablearg = found.copied();
        }
        if lookup.is_none() && rule.prob != 0 && self.random.next() >= rule.prob {
            return RuleResult::Miss;
        }
        if rule.install.is_some()
            && let Err(reason) = self.install(at, walk, packet, now, *tablearg)
        {
            return RuleResult::Refused(reason);
        }
        if self.live.program.rules[at].defer { RuleResult::Miss } else { RuleResult::Run(at) }
    }

    /// Looks the packet's state up; a hit gives the position of the rule that made it.
    fn look_up(&mut self, lookup: Lookup, walk: &mut Walk, packet: &Packet<'_>, now: Time) -> Option<usize> {
        walk.memo = match lookup {
            Lookup::Any => LookupCache::Any,
            Lookup::Named(name) => LookupCache::Named(name),
        };
        let flow = flow_of(packet, walk)?;
        let fragment = if packet.fragment == Fragment::Whole { None } else { self.fragment_of(packet) };
        let hit = match (packet.fragment, fragment) {
            (Fragment::Later, Some(id)) => {
                self.states.lookup_fragment(&flow, id, lookup, packet.counted_bytes(), now)
            }
            _ => None,
        };
        let hit = hit.or_else(|| self.states.lookup(&flow, lookup, &packet.segment(), now));
        let hit = match hit {
            Some(hit) => hit,
            None => self.states.lookup_related(&self.live.quoted_by(packet, walk)?, lookup, now)?,
        };
        if let (Fragment::First, Some(id)) = (packet.fragment, fragment) {
            self.states.note_fragment(&flow, id, now);
        }
        walk.answers = (hit.direction == Direction::Reverse).then_some(hit.rule);
        self.live.program.position_of(hit.rule)
    }

    /// The identification of a fragment's datagram, if later fragments go by it.
    #[cold]
    fn fragment_of(&self, packet: &Packet<'_>) -> Option<u32> {
        packet.fragment_id().filter(|_| self.live.settings.fragments)
    }

    /// Makes the state that a rule with a state option asks for.
    fn install(
        &mut self,
        at: usize,
        walk: &Walk,
        packet: &Packet<'_>,
        now: Time,
        tablearg: Option<Value>,
    ) -> Result<(), DropReason> {
        let rule = &self.live.program.rules[at];
        let Some(StateInstall { name, mut install, limit_tablearg }) = rule.install.as_deref().copied()
        else {
            return Ok(());
        };
        let flow = flow_of(packet, walk).ok_or(DropReason::NotIp)?;
        if limit_tablearg && let Some(limit) = &mut install.limit {
            limit.max = tablearg.map_or(0, |value| value.limit);
        }
        install.lifetime = install.lifetime.or(walk.lifetime);
        let made = self.states.install(&flow, name, &packet.segment(), rule.id, &install, now);
        if made.is_ok()
            && packet.fragment == Fragment::First
            && let Some(id) = self.fragment_of(packet)
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

    /// Says, once a second at most, that a packet could not have its state, and why: as ipfw does, whether or not the rule
    /// has `log`.
    #[cold]
    fn log_refused(&mut self, at: usize, refused: Refused, walk: &Walk, packet: &Packet<'_>, now: Time) {
        if let Some(word) = refused_word(refused).filter(|_| self.shared.refusals.take(now)) {
            let port = if walk.dir == Dir::In { walk.recv } else { walk.xmit };
            let number = self.live.program.rules[at].number;
            self.log.put(LogEntry::new(now, number, word, walk.dir, port, packet));
        }
    }

    /// Runs the action part of a rule: counts, logs, tags, acts.
    pub(super) fn run(
        &mut self,
        at: usize,
        walk: &mut Walk,
        packet: &Packet<'_>,
        now: Time,
        tablearg: Option<Value>,
    ) -> Next {
        self.count(at, packet, now);
        let rule = &self.live.program.rules[at];
        let act = rule.act;
        if rule.only_allows() {
            return self.live.stop(at, walk, Step::Pass);
        }
        if rule.log.is_some() {
            self.log_packet(at, walk, packet, now);
        }
        if !self.live.tag(at, walk, tablearg) {
            self.seat.count_tag();
        }
        match act {
            CompiledAction::Pipe(arg) => {
                self.police(at, walk, packet, now, number(arg, tablearg, |value| value.pipe))
            }
            _ => self.live.act(at, walk, packet, tablearg),
        }
    }

    /// RuleCounters the packet for a rule: of an IP packet its own length, of another frame that on the wire.
    #[inline]
    fn count(&self, at: usize, packet: &Packet<'_>, now: Time) {
        self.counts.count(at, packet.counted_bytes(), now);
    }

    fn police(&self, at: usize, walk: &mut Walk, packet: &Packet<'_>, now: Time, pipe: u32) -> Next {
        let step = match self.live.pipes.get(&pipe) {
            None => Step::Drop(DropReason::NoPipe),
            Some(bucket) => match bucket.take(packet.counted_bytes().into(), now) {
                true => Step::Pass,
                false => Step::Drop(DropReason::Policed),
            },
        };
        self.live.stop(at, walk, step)
    }

    fn log_packet(&mut self, at: usize, walk: &Walk, packet: &Packet<'_>, now: Time) {
        let rule = &self.live.program.rules[at];
        let Some(log) = &rule.log else { return };
        if !log.take(self.live.settings.verbose_limit) {
            return;
        }
        let port = if walk.dir == Dir::In { walk.recv } else { walk.xmit };
        self.log.put(LogEntry::new(now, rule.number, log_word(rule), walk.dir, port, packet));
    }
}

impl Generation {
    /// What ipfw drops before the first rule.
    pub(super) fn refuse_unseen(&self, packet: &Packet<'_>) -> Option<DropReason> {
        let four = matches!(packet.addresses, Addresses::V4(..));
        if four && packet.proto == proto::TCP && packet.fragment_offset == 1 {
            return Some(DropReason::TinyFragment);
        }
        if packet.ext6 & ext6::UNKNOWN != 0 && self.settings.deny_unknown_exthdrs {
            return Some(DropReason::UnknownHeader);
        }
        None
    }

    /// The position at which a walk starts or goes on.
    pub(super) fn resume(&self, walk: &Walk) -> usize {
        let Some((id, number)) = walk.stopped else { return 0 };
        match self.program.position_of(id) {
            Some(position) => self.program.next(position),
            // The rule is gone: on from the next number, as ipfw does.
            None => self.program.position_from(number.saturating_add(1)),
        }
    }

    /// What an ICMP error quotes, if states may be found by it.
    pub(super) fn quoted_by(&self, packet: &Packet<'_>, walk: &Walk) -> Option<Quoted> {
        if !self.settings.related || !matches!(packet.proto, proto::ICMP | proto::ICMP6) {
            return None;
        }
        let mut quoted = Quoted::of(packet)?;
        quoted.flow = placed(quoted.flow, walk);
        Some(quoted)
    }

    /// Attaches or takes away the rule's tag; false when there was no room.
    pub(super) fn tag(&self, at: usize, walk: &mut Walk, tablearg: Option<Value>) -> bool {
        let Some((remove, tag)) = self.program.rules[at].tag else { return true };
        let tag = number(tag, tablearg, |value| value.tag) as u16;
        if remove {
            walk.untag(tag);
            return true;
        }
        tag == 0 || walk.tag(tag)
    }

    /// The action itself. It changes nothing but the walk, so that `explain` can run it too; a pipe, which does change,
    /// is taken to let the packet pass.
    pub(super) fn act(
        &self,
        at: usize,
        walk: &mut Walk,
        packet: &Packet<'_>,
        tablearg: Option<Value>,
    ) -> Next {
        let queue = |arg| number(arg, tablearg, |value| value.divert) as u16;
        match self.program.rules[at].act {
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
            // A state's rule always has an action of its own; check-state makes no states.
            CompiledAction::Count | CompiledAction::CheckState => self.go_on(at),
            CompiledAction::Skipto(jump) => self.skipto(at, jump, tablearg),
            CompiledAction::Call(jump) => self.call(at, walk, jump, tablearg),
            CompiledAction::Return(to) => self.return_to(at, walk, to),
            CompiledAction::Inspect(arg) => self.stop(at, walk, Step::Inspect(queue(arg))),
            CompiledAction::Divert(arg) => self.stop(at, walk, Step::Divert(queue(arg))),
            CompiledAction::Tee(arg) => self.stop(at, walk, Step::Tee(queue(arg))),
            // The next hop is for the way that the rule matched; the answers go where they are routed.
            CompiledAction::Forward(_) if walk.answers == Some(self.program.rules[at].id) => {
                self.stop(at, walk, Step::Pass)
            }
            CompiledAction::Forward(hop) => self.stop(at, walk, forward(hop, packet, tablearg)),
            // Of IPv4 only, as in ipfw; IPv6 goes on with the next rule.
            CompiledAction::Reass if is_ip4_fragment(packet) => self.stop(at, walk, Step::Reassemble),
            CompiledAction::Reass => self.go_on(at),
            CompiledAction::SetDscp(arg) => {
                walk.edits.dscp = Some(number(arg, tablearg, |value| value.dscp) as u8 & 63);
                self.go_on(at)
            }
            CompiledAction::SetMark(arg) => {
                walk.mark = number(arg, tablearg, |value| value.mark);
                self.go_on(at)
            }
            CompiledAction::TcpSetMss(mss) => {
                walk.edits.mss = Some(walk.edits.mss.map_or(mss, |earlier| earlier.min(mss)));
                self.go_on(at)
            }
            CompiledAction::StateTimeout(seconds) => {
                walk.lifetime = Some(seconds);
                self.go_on(at)
            }
        }
    }

    #[inline]
    fn stop(&self, at: usize, walk: &mut Walk, step: Step) -> Next {
        let rule = &self.program.rules[at];
        walk.stopped = Some((rule.id, rule.number));
        Next::Stop(step)
    }

    /// On with the rule behind this one, which may be that of a state that was found.
    fn go_on(&self, at: usize) -> Next {
        Next::Rule(self.program.next(at))
    }

    /// Goes forward; what is not forward is the next rule number.
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

    /// Back behind the last call; without one, on with the next rule.
    fn return_to(&self, at: usize, walk: &mut Walk, to: ReturnTo) -> Next {
        let Some(depth) = walk.depth.checked_sub(1) else { return self.go_on(at) };
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

/// A number of a rule, or the column of the table's value; 0 without a value.
fn number(arg: Arg, tablearg: Option<Value>, column: impl Fn(&Value) -> u32) -> u32 {
    match arg {
        Arg::Number(number) => number,
        Arg::Tablearg => tablearg.as_ref().map_or(0, column),
    }
}

/// What a packet's state is looked up by.
#[inline]
pub(super) fn flow_of(packet: &Packet<'_>, walk: &Walk) -> Option<Flow> {
    packet.flow().map(|flow| placed(flow, walk))
}

/// A flow of the walk's tenant. Link-local addresses mean something on one port only: its number is the zone.
#[inline]
fn placed(mut flow: Flow, walk: &Walk) -> Flow {
    flow.tenant = walk.tenant;
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
        // A next hop of the other family: ipfw's fwd does not match such a packet's family and drops it.
        _ => Step::Drop(DropReason::NoNextHop),
    }
}

/// ipfw's word for an action in its log.
fn log_word(rule: &CompiledRule) -> &'static str {
    match rule.act {
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
        CompiledAction::TcpSetMss(_) => "TcpSetMss",
        CompiledAction::StateTimeout(_) => "StateTimeout",
    }
}

fn is_ip4_fragment(packet: &Packet<'_>) -> bool {
    packet.fragment != Fragment::Whole && matches!(packet.addresses, Addresses::V4(..))
}
