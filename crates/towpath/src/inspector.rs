//! Inspector processes of a replay: start, attachment and end.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use thiserror::Error;
use towpath_engine::queue::{Policy, RingChannel};
use towpath_port::MAX_FRAME;
use towpath_ring::{self as ring, Config, Endpoint};

use crate::process::socket_directory::{self, SocketDirectory};
use crate::process::{Child, Local, Place, Program, Starter};

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
    _directory: SocketDirectory,
}

/// The process of an inspector. Dropping it waits for its exit: the channel must be closed before.
#[derive(Debug)]
pub struct Process {
    child: Child,
    attached: bool,
}

impl Socket {
    /// Creates the socket of a queue in a directory with mode 0700.
    ///
    /// # Errors
    ///
    /// The directory or the socket cannot be created.
    pub fn bind(queue: u16, policy: &Policy) -> Result<Self, Error> {
        let system = |source| Error::System { queue, source };
        let directory = socket_directory::make(false).map_err(system)?;
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
    pub fn start(
        &mut self,
        words: &[String],
        stopped: &dyn Fn() -> bool,
    ) -> Result<(RingChannel, Process), Error> {
        let queue = self.queue;
        let first = &words[0];
        // Programs of a command that a user runs: with the user's environment, without privileges.
        let starter = Starter::Local(Local::interactive());
        let started = starter
            .start(&Place::Queue(queue), &Program::new(words), &self.path)
            .map_err(|source| Error::Start { queue, program: first.clone(), source })?;
        let mut process = Process { child: started.child, attached: false };
        let channel = self.attach(&mut process.child, first, stopped)?;
        process.attached = true;
        Ok((RingChannel::new(channel), process))
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

impl Drop for Process {
    fn drop(&mut self) {
        let Self { child, attached } = self;
        // An attached process sees the end of its socket. A process that never attached is killed at once.
        let patience = if *attached { EXIT_TIMEOUT } else { Duration::ZERO };
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
