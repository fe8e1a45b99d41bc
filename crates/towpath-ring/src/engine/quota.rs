//! Quotas per user, and the charges against them.
//!
//! What: the end of a channel does not free its memory while a process has it mapped; no call takes memory from
//! another process. Memory that was sent to a process of another user therefore counts until no process has it
//! (`lent_memory.rs`). Otherwise a client could attach, pass its descriptors on and exit until the system has no
//! memory. Without visible holders, the memory counts until the client's process ends. Memory of the engine's own
//! user and of root is not tracked: they can end the engine anyway.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::engine::bars::Bars;
use crate::engine::lent_memory::LentMemory;
use crate::shm::header::Credentials;
use crate::shm::sys::{self, Process};

/// How long memory counts if the end of its process is not visible.
const UNSEEN: Duration = Duration::from_secs(3600);
/// Memory of such a process that was released within this time is counted in one entry.
const TOGETHER: Duration = Duration::from_secs(60);

/// Limits per user and per endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quota {
    /// Bytes of shared memory of all channels of one user. The memory of a user that is neither the engine's own nor
    /// root counts until no process has it. On kernels where that is not visible, it counts until the client's
    /// process has ended, or for an hour if the end is not visible either. The default is 256 MiB.
    pub bytes_per_user: u64,
    /// Channels of one user. The default is 64.
    pub channels_per_user: usize,
    /// Channels of all users. The default is 256.
    pub channels: usize,
    /// Unused descriptors that a client may have passed; more are closed. The default is 16.
    pub descriptors: usize,
    /// Attaches of one user at once. A further one is refused and bars the user. The default is 32.
    pub attach_burst: u32,
    /// Time after which a user regains one attach of [`attach_burst`](Self::attach_burst). The default is 250 ms.
    pub attach_interval: Duration,
    /// How long a user may not attach after a violation by one of its clients, and after too many attaches. The
    /// engine's own user and root are never barred. The default is 10 s.
    pub bar: Duration,
}

impl Default for Quota {
    fn default() -> Self {
        Self {
            bytes_per_user: 256 << 20,
            channels_per_user: 64,
            channels: 256,
            descriptors: 16,
            attach_burst: 32,
            attach_interval: Duration::from_millis(250),
            bar: Duration::from_secs(10),
        }
    }
}

/// The charge of one channel. Dropping it returns the memory, unless another process may still have it.
#[derive(Debug)]
pub(crate) struct Charge {
    quotas: Quotas,
    number: u64,
    uid: u32,
}

#[derive(Debug)]
struct Holder {
    uid: u32,
    pid: u32,
    name: String,
    bytes: u64,
    /// The client's process, if the memory must be tracked.
    process: Process,
    /// Set when the memory is sent to the client.
    lent: Option<Lent>,
}

/// How the quota learns that no process has the lent memory any more.
#[derive(Debug)]
enum Lent {
    /// By its holders.
    Memory(Vec<LentMemory>),
    /// By the end of the client's process only.
    Unseen,
}

/// Memory that a process may have kept of ended channels.
#[derive(Debug)]
struct Kept {
    uid: u32,
    pid: u32,
    name: String,
    bytes: u64,
    until: Until,
}

#[derive(Debug)]
enum Until {
    /// Until no process has this memory.
    Unheld(Vec<LentMemory>),
    /// Until this process has ended.
    Ended(OwnedFd),
    Then(Instant),
}

#[derive(Debug, Default)]
struct Book {
    holders: BTreeMap<u64, Holder>,
    /// One entry per channel whose holders are visible, or per process whose end is visible; for others, one per
    /// minute.
    kept: Vec<Kept>,
    bars: Bars,
    next: u64,
}

/// All charges of an endpoint. Locked by the thread that attaches clients and by helper threads of the reaper.
#[derive(Clone, Debug)]
pub(crate) struct Quotas {
    quota: Quota,
    book: Arc<Mutex<Book>>,
    /// Users of channels that ended by a violation since the last [`Quotas::admit`]. Has a separate lock, so that an
    /// engine thread that adds to it waits for no system call.
    violators: Arc<Mutex<Vec<u32>>>,
}

