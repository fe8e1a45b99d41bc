//! The clock of a replay: the time of the dynamic states, from the time stamps of the captures. It never goes back, and one
//! wrong stamp does not move it.
//!
//! What: the stamps of a capture count from its beginning. A capture that begins before the end of the previous one (an older
//! capture, or one that another host made at the same time) continues at that end, so that states expire as they would by the
//! capture's own clock. A stamp more than a day from the current time is accepted if most of the next [`JUDGES`] stamps
//! agree. After a jump forward, the time continues at the new stamp. After a jump back, the time does not change, and later
//! stamps count from it. A stamp that the next ones contradict is wrong and is ignored. Less than a day back is normal reordering between interfaces and hosts: time
//! stands still until the stamps catch up. Clocks that alternate, as those of two interfaces of one capture may, are
//! remembered: a stamp that is near the current time by an earlier clock's count belongs to that clock.
//!
//! Why: states expire by this time. If one wrong stamp (a packet of 2106 among those of today) moved it, all states would expire
//! at once, and none after it.
//!
//! Invariant: [`CaptureClock::at`] never returns less than before.

use towpath_wire::Time;

/// How far a stamp may be from the current time without confirmation: one day in nanoseconds.
const FAR: u64 = 86_400_000_000_000;

/// How many of the next stamps confirm a stamp.
pub const JUDGES: usize = 3;

/// How many earlier clocks of a capture are remembered.
const CLOCKS: usize = 8;

/// Smallest step back that is reported: the shortest lifetime of a state (`net.inet.ip.fw.dyn_rst_lifetime`, 1 s).
const REPORTED: u64 = 1_000_000_000;

/// Stamps of 2^63 ns and above (the year 2262) are invalid.
const END: u64 = 1 << 63;

/// The clock of a replay. See the module's documentation.
///
/// ```
/// use towpath_engine::capture_clock::CaptureClock;
///
/// const YEAR: u64 = 365 * 86_400 * 1_000_000_000;
/// let stamps = [50 * YEAR, 80 * YEAR, 50 * YEAR + 1, 50 * YEAR + 2];
/// let mut clock = CaptureClock::default();
/// let times = [0, 1, 2, 3].map(|i| clock.at(stamps[i], &stamps[i + 1..], false).as_nanos());
/// assert_eq!(times, [50 * YEAR, 50 * YEAR, 50 * YEAR + 1, 50 * YEAR + 2]);
/// assert_eq!(clock.trouble().wrong, Some((2, 30 * i64::try_from(YEAR).unwrap())));
/// ```
#[derive(Clone, Debug, Default)]
pub struct CaptureClock {
    /// The current time. `None` before the first packet.
    now: Option<u64>,
    /// The offset of this capture's stamps. `None` before its first packet.
    shift: Option<u64>,
    /// The capture's earlier offsets, the latest first. Without them, each return to a clock that is ahead would add the difference
    /// again.
    earlier: [Option<u64>; CLOCKS],
    /// Packet number and stamp of the last stamp that was not accepted.
    doubted: Option<(u64, u64)>,
    packets: u64,
    trouble: Trouble,
}

/// Problems with the stamps of one capture. Packet numbers begin at 1; times are nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Trouble {
    /// By how much the capture begins before the end of the previous ones.
    pub early: Option<u64>,
    /// The first packet whose stamp is 1 s or more behind: its number, and by how much.
    pub back: Option<(u64, u64)>,
    /// The first packet whose stamp is wrong: its number, and how far it is ahead.
    pub wrong: Option<(u64, i64)>,
    /// The number of packets with wrong stamps.
    pub wrongs: u64,
}

impl CaptureClock {
    /// Begins another capture.
    pub fn begin(&mut self) {
        *self = Self { now: self.now, ..Self::default() };
    }

    /// The problems of the current capture so far.
    pub fn trouble(&self) -> &Trouble {
        &self.trouble
    }

    /// The time at a packet with this stamp. `next` has the next stamps, as far as they are known. `more`: further packets may
    /// follow those.
    #[inline]
    pub fn at(&mut self, stamp: u64, next: &[u64], more: bool) -> Time {
        self.packets += 1;
        // The common case: a little later than the previous packet.
        if stamp < END
            && let (Some(now), Some(shift)) = (self.now, self.shift)
        {
            let time = stamp.saturating_add(shift);
            if time.wrapping_sub(now) <= FAR {
                self.now = Some(time);
                return Time::from_nanos(time);
            }
        }
        let judges = &next[..next.len().min(JUDGES)];
        Time::from_nanos(self.otherwise(stamp, judges, more))
    }

