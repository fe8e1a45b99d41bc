//! The context: the fields of `struct __sk_buff` that a message has.
//!
//! Offsets are those of the UAPI structure (`linux/bpf.h`, `struct __sk_buff`): programs made for Linux carry them in
//! their loads and stores, and they never change.

use crate::insn::Size;
use crate::verifier_error::Reason;

/// The state of a program besides its result.
///
/// `cb` is the program's state: 20 bytes that start at 0 for a connection and persist from run to run. `mark` and
/// `hash` are answers of one run; [`Program::run`](crate::Program::run) sets them to 0 first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Context {
    /// `__sk_buff.cb`: the program's own words, kept between runs.
    pub cb: [u32; 5],
    /// `__sk_buff.mark`: with the result 0, "at least this many bytes are needed"; else the message's mark.
    pub mark: u32,
    /// `__sk_buff.hash`: the message's hash, for order by key.
    pub hash: u32,
}

/// A checked access to the context.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Field {
    /// Bytes of `len`, from byte `at`.
    Len { at: u32 },
    /// Bytes of `mark`.
    Mark { at: u32 },
    /// Bytes of `hash`.
    Hash { at: u32 },
    /// Bytes of `cb`, from byte `at` of the array.
    Cb { at: u32 },
    /// The 32-bit word that stands for the first byte's address.
    Data,
    /// The 32-bit word that stands for the address after the last byte.
    DataEnd,
}

/// `offsetof(struct __sk_buff, cb)`.
const CB: u32 = 48;
/// `sizeof` of the array `cb[5]`.
const CB_BYTES: u32 = 20;

/// Every field of `struct __sk_buff`: offset, bytes, name. Padding is left out.
const FIELDS: &[(u32, u32, &str)] = &[
    (0, 4, "len"),
    (4, 4, "pkt_type"),
    (8, 4, "mark"),
    (12, 4, "queue_mapping"),
    (16, 4, "protocol"),
    (20, 4, "vlan_present"),
    (24, 4, "vlan_tci"),
    (28, 4, "vlan_proto"),
    (32, 4, "priority"),
    (36, 4, "ingress_ifindex"),
    (40, 4, "ifindex"),
    (44, 4, "tc_index"),
    (CB, CB_BYTES, "cb"),
    (68, 4, "hash"),
    (72, 4, "tc_classid"),
    (76, 4, "data"),
    (80, 4, "data_end"),
    (84, 4, "napi_id"),
    (88, 4, "family"),
    (92, 4, "remote_ip4"),
    (96, 4, "local_ip4"),
    (100, 16, "remote_ip6"),
    (116, 16, "local_ip6"),
    (132, 4, "remote_port"),
    (136, 4, "local_port"),
    (140, 4, "data_meta"),
    (144, 8, "flow_keys"),
    (152, 8, "tstamp"),
    (160, 4, "wire_len"),
    (164, 4, "gso_segs"),
    (168, 8, "sk"),
    (176, 4, "gso_size"),
    (180, 1, "tstamp_type"),
    (184, 8, "hwtstamp"),
];

/// Which field `size` bytes at `offset` are.
///
/// # Errors
/// A field that a message does not have, or bytes that are not a field, cross one, or are not aligned.
pub(crate) fn field(offset: i64, size: Size) -> Result<Field, Reason> {
    let width = Reason::FieldWidth(offset, size.bytes());
    let start = u32::try_from(offset).map_err(|_| width)?;
    let inside = |&&(at, bytes, _): &&(u32, u32, &str)| start >= at && start < at + bytes;
    let &(at, bytes, name) = FIELDS.iter().find(inside).ok_or(width)?;
    let at = start - at;
    let fits = at + size.bytes() <= bytes && start.is_multiple_of(size.bytes());
    match name {
        "len" if fits => Ok(Field::Len { at }),
        "mark" if fits => Ok(Field::Mark { at }),
        "hash" if fits => Ok(Field::Hash { at }),
        "cb" if fits => Ok(Field::Cb { at }),
        "data" if fits && size == Size::W => Ok(Field::Data),
        "data_end" if fits && size == Size::W => Ok(Field::DataEnd),
        "len" | "mark" | "hash" | "cb" | "data" | "data_end" => Err(width),
        _ => Err(Reason::NoSuchField(offset, name)),
    }
}

/// Whether `size` bytes of `field` can be written: `cb` in any width, `mark` and `hash` as whole words.
///
/// # Errors
/// The field's name, when it is read-only, or the width.
pub(crate) fn writable(field: Field, offset: i64, size: Size) -> Result<(), Reason> {
    match field {
        Field::Cb { .. } => Ok(()),
        Field::Mark { .. } | Field::Hash { .. } if size == Size::W => Ok(()),
        Field::Mark { .. } | Field::Hash { .. } => Err(Reason::FieldWidth(offset, size.bytes())),
        Field::Len { .. } => Err(Reason::ReadOnlyField("len")),
        Field::Data => Err(Reason::ReadOnlyField("data")),
        Field::DataEnd => Err(Reason::ReadOnlyField("data_end")),
    }
}

impl Context {
    /// A connection's context before its first run: all zero.
    #[must_use]
    pub const fn new() -> Self {
        Self { cb: [0; 5], mark: 0, hash: 0 }
    }

    /// `size` bytes of `cb` from byte `at`, little-endian.
    pub(crate) fn load_cb(&self, at: u32, size: Size) -> u64 {
        let low = self.cb.get(at as usize / 4).copied().unwrap_or(0);
        let high = self.cb.get(at as usize / 4 + 1).copied().unwrap_or(0);
        let both = u64::from(low) | u64::from(high) << 32;
        // Accesses are aligned: only eight bytes reach into the second word.
        cut(both >> (at % 4 * 8), size)
    }

    /// Writes the low `size` bytes of `value` to `cb` at byte `at`.
    pub(crate) fn store_cb(&mut self, at: u32, size: Size, value: u64) {
        let shift = at % 4 * 8;
        let mask = (u64::MAX >> (64 - size.bits())) << shift;
        let value = value << shift & mask;
        let word = at as usize / 4;
        if let Some(low) = self.cb.get_mut(word) {
            *low = *low & !(mask as u32) | value as u32;
        }
        if let (Size::Dw, Some(high)) = (size, self.cb.get_mut(word + 1)) {
            *high = (value >> 32) as u32;
        }
    }
}

/// The low `size` bytes of `value`.
pub(crate) const fn cut(value: u64, size: Size) -> u64 {
    value & u64::MAX >> (64 - size.bits())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cb_is_twenty_bytes_in_any_aligned_width() {
        let mut context = Context::new();
        let mut model = [0_u8; 20];
        for (step, (at, size)) in [
            (0, Size::B),
            (3, Size::B),
            (6, Size::H),
            (8, Size::W),
            (8, Size::Dw),
            (0, Size::Dw),
            (16, Size::W),
        ]
        .into_iter()
        .enumerate()
        {
            let value = 0x1122_3344_5566_7788_u64.rotate_left(step as u32 * 8);
            context.store_cb(at, size, value);
            model[at as usize..][..size.bytes() as usize]
                .copy_from_slice(&value.to_le_bytes()[..size.bytes() as usize]);
            let words: Vec<u8> = context.cb.iter().flat_map(|word| word.to_le_bytes()).collect();
            assert_eq!(words, model, "store {size:?} at {at}");
            assert_eq!(context.load_cb(at, size), cut(value, size), "load {size:?} at {at}");
        }
    }
}
