//! The file of a listening Unix socket.
//!
//! Race: two engines that start at the same time both find the stale socket of a third. bind(2) and listen(2) are
//! two steps, and between them a socket looks stale. Without a lock, the second engine would remove the new socket
//! of the first. The engine therefore checks, removes and binds under flock(2) of the directory. The lock is
//! advisory: a process that keeps it for longer than a second is not an engine, and is not waited for.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, FileType, FlockOperation, Mode, OFlags, chownat, flock, fstat};
use rustix::process::{Gid, Uid, geteuid};

use crate::shm::sys;

/// Longest wait for the lock: much longer than an engine holds it.
const PATIENCE: Duration = Duration::from_secs(1);

/// The file of a listening Unix socket. Dropping it removes the file, unless the path names another file by then.
///
/// Drop it before the listener. The listener keeps the inode number in use; a file created after the listener is
/// closed may get the same number, and would be removed. (Struct fields are dropped in order, variables in reverse
/// order.)
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode number (stat(2)); unique while the socket listens.
    file: Option<(u64, u64)>,
}

impl SocketFile {
    /// Calls `listen`, which listens at `path`. Replaces a stale socket; keeps a file of any other kind.
    ///
    /// # Errors
    /// The system's error: EADDRINUSE if a process listens at `path`, or the file is not a socket.
    pub fn bind<L>(path: &Path, listen: impl FnMut() -> io::Result<L>) -> io::Result<(L, Self)> {
        Self::bind_within(PATIENCE, path, listen)
    }

    fn bind_within<L>(
        patience: Duration,
        path: &Path,
        mut listen: impl FnMut() -> io::Result<L>,
    ) -> io::Result<(L, Self)> {
        let _lock = lock(path, patience);
        let listener = match listen() {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && make_room(path)? => listen()?,
            other => other?,
        };
        Ok((listener, Self { path: path.into(), file: identify(path) }))
    }

