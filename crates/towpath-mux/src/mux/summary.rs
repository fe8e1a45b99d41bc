//! The counters that embedders read: C's `struct towpath_mux_counters` and Python's `MuxCounters`.

use towpath_metrics::metrics;

use super::Show;

metrics! {
    /// The counters of a mux in one struct. `received = done + undone + queued + in_hand`.
    ///
    /// The layout is part of the C ABI. A new counter belongs to [`Totals`](super::Totals) or [`psock::Stats`](super::psock::Stats),
    /// which C and Python list by name.
    #[repr(C)]
    pub struct Summary in "mux_summary" {
        /// connections attached at present
        pub connections: gauge connections,
        /// connections attached in total
        pub attached: counter connections,
        /// connections ended for any reason; the errors are below
        pub ended: counter connections,
        /// complete messages received
        pub received: counter messages,
        /// bytes of complete messages received
        pub received_bytes: counter bytes,
        /// messages read and done
        pub done: counter messages,
        /// messages discarded
        pub undone: counter messages,
        /// messages that no handle has started to read
        pub queued: gauge messages,
        /// messages that handles have and that are not done
        pub in_hand: gauge messages,
        /// messages sent completely
        pub sent: counter messages,
        /// bytes sent
        pub sent_bytes: counter bytes,
        /// messages not sent completely because their connection ended
        pub unsent: counter messages,
        /// bytes that the mux holds
        pub bytes: gauge bytes,
        /// connections reset, or with a failed read or write
        pub resets: counter connections,
        /// connections closed by their peer inside a message
        pub inside: counter connections,
        /// connections with invalid data or an impossible length
        pub malformed: counter connections,
        /// connections with a message above message_max or head_max
        pub too_long: counter connections,
        /// connections with a message that exceeded head_time or body_time
        pub late: counter connections,
        /// connections that were idle for too long
        pub idle: counter connections,
        /// connections whose peer made no progress for send_time
        pub send_timeouts: counter connections,
        /// connections with more than send_most to send
        pub send_full: counter connections,
        /// connections ended because they held most when mux_bytes was exceeded
        pub mux_full: counter connections,
        /// connections not drained in time
        pub drain_timeouts: counter connections,
    }
}

impl From<&Show> for Summary {
    fn from(show: &Show) -> Self {
        let Show { totals, psock_totals, bytes, .. } = show;
        Self {
            // An ended connection is listed while handles have its messages; it does not count.
            connections: totals.attach - totals.unattach,
            attached: totals.attach,
            ended: totals.unattach,
            received: totals.received,
            received_bytes: psock_totals.rx_bytes,
            done: totals.done,
            undone: totals.undone + totals.discarded(),
            queued: totals.queued,
            in_hand: totals.in_hand,
            sent: totals.tx_msgs,
            sent_bytes: totals.tx_bytes,
            unsent: totals.unsent,
            bytes: *bytes as u64,
            resets: totals.resets,
            inside: totals.inside,
            malformed: totals.malformed + psock_totals.rx_bad_hdr_len,
            too_long: psock_totals.rx_msg_too_big,
            late: psock_totals.rx_msg_timeouts,
            idle: totals.idle,
            send_timeouts: totals.send_timeouts,
            send_full: totals.send_full,
            mux_full: psock_totals.rx_mem_fail,
            drain_timeouts: totals.drain_timeouts,
        }
    }
}
