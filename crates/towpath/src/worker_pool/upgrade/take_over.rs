//! The new pool's side of an upgrade: connections of an older process.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Instant;

use towpath_mux::io::{Server, Tls};
use towpath_mux::mux::Mux;
use towpath_ring::SocketFile;

use super::{BURST, CONTROL, LISTENER, MovedConnection, PAUSE, PREDECESSOR, Upgrades, WorkerPool};
use crate::quantity::count;
use crate::upgrade::{Item, Object, Predecessor, Received};

/// A listener or a control socket that an older process has passed.
#[derive(Debug)]
pub struct Inherited {
    fd: OwnedFd,
    file: Option<(u64, u64)>,
}

/// The file of a listener or of the control socket, which belongs to an older process until it gives it up.
#[derive(Debug)]
pub enum InheritedFile {
    /// The path of a Unix listener, and the identity of its file.
    Listener(PathBuf, Option<(u64, u64)>),
    /// The identity of the control socket's file.
    Control(Option<(u64, u64)>),
}

impl Inherited {
    /// The listener that the argument `address` names.
    pub fn listener(predecessor: &mut Predecessor, address: &str) -> Option<Self> {
        predecessor.take(LISTENER, address).map(Self::of)
    }

    /// The control socket at `path`.
    pub fn control(predecessor: &mut Predecessor, path: &Path) -> Option<Self> {
        predecessor.take(CONTROL, &path.display().to_string()).map(Self::of)
    }

    fn of(object: Object) -> Self {
        Self { file: serde_json::from_value(object.detail).ok().flatten(), fd: object.fd }
    }

    /// Accepts connections. Returns the address, and the file of a Unix socket, which the older process still owns.
    ///
    /// # Errors
    /// Fails if it is not a listening socket.
    pub fn listen(
        self,
        server: &Server,
        address: &str,
        tls: Option<&Tls>,
    ) -> io::Result<(String, Option<InheritedFile>)> {
        let at = match tls {
            Some(tls) => server.listen_tls_on(self.fd, tls.clone()),
            None => server.listen_on(self.fd),
        }?;
        let file = address.strip_prefix("unix:").map(|path| InheritedFile::Listener(path.into(), self.file));
        Ok((at, file))
    }

    /// The descriptor, and the identity of the file.
    pub fn into_parts(self) -> (OwnedFd, Option<(u64, u64)>) {
        (self.fd, self.file)
    }
}

impl WorkerPool {
    /// Attaches connections of an older process.
    pub(super) fn take_over(&mut self, now: Instant) {
        let Upgrades { own: Some(own), paused, predecessor_ready, stats, .. } = &mut self.upgrades else {
            return;
        };
        let Some(predecessor) = &mut own.predecessor else { return };
        if paused.take_if(|paused| *paused <= now).is_some() {
            // Fails if there is no memory; the next turn finds nothing then.
            let _ = self.driver.watch(&*predecessor, PREDECESSOR);
        }
        if !std::mem::take(predecessor_ready) || paused.is_some() {
            return;
        }
        let server = self.driver.server();
        let (before, mut lost, mut end) = (stats.not_taken, None, None);
        for _ in 0..BURST {
            let received = if server.look(Mux::is_full) { Ok(Received::Full) } else { predecessor.receive() };
            match received {
                Ok(Received::Item(Item { detail, fd, bytes })) => {
                    let moved = MovedConnection::parse(detail).ok_or(io::ErrorKind::InvalidData.into());
                    match moved.and_then(|moved| server.attach_moved(fd, &bytes, moved.into())) {
                        Ok(_) => stats.taken_over += 1,
                        Err(error) => {
                            stats.not_taken += 1;
                            lost = Some(error);
                        }
                    }
                }
                Ok(Received::Nothing) => break,
                Ok(Received::Full) => {
                    self.driver.unwatch(predecessor.as_fd());
                    *paused = Some(now + PAUSE);
                    break;
                }
                Ok(Received::Done) => {
                    end = Some(Ok(()));
                    break;
                }
                Ok(Received::Go | Received::Ending) => {
                    end = Some(Err(io::ErrorKind::InvalidData.into()));
                    break;
                }
                Err(error) => {
                    end = Some(Err(error));
                    break;
                }
            }
        }
        let (id, taken) = (predecessor.id(), count(stats.taken_over, "connection"));
        if let Some(error) = lost {
            let closed = count(stats.not_taken - before, "connection");
            tracing::warn!(
                "upgrade: {closed} of process {id} could not be taken over and were closed: {error}"
            );
        }
        match &end {
            None => return,
            Some(Ok(())) => tracing::info!("upgrade: {taken} taken over from process {id}"),
            Some(Err(error)) => {
                tracing::error!(
                    "upgrade: {taken} taken over from process {id}, which then ended or failed: {error}"
                );
            }
        }
        let part = own.executable.is_none();
        own.finished = own.predecessor.take().filter(|_| part && matches!(end, Some(Ok(()))));
        if let Some(predecessor) = &own.finished {
            self.driver.unwatch(predecessor.as_fd());
        }
        // The older process has given them up, or ended without removing them.
        for file in own.later.drain(..) {
            match file {
                InheritedFile::Listener(path, identity) => own.files.push(SocketFile::adopt(&path, identity)),
                InheritedFile::Control(identity) => {
                    own.control.iter_mut().for_each(|(_, server)| server.own_file(identity));
                }
            }
        }
    }
}