impl Quotas {
    pub(crate) fn new(quota: Quota) -> Self {
        Self { quota, book: Arc::default(), violators: Arc::default() }
    }

    /// Returns why the user may not attach at `now`, if it is barred.
    pub(crate) fn admit(&self, peer: &Credentials, now: Instant) -> Result<(), String> {
        let mut book = self.lock();
        for uid in std::mem::take(&mut *self.violators()) {
            book.bars.bar(uid, now, self.quota.bar);
        }
        match book.bars.left(peer.uid, now) {
            Some(left) => Err(format!("user {} is barred for {} s", peer.uid, left.as_secs() + 1)),
            None => Ok(()),
        }
    }

    /// Bars the user of a peer that broke the rules.
    pub(crate) fn bar(&self, peer: &Credentials, now: Instant) {
        if !is_trusted(peer.uid) {
            self.lock().bars.bar(peer.uid, now, self.quota.bar);
        }
    }

    /// Number of bars so far.
    pub(crate) fn bars(&self) -> u64 {
        self.lock().bars.count
    }

    /// Charges `bytes`, or returns which limit is exceeded and by which clients.
    pub(crate) fn take(
        &self,
        peer: &Credentials,
        name: &str,
        bytes: u64,
        now: Instant,
    ) -> Result<Charge, String> {
        let mut book = self.lock();
        let Quota { channels_per_user, channels, attach_burst, attach_interval, .. } = self.quota;
        let uid = peer.uid;
        if !is_trusted(uid) && !book.bars.attach(uid, now, attach_burst, attach_interval) {
            book.bars.bar(uid, now, self.quota.bar);
            let interval = attach_interval.as_millis();
            return Err(format!(
                "user {uid} has no attach left of {attach_burst}; it regains one per {interval} ms"
            ));
        }
        if book.holders.len() >= channels {
            return Err(format!("{channels} channels; {}", holders(book.holders.values())));
        }
        if book.holders.values().filter(|h| h.uid == uid).count() >= channels_per_user {
            return Err(format!("{channels_per_user} channels for user {uid}; {}", book.theirs(uid)));
        }
        book.forget(uid, now);
        // Each entry is an open descriptor or a watch of this process.
        let open = |k: &&Kept| k.uid == uid && !matches!(k.until, Until::Then(_));
        if book.kept.iter().filter(open).count() >= channels_per_user {
            let what = "ended channels whose memory is in use";
            return Err(format!("{channels_per_user} {what} for user {uid}; {}", book.theirs(uid)));
        }
        self.has_room(&book, uid, bytes)?;
        let process = if is_trusted(uid) {
            Process::Unseen
        } else {
            sys::process(peer.pid)
                .map_err(|e| format!("the end of process {} cannot be seen: {e}", peer.pid))?
        };
        let number = book.next;
        book.next += 1;
        let holder = Holder { uid, pid: peer.pid, name: name.into(), bytes, process, lent: None };
        book.holders.insert(number, holder);
        Ok(Charge { quotas: self.clone(), number, uid })
    }

    fn has_room(&self, book: &Book, uid: u32, bytes: u64) -> Result<(), String> {
        let most = self.quota.bytes_per_user;
        if book.bytes_of(uid).saturating_add(bytes) <= most {
            return Ok(());
        }
        Err(format!("{most} bytes for user {uid}, {bytes} more requested; {}", book.theirs(uid)))
    }

    fn violators(&self) -> MutexGuard<'_, Vec<u32>> {
        self.violators.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns true for the engine's own user and for root.
fn is_trusted(uid: u32) -> bool {
    uid == 0 || uid == rustix::process::geteuid().as_raw()
}

impl Book {
    fn bytes_of(&self, uid: u32) -> u64 {
        let held = self.holders.values().filter(|h| h.uid == uid).map(|h| h.bytes);
        held.chain(self.kept.iter().filter(|k| k.uid == uid).map(|k| k.bytes)).sum()
    }

