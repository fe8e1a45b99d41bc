//! Copies of logged packets, from the packet threads to the thread of the ring (`dumps.rs`).
//!
//! Without a client, a packet thread loads one word after each burst. With clients, it copies the packets of `log` rules up to the largest
//! range that a client wants, and puts them into a bounded channel without waiting.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use towpath_gate::{Dir, LogEntry, Walker};
use towpath_wire::Time;

/// Packets that may wait for the thread of the ring.
const PACKETS: usize = 1024;

/// A logged packet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LoggedPacket {
    pub(super) time: Time,
    /// Number of the rule.
    pub(super) rule: u32,
    pub(super) dir: Dir,
    /// Number of its port; 0 if it has none.
    pub(super) port: u32,
    pub(super) link: u16,
    pub(super) network: u16,
    pub(super) wire_len: u32,
    pub(super) bytes: Box<[u8]>,
}

#[derive(Debug, Default)]
struct Wanted {
    /// Bytes of each packet to copy. 0: there is no client.
    range: AtomicUsize,
    /// Packets for which there was no room.
    lost: AtomicU64,
}

/// The end of a packet thread.
#[derive(Clone, Debug)]
pub struct PacketCopies {
    wanted: Arc<Wanted>,
    packets: SyncSender<LoggedPacket>,
}

/// The end of the thread of the ring.
#[derive(Debug)]
pub struct LoggedPackets {
    wanted: Arc<Wanted>,
    packets: Receiver<LoggedPacket>,
    told: u64,
}

/// Makes both ends.
pub fn logged_packets() -> (PacketCopies, LoggedPackets) {
    let wanted = Arc::<Wanted>::default();
    let (sender, packets) = sync_channel(PACKETS);
    (
        PacketCopies { wanted: Arc::clone(&wanted), packets: sender },
        LoggedPackets { wanted, packets, told: 0 },
    )
}

impl PacketCopies {
    /// Tells the walker how much of its logged packets to copy.
    pub(crate) fn arm(&self, walker: &mut Walker) {
        // Relaxed, here and below: numbers that order nothing.
        walker.log().set_copy_range(self.wanted.range.load(Ordering::Relaxed));
    }

    /// Takes a logged packet, if it was copied.
    pub(crate) fn packet(&self, walker: &mut Walker, entry: &LogEntry) {
        let Some(copied) = entry.copied else { return };
        let Some(bytes) = walker.log().copy(entry) else { return };
        let packet = LoggedPacket {
            time: entry.time,
            rule: entry.rule.unwrap_or(0),
            dir: entry.dir,
            port: entry.port.map_or(0, |port| port.0.into()),
            link: copied.link,
            network: copied.network,
            wire_len: copied.wire_len,
            bytes: bytes.into(),
        };
        if self.packets.try_send(packet).is_err() {
            self.wanted.lost.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts the packets that the walker had no room to copy.
    pub(crate) fn count_uncopied(&self, walker: &mut Walker) {
        let uncopied = walker.log().take_uncopied();
        if uncopied > 0 {
            self.wanted.lost.fetch_add(uncopied, Ordering::Relaxed);
        }
    }
}

impl LoggedPackets {
    /// Sets how many bytes of each packet are copied. 0: none.
    pub(super) fn want(&self, range: usize) {
        self.wanted.range.store(range, Ordering::Relaxed);
    }

    /// The next packet.
    pub(super) fn take(&self) -> Option<LoggedPacket> {
        self.packets.try_recv().ok()
    }

    /// Packets that were lost since the last call.
    pub(super) fn take_lost(&mut self) -> u64 {
        let lost = self.wanted.lost.load(Ordering::Relaxed);
        lost - std::mem::replace(&mut self.told, lost)
    }
}
