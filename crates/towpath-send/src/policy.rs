//! The policy that chooses between zero-copy and plain sends. It uses zero copy only after an isolated probe has shown that
//! the kernel does not copy.
//!
//! SO_EE_CODE_ZEROCOPY_COPIED is lossy: the kernel merges an adjacent range into the last entry of the error queue and keeps
//! that entry's code, and calls in one group share one bit. Only an isolated call is therefore conclusive: one that is sent
//! while no number is outstanding, with no other zero-copy call until its notification is read. A run of COPIED ranges in
//! zero-copy mode is only a hint, and starts a probe.
//!
//! ```text
//! Copying --(64 MiB or 1 s, doubling to 60 s)--> Probing --a probe was not copied--> Zerocopy
//!    ^                                              |  ^                                |
//!    +-------- three probes in a row copied --------+  +--- 16 COPIED ranges in a row --+
//! ```

use std::time::Duration;

use towpath_wire::Time;

/// Consecutive COPIED probes that disable zero copy.
const STREAK: u8 = 3;
/// Consecutive COPIED ranges that start a probe.
const SUSPICIOUS: u8 = 16;
/// Bytes and time after which a copying connection probes again. Both double after each unsuccessful attempt.
const FIRST_BYTES: u64 = 64 << 20;
const FIRST_WAIT: Duration = Duration::from_secs(1);
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// The mode of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Plain sends.
    Copying,
    /// One zero-copy call at a time probes whether the kernel copies; all other calls are plain.
    Probing,
    /// All calls of at least `min_zerocopy` bytes are zero-copy.
    Zerocopy,
}

/// The reason of a mode switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The destination is local, where the kernel always copies. The connection starts in copying mode.
    Local,
    /// The pause between probes has ended.
    Again,
    /// A probe was sent without a copy.
    NotCopied,
    /// Three consecutive probes were copied.
    Copied,
    /// A run of COPIED ranges; starts a probe.
    Suspicion,
    /// The socket refused MSG_ZEROCOPY.
    Refused,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 6] =
        [Self::Local, Self::Again, Self::NotCopied, Self::Copied, Self::Suspicion, Self::Refused];

    /// Name for tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Local => "local",
            Self::Again => "again",
            Self::NotCopied => "not-copied",
            Self::Copied => "copied",
            Self::Suspicion => "suspicion",
            Self::Refused => "refused",
        }
    }
}

/// Decision for the next call of at least `min_zerocopy` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Decision {
    Plain,
    Zerocopy,
    /// An isolated zero-copy call, to be registered with `handle_probe`.
    Probe,
    /// Plain, because a probe is outstanding or waits until no number is outstanding.
    PlainDuringProbe,
}

#[derive(Debug)]
pub(crate) struct Policy {
    mode: Mode,
    /// True if the mode may change.
    adaptive: bool,
    streak: u8,
    suspicion: u8,
    /// Number of the outstanding probe.
    probe: Option<u64>,
    /// Length of the next pause, and the end of the present one, each in bytes and time.
    pause: (u64, Duration),
    resume: (u64, Time),
}

impl Policy {
    /// A connection with a fixed mode.
    pub(crate) fn fixed(mode: Mode) -> Self {
        Self { adaptive: false, ..Self::begin(mode) }
    }

    /// A connection with an adaptive mode. `local` is true if the destination is this machine.
    pub(crate) fn adaptive(local: bool, now: Time) -> (Self, Option<Reason>) {
        let mut policy = Self::begin(if local { Mode::Copying } else { Mode::Probing });
        if local {
            policy.rest(0, now);
        }
        (policy, local.then_some(Reason::Local))
    }

