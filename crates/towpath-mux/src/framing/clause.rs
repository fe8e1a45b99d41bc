//! The clauses of the declarative form, as both the line and TOML give them.

/// `key`, `key=value`, or `key pattern (clauses)`.
#[derive(Debug)]
pub(super) struct Clause {
    pub(super) key: String,
    /// Byte offset of the key in the text.
    pub(super) at: usize,
    pub(super) value: Option<Scalar>,
    /// The first bytes that `when` asks for.
    pub(super) pattern: Option<Scalar>,
    pub(super) group: Option<Vec<Clause>>,
}

/// A value as it was written, escapes resolved.
#[derive(Debug)]
pub(super) struct Scalar {
    pub(super) text: String,
    /// Byte offset of its first character (behind the quote) in the text.
    pub(super) at: usize,
}
