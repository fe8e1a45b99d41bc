//! Users that may not attach for a while.
//!
//! A user is barred after a violation by one of its clients, and after too many attaches: each costs the engine
//! milliseconds. The engine's own user and root are not barred, because they can end the engine anyway.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The time in which attaches are counted.
const MINUTE: Duration = Duration::from_secs(60);

/// Attaches and bars of each user.
#[derive(Debug, Default)]
pub(crate) struct Bars {
    /// Users with attaches in the last minute, or with a bar.
    users: BTreeMap<u32, User>,
    /// Bars so far.
    pub(crate) count: u64,
}

#[derive(Debug)]
struct User {
    barred_until: Option<Instant>,
    attaches: u32,
    since: Instant,
}

impl Bars {
    /// Returns how long the user is barred at `now`, if it is.
    pub(crate) fn left(&mut self, uid: u32, now: Instant) -> Option<Duration> {
        self.users.retain(|_, user| {
            now.saturating_duration_since(user.since) < MINUTE || user.barred_until.is_some_and(|t| t > now)
        });
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

    /// Counts an attach. Returns false if it is one of more than `most` in a minute.
    pub(crate) fn attach(&mut self, uid: u32, now: Instant, most: u32) -> bool {
        let user = self.user(uid, now);
        if now.saturating_duration_since(user.since) >= MINUTE {
            (user.since, user.attaches) = (now, 0);
        }
        user.attaches = user.attaches.saturating_add(1);
        user.attaches <= most
    }

    fn user(&mut self, uid: u32, now: Instant) -> &mut User {
        self.users.entry(uid).or_insert(User { barred_until: None, attaches: 0, since: now })
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
    fn attaches_are_counted_by_the_minute_and_forgotten() {
        let (mut bars, begin) = (Bars::default(), Instant::now());
        let at = |seconds| begin + Duration::from_secs(seconds);
        assert_eq!((0..4).map(|_| bars.attach(7, begin, 3)).collect::<Vec<_>>(), [true, true, true, false]);
        assert!(bars.attach(8, at(1), 3));
        assert!(!bars.attach(7, at(59), 3));
        assert!(bars.attach(7, at(60), 3));
        assert_eq!(bars.left(7, at(120)), None);
        assert!(bars.users.is_empty());
    }
}
