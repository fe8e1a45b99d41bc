//! The sockets where inspectors attach, and the inspector processes that the engine starts.

use std::io;
use std::os::fd::AsFd;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::process::{Pid, getpgid};
use towpath_port::MAX_FRAME;
use towpath_ring::{Allow, BindError, Channel, Config, Endpoint, Quota};

use crate::config;
use crate::control::AcceptBackoff;
use crate::inspector::Error;
use crate::process::socket_directory::{self, SocketDirectory};
use crate::process::{Child, Identity, Place, Program, Starter};

/// Restart delay of an inspector process that has died early more than once: initial and maximum.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// A process that ran for a shorter time has died early. Any other one is restarted at once.
const EARLY: Duration = Duration::from_secs(1);

/// A listening socket, and the identity of its file.
pub(super) type Listener = (OwnedFd, Option<(u64, u64)>);

/// A started process for another one: a copy of its descriptor, the words of its program, its id, and its user.
pub(super) type Started = (OwnedFd, Vec<String>, u32, Option<u32>);

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
    /// Started processes beyond this number are on standby.
    serving: usize,
    starter: Starter,
    /// The engine's user.
    engine: u32,
    /// Users that may attach by the configuration, and those of started processes.
    users: config::Users,
    started: Vec<u32>,
    /// Holds the socket if the configuration names no path.
    directory: Option<SocketDirectory>,
}

/// An inspector process that the engine keeps running.
struct InspectorChild {
    program: Program,
    process: Option<Child>,
    started: Instant,
    /// How often in succession the process has died early.
    early: u32,
    /// Delay of the next start.
    pause: Duration,
    /// The process has attached.
    attached: bool,
    /// Its user.
    user: Option<u32>,
}

impl Socket {
    /// Creates the socket of a queue. Starts no process.
    ///
    /// `identity` is the user that the engine becomes; it owns the socket. `inherited` is the listener of the process that this one
    /// replaces, to which the file belongs until [`own_file`](Self::own_file).
    pub(super) fn bind(
        queue: &config::Queue,
        threads: usize,
        starter: &Starter,
        identity: Option<Identity>,
        inherited: Option<OwnedFd>,
    ) -> Result<Self, Error> {
        let number = queue.number;
        let system = |source| Error::System { queue: number, source };
        let inspectors = &queue.inspectors;
        let (path, directory) = match &inspectors.socket {
            Some(path) => (path.clone(), None),
            None => {
                let directory = socket_directory::make(starter.changes_user()).map_err(system)?;
                own(directory.path(), identity).map_err(system)?;
                (directory.path().join(format!("queue-{number}.sock")), Some(directory))
            }
        };
        if inherited.is_none() {
            super::make_directory_of(&path, identity);
        }
        let engine = Identity::engine_user(identity);
        let limits = inspectors.limits(threads);
        let config = Config {
            allow: allow(engine, &inspectors.users, &[]),
            lanes: threads as u32,
            deadline: Some(Duration::from_nanos(queue.policy.deadline)),
            // One invalid word marks a broken or hostile inspector: it is detached and its further words are ignored.
            violations_max: 0,
            // The largest frame of a port.
            replacement_max: MAX_FRAME as u32,
            messages: inspectors.may_inject,
            quota: limits,
            ..Config::default()
        };
        let endpoint = match inherited {
            Some(listener) => Endpoint::on(listener, &path, config),
            None => Endpoint::bind(&path, config).and_then(|endpoint| {
                let opened = open(&endpoint, inspectors, starter, identity);
                opened.map_err(|source| BindError::Listen { path: path.clone(), source })?;
                Ok(endpoint)
            }),
        };
        let endpoint = endpoint.map_err(|source| Error::Bind { queue: number, source })?;
        let children = wanted(inspectors).map(InspectorChild::new).collect();
        let users = inspectors.users.clone();
        let pause = AcceptBackoff::of(format_args!("queue {number}"));
        Ok(Self {
            queue: number,
            path,
            endpoint,
            pause,
            limits,
            threads,
            children,
            serving: inspectors.serving(),
            starter: starter.clone(),
            engine,
            users,
            started: Vec::new(),
            directory,
        })
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
        self.users.clone_from(&inspectors.users);
        self.serving = inspectors.serving();
        self.endpoint.set_allow(allow(self.engine, &self.users, &self.started));
        if let Err(error) = open(&self.endpoint, inspectors, &self.starter, None) {
            tracing::warn!("queue {}: {}: {error}", self.queue, self.path.display());
        }
        let mut before = std::mem::take(&mut self.children);
        for program in wanted(inspectors) {
            let there = before.iter().position(|child| child.program == program);
            self.children
                .push(there.map_or_else(|| InspectorChild::new(program), |at| before.swap_remove(at)));
        }
    }

