//! How many states each source has, for `dyn_source_max`.

use hashbrown::HashTable;
use hashbrown::hash_table::Entry;

use crate::state::table::hash::Secret;
use crate::state::{Ends, Flow};

/// A source: an address, a /64, with its tenant.
type Key = [u64; 3];

/// The counts. There is an entry for every source that has a counted state, so the states bound the entries.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sources(HashTable<(Key, u32)>);

impl Sources {
    /// How many counted states the source of `flow` has.
    pub(crate) fn count(&self, secret: &Secret, flow: &Flow) -> u32 {
        let key = key(flow);
        self.0.find(secret.hash(&key), |entry| entry.0 == key).map_or(0, |entry| entry.1)
    }

    /// One more state of the source of `flow`.
    pub(crate) fn add(&mut self, secret: &Secret, flow: &Flow) {
        let key = key(flow);
        match self.0.entry(secret.hash(&key), |entry| entry.0 == key, |entry| secret.hash(&entry.0)) {
            Entry::Occupied(mut entry) => entry.get_mut().1 += 1,
            Entry::Vacant(entry) => {
                entry.insert((key, 1));
            }
        }
    }

    /// One less.
    pub(crate) fn subtract(&mut self, secret: &Secret, flow: &Flow) {
        let key = key(flow);
        if let Ok(mut found) = self.0.find_entry(secret.hash(&key), |entry| entry.0 == key) {
            found.get_mut().1 -= 1;
            if found.get().1 == 0 {
                found.remove();
            }
        }
    }
}

/// Who has one IPv6 address of a /64 has them all (RFC 4291, 2.5.4); but all link-local addresses are of one /64.
fn key(flow: &Flow) -> Key {
    let tenant = u64::from(flow.tenant);
    match flow.ends {
        Ends::V4(src, _) => [u32::from(src).into(), 0, tenant << 32],
        Ends::V6(src, _, zone) => {
            let address = u128::from(src);
            let interface = if src.is_unicast_link_local() { address as u64 } else { 0 };
            [(address >> 64) as u64, interface, 1 << 48 | tenant << 32 | u64::from(zone)]
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_one_source() {
        let v4 = |src: [u8; 4], dst: [u8; 4]| Ends::V4(src.into(), dst.into());
        let v6 = |src: &str| Ends::V6(src.parse().unwrap(), "2001:db8:9::9".parse().unwrap(), 0);
        let flow = |ends| Flow { ends, proto: 6, src_port: 1, dst_port: 2, tenant: 0 };
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
        assert_ne!(key(&flow(rows[0].0)), key(&Flow { tenant: 1, ..flow(rows[0].0) }));
    }

    #[test]
    fn nothing_is_left_behind() {
        let (secret, mut sources) = (Secret::new(1), Sources::default());
        let flow = Flow {
            ends: Ends::V4([1; 4].into(), [2; 4].into()),
            proto: 6,
            src_port: 1,
            dst_port: 2,
            tenant: 0,
        };
        sources.add(&secret, &flow);
        sources.add(&secret, &flow);
        sources.subtract(&secret, &flow);
        assert_eq!(sources.count(&secret, &flow), 1);
        sources.subtract(&secret, &flow);
        assert!(sources.0.is_empty());
    }
}
