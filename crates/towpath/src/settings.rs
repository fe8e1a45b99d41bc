//! Runtime settings of a gate, under ipfw's sysctl names.
//!
//! Most belong to the state table ([`towpath_gate::state::Settings`]). The gate's own settings are listed here with them, so that
//! configurations and `towpath ctl` use one list.

use towpath_gate::state::{self, SettingError};
use towpath_gate::{Gate, GateSettings};

/// All settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Settings of the state table.
    pub states: state::Settings,
    /// Settings of the gate.
    pub gate: GateSettings,
}

/// Names of the gate's own settings.
const GATE: [&str; 4] = ["deny_unknown_exthdrs", "verbose_limit", "related", "fragments"];

/// Names of read-only values.
const READ_ONLY: [&str; 4] = ["default_rule", "static_count", "tables_count", "default_to_accept"];

impl Settings {
    /// Returns the settings of a gate.
    pub fn of(gate: &Gate) -> Self {
        Self { states: gate.states().settings().clone(), gate: gate.settings() }
    }

    /// Applies the settings to a gate.
    pub fn give(self, gate: &mut Gate) {
        gate.states_mut().set_settings(self.states);
        gate.set_settings(self.gate);
    }

    /// Changes the setting `name`, with or without the prefix `net.inet.ip.fw.`.
    ///
    /// # Errors
    /// The setting does not exist or is read-only, or `value` is out of range.
    pub fn set(&mut self, name: &str, value: u64) -> Result<(), SettingError> {
        let short = short(name);
        if let Some(name) = READ_ONLY.into_iter().find(|name| *name == short) {
            return Err(SettingError::ReadOnly(name));
        }
        let Some(name) = GATE.into_iter().find(|name| *name == short) else {
            return self.states.set(name, value).map_err(|error| match error {
                SettingError::Unknown(name, _) => SettingError::Unknown(name, &GATE),
                other => other,
            });
        };
        let switch = match value {
            0 => Ok(false),
            1 => Ok(true),
            _ => Err(SettingError::Range { name, takes: "0 or 1" }),
        };
        match name {
            "deny_unknown_exthdrs" => self.gate.deny_unknown_exthdrs = switch?,
            "related" => self.gate.related = switch?,
            "fragments" => self.gate.fragments = switch?,
            _ => {
                let takes = "0 to 4294967295";
                self.gate.verbose_limit =
                    u32::try_from(value).map_err(|_| SettingError::Range { name, takes })?;
            }
        }
        Ok(())
    }

    /// Returns the name and value of every setting; switches are 0 or 1.
    pub fn rows(&self) -> Vec<(&'static str, u64)> {
        let mut rows: Vec<_> = self.states.rows().collect();
        rows.push(("deny_unknown_exthdrs", self.gate.deny_unknown_exthdrs.into()));
        rows.push(("verbose_limit", self.gate.verbose_limit.into()));
        rows.push(("related", self.gate.related.into()));
        rows.push(("fragments", self.gate.fragments.into()));
        rows
    }
}

/// Strips `net.inet.ip.fw.` or `net.inet6.ip6.fw.` (used by ipfw for some settings) from a setting's name.
pub fn short(name: &str) -> &str {
    let name = name.strip_prefix("net.inet.ip.fw.").unwrap_or(name);
    name.strip_prefix("net.inet6.ip6.fw.").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_sets_its_own_value() {
        let before = Settings::default().rows();
        for (at, (name, value)) in before.iter().enumerate() {
            let mut settings = Settings::default();
            let value = 1 - (*value).min(1);
            settings.set(&format!("net.inet.ip.fw.{name}"), value).unwrap();
            for (row, (other, now)) in settings.rows().into_iter().enumerate() {
                assert_eq!(now, if row == at { value } else { before[row].1 }, "set {name}, read {other}");
            }
        }
    }

    #[test]
    fn the_documentation_has_every_setting_with_its_default() {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/reference/rules.md");
        let text = std::fs::read_to_string(file).unwrap().replace(',', "");
        for (name, value) in Settings::default().rows() {
            let is_row = |line: &&str| line.starts_with('|') && line.contains(&format!("`{name}`"));
            let line = text.lines().find(is_row).unwrap_or_else(|| panic!("{name} is not there"));
            assert_eq!(line.split('|').nth(2).map(str::trim), Some(&*value.to_string()), "{name}");
        }
    }

    #[test]
    fn errors_are_named() {
        let mut settings = Settings::default();
        assert!(matches!(settings.set("default_rule", 1), Err(SettingError::ReadOnly("default_rule"))));
        assert!(matches!(settings.set("related", 2), Err(SettingError::Range { name: "related", .. })));
        let error = settings.set("fwd", 2).unwrap_err().to_string();
        for name in ["dyn_max", "dyn_adaptive", "related", "fragments"] {
            assert!(error.contains(&format!(", {name}")) || error.contains(&format!(" {name},")), "{error}");
        }
    }
}
