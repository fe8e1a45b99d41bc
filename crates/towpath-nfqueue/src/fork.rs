//! Programs that fork after they have created a queue, such as daemons that leave their terminal.
//!
//! The child of fork(2) has the program's sockets, but no pump: threads end with the process that they belong to. A thread in the child
//! waits until the process of the pumps has ended. It then starts them again, and the queues attach as after a restart of the engine. A child
//! that ends or executes another program before, as most do, changes nothing.

use std::cell::Cell;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, Once, Weak};
use std::thread::sleep;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, getpid, pidfd_open};

use crate::lock;
use crate::pump::{self, Shared};

/// Time for which a child exists before it takes over: the first child of a daemon only forks again.
const INTERMEDIATE: Duration = Duration::from_millis(50);
/// Interval at which a process is looked at where pidfd_open(2) is not permitted.
const LOOK: Duration = Duration::from_millis(20);

/// Held by a pump while it holds locks of a queue. A fork waits for it: no thread of the child could release them.
static WORK: Mutex<()> = Mutex::new(());
/// Those that have a pump.
static PUMPED: Mutex<Vec<Weak<Shared>>> = Mutex::new(Vec::new());
/// The process of the pumps.
static OWNER: AtomicI32 = AtomicI32::new(0);

type Guards = (MutexGuard<'static, ()>, MutexGuard<'static, Vec<Weak<Shared>>>);

thread_local! {
    /// The locks, during a fork of this thread.
    static FORKING: Cell<Option<Guards>> = const { Cell::new(None) };
}

/// A pump works with queues until the guard is dropped.
pub(crate) fn working() -> MutexGuard<'static, ()> {
    lock(&WORK)
}

/// A pump starts.
pub(crate) fn add(shared: &Arc<Shared>) {
    static HANDLERS: Once = Once::new();
    HANDLERS.call_once(|| {
        // SAFETY: functions of this library, which is never unloaded: its pumps run in it. Without memory (ENOMEM), children get no pump.
        unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
    });
    let shared = Arc::downgrade(shared);
    let mut pumped = lock(&PUMPED);
    // After a fork, the same pumps start again.
    pumped.retain(|other| other.strong_count() > 0 && !other.ptr_eq(&shared));
    pumped.push(shared);
    // Relaxed: read by the thread that forks, under the lock.
    OWNER.store(getpid().as_raw_pid(), Ordering::Relaxed);
}

extern "C" fn before() {
    FORKING.set(Some((lock(&WORK), lock(&PUMPED))));
}

extern "C" fn in_parent() {
    FORKING.take();
}

extern "C" fn in_child() {
    let Some((work, pumped)) = FORKING.take() else { return };
    let of_pumps: Vec<_> = pumped.iter().filter_map(Weak::upgrade).collect();
    drop((work, pumped));
    let owner = OWNER.load(Ordering::Relaxed);
    if let Some(owner) = Pid::from_raw(owner)
        && !of_pumps.is_empty()
    {
        // Without a thread, the child has no packets.
        let _ = pump::spawn(move || take_over(owner, of_pumps));
    }
}

/// Waits for the end of the pumps' process, and starts them in this one.
fn take_over(owner: Pid, of_pumps: Vec<Arc<Shared>>) {
    match pidfd_open(owner, PidfdFlags::empty()) {
        Ok(process) => while poll(&mut [PollFd::new(&process, PollFlags::IN)], None) == Err(Errno::INTR) {},
        Err(Errno::SRCH) => {}
        Err(_) => {
            while rustix::process::test_kill_process(owner) != Err(Errno::SRCH) {
                sleep(LOOK);
            }
        }
    }
    sleep(INTERMEDIATE);
    for shared in of_pumps {
        shared.forget_engine();
        // Without a thread, the program has no packets of these queues.
        let _ = pump::start(shared);
    }
}
