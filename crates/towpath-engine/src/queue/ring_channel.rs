//! The channel to an inspector process: a ring in shared memory.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use towpath_port::MAX_FRAME;
use towpath_ring::{
    self as ring, Cause, Death, Decision, FrameOut, Header, Loss, Meta, ReserveError, Seq, Verdict,
};

use super::{About, Channel, Detached};
use crate::drop_reason::DropReason;

/// The channel to an inspector process. Dropping it closes the ring.
#[derive(Debug)]
pub struct RingChannel {
    /// `None` after the end.
    channel: Option<ring::Channel>,
    /// The channel has ended and every frame was returned.
    drained: bool,
    /// The last snapshot of a channel that has ended.
    last: Option<About>,
}

impl RingChannel {
    /// The channel of an attached inspector.
    pub fn new(channel: ring::Channel) -> Self {
        Self { channel: Some(channel), drained: false, last: None }
    }
}

impl Channel for RingChannel {
    fn publish(&mut self, frame: &[u8], meta: &Meta) -> Result<Seq, ReserveError> {
        self.channel.as_mut().ok_or(ReserveError::Disconnected)?.send(frame, meta)
    }

    fn lose(&mut self, loss: Loss) {
        if let Some(channel) = &mut self.channel {
            channel.lose(loss);
        }
    }

    fn kick(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.kick();
        }
    }

    fn poll(&mut self, now: u64, each: &mut dyn FnMut(Seq, Result<Decision<'_>, DropReason>)) -> usize {
        let Some(channel) = &mut self.channel else { return 0 };
        let was_over = channel.is_dead();
        let mut decided = channel.poll_verdicts(now, |seq, decision| each(seq, checked(decision)));
        let Some(death) = channel.death() else { return decided };
        // The verdicts that a dead inspector left count, in the same portions as those of a live one. A poll that finds none is the last.
        // After a protocol violation, no verdict counts.
        if death == Death::Violations || was_over && decided == 0 {
            channel.drain_held(|seq| {
                decided += 1;
                each(seq, Err(DropReason::InspectorDied));
            });
            self.drained = true;
        }
        decided
    }

    fn may_inject(&self) -> bool {
        self.channel.as_ref().is_some_and(ring::Channel::takes_messages)
    }

    fn poll_injected(&mut self, each: &mut dyn FnMut(&Header, &[u8])) {
        let Some(channel) = &mut self.channel else { return };
        if channel.poll_messages(each) > 0 {
            // The inspector may wait for the space.
            channel.kick();
        }
    }

    fn wait(&mut self, now: u64, until: u64) {
        let Some(channel) = &mut self.channel else { return };
        let until = channel.deadline().map_or(until, |deadline| deadline.min(until));
        let timeout = (until != u64::MAX).then(|| Duration::from_nanos(until.saturating_sub(now)));
        // poll(2) with valid descriptors does not fail, and the caller polls again in any case.
        let _ = channel.wait(timeout);
    }

    fn arm(&mut self) -> bool {
        self.channel.as_mut().is_none_or(ring::Channel::arm)
    }

    fn disarm(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.disarm();
            channel.check_peer();
        }
    }

    fn disarm_unready(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.disarm();
        }
    }

    fn shares_cpu(&self) -> bool {
        self.channel.as_ref().is_some_and(ring::Channel::shares_cpu)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.channel.as_ref().map(AsFd::as_fd)
    }

    fn deadline(&self) -> Option<u64> {
        self.channel.as_ref()?.deadline()
    }

    fn unreturned(&self) -> u32 {
        let Some(channel) = &self.channel else { return 0 };
        let stats = channel.stats();
        u32::try_from(stats.overdue.saturating_sub(stats.late)).unwrap_or(u32::MAX)
    }

    fn returned(&self) -> u64 {
        let Some(channel) = &self.channel else { return 0 };
        let stats = channel.stats();
        stats.decided + stats.invalid + stats.late
    }

    fn has_losses(&self) -> bool {
        self.channel.as_ref().is_some_and(ring::Channel::has_losses)
    }

    fn is_dead(&self) -> bool {
        self.channel.as_ref().is_none_or(ring::Channel::is_dead)
    }

    fn about(&self) -> Option<About> {
        let Some(channel) = &self.channel else { return self.last.clone() };
        Some(About {
            peer: channel.peer(),
            name: channel.name().to_owned(),
            geometry: channel.geometry(),
            stats: channel.stats(),
        })
    }

    fn frames(&self) -> Vec<FrameOut> {
        self.channel.as_ref().map_or(Vec::new(), |channel| channel.frames().collect())
    }

    fn has_frames(&self) -> bool {
        self.channel.as_ref().is_some_and(ring::Channel::has_frames)
    }

    fn detach(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.detach();
        }
    }

    fn hand_over(&mut self) -> Option<OwnedFd> {
        self.channel.as_mut().and_then(ring::Channel::hand_over)
    }

    fn detached(&mut self) -> Option<Detached> {
        let channel = self.channel.as_ref().filter(|_| self.drained)?;
        let death = channel.death()?;
        let distrusted = death == Death::Violations;
        let why = match channel.stats().violations {
            n if distrusted => format!("the inspector was detached: it wrote {n} invalid words"),
            _ => format!("the inspector is gone: {death}"),
        };
        self.last = self.about();
        // Releases the memory.
        self.channel = None;
        Some(Detached { why, distrusted })
    }
}

