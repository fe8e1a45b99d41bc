//! One queue: the frames that rules send to an inspector, and what came back.
//!
//! Invariant: `frames = passed + dropped + replaced + lost + held`, where held is what the inspector has now; at the
//! end of a run held is 0. A frame is `lost` when the default verdict decided it.
//!
//! The channel to the inspector is behind a trait, so that what is here can be tested without a process.

use std::collections::VecDeque;

use crate::report;
use crate::window::Ticket;

/// The link to one inspector process. Sequence numbers are dense: each frame gets the one after its predecessor's.
pub trait Channel {
    /// Publishes one frame; `None` when there is no room for it now.
    fn publish(&mut self, frame: &[u8], label: &Label) -> Option<u32>;

    /// Tells the inspector about what was published, if it sleeps.
    fn kick(&mut self);

    /// Gives every verdict that has come to `each`, with the frame's sequence number.
    fn poll(&mut self, each: &mut dyn FnMut(u32, Answer<'_>));

    /// Waits for verdicts, at most `nanos` nanoseconds; may return early.
    fn wait(&mut self, nanos: u64);

    /// Why the inspector is gone, once it is.
    fn gone(&mut self) -> Option<String>;
}

/// What an inspector is told about a frame, apart from its bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Label {
    /// Bytes the frame had on the wire.
    pub wire_len: u32,
    /// Capture time, nanoseconds since the epoch.
    pub time: u64,
    /// The packet's mark.
    pub mark: u32,
    /// Link type (pcap's number).
    pub link: u16,
    /// The port it came in on.
    pub port: u16,
    /// Where the IP header (or what follows the link header) starts.
    pub network: u16,
    /// Where the upper layer's payload starts.
    pub payload: u16,
}

/// An inspector's verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer<'a> {
    /// Let it go on.
    Pass,
    /// Drop it.
    Drop,
    /// Drop it and tell the sender.
    Reject,
    /// Let it go on with these bytes in its place.
    Replace(&'a [u8]),
    /// Hand it to another queue.
    Queue(u16),
    /// Walk the rules again from the first.
    Repeat,
}

/// What becomes of a frame that no inspector decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DefaultVerdict {
    /// Fail open.
    Pass,
    /// Fail closed.
    Drop,
}

/// How a queue treats its inspector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// How long an inspector may keep a frame, in nanoseconds of wall-clock time.
    pub deadline: u64,
    /// The verdict for frames it does not decide.
    pub default: DefaultVerdict,
}

/// What [`Queue::offer`] did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offer {
    /// The inspector has it.
    Held,
    /// There is no room: wait for verdicts, then offer it again.
    Full,
    /// It was decided by default: nobody is there to look at it.
    Lost(DefaultVerdict),
}

/// A frame that was decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decided<'a> {
    /// By the inspector.
    Answer(Answer<'a>),
    /// By the default verdict.
    Lost(DefaultVerdict),
}

#[derive(Clone, Copy, Debug)]
struct Held {
    /// The packet that waits for it; `None` for a copy (tee).
    ticket: Option<Ticket>,
    /// When it was handed over.
    since: u64,
}

/// See the module's text.
#[derive(Debug)]
pub struct Queue<C> {
    channel: Option<C>,
    policy: Policy,
    /// Frames by sequence number: the front has `first`; `None` once decided. Its front is never `None`.
    held: VecDeque<Option<Held>>,
    first: u32,
    open: u64,
    /// The inspector let a deadline pass with the ring full: until it answers again nobody waits for it.
    stalled: bool,
    counters: report::Queue,
}

impl<C: Channel> Queue<C> {
    /// A queue whose inspector is at the other end of `channel`. Without one every frame is lost.
    pub fn new(number: u16, channel: Option<C>, policy: Policy) -> Self {
        Self {
            channel,
            policy,
            held: VecDeque::new(),
            first: 0,
            open: 0,
            stalled: false,
            counters: report::Queue { number, ..report::Queue::default() },
        }
    }

    /// Hands a frame over. `ticket` names the packet that waits for the verdict; a copy has none.
    ///
    /// `now` is wall-clock time in nanoseconds. A frame counts once it is held or lost, not when the answer is `Full`.
    pub fn offer(&mut self, frame: &[u8], label: &Label, ticket: Option<Ticket>, now: u64) -> Offer {
        let Some(channel) = &mut self.channel else { return self.lose() };
        let Some(sequence) = channel.publish(frame, label) else {
            return if self.stalled { self.lose() } else { Offer::Full };
        };
        if self.held.is_empty() {
            self.first = sequence;
        }
        debug_assert_eq!(sequence, self.first.wrapping_add(self.held.len() as u32));
        self.held.push_back(Some(Held { ticket, since: now }));
        self.open += 1;
        self.counters.frames += 1;
        self.counters.high_water = self.counters.high_water.max(self.open);
        Offer::Held
    }

