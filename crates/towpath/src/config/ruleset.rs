//! The rules of a configuration, and what they name that the configuration does not have.

use towpath_gate::rules::option::{Arg, Interface, Test};
use towpath_gate::rules::{Action, Diagnostic, Rule, Ruleset};

use super::reader::meant;
use super::{Config, Port};

/// The rules, and what is allowed but was probably not meant.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The rules.
    pub ruleset: Ruleset,
    /// Warnings.
    pub warnings: Vec<Diagnostic>,
}

impl Config {
    /// Reads the rule file.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn read_rules(&self) -> Result<Rules, Vec<Diagnostic>> {
        let file = self.rules.display().to_string();
        let text = std::fs::read(&self.rules).map_err(|error| {
            let hint = Some(format!("`rules` of {} names it", self.file.display()));
            let message = format!("cannot be read: {error}");
            vec![Diagnostic { file: file.as_str().into(), line: 1, column: 1, end: 1, message, hint }]
        })?;
        self.parse_rules(&file, &String::from_utf8_lossy(&text))
    }

    /// Reads the text of a rule file as [`Config::read_rules`] does.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse_rules(&self, file: &str, text: &str) -> Result<Rules, Vec<Diagnostic>> {
        let parsed = Ruleset::parse(file, text);
        let ruleset = parsed.ruleset?.with_default_allow(self.default_allow);
        let mut warnings = parsed.warnings;
        self.look_for_strangers(file, &ruleset, &mut warnings);
        Ok(Rules { ruleset, warnings })
    }

    /// A port that cannot send the answers of a rule whose packets may come from there.
    fn deaf_port(&self, rule: &Rule) -> Option<&str> {
        let answers = matches!(
            rule.action,
            Action::Reject
                | Action::Unreach { .. }
                | Action::Unreach6(_)
                | Action::Reset
                | Action::Reset6
                | Action::Abort
                | Action::Abort6
        );
        // A rule that names ports means those.
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
        let meant = |port: &&Port| named.is_empty() || named.contains(&port.name.as_str());
        let deaf = self.ports.iter().find(|port| port.driver.returns()).filter(meant);
        deaf.filter(|_| answers).map(|port| port.name.as_str())
    }

    /// Ports and queues that rules name and the configuration does not have: such a rule matches nothing, or its packets
    /// are decided by default.
    fn look_for_strangers(&self, file: &str, ruleset: &Ruleset, warnings: &mut Vec<Diagnostic>) {
        let names: Vec<&str> = self
            .ports
            .iter()
            .flat_map(|port| {
                std::iter::once(port.name.as_str()).chain(port.vlans.iter().map(|vlan| vlan.name.as_str()))
            })
            .chain(self.muxes.iter().map(|mux| mux.name.as_str()))
            .collect();
        for rule in ruleset.rules() {
            let mut warn = |message: String, hint: Option<String>| {
                let (line, column) = (rule.at.line, rule.at.column);
                warnings.push(Diagnostic { file: file.into(), line, column, end: column, message, hint });
            };
            for term in rule.body.blocks().flatten() {
                let (Test::Recv(interface) | Test::Xmit(interface) | Test::Via(interface)) = &term.test
                else {
                    continue;
                };
                let Interface::Name(name) = interface else { continue };
                if !names.contains(&&**name) {
                    let hint = meant(name, names.iter().copied());
                    warn(format!("rule {} names the port `{name}`, which there is not", rule.number), hint);
                }
            }
            if let Some(port) = self.deaf_port(rule) {
                let message = format!("rule {} answers packets, and port `{port}` cannot", rule.number);
                let hint = "packets of an nfqueue port are dropped without an answer: answer with a rule of the kernel's own";
                warn(message, Some(hint.to_owned()));
            }
            let (Action::Inspect(arg) | Action::Divert(arg) | Action::Tee(arg)) = &rule.action else {
                continue;
            };
            if let Arg::Number(number) = arg
                && !self.queues.iter().any(|queue| u32::from(queue.number) == *number)
            {
                let hint = format!("`unserved` decides its packets; configure them with [queue.{number}]");
                warn(format!("rule {} uses queue {number}, which there is not", rule.number), Some(hint));
            }
        }
    }
}
