//! The table of configuration keys: the values, default and purpose of each key, stated once.
//!
//! The reader takes ranges and words from it, and docs/book/src/reference/run.md has its text; a test compares them.

/// One key of the configuration file.
#[derive(Clone, Copy, Debug)]
pub struct Key {
    /// The table that has the key: `""` is the top of the file, `"port"` stands for `[port.NAME]`.
    pub table: &'static str,
    /// The key.
    pub name: &'static str,
    /// Its values.
    pub value: Value,
    /// Its default: a value as it is written in the file, or a description. Empty: no default.
    pub default: &'static str,
    /// Its purpose, without a final dot. Where only some drivers have the key, their names come first.
    pub help: &'static str,
}

/// The values of a key.
#[derive(Clone, Copy, Debug)]
pub enum Value {
    /// Text.
    Text,
    /// A list of texts, or one text.
    Texts,
    /// `true` or `false`.
    Flag,
    /// `true` or `false`, also `"yes"` or `"no"`.
    Switch,
    /// A whole number, from the first to the second bound inclusive.
    Number(u64, u64),
    /// A list of whole numbers within bounds.
    Numbers(u64, u64),
    /// A whole number within bounds, or the word.
    NumberOr(u64, u64, &'static str),
    /// A number of seconds within bounds.
    Seconds(f64, f64),
    /// One of these words.
    Word(&'static [&'static str]),
}

/// A key that has another name now.
pub(super) const RENAMED: &[(&str, &str, &str)] = &[("", "tap", "monitor")];

/// The key `name` of `table`.
///
/// # Panics
///
/// Panics if [`KEYS`] has no such key: the reader asks for a key that is not in the table.
pub(super) fn key(table: &str, name: &str) -> &'static Key {
    let found = KEYS.iter().find(|key| key.table == table && key.name == name);
    found.unwrap_or_else(|| panic!("the key `{name}` of [{table}] is missing in KEYS"))
}

impl Value {
    /// The values as the documentation lists them: `"0..63 or \"own\""`.
    pub fn words(&self) -> String {
        match self {
            Self::Text => "text".to_owned(),
            Self::Texts => "text or list of texts".to_owned(),
            Self::Flag | Self::Switch => "`true`, `false`".to_owned(),
            Self::Number(min, max) => format!("{min}..{max}"),
            Self::Numbers(min, max) => format!("list of {min}..{max}"),
            Self::NumberOr(min, max, word) => format!("{min}..{max}, `\"{word}\"`"),
            Self::Seconds(min, max) => format!("{min}..{max} s"),
            Self::Word(words) => {
                words.iter().map(|word| format!("`\"{word}\"`")).collect::<Vec<_>>().join(", ")
            }
        }
    }
}

/// The documentation's rows of one table's keys in Markdown: key, values, purpose, default.
pub fn markdown(table: &str) -> String {
    let mut text = "| key | values | meaning | default |\n|---|---|---|---|\n".to_owned();
    for key in KEYS.iter().filter(|key| key.table == table) {
        let default = if key.default.is_empty() { "none" } else { key.default };
        text += &format!("| `{}` | {} | {} | {default} |\n", key.name, key.value.words(), key.help);
    }
    text
}

const fn new(
    table: &'static str,
    name: &'static str,
    value: Value,
    default: &'static str,
    help: &'static str,
) -> Key {
    Key { table, name, value, default, help }
}

use Value::{Flag, Number, NumberOr, Numbers, Seconds, Switch, Text, Texts, Word};

