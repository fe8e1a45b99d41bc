//! Foreseeing the result of an install, for explanations: nothing is made, counted or collected.
//!
//! What: [`States::foresee`] takes the steps of [`States::insert`](super::insert) in their order. Where an install would collect expired
//! states, it looks at the slots that the next sweep scans and counts what their states would release. Retired slots count as free: the
//! other workers end their grace period with their next burst.

use std::ops::Range;

use hashbrown::HashMap;
use towpath_wire::Time;

use super::sweep::RECLAIM;
use super::{AddressFamily, States, TCP};
use crate::state::limits::sources::SourceId;
use crate::state::limits::{Limited, Released};
use crate::state::table::entry::{CAPPED, LIMITED};
use crate::state::table::key::{FlowKey, Key, with_key};
use crate::state::tcp::begins;
use crate::state::{Direction, Flow, Install, Installed, Lookup, Name, Refused, RuleId, Segment, Tracking};

/// States that the walks of one packet would make.
#[derive(Clone, Debug, Default)]
pub struct Foreseen(Vec<ForeseenState>);

/// A state that would be made.
#[derive(Clone, Debug)]
struct ForeseenState {
    flow: Flow,
    name: Name,
    rule: RuleId,
    install: Install,
}

/// The entries that the sweeps of one install would collect.
#[derive(Debug, Default)]
struct Swept {
    /// Slots of each family that were swept.
    slots: u32,
    /// States that would be collected.
    states: u64,
    parents: Released,
    sources: HashMap<SourceId, u32>,
}

impl Foreseen {
    /// The rule and the name of the state that would be made and that this lookup finds. It is newer than all states of the flow.
    pub(crate) fn find(&self, flow: &Flow, lookup: Lookup) -> Option<(RuleId, Name)> {
        let is = |state: &&ForeseenState| {
            state.flow == *flow && (lookup == Lookup::Any || lookup == Lookup::Named(state.name))
        };
        self.0.iter().rev().find(is).map(|state| (state.rule, state.name))
    }
}

impl States {
    /// The result that [`States::install`] would have after the installs in `before`, to which a new state is added.
    pub(crate) fn foresee(
        &self,
        before: &mut Foreseen,
        (flow, name): (&Flow, Name),
        segment: &Segment,
        rule: RuleId,
        install: &Install,
        now: Time,
    ) -> Result<Installed, Refused> {
        if before.find(flow, Lookup::Named(name)).is_some() {
            return Ok(Installed::Existing);
        }
        if let Some((_, _, fits)) = self.peek_packet(flow, Lookup::Named(name), segment, now) {
            return if fits { Ok(Installed::Existing) } else { Err(Refused::Invalid) };
        }
        if self.must_repeat(flow, segment, now, false) {
            return Err(Refused::FirstSyn);
        }
        if install.tracking == Tracking::Strict && flow.proto == TCP && !begins(segment.tcp_flags) {
            return Err(Refused::Invalid);
        }
        let key_flow = &*self.key_flow(flow);
        let new = ForeseenState { flow: *key_flow, name, rule, install: *install };
        self.foresee_room(before, &new, now)?;
        before.0.push(ForeseenState { flow: *flow, ..new });
        Ok(Installed::New)
    }

