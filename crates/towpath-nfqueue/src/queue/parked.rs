//! Queues that the program has destroyed.

use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use super::State;
use crate::lock;

/// A queue that the program has destroyed, and that it may create again.
pub(super) struct Parked {
    /// The program's number.
    pub(super) number: u16,
    pub(super) path: PathBuf,
    pub(super) socket: usize,
    pub(super) since: Instant,
    pub(super) state: State,
}

/// How long a destroyed queue stays attached.
const LINGER: Duration = Duration::from_millis(200);

/// The queues, and whether the thread that ends them runs.
static PARKED: Mutex<(Vec<Parked>, bool)> = Mutex::new((Vec::new(), false));

/// The last queue at `path`.
pub(super) fn take(path: &Path) -> Option<Parked> {
    let parked = &mut lock(&PARKED).0;
    let at = parked.iter().rposition(|parked| parked.path == path)?;
    Some(parked.swap_remove(at))
}

/// The program read the message of the packet `id` after it had destroyed queue `number` of `socket`: the message is lost.
pub(crate) fn missed(socket: usize, number: u16, id: u32) {
    let mut parked = lock(&PARKED);
    let of_socket = |parked: &&mut Parked| parked.socket == socket && parked.number == number;
    for Parked { state, .. } in parked.0.iter_mut().filter(of_socket) {
        state.handles(id);
    }
}

/// Keeps a queue for [`LINGER`].
pub(super) fn put(queue: Parked) {
    let mut parked = lock(&PARKED);
    parked.0.push(queue);
    if !parked.1 {
        // Without a thread, the queue ends now.
        parked.1 = crate::pump::spawn(end).is_ok();
    }
    if !parked.1 {
        parked.0.clear();
    }
}

/// Ends queues in time.
fn end() {
    loop {
        std::thread::sleep(LINGER / 4);
        let mut parked = lock(&PARKED);
        let ended: Vec<_> = parked.0.extract_if(.., |parked| parked.since.elapsed() >= LINGER).collect();
        parked.1 = !parked.0.is_empty();
        let ends = !parked.1;
        drop(parked);
        ended.into_iter().for_each(|mut parked| parked.state.detach());
        if ends {
            return;
        }
    }
}
