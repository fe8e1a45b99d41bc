//! The thread that has the sockets of a mux with handles (KCM's work queue): bytes come and go while nobody calls.
//!
//! What: it waits for sockets, reads them, writes what they did not take at once, and does what is due. Messages go to handles that
//! wait for one, or stay in the core. It ends when the mux has drained.
//!
//! When the last handle is closed, it takes what nobody will read, so that connections end when what is to be sent has left.

use std::io;
use std::sync::Arc;

use super::super::Shared;
use super::super::state::{State, Work};
use super::super::turn::Turn;
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
        let shared = self.shared;
        loop {
            let refuse = |state: &mut State| {
                if state.mode.is_unused() {
                    self.refuse(state);
                }
            };
            if shared.turn(Work::default(), None, refuse, |_| {})? == Turn::Closed {
                return Ok(());
            }
        }
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
