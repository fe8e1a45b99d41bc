//! Ready queues: messages that workers may take, in one queue for each connection, served round robin by cost.
//!
//! What: deficit round robin (Shreedhar and Varghese 1996). A connection whose turn it is may take a *quantum*: as
//! much as one turn of a worker. Then it goes behind the other connections. A message costs its bytes, at least [`UNIT`]; the
//! quantum of a turn of `n` messages is `n` units. A message that costs more than what is left is taken, and the
//! connection pays with its next turns, at most [`DEBT`] of them. Messages of one read stay together as a batch until a
//! worker takes them: as many as it may have, as a batch ([`Ready::pop_batch`]), or one ([`Ready::pop_front`]).
//!
//! A connection without waiting messages comes last when it gets some. So before it, every other connection gets at most one
//! quantum: with one busy connection and turns of one message, at most one message that had not been begun.
//!
//! A connection that reaches [`Config::in_flight`](super::Config::in_flight) is *parked*: its messages wait here, but no worker may take
//! them.
//!
//! Invariant: `messages` and `parked` include the messages in batches. No batch and no queue is empty. `round` has each connection
//! that is not parked once. A connection that is alone in the round has no debt.

use std::collections::VecDeque;

use slotmap::SecondaryMap;

use super::batch::Batch;
use super::message::Message;
use super::psock;
use crate::Time;

/// Cost of a short message: what a worker spends on a message besides its bytes, in bytes.
const UNIT: i64 = 1024;
/// Maximum number of turns that a connection waits for because of one long message.
const DEBT: i64 = 16;
/// Empty queues that are kept, and their maximum capacity.
const SPARES: usize = 64;
const SPARE_ENTRIES: usize = 64;

#[derive(Debug, Default)]
pub(super) struct Ready {
    flows: SecondaryMap<psock::Id, Flow>,
    /// Connections in the order of their turns.
    round: VecDeque<psock::Id>,
    /// Number of messages of these connections.
    messages: usize,
    /// Number of messages of parked connections.
    parked: usize,
    spares: Vec<VecDeque<Entry>>,
}

/// Waiting messages of one connection, oldest first.
#[derive(Debug)]
struct Flow {
    queue: VecDeque<Entry>,
    messages: usize,
    /// The rest of its quantum, at most the quantum of a turn. 0 or less: its turn is over.
    credit: i64,
    parked: bool,
}

/// An entry of the queue.
#[derive(Debug)]
pub(super) enum Entry {
    Message(Message),
    Batch(Batch),
}

impl Entry {
    pub(super) fn psock(&self) -> psock::Id {
        match self {
            Self::Message(message) => message.ticket.psock,
            Self::Batch(batch) => batch.psock(),
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Message(_) => 1,
            Self::Batch(batch) => batch.len(),
        }
    }

    pub(super) fn is_opened(&self) -> bool {
        matches!(self, Self::Message(message) if message.is_opened())
    }

    /// Its messages, oldest first.
    pub(super) fn into_messages(self) -> impl Iterator<Item = Message> {
        let (message, mut batch) = match self {
            Self::Message(message) => (Some(message), None),
            Self::Batch(batch) => (None, Some(batch)),
        };
        message.into_iter().chain(std::iter::from_fn(move || batch.as_mut()?.begin()))
    }
}

/// Cost of `count` messages of `bytes` bytes together.
const fn cost(count: usize, bytes: usize) -> i64 {
    let (units, bytes) = (count as i64 * UNIT, bytes as i64);
    if units > bytes { units } else { bytes }
}

/// Credit of a turn of this number of messages.
const fn credit(quantum: usize) -> i64 {
    // Larger than every turn, and far from an overflow.
    let most = 1 << 20;
    (if quantum < most { quantum as i64 } else { most as i64 }) * UNIT
}

impl Ready {
    /// Number of messages that workers may take.
    pub(super) const fn len(&self) -> usize {
        self.messages
    }

    /// Returns true if workers may take no message.
    pub(super) const fn is_empty(&self) -> bool {
        self.messages == 0
    }

    /// Number of messages of parked connections.
    pub(super) const fn parked(&self) -> usize {
        self.parked
    }