    #[cold]
    fn otherwise(&mut self, stamp: u64, judges: &[u64], more: bool) -> u64 {
        let (shift, now) = match (self.shift, self.now) {
            (Some(shift), Some(now)) => (shift, now),
            _ => match self.start(stamp, judges) {
                Some(start) => start,
                None => return self.now.unwrap_or(0),
            },
        };
        let mut time = stamp.saturating_add(shift);
        if stamp < END
            && time.abs_diff(now) > FAR
            && let Some((at, known)) = self.known(stamp, now)
        {
            self.turn(known, at);
            time = stamp.saturating_add(known);
        }
        let (ahead, back) = (time.saturating_sub(now), now.saturating_sub(time));
        let far = ahead.max(back) > FAR;
        if stamp >= END || far && !self.is_accepted(stamp, ahead > 0, judges, more) {
            self.doubted = Some((self.packets, stamp));
            self.wrong(i64::try_from(ahead).unwrap_or(i64::MAX) - i64::try_from(back).unwrap_or(i64::MAX));
            return now;
        }
        if back >= REPORTED {
            self.trouble.back.get_or_insert((self.packets, back));
        }
        if far && back > 0 {
            // The stamps count on from the current time.
            self.turn(now.saturating_sub(stamp), CLOCKS - 1);
        }
        self.now = Some(now.max(time));
        now.max(time)
    }

    /// Begins a capture with its first stamp, or with one of the next stamps if most of them show that the first is wrong: they are
    /// more than a day before it, or the first is 0 and they are not. Returns the offset and the time, or `None` if the stamp is
    /// invalid.
    fn start(&mut self, stamp: u64, judges: &[u64]) -> Option<(u64, u64)> {
        let elsewhere = |judge: &&u64| judge.saturating_add(FAR) < stamp || stamp == 0 && **judge > FAR;
        let first = match judges.iter().filter(elsewhere).count() * 2 > judges.len() {
            true => *judges.iter().find(elsewhere).unwrap_or(&stamp),
            false => stamp,
        };
        if first >= END {
            self.wrong(i64::MAX);
            return None;
        }
        let now = self.now.unwrap_or(first);
        let early = now.saturating_sub(first);
        if early >= REPORTED {
            self.trouble.early = Some(early);
        }
        self.shift = Some(early);
        self.now = Some(now.max(first));
        Some((early, now.max(first)))
    }

    /// The earlier clock by which a stamp is nearest to the current time, if within a day: its index in `earlier`, and its offset.
    fn known(&self, stamp: u64, now: u64) -> Option<(usize, u64)> {
        let far = |shift: u64| stamp.saturating_add(shift).abs_diff(now);
        let clocks = self.earlier.iter().enumerate().filter_map(|(at, shift)| Some((at, (*shift)?)));
        clocks.filter(|(_, shift)| far(*shift) <= FAR).min_by_key(|(_, shift)| far(*shift))
    }

    /// Switches to another clock. The current one replaces the one at `at` of the earlier clocks, and moves to their front.
    fn turn(&mut self, shift: u64, at: usize) {
        self.earlier[..=at].rotate_right(1);
        self.earlier[0] = self.shift.replace(shift);
    }

    /// Returns true if a stamp far from the current time is accepted.
    fn is_accepted(&self, stamp: u64, ahead: bool, judges: &[u64], more: bool) -> bool {
        if judges.is_empty() {
            // The last stamp of a capture does no harm. If packets may follow, the previous packet's stamp must agree.
            let same =
                |(packet, doubted): (u64, u64)| packet + 1 == self.packets && doubted.abs_diff(stamp) <= FAR;
            return !more || self.doubted.is_some_and(same);
        }
        let agrees = |judge: &&u64| {
            **judge < END
                && if ahead {
                    judge.saturating_add(FAR) >= stamp
                } else {
                    **judge <= stamp.saturating_add(FAR)
                }
        };
        judges.iter().filter(agrees).count() * 2 > judges.len()
    }

    fn wrong(&mut self, ahead: i64) {
        self.trouble.wrong.get_or_insert((self.packets, ahead));
        self.trouble.wrongs += 1;
    }
}

