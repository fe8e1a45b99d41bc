//! Inspector processes: start, attachment, and the [`Channel`] of the engine over a ring.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use thiserror::Error;
use towpath_port::MAX_FRAME;
use towpath_ring::{
    self as ring, Cause, Config, Death, Decision, Endpoint, FrameOut, Loss, Meta, ReserveError, Seq, Verdict,
};

use crate::process::{Child, Local, Place, Program, Starter};
use towpath_engine::DropReason;
use towpath_engine::queue::{About, Channel, Detached, Policy};

/// Time within which a process must attach.
pub const ATTACH_TIMEOUT: Duration = Duration::from_secs(15);

/// Time within which a process must exit after its channel is closed, before it is killed.
pub const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// Interval between two checks of a process that is waited for.
const LOOK: Duration = Duration::from_millis(10);

/// An error that prevents the start of an inspector.
#[derive(Debug, Error)]
pub enum Error {
    /// The socket cannot be created.
    #[error("queue {queue}: {source}")]
    Bind {
        /// The queue.
        queue: u16,
        /// The ring's error.
        source: ring::BindError,
    },
    /// The program cannot be started.
    #[error("queue {queue}: cannot start `{program}`: {source}")]
    Start {
        /// The queue.
        queue: u16,
        /// First word of the command.
        program: String,
        /// The system's error.
        source: io::Error,
    },
    /// The program exited before it attached.
    #[error("queue {queue}: `{program}` ended before it attached ({status})")]
    Ended {
        /// The queue.
        queue: u16,
        /// First word of the command.
        program: String,
        /// Its exit status.
        status: ExitStatus,
    },
    /// The program did not attach in time.
    #[error(
        "queue {queue}: `{program}` did not attach within {} s; an inspector attaches to the socket that \
         TOWPATH_SOCKET names",
        ATTACH_TIMEOUT.as_secs()
    )]
    Late {
        /// The queue.
        queue: u16,
        /// First word of the command.
        program: String,
    },
    /// The start was stopped while the program had not attached.
    #[error("queue {queue}: `{program}` had not attached when it was ended")]
    Stopped {
        /// The queue.
        queue: u16,
        /// First word of the command.
        program: String,
    },
    /// A system call failed during the start.
    #[error("queue {queue}: {source}")]
    System {
        /// The queue.
        queue: u16,
        /// The system's error.
        source: io::Error,
    },
}

/// The socket to which the inspectors of a queue attach. It is needed only for the start.
#[derive(Debug)]
pub struct Socket {
    queue: u16,
    path: PathBuf,
    endpoint: Endpoint,
    /// The directory of the socket, removed on drop.
    _directory: TempDir,
}

/// An inspector of a queue. Dropping it closes the channel and waits for the process to exit.
#[derive(Debug)]
pub struct Inspector {
    /// `None` after the end.
    channel: Option<ring::Channel>,
    /// The process, if [`Socket::start`] started it.
    child: Option<Child>,
    attached: bool,
    /// The channel has ended and every frame was returned.
    drained: bool,
    /// The last snapshot of a channel that has ended.
    last: Option<About>,
}

impl Socket {
    /// Creates the socket of a queue in a directory with mode 0700.
    ///
    /// # Errors
    ///
    /// The directory or the socket cannot be created.
    pub fn bind(queue: u16, policy: &Policy) -> Result<Self, Error> {
        let system = |source| Error::System { queue, source };
        // tempdir gives it mode 0700.
        let directory = tempfile::Builder::new().prefix("towpath-").tempdir().map_err(system)?;
        let path = directory.path().join(format!("queue-{queue}.sock"));
        let config = Config {
            deadline: Some(Duration::from_nanos(policy.deadline)),
            // An inspector that writes one invalid word is broken or hostile: it is detached.
            violations_max: 0,
            // The longest frame of a port.
            replacement_max: MAX_FRAME as u32,
            ..Config::default()
        };
        let endpoint = Endpoint::bind(&path, config).map_err(|source| Error::Bind { queue, source })?;
        Ok(Self { queue, path, endpoint, _directory: directory })
    }