    /// Starts every process for the first time.
    pub(super) fn start(&mut self) -> Result<usize, Error> {
        for at in 0..self.children.len() {
            let program = self.children[at].program.words[0].clone();
            self.start_one(at).map_err(|source| Error::Start { queue: self.queue, program, source })?;
        }
        Ok(self.children.len())
    }

    /// The listening socket for another process, and the identity of its file, if the configuration names the path.
    pub(super) fn listener(&self) -> io::Result<Option<Listener>> {
        self.configured_path().map(|_| self.endpoint.listener()).transpose()
    }

    /// The file belongs to another process from here on.
    pub(super) fn give_up_file(&mut self) {
        if self.directory.is_none() {
            self.endpoint.give_up_file();
        }
    }

    /// The file belongs to this process from here on.
    pub(super) fn own_file(&mut self, identity: Option<(u64, u64)>) {
        self.endpoint.own_file(identity);
    }

    /// Gives the client of an earlier channel a new one, which [`accept`](Self::accept) returns.
    pub(super) fn adopt(&mut self, client: OwnedFd) {
        if let Err(error) = self.endpoint.adopt(client) {
            log::warn!("queue {}: an inspector was lost at an upgrade: {error}", self.queue);
        }
    }

    /// Number of adopted clients that have not attached yet.
    pub(super) fn adopting(&self) -> usize {
        self.endpoint.adopting()
    }

    /// The started processes that run, for another process: a copy of the descriptor, the words of the program, the id, the user.
    pub(super) fn children(&mut self) -> io::Result<Vec<Started>> {
        let mut all = Vec::new();
        for child in &mut self.children {
            if child.is_running()
                && let Some(process) = &child.process
            {
                let pidfd = process.as_fd().try_clone_to_owned()?;
                all.push((pidfd, child.program.words.clone(), process.id(), child.user));
            }
        }
        Ok(all)
    }

    /// Continues a process that the launcher has started for the process that this one replaces. A process that the configuration does
    /// not want is killed.
    pub(super) fn adopt_child(&mut self, mut process: Child, words: &[String], user: Option<u32>) {
        let place =
            self.children.iter_mut().find(|child| child.process.is_none() && child.program.words == words);
        match place {
            Some(child) => {
                (child.process, child.user) = (Some(process), user);
                self.started.extend(user);
                self.endpoint.set_allow(allow(self.engine, &self.users, &self.started));
            }
            None => drop(process.kill()),
        }
    }

    /// Leaves the processes to another one.
    pub(super) fn leave_children(&mut self) {
        self.children.iter_mut().for_each(|child| child.process = None);
    }

    /// Starts a process. Its user may attach from now on.
    fn start_one(&mut self, at: usize) -> io::Result<()> {
        let user = self.children[at].start(&self.starter, self.queue, &self.path)?;
        if !self.started.contains(&user) {
            self.started.push(user);
            self.endpoint.set_allow(allow(self.engine, &self.users, &self.started));
        }
        Ok(())
    }

