//! Reading of ready sockets.
//!
//! What: epoll reports a ready socket once (EPOLLET). It stays in the ready queue until a worker takes it. A
//! worker takes one or a few sockets, reads them without the mutex, and passes the bytes to the core. Other
//! workers may read the remaining ones at the same time.
//!
//! Invariant: a socket that was not read completely is in the queue, or a worker reads it, or the core does
//! not want to read it; in the last case a later change of interest makes epoll report it again. A socket was
//! read completely if read(2) returned less than it had space for. A Unix socket must return nothing, because
//! its reads stop after bytes that carried descriptors.
//!
//! Races: bytes that arrive after a read make epoll report the socket again. If a worker is still reading,
//! `again` records that, and the socket returns to the queue. The end of the stream is reported once,
//! together with the bytes before it. Such a socket is read until nothing is left.

use rustix::event::epoll::EventFlags;

use super::listener::accept;
use super::state::{Reading, Work, psock_of};
use super::{Shared, handshake, linger};
use crate::mux::worker;

/// Maximum number of sockets that a worker reads before it passes the bytes to the core.
pub(super) const READS: usize = 8;
/// With this number of queued messages, sockets are read one at a time: their messages are processed while
/// they are in the cache.
const MANY: usize = 64;

/// Handles events of epoll and reads some of the ready sockets. Returns true if worker `by` got a local
/// batch.
pub(super) fn read(
    shared: &Shared,
    events: &[(u64, EventFlags)],
    work: &mut Work,
    by: Option<worker::Id>,
) -> bool {
    let (mut listeners, mut shaking, mut lingering) = (Vec::new(), Vec::new(), Vec::new());
    let mut state = shared.lock();
    let now = shared.now();
    if state.pollers.leader == by {
        // The poller is awake. `by` is `None` for a driver, as is its leader.
        state.pollers.sleeps_until = None;
    }
    for &(data, mut flags) in events {
        let Some(id) = psock_of(data) else {
            match data {
                0 => drop(rustix::io::read(&shared.eventfd, &mut [0; 8])),
                handshake::DATA => shaking = state.handshakes.ready(),
                linger::DATA => lingering = state.lingers.ready(),
                _ => listeners.extend(state.listeners.get(data)),
            }
            continue;
        };
        if flags.contains(EventFlags::OUT) {
            state.mux.handle_writable(id, now);
        }
        // Zero-copy completions are reported as EPOLLERR, too.
        if flags.contains(EventFlags::ERR)
            && state.sockets.get(id).is_some_and(|socket| socket.link.handle_error_queue())
        {
            flags.remove(EventFlags::ERR);
        }
        if flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR) {
            state.handle_ready(id, flags, now);
        }
    }
    let most = if by.is_some() { state.ready.burst } else { READS };
    let reads = state.take_ready(shared, most);
    let admission = state.listeners.admission.clone().filter(|_| !listeners.is_empty());
    let limit = state.listeners.limit;
    state.pump(shared, work);
    drop(state);
    shared.perform(std::mem::take(work));
    let outcomes: Vec<_> = reads
        .into_iter()
        .map(|mut reading| {
            let Reading { link, buffer, .. } = &mut reading;
            let outcome = link.read(buffer);
            (reading, outcome)
        })
        .collect();
    let handshake_advanced: Vec<_> =
        shaking.into_iter().map(|(key, link)| (key, link.advance_handshake())).collect();
    let dropped: Vec<_> = lingering.into_iter().map(|(key, link)| (key, link.discard())).collect();
    let accept = |listener| accept(listener, admission.as_ref(), limit, shared.start);
    let accepted: Vec<_> = listeners.into_iter().map(accept).collect();
    let now = shared.now();
    let mut state = shared.lock();
    let mut runs = false;
    for outcome in outcomes {
        runs |= state.read(outcome, by, now);
    }
    if by.is_some() {
        state.ensure_reader(now, runs, work);
    }
    state.ready.burst = if runs || state.mux.queued() >= MANY { 1 } else { READS.min(2 * state.ready.burst) };
    for (key, shake) in handshake_advanced {
        state.handshake_advanced(shared, key, shake, work);
    }
    for (key, over) in dropped {
        state.lingered(shared, key, over, work);
    }
    for accepted in accepted {
        state.accepted(shared, accepted, work);
    }
    if runs && state.mux.queued() > 0 {
        // Other messages wait after the batch. Wake a worker if the batch is long enough.
        state.pump(shared, work);
    }
    state.reschedule(work);
    runs
}
