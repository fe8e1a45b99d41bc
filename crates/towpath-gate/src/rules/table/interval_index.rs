//! A sorted array of the intervals of nested prefixes: the lookup structure of large tables.
//!
//! In a trie of millions of prefixes, a lookup waits for memory once per level. Here it waits two or three times:
//! for an index over the upper bits, and for the few intervals that remain.
//!
//! The array is immutable and shared between the clones of a table.
//!
//! Invariant: for every address outside the prefixes in `changed`, [`IntervalIndex::get`] returns the result of
//! the trie from which the index was built. For all other addresses [`IntervalIndex::knows`] returns false, and
//! the caller uses the trie.

use std::collections::HashMap;
use std::sync::Arc;

use super::trie::PrefixTrie;
use super::value::Value;

/// A prefix. IPv4 addresses are in the upper 32 bits.
pub(super) type Prefix = (u128, u8);
/// No prefix contains the interval.
const NONE: u32 = u32::MAX;
/// The index is discarded when the changed prefixes exceed this fraction (1/16) of all.
const CHANGED_SHARE: usize = 16;

#[derive(Clone)]
pub(super) struct IntervalIndex {
    built: Arc<Built>,
    /// Prefixes that were added, deleted or changed since.
    changed: PrefixTrie<u128, ()>,
}

struct Built {
    ranges: Ranges,
    /// The intervals refer to values by their positions here.
    values: Box<[Value]>,
    /// Number of prefixes from which it was built.
    len: usize,
}

enum Ranges {
    /// All prefixes have at most 64 bits: the upper halves of the addresses suffice.
    Upper(Sorted<u64>),
    Whole(Sorted<u128>),
}

impl IntervalIndex {
    /// Builds the index from prefixes in order (shorter first if several start at the same address), each with its
    /// value. `len` is their number; `long` is true if a prefix has more than 64 bits.
    pub(super) fn new<'v>(
        prefixes: impl Iterator<Item = (Prefix, &'v Arc<Value>)>,
        len: usize,
        long: bool,
    ) -> Self {
        let mut values = Vec::new();
        let mut numbers = HashMap::new();
        let ranges = ranges(prefixes.map(|(prefix, value)| {
            let number = *numbers.entry(Arc::as_ptr(value)).or_insert_with(|| {
                values.push(**value);
                values.len() as u32 - 1
            });
            (prefix, number)
        }));
        let ranges = if long {
            Ranges::Whole(Sorted::new(ranges))
        } else {
            Ranges::Upper(Sorted::new(ranges.map(|(start, value)| ((start >> 64) as u64, value))))
        };
        let built = Arc::new(Built { ranges, values: values.into(), len });
        Self { built, changed: PrefixTrie::default() }
    }

    /// Returns true if [`IntervalIndex::get`] is valid for this address.
    #[inline]
    pub(super) fn knows(&self, ip: u128) -> bool {
        self.changed.is_empty() || self.changed.lookup(ip).is_none()
    }

    /// Returns the value of the longest prefix.
    #[inline]
    pub(super) fn get(&self, ip: u128) -> Option<&Value> {
        let value = match &self.built.ranges {
            Ranges::Upper(sorted) => sorted.get((ip >> 64) as u64),
            Ranges::Whole(sorted) => sorted.get(ip),
        };
        // No value has the number NONE.
        self.built.values.get(value as usize)
    }

    /// Records a changed prefix. Returns false if the index is no longer useful.
    pub(super) fn change(&mut self, (start, len): Prefix) -> bool {
        self.changed.insert(start, len, ());
        self.changed.len() <= self.built.len / CHANGED_SHARE
    }
}

/// Iterates over the start of each interval with its value; the first starts at 0.
fn ranges(prefixes: impl Iterator<Item = (Prefix, u32)>) -> impl Iterator<Item = (u128, u32)> {
    // The prefixes around the current address, the innermost last: last address and value.
    let mut around: Vec<(u128, u32)> = Vec::new();
    let mut prefixes = prefixes.map(|((start, len), value)| {
        let last = start | u128::MAX.checked_shr(len.into()).unwrap_or(0);
        (start, last, value)
    });
    let mut next = prefixes.next();
    let mut first = Some((0, NONE));
    std::iter::from_fn(move || {
        if let Some(first) = first.take() {
            return Some(first);
        }
        loop {
            match (next, around.last()) {
                // The innermost prefix ends before the next one starts: continue with the one around it.
                (_, Some(&(last, _))) if next.is_none_or(|(start, ..)| start > last) => {
                    around.pop();
                    let value = around.last().map_or(NONE, |(_, value)| *value);
                    if let Some(start) = last.checked_add(1) {
                        return Some((start, value));
                    }
                }
                (Some((start, last, value)), _) => {
                    around.push((last, value));
                    next = prefixes.next();
                    return Some((start, value));
                }
                (None, None) => return None,
                // Unreachable: with a prefix around, the first arm matches.
                (None, Some(_)) => return None,
            }
        }
    })
}

/// Sorted starts of intervals, with an index over their upper bits.
struct Sorted<K> {
    ranges: Vec<(K, u32)>,
    /// For each slot, the first interval that starts in it or later; one extra at the end.
    slots: Vec<u32>,
    /// The first slot starts at `base`; each slot spans `bits` bits.
    base: K,
    bits: u32,
}

