//! Operations of drivers: batches of messages, and deadlines.

use std::time::Duration;

use super::{Act, Location, Order, World};
use crate::Time;
use crate::mux::{Batch, Message, PartKind, Ticket};

impl World {
    /// A driver gives a worker messages, up to `most` in total.
    pub(super) fn poll_at_most(&mut self, at: usize, most: usize) {
        let (mut batch, before) = (Vec::new(), self.actors[at].batch.len());
        let given = self.mux.poll_at_most(self.actors[at].id, most, self.now, &mut batch);
        assert_eq!(given, batch.len());
        assert!(given == 0 || before + given <= most, "{given} more than {before}, at most {most} in total");
        self.actors[at].asks = given > 0 || self.actors[at].has_some();
        for message in batch {
            self.got(at, &message);
            self.actors[at].batch.push_back(message);
        }
    }

    /// A worker completes consecutive messages of a connection and answers some of them by one piece; or dies
    /// between the two steps.
    pub(super) fn done_batch(&mut self, at: usize, much: usize) {
        let actor = &mut self.actors[at];
        let (id, count) = (actor.id, actor.batch.len());
        if actor.run.is_some() || count == 0 {
            return;
        }
        // Sticky messages are done in order, as single ones are.
        let from = if self.config.order == Order::Sticky { 0 } else { much % count };
        if self.config.order == Order::Sticky && actor.has_stream_of(actor.batch[0].psock()) {
            return self.parts(at, 3);
        }
        if actor.batch[from].more() {
            return self.first_part(at, from);
        }
        let first = actor.batch[from].ticket();
        let follows = |(at, message): (usize, &Message)| {
            message.ticket() == Ticket { number: first.number + at as u64, ..first } && !message.more()
        };
        let row = actor.batch.iter().skip(from).enumerate().take_while(|&row| follows(row)).count();
        let row = row.min(1 + much / 4 % 8);
        let messages: Vec<Message> = actor.batch.iter().skip(from).take(row).cloned().collect();
        let answers =
            messages.iter().filter(|message| !(message.ticket().number + much as u64).is_multiple_of(3));
        let answers: Vec<_> = answers.collect();
        if !answers.is_empty() {
            let bytes = answers.iter().map(|message| &message.bytes()[..]).collect::<Vec<_>>().concat();
            let there = !self.ended.contains(&first.psock);
            let said = (first, row as u32);
            let replied =
                self.mux.reply_batch(id, said, answers.len() as u32, bytes::Bytes::from(bytes), self.now);
            self.tried.extend(messages.iter().map(Message::ticket));
            assert!(replied.is_ok() || !there, "a reply to an open connection succeeds");
            if replied.is_ok() {
                let numbers = answers.iter().map(|message| message.ticket().number);
                self.answered.entry(first.psock).or_default().extend(numbers);
            }
            if much.is_multiple_of(16) {
                return self.actor(Act::Die, at, usize::MAX);
            }
        }
        self.actors[at].asks = true;
        self.actors[at].batch.drain(from..from + row);
        assert_eq!(
            self.mux.done_batch(id, (first, row as u32), self.now),
            row as u32,
            "the worker held them"
        );
        assert_eq!(self.mux.done_batch(id, (first, row as u32), self.now), 0, "messages are done once");
        for message in messages {
            self.locations.insert(message.ticket(), Location::Done);
        }
    }

    /// A worker leaves. It counts as dead at the deadline.
    pub(super) fn leave(&mut self, at: usize, deadline: Option<Time>) {
        let actor = &mut self.actors[at];
        (actor.enabled, actor.moved, actor.leaves, actor.deadline) = (false, true, true, deadline);
        self.mux.leave(actor.id, deadline, self.now);
    }

    /// Time passes. Workers past their deadline are dead.
    pub(super) fn pass(&mut self, time: Duration) {
        self.now = self.now + time;
        let now = self.now;
        let late = self.actors.iter().enumerate();
        let late = late.filter(|(_, actor)| actor.deadline.is_some_and(|deadline| deadline <= now));
        for at in late.map(|(at, _)| at).collect::<Vec<_>>() {
            self.lost(at);
        }
        self.mux.handle_timeout(now);
        self.pump();
        let due = self.mux.schedule_timeout().filter(|_| !self.mux.ready.is_empty());
        assert!(due.is_none_or(|due| due > now), "a timer that was handled is not due again");
    }

    /// A worker is dead: its unanswered messages wait again.
    pub(super) fn lost(&mut self, at: usize) {
        let actor = &self.actors[at];
        for ticket in actor.run.iter().flat_map(Batch::rest) {
            self.locations.insert(ticket, Location::Waits);
        }
        let whole = |state: &(Vec<u8>, Option<PartKind>)| state.1 == Some(PartKind::Last);
        for (ticket, state) in &actor.streams {
            let done = self.tried.contains(ticket) && whole(state);
            self.locations.insert(*ticket, if done { Location::Done } else { Location::Waits });
        }
        for ticket in actor.batch.iter().map(Message::ticket) {
            let place = if self.tried.contains(&ticket) { Location::Done } else { Location::Waits };
            self.locations.insert(ticket, place);
        }
    }
}
