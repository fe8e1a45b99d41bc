use std::ops::Range;

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
        /// Frames that `send` accepted and dropped because the interface was down or gone.
        pub port_down: counter packets as "dropped" (reason = "port_down"),
        /// Frames that `send` accepted and the kernel refused with EPERM.
        pub tx_refused_eperm: counter packets as "dropped" (reason = "tx_refused_eperm"),
        /// Frames that `send` accepted and the kernel refused with EINVAL.
        pub tx_refused_einval: counter packets as "dropped" (reason = "tx_refused_einval"),
        /// Frames that `send` accepted and the kernel refused with EMSGSIZE.
        pub tx_refused_emsgsize: counter packets as "dropped" (reason = "tx_refused_emsgsize"),
        /// Packets that `send` accepted and the kernel refused with ENETUNREACH.
        pub tx_refused_enetunreach: counter packets as "dropped" (reason = "tx_refused_enetunreach"),
        /// Packets that `send` accepted and the kernel refused with EHOSTUNREACH.
        pub tx_refused_ehostunreach: counter packets as "dropped" (reason = "tx_refused_ehostunreach"),
        /// Frames that `send` accepted and the medium refused for another reason.
        pub tx_refused: counter packets as "dropped" (reason = "tx_refused"),
        /// Packets that left the kernel's queue before their verdict arrived.
        pub verdict_late: counter packets as "dropped" (reason = "verdict_late"),
    }
}

/// Why a port did not send a frame that it accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TxDrop {
    /// The medium was full.
    Full,
    /// The interface is down or gone.
    Down,
    /// EPERM.
    Eperm,
    /// EINVAL.
    Einval,
    /// EMSGSIZE.
    Emsgsize,
    /// ENETUNREACH.
    Enetunreach,
    /// EHOSTUNREACH.
    Ehostunreach,
    /// Another error.
    Other,
}

impl TxDrop {
    /// All reasons, in the order of [`Stats::tx_drops`].
    pub const ALL: [Self; 8] = [
        Self::Full,
        Self::Down,
        Self::Eperm,
        Self::Einval,
        Self::Emsgsize,
        Self::Enetunreach,
        Self::Ehostunreach,
        Self::Other,
    ];

    /// The reason that an error of send(2) or write(2) means.
    pub fn from_errno(errno: i32) -> Self {
        match errno {
            libc::EAGAIN | libc::ENOBUFS | libc::ENOMEM => Self::Full,
            libc::ENETDOWN | libc::ENXIO | libc::ENODEV | libc::EBADFD => Self::Down,
            libc::EPERM => Self::Eperm,
            libc::EINVAL => Self::Einval,
            libc::EMSGSIZE => Self::Emsgsize,
            libc::ENETUNREACH => Self::Enetunreach,
            libc::EHOSTUNREACH => Self::Ehostunreach,
            _ => Self::Other,
        }
    }
}

/// Frames of one turn that are kept for [`Port::take_refused`](crate::Port::take_refused), and their bytes.
const REFUSED: usize = 8;
const REFUSED_BYTES: usize = 64 << 10;

/// The first frames that a port dropped since the last call of [`Port::take_refused`](crate::Port::take_refused). The memory is
/// allocated with the first frame and reused.
#[derive(Debug, Default)]
pub(crate) struct Refused {
    frames: Vec<(TxDrop, Range<usize>)>,
    bytes: Vec<u8>,
}

impl Refused {
    /// Copies a frame, if there is room.
    pub(crate) fn keep(&mut self, reason: TxDrop, frame: &[u8]) {
        let start = self.bytes.len();
        if self.frames.len() < REFUSED && start + frame.len() <= REFUSED_BYTES {
            self.bytes.extend_from_slice(frame);
            self.frames.push((reason, start..self.bytes.len()));
        }
    }

    /// Passes the frames to `each`, and forgets them.
    pub(crate) fn take(&mut self, each: &mut dyn FnMut(TxDrop, &[u8])) {
        for (reason, range) in self.frames.drain(..) {
            each(reason, &self.bytes[range]);
        }
        self.bytes.clear();
    }
}

impl Stats {
    /// Counts frames that `send` accepted and dropped.
    pub(crate) fn count_tx_drop(&mut self, reason: TxDrop, frames: u64) {
        *match reason {
            TxDrop::Full => &mut self.tx_full,
            TxDrop::Down => &mut self.port_down,
            TxDrop::Eperm => &mut self.tx_refused_eperm,
            TxDrop::Einval => &mut self.tx_refused_einval,
            TxDrop::Emsgsize => &mut self.tx_refused_emsgsize,
            TxDrop::Enetunreach => &mut self.tx_refused_enetunreach,
            TxDrop::Ehostunreach => &mut self.tx_refused_ehostunreach,
            TxDrop::Other => &mut self.tx_refused,
        } += frames;
    }

    /// Frames that `send` accepted and dropped, in the order of [`TxDrop::ALL`].
    pub fn tx_drops(&self) -> [u64; TxDrop::ALL.len()] {
        [
            self.tx_full,
            self.port_down,
            self.tx_refused_eperm,
            self.tx_refused_einval,
            self.tx_refused_emsgsize,
            self.tx_refused_enetunreach,
            self.tx_refused_ehostunreach,
            self.tx_refused,
        ]
    }

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_errno_has_one_counter() {
        for (at, reason) in TxDrop::ALL.into_iter().enumerate() {
            let mut stats = Stats::default();
            stats.count_tx_drop(reason, 3);
            let drops = stats.tx_drops();
            assert_eq!((drops[at], drops.iter().sum::<u64>(), stats.dropped()), (3, 3, 3), "{reason:?}");
        }
        let rows = [
            (libc::ENOBUFS, TxDrop::Full),
            (libc::ENETDOWN, TxDrop::Down),
            (libc::ENXIO, TxDrop::Down),
            (libc::EPERM, TxDrop::Eperm),
            (libc::EINVAL, TxDrop::Einval),
            (libc::EMSGSIZE, TxDrop::Emsgsize),
            (libc::ENETUNREACH, TxDrop::Enetunreach),
            (libc::EHOSTUNREACH, TxDrop::Ehostunreach),
            (libc::ENOTSOCK, TxDrop::Other),
        ];
        for (errno, expected) in rows {
            assert_eq!(TxDrop::from_errno(errno), expected, "{errno}");
        }
    }

    #[test]
    fn the_kept_frames_are_bounded() {
        let mut refused = Refused::default();
        for n in 0..20 {
            refused.keep(TxDrop::Full, &[n; 10]);
        }
        let mut got = Vec::new();
        refused.take(&mut |reason, frame| got.push((reason, frame[0], frame.len())));
        assert_eq!(got, (0..8).map(|n| (TxDrop::Full, n, 10)).collect::<Vec<_>>());
        refused.keep(TxDrop::Down, &[0; REFUSED_BYTES]);
        refused.keep(TxDrop::Down, &[1]);
        got.clear();
        refused.take(&mut |reason, frame| got.push((reason, frame[0], frame.len())));
        assert_eq!(got, [(TxDrop::Down, 0, REFUSED_BYTES)]);
        refused.take(&mut |_, _| panic!("taken twice"));
    }
}