/// All keys, by table in the order of the documentation.
#[rustfmt::skip]
pub const KEYS: &[Key] = &[
    new("", "rules", Text, "required", "the [rule file](rules.md)"),
    new("", "default", Word(&["allow", "deny"]), "`\"deny\"`", "action of the default rule"),
    new("", "states", Text, "", "file that keeps the states across a restart"),
    new("", "states-every", Seconds(0.1, 3600.0), "", "also save the states at this interval, so that they survive a kill ([restarts](#restarts))"),
    new("", "states-at-reload", Word(&["recheck", "keep", "drop"]), "`\"recheck\"`", "states at a reload ([rules](rules.md#another-rule-file))"),
    new("", "unserved", Word(&["pass", "drop"]), "`\"drop\"`", "verdict for packets of a queue without `[queue.N]`, and default of each `default`"),
    new("", "monitor", Texts, "", "ports whose packets are not forwarded; rules and inspectors see them"),

    new("port", "driver", Word(&["af_packet", "af_xdp", "tun", "tap", "nfqueue", "pcap"]), "required", "[port driver](ports.md)"),
    new("port", "address", Texts, "", "own addresses without prefix length: `me` in rules, and the source of replies"),
    new("port", "echo", Number(0, 1_000_000), "`1000`", "replies per second to echo requests for the router's addresses; 0: none"),
    new("port", "zone", Number(0, 65_535), "`0`", "[zone](rules.md#zones) of the states of its packets"),
    new("port", "interface", Text, "NAME", "`af_packet`, `af_xdp`, `tun`, `tap`: the interface; TUN and TAP create a missing one"),
    new("port", "optional", Flag, "`false`", "wait for an interface that does not exist at the start"),
    new("port", "offload", Flag, "`false`", "`af_packet`, `tun`, `tap`: forward large segments and partial checksums as they are"),
    new("port", "exclusive", Flag, "true; false for `monitor`", "`af_packet`: keep the packets from the kernel's network stack ([below](#the-kernels-share))"),
    new("port", "host", Texts, "", "`af_packet`: packets that the kernel still receives: `arp`, `nd`, `dhcp`, `icmp`, `ssh`, filters ([below](#the-kernels-share))"),
    new("port", "mode", Word(&["generic", "native"]), "`\"generic\"`", "`af_xdp`: XDP mode"),
    new("port", "zero-copy", Flag, "`false`", "`af_xdp`: needs `mode = \"native\"` and a driver that supports it"),
    new("port", "multi-buffer", Flag, "if supported", "`af_xdp`: frames of several buffers, for large segments and an MTU above 3,826"),
    new("port", "fail", Word(&["open", "closed"]), "`\"open\"` (`nfqueue`: closed)", "`af_packet`, `af_xdp`: when the engine dies; `nfqueue`: when the queue is full"),
    new("port", "queue", Number(0, 65_535), "`0`", "`nfqueue`: the kernel's queue number, that of the first thread"),
    new("port", "copy-range", Number(0, 65_535), "`65535`", "`nfqueue`: bytes of each packet"),
    new("port", "gso", Flag, "`true`", "`nfqueue`: receive large segments"),
    new("port", "interfaces", Texts, "", "`nfqueue`: the kernel's interfaces that rules name with `recv`, `xmit` and `via`"),
    new("port", "queue-length", Number(1, 4_294_967_295), "`20000`", "`nfqueue`: packets that wait in the kernel for a verdict"),
    new("port", "conntrack", Flag, "`false`", "`nfqueue`: packets have netfilter's connection mark (`connmark`)"),
    new("port", "repeat", Flag, "`false`", "`nfqueue`: a packet whose mark changed begins again at the first rule of its hook (NF_REPEAT)"),
    new("port", "read", Text, "", "`pcap`: capture to receive from; `read`, `write` or both are required"),
    new("port", "write", Text, "", "`pcap`: capture to send to"),

    new("port.vlan", "id", Number(0, 4094), "required", "outermost VLAN tag of the packets that arrive on the port NAME"),
    new("port.vlan", "zone", Number(0, 65_535), "that of the port", "[zone](rules.md#zones) of the states of its packets"),

    new("bridge", "ports", Texts, "required", "the two ports"),
    new("bridge", "walk-out", Flag, "`false`", "evaluate the rules again, direction `out`, on the sending port"),

    new("route", "to", Text, "required", "prefix of the destination"),
    new("route", "port", Text, "required", "sending port"),
    new("route", "via", Text, "the destination", "address of the next hop"),
    new("route", "mac", Text, "resolved", "Ethernet address of the next hop"),

    new("queue", "socket", Text, "", "Unix socket where inspectors attach"),
    new("queue", "users", Texts, "", "users that may attach besides root and the engine's user: names, or numbers as text"),
    new("queue", "groups", Texts, "", "groups that may attach"),
    new("queue", "mode", Text, "see below", "permissions of the socket file, in octal"),
    new("queue", "command", Texts, "", "commands of inspector processes, split into words as by a shell"),
    new("queue", "interface", Word(&["ring", "nfqueue"]), "`\"ring\"`", "library of the commands: Towpath's, or libnetfilter_queue ([guide](../guides/nfqueue-programs.md))"),
    new("queue", "workers", Number(1, 64), "`1`", "processes of each command"),
    new("queue", "standby", Number(0, 64), "`0`", "further processes of each command that are attached and idle (below)"),
    new("queue", "user", Text, "an unused id", "user of the processes, if root starts the engine ([privileges](privileges.md))"),
    new("queue", "group", Text, "that of `user`", "group of the processes"),
    new("queue", "env", Texts, "", "variables to pass besides the usual ones (`\"NAME\"`), or to set (`\"NAME=VALUE\"`)"),
    new("queue", "limits", Texts, "no core dump, 1,024 files", "resource limits of each process ([names](privileges.md#limits))"),
    new("queue", "cgroup", Text, "", "cgroup (v2) of the processes; a relative name is below /sys/fs/cgroup"),
    new("queue", "memory", Number(1, 1 << 20), "256", "MiB of shared memory for the inspectors of one user (below)"),
    new("queue", "fanout", Text, "`\"flow\"`", "selection of the inspector (below)"),
    new("queue", "overload", Text, "`\"drop-newest\"`", "policy for a packet whose inspector has no room (below)"),
    new("queue", "high", Number(1, 65_536), "size of the ring", "packets at which an inspector has no room"),
    new("queue", "low", Number(0, 65_535), "`high` - 1", "packets at which it has room again"),
    new("queue", "share", Number(1, 1000), "`1`", "weight in the division of the [reorder buffer](../how/packet-path.md#the-reorder-buffer)"),
    new("queue", "may-queue", Numbers(1, 65_535), "", "queues to which its inspectors may send a packet (below)"),
    new("queue", "may-inject", Flag, "`false`", "its inspectors may send packets of their own by any port (below)"),
    new("queue", "deadline", Seconds(0.001, 3600.0), "`1`", "time until a packet without a verdict gets the `default`"),
    new("queue", "stall", Seconds(0.001, 3600.0), "3 `deadline`", "time without an answer after which an inspector gets no packets (below)"),
    new("queue", "default", Word(&["pass", "drop"]), "as `unserved`", "verdict for packets that no inspector decides"),

    new("queue.sandbox", "seccomp", Word(&["default", "off"]), "`default` if the kernel accepts the filter", "`default`: [system calls](privileges.md#sandbox-of-a-program) that programs of packets and messages do not need fail with EPERM"),
    new("queue.sandbox", "namespaces", Texts, "", "new namespaces of each process: `net`, `ipc`, `uts`, `cgroup`; needs an engine that root starts"),
    new("queue.sandbox", "read", Texts, "all", "files and directories that the program may read and execute, besides those of the [system](privileges.md#sandbox-of-a-program)"),
    new("queue.sandbox", "write", Texts, "all; none with `read`", "files and directories that the program may read and write"),

    new("mux", "listen", Texts, "required", "`\"HOST:PORT\"` or `\"unix:PATH\"`"),
    new("mux", "thread", NumberOr(0, 63, "own"), "in turn", "engine thread that serves the mux; without ports `\"own\"`"),
    new("mux", "framing", Text, "required", "preset, clauses, or file ([framing](framing.md))"),
    new("mux", "worker", Text, "required without `remote`", "command of a worker process"),
    new("mux", "workers", Number(1, 64), "number of CPUs", "worker processes"),
    new("mux", "remote", Text, "", "subject of [workers on other machines](remote-workers.md), which get the messages that no worker process takes; needs the table [fleet](#fleet)"),
    new("mux", "remote-workers", Number(1, 64), "`16`", "maximum number of workers on other machines; needs `remote`"),
    new("mux", "user", Text, "an unused id", "user of the processes, if root starts the engine ([privileges](privileges.md))"),
    new("mux", "group", Text, "that of `user`", "group of the processes"),
    new("mux", "env", Texts, "", "variables to pass besides the usual ones (`\"NAME\"`), or to set (`\"NAME=VALUE\"`)"),
    new("mux", "limits", Texts, "no core dump, 1,024 files", "resource limits of each process ([names](privileges.md#limits))"),
    new("mux", "cgroup", Text, "", "cgroup (v2) of the processes; a relative name is below /sys/fs/cgroup"),
    new("mux", "worker-may", Word(&["push"]), "", "further rights of the workers ([authority](mux.md#authority-of-a-worker))"),
    new("mux", "order", Word(&["none", "replies", "serial", "sticky", "key"]), "that of the [preset](framing.md#presets)", "[order](mux.md#order) of messages and replies"),
    new("mux", "in-flight", Number(1, 1_000_000), "all workers but one", "messages of one connection that workers hold at a time ([balance](mux.md#balance))"),
    new("mux", "rebalance", Number(1, 1_000_000), "", "`sticky`: connections above the fewest of a worker from which they move ([order](mux.md#order))"),
    new("mux", "message-max", Number(1, 33_554_432), "`16777216`", "bytes of the longest message"),
    new("mux", "head-max", Number(1, 1 << 32), "64 KiB", "bytes of a message before its length is known, for BPF programs"),
    new("mux", "connection-bytes", Number(1, 1 << 32), "1 MiB", "bytes of complete messages at which a connection is not read"),
    new("mux", "send-bytes", Number(1, 1 << 32), "256 KiB", "bytes of replies not taken by the peer at which its connection is not read"),
    new("mux", "send-most", Number(1, 1 << 32), "16 MiB, or two of `message-max`", "bytes of such replies above which the connection is closed"),
    new("mux", "mux-bytes", Number(1, 1 << 32), "256 MiB", "bytes of all connections at which none is read"),
    new("mux", "send-time", Seconds(0.001, 86_400.0), "60 s", "time without progress after which a connection with unsent replies is closed"),
    new("mux", "message-time", Seconds(0.001, 86_400.0), "", "time limit of a message from its first byte, plus 1 s for each 64 KiB"),
    new("mux", "idle", Seconds(0.001, 86_400.0), "", "time without traffic and work after which a connection is closed"),
    new("mux", "timeout", Seconds(0.001, 86_400.0), "", "time for one message after which its worker is killed"),
    new("mux", "redeliver", Number(0, 255), "`2`", "attempts with other workers after a worker died"),
    new("mux", "on-worker-end", Word(&["move", "close"]), "by `order`", "[connections of a worker that ends](mux.md#when-a-worker-ends)"),
    new("mux", "undone", Word(&["close", "keep"]), "`\"close\"`", "connection of a message that was given up"),
    new("mux", "drain", Seconds(0.001, 86_400.0), "`10`", "time to finish when the engine stops"),
    new("mux", "send", Word(&["adaptive", "zerocopy", "plain"]), "`\"adaptive\"`", "how replies of 16 KiB and more are sent ([send](send.md))"),
    new("mux", "send-check", Switch, "`false`", "count replies that changed between reply and completion"),
    new("mux", "tls-cert", Text, "", "certificate chain for TLS over TCP, PEM"),
    new("mux", "tls-key", Text, "", "key of the certificate, PEM"),
    new("mux", "tls-client-ca", Text, "", "CA of client certificates, PEM; clients then need one ([TLS](mux.md#client-certificates))"),
    new("mux", "tls-client-optional", Switch, "`false`", "serve clients without a certificate too"),
    new("mux", "tls-kernel", Switch, "`false`", "the kernel encrypts and decrypts after the handshake ([TLS](mux.md#tls-by-the-kernel))"),
    new("mux", "starttls", Switch, "`false`", "begin in plaintext and require [STARTTLS](mux.md#starttls)"),

    new("mux.sandbox", "seccomp", Word(&["default", "off"]), "`default` if the kernel accepts the filter", "`default`: [system calls](privileges.md#sandbox-of-a-program) that programs of packets and messages do not need fail with EPERM"),
    new("mux.sandbox", "namespaces", Texts, "", "new namespaces of each process: `net`, `ipc`, `uts`, `cgroup`; needs an engine that root starts"),
    new("mux.sandbox", "read", Texts, "all", "files and directories that the program may read and execute, besides those of the [system](privileges.md#sandbox-of-a-program)"),
    new("mux.sandbox", "write", Texts, "all; none with `read`", "files and directories that the program may read and write"),

    new("engine", "threads", Number(1, 63), "`1`", "threads that process packets; at most 63 together with the muxes"),
    new("engine", "cpus", Numbers(0, 1023), "", "CPU of each thread"),
    new("engine", "wait", Word(&["park", "spin"]), "`\"park\"`", "`park` sleeps without packets, `spin` never sleeps"),
    new("engine", "spin", Number(0, 1_000_000), "`50`", "microseconds to poll before sleeping"),
    new("engine", "burst", Number(1, 1024), "`256`", "packets in one burst"),
    new("engine", "reorder-packets", Number(256, 1 << 20), "`8192`", "packets in the reorder buffer of a thread"),
    new("engine", "reorder-memory", Number(1, 4096), "`16`", "MiB of packets in the reorder buffer of a thread"),
    new("engine", "drain", Seconds(0.0, 3600.0), "`5`", "time that a stop waits for inspectors"),
    new("engine", "upgrade", Texts, "", "programs that an [upgrade](run.md#upgrade) may start, as absolute paths; the first one is the default"),
    new("engine", "upgrade-time", Seconds(1.0, 3600.0), "`30`", "time for the new version to be ready"),
    new("engine", "sandbox", Word(&["kill", "log", "off"]), "`kill` if the kernel accepts the filters", "[system calls](privileges.md#system-calls) that a thread's role lacks end the process, or are logged; `kill` also restricts [files](privileges.md#files)"),
    new("engine", "log-drops", Word(&["losses", "all", "no"]), "`\"losses\"`", "dropped packets to [log](#log): those that no rule and no inspector decided, all, or none"),
    new("engine", "hugepages", Flag, "`false`", "state table in huge pages"),
    new("engine", "user", Text, "`towpath`, if it exists", "user of the engine, if root starts it ([privileges](privileges.md))"),
    new("engine", "group", Text, "that of `user`", "group of the engine"),

    new("offload", "after", Number(1, 1_000_000), "`2`", "packets of a state after which the kernel forwards those of its flow ([offload](offload.md))"),
    new("offload", "rules", Word(&["marked", "all"]), "`\"marked\"`", "states to offload: of rules with `offload`, or of all rules"),
    new("offload", "deny", Flag, "`false`", "the kernel drops the packets of flows that inspectors block, and of addresses that rules deny ([offload](offload.md#blocked-flows))"),
    new("offload", "fail", Word(&["open", "closed"]), "`\"open\"`", "when the engine dies: offloaded flows go on until their lifetime ends, or end"),
    new("offload", "entries", Number(2, 4_194_304), "`65536`", "room for entries; a flow has two, one for each direction"),

    new("control", "socket", Text, "required", "Unix socket of [`towpath ctl`](ctl.md)"),
    new("control", "owner", Text, "", "user with full access besides root and the engine's user"),
    new("control", "group", Text, "", "group with read access"),
    new("control", "mode", Text, "see below", "permissions of the socket file, in octal"),

    new("metrics", "listen", Text, "required", "`\"HOST:PORT\"` or `\"unix:PATH\"` of the [metrics endpoint](metrics.md#the-endpoint)"),
    new("metrics", "group", Text, "", "group that may connect to the Unix socket"),
    new("metrics", "mode", Text, "0600; with `group` 0660", "permissions of the Unix socket's file, in octal"),

    new("ipfix", "collector", Text, "required", "`\"HOST:PORT\"` of the [collector](flow-records.md#ipfix), over UDP"),
    new("ipfix", "domain", Number(0, 4_294_967_295), "`1`", "observation domain: distinguishes engines of one address"),
    new("ipfix", "active-timeout", Seconds(1.0, 86_400.0), "`60`", "interval of the records of a flow that continues"),
    new("ipfix", "template-refresh", Seconds(1.0, 86_400.0), "`600`", "interval at which templates and names of rules are sent again"),
    new("ipfix", "mtu", Number(560, 65_535), "`1500`", "bytes of the longest packet, with its IP and UDP headers"),
    new("ipfix", "starts", Flag, "`false`", "also a record at the start of each flow"),

    new("events", "output", Text, "required", "file, `\"unix:PATH\"` or `\"stdout\"` for [events](flow-records.md#json-events)"),
    new("events", "include", Texts, "all", "kinds of events: `states`, `drops`, `verdicts`"),

    new("fleet", "servers", Texts, "required", "`\"nats://HOST:PORT\"` or `\"tls://HOST:PORT\"` of the [group's servers](fleet.md); the first that answers is used"),
    new("fleet", "group", Text, "", "name of the group, a word of subjects. Without it, only muxes with `remote` use the servers"),
    new("fleet", "gate", Text, "required", "name of this gate, a word of subjects, unlike all others"),
    new("fleet", "credentials", Text, "", "file of credentials, or with the seed of an nkey; the engine's user reads it"),
    new("fleet", "tls", Flag, "`false`", "TLS is required"),
    new("fleet", "tls-ca", Text, "the system's", "file of certificates of authorities"),
    new("fleet", "tls-certificate", Text, "", "file of this gate's certificate; needs `tls-key`"),
    new("fleet", "tls-key", Text, "", "file of the certificate's key; needs `tls-certificate`"),
    new("fleet", "replicate", Word(&["replied", "all"]), "`\"replied\"`", "`replied`: states whose other side has sent a packet. `all`: all states"),
    new("fleet", "configuration", Text, "", "file that keeps the [group's configuration](fleet.md#the-configuration-of-a-group): with it, rules, tables and settings come from the group"),
    new("fleet", "window", Seconds(0.001, 10.0), "`0.01`", "suppression window: the first change of a state and those of TCP are sent at once, others in it together"),

    new("log", "format", Word(&["text", "json", "journald"]), "by standard error", "[format](log.md#formats) of the log"),
    new("log", "level", Word(&["off", "error", "warning", "info", "debug", "trace"]), "`\"info\"`", "level of all targets without a level of their own"),
    new("log", "targets", Texts, "`[\"states=off\", \"towpath_=warning\"]`", "levels of [targets](log.md#targets): `TARGET=LEVEL`"),
];
