//! The settings of dynamic states, under ipfw's sysctl names (`net.inet.ip.fw.*`).

use std::fmt;

/// Seconds between two keepalive scans. A hidden constant in ipfw.
pub const KEEPALIVE_PERIOD: u32 = 5;

/// The longest lifetime, in seconds (104 days): an expiry word holds less than 2^53 ns.
pub const LIFETIME_MAX: u32 = 9_000_000;

/// Settings of the dynamic states. Lifetimes are in seconds, at most [`LIFETIME_MAX`]; longer ones are limited to it.
///
/// Settings may change at any time ([`States::set_settings`](crate::state::States::set_settings)). A changed lifetime
/// applies from each state's next packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Maximum number of states, IPv4 and IPv6 together. Default 1,048,576 (ipfw: 16,384).
    ///
    /// It bounds states, not bytes. Memory of an IPv4 state (72 bytes plus the index) is reused for IPv4 states only,
    /// that of an IPv6 state (136 bytes) for IPv6 states only, and that of windows (`strict`, in pieces of 256 KiB)
    /// for windows only. So the memory is at most that of `dyn_max` states of both families, if first the one and
    /// then the other had that many.
    pub dyn_max: u32,
    /// Maximum number of parents, the entries that `limit` counts in. Default 4,096.
    pub dyn_parent_max: u32,
    /// Accepted for compatibility with ipfw; the index grows by itself. Default 8,192.
    pub dyn_buckets: u32,
    /// Lifetime of an established TCP connection. Default 300.
    pub dyn_ack_lifetime: u32,
    /// Lifetime of a TCP connection of which only the first SYN was seen. Default 20.
    pub dyn_syn_lifetime: u32,
    /// Lifetime of a TCP connection that both sides have closed. Less than [`KEEPALIVE_PERIOD`]. Default 1.
    pub dyn_fin_lifetime: u32,
    /// Lifetime of a TCP connection that was reset, or whose beginning was not seen. Less than [`KEEPALIVE_PERIOD`]
    /// while `dyn_keepalive` is on. Default 1.
    pub dyn_rst_lifetime: u32,
    /// Lifetime of UDP and UDP-Lite. Default 10.
    pub dyn_udp_lifetime: u32,
    /// Lifetime of every other protocol, and of an unused parent. Default 5.
    pub dyn_short_lifetime: u32,
    /// Whether keepalives are sent for established TCP connections that are about to expire. Default on.
    pub dyn_keepalive: bool,
    /// Whether states outlive their rule, as orphans. Default off.
    pub dyn_keep_states: bool,
    /// Not in ipfw. Whether the identifier of an ICMP query is part of the state's key: two pings between the same
    /// hosts are two states. Default off.
    pub dyn_icmp_id: bool,
    /// Not in ipfw. Whether an install into a full table evicts a state: one without a reply, or, if all
    /// have a reply, the one of a few that expires first. Otherwise the install is refused. Default off.
    pub dyn_evict: bool,
    /// Not in ipfw. Maximum number of states of one source, the sender of the first packet: an IPv4 address, or the
    /// /64 of an IPv6 address that is not link-local. States made while it was 0 do not count. Default 0 (no
    /// maximum).
    pub dyn_source_max: u32,
    /// Not in ipfw. Whether an SCTP association has the lifetimes of a TCP connection, by its handshake, shutdown and
    /// abort. Off, it has `dyn_short_lifetime`. Default off.
    pub dyn_sctp: bool,
    /// Not in ipfw; against SYN floods from forged sources. Whether the first SYN of a flow without a state is
    /// dropped; its repetition, 0.2 s to 60 s later, makes the state. A connection takes a second longer. Default
    /// off.
    pub dyn_first_syn: bool,
    /// Not in ipfw; against SYN floods. Whether a TCP connection that begins while the table is nearly full has a SYN
    /// lifetime of at most [`SYN_NEARLY_FULL`] seconds. Default off.
    pub dyn_adaptive: bool,
}

/// See [`Settings::dyn_adaptive`]. Long enough for the answer to a SYN that was repeated after one and three seconds.
pub const SYN_NEARLY_FULL: u32 = 5;