impl Trouble {
    /// The problems as sentences about the capture `name`.
    pub fn messages(&self, name: &str) -> Vec<String> {
        let mut messages = Vec::new();
        if let Some(early) = self.early {
            let early = span(early);
            messages.push(format!(
                "{name}: begins {early} before the end of the previous captures; its time continues from there"
            ));
        }
        if let Some((packet, back)) = self.back {
            let (back, rest) = (span(back), if back > FAR { "; it continues from there" } else { "" });
            messages.push(format!("{name}: time goes back by {back} at packet {packet}{rest}"));
        }
        if let Some((packet, ahead)) = self.wrong {
            let (far, word) = (span(ahead.unsigned_abs()), if ahead < 0 { "behind" } else { "ahead of" });
            let more = match self.wrongs {
                1 => String::new(),
                wrongs => format!(", and {} more", wrongs - 1),
            };
            messages.push(format!(
                "{name}: packet {packet} is {far} {word} its neighbors{more}; its time stamp is ignored"
            ));
        }
        messages
    }
}

/// A duration as text.
fn span(nanos: u64) -> String {
    match nanos / 1_000_000_000 {
        seconds if nanos > 2 * FAR => format!("{} days", seconds / 86_400),
        seconds => format!("{seconds} s"),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const S: u64 = 1_000_000_000;
    const DAY: u64 = 86_400 * S;
    const NOW: u64 = 20_000 * DAY;

    /// The times of one capture, in seconds since `NOW`.
    fn times(clock: &mut CaptureClock, stamps: &[u64]) -> Vec<i64> {
        clock.begin();
        let time = |i: usize| clock.at(stamps[i], &stamps[i + 1..], false).as_nanos();
        (0..stamps.len()).map(time).map(|time| (time as i64 - NOW as i64) / S as i64).collect()
    }

    #[test]
    fn stamps_give_times() {
        let s = |seconds: i64| NOW.wrapping_add_signed(seconds * S as i64);
        let d = |days: i64| s(days * 86_400);
        let (day, month) = (86_400, 30 * 86_400);
        #[rustfmt::skip]
        let rows: &[(&[u64], &[i64], Trouble)] = &[
            (&[], &[], Trouble::default()),
            (&[s(0), s(1), s(1), s(5)], &[0, 1, 1, 5], Trouble::default()),
            // Slightly out of order. A second is reported.
            (&[s(5), s(5) - 1, s(6)], &[5, 5, 6], Trouble::default()),
            (&[s(5), s(2), s(3), s(1), s(6)], &[5, 5, 5, 5, 6], Trouble { back: Some((2, 3 * S)), ..Trouble::default() }),
            // A step of one day is accepted. A longer one needs confirmation, except at the last packet.
            (&[s(0), d(1), d(2)], &[0, day, 2 * day], Trouble::default()),
            (&[s(0), d(9), d(9), d(9)], &[0, 9 * day, 9 * day, 9 * day], Trouble::default()),
            (&[s(0), d(9), d(18), d(27)], &[0, 9 * day, 18 * day, 27 * day], Trouble::default()),
            (&[s(0), d(9), s(1), s(2), s(3)], &[0, 0, 1, 2, 3],
                Trouble { wrong: Some((2, 9 * DAY as i64)), wrongs: 1, ..Trouble::default() }),
            (&[s(0), s(1), 0, s(2), s(3)], &[0, 1, 1, 2, 3],
                Trouble { wrong: Some((3, -((NOW + S) as i64))), wrongs: 1, ..Trouble::default() }),
            (&[s(0), d(9), d(8), s(1), s(2), s(3)], &[0, 0, 0, 1, 2, 3],
                Trouble { wrong: Some((2, 9 * DAY as i64)), wrongs: 2, ..Trouble::default() }),
            (&[s(0), u64::MAX, s(1), u64::MAX], &[0, 0, 1, 1],
                Trouble { wrong: Some((2, i64::MAX)), wrongs: 2, ..Trouble::default() }),
            // The first stamp is wrong.
            (&[d(900), s(1), s(2), s(3)], &[1, 1, 2, 3],
                Trouble { wrong: Some((1, 900 * DAY as i64 - S as i64)), wrongs: 1, ..Trouble::default() }),
            (&[u64::MAX, s(1), s(2), s(3)], &[1, 1, 2, 3],
                Trouble { wrong: Some((1, i64::MAX)), wrongs: 1, ..Trouble::default() }),
            (&[0, s(1), s(2), s(3)], &[1, 1, 2, 3],
                Trouble { wrong: Some((1, -((NOW + S) as i64))), wrongs: 1, ..Trouble::default() }),
            // Another clock from the fourth packet on.
            (&[s(0), s(1), s(9), d(-30), d(-30) + 5 * S, d(-30) + 7 * S], &[0, 1, 9, 9, 14, 16],
                Trouble { back: Some((4, 30 * DAY + 9 * S)), ..Trouble::default() }),
            // Two alternating clocks, one 30 days behind. Both are remembered.
            (&[s(0), s(1), s(2),
                d(-30) + 3 * S, d(-30) + 4 * S, d(-30) + 5 * S,
                s(6), s(7), s(8),
                d(-30) + 9 * S, d(-30) + 10 * S, d(-30) + 11 * S,
                s(12), s(13)],
                &[0, 1, 2, 2, 3, 4, 6, 7, 8, 8, 9, 10, 12, 13],
                Trouble { back: Some((4, 30 * DAY - S)), ..Trouble::default() }),
            // One 30 days ahead: it is accepted once.
            (&[s(0), s(1), s(2),
                d(30) + 3 * S, d(30) + 4 * S, d(30) + 5 * S,
                s(6), s(7), s(8),
                d(30) + 9 * S, d(30) + 10 * S, d(30) + 11 * S,
                s(12), s(13)],
                &[0, 1, 2, month + 3, month + 4, month + 5, month + 5, month + 6, month + 7,
                    month + 9, month + 10, month + 11, month + 11, month + 12],
                Trouble { back: Some((7, 30 * DAY - S)), ..Trouble::default() }),
        ];
        for (stamps, expected, trouble) in rows {
            let mut clock = CaptureClock::default();
            assert_eq!(times(&mut clock, stamps), *expected, "{stamps:?}");
            assert_eq!(clock.trouble(), trouble, "{stamps:?}");
        }
    }

    #[test]
    fn captures_follow_each_other() {
        let s = |seconds: i64| NOW.wrapping_add_signed(seconds * S as i64);
        let mut clock = CaptureClock::default();
        assert_eq!(times(&mut clock, &[s(0), s(100)]), [0, 100]);
        assert_eq!(times(&mut clock, &[s(101), s(130)]), [101, 130], "later capture");
        assert_eq!(times(&mut clock, &[s(-1000), s(-900), s(-800)]), [130, 230, 330], "older capture");
        assert_eq!(clock.trouble().early, Some(1130 * S));
        assert_eq!(times(&mut clock, &[s(400), s(401)]), [400, 401], "its own clock again");
        assert_eq!(
            times(&mut clock, &[s(86_400_000), s(86_400_001)]),
            [86_400_000, 86_400_001],
            "much later"
        );
        assert_eq!(clock.trouble(), &Trouble::default());
    }

    /// A capture that is still being written: the next stamp is often unknown.
    #[test]
    fn packets_one_by_one() {
        let mut clock = CaptureClock::default();
        let mut at = |stamp: u64| clock.at(stamp, &[], true).as_nanos();
        assert_eq!(at(NOW), NOW);
        assert_eq!(at(NOW + 9 * DAY), NOW, "unconfirmed");
        assert_eq!(at(NOW + 1), NOW + 1, "not confirmed");
        assert_eq!(at(NOW + 9 * DAY), NOW + 1);
        assert_eq!(at(NOW + 9 * DAY + 1), NOW + 9 * DAY + 1, "confirmed");
    }

    #[test]
    fn problems_are_reported() {
        let trouble = Trouble {
            early: Some(1130 * S),
            back: Some((3, 3 * DAY)),
            wrong: Some((7, -5 * S as i64)),
            wrongs: 2,
        };
        let messages = trouble.messages("a.pcap");
        assert_eq!(
            messages[0],
            "a.pcap: begins 1130 s before the end of the previous captures; its time continues from there"
        );
        assert_eq!(messages[1], "a.pcap: time goes back by 3 days at packet 3; it continues from there");
        assert_eq!(
            messages[2],
            "a.pcap: packet 7 is 5 s behind its neighbors, and 1 more; its time stamp is ignored"
        );
    }

    proptest! {
        /// Time does not go back, for any stamps.
        #[test]
        fn time_never_goes_back(captures in prop::collection::vec(prop::collection::vec(any::<u64>(), 0..20), 0..4), known in 0usize..5) {
            let mut clock = CaptureClock::default();
            let mut now = 0;
            for stamps in captures {
                clock.begin();
                for i in 0..stamps.len() {
                    let next = &stamps[i + 1..stamps.len().min(i + 1 + known)];
                    let time = clock.at(stamps[i], next, known < 3).as_nanos();
                    prop_assert!(time >= now);
                    now = time;
                }
            }
        }

        #[test]
        fn ordered_stamps_are_taken_unchanged(mut stamps in prop::collection::vec(0..END, 0..50)) {
            stamps.sort_unstable();
            let mut clock = CaptureClock::default();
            clock.begin();
            for i in 0..stamps.len() {
                prop_assert_eq!(clock.at(stamps[i], &stamps[i + 1..], false).as_nanos(), stamps[i]);
            }
            prop_assert_eq!(clock.trouble(), &Trouble::default());
        }
    }
}
