//! The compiled ruleset: names become numbers, addresses masks, and jump targets positions.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use towpath_bpf::{Format, LoadOptions};

use super::index::Index;
use super::insn::{Insn, Op, TableCheck};
use super::port::{PortId, Ports};
use super::state_ahead::CreatingRules;
use super::stateless_prefix::StatelessPrefix;
use crate::rules::address::{Address, TableRef};
use crate::rules::glob;
use crate::rules::option::{Arg, Interface, TagArg, Term, Test};
use crate::rules::protocol::Protocol;
use crate::rules::{Action, Log, NextHop, ReturnTo, Rule, StateName, StateOption, jump_position};
use crate::state::{Install, Limit, LimitMask, Lookup, Name, RuleId};

/// A compiled rule.
#[derive(Debug)]
pub(crate) struct CompiledRule {
    pub(crate) id: RuleId,
    pub(crate) number: u32,
    /// Index of its first instruction in [`Program::insns`].
    pub(crate) first: u32,
    pub(crate) count: u32,
    /// The set of the rule is enabled.
    pub(crate) enabled: bool,
    /// The rule is evaluated if 31 random bits are below this; 0 is always.
    pub(crate) prob: u32,
    /// The state that the rule looks up first.
    pub(crate) lookup: Option<Lookup>,
    pub(crate) install: Option<Box<StateInstall>>,
    pub(crate) defer: bool,
    /// The kernel may forward packets of its states.
    pub(crate) offload: bool,
    pub(crate) action: CompiledAction,
    pub(crate) log: Option<LogLimit>,
    /// Tag to add (false) or remove (true).
    pub(crate) tag: Option<(bool, Arg)>,
}

impl CompiledRule {
    /// Returns true if the rule passes the packet and does nothing else.
    #[inline]
    pub(super) fn only_allows(&self) -> bool {
        matches!(self.action, CompiledAction::Allow) && self.log.is_none() && self.tag.is_none()
    }
}

/// Log limit of a rule and the number of packets that it has logged, shared by all walkers.
#[derive(Debug)]
pub(crate) struct LogLimit {
    amount: Option<u32>,
    logged: Arc<AtomicU32>,
}

impl LogLimit {
    /// Counts one more logged packet. Returns the limit if this packet reaches it. `limit` applies to a rule without `logamount`; 0
    /// means no limit.
    ///
    /// # Errors
    /// The limit, if it was reached before.
    pub(super) fn take(&self, limit: u32) -> Result<Option<u32>, u32> {
        let limit = self.amount.unwrap_or(limit);
        // Relaxed: an independent number.
        let more = |logged: u32| (limit == 0 || logged < limit).then(|| logged.saturating_add(1));
        let before =
            self.logged.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).map_err(|_| limit)?;
        Ok((before.saturating_add(1) == limit).then_some(limit))
    }
}

/// The state that a rule with a state option installs.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StateInstall {
    pub(crate) name: Name,
    pub(crate) install: Install,
    /// The limit is the value of the table entry that matched.
    pub(crate) limit_tablearg: bool,
}

/// A compiled action.
#[derive(Clone, Copy, Debug)]
pub(crate) enum CompiledAction {
    Allow,
    Deny,
    Unreach { code: u8, mtu: u16 },
    Unreach6(u8),
    Reset,
    Reset6,
    Abort,
    Abort6,
    Count,
    CheckState,
    Skipto(Jump),
    Call(Jump),
    Return(ReturnTo),
    Inspect(Arg),
    Divert(Arg),
    Tee(Arg),
    Pipe(Arg),
    Forward(NextHop),
    Reass,
    SetDscp(Arg),
    SetMark(Arg),
    SetConnmark(u32),
    TcpSetMss(u16),
    StateTimeout(u32),
    SetZone(u16),
}

/// Target of a jump.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Jump {
    /// The rule at this position.
    To(u32),
    Tablearg,
}

