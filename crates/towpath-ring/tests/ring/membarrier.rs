//! A client that may not call membarrier(2): both sides execute their own fences, and no wake-up is lost.

use std::process::{Command, Stdio};

use crate::world::{PATIENCE, World, consumer};
use towpath_ring::{Config, Meta, Verdict};

/// Installs a seccomp(2) filter that refuses membarrier(2), number 324 of x86-64, with EPERM, and executes the program that its
/// arguments name. prctl(2): 38 is PR_SET_NO_NEW_PRIVS, 22 is PR_SET_SECCOMP, of which 2 is a filter.
const REFUSE: &str = r#"
import ctypes, os, struct, sys
ops = [(0x20, 0, 0, 0), (0x15, 0, 1, 324), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *op) for op in ops))
filter = struct.pack("=HxxxxxxQ", len(ops), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, ctypes.c_char_p(filter), 0, 0):
    sys.exit(77)
os.execv(sys.argv[1], sys.argv[1:])
"#;

const ROUNDS: u32 = 200;

// The filter is for x86-64.
#[cfg(target_arch = "x86_64")]
#[towpath_testenv::needs("python3")]
#[test]
fn a_client_under_seccomp_sleeps_and_wakes() {
    let mut world = World::new(Config { deadline: None, ..Config::default() });
    let program = std::env::current_exe().expect("our own path");
    let mut child = Command::new("python3")
        .args(["-c", REFUSE])
        .arg(program)
        .args(["--exact", "membarrier::client_sleeps", "--ignored", "--test-threads=1"])
        .env("TOWPATH_SOCKET", world.socket())
        .stdout(Stdio::null())
        .spawn()
        .expect("python3");
    let mut channel = loop {
        if let Some(channel) = world.endpoint.accept().expect("accept") {
            break channel;
        }
        if let Some(status) = child.try_wait().expect("wait") {
            panic!("the client did not attach: {status}; 77: seccomp(2) was refused");
        }
        world.endpoint.wait(Some(PATIENCE.min(std::time::Duration::from_millis(20)))).expect("wait");
    };
    for _ in 0..ROUNDS {
        channel.send(b"wake up", &Meta::default()).expect("room");
        while channel.poll_verdicts(0, |_, _| {}) == 0 {
            channel.wait(Some(PATIENCE)).expect("wait");
            assert!(!channel.is_dead(), "the client is gone");
        }
    }
    drop(channel);
    assert!(child.wait().expect("wait").success());
}

#[test]
#[ignore = "the client of a_client_under_seccomp_sleeps_and_wakes"]
fn client_sleeps() {
    use rustix::thread::{MembarrierCommand, membarrier};
    assert!(membarrier(MembarrierCommand::RegisterGlobalExpedited).is_err(), "the filter is in place");
    let mut queue = consumer();
    let mut received = 0;
    while let Some(frame) = queue.recv().expect("received") {
        received += 1;
        queue.verdict(frame, Verdict::Pass);
    }
    assert_eq!(received, ROUNDS);
    assert!(queue.stats().sleeps > 0);
}
