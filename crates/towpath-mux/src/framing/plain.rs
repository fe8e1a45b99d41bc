//! Fast scanner for framings without choices: one length field of up to four bytes.
//!
//! What: finds the messages of a read faster than [`super::Framing::step`] per message.
//!
//! Invariant: returns the same result as `step`, or none. Everything but a whole message within all limits is
//! left to `step`.

use super::Message;
use super::body::{End, Rule, Strip};
use super::field::{Chain, Encoding, Field};

#[derive(Debug)]
pub(crate) struct Plain {
    /// Number of bytes before the field, and up to its end.
    offset: usize,
    head: usize,
    /// Mask and shift that leave the field in the four bytes at `offset`.
    big: bool,
    unused: u32,
    mask: u64,
    shift: u32,
    max_value: u64,
    /// The message is longer than the field's value by this number; its limits.
    adjust: i64,
    min: usize,
    max: usize,
    skip: usize,
    trim: usize,
    mark: u32,
}

impl Plain {
    pub(super) fn of(rule: &Rule) -> Option<Self> {
        let End::Length(field) = &rule.end else { return None };
        let &Field {
            offset,
            encoding,
            mask,
            shift,
            scale: 1,
            adjust,
            relative,
            max_value,
            chain: Chain::Single,
        } = field
        else {
            return None;
        };
        let Encoding::Fixed { width: width @ 1..=4, big } = encoding else { return None };
        if !rule.tail.is_empty() || rule.key.is_some() {
            return None;
        }
        let head = offset + width;
        let skip = match rule.strip {
            Strip::Bytes(skip) => skip,
            Strip::Head => head,
            Strip::Delimiter => return None,
        };
        let adjust = if relative { adjust.checked_add(i64::try_from(head).ok()?)? } else { adjust };
        // A 32-bit value plus this does not overflow.
        if adjust.unsigned_abs() > 1 << 62 {
            return None;
        }
        let (trim, mark) = (rule.trim, rule.mark);
        let min = rule.min.max(head).max(skip + trim).max(1);
        let unused = 8 * (4 - width as u32);
        Some(Self {
            offset,
            head,
            big,
            unused,
            mask,
            shift,
            max_value,
            adjust,
            min,
            max: rule.max,
            skip,
            trim,
            mark,
        })
    }

    /// The whole message at the start of `bytes`, if it has at most `most` bytes.
    #[inline]
    pub(crate) fn message(&self, bytes: &[u8], most: usize) -> Option<Message> {
        let word = match bytes.get(self.offset..)?.first_chunk::<4>() {
            Some(word) => *word,
            // The message ends within the four bytes that would be loaded.
            None => {
                let mut word = [0; 4];
                let field = bytes.get(self.offset..self.head)?;
                word[..field.len()].copy_from_slice(field);
                word
            }
        };
        let raw = match self.big {
            true => u32::from_be_bytes(word) >> self.unused,
            false => u32::from_le_bytes(word) << self.unused >> self.unused,
        };
        let value = (u64::from(raw) & self.mask) >> self.shift;
        let length = usize::try_from(value as i64 + self.adjust).ok()?;
        let fits = (self.min..=self.max.min(most).min(bytes.len())).contains(&length);
        (fits && value <= self.max_value).then_some(Message {
            length,
            skip: self.skip,
            trim: self.trim,
            mark: self.mark,
            hash: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Framing, State, Step};

    const FRAMINGS: [&str; 8] = [
        "length=4 be adjust=4",
        "length=2 le adjust=2",
        "offset=1 length=3 be adjust=4 strip=4",
        "offset=2 length=1",
        "length=1",
        "length=2 be adjust=2 max=200",
        "length=2 be mask=0x0fff",
        "length=4 le min=12",
    ];

    proptest! {
        #[test]
        fn plain_agrees_with_step_or_returns_none(
            which in 0..FRAMINGS.len(),
            length in 0u8..40,
            at in 0usize..5,
            mut bytes in prop::collection::vec(prop_oneof![Just(0u8), 0u8..40, any::<u8>()], 0..40),
            most in 0usize..60,
        ) {
            let framing = Framing::parse(FRAMINGS[which]).unwrap();
            if let Some(byte) = bytes.get_mut(at) {
                *byte = length;
            }
            let plain = framing.plain().expect("all of these are plain");
            let found = plain.message(&bytes, most);
            match framing.step(&bytes, &mut State::default()) {
                Step::Message(message) if message.length <= bytes.len().min(most) => {
                    prop_assert_eq!(found, Some(message));
                }
                _ => prop_assert_eq!(found, None),
            }
        }
    }

    #[test]
    fn only_simple_length_fields_are_plain() {
        for text in ["line", "length=4 be scale=2", "length=8 be", "varint=leb128", "resp", "mqtt"] {
            if let Ok(framing) = Framing::parse(text) {
                assert!(framing.plain().is_none(), "{text}");
            }
        }
    }
}