    fn begin(mode: Mode) -> Self {
        Self {
            mode,
            adaptive: true,
            streak: 0,
            suspicion: 0,
            probe: None,
            pause: (FIRST_BYTES, FIRST_WAIT),
            resume: (0, Time::default()),
        }
    }

    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    /// Decides on the next call. `sent` is the total of bytes sent; `outstanding` is the number of outstanding completions.
    pub(crate) fn decide(&mut self, sent: u64, outstanding: usize, now: Time) -> (Decision, Option<Reason>) {
        let mut reason = None;
        if self.mode == Mode::Copying && self.adaptive && (sent >= self.resume.0 || now >= self.resume.1) {
            self.mode = Mode::Probing;
            // The first attempt needs three copied probes to return to copying, each later one a single one.
            self.streak = if self.pause.1 == FIRST_WAIT { 0 } else { STREAK - 1 };
            reason = Some(Reason::Again);
        }
        let decision = match self.mode {
            Mode::Copying => Decision::Plain,
            Mode::Zerocopy => Decision::Zerocopy,
            Mode::Probing if outstanding == 0 => Decision::Probe,
            Mode::Probing => Decision::PlainDuringProbe,
        };
        (decision, reason)
    }

    /// Registers the probe that was sent with `number`.
    pub(crate) fn handle_probe(&mut self, number: u64) {
        self.probe = Some(number);
    }

    /// Processes a notification range: its first number, how many of its numbers were outstanding, and its code. Returns the
    /// result of the probe (true if copied), and the reason if the mode changed.
    pub(crate) fn handle_range(
        &mut self,
        first: u64,
        count: u64,
        copied: bool,
        sent: u64,
        now: Time,
    ) -> (Option<bool>, Option<Reason>) {
        if !self.adaptive {
            return (None, None);
        }
        match self.mode {
            Mode::Copying => (None, None),
            Mode::Zerocopy => (None, self.suspect(copied)),
            Mode::Probing => match self.probe {
                Some(probe) if probe == first && count == 1 => {
                    self.probe = None;
                    (Some(copied), self.judge(copied, sent, now))
                }
                // Numbers from before the probe, or an inconclusive range.
                _ => (None, None),
            },
        }
    }

    /// Fixes the mode at copying: the socket does not support MSG_ZEROCOPY.
    pub(crate) fn refuse(&mut self) -> Reason {
        *self = Self::fixed(Mode::Copying);
        Reason::Refused
    }

    fn judge(&mut self, copied: bool, sent: u64, now: Time) -> Option<Reason> {
        if !copied {
            self.mode = Mode::Zerocopy;
            (self.streak, self.suspicion) = (0, 0);
            self.pause = (FIRST_BYTES, FIRST_WAIT);
            return Some(Reason::NotCopied);
        }
        self.streak += 1;
        if self.streak < STREAK {
            return None;
        }
        self.mode = Mode::Copying;
        self.rest(sent, now);
        Some(Reason::Copied)
    }

    fn rest(&mut self, sent: u64, now: Time) {
        let (bytes, wait) = self.pause;
        self.resume = (sent.saturating_add(bytes), now + wait);
        if wait < LONGEST_WAIT {
            self.pause = (bytes.saturating_mul(2), (wait * 2).min(LONGEST_WAIT));
        }
    }

