//! What an engine lets others see.

use towpath_gate::gate::Ports;

use crate::control::protocol::{Frame, Ring};
use crate::control::{Observed, Tap};
use crate::queue::{Channel, Listener, Queue};

/// The engine, for as long as it answers.
pub(super) struct View<'a, C> {
    pub(super) queues: &'a mut [Queue<C>],
    pub(super) ports: &'a Ports,
    /// Nanoseconds of the engine's wall clock.
    pub(super) wall: u64,
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

    fn ports(&self) -> Vec<String> {
        self.ports.ids().map(|id| self.ports.name(id).unwrap_or_default().to_owned()).collect()
    }
}
