//! Numbers with their nouns.

/// A number with its noun: `1 packet`, `2 packets`.
pub fn count(n: u64, noun: &str) -> String {
    let s = if n == 1 { "" } else { "s" };
    format!("{n} {noun}{s}")
}