/// An address, or the upper half of one.
trait Bits: Copy + Ord {
    const ZERO: Self;
    fn minus(self, other: Self) -> Self;
    fn slot(self, bits: u32) -> usize;
    fn width(self) -> u32;
}

macro_rules! bits {
    ($kind:ty) => {
        impl Bits for $kind {
            const ZERO: Self = 0;
            #[inline]
            fn minus(self, other: Self) -> Self {
                self - other
            }
            #[inline]
            fn slot(self, bits: u32) -> usize {
                usize::try_from(self.checked_shr(bits).unwrap_or(0)).unwrap_or(usize::MAX)
            }
            fn width(self) -> u32 {
                Self::BITS - self.leading_zeros()
            }
        }
    };
}

bits!(u64);
bits!(u128);

impl<K: Bits> Sorted<K> {
    fn new(starts: impl Iterator<Item = (K, u32)>) -> Self {
        let mut ranges: Vec<(K, u32)> = Vec::new();
        for (start, value) in starts {
            match ranges.last_mut() {
                // A prefix that starts where the enclosing one starts, or where the previous one ends.
                Some(last) if last.0 == start => last.1 = value,
                Some(last) if last.1 == value => {}
                _ => ranges.push((start, value)),
            }
        }
        ranges.shrink_to_fit();
        let base = ranges.get(1).map_or(K::ZERO, |(start, _)| *start);
        let span = ranges.last().map_or(K::ZERO, |(start, _)| *start).max(base).minus(base);
        // About two intervals per slot.
        let wanted = (ranges.len() / 2).max(1).ilog2();
        let bits = span.width().saturating_sub(wanted);
        let count = span.slot(bits) + 1;
        let mut slots = vec![0u32; count + 1];
        for (start, _) in &ranges {
            if *start >= base {
                slots[start.minus(base).slot(bits) + 1] += 1;
            }
        }
        // The interval at 0 is before the first slot, unless the slot starts there.
        let before = ranges.iter().take_while(|(start, _)| *start < base).count() as u32;
        let mut sum = before;
        for slot in &mut slots {
            sum += *slot;
            *slot = sum;
        }
        Self { ranges, slots, base, bits }
    }

    /// Returns the value of the interval that contains `key`.
    #[inline]
    fn get(&self, key: K) -> u32 {
        if key < self.base {
            return self.ranges[0].1;
        }
        let slot = key.minus(self.base).slot(self.bits).min(self.slots.len() - 2);
        let (from, to) = (self.slots[slot] as usize, self.slots[slot + 1] as usize);
        let after = from + self.ranges[from..to].partition_point(|(start, _)| *start <= key);
        self.ranges[after - 1].1
    }
}

#[cfg(test)]
mod tests {
    use prefix_trie::PrefixMap;
    use proptest::prelude::*;

    use super::*;

    /// Addresses close to each other, at both ends of the address space and in between.
    fn address() -> impl Strategy<Value = u128> {
        (0u8..4, 0u128..64, 0u32..60).prop_map(|(place, low, shift)| match place {
            0 => low << shift,
            1 => u128::MAX - (low << shift),
            2 => 0x2001_0db8 << 96 | low << (shift + 30),
            _ => 0x2001_0db8 << 96 | low << 64,
        })
    }

    proptest! {
        #[test]
        fn agrees_with_the_trie(
            prefixes in proptest::collection::vec((address(), 0u8..=128, 0u32..5), 0..60),
            changes in proptest::collection::vec((address(), 0u8..=128, proptest::option::of(0u32..5)), 0..4),
            asked in proptest::collection::vec(address(), 40),
            upper: bool,
        ) {
            let net = |address: u128, len: u8| {
                let len = if upper { len / 2 } else { len };
                (address & !u128::MAX.checked_shr(len.into()).unwrap_or(0), len)
            };
            let values: Vec<_> = (0..5).map(|number| Arc::new(Value::legacy(number))).collect();
            // Not the project's own trie.
            let mut trie = PrefixMap::new();
            for (address, len, value) in &prefixes {
                trie.insert(net(*address, *len), *value);
            }
            let entries = trie.iter().map(|(prefix, value)| (prefix, &values[*value as usize]));
            let mut index = IntervalIndex::new(entries, trie.len(), trie.iter().any(|((_, len), _)| len > 64));
            let wanted = |trie: &PrefixMap<Prefix, u32>, ip: u128| {
                trie.get_lpm(&(ip, 128)).map(|(_, value)| &*values[*value as usize])
            };
            let edges = trie.iter().flat_map(|((start, len), _)| {
                let last = start | u128::MAX.checked_shr(len.into()).unwrap_or(0);
                [start, last, start.wrapping_sub(1), last.wrapping_add(1)]
            });
            let asked: Vec<u128> = edges.chain(asked).collect();
            for ip in &asked {
                prop_assert!(index.knows(*ip));
                prop_assert_eq!(index.get(*ip), wanted(&trie, *ip), "{:032x}", ip);
            }
            for (address, len, value) in changes {
                let prefix = net(address, len);
                match value {
                    Some(value) => drop(trie.insert(prefix, value)),
                    None => drop(trie.remove(&prefix)),
                }
                index.change(prefix);
            }
            for ip in &asked {
                prop_assert!(!index.knows(*ip) || index.get(*ip) == wanted(&trie, *ip), "{:032x}", ip);
            }
        }
    }
}
