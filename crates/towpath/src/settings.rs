//! Runtime settings of a gate, under ipfw's sysctl names.
//!
//! Two structs have them, each with its table: [`towpath_gate::state::Settings`] and [`GateSettings`]. Configurations, `towpath ctl`
//! and the documentation use both tables as one list.

use towpath_gate::state::{self, SettingError};
use towpath_gate::{Gate, GateSettings, Setting};

/// All settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// Settings of the state table.
    pub states: state::Settings,
    /// Settings of the gate.
    pub gate: GateSettings,
}

/// Names of read-only values, with their meaning.
pub const READ_ONLY: [(&str, &str); 7] = [
    ("dyn_count", "number of states"),
    ("dyn_parent_count", "number of parent entries of limits"),
    ("curr_max_length", "length of the longest chain of the index of states"),
    ("static_count", "number of rules"),
    ("tables_count", "number of tables"),
    ("default_to_accept", "1 if the default rule allows"),
    ("default_rule", "number of the default rule; not listed"),
];

/// Every setting that can be changed.
pub fn table() -> impl Iterator<Item = &'static Setting> {
    state::Settings::TABLE.iter().chain(GateSettings::TABLE)
}

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
        if let Some((name, _)) = READ_ONLY.into_iter().find(|(name, _)| *name == short) {
            return Err(SettingError::ReadOnly(name));
        }
        let set = match self.gate.set(short, value) {
            Err(SettingError::Unknown(..)) => self.states.set(short, value),
            set => set,
        };
        set.map_err(|error| match error {
            SettingError::Unknown(..) => {
                SettingError::Unknown(name.to_owned(), table().map(|setting| setting.name).collect())
            }
            other => other,
        })
    }

    /// Returns the name and value of every setting; switches are 0 or 1.
    pub fn rows(&self) -> Vec<(&'static str, u64)> {
        self.states.rows().chain(self.gate.rows()).collect()
    }
}

/// Strips `net.inet.ip.fw.` or `net.inet6.ip6.fw.` (used by ipfw for some settings) from a setting's name.
pub fn short(name: &str) -> &str {
    let name = name.strip_prefix("net.inet.ip.fw.").unwrap_or(name);
    name.strip_prefix("net.inet6.ip6.fw.").unwrap_or(name)
}

#[cfg(test)]
mod tests {
    use towpath_gate::Values;

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

    /// A number with separators: `1,048,576`.
    fn thousands(value: u64) -> String {
        let digits = value.to_string();
        let mut text = String::new();
        for (at, digit) in digits.chars().enumerate() {
            if at > 0 && (digits.len() - at).is_multiple_of(3) {
                text.push(',');
            }
            text.push(digit);
        }
        text
    }

    fn markdown(ipfw: bool) -> String {
        let mut text = "| setting | values | default | meaning |\n|---|---|---|---|\n".to_owned();
        for setting in table().filter(|setting| setting.ipfw == ipfw) {
            let values = match setting.values {
                Values::Switch => "0, 1".to_owned(),
                Values::Seconds => format!("0..{} s", thousands(setting.values.max())),
                Values::Number => "number".to_owned(),
            };
            let default = thousands(setting.default);
            text += &format!("| `{}` | {values} | {default} | {} |\n", setting.name, setting.help);
        }
        text
    }

    /// Puts the tables into the documentation with `TOWPATH_WRITE_DOCS=1`; compares them otherwise.
    #[test]
    fn the_documentation_has_every_setting() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/reference/rules.md");
        let text = std::fs::read_to_string(path).unwrap();
        let mut read_only = "| value | meaning |\n|---|---|\n".to_owned();
        for (name, help) in READ_ONLY {
            read_only += &format!("| `{name}` | {help} |\n");
        }
        let parts = [("ipfw", markdown(true)), ("towpath", markdown(false)), ("read-only", read_only)];
        let mut expected = text.clone();
        for (name, rows) in parts {
            let mark = format!("<!-- settings: {name} -->\n");
            let (before, rest) = expected.split_once(&mark).unwrap_or_else(|| panic!("no {mark}"));
            let (_, after) = rest.split_once("<!-- end -->").unwrap();
            expected = format!("{before}{mark}{rows}<!-- end -->{after}");
        }
        if std::env::var_os("TOWPATH_WRITE_DOCS").is_some() {
            std::fs::write(path, &expected).unwrap();
            return;
        }
        assert!(expected == text, "rules.md differs: run this test once with TOWPATH_WRITE_DOCS=1");
    }

    #[test]
    fn defaults_and_ranges_are_those_of_the_table() {
        let mut settings = Settings::default();
        for (setting, (name, value)) in table().zip(Settings::default().rows()) {
            assert_eq!((setting.name, setting.default), (name, value));
            settings.set(name, setting.values.max()).unwrap();
            let error = settings.set(name, setting.values.max() + 1);
            assert_eq!(error, Err(SettingError::Range(name, setting.values)));
        }
        assert!(settings.rows().iter().zip(table()).all(|(row, setting)| row.1 == setting.values.max()));
    }

    #[test]
    fn errors_are_named() {
        let mut settings = Settings::default();
        assert!(matches!(settings.set("default_rule", 1), Err(SettingError::ReadOnly("default_rule"))));
        assert!(matches!(settings.set("related", 2), Err(SettingError::Range("related", _))));
        let error = settings.set("fwd", 2).unwrap_err().to_string();
        for name in ["dyn_max", "dyn_adaptive", "related", "fragments"] {
            assert!(error.contains(&format!(", {name}")) || error.contains(&format!(" {name},")), "{error}");
        }
    }
}
