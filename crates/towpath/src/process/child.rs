//! A started process.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::process::ExitStatus;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::starter::{Remote, RemoteWorker};

/// A process that a [`Starter`](super::Starter) started. Its descriptor becomes readable when it has ended.
#[derive(Debug)]
pub struct Child {
    id: u32,
    pidfd: OwnedFd,
    parent: Parent,
    status: Option<ExitStatus>,
}

#[derive(Debug)]
enum Parent {
    This(std::process::Child),
    Launcher(Arc<dyn Remote>),
    /// Another part of the program waits for it and ends it.
    Elsewhere,
}

impl Child {
    /// A child of this process.
    pub(crate) fn of_this(mut child: std::process::Child) -> io::Result<Self> {
        match pidfd_open(Pid::from_child(&child), PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { id: child.id(), pidfd, parent: Parent::This(child), status: None }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(error.into())
            }
        }
    }

    /// A child of the launcher.
    pub(crate) fn of_launcher(id: u32, pidfd: OwnedFd, launcher: Arc<dyn Remote>) -> Self {
        Self { id, pidfd, parent: Parent::Launcher(launcher), status: None }
    }

    /// A process that another part of this program waits for. This handle never ends it, and its exit status is 0.
    pub(crate) const fn watched(id: u32, pidfd: OwnedFd) -> Self {
        Self { id, pidfd, parent: Parent::Elsewhere, status: None }
    }

    /// Returns true if this handle ends the process and waits for it.
    pub(crate) const fn is_owned(&self) -> bool {
        !matches!(self.parent, Parent::Elsewhere)
    }

    /// Its process id.
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// Returns its exit status if it has ended. Never waits for the process.
    ///
    /// # Errors
    /// The system's error, or the launcher has ended.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        if self.status.is_none() && self.is_over() {
            self.status = match &mut self.parent {
                Parent::This(child) => child.try_wait()?,
                Parent::Launcher(launcher) => launcher.status(self.id)?,
                Parent::Elsewhere => Some(ExitStatus::default()),
            };
        }
        Ok(self.status)
    }

    /// Waits for the process to end.
    ///
    /// # Errors
    /// As [`try_wait`](Self::try_wait).
    pub fn wait(&mut self) -> io::Result<ExitStatus> {
        loop {
            if let Some(status) = self.try_wait()? {
                return Ok(status);
            }
            // EINTR: the next round waits.
            let _ = poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], None);
        }
    }

    /// Kills the process (SIGKILL). If the launcher has ended, this process does so itself, which it may if it is root.
    ///
    /// # Errors
    /// As [`try_wait`](Self::try_wait).
    pub fn kill(&mut self) -> io::Result<()> {
        if self.status.is_some() {
            return Ok(());
        }
        match &mut self.parent {
            Parent::This(child) => child.kill(),
            Parent::Launcher(launcher) => launcher
                .kill(self.id)
                .or_else(|error| pidfd_send_signal(&self.pidfd, Signal::KILL).map_err(|_| error)),
            Parent::Elsewhere => Ok(()),
        }
    }

    /// The worker on another machine behind it.
    pub(crate) fn remote_worker(&self) -> Option<RemoteWorker> {
        match &self.parent {
            Parent::Launcher(launcher) => launcher.remote_worker(self.id),
            Parent::This(_) | Parent::Elsewhere => None,
        }
    }

    /// Returns true if it has ended. Its exit status may be unknown.
    pub(crate) fn is_over(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.pidfd, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
    }
}

impl AsFd for Child {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}
