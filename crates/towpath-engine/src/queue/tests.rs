use towpath_gate::state::Ends;

use super::*;
use crate::flow_verdict;
use crate::reorder::ReorderBuffer;

/// An inspector in memory: `said` is given at the next poll.
#[derive(Debug, Default)]
struct Fake {
    next: u32,
    room: usize,
    said: Vec<(u32, Outcome<'static>)>,
    dead: bool,
    unreturned: u32,
    gone: Option<Detached>,
    told: Vec<Loss>,
}

impl Channel for Fake {
    fn publish(&mut self, _frame: &[u8], _meta: &Meta) -> Result<Seq, ReserveError> {
        self.room = self.room.checked_sub(1).ok_or(ReserveError::RingFull)?;
        self.next = self.next.wrapping_add(1);
        Ok(Seq(self.next.wrapping_sub(1)))
    }
    fn lose(&mut self, loss: Loss) {
        self.told.push(loss);
    }
    fn kick(&mut self) {}
    fn poll(&mut self, _now: u64, each: &mut dyn FnMut(Seq, Outcome<'_>)) -> usize {
        let n = self.said.len();
        self.said.drain(..).for_each(|(sequence, outcome)| each(Seq(sequence), outcome));
        n
    }
    fn wait(&mut self, _now: u64, _until: u64) {}
    fn unreturned(&self) -> u32 {
        self.unreturned
    }
    fn is_dead(&self) -> bool {
        self.dead
    }
    fn gone(&mut self) -> Option<Detached> {
        self.gone.take()
    }
}

const POLICY: Policy = Policy {
    deadline: 100,
    default: DefaultVerdict::Drop,
    fanout: Fanout::FlowHash,
    overload: Overload::Block,
    high: u32::MAX,
    low: u32::MAX,
};

const PASS: Outcome<'_> = answer(Answer::Pass);
const DROP: Outcome<'_> = answer(Answer::Drop);

const fn answer(answer: Answer<'static>) -> Outcome<'static> {
    Outcome::Answer(Reply { answer, mark: (0, 0), flow: false })
}

fn ids(n: usize) -> Vec<PacketId> {
    let mut window = ReorderBuffer::<(), ()>::new(1, 100, 100);
    (0..n).map(|_| window.push_waiting(b"", (), (), 0)).collect()
}

fn queue<const N: usize>(policy: Policy, fakes: [Fake; N]) -> Queue<Fake> {
    let mut queue = Queue::new(1, policy);
    for (number, fake) in (1..).zip(fakes) {
        queue.join(number, fake);
    }
    queue
}

fn room(room: usize) -> Fake {
    Fake { room, ..Fake::default() }
}

fn offer(queue: &mut Queue<Fake>, id: Option<PacketId>) -> Enqueue {
    queue.offer(b"x", &Meta::default(), 0, 0, id)
}

/// Inspector `who` says this; what the queue makes of it.
fn say(queue: &mut Queue<Fake>, who: usize, said: &[(u32, Outcome<'static>)]) -> Vec<(PacketId, String)> {
    let listener = queue.members.listeners().nth(who).unwrap();
    listener.channel_mut().said = said.to_vec();
    poll(queue)
}

fn poll(queue: &mut Queue<Fake>) -> Vec<(PacketId, String)> {
    let mut out = Vec::new();
    queue.poll(0, |id, decided| {
        let text = match decided {
            Decided::Answer(Reply { answer, .. }, _) => format!("{answer:?}"),
            other => format!("{other:?}"),
        };
        out.push((id, text));
    });
    let c = queue.stats();
    assert_eq!(c.frames, c.passed + c.dropped + c.replaced + c.lost() + c.open);
    out
}

#[test]
fn verdicts_come_in_any_order() {
    let mut queue = queue(POLICY, [Fake { next: u32::MAX, room: 9, ..Fake::default() }]);
    let t = ids(3);
    for &id in &t {
        assert_eq!(offer(&mut queue, Some(id)), Enqueue::Held);
    }
    let got = say(&mut queue, 0, &[(1, DROP), (0, answer(Answer::Replace(b"y")))]);
    assert_eq!(got, [(t[2], "Drop".into()), (t[1], "Replace([121])".into())]);
    assert_eq!(queue.open(), 1);
    assert_eq!(say(&mut queue, 0, &[(u32::MAX, Outcome::Overdue)]), [(t[0], "Lost(Drop)".into())]);
    let c = queue.stats();
    assert_eq!((c.frames, c.passed, c.dropped, c.replaced, c.lost(), c.high_water), (3, 0, 1, 1, 1, 3));
}

#[test]
fn numbers_of_gap_records_are_no_frames() {
    let mut queue = queue(POLICY, [room(9)]);
    let t = ids(2);
    offer(&mut queue, Some(t[0]));
    queue.members.listeners().next().unwrap().channel_mut().next += 3;
    offer(&mut queue, Some(t[1]));
    assert_eq!(say(&mut queue, 0, &[(4, PASS)]), [(t[1], "Pass".into())]);
    assert_eq!(say(&mut queue, 0, &[(0, PASS)]), [(t[0], "Pass".into())]);
    assert_eq!(queue.open(), 0);
}

#[test]
fn a_dead_inspector_loses_what_it_had_and_what_comes() {
    let mut queue = queue(POLICY, [room(9)]);
    let t = ids(2);
    offer(&mut queue, Some(t[0]));
    offer(&mut queue, None);
    let fake = queue.members.listeners().next().unwrap().channel_mut();
    fake.dead = true;
    fake.gone = Some(Detached { why: "killed".into(), distrusted: false });
    let got = say(&mut queue, 0, &[(0, Outcome::Orphan), (1, Outcome::Orphan)]);
    assert_eq!(got, [(t[0], "Lost(Drop)".into())]);
    assert_eq!(offer(&mut queue, Some(t[1])), Enqueue::Lost(DefaultVerdict::Drop));
    let c = queue.stats();
    assert_eq!((c.frames, c.lost(), queue.trouble.as_deref()), (3, 3, Some("killed")));
    assert_eq!((c.died, c.no_listener), (2, 1));
}

#[test]
fn what_a_dead_inspector_had_goes_to_another() {
    let mut queue = queue(Policy { fanout: Fanout::LeastLoaded, ..POLICY }, [room(9), room(9)]);
    let t = ids(2);
    offer(&mut queue, Some(t[0]));
    offer(&mut queue, Some(t[1]));
    queue.members.listeners().next().unwrap().channel_mut().dead = true;
    assert_eq!(say(&mut queue, 0, &[(0, Outcome::Orphan)]), [(t[0], "Orphan".into())]);
    assert_eq!(queue.stats().frames, 1, "it counts with the one that gets it");
    assert_eq!(offer(&mut queue, Some(t[0])), Enqueue::Held);
    assert_eq!(say(&mut queue, 1, &[(0, PASS), (1, DROP)]), [(t[1], "Pass".into()), (t[0], "Drop".into())]);
    let c = queue.stats();
    assert_eq!((c.frames, c.passed, c.dropped, c.lost(), c.redelivered), (2, 1, 1, 0, 1));
}

#[test]
fn of_a_broadcast_the_strictest_verdict_counts_once_all_have_spoken() {
    let rows: &[(Outcome<'_>, Outcome<'_>, &str)] = &[
        (PASS, PASS, "Pass"),
        (PASS, DROP, "Drop"),
        (DROP, answer(Answer::Reject), "Reject"),
        (answer(Answer::Reject), DROP, "Reject"),
        (PASS, answer(Answer::Replace(b"y")), "Replace([121])"),
        (answer(Answer::Queue(4)), answer(Answer::Repeat), "Queue(4)"),
        (PASS, Outcome::Overdue, "Drop"),
        (Outcome::Orphan, PASS, "Drop"),
    ];
    for (first, second, expected) in rows {
        let mut queue = queue(Policy { fanout: Fanout::Broadcast, ..POLICY }, [room(9), room(9)]);
        let t = ids(1);
        assert_eq!(offer(&mut queue, Some(t[0])), Enqueue::Held);
        assert_eq!(say(&mut queue, 1, &[(0, *second)]), []);
        let got = say(&mut queue, 0, &[(0, *first)]);
        // The second spoke first: of two that want another way, its one would count.
        let expected = if *expected == "Queue(4)" { "Repeat" } else { expected };
        assert_eq!(got, [(t[0], expected.to_owned())], "{first:?} {second:?}");
        assert_eq!(queue.stats().frames, 2);
    }
}

#[test]
fn nobody_waits_for_a_tap() {
    let mut queue = queue(Policy { fanout: Fanout::Mirror, ..POLICY }, [room(9), room(1)]);
    let t = ids(2);
    assert_eq!(offer(&mut queue, Some(t[0])), Enqueue::Copied);
    assert_eq!(offer(&mut queue, Some(t[1])), Enqueue::Copied);
    assert_eq!(queue.members.listeners().nth(1).unwrap().channel_mut().told, [Loss::NoRoom]);
    assert_eq!(say(&mut queue, 0, &[(0, DROP), (1, PASS)]), []);
    assert_eq!(queue.stats().frames, 3);
}

#[test]
fn what_becomes_of_a_packet_that_finds_no_room() {
    let rows = [
        (Overload::Block, Enqueue::Full),
        (Overload::DropNewest, Enqueue::Lost(DefaultVerdict::Drop)),
        (Overload::DropOldest(1), Enqueue::Full),
        (Overload::Pass, Enqueue::Lost(DefaultVerdict::Pass)),
        (Overload::Drop, Enqueue::Lost(DefaultVerdict::Drop)),
        (Overload::Queue(7), Enqueue::Queue(7)),
    ];
    for (overload, expected) in rows {
        let mut queue = queue(Policy { overload, ..POLICY }, [room(1)]);
        let t = ids(2);
        assert_eq!(offer(&mut queue, Some(t[0])), Enqueue::Held);
        assert_eq!(offer(&mut queue, Some(t[1])), expected, "{overload:?}");
        let lost = u64::from(matches!(expected, Enqueue::Lost(_)));
        assert_eq!(queue.stats().overload, lost, "{overload:?}");
        poll(&mut queue);
    }
}

#[test]
fn a_backlog_keeps_the_newest() {
    let mut queue = queue(Policy { overload: Overload::DropOldest(2), ..POLICY }, [room(0)]);
    let t = ids(4);
    assert_eq!(queue.enqueue(t[0]), Ok(None));
    assert_eq!(queue.enqueue(t[1]), Ok(None));
    assert_eq!(queue.enqueue(t[2]), Ok(Some(t[0])));
    assert_eq!(queue.next_in_backlog(), Some(t[1]));
    queue.leave_backlog();
    assert_eq!(queue.next_in_backlog(), Some(t[2]));
    assert_eq!((queue.stats().frames, queue.stats().lost()), (1, 1));
    assert_eq!(queue.members.listeners().next().unwrap().channel_mut().told, [Loss::Oldest]);
    // A copy is not worth a place.
    assert_eq!(offer(&mut queue, None), Enqueue::Lost(DefaultVerdict::Drop));
}

#[test]
fn an_inspector_above_its_marks_has_no_room() {
    let policy = Policy { overload: Overload::Pass, high: 2, low: 0, ..POLICY };
    let mut queue = queue(policy, [room(9)]);
    let t = ids(4);
    assert_eq!(offer(&mut queue, Some(t[0])), Enqueue::Held);
    assert_eq!(offer(&mut queue, Some(t[1])), Enqueue::Held);
    assert_eq!(offer(&mut queue, Some(t[2])), Enqueue::Lost(DefaultVerdict::Pass));
    say(&mut queue, 0, &[(0, PASS)]);
    assert_eq!(offer(&mut queue, Some(t[2])), Enqueue::Lost(DefaultVerdict::Pass));
    queue.members.listeners().next().unwrap().channel_mut().unreturned = 1;
    say(&mut queue, 0, &[(1, Outcome::Overdue)]);
    assert_eq!(offer(&mut queue, Some(t[2])), Enqueue::Lost(DefaultVerdict::Pass), "it has the overdue one");
    queue.members.listeners().next().unwrap().channel_mut().unreturned = 0;
    assert_eq!(offer(&mut queue, Some(t[3])), Enqueue::Held);
}

#[test]
fn nobody_waits_for_a_stalled_inspector_until_it_answers() {
    let mut queue = queue(POLICY, [room(1)]);
    let t = ids(3);
    assert_eq!(offer(&mut queue, Some(t[0])), Enqueue::Held);
    assert_eq!(offer(&mut queue, Some(t[1])), Enqueue::Full);
    assert_eq!(queue.give_up(&Meta::default(), 0), DefaultVerdict::Drop);
    assert_eq!(offer(&mut queue, Some(t[1])), Enqueue::Lost(DefaultVerdict::Drop));
    assert_eq!(say(&mut queue, 0, &[(0, PASS)]), [(t[0], "Pass".into())]);
    assert_eq!(offer(&mut queue, Some(t[2])), Enqueue::Full);
    let c = queue.stats();
    assert_eq!((c.frames, c.passed, c.lost()), (3, 1, 2));
}

#[test]
fn a_queue_without_inspector_loses_everything() {
    let mut queue = queue(Policy { default: DefaultVerdict::Pass, ..POLICY }, []);
    assert_eq!(offer(&mut queue, None), Enqueue::Lost(DefaultVerdict::Pass));
    assert_eq!((queue.stats().frames, queue.stats().lost()), (1, 1));
}

#[test]
fn what_a_detached_inspector_said_about_flows_counts_no_more() {
    for (distrusted, left) in [(true, None), (false, Some(flow_verdict::Verdict::Pass))] {
        let mut queue = queue(POLICY, [room(9)]);
        let ends = Ends::V4([10, 0, 0, 1].into(), [10, 0, 0, 2].into());
        let flow = Flow { ends, proto: 17, src_port: 5, dst_port: 6, tenant: 0 };
        let now = Time::default();
        queue.rule(
            &flow,
            FlowVerdict { verdict: flow_verdict::Verdict::Pass, mark: (0, 0), channel: 1 },
            now,
        );
        assert!(queue.flow_verdict(&flow, false, now).is_some());
        let fake = queue.members.listeners().next().unwrap().channel_mut();
        fake.gone = Some(Detached { why: "gone".into(), distrusted });
        poll(&mut queue);
        assert_eq!(queue.flow_verdict(&flow, false, now).map(|flow_verdict| flow_verdict.verdict), left);
    }
}
