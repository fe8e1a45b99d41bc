//! The back end io_uring.

use std::io::Read;
use std::net::{TcpListener, TcpStream};
use std::process::Command;

use crate::checked::{IO_URING, PATIENCE, pattern, zerocopy};
use towpath_send::{BackEnd, Options, Sender};

fn permitted() -> bool {
    let disabled = std::fs::read_to_string("/proc/sys/kernel/io_uring_disabled");
    let filtered =
        std::fs::read_to_string("/proc/self/status").is_ok_and(|status| !status.contains("Seccomp:\t0"));
    disabled.is_ok_and(|disabled| disabled.trim() == "0") && !filtered
}

#[test]
fn the_ring_is_used_where_it_is_permitted() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let mut peer = listener.accept().unwrap().0;
    let options = Options { back_end: BackEnd::IoUring, ..zerocopy() };
    let mut sender = Sender::new(stream, options).unwrap();
    assert_eq!(sender.back_end() == BackEnd::IoUring, permitted());
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        peer.read_to_end(&mut all).map(|_| all)
    });
    for n in 0..300 {
        sender.send(pattern(n * 70_000, 70_000)).unwrap();
    }
    let closed = sender.close(PATIENCE).unwrap();
    let counters = &closed.counters;
    assert!(closed.finished && reader.join().unwrap().unwrap() == pattern(0, 300 * 70_000));
    assert_eq!((counters.zerocopy_bytes, counters.tampered), (300 * 70_000, 0));
    assert_eq!(
        (counters.completed, counters.copied),
        (counters.numbers, counters.numbers),
        "loopback copies"
    );
}

/// The tests of `sockets.rs`, `offloads.rs` and `tokio.rs` in a process that selects io_uring.
#[test]
fn the_tests_of_msg_zerocopy_pass() {
    let program = std::env::current_exe().unwrap();
    let words = ["sockets::", "offloads::", "tokio::"];
    let output = Command::new(program).args(words).env(IO_URING, "1").output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        output.status.success() && said.contains(" passed"),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
