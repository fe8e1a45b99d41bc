//! `towpath mux` with workers in processes on rings; the workers run this program.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::subject::replay::binary;

/// Guard of a running `towpath mux`; stops it on drop.
pub(crate) struct Front {
    process: Child,
}

impl Drop for Front {
    fn drop(&mut self) {
        // SIGTERM drains the server. Both calls fail only if the process has ended already.
        let _ = kill_process(Pid::from_child(&self.process), Signal::TERM);
        let _ = self.process.wait();
    }
}

/// Starts `towpath mux` with `workers` echo workers and returns its address.
pub(crate) fn start(workers: usize) -> Result<(Front, SocketAddr)> {
    let own = std::env::current_exe().context("finding this program")?;
    let process = Command::new(binary()?)
        .args(["mux", "127.0.0.1:0", "--framing", "length=4 be adjust=4", "--drain", "1", "--workers"])
        .arg(workers.to_string())
        .arg("--worker")
        .arg(format!("{} side mux-worker", own.display()))
        .stderr(Stdio::piped())
        .spawn()
        .context("starting towpath mux")?;
    let mut front = Front { process };
    let mut lines = BufReader::new(front.process.stderr.take().context("no standard error")?).lines();
    let mut address = None;
    while let Some(line) = lines.next().transpose()? {
        if let Some(text) = line.strip_prefix("listening on ") {
            address = Some(text.parse().with_context(|| format!("parsing the address {text}"))?);
        }
        if let (Some(address), true) = (address, line.ends_with("attached")) {
            // Reads and discards further output.
            std::thread::spawn(move || lines.count());
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
