//! Users that may not attach for a while.
//!
//! A user is barred after a violation by one of its clients, and after too many attaches: each costs the engine
//! milliseconds. The engine's own user and root are not barred, because they can end the engine anyway.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// Attaches and bars of each user.
#[derive(Debug, Default)]
pub(crate) struct Bars {
    /// Users with a bar, or whose budget of attaches is not full.
    users: BTreeMap<u32, User>,
    /// Bars so far.
    pub(crate) count: u64,
}

#[derive(Debug)]
struct User {
    barred_until: Option<Instant>,
    /// When the budget of attaches is full again.
    full_at: Instant,
}

impl Bars {
    /// Returns how long the user is barred at `now`, if it is.
    pub(crate) fn left(&mut self, uid: u32, now: Instant) -> Option<Duration> {
        self.users.retain(|_, user| user.full_at > now || user.barred_until.is_some_and(|until| until > now));
        let until = self.users.get(&uid)?.barred_until?;
        Some(until.saturating_duration_since(now)).filter(|left| !left.is_zero())
    }

    /// Bars the user until `now` + `time`.
    pub(crate) fn bar(&mut self, uid: u32, now: Instant, time: Duration) {
        let until = now + time;
        let user = self.user(uid, now);
        user.barred_until = Some(user.barred_until.map_or(until, |before| before.max(until)));
        self.count += 1;
    }

    /// Takes an attach from the user's budget of `burst` attaches, which regains one per `interval` (a token bucket). Returns
    /// false if the budget is empty.
    pub(crate) fn attach(&mut self, uid: u32, now: Instant, burst: u32, interval: Duration) -> bool {
        let user = self.user(uid, now);
        let full_at = user.full_at.max(now) + interval;
        let within = full_at.saturating_duration_since(now) <= interval * burst;
        if within {
            user.full_at = full_at;
        }
        within
    }

    fn user(&mut self, uid: u32, now: Instant) -> &mut User {
        self.users.entry(uid).or_insert(User { barred_until: None, full_at: now })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_ends_and_a_later_one_counts() {
        let (mut bars, begin) = (Bars::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!(bars.left(7, begin), None);
        bars.bar(7, begin, Duration::from_secs(10));
        bars.bar(7, at(5), Duration::from_secs(2));
        assert_eq!(bars.left(7, at(4)), Some(Duration::from_secs(6)));
        assert_eq!((bars.left(8, at(4)), bars.left(7, at(10))), (None, None));
        assert_eq!(bars.count, 2);
    }

    #[test]
    fn a_budget_of_attaches_is_regained() {
        let (mut bars, begin) = (Bars::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut attach = |uid, now| bars.attach(uid, now, 3, Duration::from_secs(20));
        assert_eq!((0..5).map(|_| attach(7, begin)).collect::<Vec<_>>(), [true, true, true, false, false]);
        assert!(attach(8, at(1)));
        assert_eq!([at(19), at(20), at(21), at(40)].map(|now| attach(7, now)), [false, true, false, true]);
        assert_eq!(bars.left(7, at(99)), None);
        assert_eq!(bars.users.keys().collect::<Vec<_>>(), [&7]);
        assert_eq!(bars.left(7, at(100)), None);
        assert!(bars.users.is_empty());
    }
}
