//! A listener of a group: its channel, and its part of the group's area.
//!
//! All parts are the same size. What a user's listeners were detached with, and may still be reading, comes off the parts of
//! the listeners that the user has now: to be detached and come back would otherwise give it one part after another, until
//! nothing is left for the rest of the group.

use std::collections::BTreeSet;

use crate::engine::channel::Channel;
use crate::engine::group::MemberId;
use crate::engine::peer_liveness::Death;
use crate::shm::header::{FLAG_INLINE, Meta};
use crate::shm::seq::Seq;

/// A listener.
#[derive(Debug)]
pub(crate) struct Member {
    pub(crate) id: MemberId,
    pub(crate) channel: Channel,
    /// Most frames that it may have: [`share_out`].
    pub(crate) quota: u32,
}

/// A listener that was detached. Its frames stay in use until its process reads them no more.
#[derive(Debug)]
pub(crate) struct Quarantined {
    pub(crate) channel: Channel,
    /// The frames that it had.
    frames: u32,
}

impl Quarantined {
    /// What `member`, which is dead, had is given to `f` and its no longer.
    pub(crate) fn new(member: Member, mut f: impl FnMut(MemberId, Seq)) -> Self {
        let Member { id, mut channel, .. } = member;
        let frames = channel.frames_left();
        channel.drain_held(|seq| f(id, seq));
        Self { channel, frames }
    }
}

/// Shares out an area of `frame_nr` frames: with all others slow, there is as much left for each. Called when somebody comes,
/// goes, or leaves the quarantine.
pub(crate) fn share_out(frame_nr: u32, members: &mut [Member], quarantine: &[Quarantined]) {
    let uids: BTreeSet<u32> = quarantine.iter().map(|q| q.channel.peer().uid).collect();
    let kept = |uid| quarantine.iter().filter(|q| q.channel.peer().uid == uid).map(|q| q.frames).sum::<u32>();
    let listeners = |uid| members.iter().filter(|m| m.channel.peer().uid == uid).count() as u32;
    let most = frame_nr / members.len().max(1) as u32;
    // What a user without listeners, or with too few, has left behind is nobody's: the others share what is left.
    let unborne: u32 = uids.iter().map(|&uid| kept(uid).saturating_sub(most * listeners(uid))).sum();
    let part = frame_nr.saturating_sub(unborne) / members.len().max(1) as u32;
    let quotas: Vec<u32> = members
        .iter()
        .map(|member| member.channel.peer().uid)
        .map(|uid| part.saturating_sub(kept(uid).div_ceil(listeners(uid))))
        .collect();
    members.iter_mut().zip(quotas).for_each(|(member, quota)| member.quota = quota);
}

impl Channel {
    /// Whether there is a gap record to be published, in a group.
    pub(crate) fn has_gap(&self) -> bool {
        self.gaps.is_pending() && !self.life.is_over()
    }

    /// Publishes a gap record in the group's frame at `at`.
    pub(crate) fn publish_gap(&mut self, at: u32) {
        let Some(meta) = self.gaps.next() else { return };
        let seq = self.publish_at(at, 0, FLAG_INLINE, &meta, &[]);
        self.gaps.told(seq);
        self.stats.gaps += 1;
    }

    /// Publishes what the group has put at `at`.
    pub(crate) fn publish_at(&mut self, at: u32, len: usize, flags: u16, meta: &Meta, inline: &[u8]) -> Seq {
        self.publish(self.rings.rx.frames.room_at(at), len, flags, meta, inline)
    }

    /// Whether `frames` more of the group's frames are within `quota`.
    pub(crate) fn may_have(&self, frames: u32, quota: u32) -> bool {
        self.rings.rx.frames.has_number() && self.frames_left().saturating_add(frames) <= quota
    }

    /// Frames that the client has.
    pub(crate) fn frames_left(&self) -> u32 {
        self.rings.rx.frames.frame_nr() - self.rings.rx.frames.free()
    }

    /// The group's messages that have come back since this was last asked, by first frame.
    pub(crate) fn take_freed(&mut self) -> Vec<u32> {
        self.rings.rx.frames.take_freed()
    }

