//! The launcher's process: `towpath launcher CONFIG`.

use std::collections::{HashMap, VecDeque};
use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, PidfdFlags, Signal, getpid, kill_process_group, pidfd_open};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use towpath_port::{Object, pins};

use super::super::privilege::Capabilities;
use super::message::{Kind, Message};
use super::unused_id::UnusedIds;
use super::{digest, digest_of_all, object, programs};
use crate::config::Config;
use crate::process::{Identity, Limit, Place, Program, spawn};
use crate::upgrade;

/// Limit on started processes whose exit status the engine has not requested.
const CHILDREN: usize = 8192;

/// Time for an engine to end after it has closed its connection.
const ENGINE_EXIT: Duration = Duration::from_secs(10);

/// Limit on the processes and threads of an unused user id.
const PROCESSES: &str = "nproc=512";

/// The connection of an engine.
struct Connection {
    socket: OwnedFd,
    /// The workers of its muxes, which end with it. Inspectors may belong to another engine after an upgrade.
    workers: Vec<u32>,
}

/// The state of the launcher.
struct Server {
    file: PathBuf,
    /// The configuration, once it was adopted.
    config: Option<Config>,
    /// The capabilities that were not dropped then.
    capabilities: Option<Capabilities>,
    children: HashMap<u32, Child>,
    /// The engines that it has started, oldest first. They are in `children` until their status is known.
    engines: Vec<u32>,
    /// Killed workers of engines that have ended.
    killed: Vec<u32>,
    ids: UnusedIds,
    /// Copies of what the kernel takes long to close. A killed engine ends at once, and another can start while this process closes them.
    kept: HashMap<(String, Object), VecDeque<Vec<OwnedFd>>>,
}

/// Serves the engine at the socket of standard input until it ends. Returns the exit code.
pub fn serve(file: &Path) -> u8 {
    match run(file) {
        Ok(()) => 0,
        Err(error) => {
            crate::output::say(format_args!("towpath: launcher: {error}"));
            1
        }
    }
}

fn run(file: &Path) -> io::Result<()> {
    let socket = rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?;
    rustix::net::getpeername(&socket).map_err(|_| io::Error::other("`towpath run` starts this command"))?;
    rustix::stdio::dup2_stdin(std::fs::File::open("/dev/null")?)?;
    // Only the engine ends the launcher. The signals get a handler instead of SIG_IGN, because children inherit SIG_IGN.
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        signal_hook::flag::register(signal, Arc::new(AtomicBool::new(false)))?;
    }
    let mut server = Server {
        file: file.into(),
        config: None,
        capabilities: None,
        children: HashMap::new(),
        engines: Vec::new(),
        killed: Vec::new(),
        ids: UnusedIds::default(),
        kept: HashMap::new(),
    };
    // One for each engine: during an upgrade, two.
    let mut engines = vec![Connection { socket, workers: Vec::new() }];
    while !engines.is_empty() {
        let mut fds: Vec<_> =
            engines.iter().map(|engine| PollFd::new(&engine.socket, PollFlags::IN)).collect();
        if poll(&mut fds, None).is_err() {
            continue;
        }
        let ready: Vec<_> = fds.iter().map(|fd| !fd.revents().is_empty()).collect();
        let mut new = None;
        let mut ready = ready.into_iter();
        engines.retain_mut(|engine| {
            let serves = !ready.next().unwrap_or(false) || server.serve(engine, &mut new);
            if !serves {
                server.kill_workers(&engine.workers);
            }
            serves
        });
        engines.extend(new.map(|socket| Connection { socket, workers: Vec::new() }));
        server.reap();
    }
    server.tidy_pins();
    Ok(())
}

impl Server {
    /// Answers a request of an engine. Returns false if it has ended. `new` becomes the connection of another engine.
    fn serve(&mut self, engine: &mut Connection, new: &mut Option<OwnedFd>) -> bool {
        let Ok(Some((request, passed))) = Message::receive(&engine.socket) else { return false };
        let handled = match request.kind {
            Kind::Upgrade => self.upgrade(&request, passed).map(|(id, pidfd, ours, theirs)| {
                *new = Some(ours);
                (Message { numbers: [id, 0, 0], ..Message::new(Kind::Done) }, vec![pidfd, theirs])
            }),
            _ => self.handle(&request, &mut engine.workers),
        };
        let (reply, descriptors) = handled.unwrap_or_else(|error| (Message::failed(&error), Vec::new()));
        let descriptors: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
        reply.send(&engine.socket, &descriptors).is_ok()
    }