    /// Gives up on a frame that could not be handed over within the deadline; from now on nobody waits for this
    /// inspector until it answers again.
    pub fn give_up(&mut self) -> DefaultVerdict {
        self.stalled = true;
        self.lose();
        self.policy.default
    }

    /// Collects what was decided: verdicts, deadlines that passed, and, if the inspector is gone, all it had.
    pub fn poll(&mut self, now: u64, mut each: impl FnMut(Ticket, Decided<'_>)) {
        let Self { channel: Some(channel), held, first, open, counters, stalled, .. } = self else { return };
        channel.poll(&mut |sequence, answer| {
            let index = sequence.wrapping_sub(*first) as usize;
            // A verdict that comes after its deadline finds the frame decided already.
            let Some(Held { ticket, .. }) = held.get_mut(index).and_then(Option::take) else { return };
            *open -= 1;
            *stalled = false;
            match answer {
                Answer::Pass | Answer::Queue(_) | Answer::Repeat => counters.passed += 1,
                Answer::Drop | Answer::Reject => counters.dropped += 1,
                Answer::Replace(_) if ticket.is_none() => counters.passed += 1,
                Answer::Replace(_) => counters.replaced += 1,
            }
            if let Some(ticket) = ticket {
                each(ticket, Decided::Answer(answer));
            }
        });
        let gone = channel.gone();
        self.forget_decided();
        match gone {
            Some(reason) => self.detach(reason, each),
            None => self.expire(now, each),
        }
    }

    /// Tells the inspector about new frames, if it sleeps.
    pub fn kick(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.kick();
        }
    }

    /// Waits for verdicts, at most until the oldest frame's deadline.
    pub fn wait(&mut self, now: u64) {
        let since = self.held.front().and_then(|held| held.map(|held| held.since));
        let until = since.map_or(now, |since| since.saturating_add(self.policy.deadline));
        if let Some(channel) = &mut self.channel {
            channel.kick();
            // One nanosecond at least: the deadline itself must have passed when the caller looks again.
            channel.wait(until.saturating_sub(now).max(1));
        }
    }

    /// How the queue treats its inspector.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Frames that the inspector has now.
    pub fn open(&self) -> u64 {
        self.open
    }

    /// What happened so far.
    pub fn counters(&self) -> &report::Queue {
        &self.counters
    }

    fn lose(&mut self) -> Offer {
        self.counters.frames += 1;
        self.counters.lost += 1;
        Offer::Lost(self.policy.default)
    }

