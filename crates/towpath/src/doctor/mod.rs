//! `towpath doctor`: what this machine can do, and what to do about what it cannot.
//!
//! `facts` reads; `findings` judges the facts without IO.

mod facts;
mod sandbox;

use clap::ValueEnum;
use serde::Serialize;
use serde_json::json;

use self::facts::{Facts, Interface};
use crate::quantity::count;

/// What a machine is examined for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Purpose {
    /// Ports with packet sockets
    #[value(name = "af_packet")]
    AfPacket,
    /// Ports with XDP sockets
    #[value(name = "af_xdp")]
    AfXdp,
    /// Ports of the kernel's NFQUEUE
    #[value(name = "nfqueue")]
    Nfqueue,
    /// TUN and TAP ports
    #[value(name = "tun")]
    Tun,
    /// `towpath demo` without root
    #[value(name = "demo")]
    Demo,
}

/// The result of an examination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Level {
    /// It works.
    Ok,
    /// It works; another setting may help.
    Hint,
    /// Something does not work without the remedy.
    Lack,
}

/// A finding.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What was examined: stable names for programs.
    pub check: &'static str,
    /// The interface, if it is about one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub interface: Option<String>,
    /// The result.
    pub level: Level,
    /// The result in words.
    pub message: String,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

/// The result of `towpath doctor`.
#[derive(Clone, Debug)]
pub struct Report {
    /// The findings.
    pub findings: Vec<Finding>,
    missing: Vec<String>,
}

/// The names of all checks.
pub const CHECKS: &[&str] = &[
    "kernel",
    "capabilities",
    "user_namespace",
    "af_packet",
    "af_xdp",
    "tun",
    "nfqueue",
    "exclusive",
    "bpf_fs",
    "memlock",
    "huge_pages",
    "seccomp",
    "landlock",
    "conntrack",
    "userns",
    "backlog",
    "budget",
    "governor",
    "interface",
    "xdp_program",
    "xdp_modes",
    "mtu",
    "offloads",
    "lro",
    "gro",
    "vlan",
    "kernel_path",
    "rps",
    "interrupts",
    "napi",
    "busy_polling",
];

/// Numbers of linux/capability.h.
const CAP_NET_ADMIN: (u32, &str) = (12, "CAP_NET_ADMIN");
const CAP_NET_RAW: (u32, &str) = (13, "CAP_NET_RAW");
const CAP_IPC_LOCK: u32 = 14;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_PERFMON: u32 = 38;
const CAP_BPF: (u32, &str) = (39, "CAP_BPF");

/// Memory of one AF_XDP port and queue: 8,192 chunks of 4 KiB.
const UMEM: u64 = 32 << 20;

/// Examines this machine for the purposes, all if there are none, and for these interfaces, all if there are none.
pub fn examine(purposes: &[Purpose], interfaces: &[String]) -> Report {
    let facts = Facts::read(interfaces);
    let known = |name: &&String| facts.interfaces.iter().any(|interface| interface.name == **name);
    let missing = interfaces.iter().filter(|name| !known(name)).cloned().collect();
    let purposes = if purposes.is_empty() { Purpose::value_variants() } else { purposes };
    let mut report = Report { findings: findings(&facts, purposes), missing };
    for name in &report.missing {
        report.findings.push(Finding {
            check: "interface",
            interface: Some(name.clone()),
            level: Level::Lack,
            message: "there is no such interface".to_owned(),
            remedy: Some("`ip link` lists the interfaces of this network namespace".to_owned()),
        });
    }
    report
}

impl Report {
    /// Returns true if something does not work.
    pub fn lacks(&self) -> bool {
        self.findings.iter().any(|finding| finding.level == Level::Lack)
    }

    /// As one JSON object.
    pub fn json(&self) -> String {
        format!("{}\n", json!({ "ok": !self.lacks(), "findings": self.findings }))
    }

