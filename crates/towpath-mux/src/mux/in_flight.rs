//! The share of a connection: how many of its messages workers hold at a time ([`Config::in_flight`]).
//!
//! What: without a configured number, a connection has all workers but one, each with one turn of messages, while another connection is
//! active. So a connection that sends without a pause leaves a worker free for the others. A connection that is active alone has
//! all workers. An order in which a connection has one worker or one message at a time has no share.
//!
//! Invariant: `recent` is the connection that was active last, and `before` is when another one was.

use std::time::Duration;

use super::{Config, Order, psock};
use crate::Time;

/// A connection without messages for this time has no claim on a worker.
pub(super) const ACTIVE: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub(super) struct InFlight {
    fixed: Option<usize>,
    /// Number of enabled workers.
    workers: usize,
    /// Messages that a worker takes in a turn.
    turn: usize,
    /// All workers but one times a turn. `usize::MAX`: there is one worker, or the order needs no share.
    share: usize,
    spreads: bool,
    recent: Option<(psock::Id, Time)>,
    before: Option<Time>,
}

impl InFlight {
    pub(super) fn new(config: &Config) -> Self {
        let spreads = matches!(config.order, Order::None | Order::Replies | Order::Key);
        Self {
            fixed: config.in_flight,
            workers: 0,
            turn: 1,
            share: usize::MAX,
            spreads,
            recent: None,
            before: None,
        }
    }

    /// A connection was attached or sent a message.
    pub(super) fn active(&mut self, id: psock::Id, now: Time) {
        match &mut self.recent {
            Some((recent, last)) if *recent == id => *last = now,
            recent => self.before = recent.replace((id, now)).map(|(_, last)| last),
        }
    }

    pub(super) const fn workers(&self) -> usize {
        self.workers
    }

    pub(super) const fn set_workers(&mut self, count: usize) {
        self.workers = count;
        self.set_turn(self.turn);
    }

    pub(super) const fn set_turn(&mut self, turn: usize) {
        self.turn = turn;
        let limited = self.spreads && self.workers > 1;
        self.share = if limited { (self.workers - 1).saturating_mul(turn) } else { usize::MAX };
    }

    /// Number of messages of this connection that workers may hold now, at least 1.
    pub(super) fn limit(&self, id: psock::Id, now: Time) -> usize {
        match self.fixed {
            Some(limit) => limit,
            None if self.share == usize::MAX => usize::MAX,
            None => {
                let other = match self.recent {
                    Some((recent, last)) if recent != id => Some(last),
                    _ => self.before,
                };
                if other.is_some_and(|last| now.since(last) < ACTIVE) { self.share } else { usize::MAX }
            }
        }
    }

    /// Returns true if one worker may process `count` messages of a connection of which workers hold `in_hand`.
    pub(super) fn fits_one(&self, id: psock::Id, (in_hand, count): (usize, usize), now: Time) -> bool {
        self.fixed.is_none() && in_hand == 0 || in_hand.saturating_add(count) <= self.limit(id, now)
    }
}