    /// The user's charges, as text.
    fn theirs(&self, uid: u32) -> String {
        let mut text = holders(self.holders.values().filter(|h| h.uid == uid));
        let kept = self.kept.iter().filter(|k| k.uid == uid);
        for (n, Kept { pid, name, bytes, .. }) in kept.take(8).enumerate() {
            let before = if n == 0 { "; of channels that have ended, while a process has it:" } else { "" };
            let _ = write!(text, "{before} {name}[{pid}] {bytes}");
        }
        text
    }

    /// Removes the kept memory of the user that no process has any more.
    fn forget(&mut self, uid: u32, now: Instant) {
        self.kept.retain_mut(|kept| {
            if kept.uid != uid {
                return true;
            }
            if let Until::Unheld(memory) = &mut kept.until {
                memory.retain(LentMemory::is_held);
                kept.bytes = memory.iter().map(|memory| memory.bytes).sum();
            }
            !kept.until.has_come(now)
        });
    }

    /// Ends a channel's charge. Memory that its client may have kept still counts.
    fn end(&mut self, number: u64, now: Instant) {
        let Some(Holder { uid, pid, name, bytes, process, lent }) = self.holders.remove(&number) else {
            return;
        };
        let (false, Some(lent)) = (is_trusted(uid), lent) else { return };
        let until = match (lent, process) {
            (Lent::Memory(memory), _) => Until::Unheld(memory),
            (Lent::Unseen, Process::Seen(pidfd)) => Until::Ended(pidfd),
            (Lent::Unseen, Process::Ended) => return,
            (Lent::Unseen, Process::Unseen) => Until::Then(now + UNSEEN + TOGETHER),
        };
        if until.has_come(now) {
            return;
        }
        let goes_with = |kept: &&mut Kept| match (&kept.until, &until) {
            // A process id is not reused while the process exists.
            (Until::Ended(_), Until::Ended(_)) => true,
            // A later channel does not extend the time of earlier memory: it would count for as long as there are
            // new channels.
            (Until::Then(then), Until::Then(_)) => *then >= now + UNSEEN,
            _ => false,
        };
        match self.kept.iter_mut().filter(|kept| (kept.uid, kept.pid) == (uid, pid)).find(goes_with) {
            Some(kept) => kept.bytes += bytes,
            None => self.kept.push(Kept { uid, pid, name, bytes, until }),
        }
    }
}

impl Until {
    fn has_come(&self, now: Instant) -> bool {
        match self {
            Self::Ended(pidfd) => sys::wait(&[pidfd.as_fd()], Some(Duration::ZERO)).unwrap_or(false),
            Self::Then(then) => now >= *then,
            Self::Unheld(memory) => !memory.iter().any(LentMemory::is_held),
        }
    }
}

fn holders<'a>(holders: impl Iterator<Item = &'a Holder>) -> String {
    let mut text = String::from("held by:");
    for Holder { pid, name, bytes, .. } in holders.take(8) {
        let _ = write!(text, " {name}[{pid}] {bytes}");
    }
    text
}

impl Charge {
    /// Marks the memory as sent to the client. None: its holders are not visible.
    pub(crate) fn lend(&self, memory: Option<Vec<LentMemory>>) {
        let lent = memory.map_or(Lent::Unseen, Lent::Memory);
        let mut book = self.quotas.lock();
        if let Some(holder) = book.holders.get_mut(&self.number) {
            holder.lent = Some(lent);
        }
    }