/// The compiled ruleset.
///
/// `rules[..=default]` are the rules in order. Rules after the default rule only serve existing states: the
/// default dynamic rule, and rules that were deleted while `dyn_keep_states` was set.
#[derive(Debug, Default)]
pub(crate) struct Program {
    pub(crate) rules: Vec<CompiledRule>,
    pub(crate) insns: Vec<Insn>,
    pub(crate) default: usize,
    pub(super) index: Index,
    /// The rules before the first state lookup, if a packet may start with that lookup.
    pub(super) prefix: Option<StatelessPrefix>,
    ids: RulePositions,
    /// The rules that create states, by name.
    pub(super) creating: Vec<CreatingRules>,
    /// Positions of the rules that only pass. Lookups by state need no other rules.
    pub(super) passing: RulePositions,
}

/// The meaning of the names in rules.
pub(crate) struct Resolver<'a> {
    pub(crate) ports: &'a Ports,
    pub(crate) tables: &'a HashMap<Box<str>, u32>,
    pub(crate) flows: &'a HashMap<Box<str>, Name>,
    pub(crate) disabled_sets: u32,
    /// Number of packets that each `log` rule has logged.
    pub(crate) logged: &'a HashMap<RuleId, Arc<AtomicU32>>,
}

impl Program {
    /// Compiles `rules` (identity and rule, in order, the default rule last) and `hidden`, the rules that only
    /// serve existing states.
    pub(crate) fn new<'r>(
        rules: impl ExactSizeIterator<Item = (RuleId, &'r Rule)> + Clone,
        hidden: impl Iterator<Item = (RuleId, &'r Rule)>,
        names: &Resolver<'_>,
    ) -> Self {
        let mut program = Self { default: rules.len().saturating_sub(1), ..Self::default() };
        let numbers: Vec<u32> = rules.clone().map(|(_, rule)| rule.number).collect();
        for (id, rule) in rules.chain(hidden) {
            program.add(id, rule, &numbers, names);
        }
        program.prefix =
            StatelessPrefix::new(&program.rules[..=program.default], |rule| program.insns_of(rule));
        program.creating =
            CreatingRules::all(&program.rules[..=program.default], |rule| program.insns_of(rule));
        program.ids = RulePositions::new(program.rules.iter().map(|rule| (rule.id, true)));
        program.passing = RulePositions::new(program.rules.iter().map(|rule| (rule.id, rule.only_allows())));
        program.index = Index::new(&program.rules[..=program.default], |rule| program.insns_of(rule));
        program
    }

    /// Iterates over the flow names that the rules install or look up.
    pub(super) fn flow_names(&self) -> impl Iterator<Item = Name> {
        self.rules.iter().flat_map(|rule| {
            let looked_up = match rule.lookup {
                Some(Lookup::Named(name)) => Some(name),
                _ => None,
            };
            let installs = rule.install.as_deref();
            let shared = installs.and_then(|installs| installs.install.limit?.shared);
            [looked_up, installs.map(|installs| installs.name), shared].into_iter().flatten()
        })
    }

    /// The names of the states of hidden rules.
    pub(super) fn left_names(&self) -> Arc<[Name]> {
        let hidden = &self.rules[self.default + 1..];
        let left: BTreeSet<Name> =
            hidden.iter().filter_map(|rule| Some(rule.install.as_deref()?.name)).collect();
        left.into_iter().collect()
    }

    /// Returns true if the rule is hidden: a state may have it, and no packet is compared with it.
    pub(super) fn is_hidden(&self, rule: RuleId) -> bool {
        self.position_of(rule).is_some_and(|at| at > self.default)
    }

    fn add(&mut self, id: RuleId, rule: &Rule, numbers: &[u32], names: &Resolver<'_>) {
        let first = self.insns.len();
        for block in rule.body.blocks() {
            self.block(block, names);
        }
        let lookup = match (&rule.action, &rule.state) {
            (Action::CheckState(StateName::Any), _) => Some(Lookup::Any),
            (Action::CheckState(name), _) => Some(Lookup::Named(names.flow(name))),
            (_, Some(state)) if state.probe => Some(Lookup::Named(names.flow(&state.name))),
            _ => None,
        };
        self.rules.push(CompiledRule {
            id,
            number: rule.number,
            first: first as u32,
            count: (self.insns.len() - first) as u32,
            enabled: names.disabled_sets >> rule.set & 1 == 0,
            prob: rule.prob.unwrap_or(0),
            lookup,
            install: rule.state.as_ref().map(|state| Box::new(installs(state, names))),
            defer: rule.defer,
            offload: rule.state.as_ref().is_some_and(|state| state.offload),
            action: compile_action(rule, numbers),
            log: rule.log.map(|log| names.logging(id, log)),
            tag: rule.tag.map(|tag| (tag.remove, tag.tag)),
        });
    }

    /// Compiles a single or-block.
    pub(crate) fn of_block(terms: &[Term], names: &Resolver<'_>) -> Vec<Insn> {
        let mut program = Self::default();
        program.block(terms, names);
        program.insns
    }

    /// Compiles an or-block and appends its instructions.
    fn block(&mut self, terms: &[Term], names: &Resolver<'_>) {
        let first = self.insns.len();
        let lone = terms.len() == 1;
        for term in terms {
            let mut ops = ops(&term.test, names);
            if !term.not && ops.iter().any(|op| matches!(op, Op::True)) {
                // The block always matches.
                self.insns.truncate(first);
                return;
            }
            if term.not && ops.len() > 1 && !lone {
                ops = vec![Op::AnyOf(ops.into())];
            }
            let insns = ops.into_iter().map(|op| {
                let ip = op.needs_ip();
                // A lone `not a,b` means `not a` and `not b`.
                Insn { op, not: term.not, or: !(term.not && lone), ip }
            });
            self.insns.extend(insns);
        }
        if let Some(last) = self.insns[first..].last_mut() {
            last.or = false;
        }
    }

    /// Returns the instructions of a rule.
    #[inline]
    pub(crate) fn insns_of(&self, rule: &CompiledRule) -> &[Insn] {
        &self.insns[rule.first as usize..(rule.first + rule.count) as usize]
    }

    /// Returns the position of the rule with this identity.
    #[inline]
    pub(crate) fn position_of(&self, id: RuleId) -> Option<usize> {
        self.ids.position(id)
    }

    /// Returns the position of the first rule with at least this number, or of the default rule.
    pub(crate) fn position_from(&self, number: u32) -> usize {
        let order = crate::rules::order;
        self.rules[..self.default].partition_point(|rule| order(rule.number) < order(number))
    }

    /// Returns the position after `position`; the default rule for rules that only serve states.
    #[inline]
    pub(crate) fn next(&self, position: usize) -> usize {
        (position + 1).min(self.default)
    }
}

impl Resolver<'_> {
    fn flow(&self, name: &StateName) -> Name {
        match name {
            StateName::Default | StateName::Any => Name::DEFAULT,
            StateName::Named(name) => self.flows.get(name).copied().unwrap_or(Name::DEFAULT),
        }
    }

