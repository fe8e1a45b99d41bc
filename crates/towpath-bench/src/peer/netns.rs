#![allow(unsafe_code)]
//! Two network namespaces joined by a veth pair. They end with the processes that created them.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::process::Command;

use anyhow::{Context, Result, anyhow};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::packet::{DESTINATION, DESTINATION_MAC};
use crate::peer::Skipped;

/// Generator's end of the pair.
pub(crate) const SENDER: &str = "tpb0";
/// Receiver's end of the pair.
pub(crate) const RECEIVER: &str = "tpb1";
/// Maximum MTU of a veth device.
const MTU: &str = "65535";

/// Moves this process to a new network namespace.
pub(crate) fn unshare() -> Result<()> {
    // SAFETY: NEWNET does not unshare the descriptor table, which could invalidate descriptors of other threads.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.context("making a network namespace")
}

/// Moves this process to new network and mount namespaces, and remounts /sys: sysfs shows the devices of the network namespace in which it
/// was mounted.
pub(crate) fn unshare_with_sysfs() -> Result<()> {
    // SAFETY: as above; NEWNS does not affect the descriptor table either.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWNS) }.context("making namespaces")?;
    let whole = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    mount_change("/", whole).context("making mounts private")?;
    mount("sysfs", "/sys", "sysfs", MountFlags::empty(), None).context("mounting sysfs")
}

/// Moves this process into the network namespace of `pid`.
pub(crate) fn join(pid: u32) -> Result<()> {
    let path = format!("/proc/{pid}/ns/net");
    let namespace = File::open(&path).with_context(|| format!("opening {path}"))?;
    move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .context("joining a namespace")
}

/// Connects the namespaces of two processes by a veth pair.
pub(crate) fn connect(sender: u32, receiver: u32) -> Result<()> {
    connect_as([SENDER, RECEIVER], sender, receiver)
}

/// Connects the namespaces by a veth pair with these names.
pub(crate) fn connect_as(names: [&str; 2], sender: u32, receiver: u32) -> Result<()> {
    let (sender, receiver) = (sender.to_string(), receiver.to_string());
    run(
        "ip",
        &[
            "link", "add", names[0], "netns", &sender, "type", "veth", "peer", "name", names[1], "netns",
            &receiver,
        ],
    )
}

pub(crate) fn up(device: &str) -> Result<()> {
    run("ip", &["link", "set", device, "mtu", MTU, "up"])
}

/// Configures the receiver: its addresses, and rules that send UDP to `queues` queues and drop accepted packets.
pub(crate) fn up_with_queues(queues: u16) -> Result<()> {
    let mac = DESTINATION_MAC.map(|byte| format!("{byte:02x}")).join(":");
    run("ip", &["link", "set", RECEIVER, "address", &mac])?;
    run("ip", &["address", "add", &format!("{DESTINATION}/8"), "dev", RECEIVER])?;
    up(RECEIVER)?;
    let balance = format!("0:{}", queues - 1);
    let target: &[&str] = if queues == 1 { &["--queue-num", "0"] } else { &["--queue-balance", &balance] };
    iptables(&[&["-t", "raw", "-A", "PREROUTING", "-p", "udp", "-j", "NFQUEUE"], target].concat())?;
    iptables(&["-A", "INPUT", "-p", "udp", "-j", "DROP"])
}

/// Configures the receiver: its addresses and, if `tracked`, a rule that enables connection tracking.
pub(crate) fn up_with_conntrack(tracked: bool) -> Result<()> {
    let mac = DESTINATION_MAC.map(|byte| format!("{byte:02x}")).join(":");
    run("ip", &["link", "set", RECEIVER, "address", &mac])?;
    run("ip", &["address", "add", &format!("{DESTINATION}/8"), "dev", RECEIVER])?;
    up(RECEIVER)?;
    // Both cases have a rule, which excludes the cost of the tables from the difference.
    if tracked {
        iptables(&["-A", "INPUT", "-m", "conntrack", "--ctstate", "INVALID", "-j", "DROP"])?;
        let counted = std::fs::write("/proc/sys/net/netfilter/nf_conntrack_acct", "1");
        counted.context("enabling the counters of connections")
    } else {
        iptables(&["-A", "INPUT", "-p", "tcp", "-j", "DROP"])
    }
}

/// Runs `iptables-legacy` if installed, because its tables cost less per packet; else `iptables`.
pub(crate) fn iptables(words: &[&str]) -> Result<()> {
    let wait = [&["-w", "5"], words].concat();
    match run("iptables-legacy", &wait) {
        Err(error) if error.is::<Skipped>() => run("iptables", &wait),
        other => other,
    }
}

pub(crate) fn run(program: &str, words: &[&str]) -> Result<()> {
    let output = match Command::new(program).args(words).output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(Skipped(format!("the program {program} is not installed")).into());
        }
        output => output.with_context(|| format!("starting {program}"))?,
    };
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(anyhow!("{program} {}: {}", words.join(" "), said.trim()))
}
