//! The workers of the world: they take messages, answer them, hand them back, leave and die.

use super::*;
use crate::mux::in_flight::ACTIVE;

/// A worker with the messages that it has not begun or not done.
#[derive(Debug)]
pub(super) struct Actor {
    pub(super) id: worker::Id,
    pub(super) batch: VecDeque<Message>,
    /// The local batch that it read.
    pub(super) run: Option<Batch>,
    /// Messages of which it has done the first part: the bytes so far, and whether the last part came.
    pub(super) streams: BTreeMap<Ticket, (Vec<u8>, Option<PartKind>)>,
    /// Awake or woken: the mux expects it to ask for messages.
    pub(super) asks: bool,
    pub(super) enabled: bool,
    /// It was disabled or leaves, so its connections may have moved.
    pub(super) moved: bool,
    pub(super) leaves: bool,
    /// Time from which it counts as dead.
    pub(super) deadline: Option<Time>,
}

impl Actor {
    /// Returns true if it has begun a message in parts of this connection and not done it.
    pub(super) fn has_stream_of(&self, psock: psock::Id) -> bool {
        self.streams.keys().any(|ticket| ticket.psock == psock)
    }

    pub(super) fn has_some(&self) -> bool {
        !self.batch.is_empty() || self.run.is_some()
    }
}

impl World {
    pub(super) fn actor(&mut self, act: Act, at: usize, much: usize) {
        let (id, now) = (self.actors[at].id, self.now);
        if matches!(act, Act::HandBack | Act::Disable | Act::Leave | Act::LeaveBy | Act::Die) {
            self.fairness.forget();
        }
        match act {
            Act::Poll => self.poll(at),
            Act::Done | Act::DoneSilently => {
                // A worker that has messages, so that most calls have an effect.
                let count = self.actors.len();
                let busy = (0..count).map(|more| (at + more) % count).find(|&at| self.actors[at].has_some());
                if let Some(at) = busy {
                    self.done(at, act == Act::Done, much);
                }
            }
            Act::HandBack => self.hand_back(at, much),
            Act::Parts => self.parts(at, 1 + much % 8),
            Act::Disable => {
                self.actors[at].enabled = much.is_multiple_of(2) && !self.actors[at].leaves;
                self.actors[at].moved = true;
                self.mux.disable(id, !much.is_multiple_of(2), now);
            }
            Act::Leave => self.leave(at, None),
            Act::LeaveBy => self.leave(at, Some(now + Duration::from_millis(much as u64))),
            Act::PollAtMost => self.poll_at_most(at, much % 9),
            Act::DoneRow => {
                let count = self.actors.len();
                let busy =
                    (0..count).map(|more| (at + more) % count).find(|&at| !self.actors[at].batch.is_empty());
                busy.into_iter().for_each(|at| self.done_batch(at, much));
            }
            Act::Die => {
                self.hand_back_but(at, much);
                self.lost(at);
                self.actors.remove(at);
                self.mux.handle_worker_died(id, now);
            }
            _ => {}
        }
    }

    pub(super) fn clone_worker(&mut self, credit: usize) {
        if self.actors.len() < WORKERS {
            let id = self.mux.clone_worker(credit, self.now);
            let (batch, run, streams, deadline) = (VecDeque::new(), None, BTreeMap::new(), None);
            self.actors.push(Actor {
                id,
                batch,
                run,
                streams,
                asks: true,
                enabled: true,
                moved: false,
                leaves: false,
                deadline,
            });
        }
    }

    /// Workers at odd indices get batches, as worker processes do.
    pub(super) fn poll(&mut self, at: usize) {
        let (id, now, mut batch) = (self.actors[at].id, self.now, Vec::new());
        let given = if at.is_multiple_of(2) {
            self.mux.poll_messages(id, now, &mut batch)
        } else {
            let mut rows = Vec::new();
            let given = self.mux.poll_batches(id, usize::MAX, now, &mut rows);
            for mut row in rows {
                assert_eq!(row.bytes(row.len()).len(), row.views().map(|view| view.bytes().len()).sum());
                batch.extend(std::iter::from_fn(|| row.begin()));
            }
            given
        };
        assert_eq!(given, batch.len());
        // Also if the worker got nothing: a connection may have been at its limit only now.
        let ready = &self.mux.ready;
        self.fairness.parked(|id| ready.is_parked(id));
        self.actors[at].asks = given > 0 || self.actors[at].has_some();
        for message in batch {
            self.got(at, &message);
            self.actors[at].batch.push_back(message);
        }
    }

