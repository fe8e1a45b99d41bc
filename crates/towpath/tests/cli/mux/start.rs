//! Startup of `towpath mux`, and its errors.

use std::net::{Ipv4Addr, SocketAddrV4, TcpListener};
use std::process::Stdio;
use std::time::Duration;

use rustix::net::{AddressFamily, SocketType};
use rustix::process::{Pid, Signal, test_kill_process};

use super::daemon::{FRAMING, Mux, ask, example, kill, split, towpath};

#[test]
fn a_mux_can_be_ended_while_its_worker_starts() {
    let directory = tempfile::tempdir().expect("a directory");
    let (pid_file, sockets) = (directory.path().join("pid"), directory.path().join("sockets"));
    std::fs::create_dir(&sockets).expect("a directory");
    let worker = format!("sh -c 'echo $$ > {}; exec sleep 1000'", pid_file.display());
    let mux = towpath()
        .args(["mux", "127.0.0.1:0", "--framing", "line", "--workers", "1", "--worker", &worker])
        .env("TMPDIR", &sockets)
        .stderr(Stdio::piped())
        .spawn()
        .expect("towpath starts");
    let started = || std::fs::read_to_string(&pid_file).ok().filter(|pid| pid.ends_with('\n'));
    let pid = loop {
        if let Some(pid) = started() {
            break pid.trim().parse().expect("a process");
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    kill(mux.id(), Signal::TERM);
    let output = mux.wait_with_output().expect("its end");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{errors}");
    assert!(errors.contains("told to end before all workers had attached"), "{errors}");
    assert!(test_kill_process(Pid::from_raw(pid).expect("a process")).is_err(), "the worker is ended");
    assert_eq!(std::fs::read_dir(&sockets).expect("a directory").count(), 0);
}

#[test]
fn startup_errors_are_one_line() {
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let taken = taken.local_addr().expect("an address").to_string();
    let worker = example("mux_worker");
    let directory = tempfile::tempdir().expect("a directory");
    let file = directory.path().join("file");
    std::fs::write(&file, b"").expect("a file");
    let file = format!("unix:{}", file.display());
    let any = "127.0.0.1:0";
    let rows: [(&[&str], i32, &str); 16] = [
        (&[&taken, "--framing", "line", "--worker", &worker], 7, "another program listens there"),
        (&[&file, "--framing", "line", "--worker", &worker], 7, "the path exists and is not a socket"),
        (
            &[":7007", "--framing", "line", "--worker", &worker],
            64,
            "the host is missing; an address is HOST:PORT: write 0.0.0.0",
        ),
        (&["nowhere", "--framing", "line", "--worker", &worker], 64, "an address is HOST:PORT or unix:PATH"),
        (&["[fe80::1]:0", "--framing", "line", "--worker", &worker], 7, "cannot listen on [fe80::1]:0"),
        (&[any, "--framing", "thrift-frame", "--worker", &worker], 64, "did you mean \"thrift-framed\"?"),
        (&[any, "--framing", "line", "--worker", "/nowhere/worker"], 4, "cannot start `/nowhere/worker`"),
        (&[any, "--framing", "line", "--worker", "true"], 4, "ended before it attached (exit status: 0)"),
        (&[any, "--framing", "line", "--worker", "'"], 64, "missing closing quote"),
        (
            &[any, "--framing", "line", "--worker", &worker, "--workers", "65"],
            64,
            "there are 1 to 64 workers",
        ),
        (
            &[any, "--framing", "line", "--worker", &worker, "--in-flight", "0"],
            64,
            "it is a number of at least 1",
        ),
        (&["--framing", "line", "--worker", &worker], 64, "<ADDR>"),
        (
            &[any, "--framing", "line", "--worker", &worker, "--tls", "a,b"],
            64,
            "a: cannot be read: No such file",
        ),
        (&[any, "--framing", "line", "--worker", &worker, "--tls", "a"], 64, "CERT,KEY"),
        (
            &["--framing", "line", "--worker", &worker, "--connected", "here"],
            64,
            "a peer is HOST:PORT or unix:PATH",
        ),
        (
            &["--framing", "line", "--worker", &worker, "--connected", "127.0.0.1:http"],
            64,
            "a peer is HOST:PORT or unix:PATH",
        ),
    ];
    for (args, code, text) in rows {
        let output = towpath().arg("mux").args(args).output().expect("towpath starts");
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{args:?}: {errors}");
        assert!(errors.contains(text), "{args:?}: {errors}");
    }
}

#[test]
fn peer_and_order_errors_precede_startup() {
    let rows: [(&[&str], &str); 5] = [
        (&["--connected", "foo"], "--connected foo: a peer is HOST:PORT or unix:PATH"),
        (&["--connected", "foo:99999"], "--connected foo:99999: a peer is HOST:PORT or unix:PATH"),
        (&["--connected", "127.0.0.1:1", "--trust", "/nowhere/at-all.pem"], "--trust: "),
        (&["--rebalance", "1"], "--rebalance moves connections of --order sticky; add --order sticky"),
        (&["--order", "key"], "it gives no key; write key=OFFSET:LENGTH or key=WORD after it"),
    ];
    for (more, expected) in rows {
        let worker = example("mux_worker");
        let mut command = towpath();
        command.args(["mux", "127.0.0.1:0", "--framing", FRAMING, "--worker", &worker]).args(more);
        let output = command.output().expect("towpath starts");
        let errors = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{errors}");
        assert!(errors.contains(expected) && !errors.contains("listening on"), "{errors}");
    }
}

#[test]
fn a_failed_start_leaves_no_socket() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("mux.sock");
    let address = format!("unix:{}", path.display());
    let args = ["mux", &address, "nowhere", "--framing", "line", "--worker", "true"];
    let output = towpath().args(args).output().expect("towpath starts");
    assert_eq!(output.status.code(), Some(64));
    assert!(!path.exists());
}

#[test]
fn a_failed_outbound_connection_is_logged() {
    // The port is bound but not listening, so no other process can use it.
    let taken = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).expect("a socket");
    rustix::net::bind(&taken, &SocketAddrV4::new(Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let peer = rustix::net::getsockname(&taken).expect("an address");
    let peer = SocketAddrV4::try_from(peer).expect("of IPv4").to_string();
    let mut mux = Mux::start(&example("mux_worker"), &["--workers", "1", "--connected", &peer]);
    mux.until(&format!("cannot connect to {peer}: "));
    assert_eq!(mux.finish().0, Some(0));
}

#[test]
fn the_limit_of_open_files_is_raised() {
    let mux = Mux::limited("ulimit -Sn 64", &example("mux_worker"), &["--workers", "1"]);
    let mut clients: Vec<_> = (0..100).map(|_| mux.connect()).collect();
    assert_eq!(split(&ask(clients.last_mut().expect("many"), b"hello")).1, b"hello");
}

#[test]
fn the_help_has_the_delivery_table() {
    let output = towpath().args(["mux", "--help"]).output().expect("towpath starts");
    let text = String::from_utf8(output.stdout).expect("text");
    let (_, table) = text.split_once("\nDelivery:\n").unwrap_or_else(|| panic!("{text}"));
    for line in [
        "  --redeliver 0: at most once",
        "  --order none, key:",
        "      when its worker ends: the connection stays",
    ] {
        assert!(table.lines().any(|found| found == line), "{line}\n{table}");
    }
}
