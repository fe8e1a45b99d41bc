//! Attackers that collect the memory of rings: short-lived processes attach, pass the memory on to one process, and exit.

use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use super::raw_ring::{self, borrowed};

/// Bytes that this process has collected.
pub(super) static COLLECTED: AtomicU64 = AtomicU64::new(0);
/// Pause after a process that got no memory.
const REFUSED: Duration = Duration::from_millis(5);
/// Descriptors that this process keeps: fewer than a common limit of open files (RLIMIT_NOFILE of getrlimit(2)).
const MOST: usize = 900;

/// How memory is passed on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// By the engine's descriptors.
    Descriptors,
    /// By descriptors that only name the memory (O_PATH of open(2)). The memory is opened and closed repeatedly.
    Paths,
}

/// Collects memory of the rings at `path`, and calls `did` for each process.
pub(super) fn collect(path: &Path, how: How, did: impl Fn()) -> Result<()> {
    let mut collected: Vec<OwnedFd> = Vec::new();
    loop {
        did();
        let (ours, theirs) =
            socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
        // This user may have no access to the directory of this program.
        let mut process = Command::new("/proc/self/exe")
            .args(["side", "hostile-pass-on", if how == How::Paths { "paths" } else { "descriptors" }])
            .arg(path)
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("starting a process")?;
        // Until the end of the process.
        while let Ok(fds) = raw_ring::receive(&ours, &mut [0; 16]) {
            collected.extend(fds);
        }
        let got = process.wait()?.success();
        collected.truncate(MOST);
        COLLECTED.fetch_max(size(&collected)?, Ordering::Relaxed);
        if how == How::Paths {
            collected.iter().for_each(|memory| drop(open(memory, OFlags::RDONLY)));
        }
        if !got {
            thread::sleep(REFUSED);
        }
    }
}

/// Bytes of memory: each descriptor has its own.
fn size(memory: &[OwnedFd]) -> Result<u64> {
    // stat(3type): blocks of 512 bytes.
    let bytes = |fd: &OwnedFd| Ok(u64::try_from(rustix::fs::fstat(fd)?.st_blocks)? * 512);
    memory.iter().map(bytes).sum()
}

fn open(memory: &OwnedFd, flags: OFlags) -> Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
    Ok(rustix::fs::open(path, flags | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty())?)
}

/// A process that attaches, passes its memory over its standard input on, and exits.
pub(crate) fn side(how: &str, path: &Path) -> Result<()> {
    let (_socket, lanes) = raw_ring::greet(path)?;
    for fds in lanes {
        let mut memory: Vec<OwnedFd> = fds.into_iter().take(raw_ring::MEMORIES).collect();
        if how == "paths" {
            let paths = memory.iter().map(|fd| open(fd, OFlags::PATH)).collect::<Result<_>>()?;
            memory = paths;
        }
        raw_ring::send(std::io::stdin().as_fd(), b"memory", &borrowed(&memory));
    }
    Ok(())
}