    /// Sets the owner, the group and the mode of the file, each if given.
    ///
    /// In a directory that others can write, the path may name another file by now. The calls therefore go to a
    /// descriptor of the file (`O_PATH | O_NOFOLLOW`), after a check that it is the socket that was bound.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`]: the path names another file than the bound socket. Otherwise the system's
    /// error.
    pub fn set_access(&self, owner: Option<u32>, group: Option<u32>, mode: Option<u32>) -> io::Result<()> {
        let file =
            rustix::fs::open(&self.path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let found = fstat(&file)?;
        let user = [Some(geteuid().as_raw()), owner];
        let is_ours = FileType::from_raw_mode(found.st_mode).is_socket()
            && Some((found.st_dev, found.st_ino)) == self.file
            && user.contains(&Some(found.st_uid));
        if !is_ours {
            let text = "another process replaced the socket's file; use a directory that only the engine's user can write";
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        if owner.is_some() || group.is_some() {
            let (owner, group) = (owner.map(Uid::from_raw), group.map(Gid::from_raw));
            chownat(&file, "", owner, group, AtFlags::EMPTY_PATH)?;
        }
        mode.map_or(Ok(()), |mode| sys::chmod(file.as_fd(), mode))
    }

    /// Device and inode number of the file, for [`adopt`](Self::adopt) in another process that has the listener too. `None` if the
    /// file could not be identified.
    #[must_use]
    pub const fn identity(&self) -> Option<(u64, u64)> {
        self.file
    }

    /// The file of a listener that another process has passed, by the [`identity`](Self::identity) there.
    #[must_use]
    pub fn adopt(path: &Path, identity: Option<(u64, u64)>) -> Self {
        Self { path: path.into(), file: identity }
    }

    /// Owns the file of this [`identity`](Self::identity) from here on: the process that owned it has given it up.
    pub fn own(&mut self, identity: Option<(u64, u64)>) {
        self.file = identity;
    }

    /// Gives up the file: another process has it. Dropping this keeps the file.
    pub fn give_up(&mut self) {
        self.file = None;
    }

    /// Returns true if `path` is a socket.
    #[must_use]
    pub fn is_socket(path: &Path) -> bool {
        std::fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
    }

    /// The path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.file.is_some() && identify(&self.path) == self.file {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

/// Removes a stale socket; returns true if the path is free then. An ending engine removes its own socket without
/// the lock, possibly between any two steps of this function.
fn make_room(path: &Path) -> io::Result<bool> {
    let removed = || {
        let is_dead = std::fs::symlink_metadata(path)?.file_type().is_socket() && !sys::is_listened_on(path)?;
        if is_dead { std::fs::remove_file(path).map(|()| true) } else { Ok(false) }
    };
    match removed() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(true),
        other => other,
    }
}

/// Locks the directory of `path` until the result is dropped. None if the lock is not available.
fn lock(path: &Path, patience: Duration) -> Option<File> {
    let directory = match path.parent()? {
        here if here.as_os_str().is_empty() => Path::new("."),
        directory => directory,
    };
    let directory = File::open(directory).ok()?;
    let begun = Instant::now();
    loop {
        match flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(directory),
            Err(rustix::io::Errno::WOULDBLOCK | rustix::io::Errno::INTR) if begun.elapsed() < patience => {
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(_) => return None,
        }
    }
}

fn identify(path: &Path) -> Option<(u64, u64)> {
    let file = std::fs::symlink_metadata(path).ok()?;
    Some((file.dev(), file.ino()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::sync::Barrier;
    use std::thread;

    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType};

    use super::*;

    #[test]
    fn another_ones_socket_stays() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let bind = || SocketFile::bind(&path, || UnixListener::bind(&path));
        let (_one, file) = bind().unwrap();
        // The file was removed, and another engine has bound the path.
        std::fs::remove_file(&path).unwrap();
        let (_other, others) = bind().unwrap();
        drop(file);
        assert!(SocketFile::is_socket(&path));
        drop(others);
        assert!(!path.exists());
    }

    fn mode(path: &Path) -> u32 {
        std::fs::symlink_metadata(path).unwrap().mode() & 0o7777
    }

    #[test]
    fn access_is_set_for_the_bound_socket_and_no_other_file() {
        let directory = tempfile::tempdir().unwrap();
        let [path, victim, away] = ["s", "victim", "away"].map(|name| directory.path().join(name));
        std::fs::write(&victim, "secret").unwrap();
        std::fs::set_permissions(&victim, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        let (_listener, file) = SocketFile::bind(&path, || UnixListener::bind(&path)).unwrap();
        for wanted in [0o666, 0o600, 0o660] {
            file.set_access(None, Some(rustix::process::getegid().as_raw()), Some(wanted)).unwrap();
            assert_eq!(mode(&path), wanted);
        }
        let refused = || file.set_access(None, None, Some(0o666)).unwrap_err().kind();
        // A link to a file, to another socket, and to the socket itself.
        std::fs::rename(&path, &away).unwrap();
        let other = directory.path().join("other");
        let _other = UnixListener::bind(&other).unwrap();
        for target in [&victim, &other, &away] {
            std::os::unix::fs::symlink(target, &path).unwrap();
            assert_eq!(refused(), io::ErrorKind::InvalidData, "{}", target.display());
            std::fs::remove_file(&path).unwrap();
        }
        // Another file and another socket in its place.
        for taken in [&victim, &other] {
            let before = mode(taken);
            std::fs::rename(taken, &path).unwrap();
            assert_eq!(refused(), io::ErrorKind::InvalidData);
            std::fs::rename(&path, taken).unwrap();
            assert_eq!(mode(taken), before);
        }
        assert_eq!(mode(&away), 0o660);
    }

    #[test]
    fn a_link_that_is_planted_at_any_moment_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let [path, victim, link] = ["s", "victim", "link"].map(|name| directory.path().join(name));
        std::fs::write(&victim, "secret").unwrap();
        std::fs::set_permissions(&victim, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        std::os::unix::fs::symlink(&victim, &link).unwrap();
        let (_listener, file) = SocketFile::bind(&path, || UnixListener::bind(&path)).unwrap();
        let over = std::sync::atomic::AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                // The link and the socket change places.
                while !over.load(std::sync::atomic::Ordering::Relaxed) {
                    let exchange = rustix::fs::RenameFlags::EXCHANGE;
                    rustix::fs::renameat_with(rustix::fs::CWD, &path, rustix::fs::CWD, &link, exchange)
                        .unwrap();
                }
            });
            let (mut set, mut refused) = (0, 0);
            while set < 1000 || refused < 1000 {
                match file.set_access(None, None, Some(0o666)) {
                    Ok(()) => set += 1,
                    Err(_) => refused += 1,
                }
            }
            over.store(true, std::sync::atomic::Ordering::Relaxed);
        });
        assert_eq!(mode(&victim), 0o600);
    }

    #[test]
    fn a_file_that_disappears_meanwhile_does_not_prevent_binding() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let mut ending = Some(sys::listen(&path, 1).unwrap());
        let listen = || {
            let listener = sys::listen(&path, 1);
            // Another engine ends right after the first try.
            if ending.take().is_some() {
                std::fs::remove_file(&path).unwrap();
            }
            listener
        };
        let _bound = SocketFile::bind(&path, listen).unwrap();
        assert!(sys::is_listened_on(&path).unwrap());
    }

    /// If several engines find the socket of a dead engine at the same time, one of them binds the path.
    #[test]
    fn one_takes_the_place_of_the_dead() {
        const ENGINES: usize = 4;
        let patience = Duration::from_secs(60);
        for _ in 0..100 {
            let directory = tempfile::tempdir().unwrap();
            let path = directory.path().join("s");
            // Bound, and never listened on: a child of another test that has it for a moment does not make it alive.
            let dead = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            rustix::net::bind(&dead, &SocketAddrUnix::new(&path).unwrap()).unwrap();
            let start = Barrier::new(ENGINES);
            let bind = || {
                start.wait();
                SocketFile::bind_within(patience, &path, || sys::listen(&path, 1))
            };
            let bound: Vec<_> = thread::scope(|scope| {
                let engines: Vec<_> = (0..ENGINES).map(|_| scope.spawn(bind)).collect();
                engines.into_iter().map(|engine| engine.join().unwrap()).collect()
            });
            assert_eq!(bound.iter().filter(|bound| bound.is_ok()).count(), 1, "{bound:?}");
            assert!(sys::is_listened_on(&path).unwrap());
        }
    }

    #[test]
    fn a_bind_does_not_wait_for_a_held_lock() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("s");
        let patience = Duration::from_millis(10);
        let _lock = lock(&path, patience).unwrap();
        assert!(lock(&path, patience).is_none(), "two have it");
        let _bound = SocketFile::bind_within(patience, &path, || UnixListener::bind(&path)).unwrap();
    }
}
