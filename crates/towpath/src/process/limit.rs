//! Resource limits by name (getrlimit(2)).

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use serde::{Deserialize, Serialize};

/// The limits that a configuration can name.
pub const LIMITS: &[(&str, Resource)] = &[
    ("as", Resource::As),
    ("core", Resource::Core),
    ("cpu", Resource::Cpu),
    ("data", Resource::Data),
    ("fsize", Resource::Fsize),
    ("memlock", Resource::Memlock),
    ("nofile", Resource::Nofile),
    ("nproc", Resource::Nproc),
    ("stack", Resource::Stack),
];

/// A limit and its value.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Limit {
    /// Its name in [`LIMITS`].
    pub name: String,
    /// Its value; `None` is unlimited.
    pub value: Option<u64>,
}

impl Limit {
    /// Reads `NAME=NUMBER` or `NAME=unlimited`.
    pub fn parse(text: &str) -> Option<Self> {
        let (name, value) = text.split_once('=')?;
        LIMITS.iter().find(|(known, _)| *known == name)?;
        let value = if value == "unlimited" { None } else { Some(value.parse().ok()?) };
        Some(Self { name: name.into(), value })
    }

    /// Applies the limit to this process, soft and hard. The hard limit is never raised.
    pub(super) fn apply(&self) -> rustix::io::Result<()> {
        let Some((_, resource)) = LIMITS.iter().find(|(name, _)| *name == self.name) else {
            return Err(rustix::io::Errno::INVAL);
        };
        let most = getrlimit(*resource).maximum;
        let value = match (self.value, most) {
            (Some(value), Some(most)) => Some(value.min(most)),
            (value, most) => value.or(most),
        };
        setrlimit(*resource, Rlimit { current: value, maximum: value })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_names_and_numbers() {
        let limit = |name: &str, value| Some(Limit { name: name.into(), value });
        let rows = [
            ("nofile=64", limit("nofile", Some(64))),
            ("as=unlimited", limit("as", None)),
            ("files=64", None),
            ("core", None),
            ("core=-1", None),
        ];
        for (text, expected) in rows {
            assert_eq!(Limit::parse(text), expected, "{text}");
        }
    }
}
