//! The thread that has the connections of a server with sockets (KCM's work queue).
//!
//! What: it runs [`Shared::turn`] until the mux has drained. Messages go to sockets that wait for one, or
//! stay in the core. After the last socket was closed, it takes the messages that will not be read, so that
//! connections end when everything is sent.

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
            log::error!("the mux's thread ends, waiting for sockets failed: {error}");
            let mut work = Work::default();
            shared.lock().close_all(&mut work);
            shared.perform(work);
        }
    })?;
    Ok(())
}

struct Workqueue<'a> {
    shared: &'a Shared,
    /// Takes the messages that will not be read.
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

    /// No socket is open: returns waiting messages as undone.
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