    /// Accepts one attached inspector. Returns also whether it is on standby: a process that the engine has started, while as many
    /// others as the queue needs are attached.
    pub(super) fn accept(&mut self) -> Option<(Channel, bool)> {
        if self.pause.is_on() {
            return None;
        }
        let accepted = self.endpoint.accept().unwrap_or_else(|error| {
            self.pause.begin(&error);
            None
        });
        let channel = accepted?;
        let runs = |child: &mut InspectorChild| child.attached && child.is_running();
        let attached = self.children.iter_mut().map(runs).filter(|runs| *runs).count();
        let pid = channel.peer().pid;
        let child = self.children.iter_mut().find(|child| child.has(pid));
        let standby = child.is_some_and(|child| {
            let first = !std::mem::replace(&mut child.attached, true);
            first && attached >= self.serving
        });
        Some((channel, standby))
    }

    /// Kills the started process that is, or has started, the process `pid`: it does not answer.
    pub(super) fn kill(&mut self, pid: u32) {
        let Some(child) = self.children.iter_mut().find(|child| child.has(pid)) else { return };
        let Some(process) = &mut child.process else { return };
        let program = &child.program.words[0];
        tracing::warn!(
            "queue {}: `{program}` (process {}) is killed: it does not answer",
            self.queue,
            process.id()
        );
        if let Err(error) = process.kill() {
            tracing::warn!("queue {}: process {}: {error}", self.queue, process.id());
        }
    }

    /// Descriptors that become readable when a started process ends.
    pub(super) fn processes(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.children.iter().filter_map(|child| child.process.as_ref().map(AsFd::as_fd))
    }

    /// The path of the socket, if the configuration names it.
    pub(super) fn configured_path(&self) -> Option<&Path> {
        self.directory.is_none().then_some(&*self.path)
    }

    /// The counters of the socket.
    pub(super) fn stats(&self) -> towpath_ring::Stats {
        self.endpoint.stats()
    }

    /// Returns true while [`accept`](Self::accept) pauses after errors; polling the socket is useless meanwhile.
    pub(super) fn is_paused(&mut self) -> bool {
        self.pause.is_on()
    }

    /// Restarts processes that have ended: at once, or after a delay those that have died early more than once in succession. With
    /// `first`, an ended process is an error. Returns whether a process has ended.
    pub(super) fn look_after(&mut self, first: bool) -> Result<bool, Error> {
        let mut any = false;
        for at in 0..self.children.len() {
            let inspector = &mut self.children[at];
            let Some(child) = &mut inspector.process else {
                if inspector.started.elapsed() >= inspector.pause {
                    self.restart_one(at);
                }
                continue;
            };
            let Ok(Some(status)) = child.try_wait() else { continue };
            let program = inspector.program.words[0].clone();
            if first {
                return Err(Error::Ended { queue: self.queue, program, status });
            }
            any = true;
            let early = inspector.started.elapsed() < EARLY;
            inspector.end(early);
            match inspector.pause.as_secs() {
                0 => {
                    tracing::warn!("queue {}: `{program}` ended ({status}); restarted", self.queue);
                    self.restart_one(at);
                }
                seconds => {
                    tracing::warn!(
                        "queue {}: `{program}` ended ({status}); restart in {seconds} s",
                        self.queue
                    );
                }
            }
        }
        Ok(any)
    }

