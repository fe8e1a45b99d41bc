//! One turn of a thread that has all sockets of a server: [`super::Driver`], and the thread behind [`super::Socket`]s.
//!
//! What: handle timers and events, write, wait for sockets, read them. [`super::Worker`]s poll in turn and do messages between two
//! polls, so they have a separate loop (`worker.rs`) and share [`epoll_wait`] and [`read`] with this one.

use std::io;
use std::mem::MaybeUninit;
use std::time::Duration;

use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;

use super::reader::{READS, read};
use super::state::{COALESCED_MAX, FOREVER, State, Work};
use super::{Shared, timespec};

/// Set in the event data of a driver's own descriptors: between listeners and connections.
pub(super) const CALLER: u64 = 1 << 31;

/// Result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// There was nothing to do.
    Quiet,
    /// There was something to do, and there may be more.
    Busy,
    /// The server has drained. Not reported to a driver.
    Closed,
}

impl Shared {
    /// Runs one turn, which waits for at most `limit`. Starts with `work`, which an earlier change left. `prepare` runs before events are
    /// handled; `each` gets the tokens of the driver's own descriptors that are readable.
    pub(super) fn turn(
        &self,
        mut work: Work,
        limit: Option<Duration>,
        prepare: impl FnOnce(&mut State),
        mut each: impl FnMut(u32),
    ) -> io::Result<Turn> {
        let mut state = self.lock();
        let now = self.now();
        state.pollers.sleeps_until = None;
        state.handle_timeout(self, now, &mut work);
        if limit != Some(Duration::ZERO) {
            // No data is held back over a sleep.
            state.tx.coalesced = COALESCED_MAX;
        }
        prepare(&mut state);
        state.pump(self, &mut work);
        let driver = state.mode.is_driver();
        if state.closed && !driver {
            drop(state);
            self.perform(work);
            return Ok(Turn::Closed);
        }
        let pending = !state.ready.is_empty();
        let busy = !work.writes.is_empty() || pending || std::mem::take(&mut state.worker_wanted);
        // Events of other modes wait for the application without a wake-up.
        let at_once =
            busy || std::mem::take(&mut state.connection_ended) || driver && state.notices.has_events();
        let own = state.poll_timeout().map(|time| time.since(now));
        let timeout = if at_once { Some(Duration::ZERO) } else { limit.into_iter().chain(own).min() };
        if timeout != Some(Duration::ZERO) {
            state.pollers.sleeps_until = Some(own.map_or(FOREVER, |own| now + own));
        }
        drop(state);
        self.perform(work);
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); 4 * READS];
        let Some(events) = epoll_wait(self, &mut room, timeout)? else { return Ok(Turn::Busy) };
        for events in events.chunks(READS) {
            let named = events.iter().map(|event| (event.data.u64(), event.flags));
            let (own, sockets): (Vec<_>, Vec<_>) = named.partition(|(data, _)| caller(*data).is_some());
            own.iter().filter_map(|(data, _)| caller(*data)).for_each(&mut each);
            self.read(&sockets);
        }
        // After a sleep the thread counts as awake, and it reads sockets that were ready before.
        if events.is_empty() && (pending || timeout != Some(Duration::ZERO)) {
            self.read(&[]);
        }
        Ok(if busy || !events.is_empty() { Turn::Busy } else { Turn::Quiet })
    }

    fn read(&self, events: &[(u64, EventFlags)]) {
        let mut work = Work::default();
        read(self, events, &mut work, None);
        self.lock().pump(self, &mut work);
        self.perform(work);
    }
}

/// epoll_wait(2). `None` after a signal (EINTR).
pub(super) fn epoll_wait<'a>(
    shared: &Shared,
    room: &'a mut [MaybeUninit<epoll::Event>],
    timeout: Option<Duration>,
) -> io::Result<Option<&'a [epoll::Event]>> {
    match epoll::wait(&shared.epoll, room, timeout.map(timespec).as_ref()) {
        Ok((events, _)) => Ok(Some(events)),
        Err(Errno::INTR) => Ok(None),
        Err(errno) => Err(errno.into()),
    }
}

/// The token of a driver's own descriptor.
fn caller(data: u64) -> Option<u32> {
    (data >> 31 == 1).then_some((data & (CALLER - 1)) as u32)
}
