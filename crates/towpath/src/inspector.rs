//! An inspector process: started, attached, and at the other end of a ring.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use thiserror::Error;
use towpath_port::MAX_FRAME;
use towpath_ring::{
    self as ring, Cause, Config, Death, Decision, Endpoint, FrameOut, Loss, Meta, ReserveError, Seq, Verdict,
};

use towpath_engine::DropReason;
use towpath_engine::queue::{About, Channel, Detached, Policy};

/// How long a process has to attach.
pub const ATTACH_TIMEOUT: Duration = Duration::from_secs(15);

/// How long a process has to end once its channel is closed, before it is killed.
pub const EXIT_TIMEOUT: Duration = Duration::from_secs(5);

/// How often a process is looked at while it is waited for.
const LOOK: Duration = Duration::from_millis(10);

/// Why there is no inspector.
#[derive(Debug, Error)]
pub enum Error {
    /// The socket could not be made.
    #[error("queue {queue}: {source}")]
    Bind {
        /// The queue.
        queue: u16,
        /// What the ring said.
        source: ring::BindError,
    },
    /// The program could not be started.
    #[error("queue {queue}: cannot start `{program}`: {source}")]
    Start {
        /// The queue.
        queue: u16,
        /// First word of the command.
        program: String,
        /// What the system said.
        source: io::Error,
    },
    /// The program ended before it attached.
    #[error("queue {queue}: `{program}` ended before it attached ({status})")]
    Ended {
        /// The queue.
        queue: u16,
        /// First word of the command.
        program: String,
        /// How it ended.
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
    /// Nobody waited for the program any more.
    #[error("queue {queue}: `{program}` had not attached when it was ended")]
    Stopped {
        /// The queue.
        queue: u16,
        /// First word of the command.
        program: String,
    },
    /// A system call failed while the program was waited for.
    #[error("queue {queue}: {source}")]
    System {
        /// The queue.
        queue: u16,
        /// What the system said.
        source: io::Error,
    },
}

/// Where a queue's inspectors attach. Needed only to start them.
#[derive(Debug)]
pub struct Socket {
    queue: u16,
    path: PathBuf,
    endpoint: Endpoint,
    /// Holds the socket; removed with it.
    _directory: TempDir,
}

/// A process on a queue. Dropping it closes the channel and waits for the process to end.
#[derive(Debug)]
pub struct Inspector {
    /// `None` once closed.
    channel: Option<ring::Channel>,
    /// The process, when we started it.
    child: Option<Child>,
    attached: bool,
    /// Its channel has ended, and every frame that it had has come back.
    drained: bool,
    /// What is left of a channel that is gone.
    last: Option<About>,
}

impl Socket {
    /// Makes the socket of a queue, in a directory that only this user can reach.
    ///
    /// # Errors
    /// It could not be made.
    pub fn bind(queue: u16, policy: Policy) -> Result<Self, Error> {
        let system = |source| Error::System { queue, source };
        // tempdir gives it mode 0700.
        let directory = tempfile::Builder::new().prefix("towpath-").tempdir().map_err(system)?;
        let path = directory.path().join(format!("queue-{queue}.sock"));
        let config = Config {
            deadline: Some(Duration::from_nanos(policy.deadline)),
            // One meaningless word is a broken or hostile inspector: it is detached, nothing more of it counts.
            violations_max: 0,
            // What a port can carry.
            replacement_max: MAX_FRAME as u32,
            ..Config::default()
        };
        let endpoint = Endpoint::bind(&path, config).map_err(|source| Error::Bind { queue, source })?;
        Ok(Self { queue, path, endpoint, _directory: directory })
    }

    /// Starts `words` as a process, with the socket's path in `TOWPATH_SOCKET`, and waits until it has attached, or until
    /// `stopped` says so.
    ///
    /// The first word `towpath` means this very program. The process has no standard input, its standard output
    /// goes to our standard error, and it is the first of a process group of its own.
    ///
    /// # Errors
    /// Why there is no inspector; the process has been ended.
    pub fn start(&mut self, words: &[String], stopped: &dyn Fn() -> bool) -> Result<Inspector, Error> {
        let queue = self.queue;
        let (first, rest) = words.split_first().expect("a command has a first word");
        let program = match first.as_str() {
            "towpath" => std::env::current_exe().map_err(|source| Error::System { queue, source })?,
            other => other.into(),
        };
        let child = Command::new(program)
            .args(rest)
            .env("TOWPATH_SOCKET", &self.path)
            .stdin(Stdio::null())
            .stdout(io::stderr())
            // A terminal's interrupt is for the engine, which ends it when it is no longer needed.
            .process_group(0)
            .spawn()
            .map_err(|source| Error::Start { queue, program: first.clone(), source })?;
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
    /// A process that has attached by itself.
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
        // An error here would be one of poll(2) with valid descriptors; the caller looks again in any case.
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
            n if distrusted => format!("the inspector was detached: it wrote {n} words that have no meaning"),
            _ => format!("the inspector is gone: {death}"),
        };
        self.last = self.about();
        // Its memory is given back now; the process is waited for when the run is over, not by the engine.
        self.channel = None;
        Some(Detached { why, distrusted })
    }
}

impl Drop for Inspector {
    fn drop(&mut self) {
        self.channel = None;
        let Some(child) = &mut self.child else { return };
        // The end of its socket tells it to go; one that never attached has not been told anything.
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

    /// Packets wait no longer for what an inspector has left than for what one says.
    #[test]
    fn the_dead_have_their_turns_as_the_living() {
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
        // Seconds apart: each time it is asked whether the client is there.
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
                assert!(most < FRAMES / 3, "{most} in one turn");
                return;
            }
        }
        panic!("it is there for ever, with {all} decided");
    }
}