    fn restart_one(&mut self, at: usize) {
        if let Err(error) = self.start_one(at) {
            let inspector = &mut self.children[at];
            tracing::warn!("queue {}: cannot start `{}`: {error}", self.queue, inspector.program.words[0]);
            inspector.early = inspector.early.max(1);
            inspector.end(true);
        }
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

/// The users that may attach: the configured ones, root, the engine's user, and those of the processes that the engine started.
fn allow(engine: u32, named: &config::Users, started: &[u32]) -> Allow {
    let mut users = vec![engine, 0];
    users.extend(&named.ids);
    users.extend(started);
    users.sort_unstable();
    users.dedup();
    Allow::UsersAndGroups(users, named.groups.clone())
}

/// Gives the socket to `identity`, if given, and sets its mode. Access is checked with SO_PEERCRED; the mode only has to permit
/// connecting.
fn open(
    endpoint: &Endpoint,
    inspectors: &config::Inspectors,
    starter: &Starter,
    identity: Option<Identity>,
) -> io::Result<()> {
    let others = !inspectors.users.is_empty() || inspectors.wanted() > 0 && starter.changes_user();
    let open = if others { 0o666 } else { 0o600 };
    let (owner, group) = identity.map(|identity| (identity.user, identity.group)).unzip();
    endpoint.set_access(owner, group, Some(inspectors.mode.unwrap_or(open)))
}

/// Gives a new directory to the user that the engine becomes. Other files and files of other users are refused: in a directory that
/// other users can write, they may have replaced it.
pub(super) fn own(path: &Path, identity: Option<Identity>) -> io::Result<()> {
    let Some(Identity { user, group }) = identity else { return Ok(()) };
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    let stat = rustix::fs::fstat(&file)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Directory
        || stat.st_uid != rustix::process::geteuid().as_raw()
    {
        return Err(io::Error::other(format!("{} was replaced by another user", path.display())));
    }
    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
    rustix::fs::chownat(&file, "", Some(user), Some(group), AtFlags::EMPTY_PATH)?;
    Ok(())
}

/// The program of each wanted process.
fn wanted(inspectors: &config::Inspectors) -> impl Iterator<Item = Program> + '_ {
    let each = inspectors.workers + inspectors.standby;
    inspectors.programs().flat_map(move |program| std::iter::repeat_n(program, each))
}

impl InspectorChild {
    fn new(program: Program) -> Self {
        let pause = Duration::ZERO;
        Self { program, process: None, started: Instant::now(), early: 0, pause, attached: false, user: None }
    }

    /// Starts the process. Returns its user.
    fn start(&mut self, starter: &Starter, queue: u16, socket: &Path) -> io::Result<u32> {
        self.started = Instant::now();
        let started = starter.start(&Place::Queue(queue), &self.program, socket)?;
        (self.process, self.user) = (Some(started.child), Some(started.user));
        self.attached = false;
        Ok(started.user)
    }

    /// The process has ended, or could not be started.
    fn end(&mut self, early: bool) {
        (self.process, self.attached) = (None, false);
        self.started = Instant::now();
        self.early = if early { self.early.saturating_add(1) } else { 0 };
        self.pause = match self.early {
            0 | 1 => Duration::ZERO,
            early => PAUSES.0.saturating_mul(1 << (early - 2).min(16)).min(PAUSES.1),
        };
    }

    fn is_running(&mut self) -> bool {
        self.process.as_mut().is_some_and(|process| matches!(process.try_wait(), Ok(None)))
    }

    /// Returns true if `pid` is the process, or in its process group.
    fn has(&self, pid: u32) -> bool {
        let Some(process) = &self.process else { return false };
        let group = || {
            getpgid(Pid::from_raw(pid as i32)).is_ok_and(|group| group.as_raw_pid() as u32 == process.id())
        };
        process.id() == pid || group()
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::Settings;

    #[test]
    fn only_processes_that_end_early_in_succession_wait() {
        let mut child =
            InspectorChild::new(Program { words: vec!["true".to_owned()], settings: Settings::default() });
        let rows = [
            (true, 0),
            (true, 1),
            (true, 2),
            (true, 4),
            (false, 0),
            (false, 0),
            (true, 0),
            (true, 1),
            (true, 2),
            (true, 4),
            (true, 8),
            (true, 16),
            (true, 32),
            (true, 60),
            (true, 60),
        ];
        for (step, (early, seconds)) in rows.into_iter().enumerate() {
            child.end(early);
            assert_eq!(child.pause.as_secs(), seconds, "{step}");
        }
    }
}
