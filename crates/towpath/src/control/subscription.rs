//! What a client of the ring follows: changes of states, and logged packets.
//!
//! A request is JSON, or empty for the defaults. It replaces the subscription before.

use serde::Deserialize;
use towpath_gate::Dir;
use towpath_gate::state::EventKind;
use towpath_gate::state::record::Record;
use towpath_ring::{Channel, Kind, Layers, Loss, Meta, group};
use towpath_wire::Time;

use super::logged_packets::LoggedPacket;

/// Default of `copy-range`.
const COPY_RANGE: usize = 256;

/// Maximum number of rules in a request.
const RULES: usize = 1024;

/// The events of a request for [`group::EVENTS`].
const WORDS: [&str; 7] =
    ["created", "restored", "replied", "updated", "ended", "nearly_full", "no_longer_full"];

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct EventsRequest {
    events: Option<Vec<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct PacketsRequest {
    rules: Option<Vec<u32>>,
    copy_range: Option<usize>,
    rate: Option<u32>,
}

/// The changes of states that a client follows, one bit for each of [`WORDS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EventFilter(u8);

impl EventFilter {
    /// The filter of a request's payload.
    pub(super) fn read(payload: &[u8]) -> Option<Self> {
        let request: EventsRequest = read(payload)?;
        let Some(words) = request.events else { return Some(Self(u8::MAX)) };
        let bit = |word: &String| WORDS.iter().position(|known| known == word).map(|at| 1 << at);
        words.iter().try_fold(0, |bits, word| Some(bits | bit(word)?)).map(Self)
    }

    pub(super) fn takes(self, kind: EventKind) -> bool {
        let at = match kind {
            EventKind::Created => 0,
            EventKind::Restored => 1,
            EventKind::Replied => 2,
            EventKind::Updated => 3,
            EventKind::Expired | EventKind::Removed | EventKind::Evicted => 4,
            EventKind::NearlyFull => 5,
            EventKind::NoLongerFull => 6,
        };
        self.0 & 1 << at != 0
    }

    pub(super) fn takes_record(self, record: &Record<'_>) -> bool {
        record.kind.is_some_and(|kind| self.takes(kind))
    }
}

/// The logged packets that a client follows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PacketFilter {
    /// Numbers of rules. `None`: all.
    rules: Option<Vec<u32>>,
    pub(super) copy_range: usize,
    /// Packets per second. `None`: no limit.
    rate: Option<u32>,
    /// The second of the engine's clock that `sent` counts.
    second: u64,
    sent: u32,
}

impl PacketFilter {
    /// The filter of a request's payload.
    pub(super) fn read(payload: &[u8]) -> Option<Self> {
        let PacketsRequest { rules, copy_range, rate } = read(payload)?;
        if rules.as_ref().is_some_and(|rules| rules.len() > RULES) {
            return None;
        }
        let copy_range = copy_range.unwrap_or(COPY_RANGE);
        let valid = (1..=usize::from(u16::MAX)).contains(&copy_range) && rate != Some(0);
        valid.then_some(Self { rules, copy_range, rate, second: 0, sent: 0 })
    }

    fn takes(&self, rule: u32) -> bool {
        self.rules.as_ref().is_none_or(|rules| rules.contains(&rule))
    }

    /// Returns true if the rate permits another packet at this time.
    fn admits(&mut self, time: Time) -> bool {
        let Some(rate) = self.rate else { return true };
        let second = time.as_nanos() / 1_000_000_000;
        if second != self.second {
            (self.second, self.sent) = (second, 0);
        }
        let admitted = self.sent < rate;
        self.sent += u32::from(admitted);
        admitted
    }

    /// Sends a packet that the client follows; `wall` is its time since 1970.
    pub(super) fn send(&mut self, packet: &LoggedPacket, wall: Time, channel: &mut Channel) {
        if !self.takes(packet.rule) {
            return;
        }
        if !self.admits(packet.time) {
            return channel.lose(Loss::Limited);
        }
        let bytes = &packet.bytes[..packet.bytes.len().min(self.copy_range)];
        let meta = Meta {
            kind: Kind::PACKET,
            group: group::PACKETS,
            wire_len: packet.wire_len,
            time: wall.as_nanos(),
            mark: packet.rule,
            port: packet.port,
            hash: u32::from(packet.dir == Dir::Out),
            layers: Layers { link: packet.link, network: packet.network, payload: bytes.len() as u16 },
            ..Meta::default()
        };
        send(bytes, &meta, channel);
    }
}

fn read<T: Default + for<'de> Deserialize<'de>>(payload: &[u8]) -> Option<T> {
    if payload.is_empty() { Some(T::default()) } else { serde_json::from_slice(payload).ok() }
}

/// Sends the line of a change; `wall` is its time since 1970.
pub(super) fn send_event(line: &[u8], wall: Time, channel: &mut Channel) {
    let meta = Meta { kind: Kind::EVENT, group: group::EVENTS, time: wall.as_nanos(), ..Meta::default() };
    send(line, &meta, channel);
}

/// Sends a frame. One without room is lost, counted, and reported in the ring.
fn send(bytes: &[u8], meta: &Meta, channel: &mut Channel) {
    if channel.send(bytes, meta).is_err() {
        channel.lose(Loss::NoRoom);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_checked() {
        let all = EventFilter::read(b"").unwrap();
        assert_eq!(EventFilter::read(b"{}"), Some(all));
        assert!(all.takes(EventKind::Restored) && all.takes(EventKind::NearlyFull));
        let ends = EventFilter::read(b"{\"events\":[\"ended\",\"created\"]}").unwrap();
        for kind in [EventKind::Created, EventKind::Expired, EventKind::Removed, EventKind::Evicted] {
            assert!(ends.takes(kind), "{kind:?}");
        }
        assert!(!ends.takes(EventKind::Updated) && !ends.takes(EventKind::NoLongerFull));
        for wrong in [&b"x"[..], b"[]1", b"{\"events\":[\"expired\"]}", b"{\"events\":1}", b"{\"event\":[]}"]
        {
            assert_eq!(EventFilter::read(wrong), None, "{}", String::from_utf8_lossy(wrong));
        }
        let packets = PacketFilter::read(b"{\"rules\":[100],\"copy-range\":64,\"rate\":2}").unwrap();
        assert!(packets.takes(100) && !packets.takes(101) && packets.copy_range == 64);
        assert_eq!(PacketFilter::read(b"").unwrap().copy_range, COPY_RANGE);
        for wrong in [
            "{\"copy-range\":0}",
            "{\"copy-range\":65536}",
            "{\"rate\":0}",
            "{\"rules\":[-1]}",
            "{\"rulse\":[]}",
        ] {
            assert_eq!(PacketFilter::read(wrong.as_bytes()), None, "{wrong}");
        }
        let many = format!("{{\"rules\":{:?}}}", vec![1; RULES + 1]);
        assert_eq!(PacketFilter::read(many.as_bytes()), None);
    }

    #[test]
    fn a_rate_admits_so_many_packets_in_each_second() {
        let mut packets = PacketFilter::read(b"{\"rate\":2}").unwrap();
        let mut admitted = |second| (0..5).filter(|_| packets.admits(Time::from_secs(second))).count();
        assert_eq!([admitted(5), admitted(5), admitted(6)], [2, 0, 2]);
    }
}
