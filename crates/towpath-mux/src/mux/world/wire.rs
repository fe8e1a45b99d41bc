//! The protocol of the world's peers.

use crate::framing::{self, Framing, State, Step};

/// The framing: the first byte is the length, the last one the key.
pub(super) fn framing() -> Framing {
    Framing::custom("world", |bytes: &[u8], _: &mut State| match bytes {
        [] => Step::Need(1),
        _ if bytes.len() < 5 => Step::Need(5),
        [length, _, _, _, key, ..] => {
            let message = framing::Message::of(usize::from(*length));
            Step::Message(framing::Message { hash: u32::from(*key), ..message })
        }
        _ => Step::Need(5),
    })
}

/// Request number `number` of peer `name`.
pub(super) fn request(name: u8, number: u16) -> Vec<u8> {
    let length = 5 + (usize::from(number) * 7 + usize::from(name)) % 23;
    let [high, low] = number.to_be_bytes();
    let mut bytes = vec![length as u8, name, high, low, key_of(number)];
    bytes.resize(length, low);
    bytes
}

/// A message of connected mode.
pub(super) fn notice(number: u16) -> Vec<u8> {
    let [high, low] = number.to_be_bytes();
    vec![6, 0xff, high, low, 0, 0]
}

/// One in three messages has no key; the others share two keys.
pub(super) fn key_of(number: u16) -> u8 {
    (number % 3) as u8
}