    /// Returns true if no worker may take the connection's messages.
    pub(super) fn is_parked(&self, id: psock::Id) -> bool {
        self.flows.get(id).is_some_and(|flow| flow.parked)
    }

    /// The parked connections.
    pub(super) fn parked_connections(&self) -> Vec<psock::Id> {
        self.flows.iter().filter(|(_, flow)| flow.parked).map(|(id, _)| id).collect()
    }

    /// When the oldest message of the connection whose turn is next was complete.
    pub(super) fn oldest(&self) -> Option<Time> {
        let flow = self.flows.get(*self.round.front()?)?;
        flow.queue.front().map(|entry| match entry {
            Entry::Message(message) => message.received,
            Entry::Batch(batch) => batch.received(),
        })
    }

    /// Adds a message after the others of its connection, or the opened event before them. `parked`: the connection is at its limit.
    pub(super) fn push_back(&mut self, message: Message, parked: bool) {
        self.push(Entry::Message(message), parked);
    }

    /// Adds a batch after the other messages of its connection. `parked`: the connection is at its limit.
    pub(super) fn push_batch(&mut self, batch: Batch, parked: bool) {
        self.push(Entry::Batch(batch), parked);
    }

    fn push(&mut self, entry: Entry, parked: bool) {
        let (id, count) = (entry.psock(), entry.len());
        if let Some(flow) = self.flows.get_mut(id) {
            match entry.is_opened() {
                true => flow.queue.push_front(entry),
                false => flow.queue.push_back(entry),
            }
            flow.messages += count;
            *(if flow.parked { &mut self.parked } else { &mut self.messages }) += count;
            return;
        }
        self.insert(id, parked).queue.push_back(entry);
        self.count_new(id, count);
        if !parked {
            self.round.push_back(id);
        }
    }

    /// Adds a message that was ready before: before the other messages of its connection, but after the opened event and those with
    /// smaller numbers that were put back sooner. A connection without other messages is served next.
    pub(super) fn put_back(&mut self, message: Message) {
        let id = message.ticket.psock;
        if let Some(flow) = self.flows.get_mut(id) {
            let earlier =
                |entry: &Entry| matches!(entry, Entry::Message(other) if other.place() < message.place());
            let at = flow.queue.iter().take_while(|entry| earlier(entry)).count();
            flow.queue.insert(at, Entry::Message(message));
            flow.messages += 1;
            *(if flow.parked { &mut self.parked } else { &mut self.messages }) += 1;
            return;
        }
        self.insert(id, false).queue.push_back(Entry::Message(message));
        self.count_new(id, 1);
        self.round.push_front(id);
    }

    /// Adds an empty queue.
    fn insert(&mut self, id: psock::Id, parked: bool) -> &mut Flow {
        let queue = self.spares.pop().unwrap_or_default();
        self.flows.insert(id, Flow { queue, messages: 0, credit: i64::MAX, parked });
        &mut self.flows[id]
    }

    fn count_new(&mut self, id: psock::Id, count: usize) {
        let flow = &mut self.flows[id];
        flow.messages = count;
        *(if flow.parked { &mut self.parked } else { &mut self.messages }) += count;
    }

    /// Begins a turn: returns the connection that [`Ready::pop_front`] and [`Ready::pop_batch`] take from next.
    pub(super) fn turn(&mut self, quantum: usize) -> Option<psock::Id> {
        let most = credit(quantum);
        loop {
            let id = *self.round.front()?;
            let flow = &mut self.flows[id];
            if self.round.len() == 1 {
                flow.credit = most;
                return Some(id);
            }
            flow.credit = flow.credit.min(most);
            if flow.credit > 0 {
                return Some(id);
            }
            flow.credit += most;
            self.round.rotate_left(1);
        }
    }

    /// Removes a message of the connection whose turn it is.
    pub(super) fn pop_front(&mut self, quantum: usize) -> Option<Message> {
        let id = self.turn(quantum)?;
        let flow = &mut self.flows[id];
        let message = match flow.queue.front_mut()? {
            Entry::Batch(batch) if batch.len() > 1 => batch.begin(),
            _ => flow.queue.pop_front()?.into_messages().next(),
        }?;
        self.taken(id, quantum, (1, message.bytes.len()));
        Some(message)
    }

