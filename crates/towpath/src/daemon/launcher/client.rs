//! The engine's side of the launcher.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, Shutdown, SocketFlags, SocketType, shutdown, socketpair};
use towpath_port::{Object, credentials};

use super::message::{Kind, Message, TEXT};
use super::{digest, digest_of_all, object};
use crate::config::Config;
use crate::logging::Format;
use crate::process::{self, Place, Program, Remote, Started};

/// Time for a reply. The launcher needs milliseconds, but its calls to the kernel wait for a lock (RTNL) that changes of any network
/// namespace hold: on a busy machine one of them has lasted 4 seconds, and the requests of two engines queue during an upgrade. The end of
/// the launcher is seen at once.
const PATIENCE: Duration = Duration::from_secs(60);

/// The launcher of this engine. Dropping it ends the process.
#[derive(Debug)]
pub(crate) struct Launcher {
    socket: OwnedFd,
    /// A request and its reply are one step. False: the launcher has ended or did not answer.
    works: Mutex<bool>,
    /// The process, if this one is its parent.
    child: Option<Child>,
    /// Another engine uses it from now on.
    handed_over: AtomicBool,
}

impl Launcher {
    /// Starts the launcher, which reads the file of `config`.
    pub(crate) fn start(config: &Config) -> io::Result<Arc<Self>> {
        let (socket, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        // Descriptors that this process inherited are not for the launcher. Before Linux 5.11 it has them.
        let _ = credentials::close_on_exec();
        let mut command = Command::new("/proc/self/exe");
        // The terminal's signals are for the engine.
        command
            .arg0("towpath")
            .arg("launcher")
            .arg("--log-format")
            .arg(Format::current().word())
            .arg(&config.file)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .process_group(0);
        let child = command.spawn()?;
        drop(command);
        Self::over(socket, Some(child), config)
    }

    /// The launcher of the engine that this one replaces, at a connection of its own.
    pub(crate) fn inherited(socket: OwnedFd, config: &Config) -> io::Result<Arc<Self>> {
        set_socket_timeout(&socket, Timeout::Recv, Some(PATIENCE))?;
        Self::over(socket, None, config)
    }

    fn over(socket: OwnedFd, child: Option<Child>, config: &Config) -> io::Result<Arc<Self>> {
        let (works, handed_over) = (Mutex::new(true), AtomicBool::new(false));
        let launcher = Arc::new(Self { socket, works, child, handed_over });
        launcher.adopt(config)?;
        Ok(launcher)
    }

    /// Starts the program number `at` of `upgrade` as the next version of the engine, with this standard input. Returns the process,
    /// and its connection to the launcher.
    pub(crate) fn upgrade(
        self: &Arc<Self>,
        at: usize,
        stdin: BorrowedFd<'_>,
    ) -> io::Result<(process::Child, OwnedFd)> {
        let json = std::env::args_os().any(|argument| argument == "--json");
        let request = Message { numbers: [at as u32, json.into(), 0], ..Message::new(Kind::Upgrade) };
        let (reply, descriptors) = self.ask_with(&request, &[stdin, rustix::stdio::stdout()])?;
        let [pidfd, connection]: [OwnedFd; 2] =
            descriptors.try_into().map_err(|_| io::ErrorKind::InvalidData)?;
        let launcher = Arc::clone(self) as Arc<dyn Remote>;
        Ok((process::Child::of_launcher(reply.numbers[0], pidfd, launcher), connection))
    }

    /// Another engine uses the launcher from now on: it does not end with this one.
    pub(crate) fn hand_over(&self) {
        // Relaxed: read by the drop, which follows on the thread that drops the last reference.
        self.handed_over.store(true, Ordering::Relaxed);
    }

    /// Makes the launcher read the configuration again. It must have the same programs and ports as `config`.
    pub(crate) fn adopt(&self, config: &Config) -> io::Result<()> {
        self.ask(&Message { digest: digest_of_all(config), ..Message::new(Kind::Adopt) }).map(drop)
    }

    /// Opens an object of the port `port`.
    pub(crate) fn open(&self, port: &str, object: &Object) -> io::Result<Vec<OwnedFd>> {
        self.ask(&object::request(port, object)?).map(|(_, descriptors)| descriptors)
    }

    fn ask(&self, request: &Message) -> io::Result<(Message, Vec<OwnedFd>)> {
        self.ask_with(request, &[])
    }

    fn ask_with(
        &self,
        request: &Message,
        descriptors: &[BorrowedFd<'_>],
    ) -> io::Result<(Message, Vec<OwnedFd>)> {
        let mut works = self.works.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = || io::Error::new(io::ErrorKind::BrokenPipe, "the launcher has ended");
        if !*works {
            return Err(ended());
        }
        let reply = request.send(&self.socket, descriptors).and_then(|()| Message::receive(&self.socket));
        match reply {
            Ok(Some((reply, descriptors))) => Ok((reply.checked()?, descriptors)),
            // Without this, a late reply would be taken for the reply to the next request.
            unanswered => {
                *works = false;
                match unanswered {
                    Err(error) if error.kind() == io::ErrorKind::WouldBlock => Err(io::Error::new(
                        io::ErrorKind::TimedOut,
                        format!("the launcher has not answered for {} s", PATIENCE.as_secs()),
                    )),
                    _ => Err(ended()),
                }
            }
        }
    }
}

/// Readable with POLLHUP when the launcher has ended.
impl AsFd for Launcher {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

impl Remote for Launcher {
    fn start(self: Arc<Self>, place: &Place, program: &Program, socket: &Path) -> io::Result<Started> {
        let text = socket.as_os_str().as_bytes().to_vec();
        if text.len() > TEXT {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path of the socket is too long"));
        }
        let (reply, descriptors) =
            self.ask(&Message { digest: digest(place, program), text, ..Message::new(Kind::Start) })?;
        let [id, user, _] = reply.numbers;
        let pidfd = descriptors.into_iter().next().ok_or(io::ErrorKind::InvalidData)?;
        Ok(Started { child: process::Child::of_launcher(id, pidfd, self), user })
    }

    fn status(&self, id: u32) -> io::Result<Option<ExitStatus>> {
        let (reply, _) = self.ask(&Message { numbers: [id, 0, 0], ..Message::new(Kind::Status) })?;
        let [ended, status, _] = reply.numbers;
        Ok((ended == 1).then(|| ExitStatus::from_raw(status.cast_signed())))
    }

    fn kill(&self, id: u32) -> io::Result<()> {
        self.ask(&Message { numbers: [id, 0, 0], ..Message::new(Kind::Kill) }).map(drop)
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        // It kills its children and exits. The engine cannot signal it.
        let _ = shutdown(&self.socket, Shutdown::Both);
        if let Some(child) = self.child.as_mut().filter(|_| !*self.handed_over.get_mut()) {
            let _ = child.wait();
        }
    }
}
