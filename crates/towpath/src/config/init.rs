//! `towpath config init`: the text of a new configuration and of its rules. No IO.

use std::net::IpAddr;

use super::keys::{Key, key};
use super::schema::plain;

/// What the configuration is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Two interfaces, one link.
    Bridge,
    /// A router between two interfaces.
    Router,
    /// A queue of the kernel's NFQUEUE.
    Nfqueue,
    /// A router between a TUN device of this machine and an interface.
    Tun,
    /// A message server.
    Mux,
}

/// A question: the name of the answer, its text, and the answer that is proposed.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// The name of the answer, also of the option.
    pub name: &'static str,
    /// The text.
    pub text: &'static str,
    /// The proposed answer.
    pub default: &'static str,
    check: fn(&str) -> Result<(), &'static str>,
}

/// The files of a configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Files {
    /// The configuration.
    pub config: String,
    /// The rules.
    pub rules: String,
}

const fn ask(
    name: &'static str,
    text: &'static str,
    default: &'static str,
    check: fn(&str) -> Result<(), &'static str>,
) -> Question {
    Question { name, text, default, check }
}

const WAN: Question = ask("wan", "Interface of the uplink", "eth0", interface);
const LAN: Question = ask("lan", "Interface of the local network", "eth1", interface);
const DRIVER: Question = ask("driver", "Driver of the interfaces: af_packet or af_xdp", "af_packet", driver);
const WAN_ADDRESS: Question = ask("wan-address", "Address of the router on the uplink", "192.0.2.2", address);
const GATEWAY: Question = ask("gateway", "Router of the provider on the uplink", "192.0.2.1", address);
const LAN_ADDRESS: Question =
    ask("lan-address", "Address of the router in the local network", "198.51.100.1", address);
const NETWORK: Question = ask("network", "Prefix of the local network", "198.51.100.0/24", prefix);
const TUN: Question = ask("tun", "Name of the TUN device", "tow0", interface);
const TUN_NETWORK: Question =
    ask("network", "Prefix of the addresses behind the TUN device", "198.51.100.0/24", prefix);
const QUEUE: Question = ask("queue", "Queue number of the rule in iptables or nftables", "0", queue);
const LISTEN: Question = ask("listen", "HOST:PORT, or unix:PATH, to listen on", "127.0.0.1:7007", listen);
const FRAMING: Question =
    ask("framing", "Framing of the messages: a preset such as line, resp, http or grpc", "line", some);
const WORKER: Question = ask("worker", "Command of a worker process", "/usr/lib/towpath/worker", some);

impl Kind {
    /// What must be known.
    pub fn questions(self) -> &'static [Question] {
        match self {
            Self::Bridge => &[WAN, LAN, DRIVER],
            Self::Router => &[WAN, LAN, DRIVER, WAN_ADDRESS, GATEWAY, LAN_ADDRESS, NETWORK],
            Self::Nfqueue => &[QUEUE],
            Self::Tun => &[WAN, TUN, DRIVER, WAN_ADDRESS, GATEWAY, TUN_NETWORK],
            Self::Mux => &[LISTEN, FRAMING, WORKER],
        }
    }
}

impl Question {
    /// Checks an answer.
    ///
    /// # Errors
    ///
    /// Returns what an answer looks like.
    pub fn check(&self, answer: &str) -> Result<(), String> {
        (self.check)(answer).map_err(|wanted| format!("`{answer}` is not {wanted}"))
    }
}

/// Writes the files. `answer` returns the answer to a question by its name; `rules` is the name of the rule file, `control` the control
/// socket.
pub fn files(kind: Kind, answer: impl Fn(&str) -> String, rules: &str, control: &str) -> Files {
    let mut text = Text::default();
    text.line(match kind {
        Kind::Bridge => "A bridge between two interfaces.",
        Kind::Router => "A router between a local network and an uplink.",
        Kind::Nfqueue => "Packets of the kernel's NFQUEUE.",
        Kind::Tun => "A router between a TUN device of this machine and an uplink.",
        Kind::Mux => "A message server with worker processes.",
    });
    text.line("Check it: towpath run --check FILE. All keys: docs/book/src/reference/run.md, `towpath config schema`.");
    text.text += "\n";
    text.key("", "rules", &quoted(rules));
    let rules = match kind {
        Kind::Bridge => bridge(&mut text, answer),
        Kind::Router => router(&mut text, answer),
        Kind::Nfqueue => nfqueue(&mut text, answer),
        Kind::Tun => tun(&mut text, answer),
        Kind::Mux => mux(&mut text, answer),
    };
    text.table("[control]");
    text.key("control", "socket", &quoted(control));
    Files { config: text.text, rules: rules.to_owned() }
}

