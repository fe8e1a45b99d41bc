//! Reads a TOML document key by key and collects all errors with their positions.
//!
//! Reading a key marks it as known; [`Table::finish`] reports all other keys. A value of the wrong type is reported and then treated
//! as absent, so that reading continues. Types, ranges and words of the keys come from [`keys`].

use std::cell::RefCell;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};
use towpath_gate::rules::Diagnostic;

use super::keys::{self, Key, RENAMED, Value};

/// Errors found so far.
#[derive(Debug)]
pub(super) struct Findings<'t> {
    file: Arc<str>,
    text: &'t str,
    found: RefCell<Vec<Diagnostic>>,
    denied: RefCell<Vec<Diagnostic>>,
}

/// A value and its position.
#[derive(Clone, Debug)]
pub(super) struct At<T> {
    pub(super) value: T,
    pub(super) span: Range<usize>,
}

/// One table of the document.
#[derive(Debug)]
pub(super) struct Table<'t, 'f> {
    entries: &'t DeTable<'t>,
    findings: &'f Findings<'t>,
    /// The table's name in [`KEYS`](super::keys::KEYS).
    path: &'static str,
    /// Position of its header or its braces.
    pub(super) span: Range<usize>,
    /// Keys that were read.
    known: RefCell<Vec<&'static str>>,
}

impl<'t> Findings<'t> {
    pub(super) fn new(file: &str, text: &'t str) -> Self {
        Self { file: file.into(), text, found: RefCell::default(), denied: RefCell::default() }
    }

    /// Adds an error at `span`, with a hint what to do about it.
    pub(super) fn add(&self, span: &Range<usize>, message: impl Into<String>, hint: Option<String>) {
        self.found.borrow_mut().push(self.diagnostic(span, message.into(), hint));
    }

    /// Adds an error about a file that this user may not read.
    fn deny(&self, span: &Range<usize>, message: String, hint: &str) {
        self.denied.borrow_mut().push(self.diagnostic(span, message, Some(hint.to_owned())));
    }

    /// Removes and returns the errors of [`Table::denied`].
    pub(super) fn take_denied(&self) -> Vec<Diagnostic> {
        self.denied.take()
    }

    fn diagnostic(&self, span: &Range<usize>, message: String, hint: Option<String>) -> Diagnostic {
        let (line, column) = self.position(span.start);
        // The span of a header covers its whole table; only the first line is the word.
        let word = self.text.get(span.clone()).unwrap_or_default();
        let width = word.lines().next().unwrap_or_default().chars().count() as u32;
        Diagnostic {
            file: Arc::clone(&self.file),
            line,
            column,
            end: column + width,
            message,
            hint,
            no_such_rule: false,
        }
    }

    /// All errors in the order of the file.
    pub(super) fn into_found(self) -> Vec<Diagnostic> {
        let mut found = self.found.into_inner();
        found.sort();
        found.dedup();
        found
    }

    fn position(&self, offset: usize) -> (u32, u32) {
        let before = self.text.get(..offset).unwrap_or(self.text);
        let line = before.matches('\n').count() as u32 + 1;
        let column = before.rsplit('\n').next().unwrap_or_default().chars().count() as u32 + 1;
        (line, column)
    }
}

impl<'t, 'f> Table<'t, 'f> {
    /// The top of the file.
    pub(super) fn new(table: &'t DeTable<'t>, findings: &'f Findings<'t>) -> Self {
        Self { entries: table, findings, path: "", span: 0..0, known: RefCell::default() }
    }

    fn child(&self, key: &'static str, table: &'t DeTable<'t>, span: Range<usize>) -> Self {
        // The tables of the second level.
        let path = match (self.path, key) {
            ("port", "vlan") => "port.vlan",
            ("queue", "sandbox") => "queue.sandbox",
            ("mux", "sandbox") => "mux.sandbox",
            _ => key,
        };
        Self { entries: table, findings: self.findings, path, span, known: RefCell::default() }
    }

