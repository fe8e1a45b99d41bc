//! Ends of connections: at once, or after their messages are done and their replies sent.

use bytes::Bytes;

use super::event::{Cause, End, Event, Resume};
use super::psock::{self, Interest, Phase};
use super::receive::count_refusal;
use super::{Mux, Order, worker};
use crate::Time;

impl Mux {
    /// Unattaches a connection: stops reading, waits until its messages are done and answered, then reports
    /// [`Event::Ended`] with the bytes read after the last message. A message that arrives in parts is received to its end first. The
    /// connection ends at `deadline` at the latest.
    pub fn unattach(&mut self, id: psock::Id, deadline: Option<Time>, now: Time) {
        self.now = self.now.max(now);
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if !psock.is_open() {
            return;
        }
        self.counters.totals.unattach_rsvd += u64::from(psock.outstanding > 0);
        psock.deadline = deadline;
        self.close_soon(id, Cause::Unattached, true);
    }

    /// Stops reading; the connection ends when its messages are done and its replies are sent, or at
    /// `deadline`. A message that arrives in parts is received to its end first.
    pub fn drain_psock(&mut self, id: psock::Id, deadline: Option<Time>, now: Time) {
        self.now = self.now.max(now);
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if !psock.is_dead() {
            psock.deadline = psock.deadline.into_iter().chain(deadline).min();
            self.close_soon(id, Cause::Drained, false);
        }
    }

    /// Drains all connections and refuses new ones. Reports [`Event::Drained`] when the last connection has
    /// gone.
    pub fn drain(&mut self, deadline: Option<Time>, now: Time) {
        self.draining = true;
        for id in self.psocks.keys().collect::<Vec<_>>() {
            self.drain_psock(id, deadline, now);
        }
    }

    /// Closes a connection for a worker: stops reading, and ends the connection when the replies so far are sent. Later ones are
    /// dropped. `after`: the number of the message whose reply is the last one; with [`Order::Replies`] it may wait for earlier
    /// replies. Without it, all messages received so far are answered with that order.
    pub fn close_after(&mut self, id: psock::Id, after: Option<u64>, now: Time) {
        self.now = self.now.max(now);
        let Some(psock) = self.psocks.get(id).filter(|psock| psock.accepts()) else { return };
        let after = after.unwrap_or(psock.next.saturating_sub(1));
        self.counters.totals.closed += 1;
        self.close(id, Cause::Closed, false);
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let waits = after.checked_sub(psock.first).filter(|_| self.config.order == Order::Replies);
        match waits.and_then(|waits| psock.answers.get_mut(waits as usize)) {
            Some(answer) => answer.last = true,
            None => self.shut(id),
        }
    }

    /// Resets a connection for a worker: ends it at once. Replies that were not sent are dropped.
    pub fn reset(&mut self, id: psock::Id, now: Time) {
        self.now = self.now.max(now);
        self.abort(id, Cause::ResetByWorker);
    }

