//! Conflicts of a configuration with the state of this machine's kernel: warnings of `towpath run --check`.

use std::collections::HashMap;
use std::fs;
use std::sync::Arc;

use towpath_gate::rules::Diagnostic;
use towpath_port::af_xdp::Mode;
use towpath_port::driver::Config as Driver;
use towpath_port::kernel_path::KernelPath;
use towpath_port::probe::{self, Link, QueueRule};
use towpath_port::{af_xdp, nfqueue};

use super::{Config, Port};

/// What the kernel says, read once for all ports.
#[derive(Debug, Default)]
struct Kernel {
    /// `None`: unknown.
    links: Option<Vec<Link>>,
    /// Offloads that are on, by interface.
    offloads: HashMap<String, Vec<String>>,
    /// Queue numbers that a process has, with its netlink port id.
    queues: Vec<(u16, u32)>,
    /// Rules that queue packets; `None`: unknown.
    queue_rules: Option<Vec<QueueRule>>,
    /// Tracked connections, and their maximum.
    conntrack: Option<(u64, u64)>,
}

/// A conflict, and what to do about it.
type Warning = (String, String);

impl Config {
    /// The conflicts of all ports; `text` is that of the configuration.
    pub(super) fn kernel_warnings(&self, text: &str) -> Vec<Diagnostic> {
        let file: Arc<str> = self.file.display().to_string().into();
        let kernel = Kernel::read(&self.ports);
        let threads = self.engine_threads().max(1);
        let mut all = Vec::new();
        for port in &self.ports {
            // Quoted names are compared as they are written.
            let is_header = |line: &str| {
                let name = line.trim().strip_prefix("[port.").and_then(|rest| rest.strip_suffix(']'));
                name.is_some_and(|name| name.trim_matches('"') == port.name)
            };
            let line = text.lines().position(is_header).map_or(1, |at| at as u32 + 1);
            let driver = port.driver.kernel_warning().map(|message| (message, String::new()));
            for (message, hint) in driver.into_iter().chain(kernel.warnings(port, threads)) {
                let words: Vec<_> = message.split_ascii_whitespace().collect();
                let message = format!("`{}`: {}", port.name, words.join(" "));
                let hint = (!hint.is_empty()).then_some(hint);
                let file = Arc::clone(&file);
                all.push(Diagnostic { file, line, column: 1, end: 1, message, hint, no_such_rule: false });
            }
        }
        all
    }
}

impl Kernel {
    fn read(ports: &[Port]) -> Self {
        let offloads = |port: &Port| {
            let name = port.driver.interface()?;
            Some((name.to_owned(), probe::offloads(name).ok()?))
        };
        let mut kernel = Self {
            links: probe::links().ok(),
            offloads: ports.iter().filter_map(offloads).collect(),
            ..Self::default()
        };
        if ports.iter().any(|port| matches!(port.driver, Driver::Nfqueue(_))) {
            let text = |path: &str| fs::read_to_string(path).unwrap_or_default();
            let number = |name: &str| text(&format!("/proc/sys/net/netfilter/{name}")).trim().parse().ok();
            kernel.queues = queues(&text("/proc/thread-self/net/netfilter/nfnetlink_queue"));
            // Rules of iptables-legacy cannot be read in this way.
            let legacy = ["ip_tables_names", "ip6_tables_names"];
            let legacy =
                legacy.iter().any(|name| !text(&format!("/proc/thread-self/net/{name}")).trim().is_empty());
            kernel.queue_rules = probe::queue_rules().ok().filter(|_| !legacy);
            kernel.conntrack = number("nf_conntrack_count").zip(number("nf_conntrack_max"));
        }
        kernel
    }

    fn warnings(&self, port: &Port, threads: usize) -> Vec<Warning> {
        let mut all = Vec::new();
        let interface = match &port.driver {
            Driver::AfPacket(_) | Driver::AfXdp(_) => port.driver.interface(),
            Driver::Nfqueue(queue) => {
                self.queue(queue, threads, &mut all);
                None
            }
            Driver::Tun(_) | Driver::Pcap(_) => None,
        };
        let (Some(name), Some(links)) = (interface, &self.links) else { return all };
        let Some(link) = links.iter().find(|link| link.name == name) else {
            if !port.optional {
                all.push((
                    format!("there is no interface `{name}` in this network namespace"),
                    "the engine does not start without it; create it, correct `interface`, or set optional = true".to_owned(),
                ));
            }
            return all;
        };
        if self.offloads.get(name).is_some_and(|offloads| offloads.iter().any(|offload| offload == "rx-lro"))
        {
            let message =
                format!("LRO is on at `{name}`: it joins packets in a way that forwarding cannot undo");
            all.push((message, format!("run `ethtool -K {name} lro off`")));
        }
        if let Driver::AfXdp(xdp) = &port.driver {
            let kernel = KernelPath::of(name).unwrap_or_default();
            self::xdp(xdp, link, &kernel, port.driver.is_open(), &mut all);
        }
        all
    }

