//! The facts that [`super::findings`] judges: read from /proc, /sys and netlink(7). Nothing changes.

use std::fs;
use std::path::{Path, PathBuf};

use crate::sandbox::files::abi as landlock_version;
use rustix::process::{Resource, getrlimit};
use towpath_port::kernel_path::KernelPath;
use towpath_port::probe::{self, Link, XdpFeatures, XdpProgram};

/// Interrupts of one interface that are listed.
const INTERRUPTS: usize = 256;

/// What is known about the machine.
#[derive(Clone, Debug, Default)]
pub(super) struct Facts {
    /// `uname -r`.
    pub(super) release: String,
    /// Effective capabilities of this process.
    pub(super) capabilities: u64,
    /// This process is in the first user namespace.
    pub(super) initial_userns: bool,
    /// The kernel's socket types (/proc/net/protocols).
    pub(super) protocols: Vec<String>,
    /// A BPF file system is mounted at /sys/fs/bpf.
    pub(super) bpf_fs: bool,
    /// Locked memory of this process in bytes; `None`: no limit.
    pub(super) memlock: Option<u64>,
    /// The policy for transparent huge pages.
    pub(super) transparent: Option<String>,
    /// The kernel has seccomp filters with the actions of the sandbox.
    pub(super) seccomp: bool,
    /// The version of Landlock. `None`: the kernel does not have it.
    pub(super) landlock: Option<u32>,
    /// New user namespaces without privilege: why not.
    pub(super) no_userns: Option<&'static str>,
    pub(super) tun: bool,
    /// nfnetlink_queue is loaded or built in.
    pub(super) nfqueue: bool,
    /// Tracked connections, and their maximum.
    pub(super) conntrack: Option<(u64, u64)>,
    pub(super) cpus: usize,
    /// The frequency governor of the first CPU.
    pub(super) governor: Option<String>,
    /// Packets that the kernel dropped because its backlog was full, and times that its budget ended early.
    pub(super) softnet: (u64, u64),
    pub(super) backlog: Option<u64>,
    pub(super) budget: Option<u64>,
    pub(super) busy_read: Option<u64>,
    pub(super) interfaces: Vec<Interface>,
}

/// A network interface.
#[derive(Clone, Debug, Default)]
pub(super) struct Interface {
    pub(super) name: String,
    /// The kernel's driver; `None` for a virtual device.
    pub(super) driver: Option<String>,
    pub(super) mtu: u32,
    pub(super) rx_queues: u32,
    /// A receive queue has CPUs of RPS.
    pub(super) rps: bool,
    /// NAPI in threads of its own (Linux 5.12).
    pub(super) threaded: Option<bool>,
    pub(super) defer_hard_irqs: Option<u64>,
    /// The CPUs of each interrupt, as the kernel lists them.
    pub(super) interrupts: Vec<String>,
    pub(super) program: Option<XdpProgram>,
    pub(super) xdp: Option<XdpFeatures>,
    /// `None`: unknown.
    pub(super) offloads: Option<Vec<String>>,
    /// The kernel's use of its packets, in words; empty if there is none.
    pub(super) kernel: String,
}

/// Files below a directory: `/`, or that of a test.
struct Files {
    root: PathBuf,
}

impl Files {
    fn text(&self, path: &str) -> Option<String> {
        fs::read_to_string(self.root.join(path)).ok().map(|text| text.trim().to_owned())
    }

    fn number(&self, path: &str) -> Option<u64> {
        self.text(path)?.split_whitespace().next()?.parse().ok()
    }

    fn has(&self, path: &str) -> bool {
        self.root.join(path).exists()
    }

