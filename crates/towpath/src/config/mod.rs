//! The configuration of `towpath run`: a TOML file, checked as a whole.
//!
//! Reading it finds everything that is wrong at once, each with line, column and what to do. What every key means is in
//! `docs/book/src/reference/run.md`.
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
//! // And `lan` is wired to nothing.
//! assert_eq!(errors.len(), 2);
//! assert_eq!(
//!     errors[1].to_string(),
//!     "towpath.toml:8:17: there is no port `lann`; did you mean `lan`?"
//! );
//! ```

mod command;
mod control;
mod engine;
mod mux;
mod port;
mod queue;
mod reader;
mod ruleset;
mod users;
mod wiring;

use std::path::{Path, PathBuf};

use toml::de::DeTable;
use towpath_gate::StatePolicy;
use towpath_gate::rules::Diagnostic;
use towpath_gate::state;

pub use self::control::Control;
pub use self::engine::{Engine, Wait};
pub use self::mux::{Mux, Thread};
pub use self::port::{Driver, Port, Vlan};
pub use self::queue::{Inspectors, Queue};
use self::reader::{Findings, Table};
pub use self::ruleset::Rules;
pub use self::users::Users;
pub use self::wiring::{Bridge, Route};
use crate::settings::Settings;
use towpath_engine::queue::DefaultVerdict;

/// Everything that `towpath run` is told.
#[derive(Clone, Debug)]
pub struct Config {
    /// The file it was read from, as it was named.
    pub file: PathBuf,
    /// The rule file.
    pub rules: PathBuf,
    /// Whether the default rule allows.
    pub default_allow: bool,
    /// What becomes of the states when rules are reloaded.
    pub reload: StatePolicy,
    /// The file that states outlive the engine in.
    pub states: Option<PathBuf>,
    /// The ports, in the order of the file.
    pub ports: Vec<Port>,
    /// Pairs of ports.
    pub bridges: Vec<Bridge>,
    /// Ports whose packets go no further (indices into `ports`).
    pub taps: Vec<usize>,
    /// What is routed, and whereto.
    pub routes: Vec<Route>,
    /// Services whose messages worker processes answer.
    pub muxes: Vec<Mux>,
    /// The queues, by number.
    pub queues: Vec<Queue>,
    /// What becomes of packets for a queue that is not configured.
    pub unserved: DefaultVerdict,
    /// Settings under ipfw's names, as they were written and checked.
    pub settings: Vec<(String, u64)>,
    /// The threads.
    pub engine: Engine,
    /// The control socket.
    pub control: Option<Control>,
}

/// What is wrong with a configuration and its rules.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wrong {
    /// With the configuration, or the certificates and keys that it names.
    pub config: Vec<Diagnostic>,
    /// With the rules.
    pub rules: Vec<Diagnostic>,
}

