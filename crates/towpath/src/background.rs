//! Scheduling of the threads that process no packets and no messages: supervisor, control, dumps and helper threads.

use std::time::Duration;

use towpath_port::scheduling;

use crate::sandbox::{self, Role};

/// Longer than the kernel's default slice (0.7 ms * (1 + log2 of the CPUs), at most 2.8 ms: kernel/sched/fair.c): a woken thread of an
/// inspector, worker or client preempts these threads, as an engine thread does.
const SLICE: Duration = Duration::from_millis(10);

/// Begins a thread of this role that processes no packets: [`begin`], and its system calls.
pub(crate) fn begin_as(role: Role) {
    begin();
    sandbox::enter(role);
}

/// Lets threads with shorter time slices preempt the calling thread when they wake up. Its share of the CPU does not change.
pub(crate) fn begin() {
    if let Err(error) = scheduling::set_slice(SLICE) {
        tracing::debug!("packets may wait for helper threads: no long time slices: {error}");
    }
}