fn bridge(text: &mut Text, answer: impl Fn(&str) -> String) -> &'static str {
    text.port("wan", &answer("driver"), &answer("wan"));
    text.port("lan", &answer("driver"), &answer("lan"));
    text.table("[[bridge]]");
    text.key("bridge", "ports", r#"["wan", "lan"]"#);
    text.option("bridge", "walk-out", "true");
    text.inspector("inspect 1 tcp from any to any 80,443");
    text.no_keepalives();
    "\
# Hosts behind `lan` open any connection; their replies pass. ARP and neighbor discovery pass in both directions.
add 100 check-state
add 200 allow layer2 mac-type arp
add 210 allow icmp6 from any to any icmp6types 133,134,135,136
add 400 allow ip from any to any recv lan keep-state
# A server behind `lan`: add 500 allow tcp from any to 192.0.2.22 443 setup recv wan keep-state
add 65000 deny log logamount 100 ip from any to any
"
}

fn router(text: &mut Text, answer: impl Fn(&str) -> String) -> &'static str {
    text.port("wan", &answer("driver"), &answer("wan"));
    text.key("port", "address", &quoted(&answer("wan-address")));
    text.port("lan", &answer("driver"), &answer("lan"));
    text.key("port", "address", &quoted(&answer("lan-address")));
    text.route(&answer("network"), "lan", None);
    text.default_route(&answer("gateway"));
    text.inspector("inspect 1 tcp from any to any 80,443");
    ROUTER
}

/// Rules of a router: a packet walks them at its arrival, and as `out` when it is sent.
const ROUTER: &str = "\
# Hosts behind `lan` open any connection; their replies pass. ARP and neighbor discovery pass.
add 100 check-state
add 200 allow layer2 mac-type arp
add 210 allow icmp6 from any to any icmp6types 133,134,135,136
add 220 allow icmp from any to me icmptypes 8
add 300 allow ip from any to any in recv lan
add 310 allow ip from any to any out recv lan keep-state
add 65000 deny log logamount 100 ip from any to any
";

fn tun(text: &mut Text, answer: impl Fn(&str) -> String) -> &'static str {
    text.port("wan", &answer("driver"), &answer("wan"));
    text.key("port", "address", &quoted(&answer("wan-address")));
    text.table("[port.lan]");
    text.key("port", "driver", "\"tun\"");
    text.key("port", "interface", &quoted(&answer("tun")));
    let network = answer("network");
    text.line(&format!(
        "Its host side, when the engine runs: ip addr add ADDRESS dev {}; ADDRESS is in {network}",
        answer("tun")
    ));
    text.option("port", "offload", "true");
    text.route(&network, "lan", None);
    text.default_route(&answer("gateway"));
    text.inspector("inspect 1 tcp from any to any 80,443");
    ROUTER
}

fn nfqueue(text: &mut Text, answer: impl Fn(&str) -> String) -> &'static str {
    let number = answer("queue");
    text.table("[port.kernel]");
    text.key("port", "driver", "\"nfqueue\"");
    text.line("The rule of the kernel, one of:");
    text.line(&format!("iptables -A FORWARD -j NFQUEUE --queue-num {number} --queue-bypass"));
    text.line(&format!("nft add rule inet filter forward queue num {number} bypass"));
    text.key("port", "queue", &number);
    text.option("port", "fail", "\"open\"");
    text.option("port", "conntrack", "true");
    text.inspector("inspect 1 tcp from any to any 80,443");
    text.no_keepalives();
    "\
# Packets that pass continue in the kernel after the rule that queued them. A connection needs a packet that opens it.
add 100 check-state
add 200 allow icmp from any to any
add 210 allow ipv6-icmp from any to any
add 300 allow tcp from any to any setup keep-state
add 310 allow udp from any to any keep-state
add 65000 deny log logamount 100 ip from any to any
"
}

fn mux(text: &mut Text, answer: impl Fn(&str) -> String) -> &'static str {
    text.table("[mux.service]");
    text.key("mux", "listen", &quoted(&answer("listen")));
    text.key("mux", "framing", &quoted(&answer("framing")));
    text.key("mux", "worker", &quoted(&answer("worker")));
    text.option("mux", "workers", "4");
    text.option("mux", "idle", "300");
    text.option("mux", "message-max", "65536");
    text.option("mux", "tls-cert", "\"/etc/towpath/cert.pem\"");
    text.option("mux", "tls-key", "\"/etc/towpath/key.pem\"");
    "\
# The rules decide which peers may connect. A peer has at most 20 connections (per IPv4 address or IPv6 /64), and none from the table:
# towpath ctl table trouble add 192.0.2.0/24
table trouble create type addr
add 100 reset tcp from table(trouble) to any via service
add 200 allow tcp from any to any setup in via service limit src-addr/32/64 20
"
}

