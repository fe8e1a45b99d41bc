//! The pump: one thread per handle that moves packets from the rings to the program's socket.
//!
//! It sleeps until a ring's doorbell rings, a call changes a queue, or an engine that is gone is to be tried again. While the program's
//! receive buffer is full, it waits, and packets wait in the ring.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;

use crate::message::{DATAGRAM, Datagrams};
use crate::queue::Queue;
use crate::socket::{Sender, Sent};
use crate::{fork, lock};

/// What the pump and the calls of the program share.
#[derive(Debug)]
pub(crate) struct Shared {
    sender: Sender,
    queues: Mutex<Vec<Arc<Queue>>>,
    /// Wakes the pump.
    wake: OwnedFd,
    stop: AtomicBool,
    /// Longest datagram with several messages.
    limit: AtomicUsize,
}

impl Shared {
    pub(crate) fn new(sender: Sender) -> Result<Self, Errno> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self {
            sender,
            queues: Mutex::default(),
            wake,
            stop: AtomicBool::new(false),
            limit: AtomicUsize::new(DATAGRAM),
        })
    }

    pub(crate) fn wake(&self) {
        // A full counter wakes, too.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Makes later datagrams no longer than `limit`, and sends messages again.
    pub(crate) fn limit(&self, limit: usize) {
        // Relaxed: a number that orders nothing.
        self.limit.fetch_min(limit, Ordering::Relaxed);
        self.wake();
    }

    /// Ends the pump.
    pub(crate) fn stop(&self) {
        // Relaxed: the eventfd orders it, and a pump that sends looks again in time.
        self.stop.store(true, Ordering::Relaxed);
        self.wake();
    }

    fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, queue: Arc<Queue>) {
        lock(&self.queues).push(queue);
        self.wake();
    }

    pub(crate) fn remove(&self, queue: &Arc<Queue>) {
        lock(&self.queues).retain(|other| !Arc::ptr_eq(other, queue));
        self.wake();
    }

    /// The program's queue `number`.
    pub(crate) fn queue(&self, number: u16) -> Option<Arc<Queue>> {
        lock(&self.queues).iter().find(|queue| queue.number == number).cloned()
    }

    /// The process that attached the queues has ended.
    pub(crate) fn forget_engine(&self) {
        for queue in self.queues() {
            queue.forget_engine();
        }
    }

    fn queues(&self) -> Vec<Arc<Queue>> {
        lock(&self.queues).clone()
    }
}

/// Starts the pump.
pub(crate) fn start(shared: Arc<Shared>) -> Result<(), Errno> {
    fork::add(&shared);
    spawn(move || run(&shared))
}

/// Starts a thread of the library. It gets no signals.
pub(crate) fn spawn(run: impl FnOnce() + Send + 'static) -> Result<(), Errno> {
    let restore = block_signals();
    let started = std::thread::Builder::new().name("towpath-nfqueue".into()).spawn(run);
    set_signals(&restore);
    started.map(drop).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::AGAIN))
}

fn run(shared: &Shared) {
    let mut datagrams = Datagrams::default();
    let mut queues = shared.queues();
    while !shared.is_stopped() {
        let mut received = false;
        for queue in &queues {
            let working = fork::working();
            received |= queue.receive(&mut datagrams);
            drop(working);
            if !send(shared, &mut datagrams) {
                return;
            }
        }
        if !received {
            sleep(shared, &queues);
            let _working = fork::working();
            queues = shared.queues();
        }
    }
}

/// Sends the datagrams; waits while the program's receive buffer is full. Returns false at the end.
fn send(shared: &Shared, datagrams: &mut Datagrams) -> bool {
    if datagrams.is_empty() {
        return true;
    }
    for datagram in datagrams.iter() {
        loop {
            match shared.sender.send(datagram) {
                Sent::Yes => break,
                Sent::Full if shared.is_stopped() => return false,
                Sent::Full => {}
                Sent::Closed => return false,
            }
        }
    }
    datagrams.clear(shared.limit.load(Ordering::Relaxed));
    true
}

fn sleep(shared: &Shared, queues: &[Arc<Queue>]) {
    let due = queues.iter().filter_map(|queue| queue.attach_again()).min();
    let working = fork::working();
    let mut armed = Vec::with_capacity(queues.len());
    let mut ready = false;
    for queue in queues {
        match queue.arm() {
            Ok(descriptor) => armed.extend(descriptor),
            Err(()) => ready = true,
        }
    }
    drop(working);
    if !ready {
        let mut descriptors = vec![PollFd::new(&shared.wake, PollFlags::IN)];
        descriptors.extend(armed.iter().map(|doorbell| PollFd::new(&**doorbell, PollFlags::IN)));
        let left = due.map(|due| due.saturating_duration_since(Instant::now()));
        let timeout = left.and_then(|left| Timespec::try_from(left).ok());
        // An error is EINTR, or the lack of memory: the rings are looked at again.
        let _ = poll(&mut descriptors, timeout.as_ref());
        let mut counter = [0; 8];
        let _ = rustix::io::read(shared.wake.as_fd(), &mut counter);
    }
    let _working = fork::working();
    for queue in queues {
        queue.disarm();
    }
}

/// Blocks all signals in this thread, so that those of the program run in its own threads. Returns the signals that were blocked.
fn block_signals() -> libc::sigset_t {
    let (mut all, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
    // SAFETY: room for a set.
    unsafe { libc::sigfillset(all.as_mut_ptr()) };
    // SAFETY: `all` was just initialized, and there is room for the old set.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), before.as_mut_ptr()) };
    // SAFETY: pthread_sigmask with valid arguments does not fail, and initializes it.
    unsafe { before.assume_init() }
}

fn set_signals(mask: &libc::sigset_t) {
    // SAFETY: a set that pthread_sigmask returned.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, mask, std::ptr::null_mut()) };
}
