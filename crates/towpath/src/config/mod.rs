//! The configuration of `towpath run`: a TOML file, checked as a whole.
//!
//! Reading reports all errors at once, each with line, column and a hint. [`keys::KEYS`] describes every key;
//! `docs/book/src/reference/run.md` is the reference.
//!
//! ```
//! use towpath::config::Config;
//!
//! let text = r#"
//! rules = "bridge.ipfw"
//! [port.wan]
//! driver = "af_packet"
//! [port.lan]
//! driver = "af_packet"
//! [[bridge]]
//! ports = ["wan", "lann"]
//! "#;
//! let errors = Config::parse("towpath.toml", text).unwrap_err();
//! // And `lan` is not wired.
//! assert_eq!(errors.len(), 2);
//! assert_eq!(
//!     errors[1].to_string(),
//!     "towpath.toml:8:17: unknown port `lann`; did you mean `lan`?"
//! );
//! ```

mod command;
pub mod compare;
mod control;
mod engine;
mod events;
mod fleet;
mod group;
pub mod init;
mod ipfix;
mod kernel;
pub mod keys;
mod log;
mod metrics;
mod mux;
mod offload;
mod port;
mod process;
mod queue;
mod reader;
mod ruleset;
pub mod schema;
pub(crate) mod users;
mod wiring;

use std::path::{Path, PathBuf};
use std::time::Duration;

use toml::de::DeTable;
use towpath_gate::StatePolicy;
use towpath_gate::rules::Diagnostic;
use towpath_gate::state;

pub use self::control::Control;
pub use self::engine::{Engine, Wait};
pub use self::events::{EventOutput, Events};
pub use self::fleet::Fleet;
pub use self::group::GroupKeys;
pub use self::ipfix::Ipfix;
pub use self::log::Log;
pub use self::metrics::Metrics;
pub use self::mux::{Mux, RemoteWorkers, Thread};
pub use self::offload::Offload;
pub use self::port::{Port, Vlan};
pub use self::queue::{Inspectors, Queue};
pub(crate) use self::reader::meant;
use self::reader::{Findings, Table};
pub use self::ruleset::{Rules, parse_rule_file};
pub use self::users::Users;
pub use self::wiring::{Bridge, Route};
use crate::settings::{self, Settings};
use towpath_engine::queue::DefaultVerdict;

/// The configuration of `towpath run`.
#[derive(Clone, Debug)]
pub struct Config {
    /// The file that it was read from.
    pub file: PathBuf,
    /// The rule file.
    pub rules: PathBuf,
    /// True if the default rule is `allow`.
    pub default_allow: bool,
    /// Treatment of states at a reload.
    pub reload: StatePolicy,
    /// The file that keeps states across a restart.
    pub states: Option<PathBuf>,
    /// The interval at which the states are saved while the engine runs.
    pub states_every: Option<Duration>,
    /// The ports, in the order of the file.
    pub ports: Vec<Port>,
    /// Bridges.
    pub bridges: Vec<Bridge>,
    /// Ports whose packets are not forwarded (indices into `ports`).
    pub monitors: Vec<usize>,
    /// Routes.
    pub routes: Vec<Route>,
    /// Message servers.
    pub muxes: Vec<Mux>,
    /// The queues, by number.
    pub queues: Vec<Queue>,
    /// Verdict for packets of a queue that is not configured.
    pub unserved: DefaultVerdict,
    /// Settings under ipfw's names, checked.
    pub settings: Vec<(String, u64)>,
    /// The threads.
    pub engine: Engine,
    /// The control socket.
    pub control: Option<Control>,
    /// The metrics endpoint.
    pub metrics: Option<Metrics>,
    /// Flow records for a collector.
    pub ipfix: Option<Ipfix>,
    /// Servers of NATS, and the group of this gate.
    pub fleet: Option<Fleet>,
    /// Events as JSON lines.
    pub events: Option<Events>,
    /// Flows whose packets the kernel forwards.
    pub offload: Option<Offload>,
    /// The log.
    pub log: Log,
}

/// Errors of a configuration and its rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wrong {
    /// Errors of the configuration, its certificates and keys.
    pub config: Vec<Diagnostic>,
    /// Errors of the rules.
    pub rules: Vec<Diagnostic>,
}

impl Config {
    /// Reads a configuration file. Names of files in it are relative to its directory.
    ///
    /// # Errors
    ///
    /// All errors of the file.
    pub fn read(path: &Path) -> Result<Self, Vec<Diagnostic>> {
        Self::parse(&path.display().to_string(), &text_of(path)?)
    }

    /// Reads a configuration file and its rules, and checks its certificates and keys.
    ///
    /// # Errors
    ///
    /// All errors of all files. The rules are read even if the configuration has errors.
    pub fn read_whole(path: &Path) -> Result<(Self, Rules), Wrong> {
        match Self::read_all(path)? {
            (config, rules, denied) if denied.is_empty() => Ok((config, rules)),
            (_, _, config) => Err(Wrong { config, rules: Vec::new() }),
        }
    }

