//! The sockets where inspectors attach, and the inspector processes that the engine starts.

use std::fs::Permissions;
use std::io;
use std::os::fd::AsFd;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tempfile::TempDir;
use towpath_port::MAX_FRAME;
use towpath_ring::{Allow, Channel, Config, Endpoint, Quota};

use crate::config;
use crate::control::AcceptBackoff;
use crate::inspector::Error;

/// Restart delay of an inspector process: initial and maximum.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// A process that ran at least this long resets its restart delay.
const SETTLED: Duration = Duration::from_secs(60);

/// The attach socket of one queue.
pub(super) struct Socket {
    pub(super) queue: u16,
    path: PathBuf,
    endpoint: Endpoint,
    pause: AcceptBackoff,
    /// Limits for each user, and the number of engine threads.
    limits: Quota,
    threads: usize,
    children: Vec<InspectorChild>,
    /// Holds the socket if the configuration names no path.
    _directory: Option<TempDir>,
}

/// An inspector process that the engine keeps running.
struct InspectorChild {
    words: Vec<String>,
    process: Option<Child>,
    started: Instant,
    pause: Duration,
}

impl Socket {
    /// Creates the socket of a queue. Starts no process.
    pub(super) fn bind(queue: &config::Queue, threads: usize) -> Result<Self, Error> {
        let number = queue.number;
        let system = |source| Error::System { queue: number, source };
        let inspectors = &queue.inspectors;
        let (path, directory) = match &inspectors.socket {
            Some(path) => (path.clone(), None),
            None => {
                // tempfile creates the directory with mode 0700.
                let directory = tempfile::Builder::new().prefix("towpath-").tempdir().map_err(system)?;
                (directory.path().join(format!("queue-{number}.sock")), Some(directory))
            }
        };
        super::make_directory_of(&path);
        let limits = inspectors.limits(threads);
        let config = Config {
            allow: allow(&inspectors.users),
            lanes: threads as u32,
            deadline: Some(Duration::from_nanos(queue.policy.deadline)),
            // One invalid word marks a broken or hostile inspector: it is detached and its further words are ignored.
            violations_max: 0,
            // The largest frame of a port.
            replacement_max: MAX_FRAME as u32,
            quota: limits,
            ..Config::default()
        };
        let endpoint =
            Endpoint::bind(&path, config).map_err(|source| Error::Bind { queue: number, source })?;
        open(&path, inspectors).map_err(system)?;
        let children = wanted(inspectors).map(InspectorChild::new).collect();
        let pause = AcceptBackoff::of(format_args!("queue {number}"));
        Ok(Self { queue: number, path, endpoint, pause, limits, threads, children, _directory: directory })
    }

    /// Checks the inspectors of the configuration against the per-user limits, which are fixed at startup. Returns the reason if they
    /// do not fit.
    pub(super) fn lacks(&self, inspectors: &config::Inspectors) -> Option<String> {
        let (wanted, most) = (inspectors.wanted(), self.limits.channels_per_user);
        if wanted > most {
            return Some(format!("{wanted} inspectors are configured, but one user may attach {most}"));
        }
        let (wanted, most) = (inspectors.rings(self.threads), self.limits.bytes_per_user);
        (wanted > most).then(|| {
            let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
            format!(
                "its inspectors need {:.1} MiB, but one user may use {:.1} MiB (`memory`, or the default at startup)",
                mib(wanted),
                mib(most),
            )
        })
    }

    /// Replaces the wanted inspector processes and the allowed users. Processes that stay keep running; removed ones are stopped; new
    /// ones are started by [`Socket::look_after`].
    pub(super) fn want(&mut self, inspectors: &config::Inspectors) {
        self.endpoint.set_allow(allow(&inspectors.users));
        if let Err(error) = open(&self.path, inspectors) {
            log::warn!("queue {}: {}: {error}", self.queue, self.path.display());
        }
        let mut before = std::mem::take(&mut self.children);
        for words in wanted(inspectors) {
            let there = before.iter().position(|child| child.words == *words);
            self.children.push(there.map_or_else(|| InspectorChild::new(words), |at| before.swap_remove(at)));
        }
    }

