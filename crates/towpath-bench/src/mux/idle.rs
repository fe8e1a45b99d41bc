//! Memory cost of idle connections. The server is a separate process, because its whole memory is measured; its clients are another
//! process.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};

use anyhow::{Context, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::message;
use crate::side::Side;

/// Number of connections. Each process has one end of each, which fits common descriptor limits.
const COUNT: usize = 10_000;

/// Returns the user-space bytes per connection for 10,000 connections that were used and are idle.
pub(crate) fn each() -> Result<f64> {
    let mut server = Side::start(&["mux-idle".to_owned()], &[])?;
    let address = server.line()?;
    let mut clients = Side::start(&["mux-idle-clients".to_owned(), address], &[])?;
    clients.line().context("connecting, with one request per connection")?;
    server.tell("weigh")?;
    let each = server.number()?;
    server.finish()?;
    Ok(each)
}

/// Runs the server and prints its memory.
pub(crate) fn server() -> Result<()> {
    allow_descriptors()?;
    let config = towpath_mux::mux::Config::new(towpath_mux::mux::Order::None);
    let server = towpath_mux::io::Server::new("length=4 be adjust=4".parse()?, config)?;
    let address = server.listen("127.0.0.1:0")?;
    let threads = server.clone();
    let echo = std::thread::spawn(move || {
        threads.serve(1, |message, answer| answer.extend_from_slice(message.bytes()))
    });
    let before = resident()?;
    println!("{address}");
    std::io::stdin().read_line(&mut String::new())?;
    let totals = server.show().totals;
    anyhow::ensure!(totals.attach - totals.unattach == COUNT as u64, "connections are missing");
    println!("{}", resident()?.saturating_sub(before) as f64 / COUNT as f64);
    server.drain(Some(std::time::Duration::ZERO));
    echo.join().expect("it does not panic")?;
    Ok(())
}

/// Runs the clients until the process is killed.
pub(crate) fn clients(address: SocketAddr) -> Result<()> {
    allow_descriptors()?;
    let asked = message(100, 0, false);
    let mut clients = (0..COUNT).map(|_| TcpStream::connect(address)).collect::<Result<Vec<_>, _>>()?;
    for client in &mut clients {
        client.write_all(&asked)?;
        client.read_exact(&mut vec![0; asked.len()])?;
    }
    println!("asked");
    std::io::stdin().read_line(&mut String::new())?;
    Ok(())
}

pub(crate) fn allow_descriptors() -> Result<()> {
    let (maximum, wanted) = (getrlimit(Resource::Nofile).maximum, COUNT as u64 + 100);
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum })
        .with_context(|| format!("{COUNT} connections need {wanted} descriptors in a process"))
}

/// Resident memory of this process in bytes (proc_pid_status(5)).
fn resident() -> Result<usize> {
    let status = std::fs::read_to_string("/proc/self/status").context("reading /proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let kib: usize = line.trim().trim_end_matches(" kB").parse().context("VmRSS")?;
    Ok(kib << 10)
}