    /// As [`read_whole`](Self::read_whole), for a user that need not be the engine's: an unreadable certificate or key is only a
    /// warning.
    ///
    /// # Errors
    ///
    /// All other errors of all files.
    pub fn check(path: &Path) -> Result<(Self, Rules), Wrong> {
        let (config, mut rules, denied) = Self::read_all(path)?;
        rules.warnings.splice(..0, denied);
        let file = config.rules.display().to_string();
        rules.warnings.extend(config.without_keepalives(&file, &rules.ruleset));
        rules.warnings.extend(config.kernel_warnings(&text_of(path).unwrap_or_default()));
        Ok((config, rules))
    }

    /// Also returns the errors about certificates and keys that this user may not read.
    fn read_all(path: &Path) -> Result<(Self, Rules, Vec<Diagnostic>), Wrong> {
        let file = path.display().to_string();
        let only = |config| Wrong { config, rules: Vec::new() };
        let text = text_of(path).map_err(only)?;
        match Self::take_text(&file, &text, true) {
            Ok((config, denied)) => match config.read_rules() {
                Ok(rules) => Ok((config, rules, denied)),
                Err(rules) => Err(Wrong { config: Vec::new(), rules }),
            },
            Err(config) => Err(Wrong { config, rules: ruleset::errors_of(path, &text) }),
        }
    }

    /// Reads the text of a configuration file; `file` is its name.
    ///
    /// # Errors
    ///
    /// All errors of the text.
    pub fn parse(file: &str, text: &str) -> Result<Self, Vec<Diagnostic>> {
        Self::take_text(file, text, false).map(|(config, _)| config)
    }

    /// `whole`: check certificates and keys, too; the second value has the errors about unreadable ones.
    fn take_text(file: &str, text: &str, whole: bool) -> Result<(Self, Vec<Diagnostic>), Vec<Diagnostic>> {
        let findings = Findings::new(file, text);
        let (document, errors) = DeTable::parse_recoverable(text);
        for error in &errors {
            findings.add(&error.span().unwrap_or_default(), error.message().replace('\n', ", "), None);
        }
        // The parser recovers with made-up values, which would only cause further errors.
        if !errors.is_empty() {
            return Err(findings.into_found());
        }
        let top = Table::new(document.get_ref(), &findings);
        let config = Self::take(Path::new(file), top, whole);
        let denied = findings.take_denied();
        let found = findings.into_found();
        if found.is_empty() { Ok((config, denied)) } else { Err(found) }
    }

    fn take(file: &Path, top: Table<'_, '_>, whole: bool) -> Self {
        let directory = file.parent().unwrap_or(Path::new("."));
        top.need("rules", "name the rule file: rules = \"FILE\"");
        let rules = top.text("rules").map_or_else(PathBuf::new, |text| directory.join(text.value));
        let default_allow = top.word("default") == Some("allow");
        let reload = match top.word("states-at-reload") {
            Some("keep") => StatePolicy::Keep,
            Some("drop") => StatePolicy::Drop,
            _ => StatePolicy::Recheck,
        };
        let unserved = verdict(top.word("unserved")).unwrap_or_default();
        let (mut ports, unknown) = port::take(&top, directory);
        let wiring::Wiring { bridges, monitors, routes } = wiring::take(&top, &ports, &unknown);
        monitors.iter().for_each(|at| ports[*at].1.driver.set_monitor());
        let engine = engine::take(&top);
        let offload = offload::take(&top, &mut ports);
        let config = Self {
            file: file.into(),
            rules,
            default_allow,
            reload,
            states: top.text("states").map(|text| directory.join(text.value)),
            states_every: top.seconds("states-every"),
            bridges,
            monitors,
            routes,
            muxes: mux::take(&top, directory, &ports, engine.threads),
            queues: queue::take(&top, directory, unserved, engine.threads),
            unserved,
            settings: read_settings(&top),
            engine,
            control: control::take(&top, directory),
            metrics: metrics::take(&top, directory),
            ipfix: ipfix::take(&top),
            fleet: fleet::take(&top, directory),
            events: events::take(&top, directory),
            offload,
            log: log::take(&top),
            ports: ports.into_iter().map(|(_, port)| port).collect(),
        };
        engine::check(&top, &config);
        fleet::check(&top, config.fleet.as_ref(), &config.muxes);
        if config.states_every.is_some() && config.states.is_none() {
            let span = top.span_of("states-every");
            top.wrong(&span, "`states-every` has no file".to_owned(), "name the file: states = \"FILE\"");
        }
        if whole {
            mux::look_at_files(&top, &config.muxes);
        }
        top.finish();
        config
    }

    /// Orders the ports as in `other` if both have ports of the same names, so that a port has the same index in both.
    pub fn number_ports_as(&mut self, other: &Self) {
        let places: Option<Vec<usize>> = self.ports.iter().map(|port| other.port(&port.name)).collect();
        let Some(places) = places.filter(|places| places.len() == other.ports.len()) else { return };
        self.ports.sort_by_key(|port| other.port(&port.name));
        self.bridges.iter_mut().flat_map(|bridge| &mut bridge.ports).for_each(|port| *port = places[*port]);
        self.monitors.iter_mut().for_each(|port| *port = places[*port]);
        self.routes.iter_mut().for_each(|route| route.port = places[route.port]);
    }

