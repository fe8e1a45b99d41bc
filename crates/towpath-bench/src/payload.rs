//! Payload access of the consumers: every byte is read, at minimal cost.

/// Combines all bytes, so that the compiler cannot omit reads.
pub(crate) fn fold(payload: &[u8]) -> u64 {
    let (words, rest) = payload.as_chunks::<8>();
    let words = words.iter().fold(0, |fold, word| fold ^ u64::from_ne_bytes(*word));
    rest.iter().fold(words, |fold, byte| fold ^ u64::from(*byte))
}

#[cfg(test)]
mod tests {
    use super::fold;

    #[test]
    fn every_byte_affects_result() {
        let mut payload = [0_u8; 67];
        for at in 0..payload.len() {
            payload[at] = 1;
            assert_ne!(fold(&payload), 0, "byte {at}");
            payload[at] = 0;
        }
        assert_eq!(fold(&payload), 0);
    }
}
