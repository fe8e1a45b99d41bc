//! What an engine lets others see.

use towpath_gate::Walker;
use towpath_wire::Time;

use super::Totals;
use super::trace::Traces;
use crate::control::protocol::{Frame, Ring};
use crate::control::rows::{self, Stats};
use crate::control::{Observed, Sieve, Tap};
use crate::queue::{Channel, Listener, Queue};
use crate::report;
use crate::rulebook::Rechecks;

/// The engine, for as long as it answers.
pub(super) struct View<'a, C> {
    pub(super) queues: &'a mut [Queue<C>],
    pub(super) walker: &'a Walker,
    /// Nanoseconds of the engine's wall clock.
    pub(super) wall: u64,
    pub(super) clock: Time,
    pub(super) counts: (Totals, report::Replies),
    pub(super) traces: &'a mut Traces,
}

impl<C: Channel> View<'_, C> {
    fn listener(&mut self, channel: u32) -> Option<&mut Listener<C>> {
        self.queues.iter_mut().flat_map(Queue::listeners).find(|listener| listener.number() == channel)
    }
}

impl<C: Channel> Observed for View<'_, C> {
    fn rings(&mut self) -> Vec<Ring> {
        let mut rings = Vec::new();
        for queue in &mut *self.queues {
            let (number, policy) = (queue.number(), queue.policy());
            rings.extend(queue.listeners().map(|listener| listener.ring(number, &policy, self.wall)));
        }
        rings.sort_by_key(|ring| ring.channel);
        rings
    }

    fn frames(&mut self, channel: u32) -> Option<Vec<Frame>> {
        let wall = self.wall;
        self.listener(channel).map(|listener| listener.frames(wall))
    }

    fn trace(&mut self, channel: u32, tap: Tap) -> Result<(), Tap> {
        match self.listener(channel) {
            Some(listener) => listener.trace(tap),
            None => Err(tap),
        }
    }

    fn follow(&mut self, sieve: Sieve, tap: Tap) -> Result<(), Tap> {
        self.traces.add(sieve, tap)
    }

    fn queues(&mut self) -> Vec<rows::Queue> {
        let row = |queue: &mut Queue<C>| {
            let inspectors = queue.listeners().filter(|listener| listener.gone().is_none()).count() as u64;
            let counters = queue.counters().clone();
            let (open, high_water) = (counters.open, counters.high_water);
            rows::Queue { open, high_water, inspectors, trouble: counters.trouble.clone(), counters }
        };
        let mut rows: Vec<_> = self.queues.iter_mut().map(row).collect();
        rows.sort_by_key(|row| row.counters.number);
        rows
    }

    fn clock(&self) -> Time {
        self.clock
    }

    fn stats(&self) -> Stats {
        let (
            Totals {
                packets,
                bytes,
                passed,
                dropped,
                rejected,
                inspected,
                undecodable,
                no_room,
                no_route,
                expired,
            },
            replies,
        ) = self.counts;
        let states = self.walker.states();
        Stats {
            packets,
            bytes,
            passed,
            dropped,
            no_room,
            no_route,
            expired,
            rejected,
            undecodable,
            waiting: packets - passed - dropped - rejected - undecodable,
            inspected,
            replies,
            states: report::States::of(states),
            // The rulebook knows, not the engine.
            recheck: Rechecks::default(),
        }
    }

    fn ports(&self) -> Vec<String> {
        let ports = self.walker.ports();
        ports.ids().map(|id| ports.name(id).unwrap_or_default().to_owned()).collect()
    }
}
