//! Reads a TOML document key by key, and notes everything that is wrong with it, each with its place.
//!
//! A key that is asked for counts as known; [`Table::finish`] complains about all others. A value of the wrong kind is noted
//! and then taken for absent, so that the reading goes on.

use std::cell::RefCell;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;
use std::time::Duration;

use toml::Spanned;
use toml::de::{DeTable, DeValue};
use towpath_gate::rules::Diagnostic;

/// What is wrong so far.
#[derive(Debug)]
pub(super) struct Findings<'t> {
    file: Arc<str>,
    text: &'t str,
    found: RefCell<Vec<Diagnostic>>,
    denied: RefCell<Vec<Diagnostic>>,
}

/// A value and where it stands.
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
    /// Of its header or its braces.
    pub(super) span: Range<usize>,
    known: RefCell<Vec<&'static str>>,
}

impl<'t> Findings<'t> {
    pub(super) fn new(file: &str, text: &'t str) -> Self {
        Self { file: file.into(), text, found: RefCell::default(), denied: RefCell::default() }
    }

    /// Notes what is wrong at `span`, and what to do about it.
    pub(super) fn add(&self, span: &Range<usize>, message: impl Into<String>, hint: Option<String>) {
        self.found.borrow_mut().push(self.diagnostic(span, message.into(), hint));
    }

    /// What `add` would note, about a file that we may not read.
    fn deny(&self, span: &Range<usize>, message: String, hint: &str) {
        self.denied.borrow_mut().push(self.diagnostic(span, message, Some(hint.to_owned())));
    }

    /// What was [denied](Table::denied) until now.
    pub(super) fn take_denied(&self) -> Vec<Diagnostic> {
        self.denied.take()
    }

    fn diagnostic(&self, span: &Range<usize>, message: String, hint: Option<String>) -> Diagnostic {
        let (line, column) = self.position(span.start);
        // A header stands for its whole table: only its first line is the word.
        let word = self.text.get(span.clone()).unwrap_or_default();
        let width = word.lines().next().unwrap_or_default().chars().count() as u32;
        Diagnostic { file: Arc::clone(&self.file), line, column, end: column + width, message, hint }
    }

    /// Everything that is wrong, in the order of the file.
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
    pub(super) fn new(table: &'t DeTable<'t>, span: Range<usize>, findings: &'f Findings<'t>) -> Self {
        Self { entries: table, findings, span, known: RefCell::default() }
    }

    /// Notes a key that must be there and is not.
    pub(super) fn need(&self, key: &str, hint: impl Into<String>) {
        if !self.entries.contains_key(key) {
            self.wrong(&self.span, format!("there is no `{key}`"), hint.into());
        }
    }

    pub(super) fn wrong(&self, span: &Range<usize>, message: impl Into<String>, hint: impl Into<String>) {
        let hint = hint.into();
        self.findings.add(span, message, (!hint.is_empty()).then_some(hint));
    }

    /// Notes a file that we may not read: whoever has the configuration looked at need not be who runs it.
    pub(super) fn denied(&self, span: &Range<usize>, message: String, hint: &str) {
        self.findings.deny(span, message, hint);
    }

    fn get(&self, key: &'static str) -> Option<&'t Spanned<DeValue<'t>>> {
        self.known.borrow_mut().push(key);
        self.entries.get(key)
    }

