//! What the application reads from a server: ended connections and events. Bounded; the oldest entries make room, but not connections
//! that the application has taken back.

use std::collections::VecDeque;

use super::{Ended, Event};
use crate::mux::{Cause, psock};

/// Entries that are kept of each kind.
const MAX: usize = 1024;

/// Ended connections and events, oldest first.
#[derive(Debug, Default)]
pub(in crate::io) struct Notices {
    ended: VecDeque<Ended>,
    events: VecDeque<Event>,
}

impl Notices {
    pub(in crate::io) fn push_ended(&mut self, ended: Ended) {
        if self.ended.len() >= MAX
            && let Some(oldest) = self.ended.iter().position(|ended| !is_taken_back(ended))
        {
            self.ended.remove(oldest);
        }
        self.ended.push_back(ended);
    }

    /// Adds an event. If there are too many, drops the oldest failed handshake, whose number peers control; without one the oldest event
    /// but [`Event::Left`], which is always delivered and of which there are few.
    pub(in crate::io) fn push_event(&mut self, event: Event) {
        self.events.push_back(event);
        if self.events.len() > MAX {
            let first = |least: fn(&Event) -> bool| self.events.iter().position(least);
            let least = first(|event| matches!(event, Event::NotAttached { .. }));
            let least = least.or_else(|| first(|event| !matches!(event, Event::Left(_))));
            self.events.remove(least.unwrap_or(0));
        }
    }

    pub(in crate::io) fn pop_ended(&mut self) -> Option<Ended> {
        self.ended.pop_front()
    }

    /// Removes and returns the end of this connection.
    pub(in crate::io) fn take_ended(&mut self, id: psock::Id) -> Option<Ended> {
        let at = self.ended.iter().position(|ended| ended.psock == id)?;
        self.ended.remove(at)
    }

    pub(in crate::io) fn pop_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    pub(in crate::io) fn has_events(&self) -> bool {
        !self.events.is_empty()
    }

    pub(in crate::io) fn is_empty(&self) -> bool {
        self.events.is_empty() && self.ended.is_empty()
    }
}

/// A connection that the application has taken back is kept for it: dropping its socket would close it. Descriptors bound their number.
fn is_taken_back(ended: &Ended) -> bool {
    ended.cause == Cause::Unattached && ended.socket.is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mux::worker;

    #[test]
    fn failed_handshakes_make_room_first_and_left_workers_last() {
        let mut notices = Notices::default();
        let left = worker::Id::default();
        notices.push_event(Event::Left(left));
        notices.push_event(Event::NotAttached { peer: None, why: String::new() });
        (0..MAX).for_each(|_| notices.push_event(Event::WriteSpace));
        assert_eq!(notices.events.len(), MAX);
        assert!(matches!(notices.pop_event(), Some(Event::Left(_))));
        assert!(notices.events.iter().all(|event| matches!(event, Event::WriteSpace)));
    }
}
