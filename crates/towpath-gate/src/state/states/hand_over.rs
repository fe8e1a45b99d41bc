//! Handing a state to another rule, after a reload.

use std::sync::Arc;

use towpath_wire::Time;

use super::{AddressFamily, States};
use crate::state::events::EventKind;
use crate::state::limits::Limited;
use crate::state::limits::slot_list::NONE;
use crate::state::table::entry::{LIMITED, NewOwner};
use crate::state::table::key::{Key, with_key};
use crate::state::{Flow, Install, Limit, Name, RuleId, Tracking};

/// The result of [`States::hand_over`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandedOver {
    /// The state belongs to the other rule.
    Done,
    /// The flow has another live state under the new name.
    Exists,
    /// The rule has no such state any more.
    Gone,
}

impl States {
    /// Gives the state of a flow that `from` made under `name` to the rule `to`, under `to`'s name. The rule that owns a state
    /// runs its action; the state keeps its expiry, its counters and what was seen of the connection.
    ///
    /// The limit of `to` counts the state, also above its maximum: the state was admitted before. A limit that finds no room
    /// for a parent does not count it. The lifetime of `to` applies from the next packet on. If `to` is strict, a state without
    /// TCP windows stays without.
    pub(crate) fn hand_over(
        &mut self,
        flow: &Flow,
        from: (RuleId, Name),
        to: (RuleId, Name, &Install),
        now: Time,
    ) -> HandedOver {
        self.begin(now);
        let flow = &*self.key_flow(flow);
        with_key!(flow, |key, _side| self.hand_over_key(&key, flow, from, to, now))
    }

    fn hand_over_key<const N: usize>(
        &mut self,
        key: &Key<N>,
        flow: &Flow,
        (rule, name): (RuleId, Name),
        (new_rule, new_name, install): (RuleId, Name, &Install),
        now: Time,
    ) -> HandedOver
    where
        Key<N>: AddressFamily<N>,
    {
        let shared = Arc::clone(&self.shared);
        let family = Key::<N>::family(&shared);
        let Some(slot) = family.find_any(&Key::<N>::local(self).index, key, name) else {
            return HandedOver::Gone;
        };
        let parent = self.adopting_parent(flow, new_name, new_rule, install, now);
        let generation = self.rule_counts.add(&shared.rules, new_rule);
        let (lifetime, every_packet) = install.own_lifetime();
        let owner = NewOwner {
            rule: new_rule,
            name: new_name,
            generation,
            parent,
            limited: parent != NONE,
            lifetime,
            every_packet,
            strict: install.tracking == Tracking::Strict,
        };
        let removed = Arc::clone(&self.removed);
        let live = self.live(now);
        let index = &Key::<N>::local(self).index;
        let (given, unlinked) = family.with_linked(index, slot, key, live, |entry, make_free| {
            let header = entry.header();
            if header.rule() != rule || header.name() != name || removed.contains(header) {
                return Err(HandedOver::Gone);
            }
            if new_name != name && !make_free(new_name) {
                return Err(HandedOver::Exists);
            }
            Ok(entry.set_owner(&owner))
        });
        if let Some(dead) = unlinked {
            self.release_ended::<N>(dead, now);
        }
        // Releases the counts of the previous owner, or those reserved for the new one.
        if let Some(Ok(_)) = given {
            self.record::<N>(EventKind::Updated, slot);
        }
        let (result, rule, generation, parent) = match given.unwrap_or(Err(HandedOver::Gone)) {
            Ok((header, parent)) => {
                let parent = if header.has(LIMITED) { parent } else { NONE };
                (HandedOver::Done, rule, header.generation(), parent)
            }
            Err(result) => (result, new_rule, generation, parent),
        };
        self.rule_counts.subtract(&shared.rules, rule, generation);
        if parent != NONE {
            shared.limits.release_parent(parent, now);
        }
        result
    }

    /// Counts a state in the parent of its new rule, if that has a limit. Returns the parent's slot, or [`NONE`].
    fn adopting_parent(&self, flow: &Flow, name: Name, rule: RuleId, install: &Install, now: Time) -> u32 {
        let Some(limit) = install.limit.filter(|limit| !limit.per_second) else { return NONE };
        let limit = Limit { max: u32::MAX, ..limit };
        let limited = Limited { flow, name, rule, limit };
        self.shared.limits.reserve_parent(&limited, &self.settings, false, now).unwrap_or(NONE)
    }
}
