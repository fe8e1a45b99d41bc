//! What connections cost that do nothing, in a process of its own: it looks at all of its memory.

use std::io::{Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::message;
use crate::side::Side;

/// Connections; both ends are in the process.
const COUNT: usize = 10_000;

/// Bytes of user space for each of 10,000 connections that have been used and are idle.
pub(crate) fn each() -> Result<f64> {
    let mut side = Side::start(&["mux-idle".to_owned()], &[])?;
    let each = side.number()?;
    side.finish()?;
    Ok(each)
}

pub(crate) fn side() -> Result<()> {
    // Beyond the hard limit only root may go.
    let (limit, wanted) = (getrlimit(Resource::Nofile), 2 * COUNT as u64 + 500);
    let maximum = limit.maximum.map(|maximum| maximum.max(wanted));
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum })
        .with_context(|| format!("{COUNT} connections need {wanted} descriptors"))?;
    let server = towpath_mux::io::Server::new("length=4 be adjust=4".parse()?, Default::default())?;
    let address = server.listen("127.0.0.1:0")?;
    let threads = server.clone();
    let echo = std::thread::spawn(move || {
        threads.serve(1, |message, answer| answer.extend_from_slice(message.bytes()))
    });
    let asked = message(100, 0, false);
    let mut clients = Vec::with_capacity(COUNT);
    let before = resident()?;
    for _ in 0..COUNT {
        clients.push(TcpStream::connect(address)?);
    }
    for client in &mut clients {
        client.write_all(&asked)?;
        client.read_exact(&mut vec![0; asked.len()])?;
    }
    println!("{}", resident()?.saturating_sub(before) as f64 / COUNT as f64);
    drop(clients);
    server.drain(None);
    echo.join().expect("it does not panic")?;
    Ok(())
}

/// Bytes of this process that are in memory (proc_pid_status(5)).
fn resident() -> Result<usize> {
    let status = std::fs::read_to_string("/proc/self/status").context("reading /proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kib: usize = line.trim().trim_end_matches(" kB").parse().context("VmRSS")?;
    Ok(kib << 10)
}
