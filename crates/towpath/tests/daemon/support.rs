//! Shared code of tests of a running engine: `towpath ctl` on its control socket, its log, and waiting for it.

use std::cell::RefCell;
use std::io::Read;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::Value;

/// Time for a condition.
const PATIENCE: Duration = Duration::from_secs(60);
/// The same after the processes that are waited for have ended.
const AFTERWARDS: Duration = Duration::from_secs(10);

thread_local! {
    /// The processes that this thread waits for.
    static WATCHED: RefCell<Vec<Weak<dyn Watched>>> = const { RefCell::new(Vec::new()) };
}

/// A process that a test waits for.
trait Watched {
    /// What it has logged so far.
    fn text(&self) -> String;

    fn has_ended(&self) -> bool;
}

/// Polls until `met` returns true. Fails with the logs of the watched processes ([`Log`], [`LogFile`]) after a minute, and soon after all
/// of them have ended.
pub(crate) fn until(mut met: impl FnMut() -> bool) {
    let (begun, mut ended) = (Instant::now(), None);
    while !met() {
        let watched = watched();
        if ended.is_none() && !watched.is_empty() && watched.iter().all(|process| process.has_ended()) {
            ended = Some(Instant::now());
        }
        let late = begun.elapsed() >= PATIENCE || ended.is_some_and(|ended| ended.elapsed() >= AFTERWARDS);
        assert!(!late, "not within {} s{}", begun.elapsed().as_secs(), logs());
        // Yield the processor to the processes that are waited for.
        thread::sleep(Duration::from_millis(2));
    }
}

/// The logs of the watched processes, for a message.
pub(crate) fn logs() -> String {
    let describe = |process: Arc<dyn Watched>| {
        let state = if process.has_ended() { "has ended" } else { "runs" };
        format!("; the log of a process that {state}:\n{}", process.text())
    };
    watched().into_iter().map(describe).collect()
}

fn watched() -> Vec<Arc<dyn Watched>> {
    WATCHED.with_borrow_mut(|watched| {
        watched.retain(|process| process.strong_count() > 0);
        watched.iter().filter_map(Weak::upgrade).collect()
    })
}

fn watch(process: &Arc<impl Watched + 'static>) {
    let process: Weak<dyn Watched> = Arc::downgrade(process) as Weak<dyn Watched>;
    WATCHED.with_borrow_mut(|watched| watched.push(process));
}

/// What a process and those that it starts have written to standard error so far. Its end is that of all of them.
#[derive(Clone, Debug)]
pub(crate) struct Log(Arc<Mutex<Written>>);

#[derive(Debug, Default)]
struct Written {
    text: String,
    ended: bool,
}

impl Log {
    /// Reads the standard error of a process, which is a pipe. [`until`] of this thread watches the process while the log exists.
    pub(crate) fn of(child: &mut Child) -> Self {
        let mut stderr = child.stderr.take().expect("a pipe");
        let log = Self(Arc::default());
        watch(&log.0);
        // Reads after the log was dropped, too: the process must not wait.
        let written = Arc::downgrade(&log.0);
        thread::spawn(move || {
            let (mut bytes, mut rest) = ([0; 4096], Vec::new());
            loop {
                let read = stderr.read(&mut bytes).unwrap_or(0);
                rest.extend_from_slice(&bytes[..read]);
                let lines = rest.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
                let text: Vec<u8> = rest.drain(..if read == 0 { rest.len() } else { lines }).collect();
                if let Some(written) = written.upgrade() {
                    let mut written = locked(&written);
                    written.text += &String::from_utf8_lossy(&text);
                    written.ended = read == 0;
                }
                if read == 0 {
                    return;
                }
            }
        });
        log
    }

    pub(crate) fn text(&self) -> String {
        locked(&self.0).text.clone()
    }

    /// Forgets the text so far, and returns it.
    pub(crate) fn take(&self) -> String {
        std::mem::take(&mut locked(&self.0).text)
    }

    /// Waits for the end of the processes. Returns the text.
    pub(crate) fn whole(&self) -> String {
        while !locked(&self.0).ended {
            thread::sleep(Duration::from_millis(2));
        }
        self.text()
    }

    /// Waits for a text. Fails when the processes have ended without it.
    pub(crate) fn until(&self, what: &str) {
        until(|| self.has(what));
    }

    /// The next line with this text. It is forgotten, and those before it.
    pub(crate) fn line(&self, what: &str) -> String {
        self.until(what);
        let text = &mut locked(&self.0).text;
        let at = text.find(what).expect("nothing else forgets it");
        let end = text[at..].find('\n').map_or(text.len(), |end| at + end + 1);
        let lines: String = text.drain(..end).collect();
        lines.lines().last().expect("a line").to_owned()
    }

    fn has(&self, what: &str) -> bool {
        let written = locked(&self.0);
        let has = written.text.contains(what);
        assert!(has || !written.ended, "ended without: {what}; the log:\n{}", written.text);
        has
    }
}

fn locked(written: &Mutex<Written>) -> MutexGuard<'_, Written> {
    written.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Watched for Mutex<Written> {
    fn text(&self) -> String {
        locked(self).text.clone()
    }

    fn has_ended(&self) -> bool {
        locked(self).ended
    }
}

/// The same for a process whose standard error is a file.
#[derive(Debug)]
pub(crate) struct LogFile {
    path: PathBuf,
    process: OwnedFd,
}

impl LogFile {
    /// [`until`] of this thread watches the process while the value exists.
    pub(crate) fn of(child: &Child, path: PathBuf) -> Arc<Self> {
        let process = pidfd_open(Pid::from_child(child), PidfdFlags::empty()).unwrap();
        let log = Arc::new(Self { path, process });
        watch(&log);
        log
    }
}

impl Watched for LogFile {
    fn text(&self) -> String {
        std::fs::read_to_string(&self.path).unwrap_or_default()
    }

    fn has_ended(&self) -> bool {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::new(&self.process, PollFlags::IN)], Some(&now)).is_ok_and(|ready| ready > 0)
    }
}

/// An address of this machine at which no other program listens: a host of 127.0.0.0/8 for this process, and a port below those that the
/// kernel chooses. Connections to it come from 127.0.0.1.
pub(crate) fn free() -> SocketAddr {
    static NEXT: AtomicU16 = AtomicU16::new(20_000);
    // A process id has 22 bits at most (proc(5), pid_max).
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    (Ipv4Addr::new(127, 64 + high, middle, low), NEXT.fetch_add(1, Ordering::Relaxed)).into()
}

/// The control socket of an engine.
pub(crate) struct Control {
    socket: PathBuf,
}

impl Control {
    /// The socket of a configuration in `directory` with `socket = "ctl.sock"`.
    pub(crate) fn of(directory: &Path) -> Self {
        Self { socket: directory.join("ctl.sock") }
    }

    /// Output of `towpath ctl` with these words.
    pub(crate) fn ctl(&self, words: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_towpath"))
            .args(["ctl", "--socket", self.socket.to_str().unwrap()])
            .args(words.split_whitespace())
            .output()
            .unwrap()
    }

    /// The same for words with `--json`, which must succeed. Repeated if the engine is too busy.
    pub(crate) fn json(&self, words: &str) -> Value {
        let mut output = self.ctl(words);
        for _ in 0..10 {
            if !String::from_utf8_lossy(&output.stderr).contains("the engine did not answer within") {
                break;
            }
            output = self.ctl(words);
        }
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{words}: {said}{}", logs());
        serde_json::from_slice(&output.stdout).unwrap()
    }
}