    /// The names in a directory.
    fn names(&self, path: &str) -> Vec<String> {
        let entries = fs::read_dir(self.root.join(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort_unstable();
        names
    }

    /// The name of the file that a link points to.
    fn target(&self, path: &str) -> Option<String> {
        let target = fs::read_link(self.root.join(path)).ok()?;
        Some(target.file_name()?.to_string_lossy().into_owned())
    }
}

impl Facts {
    /// Reads the facts about this machine, and about these interfaces; without names, about all but the loopback device.
    pub(super) fn read(names: &[String]) -> Self {
        let wanted = |link: &Link| match names {
            [] => link.name != "lo",
            names => names.contains(&link.name),
        };
        let links: Vec<Link> = probe::links().unwrap_or_default().into_iter().filter(wanted).collect();
        let mut facts = Self::below(Path::new("/"), &links);
        facts.memlock = getrlimit(Resource::Memlock).current;
        facts.landlock = landlock_version();
        for interface in &mut facts.interfaces {
            interface.offloads = probe::offloads(&interface.name).ok();
            interface.kernel = KernelPath::of(&interface.name).map(|path| path.words()).unwrap_or_default();
        }
        facts
    }

    /// The facts that are files.
    fn below(root: &Path, links: &[Link]) -> Self {
        let files = Files { root: root.to_owned() };
        let status = files.text("proc/self/status").unwrap_or_default();
        let capabilities = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let capabilities =
            capabilities.and_then(|bits| u64::from_str_radix(bits.trim(), 16).ok()).unwrap_or(0);
        let map = files.text("proc/self/uid_map").unwrap_or_default();
        let mounts = files.text("proc/self/mounts").unwrap_or_default();
        let protocols = files.text("proc/net/protocols").unwrap_or_default();
        let count = |text: &str, column: usize| -> u64 {
            let field = |line: &str| u64::from_str_radix(line.split_whitespace().nth(column)?, 16).ok();
            text.lines().filter_map(field).sum()
        };
        let softnet = files.text("proc/net/softnet_stat").unwrap_or_default();
        let conntrack = ["nf_conntrack_count", "nf_conntrack_max"]
            .map(|name| files.number(&format!("proc/sys/net/netfilter/{name}")));
        Self {
            release: files.text("proc/sys/kernel/osrelease").unwrap_or_default(),
            capabilities,
            initial_userns: map.split_whitespace().eq(["0", "0", "4294967295"]),
            protocols: protocols
                .lines()
                .filter_map(|line| line.split_whitespace().next())
                .map(str::to_owned)
                .collect(),
            bpf_fs: mounts.lines().any(|line| line.split(' ').skip(1).take(2).eq(["/sys/fs/bpf", "bpf"])),
            memlock: None,
            transparent: files
                .text("sys/kernel/mm/transparent_hugepage/enabled")
                .and_then(|words| Some(words.split_once('[')?.1.split_once(']')?.0.to_owned())),
            seccomp: files.text("proc/sys/kernel/seccomp/actions_avail").is_some_and(|actions| {
                ["trap", "errno"].iter().all(|own| actions.split(' ').any(|it| it == *own))
            }),
            landlock: None,
            no_userns: no_userns(&files),
            tun: files.has("dev/net/tun"),
            nfqueue: files.has("proc/net/netfilter/nfnetlink_queue"),
            conntrack: conntrack[0].zip(conntrack[1]),
            cpus: files.text("proc/stat").map_or(1, |stat| {
                stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu ")).count()
            }),
            governor: files.text("sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            softnet: (count(&softnet, 1), count(&softnet, 2)),
            backlog: files.number("proc/sys/net/core/netdev_max_backlog"),
            budget: files.number("proc/sys/net/core/netdev_budget"),
            busy_read: files.number("proc/sys/net/core/busy_read"),
            interfaces: links.iter().map(|link| interface(&files, link)).collect(),
        }
    }
}

fn no_userns(files: &Files) -> Option<&'static str> {
    if files.number("proc/sys/user/max_user_namespaces") == Some(0) {
        return Some("user.max_user_namespaces = 0");
    }
    if files.number("proc/sys/kernel/unprivileged_userns_clone") == Some(0) {
        return Some("kernel.unprivileged_userns_clone = 0");
    }
    if files.number("proc/sys/kernel/apparmor_restrict_unprivileged_userns") == Some(1) {
        return Some("kernel.apparmor_restrict_unprivileged_userns = 1");
    }
    None
}

fn interface(files: &Files, link: &Link) -> Interface {
    let Link { name, mtu, rx_queues, program, xdp, .. } = link.clone();
    let known = Interface { name, mtu, rx_queues, program, xdp, ..Interface::default() };
    let path = |end: &str| format!("sys/class/net/{}/{end}", link.name);
    // /sys may be mounted in another network namespace.
    if files.number(&path("ifindex")) != Some(link.index.into()) {
        return known;
    }
    let queues: Vec<String> =
        files.names(&path("queues")).into_iter().filter(|queue| queue.starts_with("rx-")).collect();
    // A mask of CPUs in hexadecimal digits and commas.
    let has_rps = |queue: &String| {
        files
            .text(&path(&format!("queues/{queue}/rps_cpus")))
            .is_some_and(|mask| mask.chars().any(|c| !['0', ','].contains(&c)))
    };
    let interrupts = files.names(&path("device/msi_irqs"));
    let cpus = |number: &String| files.text(&format!("proc/irq/{number}/effective_affinity_list"));
    Interface {
        driver: files.target(&path("device/driver")),
        rps: queues.iter().any(has_rps),
        threaded: files.number(&path("threaded")).map(|on| on != 0),
        defer_hard_irqs: files.number(&path("napi_defer_hard_irqs")),
        interrupts: interrupts.iter().take(INTERRUPTS).filter_map(cpus).collect(),
        ..known
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_facts() {
        let directory = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = directory.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("proc/sys/kernel/osrelease", "6.1.0-13-amd64\n");
        write("proc/self/status", "Name:\tx\nCapEff:\t0000000000003000\n");
        write("proc/self/uid_map", "         0          0 4294967295\n");
        write("proc/self/mounts", "none /sys/fs/bpf bpf rw 0 0\n");
        write("proc/net/protocols", "protocol  size\nPACKET 1472\nXDP 960\n");
        write("proc/net/softnet_stat", "0000000a 00000003 00000001\n00000000 00000010 00000000\n");
        write("proc/sys/net/netfilter/nf_conntrack_count", "7\n");
        write("proc/sys/net/netfilter/nf_conntrack_max", "262144\n");
        write("proc/sys/kernel/unprivileged_userns_clone", "0\n");
        write("proc/sys/kernel/seccomp/actions_avail", "kill_process trap errno allow\n");
        write("proc/stat", "cpu  1 2\ncpu0 1\ncpu1 1\nintr 5\n");
        write("sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n");
        write("sys/class/net/eth0/ifindex", "3\n");
        write("sys/class/net/eth0/threaded", "0\n");
        write("sys/class/net/eth0/queues/rx-0/rps_cpus", "00000000,00000000\n");
        write("sys/class/net/eth0/queues/rx-1/rps_cpus", "00000000,00000002\n");
        write("sys/class/net/eth0/queues/tx-0/xps_cpus", "0\n");
        write("sys/class/net/eth0/device/msi_irqs/24", "msix\n");
        write("proc/irq/24/effective_affinity_list", "1\n");
        let link =
            |name: &str, index| Link { name: name.into(), index, mtu: 1500, rx_queues: 2, ..Link::default() };
        let facts = Facts::below(directory.path(), &[link("eth0", 3), link("eth0", 4), link("eth1", 5)]);
        assert_eq!((facts.release.as_str(), facts.capabilities), ("6.1.0-13-amd64", 0x3000));
        assert!(facts.initial_userns && facts.bpf_fs && !facts.tun && !facts.nfqueue);
        assert!(facts.protocols.contains(&"XDP".to_owned()));
        assert_eq!((facts.softnet, facts.conntrack, facts.cpus), ((19, 1), Some((7, 262_144)), 2));
        assert_eq!(facts.transparent.as_deref(), Some("madvise"));
        assert!(facts.seccomp);
        assert_eq!(facts.no_userns, Some("kernel.unprivileged_userns_clone = 0"));
        let [interface, others @ ..] = &facts.interfaces[..] else { panic!("{:?}", facts.interfaces) };
        assert_eq!((interface.name.as_str(), interface.mtu, interface.rx_queues), ("eth0", 1500, 2));
        assert_eq!(
            (interface.rps, interface.threaded, &interface.interrupts[..]),
            (true, Some(false), &["1".to_owned()][..])
        );
        // An interface of another namespace has the same name, or no files.
        assert_eq!(others.len(), 2);
        assert!(
            others
                .iter()
                .all(|other| other.mtu == 1500 && other.threaded.is_none() && other.interrupts.is_empty())
        );
        // An empty machine is no panic.
        let empty = tempfile::tempdir().unwrap();
        let facts = Facts::below(empty.path(), &[]);
        assert!(facts.interfaces.is_empty() && facts.cpus == 1 && !facts.seccomp);
    }
}