    fn queue(&self, queue: &nfqueue::Config, threads: usize, all: &mut Vec<Warning>) {
        let numbers = u32::from(queue.queue)..u32::from(queue.queue) + threads as u32;
        for number in numbers.filter_map(|number| u16::try_from(number).ok()) {
            if let Some((_, owner)) = self.queues.iter().find(|(own, _)| *own == number) {
                all.push((
                    format!("a process has the kernel's queue {number} (netlink port id {owner}, often its process id)"),
                    "unless it is the engine of this configuration, end it, or set another `queue`".to_owned(),
                ));
            }
            if self.queue_rules.as_ref().is_some_and(|rules| !rules.iter().any(|rule| rule.has(number))) {
                all.push((
                    format!("no rule of nftables sends packets to queue {number}"),
                    format!("add one: iptables -A FORWARD -j NFQUEUE --queue-num {number}"),
                ));
            }
        }
        if let Some((count, max)) = self.conntrack.filter(|(count, max)| *max > 0 && count >= &(max / 10 * 9))
        {
            all.push((
                format!("the kernel tracks {count} of at most {max} connections and drops new ones before the queue"),
                "raise net.netfilter.nf_conntrack_max, or do not track: iptables -t raw -A PREROUTING -j CT --notrack".to_owned(),
            ));
        }
    }
}

/// `ours`: a port of Towpath has the interface already.
fn xdp(config: &af_xdp::Config, link: &Link, kernel: &KernelPath, ours: bool, all: &mut Vec<Warning>) {
    let name = &link.name;
    if let Some(program) = link.program.filter(|_| !ours) {
        all.push((
            format!("an XDP program is attached to `{name}` (number {}, {} mode)", program.id, program.mode),
            format!("end its owner, or run `ip link set dev {name} xdp off` or `towpath ctl clean`"),
        ));
    }
    if config.mode == Mode::Native && link.xdp.is_some_and(|xdp| !xdp.native) {
        let message = format!("the driver of `{name}` has no native XDP mode");
        all.push((message, "remove `mode`: generic mode works with each driver".to_owned()));
    } else if config.zero_copy && link.xdp.is_some_and(|xdp| !xdp.zero_copy) {
        let message = format!("the driver of `{name}` does not support zero copy");
        all.push((message, "remove `zero-copy`".to_owned()));
    }
    let addresses: Vec<String> = kernel.addresses.iter().map(|(_, address)| address.to_string()).collect();
    if !addresses.is_empty() {
        all.push((
            format!("the kernel has {} and receives none of the packets to it", addresses.join(", ")),
            "remove the address, or use driver = \"af_packet\" with `host`".to_owned(),
        ));
    }
    if let Some(master) = &kernel.master {
        let message = format!("the kernel's {master} has `{name}` and receives none of its packets");
        all.push((message, format!("run `ip link set {name} nomaster`")));
    }
}

/// The first two columns of nfnetlink_queue: number and netlink port id.
fn queues(text: &str) -> Vec<(u16, u32)> {
    let row = |line: &str| {
        let mut columns = line.split_whitespace();
        Some((columns.next()?.parse().ok()?, columns.next()?.parse().ok()?))
    };
    text.lines().filter_map(row).collect()
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use towpath_port::probe::{XdpFeatures, XdpProgram};

    use super::*;

    fn words(all: &[Warning]) -> Vec<&str> {
        assert!(all.iter().all(|(_, hint)| !hint.is_empty()));
        all.iter().map(|(message, _)| message.as_str()).collect()
    }

    #[test]
    fn a_queue_may_be_taken_and_may_have_no_rule() {
        let kernel = Kernel {
            queues: queues("    5  4711     0 2 65531     0     0        0  1\n    7 12 0\nx\n"),
            queue_rules: Some(vec![QueueRule { place: "filter FORWARD".into(), first: 5, count: 2 }]),
            ..Kernel::default()
        };
        let of = |kernel: &Kernel, queue, threads| {
            let mut all = Vec::new();
            kernel.queue(&nfqueue::Config::new(queue), threads, &mut all);
            words(&all).join("; ")
        };
        assert!(of(&kernel, 5, 1).starts_with("a process has the kernel's queue 5 (netlink port id 4711"));
        assert_eq!(of(&kernel, 6, 1), "");
        let seven = of(&kernel, 6, 2);
        assert!(
            seven.contains("queue 7 (netlink port id 12")
                && seven.ends_with("no rule of nftables sends packets to queue 7")
        );
        assert_eq!(of(&kernel, 65_535, 2).matches("no rule").count(), 1);
        let unknown = Kernel { conntrack: Some((95, 100)), ..Kernel::default() };
        assert!(of(&unknown, 9, 1).starts_with("the kernel tracks 95 of at most 100"));
        assert_eq!(of(&Kernel { conntrack: Some((1, 100)), ..Kernel::default() }, 9, 1), "");
    }

    #[test]
    fn an_xdp_port_may_conflict_with_the_kernel() {
        let link = Link {
            name: "eth0".into(),
            program: Some(XdpProgram { mode: "native", id: 3 }),
            xdp: Some(XdpFeatures::default()),
            ..Link::default()
        };
        let kernel = KernelPath {
            addresses: vec![("eth0".into(), IpAddr::from([192, 0, 2, 1]))],
            master: Some("br0".into()),
            ..KernelPath::default()
        };
        let config = af_xdp::Config { mode: Mode::Native, ..af_xdp::Config::new("eth0") };
        let mut all = Vec::new();
        xdp(&config, &link, &kernel, false, &mut all);
        let expected = [
            "an XDP program is attached to `eth0` (number 3, native mode)",
            "the driver of `eth0` has no native XDP mode",
            "the kernel has 192.0.2.1 and receives none of the packets to it",
            "the kernel's br0 has `eth0` and receives none of its packets",
        ];
        assert_eq!(words(&all), expected);
        let mut none = Vec::new();
        let free = Link { xdp: None, ..link };
        xdp(&af_xdp::Config::new("eth0"), &free, &KernelPath::default(), true, &mut none);
        assert_eq!(words(&none), Vec::<&str>::new());
    }
}
