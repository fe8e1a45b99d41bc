use towpath_metrics::{Metrics, metrics};

metrics! {
    /// Traffic of a port since it was opened, and losses by reason.
    ///
    /// Frames and bytes are counted as they cross [`Port::receive`](crate::Port::receive) and [`Port::send`](crate::Port::send). A
    /// frame to be segmented counts as one.
    #[non_exhaustive]
    pub struct Stats in "port" {
        /// Frames received.
        pub received: counter packets,
        /// Bytes of the frames received.
        pub received_bytes: counter bytes,
        /// Frames passed to the medium.
        pub sent: counter packets,
        /// Bytes of the frames passed to the medium.
        pub sent_bytes: counter bytes,
        /// Frames dropped because the receive ring, the fill ring or the kernel's queue was full.
        pub rx_full: counter packets as "dropped": "Frames dropped, by reason." (reason = "rx_full"),
        /// Received frames dropped because they were longer than the port can receive.
        pub rx_too_long: counter packets as "dropped" (reason = "rx_too_long"),
        /// Received frames dropped because they held several UDP datagrams of unknown length (AF_XDP).
        pub rx_unsegmented: counter packets as "dropped" (reason = "rx_unsegmented"),
        /// Received frames dropped because they were truncated or in a form that the port does not read.
        pub rx_invalid: counter packets as "dropped" (reason = "rx_invalid"),
        /// Frames that `send` accepted and dropped because the medium was full.
        pub tx_full: counter packets as "dropped" (reason = "tx_full"),
        /// Frames that `send` accepted and the medium refused (longer than its MTU, interface down).
        pub tx_refused: counter packets as "dropped" (reason = "tx_refused"),
        /// Packets that left the kernel's queue before their verdict arrived.
        pub verdict_late: counter packets as "dropped" (reason = "verdict_late"),
    }
}

impl Stats {
    /// Frames lost, by reason.
    pub fn drops(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        self.values().filter_map(|(metric, value)| metric.label.map(|(_, reason)| (reason, value)))
    }

    /// Frames lost for any reason.
    pub fn dropped(&self) -> u64 {
        self.drops().map(|(_, count)| count).sum()
    }

    pub(crate) fn count_received(&mut self, bytes: usize) {
        self.received += 1;
        self.received_bytes += bytes as u64;
    }

    pub(crate) fn count_sent(&mut self, bytes: usize) {
        self.sent += 1;
        self.sent_bytes += bytes as u64;
    }
}