/// The decision, if the inspector made one that the engine can execute.
fn checked(decision: Decision<'_>) -> Result<Decision<'_>, DropReason> {
    match (decision.cause, decision.verdict) {
        (Cause::Overdue, _) => Err(DropReason::Overdue),
        (Cause::Invalid, _) => Err(DropReason::InvalidVerdict),
        // Longer than any port can send.
        (_, Verdict::Replace(bytes)) if bytes.len() > MAX_FRAME => Err(DropReason::InvalidVerdict),
        (Cause::Single | Cause::Cumulative, _) => Ok(decision),
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use towpath_ring::{Config, Consumer, Endpoint, Geometry};

    use super::*;

    /// After a sleep, only the inspectors whose descriptor is ready cost system calls.
    #[test]
    fn an_inspector_whose_descriptor_is_not_ready_is_not_asked() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let mut endpoint = Endpoint::bind(&path, Config::default()).unwrap();
        let client = thread::spawn(move || drop(Consumer::attach(&path).unwrap()));
        let channel = loop {
            match endpoint.accept().unwrap() {
                Some(channel) => break channel,
                None => endpoint.wait(None).unwrap(),
            }
        };
        client.join().unwrap();
        let mut inspector = RingChannel::new(channel);
        inspector.arm();
        inspector.disarm_unready();
        assert!(!inspector.is_dead(), "the end of the socket was read");
        inspector.arm();
        inspector.disarm();
        assert!(inspector.is_dead());
    }

    /// The verdicts of a dead inspector are polled in portions, like those of a live one.
    #[test]
    fn verdicts_of_a_dead_inspector_are_polled_in_portions() {
        const FRAMES: usize = 1000;
        const LONG: usize = 16 << 10;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let tx = Geometry::with(16 << 20, LONG as u32).unwrap();
        let mut endpoint = Endpoint::bind(&path, Config { tx, deadline: None, ..Config::default() }).unwrap();
        let client = thread::spawn(move || {
            let mut queue = Consumer::attach(&path).unwrap();
            for _ in 0..FRAMES {
                let frame = queue.recv().unwrap().unwrap();
                queue.replace(frame, &[7; LONG]).unwrap();
            }
        });
        let channel = loop {
            match endpoint.accept().unwrap() {
                Some(channel) => break channel,
                None => endpoint.wait(None).unwrap(),
            }
        };
        let mut inspector = RingChannel::new(channel);
        for _ in 0..FRAMES {
            inspector.publish(b"frame", &Meta::default()).unwrap();
        }
        inspector.kick();
        client.join().unwrap();

        let (mut all, mut most) = (0, 0);
        // Seconds apart, so that each poll checks whether the client is alive.
        for now in (1..100).map(|second| second * 1_000_000_000) {
            let mut replaced = 0;
            inspector.poll(now, &mut |_, decision| match decision {
                Ok(Decision { verdict: Verdict::Replace(bytes), .. }) if bytes.len() == LONG => {
                    replaced += 1;
                }
                other => panic!("{other:?}"),
            });
            (all, most) = (all + replaced, most.max(replaced));
            if let Some(gone) = inspector.detached() {
                assert!(!gone.distrusted, "{gone:?}");
                assert_eq!(all, FRAMES);
                assert!(most < FRAMES / 3, "{most} in one poll");
                return;
            }
        }
        panic!("the inspector is still attached, with {all} verdicts");
    }
}
