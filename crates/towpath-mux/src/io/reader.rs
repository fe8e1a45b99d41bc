//! What a worker does with sockets that are ready.
//!
//! What: epoll says of each socket once that it is ready (EPOLLET); those stand in a queue until somebody reads them. A worker takes
//! one or a few from there, reads them without the mutex, and tells the core. Who takes leaves the rest to others: they may
//! read those at the same time.
//!
//! Invariant: a socket of which not everything was read is in the queue, or somebody reads it, or the core wants nothing of it
//! now; then it is watched anew when that changes, and epoll says again what is there. Everything was read when read(2) brought less
//! than it had room for; of a Unix socket, only when it brought nothing: it stops behind bytes that descriptors came with.
//!
//! Races: bytes that come behind a read make epoll say it again. When somebody still reads, that is remembered (`again`), and the
//! socket goes back into the queue. That the peer has sent its last byte is said once, with the bytes before it: then it is
//! read until there is nothing.

use rustix::event::epoll::EventFlags;

use super::listener::accept;
use super::state::{Reading, Work, psock_of};
use super::{Shared, handshake, linger};
use crate::mux::worker;

/// Sockets that a worker reads before it tells what came, at most.
pub(super) const READS: usize = 8;
/// Messages from which on a read has brought so many that one socket at a time is enough: they are done and answered
/// before the next one is read, while they are in the cache.
const MANY: usize = 64;

/// Takes what epoll said, and reads some of the sockets that are ready. Whether it is worker `by` who has a run of it now.
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
        // It is awake. A driver is nobody's leader, and no worker.
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
        // Completions of a zerocopy_sender are EPOLLERR too.
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
        // Others came besides, which wait behind the run: is it long enough to wake somebody?
        state.pump(shared, work);
    }
    state.reschedule(work);
    runs
}