impl Config {
    /// Reads a configuration file. Names of files in it are relative to its directory.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn read(path: &Path) -> Result<Self, Vec<Diagnostic>> {
        Self::parse(&path.display().to_string(), &text_of(path)?)
    }

    /// Reads a configuration file and its rules, and looks at the certificates and keys that it names.
    ///
    /// # Errors
    /// Everything that is wrong with any of them: the rules are read also when the configuration has errors.
    pub fn read_whole(path: &Path) -> Result<(Self, Rules), Wrong> {
        match Self::read_all(path)? {
            (config, rules, denied) if denied.is_empty() => Ok((config, rules)),
            (_, _, config) => Err(Wrong { config, rules: Vec::new() }),
        }
    }

    /// The same for who may not be who will run it: of a certificate or key that may not be read it is only warned.
    ///
    /// # Errors
    /// Everything else that is wrong.
    pub fn check(path: &Path) -> Result<(Self, Rules), Wrong> {
        let (config, mut rules, denied) = Self::read_all(path)?;
        rules.warnings.splice(..0, denied);
        Ok((config, rules))
    }

    /// With them what is wrong with certificates and keys that may not be read.
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
    /// Everything that is wrong with it.
    pub fn parse(file: &str, text: &str) -> Result<Self, Vec<Diagnostic>> {
        Self::take_text(file, text, false).map(|(config, _)| config)
    }

    /// `whole`: with the certificates and keys that it names; what is wrong with those that may not be read is no error yet.
    fn take_text(file: &str, text: &str, whole: bool) -> Result<(Self, Vec<Diagnostic>), Vec<Diagnostic>> {
        let findings = Findings::new(file, text);
        let (document, errors) = DeTable::parse_recoverable(text);
        for error in &errors {
            findings.add(&error.span().unwrap_or_default(), error.message().replace('\n', ", "), None);
        }
        // What the parser made up to go on would only be complained about again.
        if !errors.is_empty() {
            return Err(findings.into_found());
        }
        let top = Table::new(document.get_ref(), 0..0, &findings);
        let config = Self::take(Path::new(file), top, whole);
        let denied = findings.take_denied();
        let found = findings.into_found();
        if found.is_empty() { Ok((config, denied)) } else { Err(found) }
    }

    fn take(file: &Path, top: Table<'_, '_>, whole: bool) -> Self {
        let directory = file.parent().unwrap_or(Path::new("."));
        top.need("rules", "name the rule file: rules = \"FILE\"");
        let rules = top.text("rules").map_or_else(PathBuf::new, |text| directory.join(text.value));
        let default_allow = top.word("default", &[("allow", true), ("deny", false)]).unwrap_or(false);
        let policies =
            [("recheck", StatePolicy::Recheck), ("keep", StatePolicy::Keep), ("drop", StatePolicy::Drop)];
        let reload = top.word("states-at-reload", &policies).unwrap_or(StatePolicy::Recheck);
        let verdicts = [("pass", DefaultVerdict::Pass), ("drop", DefaultVerdict::Drop)];
        let unserved = top.word("unserved", &verdicts).unwrap_or_default();
        let (ports, unknown) = port::take(&top, directory);
        let wiring::Wiring { bridges, taps, routes } = wiring::take(&top, &ports, &unknown);
        let engine = engine::take(&top);
        let config = Self {
            file: file.into(),
            rules,
            default_allow,
            reload,
            states: top.text("states").map(|text| directory.join(text.value)),
            bridges,
            taps,
            routes,
            muxes: mux::take(&top, directory, &ports, engine.threads),
            queues: queue::take(&top, directory, unserved, engine.threads),
            unserved,
            settings: settings(&top),
            engine,
            control: control::take(&top, directory),
            ports: ports.into_iter().map(|(_, port)| port).collect(),
        };
        engine::check(&top, &config);
        if whole {
            mux::look_at_files(&top, &config.muxes);
        }
        top.finish();
        config
    }

    /// Numbers the ports as `other` does, when it has ports of the same names: what names a port by its place here then means the
    /// same port there.
    pub fn number_ports_as(&mut self, other: &Self) {
        let places: Option<Vec<usize>> = self.ports.iter().map(|port| other.port(&port.name)).collect();
        let Some(places) = places.filter(|places| places.len() == other.ports.len()) else { return };
        self.ports.sort_by_key(|port| other.port(&port.name));
        self.bridges.iter_mut().flat_map(|bridge| &mut bridge.ports).for_each(|port| *port = places[*port]);
        self.taps.iter_mut().for_each(|port| *port = places[*port]);
        self.routes.iter_mut().for_each(|route| route.port = places[route.port]);
    }

    /// What of another configuration cannot be taken by an engine that runs with this one, by its name.
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
                    "[queue.{}], but for `default`, `command`, `workers`, `users` and `groups`,",
                    queue.number
                )),
                None => names.push(format!("[queue.{}], which is gone,", queue.number)),
            }
        }
        let threads = |config: &Self| (config.engine.threads, config.engine.cpus.clone());
        let rows = [
            (bridges(self) != bridges(other), "[[bridge]]"),
            (self.routes.is_empty() != other.routes.is_empty(), "whether there is a [[route]]"),
            (sorted(&self.taps) != sorted(&other.taps), "tap"),
            (self.muxes != other.muxes, "[mux]"),
            (threads(self) != threads(other), "`threads` and `cpus` of [engine]"),
            (self.engine.hugepages != other.engine.hugepages, "`hugepages` of [engine]"),
            (self.control != other.control, "[control]"),
        ];
        names.extend(rows.iter().filter(|(differs, _)| *differs).map(|(_, name)| (*name).to_owned()));
        names
    }

    /// How many threads the engine has: none when nothing would be there for them to do.
    pub fn engine_threads(&self) -> usize {
        let idle = self.ports.is_empty() && self.mux_threads().iter().all(Option::is_none);
        if idle { 0 } else { self.engine.threads }
    }

    /// Which of the engine's threads each mux has, by place; none has one of its own.
    pub fn mux_threads(&self) -> Vec<Option<usize>> {
        mux::threads(&self.muxes, !self.ports.is_empty(), self.engine.threads)
    }

    /// The port of this name, as an index.
    pub fn port(&self, name: &str) -> Option<usize> {
        self.ports.iter().position(|port| port.name == name)
    }
}

fn text_of(path: &Path) -> Result<String, Vec<Diagnostic>> {
    std::fs::read_to_string(path).map_err(|error| {
        let findings = Findings::new(&path.display().to_string(), "");
        let hint = "name a configuration file, as docs/book/src/reference/run.md describes it".to_owned();
        findings.add(&(0..0), format!("cannot be read: {error}"), Some(hint));
        findings.into_found()
    })
}

/// The bridges in an order of their own, each with its ports in theirs: what they mean, however they were written.
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

fn settings(top: &Table<'_, '_>) -> Vec<(String, u64)> {
    let Some(table) = top.table("settings") else { return Vec::new() };
    let mut settings = Vec::new();
    let mut probe = Settings::default();
    for (name, number) in table.all_numbers() {
        match probe.set(name.value, number.value) {
            Ok(()) => settings.push((name.value.to_owned(), number.value)),
            Err(error @ state::SettingError::Unknown(..)) => {
                let names = Settings::default().rows();
                match reader::meant(name.value, names.iter().map(|(name, _)| *name)) {
                    Some(hint) => {
                        table.wrong(&name.span, format!("there is no setting `{}`", name.value), hint)
                    }
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