    fn logging(&self, id: RuleId, log: Log) -> LogLimit {
        LogLimit { amount: log.amount, logged: self.logged.get(&id).cloned().unwrap_or_default() }
    }

    fn table(&self, reference: &TableRef) -> TableCheck {
        TableCheck {
            table: self.tables.get(&reference.name).copied().unwrap_or(u32::MAX),
            value: reference.value,
        }
    }

    fn port_set(&self, interface: &Interface) -> Box<[u64]> {
        let wanted = |id: PortId| match interface {
            Interface::Any => true,
            Interface::Name(name) => self.ports.name(id) == Some(name),
            Interface::Glob(pattern) => self.ports.name(id).is_some_and(|name| glob::matches(pattern, name)),
            Interface::Address(ip) => self.ports.addresses(id).contains(ip),
            Interface::Table(_) => false,
        };
        let mut set = vec![0u64; self.ports.len().div_ceil(64)];
        for id in self.ports.ids().filter(|id| wanted(*id)) {
            set[usize::from(id.0) / 64] |= 1 << (id.0 % 64);
        }
        set.into()
    }
}

/// Positions of rules by identity.
#[derive(Debug, Default)]
pub(super) struct RulePositions {
    /// The smallest identity in use, so that deleted rules take no space.
    base: u32,
    positions: Vec<u32>,
}

