//! Starts processes: in this process, or by the launcher.

use std::fmt;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use towpath_fleet::workers::{HostView, WorkerStats};

use super::child::Child;
use super::confine::Failed;
use super::spec::{Program, Spec};

/// The part of the configuration that names a program. Programs of one place share an unused user id.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// `[queue.N]`.
    Queue(u16),
    /// `[mux.NAME]`.
    Mux(String),
}

/// Starts processes and looks after them for this process: the launcher.
pub trait Remote: Send + Sync + fmt::Debug {
    /// Starts a program of the configuration with the socket's path in TOWPATH_SOCKET.
    ///
    /// # Errors
    /// The system's error, or the configuration does not have the program.
    fn start(self: Arc<Self>, place: &Place, program: &Program, socket: &Path) -> io::Result<Started>;

    /// The exit status of a process that has ended.
    ///
    /// # Errors
    /// The launcher has ended.
    fn status(&self, id: u32) -> io::Result<Option<ExitStatus>>;

    /// Kills a process.
    ///
    /// # Errors
    /// The launcher has ended.
    fn kill(&self, id: u32) -> io::Result<()>;

    /// The worker on another machine behind this process; `None` if it is a process of this machine.
    fn remote_worker(&self, _id: u32) -> Option<RemoteWorker> {
        None
    }

    /// The state of workers on other machines, if this starts them.
    fn remote_view(&self) -> Option<RemoteView> {
        None
    }
}

/// A worker on another machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RemoteWorker {
    /// Worker and host, for people. Empty until there is one.
    pub name: String,
    /// Messages that it may hold.
    pub credit: usize,
    /// The round trip to it.
    pub round_trip: Duration,
    /// Why it has ended.
    pub end: Option<String>,
}

/// The state of workers on other machines.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteView {
    /// The subject.
    pub subject: String,
    /// The server, or why there is no connection.
    pub server: Result<String, String>,
    /// The worker hosts, nearest first. Their slots are the ids of processes here.
    pub hosts: Vec<HostView>,
    /// The counters.
    pub stats: WorkerStats,
}

/// A started process and its user.
#[derive(Debug)]
pub struct Started {
    /// The process.
    pub child: Child,
    /// Its user.
    pub user: u32,
}

/// Starts the processes of this engine.
#[derive(Clone, Debug)]
pub enum Starter {
    /// This process starts them.
    Local(Local),
    /// The launcher starts them.
    Remote(Arc<dyn Remote>),
}

/// A starter in this process. It does not change the user.
#[derive(Clone, Debug)]
pub struct Local {
    /// The program `towpath`.
    executable: PathBuf,
    interactive: bool,
}

impl Local {
    /// For a daemon: started programs get a cleared environment and limits.
    pub fn daemon() -> Self {
        Self { executable: "/proc/self/exe".into(), interactive: false }
    }

    /// For a command that a user runs: started programs get the user's environment and limits.
    pub fn interactive() -> Self {
        Self { interactive: true, ..Self::daemon() }
    }

    /// For unit tests, whose executable is not `towpath`: starts programs as they are.
    #[cfg(test)]
    pub(crate) fn plain() -> Self {
        Self { executable: PathBuf::new(), interactive: true }
    }

    fn start(&self, program: &Program, socket: &Path) -> io::Result<Started> {
        let user = rustix::process::geteuid().as_raw();
        let settings = &program.settings;
        if settings.user.is_some_and(|other| other != user)
            || settings.user.is_none() && settings.group.is_some()
        {
            let text = "`user` and `group` need an engine that is started as root";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        if !settings.sandbox.namespaces.is_empty() {
            let text = "`namespaces` need an engine that is started as root";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        let spec = match self.interactive {
            true => program.interactive(socket),
            false => program.confined(socket, None),
        };
        #[cfg(test)]
        if self.executable.as_os_str().is_empty() {
            let child = Command::new(&spec.words[0]).args(&spec.words[1..]).process_group(0).spawn()?;
            return Ok(Started { child: Child::of_this(child)?, user });
        }
        let child = Child::of_this(spawn(&self.executable, &spec)?)?;
        Ok(Started { child, user })
    }
}

impl Starter {
    /// Starts `program` with the socket's path in TOWPATH_SOCKET. Waits until the program runs, but not for anything that it does.
    ///
    /// The first word `towpath` stands for this executable. The process has no standard input, writes its standard output to our
    /// standard error, and leads a new process group: signals of the terminal go to the engine only.
    ///
    /// # Errors
    /// The step that failed, or the error of execve(2).
    pub fn start(&self, place: &Place, program: &Program, socket: &Path) -> io::Result<Started> {
        match self {
            Self::Local(local) => local.start(program, socket),
            Self::Remote(remote) => Arc::clone(remote).start(place, program, socket),
        }
    }

    /// Returns true if programs may run as another user, for which sockets must be reachable.
    pub const fn changes_user(&self) -> bool {
        matches!(self, Self::Remote(_))
    }
}

/// Starts `executable` as `towpath confine` with the spec, and waits until the program runs.
pub(crate) fn spawn(executable: &Path, spec: &Spec) -> io::Result<std::process::Child> {
    let (mut ours, theirs) = UnixStream::pair()?;
    let text = serde_json::to_vec(spec)?;
    let mut command = Command::new(executable);
    command
        .arg0("towpath")
        .arg("confine")
        .env_clear()
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(io::stderr())
        .process_group(0);
    let mut child = command.spawn()?;
    // Closes our copy of the child's socket: the end of the report is the end of all copies.
    drop(command);
    let mut report = Vec::new();
    let told = ours
        .write_all(&text)
        .and_then(|()| ours.shutdown(Shutdown::Write))
        .and_then(|()| ours.read_to_end(&mut report).map(drop));
    match told.map(|()| Failed::from_bytes(&report)) {
        Ok(None) => Ok(child),
        Ok(Some(error)) | Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(error)
        }
    }
}