impl Default for Settings {
    fn default() -> Self {
        Self {
            dyn_max: 1_048_576,
            dyn_parent_max: 4096,
            dyn_buckets: 8192,
            dyn_ack_lifetime: 300,
            dyn_syn_lifetime: 20,
            dyn_fin_lifetime: 1,
            dyn_rst_lifetime: 1,
            dyn_udp_lifetime: 10,
            dyn_short_lifetime: 5,
            dyn_keepalive: true,
            dyn_keep_states: false,
            dyn_icmp_id: false,
            dyn_evict: false,
            dyn_source_max: 0,
            dyn_sctp: false,
            dyn_first_syn: false,
            dyn_adaptive: false,
        }
    }
}

/// Why a setting was not changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SettingError {
    /// There is no setting of that name. The list has the names that are valid besides those of the states.
    Unknown(String, &'static [&'static str]),
    /// The setting is read-only.
    ReadOnly(&'static str),
    /// The value is out of the setting's range.
    Range {
        /// The setting.
        name: &'static str,
        /// The values that it accepts.
        takes: &'static str,
    },
}

impl fmt::Display for SettingError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(name, more) => {
                write!(f, "there is no setting {name:?}; settable are ")?;
                let mut names = ROWS.iter().map(|row| row.name).chain(more.iter().copied());
                f.write_str(names.next().unwrap_or_default())?;
                names.try_for_each(|name| write!(f, ", {name}"))
            }
            Self::ReadOnly(name) => write!(f, "{name} can only be read"),
            Self::Range { name, takes } => write!(f, "{name} takes {takes}"),
        }
    }
}

impl std::error::Error for SettingError {}

/// Read-only names, which [`States`](crate::state::States) answers.
const READ_ONLY: [&str; 3] = ["dyn_count", "dyn_parent_count", "curr_max_length"];

/// A setting and its field.
struct Row {
    name: &'static str,
    field: Field,
}

enum Field {
    Number(fn(&mut Settings) -> &mut u32),
    Seconds(fn(&mut Settings) -> &mut u32),
    Switch(fn(&mut Settings) -> &mut bool),
}

const ROWS: [Row; 17] = [
    Row { name: "dyn_max", field: Field::Number(|s| &mut s.dyn_max) },
    Row { name: "dyn_parent_max", field: Field::Number(|s| &mut s.dyn_parent_max) },
    Row { name: "dyn_buckets", field: Field::Number(|s| &mut s.dyn_buckets) },
    Row { name: "dyn_ack_lifetime", field: Field::Seconds(|s| &mut s.dyn_ack_lifetime) },
    Row { name: "dyn_syn_lifetime", field: Field::Seconds(|s| &mut s.dyn_syn_lifetime) },
    Row { name: "dyn_fin_lifetime", field: Field::Seconds(|s| &mut s.dyn_fin_lifetime) },
    Row { name: "dyn_rst_lifetime", field: Field::Seconds(|s| &mut s.dyn_rst_lifetime) },
    Row { name: "dyn_udp_lifetime", field: Field::Seconds(|s| &mut s.dyn_udp_lifetime) },
    Row { name: "dyn_short_lifetime", field: Field::Seconds(|s| &mut s.dyn_short_lifetime) },
    Row { name: "dyn_keepalive", field: Field::Switch(|s| &mut s.dyn_keepalive) },
    Row { name: "dyn_keep_states", field: Field::Switch(|s| &mut s.dyn_keep_states) },
    Row { name: "dyn_icmp_id", field: Field::Switch(|s| &mut s.dyn_icmp_id) },
    Row { name: "dyn_evict", field: Field::Switch(|s| &mut s.dyn_evict) },
    Row { name: "dyn_source_max", field: Field::Number(|s| &mut s.dyn_source_max) },
    Row { name: "dyn_sctp", field: Field::Switch(|s| &mut s.dyn_sctp) },
    Row { name: "dyn_first_syn", field: Field::Switch(|s| &mut s.dyn_first_syn) },
    Row { name: "dyn_adaptive", field: Field::Switch(|s| &mut s.dyn_adaptive) },
];

