//! Parser for the declarative form in TOML: the same keys, with `[[when]]`, `[else]` and `[start]` as tables.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::clause::{Clause, Scalar};
use super::error::{Fault, ParseError};

/// Maximum nesting of tables, as in the line form.
const DEPTH: usize = 8;

pub(super) fn clauses(document: &str) -> Result<Vec<Clause>, ParseError> {
    let table = DeTable::parse(document).map_err(|error| {
        let at = error.span().map_or(0, |span| span.start);
        Fault::new(at, error.message()).in_document(document)
    })?;
    let source = Source { document };
    source.table(table.get_ref(), 0).map_err(|fault| fault.in_document(document))
}

struct Source<'a> {
    document: &'a str,
}

impl Source<'_> {
    fn table(&self, table: &DeTable<'_>, depth: usize) -> Result<Vec<Clause>, Fault> {
        let mut clauses = Vec::with_capacity(table.len());
        for (key, value) in table {
            let at = key.span().start;
            let key = key.get_ref();
            match value.get_ref() {
                DeValue::Table(_) => clauses.push(self.group(key, at, value, depth)?),
                DeValue::Array(values) => {
                    for value in values {
                        let clause = match value.get_ref() {
                            DeValue::Table(_) => self.group(key, at, value, depth)?,
                            _ => self.scalar(key, at, value)?.into_iter().next().ok_or_else(|| {
                                Fault::new(
                                    value.span().start,
                                    format!("{key} must not be a list of booleans"),
                                )
                            })?,
                        };
                        clauses.push(clause);
                    }
                }
                _ => clauses.extend(self.scalar(key, at, value)?),
            }
        }
        // Tables are unordered; the positions in the document give the order.
        clauses.sort_by_key(|clause| clause.at);
        Ok(clauses)
    }

    fn group(
        &self,
        key: &str,
        at: usize,
        value: &Spanned<DeValue<'_>>,
        depth: usize,
    ) -> Result<Clause, Fault> {
        if depth == DEPTH {
            return Err(Fault::new(at, format!("tables are nested more than {DEPTH} deep")));
        }
        let DeValue::Table(table) = value.get_ref() else {
            return Err(Fault::new(at, format!("{key} must be a table")));
        };
        let mut group = self.table(table, depth + 1)?;
        let mut pattern = None;
        if key == "when" {
            let Some(first) = group.iter().position(|clause| clause.key == "first") else {
                return Err(Fault::new(at, "when needs a pattern of first bytes: first = \"16 03\""));
            };
            pattern = group.remove(first).value;
        }
        Ok(Clause { key: key.to_owned(), at, value: None, pattern, group: Some(group) })
    }

    /// `None` for `key = false`, a flag that is not set.
    fn scalar(&self, key: &str, at: usize, value: &Spanned<DeValue<'_>>) -> Result<Option<Clause>, Fault> {
        let span = value.span();
        let clause = |value| Clause { key: key.to_owned(), at, value, pattern: None, group: None };
        Ok(match value.get_ref() {
            DeValue::Boolean(true) => Some(clause(None)),
            DeValue::Boolean(false) => None,
            DeValue::String(text) => {
                let quote = self.document.get(span.start..).is_some_and(|rest| rest.starts_with(['"', '\'']));
                let at = span.start + usize::from(quote);
                Some(clause(Some(Scalar { text: text.to_string(), at })))
            }
            DeValue::Integer(_) => {
                // The text as written: hex, underscores and signs are parsed as in the line form.
                let text = self.document.get(span.clone()).unwrap_or("").to_owned();
                Some(clause(Some(Scalar { text, at: span.start })))
            }
            _ => {
                return Err(Fault::new(span.start, format!("{key} must be a number, a string or a boolean")));
            }
        })
    }
}
