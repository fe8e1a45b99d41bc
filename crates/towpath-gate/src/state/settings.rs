//! The settings of dynamic states, under ipfw's sysctl names (`net.inet.ip.fw.*`).

use crate::settings::{SettingError, settings};

/// Seconds between two keepalive scans. A hidden constant in ipfw.
pub const KEEPALIVE_PERIOD: u32 = 5;

settings! {
    /// Settings of the dynamic states. Lifetimes are in seconds, at most [`LIFETIME_MAX`](crate::state::LIFETIME_MAX).
    ///
    /// Settings may change at any time ([`States::set_settings`](crate::state::States::set_settings)). A changed lifetime
    /// applies from each state's next packet.
    ///
    /// `dyn_max` bounds states, not bytes. Memory of an IPv4 state (72 bytes plus the index) is reused for IPv4 states only,
    /// that of an IPv6 state (136 bytes) for IPv6 states only, and that of windows (`strict`, in pieces of 256 KiB)
    /// for windows only. So the memory is at most that of `dyn_max` states of both families, if first the one and
    /// then the other had that many.
    ///
    /// `dyn_source_max` counts by the sender of the first packet: an IPv4 address, or the /64 of an IPv6 address that is not
    /// link-local. States made while it was 0 do not count.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Settings {
        /// states of IPv4 and IPv6 together (ipfw: 16,384)
        pub dyn_max: ipfw number = 1_048_576,
        /// parent entries of limits
        pub dyn_parent_max: ipfw number = 4096,
        /// no effect: the index grows with the states
        pub dyn_buckets: ipfw number = 8192,
        /// an established TCP connection
        pub dyn_ack_lifetime: ipfw seconds = 300,
        /// a TCP connection of which only the SYN was seen
        pub dyn_syn_lifetime: ipfw seconds = 20,
        /// a TCP connection that both sides have closed; values above 4 act as 4
        pub dyn_fin_lifetime: ipfw seconds = 1,
        /// a TCP connection that was reset, or whose beginning was not seen; with keepalives, values above 4 act as 4
        pub dyn_rst_lifetime: ipfw seconds = 1,
        /// UDP and UDP-Lite
        pub dyn_udp_lifetime: ipfw seconds = 10,
        /// all other protocols, and a limit's parent that is not used
        pub dyn_short_lifetime: ipfw seconds = 5,
        /// probe both sides of an established TCP connection that would expire within 20 s, every 5 s
        pub dyn_keepalive: ipfw switch = true,
        /// states outlive their rule as orphans with its action
        pub dyn_keep_states: ipfw switch = false,
        /// the identifier of an ICMP query is part of the key
        pub dyn_icmp_id: towpath switch = false,
        /// a new state in a full table replaces an old one; 0 refuses the new one, as ipfw does
        pub dyn_evict: towpath switch = false,
        /// states of one source (IPv4 address, IPv6 /64); 0 means no limit
        pub dyn_source_max: towpath number = 0,
        /// track the opening and shutdown of SCTP associations
        pub dyn_sctp: towpath switch = false,
        /// drop the first SYN of a flow; its repetition 0.2 to 60 s later makes the state
        pub dyn_first_syn: towpath switch = false,
        /// a TCP reset that its receiver does not accept changes nothing; 0: any reset ends the connection, as in ipfw
        pub dyn_rst_check: towpath switch = true,
        /// shorten the lifetime of half-open TCP connections to 5 s while the table is nearly full
        pub dyn_adaptive: towpath switch = false,
    }
}

/// See [`Settings::dyn_adaptive`]. Long enough for the answer to a SYN that was repeated after one and three seconds.
pub const SYN_NEARLY_FULL: u32 = 5;

/// Read-only names, which [`States`](crate::state::States) answers.
const READ_ONLY: [&str; 3] = ["dyn_count", "dyn_parent_count", "curr_max_length"];

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
        match READ_ONLY.into_iter().find(|name| *name == short) {
            Some(name) => Err(SettingError::ReadOnly(name)),
            None => self.set_value(short, value),
        }
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
        for (i, row) in Settings::TABLE.iter().enumerate() {
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
        assert_eq!(error("dyn_udp_lifetime", 9_000_001), "dyn_udp_lifetime takes 0 to 9000000 (seconds)");
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