    /// For people.
    pub fn text(&self) -> String {
        let mut text = String::new();
        for Finding { check, interface, level, message, remedy } in &self.findings {
            let mark = match level {
                Level::Ok => "ok  ",
                Level::Hint => "hint",
                Level::Lack => "LACK",
            };
            let about =
                interface.as_deref().map_or_else(|| (*check).to_owned(), |name| format!("{check} {name}"));
            // The names of interfaces may have any bytes.
            text += &crate::output::printable(&format!("{mark}  {about}: {message}"));
            text.push('\n');
            if let Some(remedy) = remedy {
                text += &crate::output::printable(&format!("      -> {remedy}"));
                text.push('\n');
            }
        }
        text
    }
}

/// The findings so far.
#[derive(Default)]
struct Findings {
    all: Vec<Finding>,
    interface: Option<String>,
}

impl Findings {
    fn add(&mut self, check: &'static str, level: Level, message: impl Into<String>, remedy: &str) {
        let remedy = (!remedy.is_empty()).then(|| remedy.to_owned());
        let interface = self.interface.clone();
        debug_assert!(CHECKS.contains(&check), "{check}");
        self.all.push(Finding { check, interface, level, message: message.into(), remedy });
    }

    fn ok(&mut self, check: &'static str, message: impl Into<String>) {
        self.add(check, Level::Ok, message, "");
    }
}

/// Judges the facts.
fn findings(facts: &Facts, purposes: &[Purpose]) -> Vec<Finding> {
    let wants = |purpose| purposes.contains(&purpose);
    let (packet, xdp) = (wants(Purpose::AfPacket), wants(Purpose::AfXdp));
    let mut found = Findings::default();
    let kernel = kernel(facts, packet, xdp, &mut found);
    privileges(facts, purposes, &mut found);
    if packet && !has(facts, "PACKET") {
        let remedy = "load the module af_packet, or use a kernel with CONFIG_PACKET";
        found.add("af_packet", Level::Lack, "the kernel has no packet sockets", remedy);
    } else if packet {
        found.ok("af_packet", "packet sockets");
    }
    if packet {
        match kernel >= (6, 6) {
            true => found.ok("exclusive", "`exclusive` ports use tcx links"),
            false => found.ok("exclusive", "`exclusive` ports use a clsact filter (tcx is in Linux 6.6)"),
        }
    }
    if xdp {
        match has(facts, "XDP") {
            true => found.ok("af_xdp", "XDP sockets"),
            false => found.add(
                "af_xdp",
                Level::Lack,
                "the kernel has no XDP sockets",
                "use driver = \"af_packet\", or a kernel with CONFIG_XDP_SOCKETS",
            ),
        }
    }
    if packet || xdp {
        bpf_fs(facts, &mut found);
    }
    if xdp {
        memlock(facts, kernel, &mut found);
    }
    huge_pages(facts, &mut found);
    sandbox::findings(facts, &mut found);
    if wants(Purpose::Nfqueue) {
        nfqueue(facts, &mut found);
    }
    if wants(Purpose::Tun) {
        match facts.tun {
            true => found.ok("tun", "/dev/net/tun"),
            false => found.add("tun", Level::Lack, "/dev/net/tun is missing", "modprobe tun"),
        }
    }
    if wants(Purpose::Demo) {
        match facts.no_userns {
            None => found.ok("userns", "user namespaces without privilege"),
            Some(why) => found.add(
                "userns",
                Level::Lack,
                format!("no user namespaces without privilege ({why})"),
                "run `towpath demo` as root, or change the setting with sysctl(8)",
            ),
        }
    }
    if packet || xdp || wants(Purpose::Nfqueue) {
        receiving(facts, &mut found);
    }
    if packet || xdp {
        for interface in &facts.interfaces {
            found.interface = Some(interface.name.clone());
            look_at(interface, facts, (packet, xdp), &mut found);
        }
    }
    found.all
}

/// The kernel's version; (0, 0) if it is unknown.
fn version(release: &str) -> (u32, u32) {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|number| number.parse().unwrap_or(0));
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0))
}