impl RulePositions {
    /// Creates the map for the rules whose flag is true.
    fn new(rules: impl Iterator<Item = (RuleId, bool)> + Clone) -> Self {
        let base = rules.clone().map(|(id, _)| id.0).min().unwrap_or(0);
        let end = rules.clone().map(|(id, _)| id.0 + 1).max().unwrap_or(0);
        let mut positions = vec![u32::MAX; (end - base) as usize];
        for (position, (id, wanted)) in rules.enumerate() {
            if wanted {
                positions[(id.0 - base) as usize] = position as u32;
            }
        }
        Self { base, positions }
    }

    #[inline]
    pub(super) fn position(&self, id: RuleId) -> Option<usize> {
        let position = *self.positions.get(id.0.checked_sub(self.base)? as usize)?;
        (position != u32::MAX).then_some(position as usize)
    }
}

fn installs(state: &StateOption, names: &Resolver<'_>) -> StateInstall {
    let limit = state.limit.as_ref().map(|limit| {
        let net = |net: Option<(u8, u8)>| net.unwrap_or((32, 128));
        let (src, dst) = (net(limit.src_net), net(limit.dst_net));
        let fields = [
            (limit.src_addr, LimitMask::src_net(src.0, src.1)),
            (limit.src_port, LimitMask::SRC_PORT),
            (limit.dst_addr, LimitMask::dst_net(dst.0, dst.1)),
            (limit.dst_port, LimitMask::DST_PORT),
        ];
        let mask =
            fields.iter().filter(|(asked, _)| *asked).fold(LimitMask::default(), |all, (_, bit)| all | *bit);
        let max = match limit.max {
            Arg::Number(max) => max,
            Arg::Tablearg => 0,
        };
        let shared = limit.shared.as_ref().map(|name| names.flow(&StateName::Named(name.clone())));
        Limit { mask, max, per_second: limit.per_second, shared }
    });
    StateInstall {
        name: names.flow(&state.name),
        install: Install { limit, lifetime: state.lifetime, tracking: state.tracking, ..Install::default() },
        limit_tablearg: state.limit.as_ref().is_some_and(|limit| limit.max == Arg::Tablearg),
    }
}

fn compile_action(rule: &Rule, numbers: &[u32]) -> CompiledAction {
    let count = numbers.len().saturating_sub(1);
    let jump = || {
        jump_position(rule, count, |at| numbers[at])
            .map_or(Jump::Tablearg, |position| Jump::To(position as u32))
    };
    match &rule.action {
        Action::Allow => CompiledAction::Allow,
        Action::Deny => CompiledAction::Deny,
        Action::Reject => CompiledAction::Unreach { code: 1, mtu: 0 },
        Action::Unreach { code, mtu } => CompiledAction::Unreach { code: *code, mtu: mtu.unwrap_or(0) },
        Action::Unreach6(code) => CompiledAction::Unreach6(*code),
        Action::Reset => CompiledAction::Reset,
        Action::Reset6 => CompiledAction::Reset6,
        Action::Abort => CompiledAction::Abort,
        Action::Abort6 => CompiledAction::Abort6,
        Action::Count => CompiledAction::Count,
        Action::CheckState(_) => CompiledAction::CheckState,
        Action::Skipto(_) => CompiledAction::Skipto(jump()),
        Action::Call(_) => CompiledAction::Call(jump()),
        Action::Return(to) => CompiledAction::Return(*to),
        Action::Inspect(queue) => CompiledAction::Inspect(*queue),
        Action::Divert(queue) => CompiledAction::Divert(*queue),
        Action::Tee(queue) => CompiledAction::Tee(*queue),
        Action::Pipe(pipe) => CompiledAction::Pipe(*pipe),
        Action::Forward(hop) => CompiledAction::Forward(*hop),
        Action::Reass => CompiledAction::Reass,
        Action::SetDscp(dscp) => CompiledAction::SetDscp(*dscp),
        Action::SetMark(mark) => CompiledAction::SetMark(*mark),
        Action::SetConnmark(mark) => CompiledAction::SetConnmark(*mark),
        Action::TcpSetMss(mss) => CompiledAction::TcpSetMss(*mss),
        Action::StateTimeout(seconds) => CompiledAction::StateTimeout(*seconds),
        Action::SetZone(zone) => CompiledAction::SetZone(*zone),
    }
}