    /// Removes messages of the connection whose turn it is: one, or up to `most` messages and `bytes` bytes of a batch; at
    /// least one message.
    pub(super) fn pop_batch(&mut self, quantum: usize, most: usize, bytes: usize) -> Option<Entry> {
        let id = self.turn(quantum)?;
        let alone = self.round.len() == 1;
        let flow = &mut self.flows[id];
        let entry = match flow.queue.front_mut()? {
            Entry::Message(_) => flow.queue.pop_front()?,
            Entry::Batch(batch) => {
                // While others wait, its turn ends with its quantum.
                let (units, room) =
                    if alone { (most, bytes) } else { ((flow.credit / UNIT) as usize, flow.credit as usize) };
                let count = batch.fitting(most.min(units), bytes.min(room)).max(1);
                match count < batch.len() {
                    true => Entry::Batch(batch.split_to(count)),
                    false => flow.queue.pop_front()?,
                }
            }
        };
        let weight = match &entry {
            Entry::Message(message) => (1, message.bytes.len()),
            Entry::Batch(batch) => (batch.len(), batch.weight().0),
        };
        self.taken(id, quantum, weight);
        Some(entry)
    }

    /// Counts what the first connection of the round was given, and ends its turn if its quantum is used up.
    fn taken(&mut self, id: psock::Id, quantum: usize, (count, bytes): (usize, usize)) {
        let flow = &mut self.flows[id];
        self.messages -= count;
        flow.messages -= count;
        if flow.queue.is_empty() {
            self.round.pop_front();
            self.remove(id);
            return;
        }
        if self.round.len() == 1 {
            return;
        }
        let most = credit(quantum);
        flow.credit -= cost(count, bytes).min(DEBT * most);
        if flow.credit <= 0 {
            flow.credit += most;
            self.round.rotate_left(1);
        }
    }

    /// Parks a connection that has just been served: it has reached its limit.
    pub(super) fn park(&mut self, id: psock::Id) {
        let Some(flow) = self.flows.get_mut(id).filter(|flow| !flow.parked) else { return };
        flow.parked = true;
        self.messages -= flow.messages;
        self.parked += flow.messages;
        self.leave_round(id);
    }

    /// A parked connection is below its limit again.
    pub(super) fn unpark(&mut self, id: psock::Id) {
        let Some(flow) = self.flows.get_mut(id).filter(|flow| flow.parked) else { return };
        flow.parked = false;
        self.messages += flow.messages;
        self.parked -= flow.messages;
        self.round.push_back(id);
    }

    /// Removes and returns all messages of a connection.
    pub(super) fn take(&mut self, id: psock::Id) -> VecDeque<Entry> {
        let Some(flow) = self.flows.remove(id) else { return VecDeque::new() };
        match flow.parked {
            true => self.parked -= flow.messages,
            false => {
                self.messages -= flow.messages;
                self.leave_round(id);
            }
        }
        flow.queue
    }

    /// Removes and returns all messages.
    pub(super) fn drain(&mut self) -> Vec<Message> {
        (self.messages, self.parked) = (0, 0);
        self.round.clear();
        let flows = self.flows.drain().map(|(_, flow)| flow.queue);
        flows.flatten().flat_map(Entry::into_messages).collect()
    }

    fn leave_round(&mut self, id: psock::Id) {
        // A connection that has just been served is the first or the last one.
        if self.round.front() == Some(&id) {
            self.round.pop_front();
        } else if self.round.back() == Some(&id) {
            self.round.pop_back();
        } else {
            self.round.retain(|&other| other != id);
        }
    }

