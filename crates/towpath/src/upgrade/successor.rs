//! The old process's side: the new process, and what it is to be handed over.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use bytes::{Buf, Bytes};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::channel::{Channel, Packet};
use super::message::Message;
use super::predecessor::Object;
use super::{EXIT, VARIABLE, VERSION};
use crate::process::Child;

/// How this process was started: the path to start the next version from, and the arguments.
#[derive(Clone, Debug)]
pub struct Executable {
    path: PathBuf,
    arguments: Vec<OsString>,
}

impl Executable {
    /// The executable and the arguments of this process. To be called before the working directory changes.
    ///
    /// The path is the first word of the command (`argv[0]`), searched in PATH if it has no slash, so that a symbolic link or a file
    /// that is replaced leads to the new version. If it does not name this executable now, the path is the one that the kernel reports.
    ///
    /// # Errors
    /// Fails if the kernel does not report the executable.
    pub fn of_this_process() -> io::Result<Self> {
        let own = std::env::current_exe()?;
        let mut words = std::env::args_os();
        let first = PathBuf::from(words.next().unwrap_or_default());
        let found = match first.components().count() {
            1 if !first.has_root() => search(&first),
            _ => std::path::absolute(&first).ok(),
        };
        // The file was replaced since this process started: the kernel reports a path that does not exist.
        let replaced = !own.exists();
        let path = found.filter(|found| replaced || is_same(found, &own)).unwrap_or(own);
        Ok(Self { path, arguments: words.collect() })
    }

    /// The path.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// The first executable of this name in PATH.
fn search(name: &Path) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    let found =
        std::env::split_paths(&paths).map(|directory| directory.join(name)).find(|path| path.is_file());
    found.and_then(|path| std::path::absolute(path).ok())
}

fn is_same(one: &Path, other: &Path) -> bool {
    let identity = |path| std::fs::metadata(path).map(|file| (file.dev(), file.ino()));
    identity(one).ok().is_some_and(|one| identity(other).is_ok_and(|other| one == other))
}

/// A new process, and its channel.
#[derive(Debug)]
pub struct Successor {
    child: Child,
    channel: Channel,
    queue: VecDeque<Outgoing>,
    /// When it was told to end.
    ending: Option<Instant>,
    /// When it was seen that it has closed the channel.
    closed: Option<Instant>,
}

#[derive(Debug)]
struct Outgoing {
    message: Message,
    fd: Option<OwnedFd>,
    bytes: Bytes,
    /// The message was sent; some of the bytes were not.
    begun: bool,
}

impl Successor {
    /// Starts `executable` with the arguments and the environment of this process, and passes it the objects.
    ///
    /// # Errors
    /// Fails if the program cannot be started.
    pub fn start(executable: &Executable, service: &str, objects: Vec<Object>) -> io::Result<Self> {
        let (channel, theirs) = Channel::pair()?;
        let mut command = Command::new(&executable.path);
        command
            .args(&executable.arguments)
            .env(VARIABLE, std::process::id().to_string())
            .stdin(Stdio::from(theirs));
        let child = Child::of_this(command.spawn()?)?;
        // Closes our copy of its end: the end of the process is the end of the channel.
        drop(command);
        Ok(Self::over(channel, child, service, objects))
    }

    /// The process `child` at the other end of `channel`, which is passed the objects.
    pub fn over(channel: Channel, child: Child, service: &str, objects: Vec<Object>) -> Self {
        let mut successor = Self { child, channel, queue: VecDeque::new(), ending: None, closed: None };
        successor.push(Message::Hello {
            version: VERSION,
            program: env!("CARGO_PKG_VERSION").to_owned(),
            service: service.to_owned(),
            objects: objects.len(),
        });
        for Object { kind, name, detail, fd } in objects {
            let message = Message::Object { kind, name, detail };
            successor.queue.push_back(Outgoing { message, fd: Some(fd), bytes: Bytes::new(), begun: false });
        }
        successor
    }

    /// The process of `whole` at the other end of `channel`, for a part of this program. `whole` waits for the process and ends it.
    ///
    /// # Errors
    /// Fails if there are no free descriptors.
    pub fn part(whole: &Self, channel: Channel) -> io::Result<Self> {
        let child = Child::watched(whole.id(), whole.process().try_clone_to_owned()?);
        Ok(Self { child, channel, queue: VecDeque::new(), ending: None, closed: None })
    }