    /// Starts the next version of the engine, with the privileges of the launcher. Returns its process id, a pidfd, and both ends of
    /// its connection.
    fn upgrade(
        &mut self,
        request: &Message,
        passed: Vec<OwnedFd>,
    ) -> io::Result<(u32, OwnedFd, OwnedFd, OwnedFd)> {
        let config = self.config.as_ref().ok_or(io::ErrorKind::InvalidInput)?;
        let [at, json, _] = request.numbers;
        let path = config.engine.upgrade.get(at as usize);
        let path = path.ok_or_else(|| io::Error::other("the configuration does not name this program"))?;
        let [stdin, stdout]: [OwnedFd; 2] = passed.try_into().map_err(|_| io::ErrorKind::InvalidInput)?;
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        let mut command = Command::new(path);
        command
            .arg("run")
            .args((json == 1).then_some("--json"))
            .arg(&self.file)
            .env(upgrade::VARIABLE, std::process::id().to_string())
            .stdin(stdin)
            .stdout(stdout)
            .process_group(0);
        let child = command.spawn()?;
        let id = child.id();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        self.children.insert(id, child);
        self.engines.push(id);
        Ok((id, pidfd?, ours, theirs))
    }

    /// The last engine has ended: the programs that it has detached leave no files.
    fn tidy_pins(&self) {
        let ports = self.config.iter().flat_map(|config| &config.ports);
        ports.filter_map(|port| port.driver.interface()).for_each(pins::tidy);
    }

    /// Kills the workers of an engine that has ended. Some of them may wait for something else than their ring.
    fn kill_workers(&mut self, workers: &[u32]) {
        for child in workers.iter().filter_map(|id| self.children.get(id)) {
            let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
        }
        self.killed.extend(workers);
    }

    /// Reaps the engines before the last one and the killed workers that have ended.
    fn reap(&mut self) {
        let last = self.engines.last().copied();
        let Self { engines, killed, children, .. } = self;
        let mut lives = |id: &u32| {
            let lives = children.get_mut(id).is_some_and(|child| matches!(child.try_wait(), Ok(None)));
            if !lives {
                children.remove(id);
            }
            lives
        };
        engines.retain(|id| Some(*id) == last || lives(id));
        killed.retain(lives);
    }