    /// Removes an empty queue and keeps its memory for another connection.
    fn remove(&mut self, id: psock::Id) {
        let Some(flow) = self.flows.remove(id) else { return };
        if self.spares.len() < SPARES && flow.queue.capacity() <= SPARE_ENTRIES {
            self.spares.push(flow.queue);
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::super::message::Ticket;
    use super::*;

    fn message(peer: u32, number: u64, length: usize) -> Message {
        let psock = psock::Id::from_parts(peer, 1);
        Message {
            ticket: Ticket { psock, number },
            bytes: Bytes::from(vec![0; length]),
            skip: 0,
            trim: 0,
            mark: 0,
            hash: 0,
            received: Time::from_secs(number),
            charge: 0,
            deaths: 0,
            more: false,
        }
    }

    /// Peers in the order in which single messages are taken.
    fn order(ready: &mut Ready, quantum: usize, most: usize) -> Vec<u32> {
        let taken = std::iter::from_fn(|| ready.pop_front(quantum)).take(most);
        taken.map(|message| message.ticket.psock.parts().0).collect()
    }

    #[test]
    fn connections_take_turns_of_a_quantum() {
        for (quantum, expected) in
            [(1, [1, 2, 1, 2, 1, 2, 1, 2]), (2, [1, 1, 2, 2, 1, 1, 2, 2]), (9, [1, 1, 1, 1, 2, 2, 2, 2])]
        {
            let mut ready = Ready::default();
            for peer in [1, 2] {
                (0..4).for_each(|number| ready.push_back(message(peer, number, 10), false));
            }
            assert_eq!((ready.len(), ready.oldest()), (8, Some(Time::from_secs(0))));
            assert_eq!(order(&mut ready, quantum, 9), expected);
            assert!(ready.is_empty() && ready.flows.is_empty() && ready.round.is_empty());
        }
    }

    #[test]
    fn a_new_connection_waits_for_one_quantum() {
        let mut ready = Ready::default();
        (0..5000).for_each(|number| ready.push_back(message(1, number, 10), false));
        assert_eq!(order(&mut ready, 64, 1000).len(), 1000);
        ready.push_back(message(2, 0, 10), false);
        // The quantum has shrunk because messages take long.
        assert_eq!(order(&mut ready, 1, 3), [1, 2, 1]);
    }

    #[test]
    fn long_messages_are_paid_for_with_later_turns_but_not_without_end() {
        let mut ready = Ready::default();
        (0..4).for_each(|number| ready.push_back(message(1, number, 3 * UNIT as usize), false));
        (0..12).for_each(|number| ready.push_back(message(2, number, 10), false));
        assert_eq!(order(&mut ready, 1, 8), [1, 2, 2, 2, 1, 2, 2, 2], "the same bytes");
        let mut ready = Ready::default();
        (0..2).for_each(|number| ready.push_back(message(1, number, 1 << 20), false));
        (0..40).for_each(|number| ready.push_back(message(2, number, 10), false));
        let order = order(&mut ready, 1, 40);
        assert_eq!(order.iter().skip(1).position(|peer| *peer == 1), Some(DEBT as usize), "{order:?}");
    }

    #[test]
    fn a_connection_alone_has_no_debt() {
        let mut ready = Ready::default();
        (0..4).for_each(|number| ready.push_back(message(1, number, 1 << 20), false));
        assert_eq!(order(&mut ready, 1, 2), [1, 1]);
        ready.push_back(message(2, 0, 10), false);
        ready.push_back(message(2, 1, 10), false);
        assert_eq!(order(&mut ready, 1, 3), [1, 2, 2]);
    }

    #[test]
    fn a_parked_connection_is_passed_over() {
        let mut ready = Ready::default();
        let one = psock::Id::from_parts(1, 1);
        (0..3).for_each(|number| ready.push_back(message(1, number, 10), false));
        ready.push_back(message(2, 0, 10), false);
        assert_eq!(order(&mut ready, 1, 1), [1]);
        ready.park(one);
        ready.push_back(message(1, 3, 10), true);
        assert_eq!((ready.len(), ready.parked()), (1, 3));
        assert_eq!(order(&mut ready, 1, 9), [2]);
        assert!(ready.is_empty() && ready.oldest().is_none());
        ready.unpark(one);
        ready.unpark(one);
        assert_eq!((ready.len(), ready.parked()), (3, 0));
        ready.park(one);
        assert_eq!((ready.take(one).len(), ready.parked()), (3, 0));
        assert!(ready.take(one).is_empty());
    }

    #[test]
    fn messages_are_put_back_in_order() {
        let mut ready = Ready::default();
        ready.push_back(message(1, 5, 10), false);
        for number in [3, 4, 2] {
            ready.put_back(message(1, number, 10));
        }
        ready.put_back(message(2, 7, 10));
        let taken = std::iter::from_fn(|| ready.pop_front(9)).map(|message| message.ticket.number);
        assert_eq!(taken.collect::<Vec<_>>(), [7, 2, 3, 4, 5]);
    }
}
