//! Inspectors that do not answer: from the engine threads to the supervisor.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use crate::eventfd::EventFd;

/// Bound of the channel. A report without room is lost, and the process stays.
const REPORTS: usize = 64;

/// The end of an engine thread.
#[derive(Clone, Debug)]
pub(super) struct StalledSender {
    reports: SyncSender<(u16, u32)>,
    bell: EventFd,
}

/// The supervisor's end. Its descriptor is readable while there are reports.
#[derive(Debug)]
pub(super) struct Stalled {
    reports: Receiver<(u16, u32)>,
    bell: EventFd,
}

/// Creates the channel.
pub(super) fn stalled() -> io::Result<(StalledSender, Stalled)> {
    let (sender, reports) = sync_channel(REPORTS);
    let bell = EventFd::new()?;
    Ok((StalledSender { reports: sender, bell: bell.clone() }, Stalled { reports, bell }))
}

impl StalledSender {
    /// Reports that the process of an inspector of a queue does not answer.
    pub(super) fn tell(&self, queue: u16, pid: u32) {
        if self.reports.try_send((queue, pid)).is_ok() {
            self.bell.signal();
        }
    }
}

impl Stalled {
    /// The reports since the last call: queues and process ids.
    pub(super) fn take(&self) -> Vec<(u16, u32)> {
        self.bell.clear();
        self.reports.try_iter().collect()
    }
}

impl AsFd for Stalled {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}
