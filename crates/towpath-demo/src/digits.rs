//! Numbers as text.

/// Formats with a comma between groups of three digits.
pub(crate) fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Formats bytes with a decimal unit.
pub(crate) fn bytes(number: u64) -> String {
    match number {
        0..1_000_000 => format!("{:.1} kB", number as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", number as f64 / 1e6),
        _ => format!("{:.2} GB", number as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::thousands;

    #[test]
    fn digits_are_in_groups_of_three() {
        let rows = [(0, "0"), (999, "999"), (1000, "1,000"), (123_456_789, "123,456,789")];
        for (number, text) in rows {
            assert_eq!(thousands(number), text);
        }
    }
}