impl Settings {
    /// Sets the setting called `name`, with or without the prefix `net.inet.ip.fw.`.
    ///
    /// # Errors
    /// There is no such setting, it is read-only, or `value` is out of its range.
    ///
    /// ```
    /// let mut settings = towpath_gate::state::Settings::default();
    /// settings.set("net.inet.ip.fw.dyn_udp_lifetime", 30)?;
    /// assert_eq!(settings.dyn_udp_lifetime, 30);
    /// assert!(settings.set("dyn_upd_lifetime", 30).is_err());
    /// # Ok::<(), towpath_gate::state::SettingError>(())
    /// ```
    pub fn set(&mut self, name: &str, value: u64) -> Result<(), SettingError> {
        let short = name.strip_prefix("net.inet.ip.fw.").unwrap_or(name);
        if let Some(name) = READ_ONLY.into_iter().find(|name| *name == short) {
            return Err(SettingError::ReadOnly(name));
        }
        let Some(Row { name, field }) = ROWS.iter().find(|row| row.name == short) else {
            return Err(SettingError::Unknown(name.to_owned(), &[]));
        };
        match field {
            Field::Number(field) => {
                let value = u32::try_from(value).ok();
                *field(self) = value.ok_or(SettingError::Range { name, takes: "0 to 4294967295" })?;
            }
            Field::Seconds(field) => {
                let value = u32::try_from(value).ok().filter(|value| *value <= LIFETIME_MAX);
                *field(self) = value.ok_or(SettingError::Range { name, takes: "0 to 9000000" })?;
            }
            Field::Switch(field) => {
                *field(self) = match value {
                    0 => false,
                    1 => true,
                    _ => return Err(SettingError::Range { name, takes: "0 or 1" }),
                };
            }
        }
        Ok(())
    }

    /// Every setting and its value, switches as 0 and 1.
    pub fn rows(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let mut settings = self.clone();
        ROWS.iter().map(move |row| match row.field {
            Field::Number(field) | Field::Seconds(field) => (row.name, u64::from(*field(&mut settings))),
            Field::Switch(field) => (row.name, u64::from(*field(&mut settings))),
        })
    }

    /// The settings for a connection that begins while the table is nearly full.
    pub(crate) fn when_nearly_full(&self) -> Self {
        Self { dyn_syn_lifetime: self.dyn_syn_lifetime.min(SYN_NEARLY_FULL), ..self.clone() }
    }

    /// The settings as ipfw limits them: a closed connection must be gone before a keepalive could prolong it.
    pub(crate) fn clamped(mut self) -> Self {
        self.dyn_fin_lifetime = self.dyn_fin_lifetime.min(KEEPALIVE_PERIOD - 1);
        if self.dyn_keepalive {
            self.dyn_rst_lifetime = self.dyn_rst_lifetime.min(KEEPALIVE_PERIOD - 1);
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_row_sets_its_field() {
        for (i, row) in ROWS.iter().enumerate() {
            let mut settings = Settings::default();
            let before: Vec<_> = settings.rows().collect();
            let value = 1 - before[i].1.min(1);
            settings.set(row.name, value).unwrap();
            for (j, (name, after)) in settings.rows().enumerate() {
                assert_eq!(after, if i == j { value } else { before[j].1 }, "set {}, read {name}", row.name);
            }
        }
    }

    #[test]
    fn errors_name_the_valid_values() {
        let mut settings = Settings::default();
        let mut error = |name, value| settings.set(name, value).unwrap_err().to_string();
        assert!(
            error("dyn_mx", 1)
                .starts_with("there is no setting \"dyn_mx\"; settable are dyn_max, dyn_parent_max")
        );
        assert_eq!(error("dyn_count", 1), "dyn_count can only be read");
        assert_eq!(error("dyn_keepalive", 2), "dyn_keepalive takes 0 or 1");
        assert_eq!(error("dyn_max", 1 << 32), "dyn_max takes 0 to 4294967295");
        assert_eq!(error("dyn_udp_lifetime", 9_000_001), "dyn_udp_lifetime takes 0 to 9000000");
        assert_eq!(LIFETIME_MAX, 9_000_000);
    }

    #[test]
    fn closed_connections_end_before_a_keepalive() {
        let long = Settings { dyn_fin_lifetime: 9, dyn_rst_lifetime: 9, ..Settings::default() };
        assert_eq!(
            (long.clone().clamped().dyn_fin_lifetime, long.clone().clamped().dyn_rst_lifetime),
            (4, 4)
        );
        let silent = Settings { dyn_keepalive: false, ..long }.clamped();
        assert_eq!((silent.dyn_fin_lifetime, silent.dyn_rst_lifetime), (4, 9));
    }
}