    /// Starts every process for the first time.
    pub(super) fn start(&mut self) -> Result<usize, Error> {
        for inspector in &mut self.children {
            let program = inspector.words[0].clone();
            inspector.start(&self.path).map_err(|source| Error::Start {
                queue: self.queue,
                program,
                source,
            })?;
        }
        Ok(self.children.len())
    }

    /// Accepts one attached inspector.
    pub(super) fn accept(&mut self) -> Option<Channel> {
        if self.pause.is_on() {
            return None;
        }
        self.endpoint.accept().unwrap_or_else(|error| {
            self.pause.begin(&error);
            None
        })
    }

    /// Returns true while [`accept`](Self::accept) pauses after errors; polling the socket is useless meanwhile.
    pub(super) fn is_paused(&mut self) -> bool {
        self.pause.is_on()
    }

    /// Restarts processes that have ended, each after its delay. With `first`, an ended process is an error.
    pub(super) fn look_after(&mut self, first: bool) -> Result<(), Error> {
        for inspector in &mut self.children {
            let Some(child) = &mut inspector.process else {
                if inspector.started.elapsed() >= inspector.pause
                    && let Err(error) = inspector.start(&self.path)
                {
                    log::warn!("queue {}: cannot start `{}`: {error}", self.queue, inspector.words[0]);
                    inspector.wait_longer();
                }
                continue;
            };
            let Ok(Some(status)) = child.try_wait() else { continue };
            let program = inspector.words[0].clone();
            if first {
                return Err(Error::Ended { queue: self.queue, program, status });
            }
            if inspector.started.elapsed() >= SETTLED {
                inspector.pause = Duration::ZERO;
            }
            inspector.wait_longer();
            let seconds = inspector.pause.as_secs();
            log::warn!("queue {}: `{program}` ended ({status}); restart in {seconds} s", self.queue);
        }
        Ok(())
    }

    /// Waits up to `patience` for the processes to end, then kills them.
    pub(super) fn stop(mut self, patience: Duration) {
        let start = Instant::now();
        for inspector in &mut self.children {
            let Some(child) = &mut inspector.process else { continue };
            while start.elapsed() < patience && matches!(child.try_wait(), Ok(None)) {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.endpoint.as_fd()
    }
}

/// The users that may attach: the configured ones, root, and the engine's user.
fn allow(named: &config::Users) -> Allow {
    let mut users = vec![rustix::process::geteuid().as_raw(), 0];
    users.extend(&named.ids);
    users.sort_unstable();
    users.dedup();
    Allow::UsersAndGroups(users, named.groups.clone())
}

/// Access is checked with SO_PEERCRED; the file's mode only has to permit connecting.
fn open(path: &Path, inspectors: &config::Inspectors) -> io::Result<()> {
    let open = if inspectors.users.is_empty() { 0o600 } else { 0o666 };
    std::fs::set_permissions(path, Permissions::from_mode(inspectors.mode.unwrap_or(open)))
}

/// The command of each wanted process.
fn wanted(inspectors: &config::Inspectors) -> impl Iterator<Item = &[String]> {
    inspectors.commands.iter().flat_map(|words| std::iter::repeat_n(&words[..], inspectors.workers))
}

impl InspectorChild {
    fn new(words: &[String]) -> Self {
        Self { words: words.to_vec(), process: None, started: Instant::now(), pause: Duration::ZERO }
    }

    fn start(&mut self, socket: &std::path::Path) -> io::Result<()> {
        let (first, rest) = self.words.split_first().expect("a command has a first word");
        let program = match first.as_str() {
            "towpath" => std::env::current_exe()?,
            other => other.into(),
        };
        self.started = Instant::now();
        let child = Command::new(program)
            .args(rest)
            .env("TOWPATH_SOCKET", socket)
            .stdin(Stdio::null())
            .stdout(io::stderr())
            // SIGINT of a terminal is for the engine, which drains what inspectors hold.
            .process_group(0)
            .spawn()?;
        self.process = Some(child);
        Ok(())
    }

    fn wait_longer(&mut self) {
        self.process = None;
        self.started = Instant::now();
        self.pause = (self.pause * 2).clamp(PAUSES.0, PAUSES.1);
    }
}

impl Drop for InspectorChild {
    /// An inspector must not outlive the engine.
    fn drop(&mut self) {
        let Some(child) = &mut self.process else { return };
        let _ = child.kill();
        let _ = child.wait();
    }
}
