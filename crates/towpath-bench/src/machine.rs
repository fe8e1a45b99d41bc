//! The machine of a measurement.

use std::fs;

/// Describes the machine: processor, cores, memory, kernel.
pub(crate) fn describe() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let after = |text: &str, key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
        line.trim_start_matches([' ', '\t', ':']).trim().to_owned()
    };
    let (cpu, memory) = (read("/proc/cpuinfo"), read("/proc/meminfo"));
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZeroUsize::get);
    let kilobytes: u64 = after(&memory, "MemTotal").trim_end_matches("kB").trim().parse().unwrap_or_default();
    let virtual_one = if after(&cpu, "flags").split(' ').any(|flag| flag == "hypervisor") {
        "a virtual machine, "
    } else {
        ""
    };
    format!(
        "{virtual_one}{}, {cores} cores, {} GB, Linux {}.",
        after(&cpu, "model name"),
        (kilobytes + 500_000) / 1_000_000,
        // Without the suffix of a distribution or cloud provider.
        read("/proc/sys/kernel/osrelease").trim().split('-').next().unwrap_or_default(),
    )
}