    fn kind(&self, key: &str, value: &Spanned<DeValue<'_>>, wanted: &str) {
        let is = value.get_ref().type_str();
        self.findings.add(&value.span(), format!("`{key}` is {wanted}, not {}", article(is)), None);
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

    pub(super) fn number(&self, key: &'static str, range: RangeInclusive<u64>) -> Option<u64> {
        self.number_at(key, range).map(|at| at.value)
    }

    pub(super) fn number_at(&self, key: &'static str, range: RangeInclusive<u64>) -> Option<At<u64>> {
        let value = self.get(key)?;
        integer(value, &range).or_else(|| {
            self.outside(key, value, &format!("a whole number in {}..{}", range.start(), range.end()));
            None
        })
    }

    /// A whole number, or this word: `None`.
    pub(super) fn number_or(
        &self,
        key: &'static str,
        range: RangeInclusive<u64>,
        word: &str,
    ) -> Option<Option<At<u64>>> {
        let value = self.get(key)?;
        if value.get_ref().as_str() == Some(word) {
            return Some(None);
        }
        let number = integer(value, &range);
        if number.is_none() {
            let wanted = format!("a whole number in {}..{}, or \"{word}\"", range.start(), range.end());
            let text = format!("`{key}` is {wanted}");
            self.findings.add(&value.span(), text, None);
        }
        number.map(Some)
    }

    /// It is no number, or none that is wanted.
    fn outside(&self, key: &str, value: &Spanned<DeValue<'_>>, wanted: &str) {
        match value.get_ref() {
            DeValue::Integer(other) => {
                let message = format!("`{key}` is {wanted}, not {}", other.as_str());
                self.findings.add(&value.span(), message, None);
            }
            _ => self.kind(key, value, wanted),
        }
    }

    /// A list of whole numbers.
    pub(super) fn numbers(&self, key: &'static str, range: RangeInclusive<u64>) -> Vec<At<u64>> {
        let read = |value: &'t Spanned<DeValue<'t>>| {
            integer(value, &range).or_else(|| {
                self.outside(key, value, &format!("whole numbers in {}..{}", range.start(), range.end()));
                None
            })
        };
        self.items(key).filter_map(read).collect()
    }

    /// A number of seconds.
    pub(super) fn seconds(&self, key: &'static str, range: RangeInclusive<f64>) -> Option<Duration> {
        let value = self.get(key)?;
        let wanted = format!("a number of seconds in {}..{}", range.start(), range.end());
        let (written, number) = match value.get_ref() {
            DeValue::Integer(number) => {
                (number.as_str(), integer(value, &(0..=u64::MAX)).map(|at| at.value as f64))
            }
            DeValue::Float(number) => (number.as_str(), number.as_str().parse().ok()),
            _ => {
                self.kind(key, value, &wanted);
                return None;
            }
        };
        let number = number.filter(|number| range.contains(number));
        if number.is_none() {
            self.findings.add(&value.span(), format!("`{key}` is {wanted}, not {written}"), None);
        }
        number.map(Duration::from_secs_f64)
    }

    /// True or false; "yes" and "no" are as good.
    pub(super) fn switch(&self, key: &'static str) -> Option<bool> {
        match self.get(key)?.get_ref().as_str() {
            Some("yes") => Some(true),
            Some("no") => Some(false),
            _ => self.flag(key),
        }
    }

    /// One of these words.
    pub(super) fn word<T: Copy>(&self, key: &'static str, words: &[(&str, T)]) -> Option<T> {
        let text = self.text(key)?;
        let found = words.iter().find(|(word, _)| *word == text.value);
        if found.is_none() {
            let names: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
            let hint = meant(text.value, names.iter().copied())
                .unwrap_or_else(|| format!("there are {}", names.join(", ")));
            self.wrong(&text.span, format!("`{key}` cannot be \"{}\"", text.value), hint);
        }
        found.map(|(_, value)| *value)
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

    /// The items of a list; a value that is no list is one item.
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

    /// Where the value of `key` stands; the whole table when there is none.
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
        Some(Table::new(table, self.header(key, value), self.findings))
    }

    /// The tables `[[key]]`, in the order of the file.
    pub(super) fn tables(&self, key: &'static str) -> Vec<Table<'t, 'f>> {
        let read = |value: &'t Spanned<DeValue<'t>>| match value.get_ref().as_table() {
            Some(table) => Some(Table::new(table, value.span(), self.findings)),
            None => {
                self.kind(key, value, &format!("a list of tables: write [[{key}]]"));
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
                    Some((at, Table::new(inner, name.span(), self.findings)))
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

    /// Every key with its number, for tables whose keys are not known here.
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

    /// Complains about the keys that nobody asked for.
    pub(super) fn finish(self) {
        let mut known: Vec<&str> = Vec::new();
        // Some are asked for twice.
        for key in self.known.borrow().iter() {
            if !known.contains(key) {
                known.push(*key);
            }
        }
        for key in self.entries.keys() {
            let name: &str = key.get_ref();
            if known.contains(&name) {
                continue;
            }
            let hint = meant(name, known.iter().copied())
                .unwrap_or_else(|| format!("the keys here are {}", known.join(", ")));
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

/// A hint when what was written is close to one of `words`.
pub(super) fn meant<'w>(written: &str, words: impl IntoIterator<Item = &'w str>) -> Option<String> {
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
