//! How a worker process ended.

use std::io;
use std::process::ExitStatus;

use thiserror::Error;
use towpath_ring as ring;

use super::ATTACH;
use crate::worker_pool::violation::Violation;

/// Why a worker process ended or could not be started.
#[derive(Debug, Error)]
pub enum WorkerExit {
    /// The socket could not be created.
    #[error("{0}")]
    Bind(#[from] ring::BindError),
    /// The program could not be started.
    #[error("cannot start `{program}`: {source}")]
    Start {
        /// First word of the command.
        program: String,
        /// The error.
        source: io::Error,
    },
    /// The program exited before it attached.
    #[error("`{program}` ended before it attached ({status}); run it alone to see why")]
    Early {
        /// First word of the command.
        program: String,
        /// Its exit status.
        status: ExitStatus,
    },
    /// The program did not attach in time.
    #[error(
        "`{program}` did not attach within {} s; a worker attaches to the socket that TOWPATH_SOCKET names \
         (towpath_ring::Worker::attach_env)",
        ATTACH.as_secs()
    )]
    Late {
        /// First word of the command.
        program: String,
    },
    /// It does not take messages in parts.
    #[error(
        "process {pid} does not take messages in parts, and the framing has body=stream; attach it with Options::parts \
         (C: TOWPATH_PARTS, Python: parts=True)"
    )]
    Whole {
        /// Its process id.
        pid: u32,
    },
    /// It exited or was killed after it had attached.
    #[error("process {pid}: {why}")]
    Gone {
        /// Its process id.
        pid: u32,
        /// How it ended.
        why: String,
    },
    /// A worker on another machine has ended, or was not heard any more.
    #[error("{name}: {why}")]
    Remote {
        /// Worker and host.
        name: String,
        /// How it ended.
        why: String,
    },
    /// It exceeded its authority.
    #[error("process {pid}: detached: {why}")]
    Violation {
        /// Its process id.
        pid: u32,
        /// The violation.
        why: Violation,
    },
    /// A system call failed.
    #[error("{0}")]
    System(#[from] io::Error),
}