/// The configuration so far.
#[derive(Default)]
struct Text {
    text: String,
}

impl Text {
    /// A line of comment.
    fn line(&mut self, comment: &str) {
        self.text += &format!("# {comment}\n");
    }

    fn table(&mut self, header: &str) {
        self.text += &format!("\n{header}\n");
    }

    /// A key with its purpose.
    fn key(&mut self, table: &str, name: &str, value: &str) {
        self.purpose(key(table, name));
        self.text += &format!("{name} = {value}\n");
    }

    /// A key that is not set.
    fn option(&mut self, table: &str, name: &str, example: &str) {
        self.purpose(key(table, name));
        self.text += &format!("#{name} = {example}\n");
    }

    fn purpose(&mut self, key: &Key) {
        let default = match key.default {
            "" | "required" => String::new(),
            default => format!("; default: {}", plain(default)),
        };
        self.line(&format!("{}: {}{default}", key.name, plain(key.help)).replace('`', ""));
    }

    /// A port of a network interface.
    fn port(&mut self, name: &str, driver: &str, interface: &str) {
        self.table(&format!("[port.{name}]"));
        self.key("port", "driver", &quoted(driver));
        self.key("port", "interface", &quoted(interface));
        self.option("port", "optional", "true");
        match driver {
            "af_packet" => {
                self.key("port", "host", r#"["arp", "nd", "icmp", "ssh"]"#);
                self.option("port", "offload", "true");
            }
            _ => self.option("port", "mode", "\"native\""),
        }
    }

    /// Settings of an engine without routes.
    fn no_keepalives(&mut self) {
        self.table("[settings]");
        self.line("An engine without routes sends no keepalives: an idle TCP connection keeps its state for two hours.");
        self.text += "dyn_keepalive = 0\ndyn_ack_lifetime = 7200\n";
    }

    fn route(&mut self, to: &str, port: &str, via: Option<&str>) {
        self.table("[[route]]");
        self.text += &format!("to = {}\nport = {}\n", quoted(to), quoted(port));
        self.text.extend(via.map(|via| format!("via = {}\n", quoted(via))));
    }

    fn default_route(&mut self, gateway: &str) {
        let to = if gateway.contains(':') { "::/0" } else { "0.0.0.0/0" };
        self.route(to, "wan", Some(gateway));
    }

    /// The queue of a rule with `inspect`, as comments.
    fn inspector(&mut self, rule: &str) {
        self.text += "\n";
        self.line(&format!("An inspector, for a rule such as: add 350 {rule}"));
        self.text += "#[queue.1]\n";
        self.option(
            "queue",
            "command",
            "\"towpath inspect --queue 1 --match 'union.select' --verdict drop\"",
        );
        self.option("queue", "default", "\"pass\"");
        self.option("queue", "deadline", "0.5");
    }
}

/// A TOML string. JSON's escapes are TOML's.
fn quoted(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

fn interface(text: &str) -> Result<(), &'static str> {
    let fits = (1..=15).contains(&text.len()) && text.chars().all(|c| c.is_ascii_graphic() && c != '/');
    fits.then_some(()).ok_or("the name of an interface: 1 to 15 characters without `/` and spaces")
}

fn driver(text: &str) -> Result<(), &'static str> {
    ["af_packet", "af_xdp"].contains(&text).then_some(()).ok_or("af_packet or af_xdp")
}

fn address(text: &str) -> Result<(), &'static str> {
    text.parse::<IpAddr>().map(|_| ()).map_err(|_| "an IP address, such as 192.0.2.1")
}

fn prefix(text: &str) -> Result<(), &'static str> {
    let parsed = text.split_once('/').and_then(|(address, length)| {
        let (address, length) = (address.parse::<IpAddr>().ok()?, length.parse::<u8>().ok()?);
        (length <= if address.is_ipv4() { 32 } else { 128 }).then_some(())
    });
    parsed.ok_or("a prefix, such as 192.0.2.0/24")
}

fn queue(text: &str) -> Result<(), &'static str> {
    text.parse::<u16>().map(|_| ()).map_err(|_| "a number in 0..65535")
}

fn listen(text: &str) -> Result<(), &'static str> {
    let port =
        || text.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    let path = text.strip_prefix("unix:").is_some_and(|path| !path.is_empty());
    (path || port()).then_some(()).ok_or("HOST:PORT or unix:PATH")
}