    /// Number of messages of a connection that workers may hold now.
    fn in_flight(&self, id: psock::Id) -> usize {
        let workers = self.actors.iter().filter(|actor| actor.enabled).count();
        let Config { order, batch, in_flight, .. } = self.config;
        let spreads = matches!(order, Order::None | Order::Replies | Order::Key);
        let recent = |last: &Time| self.now.since(*last) < ACTIVE;
        let other = self.active.iter().any(|(other, last)| *other != id && recent(last));
        match in_flight {
            Some(limit) => limit,
            // Turns of one message.
            None if batch == 1 && spreads && workers > 1 && other => workers - 1,
            None => usize::MAX,
        }
    }

    /// Checks that the worker may get this message.
    pub(super) fn got(&mut self, at: usize, message: &Message) {
        let ticket = message.ticket();
        let id = self.actors[at].id;
        assert!(self.actors[at].enabled, "a disabled worker gets nothing");
        let peer = self.peers.iter().chain(&self.gone).find(|peer| peer.id == ticket.psock).expect("a peer");
        let sent = request(peer.name, ticket.number as u16);
        match message.more() {
            true => assert!(sent.starts_with(message.bytes()) && sent.len() > message.bytes().len()),
            false => assert_eq!(message.bytes()[..], sent, "the message equals what was sent"),
        }
        let place = self.locations.insert(ticket, Location::With(id));
        assert_eq!(place, Some(Location::Waits), "{ticket:?} is delivered once");
        let with = |other: &Ticket| matches!(self.locations.get(other), Some(Location::With(_)));
        let held = self.of(ticket.psock).filter(|(_, place)| matches!(place, Location::With(_))).count();
        let limit = self.in_flight(ticket.psock);
        assert!(held <= limit, "workers hold {held} messages of {ticket:?}'s connection");
        // A connection at its limit may be overtaken.
        let parked = |id| self.mux.ready.is_parked(id);
        let waiting = self
            .locations
            .iter()
            .filter(|(ticket, place)| **place == Location::Waits && !parked(ticket.psock));
        self.fairness.given(ticket.psock, waiting.map(|(ticket, _)| ticket.psock));
        match self.config.order {
            Order::None | Order::Replies => {}
            Order::Serial => {
                let mut others = self.of(ticket.psock).filter(|(other, _)| **other != ticket);
                assert!(
                    !others.any(|(other, _)| with(other)),
                    "{ticket:?}: one message of a connection at a time"
                );
                assert!(self.is_first(ticket, |_| true), "{ticket:?} is the first message not done");
            }
            Order::Sticky => {
                for (other, place) in self.of(ticket.psock) {
                    assert!(
                        !matches!(place, Location::With(worker) if *worker != id),
                        "{other:?} is with another worker"
                    );
                    assert!(
                        other.number >= ticket.number || *place != Location::Waits,
                        "{ticket:?}: before {other:?}, which still waits"
                    );
                }
                let before = self.last.insert(ticket.psock, id).filter(|before| *before != id);
                if let Some(actor) =
                    before.and_then(|before| self.actors.iter().find(|actor| actor.id == before))
                {
                    assert!(
                        actor.moved || self.config.rebalance.is_some(),
                        "{ticket:?} left a worker that stays"
                    )
                }
            }
            Order::Key => {
                let key = key_of(ticket.number as u16);
                let same = |other: &Ticket| key_of(other.number as u16) == key && key != 0;
                let mut others = self.locations.keys().filter(|other| **other != ticket && same(other));
                assert!(!others.any(with), "{ticket:?}: one message of a key at a time");
                assert!(key == 0 || self.is_first(ticket, same), "{ticket:?} is the first of its key");
            }
        }
    }