    /// Ends sending after the data that is queued. Drops replies that wait for earlier ones.
    pub(super) fn shut(&mut self, id: psock::Id) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        psock.tx.shut = true;
        let (before, unsent) = (psock.tx.bytes, psock.drop_answers());
        let dropped = before - psock.tx.bytes;
        self.counters.totals.unsent += unsent;
        self.recount(dropped, 0);
        self.settle(id);
    }

    /// The readiness to wait for on the connection's socket.
    pub fn interest(&self, id: psock::Id) -> Interest {
        let Some(psock) = self.psocks.get(id) else { return Interest::default() };
        let room = !psock.full && !psock.tx.full && !self.memory.is_full() && !psock.stream_full();
        Interest {
            read: room && psock.is_open() && !psock.assembler.is_over(),
            write: psock.tx.blocked && !psock.is_dead(),
        }
    }

    /// Stops reading. The connection ends when its messages are done, its replies are sent, and kept messages are
    /// acknowledged.
    pub(super) fn close(&mut self, id: psock::Id, cause: Cause, hand_back: bool) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if !psock.is_open() {
            return;
        }
        match &cause {
            Cause::Framing(failure) => {
                self.counters.totals.malformed += u64::from(!count_refusal(&mut psock.stats, &failure.cause));
            }
            Cause::Inside { .. } => self.counters.totals.inside += 1,
            _ => {}
        }
        psock.stats.rx_aborts += u64::from(!cause.is_clean());
        psock.phase = Phase::Closing { cause, hand_back };
        self.balance.remove(psock.tx.bytes, id);
        self.cut_stream(id);
        self.ask_unacked(id);
    }

    /// Ends the connection now. Workers finish the messages that they have, but their replies are dropped. The others
    /// are discarded.
    pub(super) fn abort(&mut self, id: psock::Id, cause: Cause) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if psock.is_dead() {
            return;
        }
        match cause {
            Cause::Memory => psock.stats.rx_mem_fail += 1,
            Cause::Reset(_) | Cause::Tls(_) | Cause::Descriptors => {
                psock.stats.rx_aborts += u64::from(psock.is_open());
                psock.reset = true;
                self.counters.totals.resets += 1;
            }
            Cause::Idle => self.counters.totals.idle += 1,
            Cause::SendTimeout => self.counters.totals.send_timeouts += 1,
            Cause::SendFull => self.counters.totals.send_full += 1,
            Cause::DrainTimeout => self.counters.totals.drain_timeouts += 1,
            Cause::WorkerEnded => self.counters.totals.worker_ended += 1,
            Cause::ResetByWorker => {
                psock.reset = true;
                self.counters.totals.worker_resets += 1;
            }
            _ => {}
        }
        psock.cut = true;
        self.end(id, cause);
    }

    /// Ends the connection: nothing more is sent. Reports the end after its writer has returned.
    fn end(&mut self, id: psock::Id, cause: Cause) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        psock.phase = Phase::Dead { unreported: Some(cause) };
        psock.tx.blocked = false;
        if psock.reading.is_none() {
            psock.assembler.lend();
        }
        self.balance.remove(psock.tx.bytes, id);
        self.recount_buffer(id);
        self.cut_stream(id);
        if self.is_cut(id) {
            self.discard_waiting(id);
        }
        self.end_dead(id);
    }

    /// Reports the end of a dead connection after its writer has returned.
    pub(super) fn end_dead(&mut self, id: psock::Id) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let Phase::Dead { unreported } = &mut psock.phase else { return };
        if psock.tx.sending {
            return;
        }
        if let Some(cause) = unreported.take() {
            self.report_end(id, cause, false);
        }
        self.settle(id);
    }

    /// Updates a connection after a change: bounds, interest, end, timer.
    pub(super) fn settle(&mut self, id: psock::Id) {
        let Some(psock) = self.psocks.get_mut(id) else { return };
        if self.deferred.is_active() {
            if !std::mem::replace(&mut psock.unsettled, true) {
                self.deferred.push(id);
            }
            return;
        }
        psock.full = self.config.psock_bytes.is_full(psock.full, psock.memory);
        psock.tx.full = self.config.send_bytes.is_full(psock.tx.full, psock.tx.bytes);
        psock.fill_stream(self.config.stream_bytes);
        let free = psock.is_free();
        match &mut psock.phase {
            Phase::Open => {}
            Phase::Closing { cause, hand_back }
                if free && psock.tx.bytes == 0 && psock.tx.unacked.is_empty() =>
            {
                let (cause, hand_back) = (cause.clone(), *hand_back);
                psock.phase = Phase::Dead { unreported: None };
                self.report_end(id, cause, hand_back);
                return self.remove(id);
            }
            // Workers finish its messages without replies.
            Phase::Closing { cause, .. } if psock.tx.shut && psock.tx.bytes == 0 && !psock.tx.sending => {
                let cause = cause.clone();
                return self.end(id, cause);
            }
            Phase::Closing { .. } => {}
            Phase::Dead { unreported: None } if free => return self.remove(id),
            Phase::Dead { .. } => return,
        }
        self.update_interest(id);
        self.arm(id);
    }

    fn report_end(&mut self, id: psock::Id, cause: Cause, hand_back: bool) {
        let unsent = self.drop_queue(id);
        let Some(psock) = self.psocks.get_mut(id) else { return };
        let rest = Bytes::copy_from_slice(psock.assembler.rest());
        let resume = hand_back
            .then(|| Box::new(Resume { progress: psock.assembler.progress(), used: psock.is_used() }));
        let outstanding = psock.outstanding;
        self.counters.totals.unattach += 1;
        let end = End { psock: id, cause, hand_back, rest, resume, unsent, outstanding };
        self.events.push_back(Event::Ended(end));
    }

    fn remove(&mut self, id: psock::Id) {
        self.bind(id, None);
        let Some(psock) = self.psocks.remove(id) else { return };
        self.counters.psocks.add(&psock.stats);
        if self.reports_opened {
            self.events.push_back(Event::Removed(id));
        }
        self.recount(psock.buffered, 0);
    }

    /// The deadline of a leaving worker has passed.
    pub(super) fn expire_worker(&mut self, id: worker::Id) {
        let now = self.now;
        self.handle_worker_died(id, now);
        self.events.push_back(Event::Left(id));
    }
}