    fn expire(&mut self, now: u64, mut each: impl FnMut(Ticket, Decided<'_>)) {
        // Frames are handed over in the order of time: the first that is in time ends the search.
        for slot in &mut self.held {
            let Some(Held { ticket, since }) = *slot else { continue };
            if now.saturating_sub(since) <= self.policy.deadline {
                break;
            }
            *slot = None;
            self.open -= 1;
            self.counters.lost += 1;
            if let Some(ticket) = ticket {
                each(ticket, Decided::Lost(self.policy.default));
            }
        }
        self.forget_decided();
    }

    fn detach(&mut self, reason: String, mut each: impl FnMut(Ticket, Decided<'_>)) {
        self.channel = None;
        self.counters.trouble = Some(reason);
        for Held { ticket, .. } in self.held.drain(..).flatten() {
            self.open -= 1;
            self.counters.lost += 1;
            if let Some(ticket) = ticket {
                each(ticket, Decided::Lost(self.policy.default));
            }
        }
    }

    fn forget_decided(&mut self) {
        while let Some(None) = self.held.front() {
            self.held.pop_front();
            self.first = self.first.wrapping_add(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::window::Window;

    /// An inspector in memory: `answers` are given at the next poll.
    #[derive(Default)]
    struct Fake {
        next: u32,
        room: usize,
        answers: Vec<(u32, Answer<'static>)>,
        gone: Option<String>,
    }

    impl Channel for Fake {
        fn publish(&mut self, _frame: &[u8], _label: &Label) -> Option<u32> {
            self.room = self.room.checked_sub(1)?;
            self.next = self.next.wrapping_add(1);
            Some(self.next.wrapping_sub(1))
        }
        fn kick(&mut self) {}
        fn poll(&mut self, each: &mut dyn FnMut(u32, Answer<'_>)) {
            for (sequence, answer) in self.answers.drain(..) {
                each(sequence, answer);
            }
        }
        fn wait(&mut self, _nanos: u64) {}
        fn gone(&mut self) -> Option<String> {
            self.gone.clone()
        }
    }

    const POLICY: Policy = Policy { deadline: 100, default: DefaultVerdict::Drop };

    fn tickets(n: usize) -> Vec<Ticket> {
        let mut window = Window::<(), ()>::new(100, 100);
        (0..n).map(|_| window.push_waiting(b"", (), ())).collect()
    }

    fn polled(queue: &mut Queue<Fake>, now: u64) -> Vec<(Ticket, bool)> {
        let mut out = Vec::new();
        queue.poll(now, |ticket, decided| out.push((ticket, matches!(decided, Decided::Answer(_)))));
        out
    }

    fn sum(c: &report::Queue) -> u64 {
        c.passed + c.dropped + c.replaced + c.lost
    }

    #[test]
    fn verdicts_come_in_any_order_and_once() {
        let mut queue = Queue::new(1, Some(Fake { next: u32::MAX, room: 9, ..Fake::default() }), POLICY);
        let t = tickets(3);
        for &ticket in &t {
            assert_eq!(queue.offer(b"x", &Label::default(), Some(ticket), 0), Offer::Held);
        }
        let fake = queue.channel.as_mut().unwrap();
        fake.answers =
            vec![(1, Answer::Drop), (1, Answer::Pass), (7, Answer::Pass), (0, Answer::Replace(b"y"))];
        assert_eq!(polled(&mut queue, 50), [(t[2], true), (t[1], true)]);
        assert_eq!(queue.open(), 1);
        assert_eq!(polled(&mut queue, 100), []);
        assert_eq!(polled(&mut queue, 101), [(t[0], false)]);
        queue.channel.as_mut().unwrap().answers = vec![(u32::MAX, Answer::Pass)];
        assert_eq!(polled(&mut queue, 102), [], "a verdict after the deadline means nothing");
        let c = queue.counters();
        assert_eq!((c.frames, c.passed, c.dropped, c.replaced, c.lost), (3, 0, 1, 1, 1));
    }

    #[test]
    fn a_dead_inspector_loses_what_it_had_and_what_comes() {
        let mut queue = Queue::new(1, Some(Fake { room: 9, ..Fake::default() }), POLICY);
        let t = tickets(2);
        queue.offer(b"x", &Label::default(), Some(t[0]), 0);
        queue.offer(b"copy", &Label::default(), None, 0);
        queue.channel.as_mut().unwrap().gone = Some("killed".into());
        queue.channel.as_mut().unwrap().answers = vec![];
        assert_eq!(polled(&mut queue, 1), [(t[0], false)]);
        assert_eq!(queue.offer(b"x", &Label::default(), Some(t[1]), 2), Offer::Lost(DefaultVerdict::Drop));
        let c = queue.counters();
        assert_eq!((c.frames, c.lost, c.trouble.as_deref()), (3, 3, Some("killed")));
        assert_eq!(queue.open(), 0);
    }

    #[test]
    fn nobody_waits_for_a_stalled_inspector_until_it_answers() {
        let mut queue = Queue::new(1, Some(Fake { room: 1, ..Fake::default() }), POLICY);
        let t = tickets(3);
        let label = Label::default();
        assert_eq!(queue.offer(b"x", &label, Some(t[0]), 0), Offer::Held);
        assert_eq!(queue.offer(b"x", &label, Some(t[1]), 0), Offer::Full);
        assert_eq!(queue.give_up(), DefaultVerdict::Drop);
        assert_eq!(queue.offer(b"x", &label, Some(t[1]), 101), Offer::Lost(DefaultVerdict::Drop));
        queue.channel.as_mut().unwrap().answers = vec![(0, Answer::Pass)];
        assert_eq!(polled(&mut queue, 60).len(), 1);
        assert_eq!(queue.offer(b"x", &label, Some(t[2]), 102), Offer::Full);
        let c = queue.counters();
        assert_eq!((c.frames, sum(c)), (3, 3));
    }

    #[test]
    fn a_queue_without_inspector_loses_everything() {
        let mut queue = Queue::<Fake>::new(1, None, Policy { default: DefaultVerdict::Pass, ..POLICY });
        assert_eq!(queue.offer(b"x", &Label::default(), None, 0), Offer::Lost(DefaultVerdict::Pass));
        assert_eq!((queue.counters().frames, queue.counters().lost), (1, 1));
    }
}
