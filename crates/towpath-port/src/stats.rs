/// What went through a port since it was opened, and what did not and why.
///
/// Frames and bytes are counted as they cross [`Port::receive`](crate::Port::receive) and [`Port::send`](crate::Port::send): a frame that stands for several
/// segments is one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Stats {
    /// Frames received.
    pub received: u64,
    /// Their bytes.
    pub received_bytes: u64,
    /// Frames handed to the medium.
    pub sent: u64,
    /// Their bytes.
    pub sent_bytes: u64,
    /// What was lost, by reason.
    pub dropped: Drops,
}

/// Frames that a port lost, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Drops {
    /// Arrived while the receive ring, the fill ring or the kernel's queue was full.
    pub rx_full: u64,
    /// Arrived, and were longer than the port can receive.
    pub rx_too_long: u64,
    /// Arrived as several UDP datagrams in one frame, by a medium that does not say how long each is (AF_XDP).
    pub rx_uncut: u64,
    /// Arrived cut short, or in a form that the port does not read.
    pub rx_invalid: u64,
    /// Taken by `send`, and the medium had no room for them.
    pub tx_full: u64,
    /// Taken by `send`, and the medium refused them (too long for its MTU by now, interface down).
    pub tx_refused: u64,
    /// Held by the kernel, and gone before their verdict arrived.
    pub verdict_late: u64,
}

impl Drops {
    /// The reasons with their counters, for reports.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + use<> {
        let Self { rx_full, rx_too_long, rx_uncut, rx_invalid, tx_full, tx_refused, verdict_late } = *self;
        [
            ("rx_full", rx_full),
            ("rx_too_long", rx_too_long),
            ("rx_uncut", rx_uncut),
            ("rx_invalid", rx_invalid),
            ("tx_full", tx_full),
            ("tx_refused", tx_refused),
            ("verdict_late", verdict_late),
        ]
        .into_iter()
    }

    /// All of them.
    pub fn total(&self) -> u64 {
        self.iter().map(|(_, count)| count).sum()
    }
}

impl Stats {
    pub(crate) fn count_received(&mut self, bytes: usize) {
        self.received += 1;
        self.received_bytes += bytes as u64;
    }

    pub(crate) fn count_sent(&mut self, bytes: usize) {
        self.sent += 1;
        self.sent_bytes += bytes as u64;
    }
}
