//! The memory and CPU time of this process.

use rustix::time::{ClockId, clock_gettime};
use towpath_metrics::metrics;

metrics! {
    /// Memory and CPU time of the engine's process.
    pub struct ProcessStats in "process" {
        /// Memory of the process in RAM, shared memory with inspectors and workers included.
        pub resident: gauge bytes,
        /// The largest value of the resident memory.
        pub resident_peak: gauge bytes,
        /// Locked memory, such as the umem of AF_XDP ports.
        pub locked: gauge bytes,
        /// CPU time of all threads.
        pub cpu: counter nanoseconds,
        /// Threads of the process.
        pub threads: gauge events,
    }
}

impl ProcessStats {
    /// The present values. Those that the kernel does not report are 0.
    pub fn now() -> Self {
        let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let time = clock_gettime(ClockId::ProcessCPUTime);
        Self { cpu: time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64, ..Self::of_status(&text) }
    }

    /// Reads proc_pid_status(5).
    fn of_status(text: &str) -> Self {
        let field = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            value.split_whitespace().next()?.parse::<u64>().ok()
        };
        let kilobytes = |name| field(name).unwrap_or(0) << 10;
        Self {
            resident: kilobytes("VmRSS"),
            resident_peak: kilobytes("VmHWM"),
            locked: kilobytes("VmLck"),
            cpu: 0,
            threads: field("Threads").unwrap_or(0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_values_are_read() {
        let text =
            "Name:\tVmRSS\nVmHWM:\t    2000 kB\nVmLck:\t       8 kB\nVmRSS:\t    1024 kB\nThreads:\t7\n";
        let expected =
            ProcessStats { resident: 1 << 20, resident_peak: 2_048_000, locked: 8192, cpu: 0, threads: 7 };
        assert_eq!(ProcessStats::of_status(text), expected);
        let now = ProcessStats::now();
        assert!(
            now.resident > 0 && now.resident <= now.resident_peak && now.cpu > 0 && now.threads > 0,
            "{now:?}"
        );
    }
}
