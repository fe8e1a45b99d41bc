//! What the leader does with sockets that are ready.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;

use super::Shared;
use super::listener::accept;
use super::state::{Work, psock_of};
use crate::mux::psock;

/// Sockets that the leader reads before it tells what came, at most.
pub(super) const READS: usize = 8;
/// Messages from which on a read has brought so many that one socket at a time is enough: they are done and answered
/// before the next one is read, while they are in the cache.
const MANY: usize = 64;

/// Sees to some sockets: reads without the mutex, then tells what came.
pub(super) fn read(shared: &Shared, events: &[epoll::Event], work: &mut Work) {
    let mut reads: Vec<(psock::Id, Arc<OwnedFd>, Vec<u8>)> = Vec::with_capacity(READS);
    let mut listeners = Vec::new();
    {
        let mut state = shared.lock();
        for event in events {
            let (data, flags) = (event.data.u64(), event.flags);
            let Some(id) = psock_of(data) else {
                if data == 0 {
                    let _ = rustix::io::read(&shared.bell, &mut [0; 8]);
                }
                listeners.extend(state.listeners.get(data));
                continue;
            };
            if flags.contains(EventFlags::OUT) {
                state.mux.handle_writable(id, shared.now());
            }
            let over = flags.intersects(EventFlags::HUP | EventFlags::ERR);
            if !over && !flags.contains(EventFlags::IN) {
                continue;
            }
            match (state.mux.reserve(id), state.sockets.get(id)) {
                (Some(buffer), Some(socket)) => reads.push((id, Arc::clone(&socket.fd), buffer)),
                _ if over => state.hung_up(shared, id),
                _ => {}
            }
        }
        state.pump(shared, work);
    }
    shared.perform(std::mem::take(work));
    let outcomes: Vec<_> = reads.into_iter().map(read_one).collect();
    let accepted: Vec<_> = listeners.iter().map(|(fd, tcp)| accept(fd, *tcp)).collect();
    let now = shared.now();
    let mut state = shared.lock();
    for (id, buffer, outcome) in outcomes {
        state.mux.handle_read(id, buffer, now);
        match outcome {
            Ok(0) => state.mux.handle_eof(id, now),
            Ok(_) | Err(Errno::AGAIN | Errno::INTR) => {}
            Err(errno) => state.mux.handle_error(id, errno.raw_os_error(), now),
        }
    }
    // Those that were not taken this time are first the next time: epoll goes round (epoll(7), level-triggered).
    state.reads = if state.mux.queued() >= MANY { 1 } else { READS.min(2 * state.reads) };
    for (sockets, failed) in accepted {
        for socket in sockets {
            if state.attach(shared, socket).is_err() {
                state.listeners.refused += 1;
            }
        }
        if let Some(errno) = failed {
            state.listeners.refused += 1;
            state.listeners.pause(&shared.epoll);
            log::warn!("cannot accept until a connection ends: {errno}");
        }
    }
}

fn read_one(
    (id, fd, mut buffer): (psock::Id, Arc<OwnedFd>, Vec<u8>),
) -> (psock::Id, Vec<u8>, Result<usize, Errno>) {
    let outcome = rustix::io::read(&fd, rustix::buffer::spare_capacity(&mut buffer));
    (id, buffer, outcome)
}