    /// Starts the command `words` with the socket's path in `TOWPATH_SOCKET`, and waits until it has attached or `stopped`
    /// returns true.
    ///
    /// The first word `towpath` stands for this executable. The process has no standard input, writes its standard output to
    /// our standard error, and leads a new process group.
    ///
    /// # Errors
    ///
    /// The process did not start or attach. It was killed.
    pub fn start(&mut self, words: &[String], stopped: &dyn Fn() -> bool) -> Result<Inspector, Error> {
        let queue = self.queue;
        let first = &words[0];
        // Programs of a command that a user runs: with the user's environment, without privileges.
        let starter = Starter::Local(Local::interactive());
        let started = starter
            .start(&Place::Queue(queue), &Program::new(words), &self.path)
            .map_err(|source| Error::Start { queue, program: first.clone(), source })?;
        let child = started.child;
        let mut inspector =
            Inspector { channel: None, child: Some(child), attached: false, drained: false, last: None };
        if let Some(child) = &mut inspector.child {
            inspector.channel = Some(self.attach(child, first, stopped)?);
        }
        inspector.attached = true;
        Ok(inspector)
    }

    fn attach(
        &mut self,
        child: &mut Child,
        program: &str,
        stopped: &dyn Fn() -> bool,
    ) -> Result<ring::Channel, Error> {
        let queue = self.queue;
        let system = |source| Error::System { queue, source };
        let start = Instant::now();
        while start.elapsed() < ATTACH_TIMEOUT {
            if let Some(channel) = self.endpoint.accept().map_err(system)? {
                return Ok(channel);
            }
            if let Some(status) = child.try_wait().map_err(system)? {
                return Err(Error::Ended { queue, program: program.to_owned(), status });
            }
            if stopped() {
                return Err(Error::Stopped { queue, program: program.to_owned() });
            }
            self.endpoint.wait(Some(LOOK)).map_err(system)?;
        }
        Err(Error::Late { queue, program: program.to_owned() })
    }
}

impl Inspector {
    /// An inspector that attached by itself.
    pub fn attached(channel: ring::Channel) -> Self {
        Self { channel: Some(channel), child: None, attached: true, drained: false, last: None }
    }
}

impl Channel for Inspector {
    fn publish(&mut self, frame: &[u8], meta: &Meta) -> Result<Seq, ReserveError> {
        self.channel.as_mut().ok_or(ReserveError::Disconnected)?.send(frame, meta)
    }

    fn lose(&mut self, loss: Loss) {
        if let Some(channel) = &mut self.channel {
            channel.lose(loss);
        }
    }

    fn kick(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.kick();
        }
    }

    fn poll(&mut self, now: u64, each: &mut dyn FnMut(Seq, Result<Decision<'_>, DropReason>)) -> usize {
        let Some(channel) = &mut self.channel else { return 0 };
        let was_over = channel.is_dead();
        let mut decided = channel.poll_verdicts(now, |seq, decision| each(seq, checked(decision)));
        let Some(death) = channel.death() else { return decided };
        // The verdicts that a dead inspector left count, in the same portions as those of a live one. A poll that finds none is the last.
        // After a protocol violation, no verdict counts.
        if death == Death::Violations || was_over && decided == 0 {
            channel.drain_held(|seq| {
                decided += 1;
                each(seq, Err(DropReason::InspectorDied));
            });
            self.drained = true;
        }
        decided
    }

    fn wait(&mut self, now: u64, until: u64) {
        let Some(channel) = &mut self.channel else { return };
        let until = channel.deadline().map_or(until, |deadline| deadline.min(until));
        let timeout = (until != u64::MAX).then(|| Duration::from_nanos(until.saturating_sub(now)));
        // poll(2) with valid descriptors does not fail, and the caller polls again in any case.
        let _ = channel.wait(timeout);
    }

    fn arm(&mut self) -> bool {
        self.channel.as_mut().is_none_or(ring::Channel::arm)
    }

    fn disarm(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.disarm();
            channel.check_peer();
        }
    }

    fn shares_cpu(&self) -> bool {
        self.channel.as_ref().is_some_and(ring::Channel::shares_cpu)
    }

    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.channel.as_ref().map(AsFd::as_fd)
    }

    fn deadline(&self) -> Option<u64> {
        self.channel.as_ref()?.deadline()
    }

    fn unreturned(&self) -> u32 {
        let Some(channel) = &self.channel else { return 0 };
        let stats = channel.stats();
        u32::try_from(stats.overdue.saturating_sub(stats.late)).unwrap_or(u32::MAX)
    }

    fn is_dead(&self) -> bool {
        self.channel.as_ref().is_none_or(ring::Channel::is_dead)
    }

    fn about(&self) -> Option<About> {
        let Some(channel) = &self.channel else { return self.last.clone() };
        Some(About {
            peer: channel.peer(),
            name: channel.name().to_owned(),
            geometry: channel.geometry(),
            stats: channel.stats(),
        })
    }

    fn frames(&self) -> Vec<FrameOut> {
        self.channel.as_ref().map_or(Vec::new(), |channel| channel.frames().collect())
    }

    fn detached(&mut self) -> Option<Detached> {
        let channel = self.channel.as_ref().filter(|_| self.drained)?;
        let death = channel.death()?;
        let distrusted = death == Death::Violations;
        let why = match channel.stats().violations {
            n if distrusted => format!("the inspector was detached: it wrote {n} invalid words"),
            _ => format!("the inspector is gone: {death}"),
        };
        self.last = self.about();
        // Releases the memory. The process is waited for on drop, not by the engine.
        self.channel = None;
        Some(Detached { why, distrusted })
    }
}