fn has(facts: &Facts, protocol: &str) -> bool {
    facts.protocols.iter().any(|own| own == protocol)
}

fn can(facts: &Facts, capability: u32) -> bool {
    facts.capabilities >> capability & 1 == 1
}

fn kernel(facts: &Facts, packet: bool, xdp: bool, found: &mut Findings) -> (u32, u32) {
    let kernel = version(&facts.release);
    let mut gains = Vec::new();
    if packet && kernel < (6, 6) {
        gains.push("6.6: tcx links for `exclusive`");
    }
    if xdp && kernel < (6, 6) {
        gains.push("6.6: frames of several buffers in native mode");
    }
    if xdp && kernel < (6, 9) {
        gains.push("6.9: frames of several buffers in generic mode");
    }
    match gains.is_empty() || kernel == (0, 0) {
        true => found.ok("kernel", format!("Linux {}", facts.release)),
        false => found.add(
            "kernel",
            Level::Hint,
            format!("Linux {}", facts.release),
            &format!("a later kernel has {}", gains.join("; ")),
        ),
    }
    kernel
}

fn privileges(facts: &Facts, purposes: &[Purpose], found: &mut Findings) {
    let mut needed = Vec::new();
    let mut need = |purpose, capabilities: &[(u32, &'static str)]| {
        if purposes.contains(&purpose) {
            needed.extend(capabilities.iter().copied().filter(|(number, _)| !can(facts, *number)));
        }
    };
    need(Purpose::AfPacket, &[CAP_NET_RAW, CAP_NET_ADMIN]);
    need(Purpose::AfXdp, &[CAP_NET_RAW, CAP_NET_ADMIN]);
    need(Purpose::Nfqueue, &[CAP_NET_ADMIN]);
    need(Purpose::Tun, &[CAP_NET_ADMIN]);
    let bpf = purposes.iter().any(|purpose| [Purpose::AfPacket, Purpose::AfXdp].contains(purpose));
    if bpf && !can(facts, CAP_BPF.0) && !can(facts, CAP_SYS_ADMIN) {
        needed.push(CAP_BPF);
    }
    needed.sort_unstable();
    needed.dedup();
    let names: Vec<&str> = needed.iter().map(|(_, name)| *name).collect();
    match names.is_empty() {
        true if bpf && !can(facts, CAP_PERFMON) && !can(facts, CAP_SYS_ADMIN) => found.add(
            "capabilities",
            Level::Hint,
            "this process has those that ports need, but not CAP_PERFMON",
            "with it, the programs of `[offload]` and of `af_xdp` are faster: the verifier adds no barriers to them",
        ),
        true => found.ok("capabilities", "this process has those that ports need"),
        false => found.add(
            "capabilities",
            Level::Lack,
            format!("this process does not have {}", names.join(", ")),
            "start the engine as root: it keeps only what its ports need; or with AmbientCapabilities= of systemd",
        ),
    }
    if bpf && !facts.initial_userns {
        found.add(
            "user_namespace",
            Level::Lack,
            "this process is in a user namespace, where BPF programs cannot be loaded",
            "outside of it: `af_xdp`, and `exclusive` where the kernel uses the packets too; here: `af_packet`",
        );
    }
}

fn bpf_fs(facts: &Facts, found: &mut Findings) {
    match facts.bpf_fs {
        true => found.ok("bpf_fs", "/sys/fs/bpf"),
        false => found.add(
            "bpf_fs",
            Level::Hint,
            "no BPF file system at /sys/fs/bpf: ports with fail = \"closed\" cannot be opened",
            "mount -t bpf bpf /sys/fs/bpf",
        ),
    }
}

fn memlock(facts: &Facts, kernel: (u32, u32), found: &mut Findings) {
    match facts.memlock {
        None => found.ok("memlock", "no limit of locked memory"),
        Some(bytes) if can(facts, CAP_IPC_LOCK) && kernel >= (5, 11) => {
            found.ok("memlock", format!("{} MiB, which does not limit this process", bytes >> 20));
        }
        Some(bytes) => {
            let (level, remedy) = match bytes < UMEM {
                true => (Level::Lack, "ulimit -l unlimited, or LimitMEMLOCK=infinity of systemd"),
                false => (Level::Ok, ""),
            };
            let each = UMEM >> 20;
            let message = format!(
                "{} MiB of locked memory; `af_xdp` needs {each} MiB per port and thread",
                bytes >> 20
            );
            found.add("memlock", level, message, remedy);
        }
    }
}

fn huge_pages(facts: &Facts, found: &mut Findings) {
    match facts.transparent.as_deref() {
        Some(policy @ ("always" | "madvise")) => {
            found.ok(
                "huge_pages",
                format!("transparent huge pages: {policy}; [engine] hugepages = true uses them"),
            );
        }
        policy => found.add(
            "huge_pages",
            Level::Hint,
            format!(
                "transparent huge pages: {}; [engine] hugepages = true has no effect",
                policy.unwrap_or("none")
            ),
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
    }
}

fn nfqueue(facts: &Facts, found: &mut Findings) {
    match facts.nfqueue {
        true => found.ok("nfqueue", "nfnetlink_queue"),
        false => {
            found.add("nfqueue", Level::Lack, "nfnetlink_queue is not loaded", "modprobe nfnetlink_queue");
        }
    }
    match facts.conntrack {
        Some((count, max)) if max > 0 && count >= max / 10 * 9 => found.add(
            "conntrack",
            Level::Lack,
            format!("the kernel tracks {count} of at most {max} connections, and drops new ones before the queue"),
            "sysctl net.netfilter.nf_conntrack_max=N, or do not track: iptables -t raw -A PREROUTING -j CT --notrack",
        ),
        Some((count, max)) => found.add(
            "conntrack",
            Level::Hint,
            format!("the kernel's connection tracking is loaded: {count} of {max} connections"),
            "if no rule of the kernel needs it, it costs time per packet: iptables -t raw -A PREROUTING -j CT --notrack",
        ),
        None => found.ok("conntrack", "the kernel does not track connections"),
    }
}

/// The kernel's receive path for all interfaces.
fn receiving(facts: &Facts, found: &mut Findings) {
    let (dropped, squeezed) = facts.softnet;
    let value = |value: Option<u64>| value.map_or("unknown".to_owned(), |value| value.to_string());
    match dropped {
        0 => found.ok("backlog", "the kernel's backlog was never full"),
        _ => found.add(
            "backlog",
            Level::Hint,
            format!(
                "the kernel dropped {dropped} packets because its backlog was full (netdev_max_backlog {})",
                value(facts.backlog)
            ),
            "sysctl net.core.netdev_max_backlog=10000; RPS and virtual interfaces use the backlog",
        ),
    }
    match squeezed {
        0 => found.ok("budget", "the kernel's receive budget was always sufficient"),
        _ => found.add(
            "budget",
            Level::Hint,
            format!(
                "the kernel stopped receiving early {squeezed} times (netdev_budget {})",
                value(facts.budget)
            ),
            "sysctl net.core.netdev_budget=600 net.core.netdev_budget_usecs=8000",
        ),
    }
    match facts.governor.as_deref() {
        None | Some("performance") => {}
        Some(governor) => found.add(
            "governor",
            Level::Hint,
            format!("the frequency governor of the CPUs is {governor}"),
            "cpupower frequency-set -g performance",
        ),
    }
}

fn look_at(interface: &Interface, facts: &Facts, (packet, xdp): (bool, bool), found: &mut Findings) {
    let name = &interface.name;
    let driver = interface.driver.as_deref().unwrap_or("virtual or unknown");
    let queues = count(interface.rx_queues.into(), "receive queue");
    found.ok("interface", format!("driver {driver}, MTU {}, {queues}", interface.mtu));
    if let Some(program) = interface.program {
        let level = if xdp { Level::Lack } else { Level::Hint };
        let message = format!("an XDP program is attached (number {}, {} mode)", program.id, program.mode);
        let remedy = format!("end its owner, or ip link set dev {name} xdp off; bpftool net shows it");
        found.add("xdp_program", level, message, &remedy);
    }
    if xdp {
        match interface.xdp {
            Some(xdp) if xdp.native => {
                let more = [(xdp.zero_copy, "zero copy"), (xdp.multi_buffer, "several buffers")];
                let more: String =
                    more.iter().filter(|(has, _)| *has).map(|(_, what)| format!(", {what}")).collect();
                found.ok("xdp_modes", format!("generic, native{more}"));
            }
            Some(_) => found.ok("xdp_modes", "generic"),
            None => found.ok("xdp_modes", "generic; the kernel does not report native mode (Linux 6.3)"),
        }
        if interface.mtu > 3826 && interface.xdp.is_some_and(|xdp| !xdp.multi_buffer) {
            let remedy = format!("mode = \"generic\" with Linux 6.9, or ip link set {name} mtu 3826");
            let message = format!(
                "an MTU of {} needs frames of several buffers, which native mode does not have here",
                interface.mtu
            );
            found.add("mtu", Level::Hint, message, &remedy);
        }
    }
    offloads(interface, xdp, found);
    if !interface.kernel.is_empty() {
        let remedy = if packet {
            "see `exclusive` and `host` of [port.NAME]; `towpath run --check` says whether a port is affected"
        } else {
            ""
        };
        found.add(
            "kernel_path",
            Level::Hint,
            format!("the kernel also receives its packets: {}", interface.kernel),
            remedy,
        );
    }
    placement(interface, facts, xdp, found);
}

fn offloads(interface: &Interface, xdp: bool, found: &mut Findings) {
    let name = &interface.name;
    let Some(offloads) = &interface.offloads else {
        return found.add("offloads", Level::Hint, "unknown: ethtool netlink is in Linux 5.7", "");
    };
    let on = |name: &str| offloads.iter().any(|own| own == name);
    if on("rx-lro") {
        let remedy = format!("ethtool -K {name} lro off");
        found.add(
            "lro",
            Level::Lack,
            "LRO is on: it joins packets in a way that forwarding cannot undo",
            &remedy,
        );
    }
    if on("rx-gro") && xdp {
        let remedy = format!("ethtool -K {name} gro off");
        let message =
            "GRO is on: in generic mode `af_xdp` receives joined packets, which it copies once more";
        found.add("gro", Level::Hint, message, &remedy);
    } else {
        let message = if on("rx-gro") {
            "GRO is on; `af_packet` forwards joined packets as they are with offload = true"
        } else {
            "GRO is off"
        };
        found.ok("gro", message);
    }
    if on("rx-vlan-hw-parse") && xdp {
        let remedy = format!("ethtool -K {name} rxvlan off");
        let message = "the interface removes VLAN tags: `af_xdp` sees tagged packets without their tag";
        found.add("vlan", Level::Hint, message, &remedy);
    }
}

/// Receive queues, interrupts and their CPUs.
fn placement(interface: &Interface, facts: &Facts, xdp: bool, found: &mut Findings) {
    let name = &interface.name;
    if facts.cpus > 1 && interface.rx_queues == 1 && !interface.rps {
        let mask = (1u64 << facts.cpus.min(63)) - 1;
        let remedy = format!(
            "echo {mask:x} > /sys/class/net/{name}/queues/rx-0/rps_cpus, or more queues: ethtool -L {name} combined N"
        );
        let message = format!("one receive queue for {} CPUs: one CPU receives all packets", facts.cpus);
        found.add("rps", Level::Hint, message, &remedy);
    } else {
        let rps = if interface.rps { ", with RPS" } else { "" };
        found.ok(
            "rps",
            format!(
                "{}{rps}; [engine] threads of `af_xdp` need a queue each",
                count(interface.rx_queues.into(), "receive queue")
            ),
        );
    }
    let mut cpus = interface.interrupts.clone();
    cpus.sort_unstable();
    cpus.dedup();
    match (&cpus[..], interface.interrupts.len()) {
        ([], _) => {}
        ([one], 2..) if facts.cpus > 1 => {
            let message = format!("all {} interrupts arrive at CPU {one}", interface.interrupts.len());
            let remedy = "write other CPUs to /proc/irq/N/smp_affinity_list, away from [engine] cpus, or run irqbalance";
            found.add("interrupts", Level::Hint, message, remedy);
        }
        (cpus, _) => {
            let message = format!(
                "interrupts at the CPUs {}; other CPUs for [engine] cpus do not share them",
                cpus.join(" ")
            );
            found.ok("interrupts", message);
        }
    }
    match interface.threaded {
        Some(false) if interface.driver.is_some() && facts.cpus > 2 => {
            let remedy = format!(
                "echo 1 > /sys/class/net/{name}/threaded, and pin its threads away from [engine] cpus"
            );
            let message = "NAPI runs in interrupts: under load it takes time of the engine's CPU";
            found.add("napi", Level::Hint, message, &remedy);
        }
        Some(on) => found.ok("napi", if on { "NAPI in threads" } else { "NAPI in interrupts" }),
        None => {}
    }
    if xdp && let Some(defer) = interface.defer_hard_irqs {
        let busy = facts.busy_read.unwrap_or(0);
        found.ok("busy_polling", format!("napi_defer_hard_irqs {defer}, net.core.busy_read {busy}"));
    }
}

#[cfg(test)]
mod tests {
    use towpath_port::probe::{XdpFeatures, XdpProgram};

    use super::*;

    /// A machine without a lack.
    fn good() -> Facts {
        Facts {
            release: "6.12.9-amd64".into(),
            capabilities: u64::MAX,
            initial_userns: true,
            protocols: ["PACKET", "XDP"].map(str::to_owned).into(),
            bpf_fs: true,
            transparent: Some("madvise".into()),
            seccomp: true,
            landlock: Some(5),
            tun: true,
            nfqueue: true,
            cpus: 4,
            interfaces: vec![Interface {
                name: "eth0".into(),
                driver: Some("ixgbe".into()),
                mtu: 1500,
                rx_queues: 4,
                threaded: Some(true),
                interrupts: ["0", "1", "2", "3"].map(str::to_owned).into(),
                xdp: Some(XdpFeatures { native: true, zero_copy: true, ..XdpFeatures::default() }),
                offloads: Some(Vec::new()),
                ..Interface::default()
            }],
            ..Facts::default()
        }
    }

    fn levels(facts: &Facts, purposes: &[Purpose]) -> Vec<(&'static str, Level)> {
        let findings = findings(facts, purposes);
        for finding in &findings {
            // Every lack has a remedy.
            assert!(finding.level != Level::Lack || finding.remedy.is_some(), "{finding:?}");
        }
        let worse = findings.iter().filter(|finding| finding.level != Level::Ok);
        worse.map(|finding| (finding.check, finding.level)).collect()
    }

    #[test]
    fn each_lack_and_hint_is_found_alone() {
        type Change = fn(&mut Facts);
        let rows: [(Change, &str, Level); 30] = [
            (|facts| facts.release = "6.1.0".into(), "kernel", Level::Hint),
            (|facts| facts.capabilities &= !(1 << 13), "capabilities", Level::Lack),
            (|facts| facts.capabilities &= !(1 << 39 | 1 << 21), "capabilities", Level::Lack),
            (|facts| facts.capabilities &= !(1 << 38 | 1 << 21), "capabilities", Level::Hint),
            (|facts| facts.initial_userns = false, "user_namespace", Level::Lack),
            (|facts| facts.protocols = vec!["XDP".into()], "af_packet", Level::Lack),
            (|facts| facts.protocols = vec!["PACKET".into()], "af_xdp", Level::Lack),
            (|facts| facts.bpf_fs = false, "bpf_fs", Level::Hint),
            (
                |facts| (facts.memlock, facts.capabilities) = (Some(8 << 20), !(1 << 14)),
                "memlock",
                Level::Lack,
            ),
            (|facts| facts.transparent = Some("never".into()), "huge_pages", Level::Hint),
            (|facts| facts.seccomp = false, "seccomp", Level::Hint),
            (|facts| facts.landlock = None, "landlock", Level::Hint),
            (|facts| facts.landlock = Some(4), "landlock", Level::Hint),
            (|facts| facts.nfqueue = false, "nfqueue", Level::Lack),
            (|facts| facts.conntrack = Some((1, 100)), "conntrack", Level::Hint),
            (|facts| facts.conntrack = Some((90, 100)), "conntrack", Level::Lack),
            (|facts| facts.tun = false, "tun", Level::Lack),
            (|facts| facts.no_userns = Some("x = 0"), "userns", Level::Lack),
            (|facts| facts.softnet = (1, 0), "backlog", Level::Hint),
            (|facts| facts.softnet = (0, 1), "budget", Level::Hint),
            (|facts| facts.governor = Some("powersave".into()), "governor", Level::Hint),
            (
                |facts| facts.interfaces[0].program = Some(XdpProgram { mode: "native", id: 7 }),
                "xdp_program",
                Level::Lack,
            ),
            (|facts| facts.interfaces[0].mtu = 9000, "mtu", Level::Hint),
            (|facts| facts.interfaces[0].offloads = Some(vec!["rx-lro".into()]), "lro", Level::Lack),
            (|facts| facts.interfaces[0].offloads = Some(vec!["rx-gro".into()]), "gro", Level::Hint),
            (
                |facts| facts.interfaces[0].offloads = Some(vec!["rx-vlan-hw-parse".into()]),
                "vlan",
                Level::Hint,
            ),
            (|facts| facts.interfaces[0].kernel = "it has 192.0.2.1".into(), "kernel_path", Level::Hint),
            (|facts| facts.interfaces[0].rx_queues = 1, "rps", Level::Hint),
            (
                |facts| facts.interfaces[0].interrupts = vec!["1".into(), "1".into()],
                "interrupts",
                Level::Hint,
            ),
            (|facts| facts.interfaces[0].threaded = Some(false), "napi", Level::Hint),
        ];
        let all = Purpose::value_variants();
        assert_eq!(levels(&good(), all), []);
        for (change, check, level) in rows {
            let mut facts = good();
            change(&mut facts);
            assert_eq!(levels(&facts, all), [(check, level)]);
        }
    }

    #[test]
    fn a_purpose_needs_only_its_own() {
        let mut facts = good();
        (facts.capabilities, facts.nfqueue, facts.tun) = (1 << 12, false, false);
        facts.protocols.clear();
        assert_eq!(levels(&facts, &[Purpose::Demo]), []);
        assert_eq!(levels(&facts, &[Purpose::Tun]), [("tun", Level::Lack)]);
        assert_eq!(levels(&facts, &[Purpose::Nfqueue]), [("nfqueue", Level::Lack)]);
        // An unknown machine is no panic.
        levels(&Facts::default(), Purpose::value_variants());
    }

    #[test]
    fn kernel_versions_are_numbers() {
        for (release, expected) in
            [("6.18.44-fc", (6, 18)), ("5.10", (5, 10)), ("7", (7, 0)), ("", (0, 0)), ("x.y", (0, 0))]
        {
            assert_eq!(version(release), expected, "{release}");
        }
    }

    #[test]
    fn this_machine_is_examined() {
        let report = examine(&[], &["no\u{1b}such".to_owned()]);
        assert!(report.lacks());
        let text = report.text();
        assert!(
            text.contains("kernel: Linux") && text.contains("interface no\\u{1b}such: there is no"),
            "{text}"
        );
        let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
        assert_eq!(json["ok"], false);
        assert!(json["findings"].as_array().unwrap().iter().all(|finding| finding["message"].is_string()));
    }
}
