//! An inspector process: started, attached, and at the other end of a ring.

use std::io;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use thiserror::Error;
use towpath_port::MAX_FRAME;
use towpath_ring::{
    self as ring, Cause, Config, Death, Decision, Endpoint, Flags, Full, Kind, Layers, Meta, Seq, Verdict,
};

use crate::queue::{Answer, Channel, Label, Policy, Reply};

/// How long a process has to attach.
pub const ATTACH_TIMEOUT: Duration = Duration::from_secs(5);

/// How long a process has to end once its channel is closed, before it is killed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(2);

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
    /// A system call failed while the program was waited for.
    #[error("queue {queue}: {source}")]
    System {
        /// The queue.
        queue: u16,
        /// What the system said.
        source: io::Error,
    },
}

/// A process on a queue. Dropping it closes the channel and waits for the process to end.
#[derive(Debug)]
pub struct Inspector {
    /// `None` once closed.
    channel: Option<ring::Channel>,
    queue: u16,
    child: Child,
    /// Holds the socket; removed with it.
    _directory: TempDir,
}

impl Inspector {
    /// Starts `words` as a process, with the socket's path in `TOWPATH_SOCKET`, and waits until it has attached.
    ///
    /// The first word `towpath` means this very program. The process has no standard input, and its standard output
    /// goes to our standard error.
    ///
    /// # Errors
    /// Why there is no inspector; the process has been ended.
    pub fn start(queue: u16, words: &[String], policy: Policy) -> Result<Self, Error> {
        let system = |source| Error::System { queue, source };
        // Only this user can even reach the socket: the directory has mode 0700.
        let directory = tempfile::Builder::new().prefix("towpath-").tempdir().map_err(system)?;
        let path = directory.path().join(format!("queue-{queue}.sock"));
        let config = Config {
            deadline: Some(Duration::from_nanos(policy.deadline)),
            // One meaningless word is a broken or hostile inspector: it is detached, nothing more of it counts.
            violations_max: 0,
            ..Config::default()
        };
        let mut endpoint = Endpoint::bind(&path, config).map_err(|source| Error::Bind { queue, source })?;

        let (first, rest) = words.split_first().expect("a command has a first word");
        let program = match first.as_str() {
            "towpath" => std::env::current_exe().map_err(system)?,
            other => other.into(),
        };
        let child = Command::new(program)
            .args(rest)
            .env("TOWPATH_SOCKET", &path)
            .stdin(Stdio::null())
            .stdout(io::stderr())
            .spawn()
            .map_err(|source| Error::Start { queue, program: first.clone(), source })?;
        let mut inspector = Self { channel: None, queue, child, _directory: directory };
        inspector.channel = Some(inspector.attach(&mut endpoint, first)?);
        Ok(inspector)
    }

    fn attach(&mut self, endpoint: &mut Endpoint, program: &str) -> Result<ring::Channel, Error> {
        let queue = self.queue;
        let system = |source| Error::System { queue, source };
        let start = Instant::now();
        while start.elapsed() < ATTACH_TIMEOUT {
            if let Some(channel) = endpoint.accept().map_err(system)? {
                return Ok(channel);
            }
            if let Some(status) = self.child.try_wait().map_err(system)? {
                return Err(Error::Ended { queue, program: program.to_owned(), status });
            }
            endpoint.wait(Some(LOOK)).map_err(system)?;
        }
        Err(Error::Late { queue, program: program.to_owned() })
    }
}

impl Channel for Inspector {
    fn publish(&mut self, frame: &[u8], label: &Label) -> Option<u32> {
        let channel = self.channel.as_mut()?;
        let meta = Meta {
            kind: Kind::PACKET,
            wire_len: label.wire_len,
            time: label.time,
            mark: label.mark,
            port: label.port.into(),
            group: self.queue.into(),
            layers: Layers { link: label.link, network: label.network, payload: label.payload },
            ..Meta::default()
        };
        match channel.send(frame, &meta) {
            Ok(Seq(sequence)) => Some(sequence),
            Err(Full::TooLarge | Full::Lent | Full::Held | Full::Dead) => None,
        }
    }

    fn kick(&mut self) {
        if let Some(channel) = &mut self.channel {
            channel.kick();
        }
    }

    fn poll(&mut self, now: u64, each: &mut dyn FnMut(u32, Option<Reply<'_>>)) -> usize {
        let Some(channel) = &mut self.channel else { return 0 };
        let mut decided =
            channel.poll_verdicts(now, |Seq(sequence), decision| each(sequence, reply(decision)));
        let Some(death) = channel.death() else { return decided };
        if death != Death::Violations {
            // What it decided before it went counts. Of one that broke the protocol nothing more does.
            decided += channel.poll_verdicts(now, |Seq(sequence), decision| each(sequence, reply(decision)));
        }
        channel.drain_held(|Seq(sequence)| {
            decided += 1;
            each(sequence, None);
        });
        decided
    }

    fn wait(&mut self, now: u64, until: u64) {
        let Some(channel) = &mut self.channel else { return };
        let until = channel.deadline().map_or(until, |deadline| deadline.min(until));
        let timeout = (until != u64::MAX).then(|| Duration::from_nanos(until.saturating_sub(now)));
        // An error here would be one of poll(2) with valid descriptors; the caller looks again in any case.
        let _ = channel.wait(timeout);
    }

    fn gone(&mut self) -> Option<String> {
        let channel = self.channel.as_ref()?;
        let death = channel.death()?;
        let violations = channel.stats().violations;
        Some(match violations {
            0 => format!("the inspector is gone: {death}"),
            n => format!("the inspector was detached: it wrote {n} words that have no meaning"),
        })
    }
}

impl Drop for Inspector {
    fn drop(&mut self) {
        // The end of its socket tells it to go; one that never attached has not been told anything.
        let patience = if self.channel.take().is_some() { EXIT_TIMEOUT } else { Duration::ZERO };
        let start = Instant::now();
        while start.elapsed() < patience {
            match self.child.try_wait() {
                Ok(Some(_)) | Err(_) => return,
                Ok(None) => std::thread::sleep(LOOK),
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The inspector's answer, unless the default verdict has to stand in for it.
fn reply(decision: Decision<'_>) -> Option<Reply<'_>> {
    if matches!(decision.cause, Cause::Overdue | Cause::Garbage) {
        return None;
    }
    let answer = match (decision.verdict, decision.replacement) {
        (Verdict::Pass, _) => Answer::Pass,
        (Verdict::Drop | Verdict::Hold, _) => Answer::Drop,
        (Verdict::Reject, _) => Answer::Reject,
        (Verdict::Queue(number), _) => Answer::Queue(number),
        (Verdict::Repeat, _) => Answer::Repeat,
        (Verdict::Replace(_), Some(bytes)) if bytes.len() <= MAX_FRAME => Answer::Replace(bytes),
        // No packet: nothing that a port could send.
        (Verdict::Replace(_), _) => return None,
    };
    let mark = if decision.flags.has(Flags::MARK) { (decision.mark, decision.mask) } else { (0, 0) };
    Some(Reply { answer, mark })
}