impl Drop for Inspector {
    fn drop(&mut self) {
        self.channel = None;
        let Some(child) = &mut self.child else { return };
        // An attached process sees the end of its socket. A process that never attached is killed at once.
        let patience = if self.attached { EXIT_TIMEOUT } else { Duration::ZERO };
        let start = Instant::now();
        while start.elapsed() < patience {
            match child.try_wait() {
                Ok(Some(_)) | Err(_) => return,
                Ok(None) => std::thread::sleep(LOOK),
            }
        }
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// The decision, if the inspector made one that the engine can execute.
fn checked(decision: Decision<'_>) -> Result<Decision<'_>, DropReason> {
    match (decision.cause, decision.verdict) {
        (Cause::Overdue, _) => Err(DropReason::Overdue),
        (Cause::Invalid, _) => Err(DropReason::InvalidVerdict),
        // Longer than any port can send.
        (_, Verdict::Replace(bytes)) if bytes.len() > MAX_FRAME => Err(DropReason::InvalidVerdict),
        (Cause::Single | Cause::Cumulative, _) => Ok(decision),
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use towpath_ring::{Consumer, Geometry};

    use super::*;

    /// The verdicts of a dead inspector are polled in portions, like those of a live one.
    #[test]
    fn verdicts_of_a_dead_inspector_are_polled_in_portions() {
        const FRAMES: usize = 1000;
        const LONG: usize = 16 << 10;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let tx = Geometry::with(16 << 20, LONG as u32).unwrap();
        let mut endpoint = Endpoint::bind(&path, Config { tx, deadline: None, ..Config::default() }).unwrap();
        let client = thread::spawn(move || {
            let mut queue = Consumer::attach(&path).unwrap();
            for _ in 0..FRAMES {
                let frame = queue.recv().unwrap().unwrap();
                queue.replace(frame, &[7; LONG]).unwrap();
            }
        });
        let channel = loop {
            match endpoint.accept().unwrap() {
                Some(channel) => break channel,
                None => endpoint.wait(None).unwrap(),
            }
        };
        let mut inspector = Inspector::attached(channel);
        for _ in 0..FRAMES {
            inspector.publish(b"frame", &Meta::default()).unwrap();
        }
        inspector.kick();
        client.join().unwrap();

        let (mut all, mut most) = (0, 0);
        // Seconds apart, so that each poll checks whether the client is alive.
        for now in (1..100).map(|second| second * 1_000_000_000) {
            let mut replaced = 0;
            inspector.poll(now, &mut |_, decision| match decision {
                Ok(Decision { verdict: Verdict::Replace(bytes), .. }) if bytes.len() == LONG => {
                    replaced += 1;
                }
                other => panic!("{other:?}"),
            });
            (all, most) = (all + replaced, most.max(replaced));
            if let Some(gone) = inspector.detached() {
                assert!(!gone.distrusted, "{gone:?}");
                assert_eq!(all, FRAMES);
                assert!(most < FRAMES / 3, "{most} in one poll");
                return;
            }
        }
        panic!("the inspector is still attached, with {all} verdicts");
    }
}
