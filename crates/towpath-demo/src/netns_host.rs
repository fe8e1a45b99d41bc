//! A host of the demo: a thread in a network namespace that runs closures there.

use std::env;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread::{self, JoinHandle};

use towpath_port::namespace;

use super::{Failure, doing};

type Job = Box<dyn FnOnce() + Send>;

/// The namespace ends with the thread, and the thread with this value or the process.
#[derive(Debug)]
pub(super) struct NetnsHost {
    tid: i32,
    jobs: mpsc::Sender<Job>,
}

impl NetnsHost {
    /// Creates a host with `lo` up and without IPv6 traffic.
    pub(super) fn new() -> Result<Self, Failure> {
        let (jobs, work) = mpsc::channel::<Job>();
        let (ready, made) = mpsc::channel();
        thread::spawn(move || {
            let tid = namespace::enter_network().map(|()| rustix::thread::gettid().as_raw_nonzero().get());
            // The receiver waits for it.
            let _ = ready.send(tid);
            work.into_iter().for_each(|job| job());
        });
        let tid = made.recv().expect("the thread answers first");
        let host = Self { tid: tid.map_err(doing("a new network namespace"))?, jobs };
        host.run(|| {
            for conf in ["all", "default"] {
                // A kernel without IPv6 lacks this file.
                let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{conf}/disable_ipv6"), "1");
            }
        });
        host.ip("link set lo up")?;
        Ok(host)
    }

    /// The machine itself instead of a namespace.
    pub(super) fn here() -> Self {
        let (jobs, work) = mpsc::channel::<Job>();
        thread::spawn(move || work.into_iter().for_each(|job| job()));
        Self { tid: 0, jobs }
    }

    /// Identifies the namespace for ip(8).
    pub(super) fn tid(&self) -> i32 {
        self.tid
    }

    /// Runs `job` on the host and waits for its result.
    pub(super) fn run<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> R {
        let result = Arc::new(Mutex::new(None));
        // It carries no result: the code of a channel exists once for each type of message.
        let (done, end) = mpsc::channel::<()>();
        let slot = Arc::clone(&result);
        let job = Box::new(move || {
            let result = job();
            *slot.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
            drop(done);
        });
        self.jobs.send(job).expect("the host's thread runs as long as the host is there");
        // The job, or its panic, drops the sender.
        let _ = end.recv();
        let result = result.lock().unwrap_or_else(PoisonError::into_inner).take();
        result.expect("a job of the demo does not panic")
    }

    /// Runs `job` on a new thread of the host.
    pub(super) fn start<R: Send + 'static>(&self, job: impl FnOnce() -> R + Send + 'static) -> JoinHandle<R> {
        // A thread inherits the namespace of the thread that starts it.
        self.run(move || thread::spawn(job))
    }

    /// Runs ip(8) with these commands, one in each line.
    pub(super) fn ip(&self, lines: impl Into<String>) -> Result<(), Failure> {
        let lines = lines.into();
        let (status, said) = self
            .run({
                let lines = lines.clone();
                move || -> std::io::Result<_> {
                    let mut command = Command::new(system_program("ip").unwrap_or_else(|| "ip".into()));
                    command
                        .args(["-batch", "-"])
                        .stdin(Stdio::piped())
                        .stdout(Stdio::null())
                        .stderr(Stdio::piped());
                    let mut child = command.spawn()?;
                    child.stdin.take().expect("it is piped").write_all(lines.as_bytes())?;
                    let output = child.wait_with_output()?;
                    Ok((output.status, String::from_utf8_lossy(&output.stderr).into_owned()))
                }
            })
            .map_err(doing("ip (of iproute2)"))?;
        match status.success() {
            true => Ok(()),
            false => Err(Failure::Broken(format!("ip: {} (of: {})", said.trim(), lines.replace('\n', "; ")))),
        }
    }
}

/// Directories of system programs that a user's PATH may lack.
const SBIN: &str = "/usr/sbin:/sbin:/usr/local/sbin";

/// Finds a system program in PATH or in [`SBIN`].
pub(super) fn system_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let places: Vec<PathBuf> = env::split_paths(&path).chain(env::split_paths(SBIN)).collect();
    places.into_iter().map(|place| place.join(name)).find(|program| program.is_file())
}

#[cfg(test)]
mod tests {
    use super::system_program;

    #[test]
    fn a_program_is_found_or_not() {
        assert_eq!(system_program("sh").and_then(|sh| Some(sh.file_name()?.to_owned())), Some("sh".into()));
        assert_eq!(system_program("towpath-is-no-program-of-the-system"), None);
    }
}