    /// The row of a key in the table of keys.
    fn row(&self, key: &'static str) -> &'static Key {
        keys::key(self.path, key)
    }

    /// Reports a missing required key.
    pub(super) fn need(&self, key: &str, hint: impl Into<String>) {
        if !self.entries.contains_key(key) {
            self.wrong(&self.span, format!("`{key}` is missing"), hint.into());
        }
    }

    pub(super) fn wrong(&self, span: &Range<usize>, message: impl Into<String>, hint: impl Into<String>) {
        let hint = hint.into();
        self.findings.add(span, message, (!hint.is_empty()).then_some(hint));
    }

    /// Reports a file that this user may not read: the user of `--check` need not be the user of the engine.
    pub(super) fn denied(&self, span: &Range<usize>, message: String, hint: &str) {
        self.findings.deny(span, message, hint);
    }

    fn get(&self, key: &'static str) -> Option<&'t Spanned<DeValue<'t>>> {
        self.known.borrow_mut().push(key);
        self.entries.get(key)
    }

    fn kind(&self, key: &str, value: &Spanned<DeValue<'_>>, wanted: &str) {
        let is = value.get_ref().type_str();
        self.findings.add(&value.span(), format!("`{key}` must be {wanted}, not {}", article(is)), None);
    }

    pub(super) fn text(&self, key: &'static str) -> Option<At<&'t str>> {
        let value = self.get(key)?;
        let Some(text) = value.get_ref().as_str() else {
            self.kind(key, value, "text");
            return None;
        };
        Some(At { value: text, span: value.span() })
    }

    pub(super) fn flag(&self, key: &'static str) -> Option<bool> {
        let value = self.get(key)?;
        let flag = value.get_ref().as_bool();
        if flag.is_none() {
            self.kind(key, value, "true or false");
        }
        flag
    }

    pub(super) fn number(&self, key: &'static str) -> Option<u64> {
        self.number_at(key).map(|at| at.value)
    }

    pub(super) fn number_at(&self, key: &'static str) -> Option<At<u64>> {
        let Value::Number(min, max) = self.row(key).value else { panic!("`{key}` is not a number in KEYS") };
        let (range, value) = (min..=max, self.get(key)?);
        integer(value, &range).or_else(|| {
            self.outside(key, value, &format!("a whole number in {}..{}", range.start(), range.end()));
            None
        })
    }

    /// A whole number, or the key's word: `None`.
    pub(super) fn number_or(&self, key: &'static str) -> Option<Option<At<u64>>> {
        let Value::NumberOr(min, max, word) = self.row(key).value else {
            panic!("`{key}` is not a number or a word in KEYS")
        };
        let (range, value) = (min..=max, self.get(key)?);
        if value.get_ref().as_str() == Some(word) {
            return Some(None);
        }
        let number = integer(value, &range);
        if number.is_none() {
            let wanted = format!("a whole number in {}..{}, or \"{word}\"", range.start(), range.end());
            let text = format!("`{key}` must be {wanted}");
            self.findings.add(&value.span(), text, None);
        }
        number.map(Some)
    }

    /// Reports a value of another type or outside the range.
    fn outside(&self, key: &str, value: &Spanned<DeValue<'_>>, wanted: &str) {
        match value.get_ref() {
            DeValue::Integer(other) => {
                let message = format!("`{key}` must be {wanted}, not {}", other.as_str());
                self.findings.add(&value.span(), message, None);
            }
            _ => self.kind(key, value, wanted),
        }
    }

    /// A list of whole numbers.
    pub(super) fn numbers(&self, key: &'static str) -> Vec<At<u64>> {
        let Value::Numbers(min, max) = self.row(key).value else {
            panic!("`{key}` is not a list of numbers in KEYS")
        };
        let range = min..=max;
        let read = |value: &'t Spanned<DeValue<'t>>| {
            integer(value, &range).or_else(|| {
                self.outside(key, value, &format!("whole numbers in {}..{}", range.start(), range.end()));
                None
            })
        };
        self.items(key).filter_map(read).collect()
    }

    /// A number of seconds, also as text with the unit: `5`, `0.5`, `"5s"`.
    pub(super) fn seconds(&self, key: &'static str) -> Option<Duration> {
        let Value::Seconds(min, max) = self.row(key).value else { panic!("`{key}` is not a time in KEYS") };
        let (range, value) = (min..=max, self.get(key)?);
        let wanted = format!("a number of seconds in {}..{}", range.start(), range.end());
        let (written, number) = match value.get_ref() {
            DeValue::Integer(number) => {
                (number.as_str(), integer(value, &(0..=u64::MAX)).map(|at| at.value as f64))
            }
            DeValue::Float(number) => (number.as_str(), number.as_str().parse().ok()),
            DeValue::String(text) if text.ends_with('s') => {
                (&**text, text.strip_suffix('s').and_then(|number| number.parse().ok()))
            }
            _ => {
                self.kind(key, value, &wanted);
                return None;
            }
        };
        let number = number.filter(|number| range.contains(number));
        if number.is_none() {
            self.findings.add(&value.span(), format!("`{key}` must be {wanted}, not {written}"), None);
        }
        number.map(Duration::from_secs_f64)
    }

    /// A flag that also accepts "yes" and "no".
    pub(super) fn switch(&self, key: &'static str) -> Option<bool> {
        debug_assert!(matches!(self.row(key).value, Value::Switch), "`{key}` is not a switch in KEYS");
        match self.get(key)?.get_ref().as_str() {
            Some("yes") => Some(true),
            Some("no") => Some(false),
            _ => self.flag(key),
        }
    }

    /// One of the key's words.
    pub(super) fn word(&self, key: &'static str) -> Option<&'static str> {
        let Value::Word(words) = self.row(key).value else { panic!("`{key}` is not a word in KEYS") };
        let text = self.text(key)?;
        let found = words.iter().find(|word| **word == text.value);
        if found.is_none() {
            let hint = meant(text.value, words.iter().copied())
                .unwrap_or_else(|| format!("the values are {}", words.join(", ")));
            self.wrong(&text.span, format!("`{key}` cannot be \"{}\"", text.value), hint);
        }
        found.copied()
    }

    /// A list of texts; a single text is a list of one.
    pub(super) fn texts(&self, key: &'static str) -> Vec<At<&'t str>> {
        let read = |value: &'t Spanned<DeValue<'t>>| match value.get_ref().as_str() {
            Some(text) => Some(At { value: text, span: value.span() }),
            None => {
                self.kind(key, value, "a list of texts");
                None
            }
        };
        self.items(key).filter_map(read).collect()
    }

    /// The items of a list. A value that is not a list is a single item.
    fn items(&self, key: &'static str) -> impl Iterator<Item = &'t Spanned<DeValue<'t>>> {
        let value = self.get(key);
        let (list, single) = match value {
            Some(value) => match value.get_ref().as_array() {
                Some(list) => (Some(list.iter()), None),
                None => (None, Some(value)),
            },
            None => (None, None),
        };
        list.into_iter().flatten().chain(single)
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    /// Position of the value of `key`; of the table if the key is missing.
    pub(super) fn span_of(&self, key: &str) -> Range<usize> {
        self.entries.get(key).map_or_else(|| self.span.clone(), Spanned::span)
    }

    /// The table `[key]`.
    pub(super) fn table(&self, key: &'static str) -> Option<Table<'t, 'f>> {
        let value = self.get(key)?;
        let Some(table) = value.get_ref().as_table() else {
            self.kind(key, value, "a table");
            return None;
        };
        Some(self.child(key, table, self.header(key, value)))
    }

    /// The tables `[[key]]`, in the order of the file.
    pub(super) fn tables(&self, key: &'static str) -> Vec<Table<'t, 'f>> {
        let read = |value: &'t Spanned<DeValue<'t>>| match value.get_ref().as_table() {
            Some(table) => Some(self.child(key, table, value.span())),
            None => {
                self.kind(key, value, &format!("a list of tables ([[{key}]])"));
                None
            }
        };
        self.items(key).filter_map(read).collect()
    }

    /// The tables `[key.NAME]` with their names, in the order of the file.
    pub(super) fn named(&self, key: &'static str) -> Vec<(At<&'t str>, Table<'t, 'f>)> {
        let Some(table) = self.table(key) else { return Vec::new() };
        let mut named: Vec<_> = table
            .entries
            .iter()
            .filter_map(|(name, value)| match value.get_ref().as_table() {
                Some(inner) => {
                    let at = At { value: name.get_ref().as_ref(), span: name.span() };
                    Some((at, self.child(key, inner, name.span())))
                }
                None => {
                    let hint = format!("write [{key}.NAME] and its keys below");
                    self.wrong(&name.span(), format!("`{key}` has no key `{}`", name.get_ref()), hint);
                    None
                }
            })
            .collect();
        named.sort_by_key(|(name, _)| name.span.start);
        named
    }

    /// Every key with its number, for the table of settings.
    pub(super) fn all_numbers(&self) -> Vec<(At<&'t str>, At<u64>)> {
        let mut all = Vec::new();
        for (name, value) in self.entries {
            let number = match value.get_ref() {
                DeValue::Boolean(flag) => Some(At { value: u64::from(*flag), span: value.span() }),
                _ => integer(value, &(0..=u64::MAX)),
            };
            match number {
                Some(number) => {
                    all.push((At { value: name.get_ref().as_ref(), span: name.span() }, number));
                }
                None => self.kind(name.get_ref(), value, "a whole number, or true or false"),
            }
        }
        all.sort_by_key(|(name, _)| name.span.start);
        all
    }

    /// Reports the keys that were not read.
    pub(super) fn finish(self) {
        let mut known: Vec<&str> = Vec::new();
        // A key may be read twice.
        for key in self.known.borrow().iter() {
            if !known.contains(key) {
                known.push(*key);
            }
        }
        let in_table = |name: &&str| {
            let table = |key: &Key| {
                key.table == *name || key.table.strip_prefix(self.path) == Some(&format!(".{name}"))
            };
            keys::KEYS.iter().any(|key| (key.table, key.name) == (self.path, name) || table(key))
                || *name == "settings"
        };
        debug_assert!(known.iter().all(in_table), "[{}] reads a key that KEYS lacks: {known:?}", self.path);
        for key in self.entries.keys() {
            let name: &str = key.get_ref();
            if known.contains(&name) {
                continue;
            }
            let renamed = RENAMED.iter().find(|(path, old, _)| (*path, *old) == (self.path, name));
            let hint = match renamed {
                Some((_, _, new)) => format!("this key is now `{new}`"),
                None => meant(name, known.iter().copied())
                    .unwrap_or_else(|| format!("the keys here are {}", known.join(", "))),
            };
            self.wrong(&key.span(), format!("unknown key `{name}`"), hint);
        }
    }

    fn header(&self, key: &str, value: &Spanned<DeValue<'_>>) -> Range<usize> {
        self.entries.get_key_value(key).map_or_else(|| value.span(), |(key, _)| key.span())
    }
}

fn integer(value: &Spanned<DeValue<'_>>, range: &RangeInclusive<u64>) -> Option<At<u64>> {
    let DeValue::Integer(integer) = value.get_ref() else { return None };
    let number = u64::from_str_radix(integer.as_str(), integer.radix()).ok()?;
    range.contains(&number).then(|| At { value: number, span: value.span() })
}

fn article(kind: &str) -> String {
    let article = if kind.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    format!("{article} {kind}")
}

/// A hint if `written` is similar to one of `words`.
pub(crate) fn meant<'w>(written: &str, words: impl IntoIterator<Item = &'w str>) -> Option<String> {
    if written.len() > 40 {
        return None;
    }
    let far = written.chars().count().div_ceil(3);
    let plain = |word: &str| word.to_ascii_lowercase().replace('_', "-");
    let written = plain(written);
    words
        .into_iter()
        .map(|word| (strsim::damerau_levenshtein(&written, &plain(word)), word))
        .filter(|(distance, word)| *distance <= far && *distance < word.len())
        .min()
        .map(|(_, word)| format!("did you mean `{word}`?"))
}