    /// Whether a dead client reads its frames no more: it has closed its end, or its process is gone.
    pub(crate) fn has_left(&self) -> bool {
        matches!(self.life.death(), Some(Death::Closed | Death::Exited)) || self.life.has_exited()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::process::{Child, Command, Stdio};
    use std::sync::Arc;
    use std::time::Duration;

    use crate::mock::config;
    use crate::shm::sys;
    use crate::{Config, Consumer, Group, MemberId, Meta, Verdict};

    struct World {
        group: Group,
        _dir: tempfile::TempDir,
    }

    /// A group of 32 frames.
    fn world() -> World {
        let dir = tempfile::tempdir().unwrap();
        let group = Group::bind(dir.path().join("g"), Config { deadline: None, ..config() }).unwrap();
        World { group, _dir: dir }
    }

    impl World {
        /// A listener that the engine takes for one of user `uid`, and for process `child`.
        fn join(&mut self, uid: u32, child: Option<&Child>) -> (MemberId, Consumer) {
            let path = self.group.endpoint().path().to_path_buf();
            let client = std::thread::spawn(move || Consumer::attach_as(path, "c").unwrap());
            while self.group.accept().unwrap().is_none() {
                self.group.wait(Some(Duration::from_secs(5))).unwrap();
            }
            let (id, channel) = self.group.members().last().unwrap();
            let life = Arc::get_mut(&mut channel.life).unwrap();
            life.peer.uid = uid;
            if let Some(child) = child {
                life.pidfd = sys::pidfd(child.id());
            }
            self.group.share_out();
            (id, client.join().unwrap())
        }

        fn detach(&mut self, who: MemberId) {
            self.group.members().filter(|(id, _)| *id == who).for_each(|(_, channel)| channel.detach());
            assert_eq!(self.group.remove_dead(|_, _| {}), 1);
        }

        /// How many of 50 messages, each of one frame, this client gets while the others get nothing done.
        fn gets(&mut self, client: &mut Consumer) -> usize {
            let mut got = 0;
            for n in 0..50 {
                self.group.send(&[n; 200], &Meta::default());
                while let Some(frame) = client.try_recv().unwrap() {
                    got += usize::from(frame.header().gap().is_none());
                    client.verdict(frame, Verdict::Pass);
                }
                self.group.poll_verdicts(0, |_, _, _| {});
            }
            got
        }

        fn quotas(&self) -> Vec<u32> {
            self.group.quotas().collect()
        }
    }

    #[test]
    fn who_is_detached_and_comes_back_has_no_part_more() {
        let mut w = world();
        let (_, mut honest) = w.join(1, None);
        let mut left = Vec::new();
        for round in 0..4 {
            let (hostile, client) = w.join(2, None);
            // It keeps all that it gets: half of the area the first time, and nothing after that.
            assert_eq!(w.quotas(), [16, if round == 0 { 16 } else { 0 }], "round {round}");
            assert_eq!(w.gets(&mut honest), 50, "round {round}");
            assert_eq!(w.group.stats().quarantined, if round == 0 { 0 } else { 16 });
            w.detach(hostile);
            left.push(client);
        }
        // The honest one's user has left nothing behind, but what the other one has is not there to be had.
        assert_eq!(w.quotas(), [16]);
        // Of two listeners that a user has, each bears half of what a third one left.
        let ((third, _client), (_, mut second)) = (w.join(1, None), w.join(1, None));
        assert_eq!(w.quotas(), [5, 5, 5]);
        w.gets(&mut second);
        let had = w.group.members().find(|(id, _)| *id == third).unwrap().1.frames_left();
        w.detach(third);
        assert_eq!(w.quotas(), [8 - had.div_ceil(2); 2]);
    }

    #[test]
    fn the_quarantine_is_looked_at_now_and_then_and_ends_with_the_process() {
        let Ok(mut child) = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn() else {
            println!("not tested: there is no cat(1)");
            return;
        };
        let mut w = world();
        let (_, mut honest) = w.join(1, None);
        let (stuck, _client) = w.join(1, Some(&child));
        w.gets(&mut honest);
        w.detach(stuck);
        assert_eq!((w.quotas(), w.group.stats().quarantined), (vec![16], 16));

        let waits = sys::WAITS.get();
        assert_eq!(w.gets(&mut honest), 50);
        w.group.kick();
        // The first poll of all looks, whatever its time.
        let first = sys::WAITS.get() - waits;
        assert!(first <= 1, "{first} calls");
        for (now, looks) in [(2_000_000, 0), (6_000_000, 1), (7_000_000, 0), (11_000_000, 1)] {
            let waits = sys::WAITS.get();
            w.group.look_around(now);
            assert_eq!(sys::WAITS.get() - waits, looks, "at {now}");
        }

        drop(child.stdin.take());
        child.wait().unwrap();
        assert_eq!(w.quotas(), [16]);
        w.group.poll_verdicts(20_000_000, |_, _, _| {});
        assert_eq!((w.quotas(), w.group.stats().quarantined), (vec![32], 0));
    }
}
