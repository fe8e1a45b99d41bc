//! The rules of a configuration, checked against its ports and queues.

use std::cell::RefCell;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use toml::de::DeTable;
use towpath_gate::rules::option::{Arg, Interface, Term, Test};
use towpath_gate::rules::protocol::Protocol;
use towpath_gate::rules::{Action, Diagnostic, Parsed, Rule, Ruleset};
use towpath_wire::proto::TCP;

use super::Config;
use super::reader::meant;
use crate::settings::short;

/// The rules and warnings about them.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The rules.
    pub ruleset: Ruleset,
    /// Warnings.
    pub warnings: Vec<Diagnostic>,
    /// Files of table entries that the rules name.
    pub files: Vec<PathBuf>,
}

impl Config {
    /// Reads the rule file.
    ///
    /// # Errors
    ///
    /// All errors of the rule file.
    pub fn read_rules(&self) -> Result<Rules, Vec<Diagnostic>> {
        let text = text_of(&self.file, &self.rules)?;
        self.parse_rules(&self.rules.display().to_string(), &text)
    }

    /// Reads the text of a rule file as [`Config::read_rules`] does.
    ///
    /// # Errors
    ///
    /// All errors of the rule file.
    pub fn parse_rules(&self, file: &str, text: &str) -> Result<Rules, Vec<Diagnostic>> {
        let (parsed, files) = parse_with_files(file, text);
        self.checked(file, parsed, files)
    }

    /// As [`parse_rules`](Self::parse_rules) for the rules of a group, which name no files: these would be other ones at each gate.
    ///
    /// # Errors
    ///
    /// All errors of the rule file.
    pub fn parse_group_rules(&self, file: &str, text: &str) -> Result<Rules, Vec<Diagnostic>> {
        let parsed = Ruleset::parse_with_files(file, text, |_| {
            let hint = "the rules of a group name no files; use `towpath ctl fleet table NAME load FILE`";
            Err(io::Error::other(hint))
        });
        self.checked(file, parsed, Vec::new())
    }

    fn checked(&self, file: &str, parsed: Parsed, files: Vec<PathBuf>) -> Result<Rules, Vec<Diagnostic>> {
        let ruleset = parsed.ruleset?.with_default_allow(self.default_allow);
        let mut errors = self.look_for_connections(file, &ruleset);
        errors.extend(ruleset.offload_without_table(file).filter(|_| self.offload.is_none()));
        if !errors.is_empty() {
            return Err(errors);
        }
        let mut warnings = parsed.warnings;
        self.warn_of_unknown_names(file, &ruleset, &mut warnings);
        Ok(Rules { ruleset, warnings, files })
    }

    /// Returns a warning if TCP connections have states, `dyn_keepalive` is on, and no keepalive is ever sent because there is no route.
    /// `file` is the name of the rule file.
    pub fn without_keepalives(&self, file: &str, ruleset: &Ruleset) -> Option<Diagnostic> {
        let on = self
            .settings
            .iter()
            .rev()
            .find(|(name, _)| short(name) == "dyn_keepalive")
            .is_none_or(|(_, on)| *on != 0);
        let tcp = |term: &Term| match term.test {
            Test::Proto(Protocol::Number(number)) => (number == TCP) != term.not,
            _ => true,
        };
        let keeps = |rule: &&Rule| {
            rule.state.is_some()
                && ruleset.set_enabled(rule.set)
                && (rule.body.proto.is_empty() || rule.body.proto.iter().any(tcp))
        };
        let rule = ruleset.rules().iter().find(keeps)?;
        if !on || self.ports.is_empty() || !self.routes.is_empty() {
            return None;
        }
        let message = format!(
            "dyn_keepalive has no effect: keepalives leave by a [[route]], and there is none; an idle TCP connection of rule {} expires \
             after dyn_ack_lifetime",
            rule.number
        );
        let hint = Some(
            "set dyn_ack_lifetime to the longest pause of a connection, and dyn_keepalive = 0 in [settings]"
                .to_owned(),
        );
        Some(at_rule(file, rule, message, hint))
    }

    /// Reports rules that send only connections of a mux to inspectors: inspection is per packet.
    fn look_for_connections(&self, file: &str, ruleset: &Ruleset) -> Vec<Diagnostic> {
        let mut found = Vec::new();
        for rule in ruleset.rules() {
            let word = match rule.action {
                Action::Inspect(_) => "inspect",
                Action::Divert(_) => "divert",
                _ => continue,
            };
            let Some(mux) = self.only_mux(rule) else { continue };
            let message = format!(
                "rule {} sends connections of the mux `{mux}` to inspectors; inspection is per packet",
                rule.number
            );
            let hint = Some(format!(
                "write `allow`, `deny` or `reset` in place of `{word}`; messages are for the mux's workers"
            ));
            found.push(at_rule(file, rule, message, hint));
        }
        found
    }

