//! Tables of settings: the name, values, default and purpose of each setting, stated once.

use std::fmt;

/// One setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The name, without ipfw's prefix `net.inet.ip.fw.`.
    pub name: &'static str,
    /// The values.
    pub values: Values,
    /// The default; switches are 0 and 1.
    pub default: u64,
    /// ipfw has the setting.
    pub ipfw: bool,
    /// The purpose, in Markdown.
    pub help: &'static str,
}

/// The values of a setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Values {
    /// A number from 0 to 2^32 - 1.
    Number,
    /// A lifetime in seconds, from 0 to [`LIFETIME_MAX`].
    Seconds,
    /// 0 or 1.
    Switch,
}

/// The longest lifetime, in seconds (104 days): an expiry word holds less than 2^53 ns.
pub const LIFETIME_MAX: u32 = 9_000_000;

impl Values {
    /// The largest value.
    pub const fn max(self) -> u64 {
        match self {
            Self::Number => u32::MAX as u64,
            Self::Seconds => LIFETIME_MAX as u64,
            Self::Switch => 1,
        }
    }
}

impl fmt::Display for Values {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number => write!(f, "0 to {}", self.max()),
            Self::Seconds => write!(f, "0 to {} (seconds)", self.max()),
            Self::Switch => f.write_str("0 or 1"),
        }
    }
}

/// Why a setting was not changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingError {
    /// There is no setting of that name. The list has the names that exist.
    Unknown(String, Vec<&'static str>),
    /// The setting is read-only.
    ReadOnly(&'static str),
    /// The value is out of the setting's range.
    Range(&'static str, Values),
}

impl fmt::Display for SettingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(name, names) => {
                write!(f, "there is no setting {name:?}; settable are {}", names.join(", "))
            }
            Self::ReadOnly(name) => write!(f, "{name} can only be read"),
            Self::Range(name, values) => write!(f, "{name} takes {values}"),
        }
    }
}

impl std::error::Error for SettingError {}

/// Declares a struct of settings with its table. A field is `name: ORIGIN VALUES = DEFAULT`: ORIGIN is `ipfw` or `towpath`, VALUES
/// is `number`, `seconds` or `switch`. The field's documentation is the help text.
macro_rules! settings {
    (
        $(#[$attr:meta])*
        pub struct $name:ident {
            $( $(#[doc = $help:literal])+ pub $field:ident: $origin:ident $values:ident = $default:literal, )+
        }
    ) => {
        $(#[$attr])*
        pub struct $name {
            $( $(#[doc = $help])+ pub $field: settings!(@type $values), )+
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $default,)+ }
            }
        }

        impl $name {
            /// The settings, in the order of the fields.
            pub const TABLE: &'static [$crate::Setting] = &[$($crate::Setting {
                name: stringify!($field),
                values: settings!(@values $values),
                default: $default as u64,
                ipfw: settings!(@ipfw $origin),
                help: concat!($($help),+).trim_ascii(),
            }),+];

            /// Every setting and its value; switches are 0 and 1.
            pub fn rows(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
                let values = [$(u64::from(self.$field)),+];
                Self::TABLE.iter().map(|setting| setting.name).zip(values)
            }

            /// Changes a setting, by its name in the table.
            fn set_value(&mut self, name: &str, value: u64) -> Result<(), $crate::SettingError> {
                let Some(setting) = Self::TABLE.iter().find(|setting| setting.name == name) else {
                    let names = Self::TABLE.iter().map(|setting| setting.name).collect();
                    return Err($crate::SettingError::Unknown(name.to_owned(), names));
                };
                if value > setting.values.max() {
                    return Err($crate::SettingError::Range(setting.name, setting.values));
                }
                match setting.name {
                    $(stringify!($field) => self.$field = settings!(@store $values value),)+
                    _ => {}
                }
                Ok(())
            }
        }
    };
    (@type number) => { u32 };
    (@type seconds) => { u32 };
    (@type switch) => { bool };
    (@values number) => { $crate::Values::Number };
    (@values seconds) => { $crate::Values::Seconds };
    (@values switch) => { $crate::Values::Switch };
    (@ipfw ipfw) => { true };
    (@ipfw towpath) => { false };
    // The value is at most `Values::max`.
    (@store switch $value:ident) => { $value != 0 };
    (@store $number:ident $value:ident) => { $value as u32 };
}

pub(crate) use settings;
