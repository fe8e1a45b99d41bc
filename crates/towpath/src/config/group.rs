//! The keys of a configuration that a group of gates has in common: `default`, `states-at-reload` and `[settings]`.

use std::path::{Path, PathBuf};

use toml::de::DeTable;
use towpath_gate::StatePolicy;
use towpath_gate::rules::Diagnostic;

use super::reader::{Findings, Table};
use super::{Config, read_settings};

/// A group's configuration file.
#[derive(Clone, Debug, Default)]
pub struct GroupKeys {
    /// The rule file, relative to this file.
    pub rules: PathBuf,
    default_allow: Option<bool>,
    reload: Option<StatePolicy>,
    settings: Vec<(String, u64)>,
}

impl GroupKeys {
    /// Reads the text of a group's configuration file; `file` is its name.
    ///
    /// # Errors
    ///
    /// All errors of the text, and keys that are not the group's.
    pub fn parse(file: &str, text: &str) -> Result<Self, Vec<Diagnostic>> {
        let findings = Findings::new(file, text);
        let (document, errors) = DeTable::parse_recoverable(text);
        for error in &errors {
            findings.add(&error.span().unwrap_or_default(), error.message().replace('\n', ", "), None);
        }
        if !errors.is_empty() {
            return Err(findings.into_found());
        }
        let top = Table::new(document.get_ref(), &findings);
        top.need("rules", "name the rule file: rules = \"FILE\"");
        let keys = Self {
            rules: top.text("rules").map_or_else(PathBuf::new, |text| PathBuf::from(text.value)),
            default_allow: top.word("default").map(|word| word == "allow"),
            reload: top.word("states-at-reload").map(|word| match word {
                "keep" => StatePolicy::Keep,
                "drop" => StatePolicy::Drop,
                _ => StatePolicy::Recheck,
            }),
            settings: read_settings(&top),
        };
        top.finish();
        let found = findings.into_found();
        if found.is_empty() { Ok(keys) } else { Err(found) }
    }

    /// The configuration of a gate with these keys in place of its own. Settings that the group does not name stay.
    pub fn over(self, local: &Config) -> Config {
        let mut config = local.clone();
        config.default_allow = self.default_allow.unwrap_or(local.default_allow);
        config.reload = self.reload.unwrap_or(local.reload);
        config.settings.extend(self.settings);
        config
    }

    /// The path of the rule file.
    pub fn rules_beside(&self, file: &Path) -> PathBuf {
        file.parent().unwrap_or(Path::new(".")).join(&self.rules)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_keys_of_a_group_replace_those_of_a_gate() {
        let local = "rules = \"r\"\nmonitor = \"a\"\n[port.a]\ndriver = \"tun\"\n[settings]\ndyn_max = 7\ndyn_keepalive = 0\n";
        let local = Config::parse("t", local).unwrap();
        let text = "rules = \"edge.ipfw\"\ndefault = \"allow\"\nstates-at-reload = \"keep\"\n[settings]\ndyn_max = 9\n";
        let keys = GroupKeys::parse("g/edge.toml", text).unwrap();
        assert_eq!(keys.rules_beside(Path::new("g/edge.toml")), Path::new("g/edge.ipfw"));
        let config = keys.over(&local);
        assert!(config.default_allow && config.reload == StatePolicy::Keep);
        let settings: Vec<_> = config.settings.iter().map(|(name, value)| (&**name, *value)).collect();
        assert_eq!(settings, [("dyn_max", 7), ("dyn_keepalive", 0), ("dyn_max", 9)]);
        let none = GroupKeys::parse("g", "rules = \"r\"").unwrap().over(&local);
        assert!(!none.default_allow && none.reload == local.reload);
    }

    #[test]
    fn keys_of_one_gate_are_refused_with_their_line() {
        let text = "rules = \"r\"\n[port.wan]\ndriver = \"tun\"\n";
        let found = GroupKeys::parse("edge.toml", text).unwrap_err();
        let lines: Vec<_> = found.iter().map(ToString::to_string).collect();
        assert!(lines[0].starts_with("edge.toml:2:") && lines[0].contains("unknown key `port`"), "{lines:?}");
        let found = GroupKeys::parse("edge.toml", "default = \"perhaps\"\n").unwrap_err();
        assert_eq!(found.len(), 2, "{found:?}");
    }
}