fn some(text: &str) -> Result<(), &'static str> {
    (!text.trim().is_empty() && !text.chars().any(char::is_control)).then_some(()).ok_or("a line of text")
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    const KINDS: [Kind; 5] = [Kind::Bridge, Kind::Router, Kind::Nfqueue, Kind::Tun, Kind::Mux];

    fn proposed(kind: Kind) -> impl Fn(&str) -> String {
        move |name| {
            let question = kind.questions().iter().find(|question| question.name == name);
            question.unwrap_or_else(|| panic!("{kind:?} has no question {name}")).default.to_owned()
        }
    }

    fn check(kind: Kind, answer: impl Fn(&str) -> String) -> Files {
        let files = files(kind, answer, "towpath.ipfw", "/run/towpath/control.sock");
        let config = Config::parse("towpath.toml", &files.config);
        let config = config.unwrap_or_else(|errors| panic!("{kind:?}: {errors:?}\n{}", files.config));
        let rules = config.parse_rules("towpath.ipfw", &files.rules);
        let rules = rules.unwrap_or_else(|errors| panic!("{kind:?}: {errors:?}\n{}", files.rules));
        assert!(rules.warnings.is_empty(), "{kind:?}: {:?}", rules.warnings);
        let keepalives = config.without_keepalives("towpath.ipfw", &rules.ruleset);
        assert!(keepalives.is_none(), "{kind:?}: {keepalives:?}");
        files
    }

    #[test]
    fn proposed_answers_are_a_configuration() {
        for kind in KINDS {
            for question in kind.questions() {
                assert_eq!(question.check(question.default), Ok(()));
            }
            let files = check(kind, proposed(kind));
            assert!(
                files.config.lines().filter(|line| line.starts_with('#')).count() > 5,
                "{}",
                files.config
            );
            for line in files.config.lines().chain(files.rules.lines()) {
                assert!(line.len() <= 140, "{line}");
                assert!(!line.contains("]("), "{line}");
            }
        }
    }

    /// Each key that is a comment is accepted, too.
    #[test]
    fn the_comments_are_keys() {
        for kind in KINDS {
            let files = files(kind, proposed(kind), "towpath.ipfw", "/run/towpath/control.sock");
            let key =
                |line: &str| line.strip_prefix('#').filter(|line| !line.starts_with(' ')).map(str::to_owned);
            let text: String = files
                .config
                .lines()
                .map(|line| key(line).unwrap_or_else(|| line.to_owned()) + "\n")
                .collect();
            assert_ne!(text, files.config);
            if let Err(errors) = Config::parse("towpath.toml", &text) {
                panic!("{kind:?}: {errors:?}\n{text}");
            }
        }
    }

    #[test]
    fn other_answers_are_a_configuration_too() {
        let answers = |kind: Kind| {
            move |name: &str| match name {
                "driver" => "af_xdp".to_owned(),
                "wan-address" => "2001:db8::2".to_owned(),
                "gateway" => "2001:db8::1".to_owned(),
                "lan-address" => "2001:db8:1::1".to_owned(),
                "network" => "2001:db8:1::/64".to_owned(),
                "listen" => "unix:/run/x.sock".to_owned(),
                "worker" => "/bin/echo 'a \"b' x".to_owned(),
                name => proposed(kind)(name),
            }
        };
        for kind in [Kind::Bridge, Kind::Router, Kind::Tun] {
            check(kind, answers(kind));
        }
        let files = check(Kind::Mux, answers(Kind::Mux));
        assert!(files.config.contains(r#"worker = "/bin/echo 'a \"b' x""#), "{}", files.config);
    }

    #[test]
    fn wrong_answers_are_refused() {
        let rows: [(Question, &[&str]); 8] = [
            (WAN, &["", "a/b", "a b", "sixteen-letters!", "é"]),
            (DRIVER, &["tun", ""]),
            (GATEWAY, &["192.0.2", "192.0.2.1/24", ""]),
            (NETWORK, &["192.0.2.0", "192.0.2.0/33", "::/129", "x/1"]),
            (QUEUE, &["-1", "65536", "x"]),
            (LISTEN, &["7007", ":7007", "host:port", "unix:"]),
            (FRAMING, &["", " ", "a\nb"]),
            (WORKER, &["\u{1b}[2J"]),
        ];
        for (question, answers) in rows {
            for answer in answers {
                assert!(question.check(answer).is_err(), "{}: {answer}", question.name);
            }
        }
    }
}