    pub(super) fn done(&mut self, at: usize, answers: bool, much: usize) {
        let actor = &mut self.actors[at];
        actor.asks = true;
        if actor.run.is_some() {
            return self.done_of_run(at, answers, much);
        }
        // Sticky and keyed messages are done in order; otherwise any message may be first.
        let which = if self.config.order == Order::Sticky { 0 } else { much % actor.batch.len() };
        if self.config.order == Order::Sticky && actor.has_stream_of(actor.batch[0].psock()) {
            return self.parts(at, 3 + usize::from(much > 99));
        }
        if actor.batch[which].more() {
            return self.first_part(at, which);
        }
        let message = actor.batch.remove(which).expect("it has some");
        let (id, ticket) = (actor.id, message.ticket());
        if answers && much % 3 == 1 && much < 250 {
            // Reply and completion in one call.
            let there = !self.ended.contains(&ticket.psock);
            let said = [Completion::Reply(ticket, message.bytes().clone()), Completion::Done(ticket)];
            self.mux.handle_completions(id, said, self.now);
            self.tried.insert(ticket);
            if there {
                self.answered.entry(ticket.psock).or_default().push(ticket.number);
            }
            assert!(!self.mux.done(id, ticket, self.now), "a message is done once");
            self.locations.insert(ticket, Location::Done);
            return;
        }
        if answers {
            let there = !self.ended.contains(&ticket.psock);
            let bytes = message.bytes().clone();
            let replied = self.mux.reply(id, ticket, bytes, self.now);
            self.pump();
            self.tried.insert(ticket);
            assert!(replied.is_ok() || !there, "a reply to an open connection succeeds");
            if replied.is_ok() {
                self.answered.entry(ticket.psock).or_default().push(ticket.number);
            }
        }
        if much >= 250 {
            // It answered and dies before it completes the message.
            self.actors[at].batch.push_front(message);
            return self.actor(Act::Die, at, 0);
        }
        assert!(self.mux.done(id, ticket, self.now), "the worker held {ticket:?}");
        assert!(!self.mux.done(id, ticket, self.now), "a message is done once");
        self.locations.insert(ticket, Location::Done);
    }

    /// Completes a part of the local batch, with one piece of replies.
    pub(super) fn done_of_run(&mut self, at: usize, answers: bool, much: usize) {
        let actor = &mut self.actors[at];
        let Some(run) = &mut actor.run else { return };
        let (psock, mut answer, mut tickets) = (run.psock(), Vec::new(), Vec::new());
        while let Some(message) = run.begin() {
            let ticket = message.ticket();
            let peer = self.peers.iter().chain(&self.gone).find(|peer| peer.id == psock).expect("a peer");
            assert_eq!(message.bytes()[..], request(peer.name, ticket.number as u16));
            assert_eq!(self.locations.insert(ticket, Location::Done), Some(Location::With(actor.id)));
            answer.extend_from_slice(message.bytes());
            tickets.push(ticket);
            if tickets.len() > much % 4 {
                break;
            }
        }
        if run.is_empty() {
            actor.run = None;
        }
        let replies = answers.then(|| (answer.into(), tickets.len() as u32));
        if answers && !self.ended.contains(&psock) {
            self.answered.entry(psock).or_default().extend(tickets.iter().map(|ticket| ticket.number));
        }
        self.mux.handle_local_batch(actor.id, tickets.len(), replies, self.now);
    }

    pub(super) fn hand_back(&mut self, at: usize, keep: usize) {
        let actor = &mut self.actors[at];
        if let Some(mut run) = actor.run.take() {
            self.mux.split_local(actor.id);
            actor.batch.extend(std::iter::from_fn(|| run.begin()));
        }
        let keep = keep % (actor.batch.len() + 1);
        let back: Vec<Ticket> = actor.batch.drain(keep..).map(|message| message.ticket()).collect();
        for ticket in &back {
            self.locations.insert(*ticket, Location::Waits);
        }
        self.mux.handle_hand_back(self.actors[at].id, &back, self.now);
    }

    /// Hands back the messages of a dying process that it had not begun, if that is known.
    pub(super) fn hand_back_but(&mut self, at: usize, which: usize) {
        let Actor { id, batch, .. } = &mut self.actors[at];
        let blamed = batch.get(which % (batch.len() + 1)).map(Message::ticket);
        let answered = batch.iter().any(|message| self.tried.contains(&message.ticket()));
        let Some(blamed) = blamed.filter(|_| !answered) else { return };
        let back: Vec<Ticket> =
            batch.iter().map(Message::ticket).filter(|&ticket| ticket != blamed).collect();
        batch.retain(|message| message.ticket() == blamed);
        for ticket in &back {
            self.locations.insert(*ticket, Location::Waits);
        }
        self.mux.handle_hand_back(*id, &back, self.now);
    }
}