/// Compiles a test to instructions of which one must match.
fn ops(test: &Test, names: &Resolver<'_>) -> Vec<Op> {
    vec![match test {
        Test::Proto(Protocol::Any) | Test::True => Op::True,
        Test::Proto(Protocol::Ip4) | Test::Ip4 => Op::Ip4,
        Test::Proto(Protocol::Ip6) | Test::Ip6 => Op::Ip6,
        Test::Proto(Protocol::Number(number)) => Op::Proto(*number),
        Test::Src(list) => return list.iter().map(|address| src_op(address, names)).collect(),
        Test::Dst(list) => return list.iter().map(|address| dst_op(address, names)).collect(),
        Test::SrcPort(ports) => match ports.0[..] {
            [(lo, hi)] => Op::SrcPort(lo, hi),
            _ => Op::SrcPorts(Box::new(ports.clone())),
        },
        Test::DstPort(ports) => match ports.0[..] {
            [(lo, hi)] => Op::DstPort(lo, hi),
            _ => Op::DstPorts(Box::new(ports.clone())),
        },
        Test::In => Op::In,
        Test::Out => Op::Out,
        Test::Recv(Interface::Table(table)) => Op::RecvTable(names.table(table)),
        Test::Xmit(Interface::Table(table)) => Op::XmitTable(names.table(table)),
        Test::Via(Interface::Table(table)) => Op::ViaTable(names.table(table)),
        Test::Recv(interface) => Op::Recv(names.port_set(interface)),
        Test::Xmit(interface) => Op::Xmit(names.port_set(interface)),
        Test::Via(interface) => Op::Via(names.port_set(interface)),
        Test::Layer2 => Op::Layer2,
        Test::Field(test) => Op::Field(Box::new(test.clone())),
        Test::Established => Op::Established,
        Test::Setup => Op::Setup,
        Test::Lookup { key, mask, table } => {
            let table = names.tables.get(table).copied().unwrap_or(u32::MAX);
            Op::Lookup(Box::new((*key, *mask, table)))
        }
        Test::Flow(table) => Op::Flow(names.table(table)),
        Test::Tagged(TagArg::Tags(tags)) => Op::Tagged(Box::new(tags.clone())),
        Test::Tagged(TagArg::Tablearg) => Op::TaggedTablearg,
        Test::Mark { value: Arg::Number(value), mask } => Op::Mark(*value & mask, *mask),
        Test::Mark { value: Arg::Tablearg, mask } => Op::MarkTablearg(*mask),
        Test::Connmark { value, mask } => Op::Connmark(value & mask, *mask),
        Test::VerRevPath => Op::VerRevPath,
        Test::VerSrcReach => Op::VerSrcReach,
        Test::AntiSpoof => Op::AntiSpoof,
        Test::Bpf(code) => {
            let options = LoadOptions { format: Format::ClassicText, name: None };
            match towpath_bpf::Program::load(code.replace(',', "\n").as_bytes(), &options) {
                Ok(program) => Op::Bpf(Box::new(program)),
                // The parser has already loaded the program; a program that fails to load never matches.
                Err(_) => Op::AnyOf(Box::default()),
            }
        }
    }]
}

fn src_op(address: &Address, names: &Resolver<'_>) -> Op {
    match address {
        Address::Any => Op::True,
        Address::Me => Op::SrcMe,
        Address::Me6 => Op::SrcMe6,
        Address::Net4(net) => Op::Src4(*net),
        Address::Net6(net) => Op::Src6(Box::new(*net)),
        Address::Set4(set) => Op::SrcSet(Box::new(*set)),
        Address::Table(table) => Op::SrcTable(names.table(table)),
    }
}

fn dst_op(address: &Address, names: &Resolver<'_>) -> Op {
    match address {
        Address::Any => Op::True,
        Address::Me => Op::DstMe,
        Address::Me6 => Op::DstMe6,
        Address::Net4(net) => Op::Dst4(*net),
        Address::Net6(net) => Op::Dst6(Box::new(*net)),
        Address::Set4(set) => Op::DstSet(Box::new(*set)),
        Address::Table(table) => Op::DstTable(names.table(table)),
    }
}
