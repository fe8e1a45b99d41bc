//! CPU pinning.

use anyhow::{Context, Result, bail};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

/// One CPU for the engine or generator, and one for its peer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Cpus {
    pub(crate) engine: usize,
    pub(crate) consumer: usize,
}

impl Cpus {
    /// Returns the first two CPUs that this process may use.
    pub(crate) fn find() -> Result<Self> {
        let allowed = sched_getaffinity(None).context("reading the CPUs that this process may use")?;
        let mut cpus = (0..CpuSet::MAX_CPU).filter(|&cpu| allowed.is_set(cpu));
        match (cpus.next(), cpus.next()) {
            (Some(engine), Some(consumer)) => Ok(Self { engine, consumer }),
            _ => bail!("two CPUs are required; this process may use only one (see taskset -p $$)"),
        }
    }
}

/// Pins the calling thread to `cpu`.
pub(crate) fn to(cpu: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu);
    sched_setaffinity(None, &set).with_context(|| format!("pinning to CPU {cpu}"))
}
