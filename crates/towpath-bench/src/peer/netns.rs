#![allow(unsafe_code)]
//! Two network namespaces and a veth pair between them. They belong to the sides that unshared them, and go with them.

use std::fs::File;
use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::process::Command;

use anyhow::{Context, Result, anyhow};
use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, move_into_link_name_space, unshare_unsafe};

use crate::packet::{DESTINATION, DESTINATION_MAC};
use crate::peer::Skipped;

/// The generator's end of the pair.
pub(crate) const SENDER: &str = "tpb0";
/// The queue's end.
pub(crate) const RECEIVER: &str = "tpb1";
/// The longest that a veth device takes.
const MTU: &str = "65535";

/// Gives this process a network namespace of its own.
pub(crate) fn unshare() -> Result<()> {
    // SAFETY: NEWNET does not touch the descriptor table, which is what could break others' descriptors.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.context("making a network namespace")
}

/// Gives this process a network namespace and a mount namespace of its own, with the devices of the former in /sys: sysfs shows those of
/// the namespace in which it was mounted.
pub(crate) fn unshare_with_sysfs() -> Result<()> {
    // SAFETY: as above; NEWNS does not touch it either.
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

/// Joins the namespaces of two processes by a veth pair.
pub(crate) fn connect(sender: u32, receiver: u32) -> Result<()> {
    connect_as([SENDER, RECEIVER], sender, receiver)
}

/// Joins them by a pair with these names.
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

/// The receiver's end: its addresses, and the rules that take UDP to `queues` queues and drop what they accept.
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

/// The receiver's end: its addresses, and, `tracked`, a rule that makes the kernel follow connections.
pub(crate) fn up_with_conntrack(tracked: bool) -> Result<()> {
    let mac = DESTINATION_MAC.map(|byte| format!("{byte:02x}")).join(":");
    run("ip", &["link", "set", RECEIVER, "address", &mac])?;
    run("ip", &["address", "add", &format!("{DESTINATION}/8"), "dev", RECEIVER])?;
    up(RECEIVER)?;
    // Both have a rule, so that the tables themselves are not what is measured.
    if tracked {
        iptables(&["-A", "INPUT", "-m", "conntrack", "--ctstate", "INVALID", "-j", "DROP"])?;
        let counted = std::fs::write("/proc/sys/net/netfilter/nf_conntrack_acct", "1");
        counted.context("having connections counted")
    } else {
        iptables(&["-A", "INPUT", "-p", "tcp", "-j", "DROP"])
    }
}

/// `iptables-legacy` where it is installed: its tables cost a packet least; else what `iptables` is.
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
