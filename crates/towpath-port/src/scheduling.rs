//! How the kernel schedules a thread that receives packets.

use std::io;
use std::time::Duration;

use crate::sys;

/// The kernel's shortest time slice (include/uapi/linux/sched/types.h).
pub const SHORTEST_SLICE: Duration = Duration::from_micros(100);

/// Asks for short time slices: after a wake-up, the calling thread preempts threads with longer slices (Linux 6.12, EEVDF;
/// older kernels ignore it). Its share of the CPU does not change. Needs no privilege. Threads and processes that it starts do not
/// inherit the slice.
///
/// The kernel clamps `slice` to 100 us to 100 ms. Does nothing if the thread has another policy than `SCHED_OTHER` and `SCHED_BATCH`
/// (sched(7)).
///
/// ```
/// use towpath_port::scheduling::{SHORTEST_SLICE, set_slice};
///
/// set_slice(SHORTEST_SLICE).unwrap();
/// ```
///
/// # Errors
/// sched_getattr(2) or sched_setattr(2) failed: a sandbox forbids them.
pub fn set_slice(slice: Duration) -> io::Result<()> {
    let mut attributes = sys::scheduling()?;
    let policies = [libc::SCHED_OTHER, libc::SCHED_BATCH];
    if !policies.contains(&attributes.sched_policy.cast_signed()) {
        return Ok(());
    }
    attributes.sched_flags |= libc::SCHED_FLAG_RESET_ON_FORK as u64;
    attributes.sched_runtime = u64::try_from(slice.as_nanos()).unwrap_or(u64::MAX);
    sys::set_scheduling(&attributes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_do_not_inherit_the_slice() {
        std::thread::spawn(|| {
            let before = sys::scheduling().unwrap();
            set_slice(Duration::from_millis(1)).unwrap();
            let after = sys::scheduling().unwrap();
            // Before Linux 6.12, the kernel reports no slice.
            if before.sched_runtime != 0 {
                assert_eq!(after.sched_runtime, 1_000_000);
            }
            assert_eq!((after.sched_policy, after.sched_nice), (before.sched_policy, before.sched_nice));
            let child = std::thread::spawn(|| sys::scheduling().unwrap()).join().unwrap();
            assert_eq!(child.sched_runtime, before.sched_runtime);
        })
        .join()
        .unwrap();
    }
}
