//! A network namespace and its process, which executes commands from its standard input. The namespace ends with the process.

use std::fs;
use std::io::{BufRead, stdin};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::{Context, Result, anyhow, bail};

use crate::peer::{Skipped, netns};
use crate::raw::say;
use crate::side::Side;
use crate::xdp::{self, Hook};

/// The parent's handle of a namespace process.
pub(crate) struct NetnsProc(Side);

impl NetnsProc {
    /// Creates a namespace.
    pub(crate) fn start() -> Result<Self> {
        let mut side = Side::start(&["netns-proc".to_owned()], &[])?;
        side.line()?;
        Ok(Self(side))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.0.pid()
    }

    /// Runs a program in the namespace and waits for it. Spaces separate the words. `iptables` means the variant with the lowest packet
    /// cost.
    pub(crate) fn run(&mut self, line: &str) -> Result<()> {
        self.ask(&format!("run {line}")).map(drop)
    }

    /// Sets a sysctl of the namespace; `name` is relative to /proc/sys/net.
    pub(crate) fn set(&mut self, name: &str, value: &str) -> Result<()> {
        self.ask(&format!("set {name} {value}")).map(drop)
    }

    /// Number of packets that `device` has received.
    pub(crate) fn received(&mut self, device: &str) -> Result<u64> {
        let count = self.ask(&format!("received {device}"))?;
        count.parse().with_context(|| format!("{count:?} packets at {device}"))
    }

    /// Index of an interface.
    pub(crate) fn index(&mut self, device: &str) -> Result<u32> {
        self.ask(&format!("index {device}"))?.parse().context("an index")
    }

    /// Restricts receive processing of `device` to one CPU (RPS, Documentation/networking/scaling.rst).
    pub(crate) fn receive_on(&mut self, device: &str, cpu: usize) -> Result<()> {
        self.ask(&format!("receive {device} {}", mask(cpu))).map(drop)
    }

    /// Redirects all packets that `from` receives to `to`, until the namespace ends.
    pub(crate) fn redirect(&mut self, from: &str, to: &str) -> Result<()> {
        self.ask(&format!("redirect {from} {to}")).map(drop)
    }

    /// Redirects the packets of the first `flows` flows that `from` receives to `to` at the hook `xdp` or `tc`, until the namespace ends.
    pub(crate) fn redirect_flows(&mut self, hook: &str, from: &str, to: &str, flows: u32) -> Result<()> {
        self.ask(&format!("redirect-flows {hook} {from} {to} {flows}")).map(drop)
    }

    /// Drops the packets of the first `flows` flows that `from` receives by XDP, after a lookup, until the namespace ends.
    pub(crate) fn drop_flows(&mut self, from: &str, flows: u32) -> Result<()> {
        self.ask(&format!("drop-flows {from} {flows}")).map(drop)
    }

    /// Drops the packets that `from` receives of the first `sources` sources by XDP, after a lookup, until the namespace ends.
    pub(crate) fn drop_sources(&mut self, from: &str, sources: u32) -> Result<()> {
        self.ask(&format!("drop-sources {from} {sources}")).map(drop)
    }

    /// Drops all packets that `device` receives, until the namespace ends.
    pub(crate) fn drop_all(&mut self, device: &str) -> Result<()> {
        self.ask(&format!("drop {device}")).map(drop)
    }

    fn ask(&mut self, line: &str) -> Result<String> {
        self.0.tell(line)?;
        let answer = self.0.line()?;
        match answer.split_once(' ').unwrap_or((&answer, "")) {
            ("ok", rest) => Ok(rest.to_owned()),
            ("skipped", why) => Err(Skipped(why.to_owned()).into()),
            (_, why) => Err(anyhow!("{why}")),
        }
    }
}

