//! Network namespaces for tests: each has its own interfaces, and goes with the thread that made it.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::sys;

/// Runs `test` on a thread of its own in a new network namespace, with `lo` up and without IPv6's own traffic.
///
/// Without the privilege or the program `ip` it says so in one line, and does nothing.
///
/// # Panics
/// When `test` does.
pub fn within(test: impl FnOnce() + Send) {
    let run = || {
        if let Err(error) = sys::unshare_network() {
            println!("skipped: no new network namespace ({error})");
            return;
        }
        if Command::new("ip").arg("-V").output().is_err() {
            println!("skipped: no program ip (iproute2)");
            return;
        }
        for conf in ["all", "default"] {
            // A kernel without IPv6 has no such file.
            let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{conf}/disable_ipv6"), "1");
        }
        ip("link set lo up");
        test();
    };
    let result = thread::scope(|scope| scope.spawn(run).join());
    if let Err(panic) = result {
        std::panic::resume_unwind(panic);
    }
}

/// Runs ip(8) in the calling thread's namespace.
///
/// # Panics
/// When it fails.
pub fn ip(arguments: &str) {
    run("ip", arguments);
}

/// Runs a program in the calling thread's namespace; its arguments are separated by spaces.
///
/// # Panics
/// When it fails, or is not there.
pub fn run(program: &str, arguments: &str) {
    let output = Command::new(program).args(arguments.split_whitespace()).output().expect(program);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments}: {said}");
}

/// A veth pair, up.
pub fn veth(one: &str, other: &str) {
    ip(&format!("link add {one} type veth peer name {other}"));
    ip(&format!("link set {one} up"));
    ip(&format!("link set {other} up"));
}

/// Looks until `met`: the kernel tells of a changed link when it gets to it.
///
/// # Panics
/// When that takes more than ten seconds.
pub fn until(mut met: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !met() {
        assert!(begun.elapsed() < Duration::from_secs(10), "it never was");
        thread::yield_now();
    }
}