    /// Its process id.
    pub const fn id(&self) -> u32 {
        self.child.id()
    }

    /// The process, whose descriptor becomes readable when it has ended.
    pub fn process(&self) -> BorrowedFd<'_> {
        self.child.as_fd()
    }

    /// Returns true if it has ended.
    pub fn is_over(&self) -> bool {
        self.child.is_over()
    }

    /// Queues a message.
    pub fn push(&mut self, message: Message) {
        self.queue.push_back(Outgoing { message, fd: None, bytes: Bytes::new(), begun: false });
    }

    /// Queues an item: its descriptor and its bytes.
    pub fn push_item(&mut self, detail: Value, fd: OwnedFd, bytes: Bytes) {
        let message = Message::Item { detail, bytes: bytes.len() };
        self.queue.push_back(Outgoing { message, fd: Some(fd), bytes, begun: false });
    }

    /// Sends as much of the queue as the channel takes. Returns the number of items that were sent completely.
    ///
    /// # Errors
    /// Fails if the new process has closed the channel.
    pub fn flush(&mut self) -> io::Result<u64> {
        let mut items = 0;
        while let Some(next) = self.queue.front_mut() {
            match next.send(&self.channel) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error),
            }
            items += u64::from(matches!(next.message, Message::Item { .. }));
            self.queue.pop_front();
        }
        Ok(items)
    }

    /// Number of messages and items that were not sent.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Returns true if everything was sent.
    pub fn is_flushed(&self) -> bool {
        self.queue.is_empty()
    }

    /// Takes back the items that were not sent: their details, descriptors and bytes. An item of which a part was sent is lost with
    /// the new process.
    pub fn take_back(&mut self) -> Vec<(Value, OwnedFd, Bytes)> {
        let item = |out: Outgoing| match out {
            Outgoing { message: Message::Item { detail, .. }, fd: Some(fd), bytes, begun: false } => {
                Some((detail, fd, bytes))
            }
            _ => None,
        };
        self.queue.drain(..).filter_map(item).collect()
    }

    /// The next message of the new process. `None`: there is none yet.
    ///
    /// # Errors
    /// Fails if it has closed the channel, or has sent something that is not a message.
    pub fn receive(&mut self) -> io::Result<Option<Message>> {
        match self.channel.receive() {
            Ok(Some(Packet::Message(message, _))) => Ok(Some(message)),
            Ok(Some(Packet::Bytes(_))) => Err(io::ErrorKind::InvalidData.into()),
            Ok(None) => {
                self.closed.get_or_insert_with(Instant::now);
                Err(io::ErrorKind::UnexpectedEof.into())
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// When [`receive`](Self::receive) has found that it has closed the channel.
    pub const fn closed(&self) -> Option<Instant> {
        self.closed
    }

    /// Returns its exit status if it has ended.
    pub fn try_wait(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Tells it to end.
    pub fn terminate(&mut self, now: Instant) {
        // A process that is not waited for keeps its id.
        if self.ending.is_none()
            && self.child.is_owned()
            && self.try_wait().is_none()
            && let Some(pid) = i32::try_from(self.id()).ok().and_then(Pid::from_raw)
        {
            let _ = kill_process(pid, Signal::TERM);
        }
        self.ending.get_or_insert(now);
    }

    /// Returns true if it has ended. Kills it [`EXIT`] after [`terminate`](Self::terminate).
    pub fn has_ended(&mut self, now: Instant) -> bool {
        if self.ending.is_some_and(|ending| now >= ending + EXIT) {
            let _ = self.child.kill();
        }
        self.try_wait().is_some()
    }

    /// Ends it now.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Time until [`has_ended`](Self::has_ended) is to be called without an event.
    pub fn patience(&self, now: Instant) -> Duration {
        self.ending.map_or(Duration::MAX, |ending| (ending + EXIT).saturating_duration_since(now))
    }
}

impl Outgoing {
    fn send(&mut self, channel: &Channel) -> io::Result<()> {
        if !self.begun {
            channel.send(&self.message, self.fd.as_ref().map(AsFd::as_fd))?;
            // The other process has it. What was not sent of an item can no longer be taken back.
            self.begun = true;
            self.fd = None;
        }
        while !self.bytes.is_empty() {
            let sent = channel.send_bytes(&self.bytes)?;
            self.bytes.advance(sent);
        }
        Ok(())
    }
}

/// Readable when there is a message, or the channel was closed.
impl AsFd for Successor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}