/// Runs the namespace process.
pub(crate) fn side() -> Result<()> {
    netns::unshare_with_sysfs()?;
    say("ready")?;
    let mut links = Vec::new();
    for line in stdin().lock().lines() {
        match obey(&line?, &mut links) {
            Ok(answer) => say(&format!("ok {answer}"))?,
            Err(error) if error.is::<Skipped>() => say(&error.to_string().replace("skipped:", "skipped"))?,
            Err(error) => say(&format!("failed {}", format!("{error:#}").replace('\n', "; ")))?,
        }
    }
    Ok(())
}

fn obey(line: &str, links: &mut Vec<OwnedFd>) -> Result<String> {
    let words: Vec<&str> = line.split(' ').collect();
    match words[..] {
        ["run", "iptables", ref rest @ ..] => netns::iptables(rest)?,
        ["run", program, ref rest @ ..] => netns::run(program, rest)?,
        ["set", name, value] => {
            let path = format!("/proc/sys/net/{name}");
            fs::write(&path, value).with_context(|| format!("writing {value} to {path}"))?;
        }
        ["receive", device, cpus] => {
            let path = format!("/sys/class/net/{device}/queues/rx-0/rps_cpus");
            fs::write(&path, cpus).with_context(|| format!("writing {cpus} to {path}"))?;
        }
        ["redirect", from, to] => links.push(xdp::redirect_to(from, to)?),
        ["redirect-flows", hook @ ("tc" | "xdp"), from, to, flows] => {
            let hook = if hook == "tc" { Hook::TC } else { Hook::XDP };
            let flows = flows.parse().context("a number of flows")?;
            links.push(xdp::decide_flows(&hook, from, Some(to), flows)?);
        }
        ["drop-flows", from, flows] => {
            let flows = flows.parse().context("a number of flows")?;
            links.push(xdp::decide_flows(&Hook::XDP, from, None, flows)?);
        }
        ["drop-sources", from, sources] => {
            links.push(xdp::drop_sources(from, sources.parse().context("a number of sources")?)?);
        }
        ["drop", device] => links.push(xdp::drop_all(device)?),
        ["index", device] => return Ok(xdp::index(device)?.to_string()),
        ["received", device] => {
            let table = fs::read_to_string("/proc/self/net/dev")?;
            return received(&table, device).with_context(|| format!("no interface {device}"));
        }
        _ => bail!("unknown command {line:?}"),
    }
    Ok(String::new())
}

/// Reads a device's received packets from /proc/net/dev (proc_pid_net(5)).
fn received(table: &str, device: &str) -> Option<String> {
    let line = table.lines().find_map(|line| line.trim_start().strip_prefix(device)?.strip_prefix(':'))?;
    line.split_whitespace().nth(1).map(str::to_owned)
}

/// Formats a CPU mask for the kernel: hexadecimal, in groups of 32 bits.
fn mask(cpu: usize) -> String {
    format!("{:x}", 1_u32 << (cpu % 32)) + &",00000000".repeat(cpu / 32)
}

/// Joins the namespace of process `netns_pid` and executes a program.
pub(crate) fn within(netns_pid: u32, words: &[String]) -> Result<()> {
    let (program, words) = words.split_first().context("no program")?;
    netns::join(netns_pid)?;
    Err(Command::new(program).args(words).exec()).with_context(|| format!("starting {program}"))
}

#[cfg(test)]
mod tests {
    use super::{mask, received};

    #[test]
    fn cpu_mask() {
        for (cpu, expected) in
            [(0, "1"), (5, "20"), (31, "80000000"), (33, "2,00000000"), (64, "1,00000000,00000000")]
        {
            assert_eq!(mask(cpu), expected, "{cpu}");
        }
    }

    #[test]
    fn received_reads_packet_count() {
        let table =
            "Inter-|   Receive\n face |bytes packets errs\n  lo: 5 6 0 0\nfar0: 1234 77 0 0 0\n far01: 1 2";
        let rows = [("far0", Some("77")), ("lo", Some("6")), ("far01", Some("2")), ("far", None)];
        for (device, expected) in rows {
            assert_eq!(received(table, device).as_deref(), expected, "{device}");
        }
    }
}