    fn suspect(&mut self, copied: bool) -> Option<Reason> {
        self.suspicion = if copied { self.suspicion + 1 } else { 0 };
        if self.suspicion < SUSPICIOUS {
            return None;
        }
        self.mode = Mode::Probing;
        (self.suspicion, self.streak, self.probe) = (0, 0, None);
        Some(Reason::Suspicion)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time::from_nanos(0);

    /// Sends a probe and completes it.
    fn probe(policy: &mut Policy, number: u64, copied: bool, now: Time) -> Option<Reason> {
        let (decision, _) = policy.decide(0, 0, now);
        assert_eq!(decision, Decision::Probe);
        policy.handle_probe(number);
        assert_eq!(policy.decide(0, 1, now).0, Decision::PlainDuringProbe, "a probe is isolated");
        let (judged, reason) = policy.handle_range(number, 1, copied, 0, now);
        assert_eq!(judged, Some(copied));
        reason
    }

    #[test]
    fn three_consecutive_copied_probes_disable_zero_copy() {
        let (mut policy, _) = Policy::adaptive(false, NOW);
        assert_eq!(probe(&mut policy, 0, true, NOW), None);
        assert_eq!(probe(&mut policy, 1, true, NOW), None);
        assert_eq!(probe(&mut policy, 2, false, NOW), Some(Reason::NotCopied));
        assert_eq!(policy.decide(0, 9, NOW), (Decision::Zerocopy, None));

        let (mut policy, _) = Policy::adaptive(false, NOW);
        assert_eq!(probe(&mut policy, 0, true, NOW), None);
        assert_eq!(probe(&mut policy, 1, true, NOW), None);
        assert_eq!(probe(&mut policy, 2, true, NOW), Some(Reason::Copied));
        assert_eq!(policy.decide(0, 0, NOW), (Decision::Plain, None));
    }

    #[test]
    fn only_the_isolated_probe_is_conclusive() {
        let (mut policy, _) = Policy::adaptive(false, NOW);
        assert_eq!(policy.decide(0, 0, NOW).0, Decision::Probe);
        policy.handle_probe(4);
        for (first, count) in [(3, 2), (4, 2), (5, 1), (3, 1)] {
            assert_eq!(policy.handle_range(first, count, true, 0, NOW), (None, None));
        }
        assert_eq!(policy.mode(), Mode::Probing);
    }

    #[test]
    fn pauses_double_up_to_a_minute_and_end_by_bytes() {
        let (mut policy, reason) = Policy::adaptive(true, NOW);
        assert_eq!((policy.mode(), reason), (Mode::Copying, Some(Reason::Local)));
        assert_eq!(policy.decide(FIRST_BYTES - 1, 0, NOW), (Decision::Plain, None));
        let mut now = NOW;
        let mut waits = Vec::new();
        for number in 0..10 {
            let began = now;
            while policy.decide(0, 0, now).0 == Decision::Plain {
                now = now + Duration::from_secs(1);
            }
            waits.push(now.since(began).as_secs());
            while policy.mode() == Mode::Probing {
                probe(&mut policy, number, true, now);
            }
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60, 60, 60]);

        let (mut policy, _) = Policy::adaptive(true, NOW);
        assert_eq!(policy.decide(FIRST_BYTES, 0, NOW), (Decision::Probe, Some(Reason::Again)));
    }

    #[test]
    fn a_run_of_copied_ranges_starts_a_probe() {
        let (mut policy, _) = Policy::adaptive(false, NOW);
        probe(&mut policy, 0, false, NOW);
        for number in 1..u64::from(SUSPICIOUS) {
            assert_eq!(policy.handle_range(number, 3, true, 0, NOW).1, None);
        }
        assert_eq!(policy.handle_range(90, 3, false, 0, NOW).1, None, "an uncopied range clears the count");
        for number in 100..99 + u64::from(SUSPICIOUS) {
            assert_eq!(policy.handle_range(number, 3, true, 0, NOW).1, None);
        }
        assert_eq!(policy.handle_range(200, 3, true, 0, NOW).1, Some(Reason::Suspicion));
        assert_eq!(
            policy.decide(0, 5, NOW).0,
            Decision::PlainDuringProbe,
            "the probe waits until no number is outstanding"
        );
        assert_eq!(probe(&mut policy, 201, false, NOW), Some(Reason::NotCopied));
    }

    #[test]
    fn a_fixed_mode_does_not_change() {
        let mut policy = Policy::fixed(Mode::Zerocopy);
        for number in 0..100 {
            assert_eq!(policy.handle_range(number, 1, true, 0, NOW), (None, None));
        }
        assert_eq!(policy.decide(1 << 40, 3, NOW), (Decision::Zerocopy, None));
        assert_eq!(policy.refuse(), Reason::Refused);
        assert_eq!(policy.decide(1 << 40, 0, Time::from_nanos(u64::MAX)), (Decision::Plain, None));
    }
}