    fn handle(&mut self, request: &Message, workers: &mut Vec<u32>) -> io::Result<(Message, Vec<OwnedFd>)> {
        let done = Message::new(Kind::Done);
        let [number, ..] = request.numbers;
        match request.kind {
            Kind::Adopt => self.adopt(request.digest).map(|()| (done, Vec::new())),
            Kind::Start => {
                let (place, (id, user, pidfd)) =
                    self.start(request.digest, Path::new(OsStr::from_bytes(&request.text)))?;
                workers.extend(matches!(place, Place::Mux(_)).then_some(id));
                Ok((Message { numbers: [id, user, 0], ..done }, vec![pidfd]))
            }
            Kind::Status => {
                let child = self.children.get_mut(&number).ok_or(io::ErrorKind::NotFound)?;
                let Some(status) = child.try_wait()? else { return Ok((done, Vec::new())) };
                self.children.remove(&number);
                workers.retain(|id| *id != number);
                Ok((Message { numbers: [1, status.into_raw().cast_unsigned(), 0], ..done }, Vec::new()))
            }
            Kind::Kill => {
                self.children.get_mut(&number).ok_or(io::ErrorKind::NotFound)?.kill()?;
                Ok((done, Vec::new()))
            }
            Kind::Open => {
                let config = self.config.as_ref().ok_or(io::ErrorKind::InvalidInput)?;
                let (port, object) = object::of(request).ok_or(io::ErrorKind::InvalidInput)?;
                let port = config.ports.iter().find(|known| known.name == port);
                let port =
                    port.ok_or_else(|| io::Error::other("the configuration does not have this port"))?;
                // Those of a port that is opened again replace its earlier ones.
                let at_once = match object {
                    Object::PacketSocket => config.engine_threads(),
                    Object::IngressProgram => 1,
                    _ => return Ok((done, port.driver.open_object(&object)?)),
                };
                let kept = self.kept.entry((port.name.clone(), object.clone())).or_default();
                kept.drain(..(kept.len() + 1).saturating_sub(at_once));
                let opened = port.driver.open_object(&object)?;
                kept.push_back(opened.iter().map(OwnedFd::try_clone).collect::<io::Result<_>>()?);
                Ok((done, opened))
            }
            Kind::Upgrade | Kind::Done | Kind::Failed => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    /// Reads the configuration. The first time also drops the capabilities that it does not need.
    fn adopt(&mut self, digest: u64) -> io::Result<()> {
        let config = Config::read(&self.file).map_err(|found| {
            let first = found.first().map(ToString::to_string).unwrap_or_default();
            io::Error::other(format!("the launcher cannot read the configuration: {first}"))
        })?;
        if digest_of_all(&config) != digest {
            return Err(io::Error::other("the configuration changed while it was read: try again"));
        }
        let needed = Capabilities::of_launcher(&config);
        match self.capabilities {
            None => {
                needed.keep()?;
                // Those that root did not have are missing for another reason, which their use reports.
                self.capabilities = Some(needed);
            }
            Some(kept) if !kept.missing(needed).is_empty() => {
                let missing = kept.missing(needed);
                return Err(io::Error::other(format!(
                    "the launcher has dropped {missing} at the start, which this configuration needs: restart the engine"
                )));
            }
            Some(_) => {}
        }
        self.config = Some(config);
        Ok(())
    }

    /// Starts the program. Returns its place, and its id, its user and a pidfd.
    fn start(&mut self, named: u64, socket: &Path) -> io::Result<(Place, (u32, u32, OwnedFd))> {
        let config = self.config.as_ref().ok_or(io::ErrorKind::InvalidInput)?;
        let (place, program) = programs(config)
            .find(|(place, program)| digest(place, program) == named)
            .ok_or_else(|| io::Error::other("the configuration does not have this program"))?;
        if self.children.len() >= CHILDREN {
            return Err(io::Error::other("too many processes have been started"));
        }
        let identity = self.identity(&place, &program)?;
        let mut spec = program.confined(socket, identity);
        if program.settings.user.is_none()
            && identity.is_some()
            && !spec.limits.iter().any(|it| it.name == "nproc")
        {
            spec.limits.extend(Limit::parse(PROCESSES));
        }
        spec.dies_with = Some(getpid().as_raw_pid().cast_unsigned());
        let user = identity.map_or(0, |identity| identity.user);
        let child = spawn(Path::new("/proc/self/exe"), &spec).map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => io::Error::other(format!(
                "{error}; it runs as user {user} (see `user` of [queue.N] and [mux.NAME])"
            )),
            _ => error,
        })?;
        let id = child.id();
        let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty());
        self.children.insert(id, child);
        Ok((place, (id, user, pidfd?)))
    }

    /// The user and group of a program; `None` where the user namespace has no unused id.
    fn identity(&mut self, place: &Place, program: &Program) -> io::Result<Option<Identity>> {
        let settings = &program.settings;
        if let Some(user) = settings.user {
            return Ok(Some(Identity { user, group: settings.group.unwrap_or(user) }));
        }
        let Some(id) = self.ids.of(place) else { return Ok(None) };
        Ok(Some(Identity { user: id, group: settings.group.unwrap_or(id) }))
    }
}

impl Drop for Server {
    /// The engine has ended or is about to: kills its processes and what they started in their process groups. An engine that this
    /// launcher has started for an upgrade has [`ENGINE_EXIT`] for the rest of its work: it closes its connection before it removes its files.
    fn drop(&mut self) {
        let Self { children, engines, .. } = self;
        let (engines, others): (Vec<_>, Vec<_>) =
            children.values_mut().partition(|child| engines.contains(&child.id()));
        for child in others {
            let _ = kill_process_group(Pid::from_child(child), Signal::KILL);
            let _ = child.wait();
        }
        let until = Instant::now() + ENGINE_EXIT;
        for engine in engines {
            if let Ok(pidfd) = pidfd_open(Pid::from_child(engine), PidfdFlags::empty()) {
                let left = until.saturating_duration_since(Instant::now());
                let left = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
                let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&left));
            }
            let _ = kill_process_group(Pid::from_child(engine), Signal::KILL);
            let _ = engine.wait();
        }
    }
}