    /// The mux of a rule that matches only connections of muxes.
    fn only_mux(&self, rule: &Rule) -> Option<&str> {
        let named: Vec<&str> = rule
            .body
            .blocks()
            .flatten()
            .filter_map(|term| match &term.test {
                Test::Recv(Interface::Name(name)) | Test::Via(Interface::Name(name)) if !term.not => {
                    Some(&**name)
                }
                _ => None,
            })
            .collect();
        let mux = |name: &&str| self.muxes.iter().find(|mux| mux.name == *name);
        match named.first() {
            None if self.ports.is_empty() => self.muxes.first(),
            None => None,
            Some(first) => named.iter().all(|name| mux(name).is_some()).then(|| mux(first)).flatten(),
        }
        .map(|mux| mux.name.as_str())
    }

    /// Warns about ports and queues that rules name and the configuration lacks: such a rule never matches, or its packets get the
    /// default verdict.
    fn warn_of_unknown_names(&self, file: &str, ruleset: &Ruleset, warnings: &mut Vec<Diagnostic>) {
        let names: Vec<&str> = self
            .ports
            .iter()
            .flat_map(|port| {
                let vlans = port.vlans.iter().map(|vlan| vlan.name.as_str());
                std::iter::once(port.name.as_str())
                    .chain(vlans)
                    .chain(port.listed().iter().map(String::as_str))
            })
            .chain(self.muxes.iter().map(|mux| mux.name.as_str()))
            .collect();
        for rule in ruleset.rules() {
            let mut warn = |message, hint| warnings.push(at_rule(file, rule, message, hint));
            for term in rule.body.blocks().flatten() {
                let (Test::Recv(interface) | Test::Xmit(interface) | Test::Via(interface)) = &term.test
                else {
                    continue;
                };
                let Interface::Name(name) = interface else { continue };
                if !names.contains(&&**name) {
                    let hint = meant(name, names.iter().copied());
                    warn(format!("rule {} names the port `{name}`, which does not exist", rule.number), hint);
                }
            }
            let (Action::Inspect(arg) | Action::Divert(arg) | Action::Tee(arg)) = &rule.action else {
                continue;
            };
            if let Arg::Number(number) = arg
                && !self.queues.iter().any(|queue| u32::from(queue.number) == *number)
            {
                let hint = format!("`unserved` decides its packets; configure them with [queue.{number}]");
                warn(format!("rule {} uses queue {number}, which does not exist", rule.number), Some(hint));
            }
        }
    }
}

/// A diagnostic at the position of a rule.
fn at_rule(file: &str, rule: &Rule, message: String, hint: Option<String>) -> Diagnostic {
    let (line, column) = (rule.at.line, rule.at.column);
    Diagnostic { file: file.into(), line, column, end: column, message, hint, no_such_rule: false }
}

/// Maximum size of a file of table entries in bytes.
const TABLE_FILE_MAX: u64 = 64 << 20;

/// Parses the text of a rule file. The paths of the files of `table NAME load FILE` are relative to the rule file's directory.
pub fn parse_rule_file(file: &str, text: &str) -> Parsed {
    parse_with_files(file, text).0
}

/// As [`parse_rule_file`]. Also returns the paths of the files of table entries.
fn parse_with_files(file: &str, text: &str) -> (Parsed, Vec<PathBuf>) {
    let directory = Path::new(file).parent().unwrap_or(Path::new(".")).to_owned();
    let files = Rc::new(RefCell::new(Vec::new()));
    let named = Rc::clone(&files);
    let parsed = Ruleset::parse_with_files(file, text, move |name| {
        let (path, mut text) = (directory.join(name), Vec::new());
        named.borrow_mut().push(path.clone());
        File::open(path)?.take(TABLE_FILE_MAX + 1).read_to_end(&mut text)?;
        if text.len() as u64 > TABLE_FILE_MAX {
            let most = TABLE_FILE_MAX >> 20;
            return Err(io::Error::other(format!("a file of table entries has at most {most} MiB")));
        }
        Ok(String::from_utf8_lossy(&text).into_owned())
    });
    let files = files.take();
    (parsed, files)
}

/// The errors of the rules of a configuration that has errors itself.
pub(super) fn errors_of(config: &Path, text: &str) -> Vec<Diagnostic> {
    let (document, _) = DeTable::parse_recoverable(text);
    let name = document.get_ref().get("rules").and_then(|value| value.get_ref().as_str());
    let Some(name) = name.filter(|name| !name.is_empty()) else { return Vec::new() };
    let rules = config.parent().unwrap_or(Path::new(".")).join(name);
    let parsed =
        text_of(config, &rules).and_then(|text| parse_rule_file(&rules.display().to_string(), &text).ruleset);
    parsed.err().unwrap_or_default()
}

/// The text of a rule file that a configuration names.
fn text_of(config: &Path, rules: &Path) -> Result<String, Vec<Diagnostic>> {
    let text = std::fs::read(rules).map_err(|error| {
        let hint = Some(format!("`rules` of {} names it", config.display()));
        let (file, message) = (rules.display().to_string(), format!("cannot be read: {error}"));
        vec![Diagnostic {
            file: file.as_str().into(),
            line: 1,
            column: 1,
            end: 1,
            message,
            hint,
            no_such_rule: false,
        }]
    })?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}
