//! `towpath mux` with workers in processes on rings; the workers run this program.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::thread::JoinHandle;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::subject::replay::binary;

/// Guard of a running `towpath mux`; stops it on drop.
pub(crate) struct Front {
    process: Child,
    /// Its further output.
    log: Option<JoinHandle<String>>,
}

impl Front {
    /// Drains the server. Returns its further output, whatever its exit code.
    pub(crate) fn finish(mut self) -> Result<String> {
        kill_process(Pid::from_child(&self.process), Signal::TERM)?;
        self.process.wait()?;
        self.log.take().and_then(|log| log.join().ok()).context("no standard error")
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        // SIGTERM drains the server. The id of a process that has ended may be another's.
        if let Ok(None) = self.process.try_wait() {
            let _ = kill_process(Pid::from_child(&self.process), Signal::TERM);
            let _ = self.process.wait();
        }
    }
}

/// Starts `towpath mux` with `workers` echo workers and returns its address.
pub(crate) fn start(workers: usize) -> Result<(Front, SocketAddr)> {
    start_with(workers, "mux-worker", Duration::from_secs(1))
}

/// Starts it with workers that are the side `role` of this program.
pub(crate) fn start_with(workers: usize, role: &str, drain: Duration) -> Result<(Front, SocketAddr)> {
    let own = std::env::current_exe().context("finding this program")?;
    let process = Command::new(binary()?)
        // The order of the threads that it is compared with.
        .args(["mux", "127.0.0.1:0", "--framing", "length=4 be adjust=4", "--order", "none", "--workers"])
        .arg(workers.to_string())
        .arg("--drain")
        .arg(drain.as_secs_f64().to_string())
        .arg("--worker")
        .arg(format!("{} side {role}", own.display()))
        .stderr(Stdio::piped())
        .spawn()
        .context("starting towpath mux")?;
    let mut front = Front { process, log: None };
    let mut lines = BufReader::new(front.process.stderr.take().context("no standard error")?).lines();
    let mut address = None;
    while let Some(line) = lines.next().transpose()? {
        if let Some(text) = line.strip_prefix("listening on ") {
            address = Some(text.parse().with_context(|| format!("parsing the address {text}"))?);
        }
        if let (Some(address), true) = (address, line.ends_with("attached")) {
            let rest = move || lines.map_while(Result::ok).collect::<Vec<_>>().join("\n");
            front.log = Some(std::thread::spawn(rest));
            return Ok((front, address));
        }
    }
    bail!("towpath mux ended early ({})", front.process.wait()?)
}

/// Runs a worker process.
pub(crate) fn side() -> Result<()> {
    let mut worker = towpath_ring::Worker::attach_env()?.taking(16);
    Ok(worker.serve(|message, answer| answer.extend_from_slice(message.bytes()))?)
}
