//! What the leader does with sockets that are ready.

use std::sync::Arc;

use rustix::event::epoll::{self, EventFlags};

use super::link::Link;
use super::listener::accept;
use super::state::{Work, psock_of};
use super::{Shared, handshake};
use crate::mux::{psock, worker};

/// Sockets that the leader reads before it tells what came, at most.
pub(super) const READS: usize = 8;
/// Messages from which on a read has brought so many that one socket at a time is enough: they are done and answered
/// before the next one is read, while they are in the cache.
const MANY: usize = 64;

/// Sees to some sockets: reads without the mutex, then tells what came. Whether it is worker `by` who has a run of it now.
pub(super) fn read(
    shared: &Shared,
    events: &[epoll::Event],
    work: &mut Work,
    by: Option<worker::Id>,
) -> bool {
    let mut reads: Vec<(psock::Id, Arc<Link>, Vec<u8>)> = Vec::with_capacity(READS);
    let (mut listeners, mut shaking) = (Vec::new(), Vec::new());
    let mut state = shared.lock();
    for event in events {
        let (data, flags) = (event.data.u64(), event.flags);
        let Some(id) = psock_of(data) else {
            match data {
                0 => drop(rustix::io::read(&shared.bell, &mut [0; 8])),
                handshake::DATA => shaking = state.handshakes.ready(),
                _ => listeners.extend(state.listeners.get(data)),
            }
            continue;
        };
        if flags.contains(EventFlags::OUT) {
            state.mux.handle_writable(id, shared.now());
        }
        // Completions of a carrier are EPOLLERR too.
        let failed = flags.contains(EventFlags::ERR)
            && !state.sockets.get(id).is_some_and(|socket| socket.link.handle_error_queue());
        let over = failed || flags.contains(EventFlags::HUP);
        if !over && !flags.contains(EventFlags::IN) {
            continue;
        }
        match (state.mux.reserve(id), state.sockets.get(id)) {
            (Some(buffer), Some(socket)) => reads.push((id, Arc::clone(&socket.link), buffer)),
            _ if over => state.hung_up(shared, id),
            _ => {}
        }
    }
    let admission = state.listeners.admission.clone().filter(|_| !listeners.is_empty());
    state.pump(shared, work);
    drop(state);
    shared.perform(std::mem::take(work));
    let outcomes: Vec<_> = reads
        .into_iter()
        .map(|(id, link, mut buffer)| {
            let outcome = link.read(&mut buffer);
            (id, buffer, outcome)
        })
        .collect();
    let shaken: Vec<_> = shaking.into_iter().map(|(key, link)| (key, link.shake())).collect();
    let accepted: Vec<_> =
        listeners.into_iter().map(|listener| accept(listener, admission.as_ref(), shared.start)).collect();
    let now = shared.now();
    let mut state = shared.lock();
    let mut runs = false;
    for outcome in outcomes {
        runs |= state.read(outcome, by, now, work);
    }
    // Those that were not taken this time are first the next time: epoll goes round (epoll(7), level-triggered).
    state.reads = if runs || state.mux.queued() >= MANY { 1 } else { READS.min(2 * state.reads) };
    for (key, shake) in shaken {
        state.shaken(shared, key, shake, work);
    }
    for accepted in accepted {
        state.accepted(shared, accepted, work);
    }
    runs
}