    /// The parts of `other` that a reload cannot change in an engine that runs with this configuration.
    pub fn fixed_differences(&self, other: &Self) -> Vec<String> {
        let mut names = Vec::new();
        for port in &self.ports {
            match other.ports.iter().find(|same| same.name == port.name) {
                Some(same) if same == port => {}
                _ => names.push(format!("[port.{}]", port.name)),
            }
        }
        let is_new = |port: &&Port| !self.ports.iter().any(|old| old.name == port.name);
        names.extend(other.ports.iter().filter(is_new).map(|port| format!("[port.{}]", port.name)));
        for queue in &self.queues {
            match other.queues.iter().find(|same| same.number == queue.number) {
                Some(same) if queue.may_become(same) => {}
                Some(_) => names.push(format!(
                    "[queue.{}], but for `default`, `may-queue`, `stall`, `standby`, `command` and its keys, `workers`, `users` and `groups`,",
                    queue.number
                )),
                None => names.push(format!("[queue.{}], which was removed,", queue.number)),
            }
        }
        let threads = |config: &Self| (config.engine.threads, config.engine.cpus.clone());
        let rows = [
            (bridges(self) != bridges(other), "[[bridge]]"),
            (self.routes.is_empty() != other.routes.is_empty(), "whether there is a [[route]]"),
            (sorted(&self.monitors) != sorted(&other.monitors), "monitor"),
            (self.muxes != other.muxes, "[mux]"),
            (threads(self) != threads(other), "`threads` and `cpus` of [engine]"),
            (self.engine.hugepages != other.engine.hugepages, "`hugepages` of [engine]"),
            (self.engine.identity != other.engine.identity, "`user` and `group` of [engine]"),
            (self.engine.sandbox != other.engine.sandbox, "`sandbox` of [engine]"),
            (self.control != other.control, "[control]"),
            (self.metrics != other.metrics, "[metrics]"),
            (self.ipfix != other.ipfix, "[ipfix]"),
            (self.fleet != other.fleet, "[fleet]"),
            (self.events != other.events, "[events]"),
            (self.offload != other.offload, "[offload]"),
            (self.log.format != other.log.format, "`format` of [log]"),
        ];
        names.extend(rows.iter().filter(|(differs, _)| *differs).map(|(_, name)| (*name).to_owned()));
        names
    }

    /// Number of engine threads: 0 without ports and without muxes on engine threads.
    pub fn engine_threads(&self) -> usize {
        let idle = self.ports.is_empty() && self.mux_threads().iter().all(Option::is_none);
        if idle { 0 } else { self.engine.threads }
    }

    /// The engine thread of each mux, by position; `None`: a separate thread.
    pub fn mux_threads(&self) -> Vec<Option<usize>> {
        mux::threads(&self.muxes, !self.ports.is_empty(), self.engine.threads)
    }

    /// Index of the port `name`.
    pub fn port(&self, name: &str) -> Option<usize> {
        self.ports.iter().position(|port| port.name == name)
    }
}

/// A default verdict by its word.
fn verdict(word: Option<&str>) -> Option<DefaultVerdict> {
    word.map(|word| if word == "pass" { DefaultVerdict::Pass } else { DefaultVerdict::Drop })
}

fn text_of(path: &Path) -> Result<String, Vec<Diagnostic>> {
    std::fs::read_to_string(path).map_err(|error| {
        let findings = Findings::new(&path.display().to_string(), "");
        let hint = "name a configuration file, as docs/book/src/reference/run.md describes it".to_owned();
        findings.add(&(0..0), format!("cannot be read: {error}"), Some(hint));
        findings.into_found()
    })
}

/// The bridges in a canonical order, for comparison.
fn bridges(config: &Config) -> Vec<([usize; 2], bool)> {
    let bridge = |bridge: &Bridge| {
        let [one, other] = bridge.ports;
        ([one.min(other), one.max(other)], bridge.walk_out)
    };
    sorted(&config.bridges.iter().map(bridge).collect::<Vec<_>>())
}

fn sorted<T: Ord + Copy>(items: &[T]) -> Vec<T> {
    let mut sorted = items.to_vec();
    sorted.sort_unstable();
    sorted
}

fn read_settings(top: &Table<'_, '_>) -> Vec<(String, u64)> {
    let Some(table) = top.table("settings") else { return Vec::new() };
    let mut settings = Vec::new();
    let mut probe = Settings::default();
    for (name, number) in table.all_numbers() {
        match probe.set(name.value, number.value) {
            Ok(()) => settings.push((name.value.to_owned(), number.value)),
            Err(error @ state::SettingError::Unknown(..)) => {
                match meant(name.value, settings::table().map(|setting| setting.name)) {
                    Some(hint) => table.wrong(&name.span, format!("unknown setting `{}`", name.value), hint),
                    None => table.wrong(&name.span, error.to_string(), ""),
                }
            }
            Err(error) => table.wrong(&number.span, error.to_string(), ""),
        }
    }
    settings
}

#[cfg(test)]
mod tests;
