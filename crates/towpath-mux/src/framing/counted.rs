//! Text heads with a count: a command line (`PUB a 11`) or lines up to an empty one (`Content-Length: 11`)
//! say how many bytes follow them.
//!
//! A count is decimal digits without a sign. A head that different parsers could read differently is refused:
//! fields of one name with different values, and words separated by anything but the declared bytes.

use super::cause::Cause;
use super::delimiter::Delimiters;
use super::{State, Step};

/// Default limit of a head in bytes.
pub(super) const DEFAULT_HEAD: usize = 64 << 10;

#[derive(Debug)]
pub(super) struct Counted {
    /// End of the head.
    pub(super) delimiters: Delimiters,
    pub(super) count: Count,
    /// Added to the count.
    pub(super) adjust: i64,
    /// Limit of the head in bytes.
    pub(super) head: usize,
}

/// Position of the count in the head.
#[derive(Debug)]
pub(super) enum Count {
    /// This word, from 0.
    Word(usize),
    LastWord,
    /// The value of the field with one of these names. Without such a field, nothing follows the head.
    Field(Vec<Vec<u8>>),
}

impl Counted {
    /// End of the head and announced length of the message.
    pub(super) fn measure(
        &self,
        bytes: &[u8],
        blanks: &[u8],
        state: &mut State,
    ) -> Result<(usize, i128), Step> {
        let too_big = || Step::Error(Cause::HeadTooBig { max: self.head as u64 });
        let Some((head, _)) = self.delimiters.find(bytes, state.scanned) else {
            if bytes.len() >= self.head {
                return Err(too_big());
            }
            state.scanned = bytes.len();
            return Err(Step::Need(bytes.len() + 1));
        };
        if head > self.head {
            return Err(too_big());
        }
        let count = match &self.count {
            Count::Word(at) => words(&bytes[..head], blanks).nth(*at),
            Count::LastWord => words(&bytes[..head], blanks).last(),
            Count::Field(names) => match field(&bytes[..head], names)? {
                None => return Ok((head, head as i128)),
                count => count,
            },
        };
        let count = count.and_then(decimal).ok_or_else(|| malformed("the count is not a decimal number"))?;
        Ok((head, head as i128 + i128::from(count) + i128::from(self.adjust)))
    }
}

/// The words of a head without its line end.
pub(super) fn words<'a>(head: &'a [u8], blanks: &'a [u8]) -> impl Iterator<Item = &'a [u8]> {
    let end = head.iter().rposition(|byte| !matches!(byte, b'\r' | b'\n')).map_or(0, |at| at + 1);
    head[..end].split(|byte| blanks.contains(byte)).filter(|word| !word.is_empty())
}

/// The value of the fields with one of these names.
fn field<'a>(head: &'a [u8], names: &[Vec<u8>]) -> Result<Option<&'a [u8]>, Step> {
    let mut found = None;
    for line in head.split(|byte| *byte == b'\n') {
        let Some(colon) = memchr::memchr(b':', line) else { continue };
        let name = line[..colon].trim_ascii_end();
        if !names.iter().any(|known| known.eq_ignore_ascii_case(name)) {
            continue;
        }
        let value = line[colon + 1..].trim_ascii();
        if found.is_some_and(|other| other != value) {
            return Err(malformed("two different counts in the head"));
        }
        found = Some(value);
    }
    Ok(found)
}

/// A number in decimal digits, up to 64 bits.
pub(super) fn decimal(text: &[u8]) -> Option<u64> {
    let digit = |value: u64, byte: &u8| match byte {
        b'0'..=b'9' => value.checked_mul(10)?.checked_add(u64::from(byte - b'0')),
        _ => None,
    };
    if text.is_empty() { None } else { text.iter().try_fold(0, digit) }
}

fn malformed(reason: &'static str) -> Step {
    Step::Error(Cause::malformed(reason))
}
