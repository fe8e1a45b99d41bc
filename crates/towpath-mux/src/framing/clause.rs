//! Clauses of the declarative form, as parsed from a line or from TOML.

/// `key`, `key=value`, or `key pattern (clauses)`.
#[derive(Clone, Debug)]
pub(super) struct Clause {
    pub(super) key: String,
    /// Byte offset of the key in the text.
    pub(super) at: usize,
    pub(super) value: Option<Scalar>,
    /// Pattern of `when`.
    pub(super) pattern: Option<Scalar>,
    pub(super) group: Option<Vec<Clause>>,
}

/// A value with escapes resolved.
#[derive(Clone, Debug)]
pub(super) struct Scalar {
    pub(super) text: String,
    /// Byte offset of its first character (after the quote) in the text.
    pub(super) at: usize,
}
