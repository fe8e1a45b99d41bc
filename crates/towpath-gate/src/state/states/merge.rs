//! Merging a state of another gate into the table: one that this table does not have is inserted, a live one takes over what the other
//! gate has seen beyond it.
//!
//! What: the result of a merge does not depend on how often or in which order records arrive. Packets and bytes are the larger ones of
//! each direction, the flags seen on a TCP connection are those of both gates, and the expiry is the later one. A connection that has
//! ended for the other gate has its shorter lifetime here, too. A SYN that begins another connection in the same state replaces what
//! was seen of the one before. If the other gate has seen a later packet of a state with strict tracking, its windows are unknown until
//! [segments are seen](crate::state::tcp::window) here.
//!
//! Packets of worker threads change the state meanwhile: see the [entry](crate::state::table::entry).

use std::time::Duration;

use towpath_wire::Time;

use super::{AddressFamily, States};
use crate::state::concurrent::worker_counters::Counter;
use crate::state::table::entry::{ASSURED, ExpiryChange, SEEN_REPLY, STRICT, Seen, after};
use crate::state::table::key::{Key, Side, with_key};
use crate::state::tcp::window::Window;
use crate::state::{Ends, Flow, Limit, Name, Refused, RuleId, Saved};

/// How much later the expiry at another gate is, if that has seen a later packet: it is known up to the delay of messages.
const LATER: Duration = Duration::from_millis(100);

/// A state after a merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MergedState {
    /// As [`Saved::id`].
    pub(crate) id: u32,
    /// The merge has inserted it.
    pub(crate) created: bool,
    /// The packets that it had counted before, in both directions.
    pub(crate) before: [u64; 2],
}

impl States {
    /// Merges a saved state, as one of `rule` and `name` if there is no live one of this flow and name. `strict`: it is inserted with
    /// strict tracking.
    pub(crate) fn merge(
        &mut self,
        saved: &Saved,
        rule: RuleId,
        name: Name,
        limit: Option<Limit>,
        strict: bool,
        now: Time,
    ) -> Result<MergedState, Refused> {
        self.begin(now);
        let flow = &*self.key_flow(&saved.listed.flow);
        let merged = |this: &Self| with_key!(flow, |key, side| this.merge_live(&key, side, name, saved, now));
        if let Some(merged) = merged(self) {
            return Ok(merged);
        }
        let theirs = saved.window.map(Window::from_words);
        let window = strict.then(|| Window::default().resumed(theirs).words());
        let resumed = Saved { window, ..saved.clone() };
        if let Some(slot) = self.insert_saved(&resumed, rule, name, limit, now)? {
            let v6 = matches!(flow.ends, Ends::V6(..));
            return Ok(MergedState { id: slot << 1 | u32::from(v6), created: true, before: [0; 2] });
        }
        // A worker has inserted the state, and may have unlinked it since.
        merged(self).ok_or(Refused::Full)
    }

    /// Removes the live state of a flow and name because another gate has removed it, unless it expires later than in `within`. Returns
    /// its number.
    pub(crate) fn remove_merged(
        &mut self,
        flow: &Flow,
        name: Name,
        within: Option<Duration>,
        now: Time,
    ) -> Option<u32> {
        self.begin(now);
        let key = &*self.key_flow(flow);
        let id = with_key!(key, |key, _side| self.id_within(&key, name, within, now))?;
        self.remove(flow, name, now).then_some(id)
    }

    /// The number of a live state that expires in `within`.
    fn id_within<const N: usize>(
        &self,
        key: &Key<N>,
        name: Name,
        within: Option<Duration>,
        now: Time,
    ) -> Option<u32>
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let slot = family.find_any(&Key::<N>::local(self).index, key, name)?;
        let entry = family.entry(slot);
        let expires = self.live(now).accepts(entry).then(|| entry.expires(now))?;
        within.is_none_or(|within| expires <= now + within).then(|| slot << 1 | u32::from(Key::<N>::V6))
    }

    fn merge_live<const N: usize>(
        &self,
        key: &Key<N>,
        side: Side,
        name: Name,
        saved: &Saved,
        now: Time,
    ) -> Option<MergedState>
    where
        Key<N>: AddressFamily<N>,
    {
        let family = Key::<N>::family(&self.shared);
        let slot = family.find_any(&Key::<N>::local(self).index, key, name)?;
        let entry = family.entry(slot);
        if !self.live(now).accepts(entry) {
            return None;
        }
        let same = entry.header().forward() == side;
        let order = |[forward, reverse]: [u64; 2]| if same { [forward, reverse] } else { [reverse, forward] };
        let (packets, bytes) = (order(saved.listed.packets), order(saved.listed.bytes));
        let own = family.counts(slot);
        let newer = [0, 1].map(|at| packets[at] > own[at][0]);
        let expires = (now + saved.listed.remaining).min(after(now, u32::MAX));
        let seen = Seen { proto: saved.listed.flow.proto, bits: saved.seen, reversed: !same, newer };
        if entry.header().has(STRICT) {
            let later = expires > entry.expires(now) + LATER;
            let theirs = saved.window.map(Window::from_words);
            let theirs = theirs.map(|window| if same { window } else { window.reversed() });
            family.windows.with(slot, |window| {
                if later || window.is_learning() {
                    *window = window.resumed([*window].into_iter().chain(theirs));
                }
            });
        }
        if let ExpiryChange::Shortened(end) = entry.merge(expires, seen) {
            family.schedule_sooner(slot, end);
        }
        let theirs = [0, 1].map(|at| [packets[at], bytes[at]]);
        self.add_counts(
            entry,
            slot,
            [0, 1].map(|at| [0, 1].map(|word| theirs[at][word].saturating_sub(own[at][word]))),
        );
        if (saved.replied || packets[1] > 0 && own[1][0] > 0) && entry.set_flag(ASSURED) {
            self.count(Counter::Assured);
        }
        if packets[1] > 0 {
            entry.set_flag(SEEN_REPLY);
        }
        Some(MergedState {
            id: slot << 1 | u32::from(Key::<N>::V6),
            created: false,
            before: own.map(|[packets, _]| packets),
        })
    }
}