    /// Checks the bounds that [`States::insert`](super::insert) reserves.
    fn foresee_room(&self, before: &Foreseen, new: &ForeseenState, now: Time) -> Result<(), Refused> {
        let (shared, settings) = (&*self.shared, &self.settings);
        let mut swept = Swept::default();
        let max = u64::from(settings.dyn_max);
        let more = before.0.len() as u64;
        let used = shared.occupancy.used(self.workers()) + more;
        if used >= max {
            self.foresee_sweep(&mut swept, now);
        }
        if let Some(install) = limited(new) {
            let others: Vec<Limited<'_>> = before.0.iter().filter_map(limited).collect();
            let foresee = |released: Option<&Released>| {
                shared.limits.foresee_parent(&install, &others, settings, released, now)
            };
            match foresee(None) {
                Ok(()) => {}
                Err(Refused::OverRate) => return Err(Refused::OverRate),
                Err(first) => {
                    self.foresee_sweep(&mut swept, now);
                    match foresee(Some(&swept.parents)) {
                        Err(Refused::ParentsFull) => return Err(first),
                        result => result?,
                    }
                }
            }
        }
        if settings.dyn_source_max > 0 {
            let source = SourceId::new(&shared.secret, &new.flow);
            let of = |state: &&ForeseenState| SourceId::new(&shared.secret, &state.flow) == source;
            let count = shared.limits.count_source(source) + before.0.iter().filter(of).count() as u32;
            if count >= settings.dyn_source_max {
                self.foresee_sweep(&mut swept, now);
                let released = swept.sources.get(&source).copied().unwrap_or_default();
                if count.saturating_sub(released) >= settings.dyn_source_max {
                    return Err(Refused::OverSource);
                }
            }
        }
        let left = if swept.slots > 0 { (shared.len() + more).saturating_sub(swept.states) } else { used };
        if left < max || left == max && settings.dyn_evict && (more > 0 || self.has_victim(now)) {
            Ok(())
        } else {
            Err(Refused::Full)
        }
    }

    /// Adds what the next sweep for room would collect.
    fn foresee_sweep(&self, swept: &mut Swept, now: Time) {
        self.foresee_sweep_of::<2>(swept, now);
        self.foresee_sweep_of::<6>(swept, now);
        swept.slots += RECLAIM;
    }

    fn foresee_sweep_of<const N: usize>(&self, swept: &mut Swept, now: Time)
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let len = family.slab.len();
        if swept.slots >= len {
            // All slots were swept before.
            return;
        }
        let live = self.live(now);
        let slots: [Range<u32>; 2] = family.sweep.peek(len, swept.slots, RECLAIM.min(len - swept.slots));
        for slot in slots.into_iter().flatten() {
            let due = family.may_have_expired(slot, now) || !self.removed.is_empty();
            if !due || !family.slab.is_occupied(slot) || live.accepts(family.entry(slot)) {
                continue;
            }
            let entry = family.entry(slot);
            let header = entry.header();
            swept.states += 1;
            if header.has(LIMITED) {
                *swept.parents.entry(entry.parent()).or_default() += 1;
            }
            if header.has(CAPPED) {
                let source = SourceId::new(&self.shared.secret, &entry.key().flow(header.forward()));
                *swept.sources.entry(source).or_default() += 1;
            }
        }
    }

    /// The direction in which a later fragment of the datagram `id` would find its live state, and the state.
    pub(crate) fn peek_fragment(
        &self,
        flow: &Flow,
        id: u32,
        lookup: Lookup,
        now: Time,
    ) -> Option<(crate::state::Listed, Direction, bool)> {
        let (src_port, dst_port) = self.shared.fragments.find(self.datagram(flow, id), now)?;
        let flow = &Flow { src_port, dst_port, ..*flow };
        let (listed, direction, _) = self.peek_packet(flow, lookup, &Segment::default(), now)?;
        Some((listed, direction, true))
    }

    /// Returns true if the packet is a SYN that its sender must repeat (`dyn_first_syn`). Remembers the SYN if `note`.
    pub(super) fn must_repeat(&self, flow: &Flow, segment: &Segment, now: Time, note: bool) -> bool {
        if !self.settings.dyn_first_syn || flow.proto != TCP || !begins(segment.tcp_flags) {
            return false;
        }
        let words = with_key!(flow, |key, _side| key.0.to_vec());
        let words: [u64; 6] = std::array::from_fn(|at| words.get(at).copied().unwrap_or(0));
        let hash = self.shared.secret.hash(&words);
        let syns = &self.shared.first_syns;
        !if note { syns.is_repeated(hash, now) } else { syns.would_be_repeated(hash, now) }
    }
}

/// The install of a state with a limit.
fn limited(state: &ForeseenState) -> Option<Limited<'_>> {
    let ForeseenState { flow, name, rule, install } = state;
    install.limit.map(|limit| Limited { flow, name: *name, rule: *rule, limit })
}
