//! Where inspectors attach, and the processes that the engine starts itself.

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
use towpath_ring::{Allow, Channel, Config, Endpoint, Limits};

use crate::config;
use crate::control::AcceptBackoff;
use crate::inspector::Error;

/// How long a process that ended waits before it is started again: at first, and at most.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// A process that has run for so long did not end because of how it was started.
const SETTLED: Duration = Duration::from_secs(60);

/// The socket of one queue.
pub(super) struct Socket {
    pub(super) queue: u16,
    path: PathBuf,
    endpoint: Endpoint,
    pause: AcceptBackoff,
    /// What each user may have there; for how many threads it is.
    limits: Limits,
    threads: usize,
    kids: Vec<InspectorChild>,
    /// Holds the socket when the configuration names none.
    _directory: Option<TempDir>,
}

/// A process that the engine keeps running.
struct InspectorChild {
    words: Vec<String>,
    child: Option<Child>,
    started: Instant,
    pause: Duration,
}

impl Socket {
    /// Makes the socket of a queue. No process is started yet.
    pub(super) fn bind(queue: &config::Queue, threads: usize) -> Result<Self, Error> {
        let number = queue.number;
        let system = |source| Error::System { queue: number, source };
        let inspectors = &queue.inspectors;
        let (path, directory) = match &inspectors.socket {
            Some(path) => (path.clone(), None),
            None => {
                // tempdir gives it mode 0700.
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
            // One meaningless word is a broken or hostile inspector: it is detached, nothing more of it counts.
            violations_max: 0,
            // What a port can carry.
            replacement_max: MAX_FRAME as u32,
            limits,
            ..Config::default()
        };
        let endpoint =
            Endpoint::bind(&path, config).map_err(|source| Error::Bind { queue: number, source })?;
        open(&path, inspectors).map_err(system)?;
        let kids = wanted(inspectors).map(InspectorChild::new).collect();
        let pause = AcceptBackoff::of(format_args!("queue {number}"));
        Ok(Self { queue: number, path, endpoint, pause, limits, threads, kids, _directory: directory })
    }

    /// What these want beyond what each user may have, which is said once: when the engine starts.
    pub(super) fn lacks(&self, inspectors: &config::Inspectors) -> Option<String> {
        let (wanted, most) = (inspectors.wanted(), self.limits.channels_per_user);
        if wanted > most {
            return Some(format!("{wanted} inspectors are to be started, and one user may have {most}"));
        }
        let (wanted, most) = (inspectors.rings(self.threads), self.limits.bytes_per_user);
        (wanted > most).then(|| {
            let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
            format!(
                "its inspectors take {:.1} MiB, and one user may have {:.1} (`memory`, or as much as there was without it at the start)",
                mib(wanted),
                mib(most),
            )
        })
    }

    /// Has these processes from now on: those that are there already go on, the others are ended, or started by
    /// [`Socket::look_after`]. Whom it lets in from now on is said there, too.
    pub(super) fn want(&mut self, inspectors: &config::Inspectors) {
        self.endpoint.set_allow(allow(&inspectors.users));
        if let Err(error) = open(&self.path, inspectors) {
            log::warn!("queue {}: {}: {error}", self.queue, self.path.display());
        }
        let mut before = std::mem::take(&mut self.kids);
        for words in wanted(inspectors) {
            let there = before.iter().position(|kid| kid.words == *words);
            self.kids.push(there.map_or_else(|| InspectorChild::new(words), |at| before.swap_remove(at)));
        }
    }

    /// Starts every process for the first time.
    pub(super) fn start(&mut self) -> Result<usize, Error> {
        for kid in &mut self.kids {
            let program = kid.words[0].clone();
            kid.start(&self.path).map_err(|source| Error::Start { queue: self.queue, program, source })?;
        }
        Ok(self.kids.len())
    }

    /// Who has attached by now.
    pub(super) fn accept(&mut self) -> Option<Channel> {
        if self.pause.is_on() {
            return None;
        }
        self.endpoint.accept().unwrap_or_else(|error| {
            self.pause.begin(&error);
            None
        })
    }

    /// Whether [`accept`](Self::accept) takes nobody for a while, so that there is no use in waiting for who comes.
    pub(super) fn is_paused(&mut self) -> bool {
        self.pause.is_on()
    }

    /// Starts processes again that have ended, each after its pause. With `first`, one that has ended is an error.
    pub(super) fn look_after(&mut self, first: bool) -> Result<(), Error> {
        for kid in &mut self.kids {
            let Some(child) = &mut kid.child else {
                if kid.started.elapsed() >= kid.pause
                    && let Err(error) = kid.start(&self.path)
                {
                    log::warn!("queue {}: cannot start `{}`: {error}", self.queue, kid.words[0]);
                    kid.wait_longer();
                }
                continue;
            };
            let Ok(Some(status)) = child.try_wait() else { continue };
            let program = kid.words[0].clone();
            if first {
                return Err(Error::Ended { queue: self.queue, program, status });
            }
            if kid.started.elapsed() >= SETTLED {
                kid.pause = Duration::ZERO;
            }
            kid.wait_longer();
            let seconds = kid.pause.as_secs();
            log::warn!(
                "queue {}: `{program}` has ended ({status}); it is started again in {seconds} s",
                self.queue
            );
        }
        Ok(())
    }

    /// Gives the processes so long to end, then ends them.
    pub(super) fn stop(mut self, patience: Duration) {
        let start = Instant::now();
        for kid in &mut self.kids {
            let Some(child) = &mut kid.child else { continue };
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

/// Who may attach: those who are named, root and the engine's user.
fn allow(named: &config::Users) -> Allow {
    let mut users = vec![rustix::process::geteuid().as_raw(), 0];
    users.extend(&named.ids);
    users.sort_unstable();
    users.dedup();
    Allow::UsersAndGroups(users, named.groups.clone())
}

/// Who may attach is asked of the kernel; the file only has to let them try.
fn open(path: &Path, inspectors: &config::Inspectors) -> io::Result<()> {
    let open = if inspectors.users.is_empty() { 0o600 } else { 0o666 };
    std::fs::set_permissions(path, Permissions::from_mode(inspectors.mode.unwrap_or(open)))
}

/// The command of each process that there shall be.
fn wanted(inspectors: &config::Inspectors) -> impl Iterator<Item = &[String]> {
    inspectors.commands.iter().flat_map(|words| std::iter::repeat_n(&words[..], inspectors.workers))
}

impl InspectorChild {
    fn new(words: &[String]) -> Self {
        Self { words: words.to_vec(), child: None, started: Instant::now(), pause: Duration::ZERO }
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
            // A terminal's interrupt is for the engine, whose drain waits for what inspectors have.
            .process_group(0)
            .spawn()?;
        self.child = Some(child);
        Ok(())
    }

    fn wait_longer(&mut self) {
        self.child = None;
        self.started = Instant::now();
        self.pause = (self.pause * 2).clamp(PAUSES.0, PAUSES.1);
    }
}

impl Drop for InspectorChild {
    /// Nobody looks after it any more: it shall not outlive the engine, however that ends.
    fn drop(&mut self) {
        let Some(child) = &mut self.child else { return };
        let _ = child.kill();
        let _ = child.wait();
    }
}
