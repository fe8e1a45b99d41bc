//! The number of states per source address, for `dyn_source_max`.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::state::table::hash::Secret;
use crate::state::{Ends, Flow};

/// An address or a /64 prefix, with its zone.
type Key = [u64; 3];

/// The source of a flow, with its hash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SourceId {
    key: Key,
    hash: u64,
}

impl SourceId {
    pub(crate) fn new(secret: &Secret, flow: &Flow) -> Self {
        let key = key(flow);
        Self { key, hash: secret.hash(&key) }
    }

    /// A number below `shards`, a power of two, by the source.
    pub(crate) fn shard(self, shards: usize) -> usize {
        // As for parents.
        (self.hash >> 32) as usize & (shards - 1)
    }
}

/// The counts. Each source with a counted state has an entry, so the number of states bounds the entries.
#[derive(Clone, Debug)]
pub(crate) struct Sources {
    secret: Secret,
    counts: HashTable<(Key, u32)>,
}

impl Sources {
    pub(crate) fn new(secret: Secret) -> Self {
        Self { secret, counts: HashTable::new() }
    }

    /// Counts one more state for a source. Returns false, and counts nothing, if it has `max` already.
    pub(crate) fn add(&mut self, SourceId { key, hash }: SourceId, max: u32) -> bool {
        let secret = &self.secret;
        match self.counts.entry(hash, |entry| entry.0 == key, |entry| secret.hash(&entry.0)) {
            Entry::Occupied(entry) if entry.get().1 >= max => return false,
            Entry::Occupied(mut entry) => entry.get_mut().1 += 1,
            Entry::Vacant(_) if max == 0 => return false,
            Entry::Vacant(entry) => {
                entry.insert((key, 1));
            }
        }
        true
    }

    /// The number of states of a source.
    pub(crate) fn count(&self, SourceId { key, hash }: SourceId) -> u32 {
        self.counts.find(hash, |entry| entry.0 == key).map_or(0, |entry| entry.1)
    }

    /// Counts one state less.
    pub(crate) fn subtract(&mut self, SourceId { key, hash }: SourceId) {
        if let Ok(mut found) = self.counts.find_entry(hash, |entry| entry.0 == key) {
            found.get_mut().1 -= 1;
            if found.get().1 == 0 {
                found.remove();
            }
        }
    }
}

/// The source of a flow. A host controls all addresses of its IPv6 /64 (RFC 4291, 2.5.4), except that all link-local addresses
/// share one /64.
fn key(flow: &Flow) -> Key {
    let zone = u64::from(flow.zone);
    match flow.ends {
        Ends::V4(src, _) => [u32::from(src).into(), 0, zone << 32],
        Ends::V6(src, _, scope) => {
            let address = u128::from(src);
            let interface = if src.is_unicast_link_local() { address as u64 } else { 0 };
            [(address >> 64) as u64, interface, 1 << 48 | zone << 32 | u64::from(scope)]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_source_is_an_ipv4_address_or_an_ipv6_prefix() {
        let v4 = |src: [u8; 4], dst: [u8; 4]| Ends::V4(src.into(), dst.into());
        let v6 = |src: &str| Ends::V6(src.parse().unwrap(), "2001:db8:9::9".parse().unwrap(), 0);
        let flow = |ends| Flow { ends, proto: 6, src_port: 1, dst_port: 2, zone: 0 };
        let rows = [
            (v4([1, 1, 1, 1], [2, 2, 2, 2]), v4([1, 1, 1, 1], [3, 3, 3, 3]), true),
            (v4([1, 1, 1, 1], [2, 2, 2, 2]), v4([1, 1, 1, 2], [2, 2, 2, 2]), false),
            (v6("2001:db8::1"), v6("2001:db8::ffff:1"), true),
            (v6("2001:db8::1"), v6("2001:db8:0:1::1"), false),
            (v6("fe80::1"), v6("fe80::2"), false),
            (v6("::1.1.1.1"), v4([1, 1, 1, 1], [2, 2, 2, 2]), false),
        ];
        for (one, other, same) in rows {
            assert_eq!(key(&flow(one)) == key(&flow(other)), same, "{one:?} {other:?}");
        }
        assert_ne!(key(&flow(rows[0].0)), key(&Flow { zone: 1, ..flow(rows[0].0) }));
    }

    #[test]
    fn counts_are_bounded_and_leave_nothing_behind() {
        let mut sources = Sources::new(Secret::new(1));
        let ends = Ends::V4([1; 4].into(), [2; 4].into());
        let flow = Flow { ends, proto: 6, src_port: 1, dst_port: 2, zone: 0 };
        let source = SourceId::new(&Secret::new(1), &flow);
        assert_eq!([0, 2, 2, 2].map(|max| sources.add(source, max)), [false, true, true, false]);
        sources.subtract(source);
        assert!(sources.add(source, 2) && !sources.add(source, 2));
        (0..2).for_each(|_| sources.subtract(source));
        assert!(sources.counts.is_empty());
    }
}
