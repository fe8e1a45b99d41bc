//! The thread that has the sockets of a mux with open_sockets (KCM's work queue): bytes come and go while nobody calls.
//!
//! What: it waits for sockets, reads them, writes what they did not take at once, and does what is due. Messages go to open_sockets that
//! wait for one, or stay in the core. It ends when the mux has drained.
//!
//! When the last handle is closed, it takes what nobody will read, so that connections end when what is to be sent has left.

use std::io;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

use rustix::event::epoll;
use rustix::io::Errno;

use super::super::reader::{READS, read};
use super::super::state::{FOREVER, State, Work};
use super::super::{Shared, timespec};
use crate::mux::{Message, worker};

/// Starts the thread.
pub(super) fn start(shared: &Arc<Shared>) -> io::Result<()> {
    let shared = Arc::clone(shared);
    // The kernel keeps 15 bytes of a thread's name (prctl(2), PR_SET_NAME).
    std::thread::Builder::new().name("mux".to_owned()).spawn(move || {
        let mut queue = Workqueue { shared: &shared, refuse: None, batch: Vec::new() };
        if let Err(error) = queue.run() {
            log::error!("the sockets cannot be waited for any more: {error}");
            let mut work = Work::default();
            shared.lock().close_all(&mut work);
            shared.perform(work);
        }
    })?;
    Ok(())
}

struct Workqueue<'a> {
    shared: &'a Shared,
    /// Who takes what nobody will read.
    refuse: Option<worker::Id>,
    batch: Vec<Message>,
}

impl Workqueue<'_> {
    fn run(&mut self) -> io::Result<()> {
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); 4 * READS];
        loop {
            let mut work = Work::default();
            let mut state = self.shared.lock();
            let now = self.shared.now();
            state.until = None;
            state.handle_timeout(self.shared, now, &mut work);
            if state.open_sockets == Some(0) {
                self.refuse(&mut state);
            }
            state.pump(self.shared, &mut work);
            if state.closed {
                drop(state);
                self.shared.perform(work);
                return Ok(());
            }
            let busy = !work.writes.is_empty() || !state.ready.is_empty();
            let timeout = match state.poll_timeout() {
                _ if busy => Some(Duration::ZERO),
                Some(due) => Some(due.since(now)),
                None => None,
            };
            if timeout != Some(Duration::ZERO) {
                state.until = Some(timeout.map_or(FOREVER, |timeout| now + timeout));
            }
            drop(state);
            self.shared.perform(work);
            let events = match epoll::wait(&self.shared.epoll, &mut room, timeout.map(timespec).as_ref()) {
                Ok((events, _)) => &*events,
                Err(Errno::INTR) => continue,
                Err(errno) => return Err(errno.into()),
            };
            let named: Vec<_> = events.iter().map(|event| (event.data.u64(), event.flags)).collect();
            for events in named.chunks(READS) {
                self.read(events);
            }
            if named.is_empty() {
                self.read(&[]);
            }
        }
    }

    fn read(&self, events: &[(u64, epoll::EventFlags)]) {
        let mut work = Work::default();
        read(self.shared, events, &mut work, None);
        self.shared.lock().pump(self.shared, &mut work);
        self.shared.perform(work);
    }

    /// No handle is open: messages that wait come back as undone.
    fn refuse(&mut self, state: &mut State) {
        let now = self.shared.now();
        let id = *self.refuse.get_or_insert_with(|| state.mux.clone_worker(usize::MAX, now));
        while state.mux.poll_messages(id, now, &mut self.batch) > 0 {
            for message in self.batch.drain(..) {
                state.mux.give_up(id, message.ticket(), now);
            }
        }
    }
}