    /// Bars the user, after a violation by this channel's client.
    pub(crate) fn bar(&self) {
        if !is_trusted(self.uid) {
            self.quotas.violators().push(self.uid);
        }
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.quotas.lock().end(self.number, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;
    use crate::engine::open::open;
    use crate::handshake::attach::receive;
    use crate::mock;
    use crate::reaper::{Limits, PeerKey, Reaper};
    use crate::shm::park::Fences;

    #[test]
    fn a_limit_names_itself_and_the_holders() {
        let quotas =
            Quotas::new(Quota { bytes_per_user: 100, channels_per_user: 2, channels: 3, ..Quota::default() });
        let peer = |uid, pid| Credentials { pid, uid, gid: 0 };
        let take = |uid, pid, bytes| quotas.take(&peer(uid, pid), "ids", bytes, Instant::now());
        let us = rustix::process::geteuid().as_raw();
        let first = take(us, 11, 60).unwrap();
        assert_eq!(
            take(us, 12, 41).unwrap_err(),
            format!("100 bytes for user {us}, 41 more requested; held by: ids[11] 60")
        );
        let _second = take(us, 12, 40).unwrap();
        assert_eq!(
            take(us, 13, 0).unwrap_err(),
            format!("2 channels for user {us}; held by: ids[11] 60 ids[12] 40")
        );
        let _third = take(us + 8, 14, 1).unwrap();
        assert!(take(us + 9, 15, 1).unwrap_err().starts_with("3 channels; held by:"));
        first.lend(None);
        drop(first);
        take(us, 13, 60).unwrap();
    }

    #[test]
    fn memory_of_another_users_process_counts_until_it_ends() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("cat");
        let quotas = Quotas::new(Quota { bytes_per_user: 100, ..Quota::default() });
        let uid = rustix::process::geteuid().as_raw() + 7;
        let (pid, us) = (child.id(), std::process::id());
        let take = |pid, bytes| {
            let charge = quotas.take(&Credentials { pid, uid, gid: 0 }, "ids", bytes, Instant::now())?;
            charge.lend(None);
            Ok::<_, String>(charge)
        };
        // Repeatedly, never more than the limit at a time.
        for _ in 0..3 {
            drop(take(pid, 20).unwrap());
        }
        let live = take(us, 40).unwrap();
        assert_eq!(
            take(us, 1).unwrap_err(),
            format!(
                "100 bytes for user {uid}, 1 more requested; held by: ids[{us}] 40; of channels that have ended, while a \
                 process has it: ids[{pid}] 60"
            )
        );
        // Nothing was handed over, so nothing is kept.
        drop(child.stdin.take());
        child.wait().unwrap();
        drop(quotas.take(&Credentials { pid: us, uid, gid: 0 }, "ids", 60, Instant::now()).unwrap());
        let more = take(us, 60).unwrap();
        assert!(take(us, 1).is_err());
        drop((live, more));
        // This process has not ended.
        assert!(take(us, 1).is_err());
    }

    #[test]
    fn memory_of_a_process_with_an_invisible_end_counts_for_an_hour() {
        let quotas = Quotas::new(Quota { bytes_per_user: 100, ..Quota::default() });
        let uid = rustix::process::geteuid().as_raw() + 7;
        let outside = Credentials { pid: 0, uid, gid: 0 };
        for _ in 0..2 {
            let charge = quotas.take(&outside, "ids", 50, Instant::now()).unwrap();
            charge.lend(None);
        }
        assert!(quotas.take(&outside, "ids", 1, Instant::now()).is_err());
        let now = Instant::now();
        let left = |later| {
            let mut book = quotas.lock();
            book.forget(uid, now + later);
            book.bytes_of(uid)
        };
        assert_eq!((left(UNSEEN - Duration::from_secs(1)), left(UNSEEN + TOGETHER)), (100, 0));
    }

    #[test]
    fn new_channels_do_not_extend_the_time_of_old_memory() {
        let quotas = Quotas::new(Quota { channels_per_user: 1, attach_burst: 120, ..Quota::default() });
        let (uid, begin) = (rustix::process::geteuid().as_raw() + 7, Instant::now());
        let book = || quotas.lock();
        // More iterations than the maximum number of channels: no charge remains with an ended channel.
        for n in 0..120 {
            let charge = quotas.take(&Credentials { pid: 0, uid, gid: 0 }, "ids", 10, begin).unwrap();
            charge.lend(None);
            book().end(charge.number, begin + n * Duration::from_secs(10));
        }
        assert!(book().kept.len() <= 20);
        let left = |later: Duration| {
            book().forget(uid, begin + later);
            book().bytes_of(uid)
        };
        assert_eq!(left(UNSEEN - Duration::from_secs(1)), 1200);
        // Seven go together each time.
        assert_eq!(left(UNSEEN + Duration::from_secs(600)), 640);
        assert_eq!(left(UNSEEN + Duration::from_secs(1300)), 0);
    }

    #[test]
    fn memory_never_sent_or_of_a_dead_process_does_not_count() {
        let mut child = Command::new("true").spawn().expect("true");
        child.wait().unwrap();
        let quotas = Quotas::new(Quota::default());
        let uid = rustix::process::geteuid().as_raw() + 7;
        let peer = |pid| Credentials { pid, uid, gid: 0 };
        let charge = quotas.take(&peer(child.id()), "ids", 50, Instant::now()).unwrap();
        charge.lend(None);
        drop(charge);
        assert_eq!(quotas.lock().bytes_of(uid), 0);

        let (ours, theirs) = sys::pair().unwrap();
        // Not by a drop: a child that another test has forked holds a copy until it calls execve(2).
        rustix::net::shutdown(&theirs, rustix::net::Shutdown::Both).unwrap();
        let peer = peer(0);
        let charge = quotas.take(&peer, "ids", 50, Instant::now()).unwrap();
        let ours = Reaper::shared().wrap(PeerKey::User(uid), ours);
        open(&mock::config(), &ours, peer, &mock::hello(), charge).unwrap_err();
        assert_eq!(quotas.lock().bytes_of(uid), 0);
    }

    #[test]
    fn memory_that_was_passed_on_counts_until_its_last_holder_is_gone() {
        let uid = rustix::process::geteuid().as_raw() + 7;
        let config = mock::config();
        let bytes = config.bytes_per_client();
        let quotas = Quotas::new(Quota { bytes_per_user: 2 * bytes, ..Quota::default() });
        let reaper = Reaper::new(Limits::default());
        let now = Instant::now();
        // A process that has attached, has passed its descriptors on to this one, and has exited.
        let mut child = Command::new("true").spawn().expect("true");
        child.wait().unwrap();
        let peer = Credentials { pid: child.id(), uid, gid: 0 };
        let attach = || {
            let charge = quotas.take(&peer, "ids", bytes, now)?;
            let (ours, theirs) = sys::pair().unwrap();
            let ours = reaper.wrap(PeerKey::User(uid), ours);
            let channel = open(&config, &ours, peer, &mock::hello(), charge).expect("a channel");
            drop(ours);
            drop(channel);
            while reaper.stats().pending > 0 {
                std::thread::yield_now();
            }
            Ok::<_, String>(receive(theirs, std::path::Path::new("mock"), Fences::Both).expect("attached"))
        };
        let held: Vec<_> = (0..2).map(|_| attach().unwrap()).collect();
        assert_eq!(quotas.lock().bytes_of(uid), 2 * bytes);
        let refused = attach().unwrap_err();
        assert!(refused.contains("while a process has it: ids["), "{refused}");
        drop(held);
        let _again = attach().unwrap();
        assert_eq!(quotas.lock().bytes_of(uid), bytes);
    }

    #[test]
    fn a_user_is_barred_after_a_violation_and_after_too_many_attaches() {
        let uid = rustix::process::geteuid().as_raw() + 7;
        let bar = Duration::from_secs(10);
        let quotas = Quotas::new(Quota { attach_burst: 2, bar, ..Quota::default() });
        let (peer, now) = (Credentials { pid: 0, uid, gid: 0 }, Instant::now());
        let take = |now| quotas.take(&peer, "ids", 0, now);
        let charge = take(now).unwrap();
        charge.bar();
        assert_eq!(quotas.admit(&peer, now).unwrap_err(), format!("user {uid} is barred for 11 s"));
        let later = now + bar;
        quotas.admit(&peer, later).unwrap();
        let _two = [take(later).unwrap(), take(later).unwrap()];
        let refused = take(later).unwrap_err();
        assert_eq!(refused, format!("user {uid} has no attach left of 2; it regains one per 250 ms"));
        assert!(quotas.admit(&peer, later).is_err());
        quotas.admit(&peer, later + bar).unwrap();
        assert_eq!(quotas.bars(), 2);
        // Root is not barred.
        quotas.bar(&Credentials { pid: 0, uid: 0, gid: 0 }, later);
        assert_eq!(quotas.bars(), 2);
    }
}
