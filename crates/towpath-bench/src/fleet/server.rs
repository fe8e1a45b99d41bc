//! nats-server(1) with JetStream.

use std::fs;
use std::net::{Ipv4Addr, TcpListener};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::peer::Skipped;
use crate::side::Side;

/// Maximum time for the server to start.
const BEGIN: Duration = Duration::from_secs(20);

/// The server. Ends when it is dropped.
pub(crate) struct Server {
    _side: Side,
    _files: TempDir,
    pub(crate) port: u16,
}

impl Server {
    /// Starts a server on the loopback address of this process, at a port that is free.
    pub(crate) fn start() -> Result<Self> {
        let free =
            TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).context("finding a port")?.local_addr()?.port();
        Self::within(std::process::id(), free)
    }

    /// Starts a server in the network namespace of a process.
    pub(crate) fn within(netns_pid: u32, port: u16) -> Result<Self> {
        if Command::new("nats-server").arg("--version").output().is_err() {
            return Err(Skipped("the program nats-server is not installed".to_owned()).into());
        }
        let files = TempDir::new().context("making a directory")?;
        let config = files.path().join("nats.conf");
        let log = files.path().join("log");
        let text = format!(
            "listen: \"127.0.0.1:{port}\"\nlog_file: {log:?}\njetstream {{ store_dir: {:?} }}\n",
            files.path().join("store")
        );
        fs::write(&config, text)?;
        let words =
            ["within", &netns_pid.to_string(), "--", "nats-server", "--config", &config.to_string_lossy()];
        let side = Side::start(&words.map(str::to_owned), &[])?;
        let begun = Instant::now();
        while !fs::read_to_string(&log).is_ok_and(|log| log.contains("Server is ready")) {
            ensure!(
                begun.elapsed() < BEGIN,
                "nats-server did not start: {}",
                fs::read_to_string(&log).unwrap_or_default()
            );
            thread::sleep(Duration::from_millis(20));
        }
        Ok(Self { _side: side, _files: files, port })
    }
}
