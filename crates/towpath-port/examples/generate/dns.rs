//! Questions to a resolver and its answers.

/// A DNS message of one question (RFC 1035, 4.1): with `answers`, its response.
pub(crate) fn message(id: u16, name: &str, answers: &[[u8; 4]]) -> Vec<u8> {
    let flags: u16 = if answers.is_empty() { 0x0100 } else { 0x8180 };
    let counts = [1, answers.len() as u16, 0, 0];
    let mut message = [id.to_be_bytes(), flags.to_be_bytes()].concat();
    message.extend(counts.iter().flat_map(|count| count.to_be_bytes()));
    for label in name.split('.') {
        message.push(label.len() as u8);
        message.extend(label.bytes());
    }
    message.extend([0, 0, 1, 0, 1]);
    for address in answers {
        message.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4]);
        message.extend(address);
    }
    message
}
