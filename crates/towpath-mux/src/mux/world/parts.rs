//! Messages in parts.

use bytes::Bytes;

use super::wire::request;
use super::{Location, PartKind, Peer, World};
use crate::mux::psock;

/// Number of messages of a peer of which the mux has received at least the first part.
pub(super) fn received(peer: &Peer, part: usize) -> usize {
    let starts = std::iter::once(0).chain(peer.ends.iter().copied());
    let here = |(start, end): (usize, &usize)| {
        let known = part > 0 && end - start > 4 * part && start + 5 <= peer.arrived;
        *end <= peer.arrived || known
    };
    starts.zip(&peer.ends).filter(|&message| here(message)).count()
}

impl World {
    /// The connection is closed; while a message arrives in parts, after it.
    pub(super) fn closes(&mut self, id: psock::Id) {
        if let Some(peer) = self.peers.iter_mut().find(|peer| peer.id == id) {
            peer.closes = true;
        }
    }

    /// The peers of messages that have not arrived completely send no more.
    pub(super) fn end_incomplete(&mut self) {
        let incomplete =
            |peer: &&Peer| peer.received.checked_sub(1).is_some_and(|last| peer.ends[last] > peer.arrived);
        let ids: Vec<_> = self.peers.iter().filter(incomplete).map(|peer| peer.id).collect();
        ids.into_iter().for_each(|id| self.mux.handle_eof(id, self.now));
    }

    /// A worker has done the first part of a message.
    pub(super) fn first_part(&mut self, at: usize, which: usize) {
        let actor = &mut self.actors[at];
        actor.asks = true;
        let message = actor.batch.remove(which).expect("it has some");
        self.begun += 1;
        actor.streams.insert(message.ticket(), (message.bytes().to_vec(), None));
        assert!(self.mux.part_done(actor.id, message.ticket(), self.now));
    }

    /// A worker takes up to `most` parts, does them, and answers and does the messages that are complete.
    pub(super) fn parts(&mut self, at: usize, most: usize) {
        for _ in 0..most {
            let actor = &mut self.actors[at];
            let Some(part) = self.mux.next_part(actor.id) else { break };
            let ticket = part.view().ticket();
            let (bytes, end) = actor.streams.get_mut(&ticket).expect("a message that the worker has begun");
            assert_eq!(*end, None, "nothing follows the last part");
            bytes.extend_from_slice(part.view().bytes());
            let peer =
                self.peers.iter().chain(&self.gone).find(|peer| peer.id == ticket.psock).expect("a peer");
            let sent = request(peer.name, ticket.number as u16);
            match part.kind {
                PartKind::More => {
                    assert!(sent.starts_with(bytes) && bytes.len() < sent.len(), "parts in order");
                    assert!(part.view().bytes().len() >= self.part, "a part is not short");
                    assert!(self.mux.part_done(actor.id, ticket, self.now));
                    continue;
                }
                PartKind::Last => assert_eq!(*bytes, sent, "the parts are the message"),
                PartKind::Cut => {
                    let closes = self.mux.psocks.get(ticket.psock).is_none_or(|psock| !psock.is_open());
                    assert!(closes, "a message is cut because its connection ends");
                }
            }
            *end = Some(part.kind);
        }
        // One at a time: an answer may end a connection.
        let over = self.actors[at].streams.iter().find(|(_, (_, end))| end.is_some());
        let Some((&ticket, (bytes, end))) = over.filter(|_| most > 2) else { return };
        let (bytes, whole, id) =
            (Bytes::from(bytes.clone()), *end == Some(PartKind::Last), self.actors[at].id);
        if whole {
            let there = !self.ended.contains(&ticket.psock);
            let replied = self.mux.reply(id, ticket, bytes, self.now);
            self.pump();
            self.tried.insert(ticket);
            assert!(replied.is_ok() || !there, "a reply to an open connection succeeds");
            if replied.is_ok() {
                self.answered.entry(ticket.psock).or_default().push(ticket.number);
            }
        }
        if most == 4 {
            // It dies before it completes the message.
            return self.actor(super::Act::Die, at, usize::MAX);
        }
        self.actors[at].streams.remove(&ticket);
        assert!(self.mux.done(id, ticket, self.now) && !self.mux.done(id, ticket, self.now));
        self.locations.insert(ticket, Location::Done);
        if most == usize::MAX {
            self.pump();
            if self.actors.get(at).is_some_and(|actor| actor.id == id) {
                self.parts(at, most);
            }
        }
    }
}
