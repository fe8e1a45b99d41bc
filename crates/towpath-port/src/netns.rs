//! Network namespaces for tests. A namespace has separate interfaces and ends with its thread.

use std::process::Command;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::{Error, sys};

/// Runs `test` on a new thread in a new network namespace, with `lo` up and without automatic IPv6 traffic.
///
/// A test that calls it states `#[towpath_testenv::needs(netns)]`.
///
/// # Panics
/// Panics if `test` does, without the privilege to create a network namespace, and without the program `ip`.
pub fn within(test: impl FnOnce() + Send) {
    let run = || {
        sys::unshare_network().unwrap_or_else(|error| panic!("a new network namespace needs root: {error}"));
        prepare();
        test();
    };
    let result = thread::scope(|scope| scope.spawn(run).join());
    if let Err(panic) = result {
        std::panic::resume_unwind(panic);
    }
}

fn prepare() {
    for conf in ["all", "default"] {
        // A kernel without IPv6 has no such file.
        let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{conf}/disable_ipv6"), "1");
    }
    ip("link set lo up");
}

/// A simulated host: a thread in a new network namespace that runs closures. It ends on drop.
#[derive(Debug)]
pub struct Host {
    tid: i32,
    jobs: Option<mpsc::Sender<Job>>,
    thread: Option<thread::JoinHandle<()>>,
}

type Job = Box<dyn FnOnce() + Send>;

impl Host {
    /// Creates a host with `lo` up and without automatic IPv6 traffic. Call it inside [`within`].
    ///
    /// # Panics
    /// Without the privilege to create a network namespace.
    #[expect(clippy::new_without_default, reason = "it is no plain value")]
    pub fn new() -> Self {
        let (jobs, work) = mpsc::channel::<Job>();
        let (ready, tid) = mpsc::channel();
        let thread = thread::spawn(move || {
            sys::unshare_network().expect("a new network namespace");
            prepare();
            ready.send(rustix::thread::gettid().as_raw_nonzero().get()).expect("the test waits");
            work.into_iter().for_each(|job| job());
        });
        let tid = tid.recv().expect("the host starts");
        Self { tid, jobs: Some(jobs), thread: Some(thread) }
    }

    /// The thread's id, which names the namespace for ip(8).
    pub fn tid(&self) -> i32 {
        self.tid
    }

    /// Runs `job` on the host and returns its result.
    ///
    /// # Panics
    /// When `job` does.
    pub fn run<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> R {
        self.start(job).recv().expect("the job returns")
    }

    /// Starts `job` on the host without waiting.
    ///
    /// # Panics
    /// When an earlier job did.
    pub fn start<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> mpsc::Receiver<R> {
        let (done, result) = mpsc::channel();
        let job = Box::new(move || {
            // The result of a started job is discarded.
            let _ = done.send(job());
        });
        self.jobs.as_ref().expect("it has not ended").send(job).expect("the host runs");
        result
    }

    /// Moves an interface of the calling thread's namespace to the host, assigns `address` (with a prefix length), and waits until
    /// the interface is up, so that frames can be sent at once, from the other end of a veth pair too, which must be up.
    ///
    /// # Panics
    /// When ip(8) fails.
    pub fn take(&self, interface: &str, address: &str) {
        // `8: va@vb: <BROADCAST,...`. An end in another namespace has no name here: `8: va@if9: <BROADCAST,...`.
        let name = described(interface).split(':').nth(1).unwrap_or_default().to_owned();
        let peer = name.split_once('@').map(|(_, peer)| peer).filter(|peer| exists(peer));
        ip(&format!("link set {interface} netns {}", self.tid));
        let (interface, address) = (interface.to_owned(), address.to_owned());
        self.run(move || {
            ip(&format!("addr add {address} dev {interface}"));
            ip(&format!("link set {interface} up"));
            // The kernel reports the state of a TUN device as unknown.
            until(|| {
                [" state UP ", " state UNKNOWN "].iter().any(|state| described(&interface).contains(state))
            });
        });
        // It has lost its link during the move.
        peer.into_iter().for_each(settled);
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.jobs = None;
        // A panic of a job was reported to its caller.
        self.thread.take().map(thread::JoinHandle::join);
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
/// When the program fails or does not exist.
pub fn run(program: &str, arguments: &str) {
    let output = Command::new(program).args(arguments.split_whitespace()).output().expect(program);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments}: {said}");
}

/// A veth pair, up and [`settled`].
pub fn veth(one: &str, other: &str) {
    ip(&format!("link add {one} type veth peer name {other}"));
    ip(&format!("link set {one} up"));
    ip(&format!("link set {other} up"));
    [one, other].into_iter().for_each(settled);
}

/// Waits until the kernel reports the link of this veth interface as up, in the namespace of the calling thread. This may take a
/// second after the other end was set up. Until then, sent frames may be dropped, and the state of the link changes once more.
///
/// # Panics
/// When ip(8) fails; as [`until`].
pub fn settled(interface: &str) {
    until(|| described(interface).contains(" state UP "));
}

/// Whether the calling thread's namespace has this interface.
fn exists(interface: &str) -> bool {
    let output = Command::new("ip").args(["link", "show", "dev", interface]).output().expect("ip");
    output.status.success()
}

/// Output of ip(8) for an interface.
fn described(interface: &str) -> String {
    let output = Command::new("ip").args(["-o", "link", "show", "dev", interface]).output().expect("ip");
    assert!(output.status.success(), "{interface}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Opens a port, and retries while its interface is in use: a child process that another test has forked holds copies of this
/// process's descriptors until it calls execve(2).
///
/// # Errors
/// Other errors of `open`.
///
/// # Panics
/// When it is in use for more than a minute.
pub fn patiently<P>(mut open: impl FnMut() -> Result<P, Error>) -> Result<P, Error> {
    let mut result = open();
    until(|| {
        if matches!(result, Err(Error::InUse { .. })) {
            result = open();
        }
        !matches!(result, Err(Error::InUse { .. }))
    });
    result
}

/// Binds a socket, and retries while its address is in use: it may have been used before, and a child process that another test has forked
/// holds copies of this process's descriptors until it calls execve(2).
///
/// # Panics
/// When `bind` fails for another reason, or the address is in use for more than a minute.
pub fn bound<S>(mut bind: impl FnMut() -> std::io::Result<S>) -> S {
    let mut socket = None;
    until(|| match bind() {
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => false,
        result => {
            socket = Some(result.expect("a socket"));
            true
        }
    });
    socket.expect("it is bound")
}

/// Polls until `met` returns true. The kernel reports changes of links asynchronously.
///
/// # Panics
/// When `met` is false for more than a minute.
pub fn until(mut met: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !met() {
        assert!(begun.elapsed() < Duration::from_secs(60), "not within a minute");
        // Yield the processor to the processes that are waited for.
        thread::sleep(Duration::from_millis(2));
    }
}
