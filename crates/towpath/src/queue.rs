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

    /// Gives each frame that was decided to `each`, once: with the inspector's answer, or with none when there is no
    /// answer that counts (too late at `now`, meaningless, or the inspector is gone). Returns how many there were.
    fn poll(&mut self, now: u64, each: &mut dyn FnMut(u32, Option<Reply<'_>>)) -> usize;

    /// Sleeps until there may be something to poll for, a frame is overdue, or it is `until`. May return early.
    fn wait(&mut self, now: u64, until: u64);

    /// Why the inspector is gone, once it is and every frame it had has come back through [`Channel::poll`].
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

/// An inspector's verdict, and what it says about the packet's mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reply<'a> {
    /// The verdict.
    pub answer: Answer<'a>,
    /// New bits of the mark, and which bits change.
    pub mark: (u32, u32),
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
    Answer(Reply<'a>),
    /// By the default verdict.
    Lost(DefaultVerdict),
}

/// A frame that was handed over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    /// This packet waits for its verdict.
    Packet(Ticket),
    /// A copy: nobody waits.
    Copy,
    Decided,
}

/// See the module's text.
#[derive(Debug)]
pub struct Queue<C> {
    channel: Option<C>,
    policy: Policy,
    /// Frames by sequence number: the front has `first`. Its front is never [`Slot::Decided`].
    held: VecDeque<Slot>,
    first: u32,
    /// Frames that the inspector has now.
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
    /// A frame counts once it is held or lost, not when the answer is `Full`.
    pub fn offer(&mut self, frame: &[u8], label: &Label, ticket: Option<Ticket>) -> Offer {
        let Some(channel) = &mut self.channel else { return self.lose() };
        let Some(sequence) = channel.publish(frame, label) else {
            return if self.stalled { self.lose() } else { Offer::Full };
        };
        if self.held.is_empty() {
            self.first = sequence;
        }
        debug_assert_eq!(sequence, self.first.wrapping_add(self.held.len() as u32));
        self.held.push_back(ticket.map_or(Slot::Copy, Slot::Packet));
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

    /// Collects what was decided: verdicts, deadlines that passed, and, if the inspector is gone, all it had. Returns
    /// how many frames there were.
    ///
    /// `now` is wall-clock time in nanoseconds.
    pub fn poll(&mut self, now: u64, mut each: impl FnMut(Ticket, Decided<'_>)) -> usize {
        let Self { channel: Some(channel), policy, held, first, open, counters, stalled } = self else {
            return 0;
        };
        let decided = channel.poll(now, &mut |sequence, answer| {
            let index = sequence.wrapping_sub(*first) as usize;
            let slot =
                held.get_mut(index).map_or(Slot::Decided, |slot| std::mem::replace(slot, Slot::Decided));
            let ticket = match slot {
                Slot::Packet(ticket) => Some(ticket),
                Slot::Copy => None,
                Slot::Decided => return debug_assert!(false, "frame {sequence} was decided twice"),
            };
            *open -= 1;
            let decided = match answer {
                None => {
                    counters.lost += 1;
                    Decided::Lost(policy.default)
                }
                Some(reply) => {
                    *stalled = false;
                    match reply.answer {
                        Answer::Pass | Answer::Queue(_) | Answer::Repeat => counters.passed += 1,
                        Answer::Drop | Answer::Reject => counters.dropped += 1,
                        Answer::Replace(_) => counters.replaced += 1,
                    }
                    Decided::Answer(reply)
                }
            };
            if let Some(ticket) = ticket {
                each(ticket, decided);
            }
        });
        while let Some(Slot::Decided) = held.front() {
            held.pop_front();
            *first = first.wrapping_add(1);
        }
        if let Some(reason) = channel.gone() {
            debug_assert!(held.is_empty(), "every frame comes back before the channel goes");
            counters.trouble = Some(reason);
            self.channel = None;
        }
        decided
    }

    /// Tells the inspector about new frames, if it sleeps.
    pub fn kick(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.kick();
        }
    }

    /// Sleeps until there may be something to poll for, a frame is overdue, or it is `until`.
    pub fn wait(&mut self, now: u64, until: u64) {
        if let Some(channel) = &mut self.channel {
            channel.wait(now, until);
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
        answers: Vec<(u32, Option<Answer<'static>>)>,
        gone: Option<String>,
    }

    impl Channel for Fake {
        fn publish(&mut self, _frame: &[u8], _label: &Label) -> Option<u32> {
            self.room = self.room.checked_sub(1)?;
            self.next = self.next.wrapping_add(1);
            Some(self.next.wrapping_sub(1))
        }
        fn kick(&mut self) {}
        fn poll(&mut self, _now: u64, each: &mut dyn FnMut(u32, Option<Reply<'_>>)) -> usize {
            let n = self.answers.len();
            let reply = |answer| Reply { answer, mark: (0, 0) };
            self.answers.drain(..).for_each(|(sequence, answer)| each(sequence, answer.map(reply)));
            n
        }
        fn wait(&mut self, _now: u64, _until: u64) {}
        fn gone(&mut self) -> Option<String> {
            self.gone.clone()
        }
    }

    const POLICY: Policy = Policy { deadline: 100, default: DefaultVerdict::Drop };
    const LABEL: Label = Label { wire_len: 1, time: 0, mark: 0, link: 1, port: 0, network: 0, payload: 0 };

    fn tickets(n: usize) -> Vec<Ticket> {
        let mut window = Window::<(), ()>::new(100, 100);
        (0..n).map(|_| window.push_waiting(b"", (), ())).collect()
    }

    fn queue(fake: Fake) -> Queue<Fake> {
        Queue::new(1, Some(fake), POLICY)
    }

    fn answers(queue: &mut Queue<Fake>, answers: &[(u32, Option<Answer<'static>>)]) -> Vec<(Ticket, bool)> {
        let mut out = Vec::new();
        queue.channel.as_mut().unwrap().answers = answers.to_vec();
        queue.poll(0, |ticket, decided| out.push((ticket, matches!(decided, Decided::Answer(_)))));
        out
    }

    #[test]
    fn verdicts_come_in_any_order() {
        let mut queue = queue(Fake { next: u32::MAX, room: 9, ..Fake::default() });
        let t = tickets(3);
        for &ticket in &t {
            assert_eq!(queue.offer(b"x", &LABEL, Some(ticket)), Offer::Held);
        }
        let got = answers(&mut queue, &[(1, Some(Answer::Drop)), (0, Some(Answer::Replace(b"y")))]);
        assert_eq!(got, [(t[2], true), (t[1], true)]);
        assert_eq!(queue.open(), 1);
        assert_eq!(answers(&mut queue, &[(u32::MAX, None)]), [(t[0], false)]);
        let c = queue.counters();
        assert_eq!((c.frames, c.passed, c.dropped, c.replaced, c.lost, c.high_water), (3, 0, 1, 1, 1, 3));
    }

    #[test]
    fn a_dead_inspector_loses_what_it_had_and_what_comes() {
        let mut queue = queue(Fake { room: 9, gone: Some("killed".into()), ..Fake::default() });
        let t = tickets(2);
        queue.offer(b"x", &LABEL, Some(t[0]));
        queue.offer(b"copy", &LABEL, None);
        assert_eq!(answers(&mut queue, &[(0, None), (1, None)]), [(t[0], false)]);
        assert_eq!(queue.offer(b"x", &LABEL, Some(t[1])), Offer::Lost(DefaultVerdict::Drop));
        let c = queue.counters();
        assert_eq!((c.frames, c.lost, c.trouble.as_deref()), (3, 3, Some("killed")));
        assert_eq!(queue.open(), 0);
    }

    #[test]
    fn nobody_waits_for_a_stalled_inspector_until_it_answers() {
        let mut queue = queue(Fake { room: 1, ..Fake::default() });
        let t = tickets(3);
        assert_eq!(queue.offer(b"x", &LABEL, Some(t[0])), Offer::Held);
        assert_eq!(queue.offer(b"x", &LABEL, Some(t[1])), Offer::Full);
        assert_eq!(queue.give_up(), DefaultVerdict::Drop);
        assert_eq!(queue.offer(b"x", &LABEL, Some(t[1])), Offer::Lost(DefaultVerdict::Drop));
        assert_eq!(answers(&mut queue, &[(0, Some(Answer::Pass))]), [(t[0], true)]);
        assert_eq!(queue.offer(b"x", &LABEL, Some(t[2])), Offer::Full);
        let c = queue.counters();
        assert_eq!((c.frames, c.passed, c.lost), (3, 1, 2));
    }

    #[test]
    fn a_queue_without_inspector_loses_everything() {
        let mut queue = Queue::<Fake>::new(1, None, Policy { default: DefaultVerdict::Pass, ..POLICY });
        assert_eq!(queue.offer(b"x", &LABEL, None), Offer::Lost(DefaultVerdict::Pass));
        assert_eq!((queue.counters().frames, queue.counters().lost), (1, 1));
    }
}
