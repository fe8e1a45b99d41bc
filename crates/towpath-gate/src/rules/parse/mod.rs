//! Parser of rule files. Commands are executed one after the other, as ipfw does, and every error is recorded
//! with its position.

pub(crate) mod action;
mod body;
mod finish;
mod pipe;
mod rule_list;
mod set;
mod state;
mod table;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

pub(super) use self::finish::tables_of;
use self::rule_list::RuleList;
use super::address::Address;
use super::cursor::{Cursor, Parse, number};
use super::diagnostic::{Diagnostic, Fault, Position, quoted};
use super::keywords::{COMMANDS, NO_COMMANDS, refused};
use super::option::{Term, Test};
use super::protocol::Protocol;
use super::rule::{Action, Body, DEFAULT_RULE, Form, Rule, Target};
use super::ruleset::{Parsed, Ruleset};
use super::table::{Column, Key, Table};
use super::token::{Line, lines};

/// Step between automatic rule numbers (ipfw's autoinc_step).
const AUTOINC_STEP: u32 = 100;
/// Maximum number of reported errors per file. Further errors are counted.
const MAX_ERRORS: usize = 10_000;
/// Words that start a line of a shell script.
const SHELL: &[&str] = &[
    "if", "then", "else", "elif", "fi", "for", "do", "done", "while", "until", "case", "esac", ".", "export",
    "echo", "exit", "kldload", "route", "ifconfig", "{", "}",
];
/// Maximum column up to which the ends of words are determined.
const MAX_COLUMN: u32 = 65_536;

/// `ip from any to any`.
pub(super) fn any_to_any() -> Body {
    let any = |test: fn(Vec<Address>) -> Test| vec![Term { not: false, test: test(vec![Address::Any]) }];
    Body {
        form: Form::Full,
        proto: vec![Term { not: false, test: Test::Proto(Protocol::Any) }],
        src: any(Test::Src),
        src_port: None,
        dst: any(Test::Dst),
        dst_port: None,
        options: Vec::new(),
    }
}

/// Returns the labels that rules jump to, by the index of the rule below.
pub(super) fn label_lines(rules: &[Rule]) -> BTreeMap<usize, Vec<Box<str>>> {
    let mut seen = HashSet::new();
    let mut at: BTreeMap<usize, Vec<Box<str>>> = BTreeMap::new();
    for rule in rules {
        if let Action::Skipto(target) | Action::Call(target) = &rule.action
            && let Target::Label { name, number, above } = target
            && seen.insert(name)
        {
            let index = rules.partition_point(|rule| order(rule.number) < order(*number));
            at.entry(index + *above as usize).or_default().push(name.clone());
        }
    }
    at
}

/// Sort key of a rule number. The default rule is last, also after larger numbers.
pub(crate) const fn order(number: u32) -> u64 {
    if number == DEFAULT_RULE { u64::MAX } else { number as u64 }
}

/// The position at which a jump continues among `count` rules, whose numbers `number` returns: all rules of the ruleset without the
/// default rule, which has position `count`. `None` if the rule does not jump, or to a number of a table.
pub(crate) fn jump_position(rule: &Rule, count: usize, number: impl Fn(usize) -> u32) -> Option<usize> {
    let (target, forward) = match &rule.action {
        Action::Skipto(target) => (target, true),
        Action::Call(target) => (target, false),
        _ => return None,
    };
    // The first position whose number is not `before` a number.
    let first = |before: &dyn Fn(u64) -> bool| {
        let (mut low, mut high) = (0, count);
        while low < high {
            let middle = low.midpoint(high);
            if before(order(number(middle))) { low = middle + 1 } else { high = middle }
        }
        low
    };
    let from = |number: u32| first(&|other| other < order(number));
    match target {
        Target::Tablearg => None,
        // ipfw: a jump that does not go forward goes to the next rule number.
        Target::Number(number) if forward && order(*number) <= order(rule.number) => {
            Some(from(rule.number.saturating_add(1)))
        }
        Target::Number(number) => Some(from(*number)),
        // The parser has checked that the label is ahead. Around a rule that only serves states the other rules may have changed: not
        // beyond the rules with the number.
        Target::Label { number, above, .. } => {
            Some((from(*number) + *above as usize).min(first(&|other| other <= order(*number))))
        }
    }
}

/// Reads a file that a command names.
pub(super) type ReadFile = Box<dyn Fn(&str) -> std::io::Result<String>>;

/// Parses a whole file. `read` reads the files that it names.
pub(super) fn file(name: &str, text: &str, read_file: Option<ReadFile>) -> Parsed {
    // Byte order mark, which some editors write at the start of UTF-8 files.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    read(Builder { read_file, ..Builder::new() }, name, text).0
}

/// Parses a whole file whose tables exist already.
pub(super) fn file_with_tables(name: &str, text: &str, tables: BTreeMap<Box<str>, Table>) -> Parsed {
    let mut builder = Builder::new();
    builder.ruleset.tables = tables;
    read(builder, name, text).0
}

/// Executes commands that only change entries of `tables`, which become the tables of the result. `None` if there
/// are other commands, or if the meaning of an entry depends on the rules.
pub(super) fn entries(name: &str, text: &str, tables: &BTreeMap<Box<str>, Table>) -> Option<Parsed> {
    let mut builder = Builder::new();
    for line in lines(text) {
        let mut words = line.tokens.iter().map(|token| &*token.text).peekable();
        // `-q` replaces existing entries.
        words.next_if(|word| word.starts_with('-'));
        let table = match (words.next(), words.next(), words.next()) {
            (None, ..) => continue,
            (Some("table"), Some("all"), Some("flush")) => return None,
            (Some("table"), Some(table), Some("add" | "atomic" | "delete" | "flush")) => table,
            _ => return None,
        };
        let (name, table) = tables.get_key_value(table)?;
        builder.ruleset.tables.entry(name.clone()).or_insert_with(|| table.clone());
    }
    let (parsed, labels) = read(builder, name, text);
    (!labels).then_some(parsed)
}

/// Reads the entries of a table from the lines of a file.
pub(super) fn table_file(
    name: &str,
    text: &str,
    like: &Table,
    quiet: bool,
) -> Result<Table, Vec<Diagnostic>> {
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut faults = Vec::new();
    let mut unreported = 0;
    let mut table = like.clone();
    table.flush();
    for line in lines(text) {
        if faults.len() >= MAX_ERRORS {
            unreported += 1;
            continue;
        }
        if let Err(fault) = table::file_line(&mut table, &line, quiet) {
            faults.push(fault);
        }
    }
    let errors = errors(name, text, faults, unreported);
    if errors.is_empty() {
        table.settle();
        Ok(table)
    } else {
        Err(errors)
    }
}

/// Executes the commands of `text`. Also returns whether table entries refer to labels.
fn read(mut builder: Builder, name: &str, text: &str) -> (Parsed, bool) {
    let mut faults = Vec::new();
    let mut unreported = 0usize;
    for line in lines(text) {
        if faults.len() >= MAX_ERRORS {
            unreported += 1;
            continue;
        }
        let mut cursor = Cursor::new(&line, &mut faults);
        if let Err(fault) = builder.line(&line, &mut cursor) {
            faults.push(fault);
        }
    }
    let labels = builder.label_values.values().any(|labels| !labels.is_empty());
    let in_files = std::mem::take(&mut builder.file_errors);
    let (ruleset, late, warnings) = builder.finish();
    faults.extend(late);
    let mut errors = errors(name, text, faults, unreported);
    errors.extend(in_files);
    let file: Arc<str> = name.into();
    let mut warnings: Vec<Diagnostic> = warnings.into_iter().map(|fault| fault.in_file(&file)).collect();
    warnings.sort_by_key(|warning| (warning.line, warning.column));
    find_ends(text, &mut warnings);
    (Parsed { ruleset: if errors.is_empty() { Ok(ruleset) } else { Err(errors) }, warnings }, labels)
}

/// Returns the errors of a file in order, at most [`MAX_ERRORS`] and the number of the others.
fn errors(name: &str, text: &str, mut faults: Vec<Fault>, unreported: usize) -> Vec<Diagnostic> {
    let file: Arc<str> = name.into();
    faults.sort_by_key(|fault| fault.at);
    let unshown = faults.len().saturating_sub(MAX_ERRORS);
    faults.truncate(MAX_ERRORS);
    let end = faults.last().map(|fault| fault.at).unwrap_or_default();
    let mut errors: Vec<Diagnostic> = faults.into_iter().map(|fault| fault.in_file(&file)).collect();
    find_ends(text, &mut errors);
    if unreported > 0 || unshown > 0 {
        let rest = match unreported {
            0 => format!("{unshown} more are not shown"),
            lines => format!("{lines} more lines were not read"),
        };
        let message = format!("more than {MAX_ERRORS} errors; {rest}");
        errors.push(Fault::new(end, message).hint("is this a rule file?").in_file(&file));
    }
    errors
}

/// Determines the end of the word of each diagnostic. The diagnostics are in the order of the text.
fn find_ends(text: &str, findings: &mut [Diagnostic]) {
    let mut lines = text.split('\n').zip(1u32..);
    let mut line = lines.next();
    for finding in findings {
        while line.is_some_and(|(_, number)| number < finding.line) {
            line = lines.next();
        }
        let Some((text, _)) = line else { return };
        // In a very long line only the start of the word is reported.
        if finding.column > MAX_COLUMN {
            continue;
        }
        let mut rest = text.chars().skip(finding.column.saturating_sub(1) as usize);
        let Some(first) = rest.next().filter(|c| !c.is_whitespace()) else { continue };
        let breaks = |c: &char| !c.is_whitespace() && !matches!(c, ',' | '{' | '}' | '(' | ')' | '#');
        let more = if breaks(&first) { rest.take(MAX_COLUMN as usize).take_while(breaks).count() } else { 0 };
        finding.end = finding.column + 1 + more as u32;
        let word = || text.chars().skip(finding.column.saturating_sub(1) as usize).take(1 + more);
        if word().any(|c| matches!(c, '$' | '`')) {
            let hint =
                "shell variables are not expanded: write the value, or generate this file with the shell";
            finding.hint = Some(hint.to_owned());
        } else if word().any(|c| c == '\\') {
            finding.hint = Some("remove the backslash: no shell reads this file".to_owned());
        }
    }
}

/// A label in the value of a table entry.
struct LabelValue {
    column: Column,
    label: Box<str>,
    at: Position,
}

/// Position of a label: above the rule that is added next.
#[derive(Clone, Copy)]
struct Place {
    number: u32,
    /// Number of rules added before it in the whole file.
    added: u32,
}

/// The configuration so far.
struct Builder {
    /// Default rule, tables and pipes. The other rules are added at the end.
    ruleset: Ruleset,
    rules: RuleList,
    /// Highest rule number so far.
    last: u32,
    /// The rule below each label; `None` until a rule is added below it. A flush removes the labels of the rules
    /// that it deletes. A label without a rule stays open and may be repeated.
    labels: HashMap<Box<str>, Option<Place>>,
    open_labels: Vec<Box<str>>,
    /// By table and key.
    label_values: HashMap<Box<str>, HashMap<Key, Vec<LabelValue>>>,
    warnings: Vec<Fault>,
    /// Reads the files of `table NAME load FILE`.
    read_file: Option<ReadFile>,
    /// Errors in these files.
    file_errors: Vec<Diagnostic>,
}

impl Builder {
    fn new() -> Self {
        Self {
            ruleset: Ruleset::empty(),
            rules: RuleList::default(),
            last: 0,
            labels: HashMap::new(),
            open_labels: Vec::new(),
            label_values: HashMap::new(),
            warnings: Vec::new(),
            read_file: None,
            file_errors: Vec::new(),
        }
    }

    /// Notes that `delete` found no rule. With `quiet` (`-q`), this is intended.
    fn note_absent(&mut self, fault: Fault, quiet: bool) {
        if !quiet {
            self.warnings.push(Fault { no_such_rule: true, ..fault });
        }
    }

    fn line(&mut self, line: &Line<'_>, cursor: &mut Cursor<'_, '_>) -> Parse<()> {
        if let Some((word, at)) = line.directive {
            let message = format!("\"{word}\" is a comment: rule files are not preprocessed");
            self.warnings
                .push(Fault::new(at, message).hint("run the preprocessor first and load its output"));
        }
        if line.tokens.is_empty() {
            return Ok(());
        }
        if cursor
            .peek()
            .is_some_and(|word| word == "ipfw" || word.starts_with('/') && word.ends_with("/ipfw"))
        {
            cursor.take();
        }
        let quiet = flags(cursor)?;
        let at = cursor.here();
        let Some(word) = cursor.peek() else { return Ok(()) };
        if let Some(label) = word.strip_prefix(':') {
            cursor.take();
            return self.label(label, at, cursor);
        }
        cursor.take();
        let whole = whole_word(word);
        if whole != word {
            self.warnings.push(
                Fault::new(at, format!("{} is an abbreviation of \"{whole}\"", quoted(word)))
                    .hint("write the full word"),
            );
        }
        match whole {
            "add" => self.add(cursor, at),
            "delete" => self.delete(cursor, quiet),
            "flush" => {
                cursor.nothing_left("\"flush\"")?;
                self.rules.flush();
                self.last = self.rules.last_number();
                let rules = &mut self.rules;
                self.labels.retain(|_, place| place.is_some_and(|place| rules.has(place.added)));
                Ok(())
            }
            // A new ruleset has no counters.
            "zero" | "resetlog" => Ok(()),
            "set" => self.set(cursor, quiet),
            "table" => table::command(self, cursor, quiet),
            "pipe" => pipe::command(&mut self.ruleset.pipes, cursor),
            "enable" | "disable" => self.switch(cursor, whole),
            other => Err(match refused(NO_COMMANDS, other) {
                Some((reason, instead)) => {
                    Fault::new(at, format!("command \"{other}\" is not supported: {reason}")).hint(instead)
                }
                None if other.contains(['=', '`', '[', '(']) || SHELL.contains(&other) => {
                    Fault::new(at, format!("unknown command {}", quoted(other)))
                        .hint("a rule file contains ipfw commands, not a shell script")
                }
                None => Fault::new(at, format!("unknown command {}", quoted(other)))
                    .did_you_mean(other, COMMANDS.iter().copied()),
            }),
        }
    }

    fn label(&mut self, label: &str, at: Position, cursor: &mut Cursor<'_, '_>) -> Parse<()> {
        let name = action::check_name(label, "label").map_err(|message| Fault::new(at, message))?;
        cursor.nothing_left("a label")?;
        if self.labels.insert(name.clone(), None).is_some() {
            return Err(Fault::new(at, format!("duplicate label \":{name}\"")));
        }
        self.open_labels.push(name);
        Ok(())
    }

    fn add(&mut self, cursor: &mut Cursor<'_, '_>, at: Position) -> Parse<()> {
        let number = self.rule_number(cursor)?;
        let set = if cursor.eat("set") { cursor.number("set", 0, 31)? as u8 } else { 0 };
        // A faulty rule also takes its number and its labels, to avoid follow-up errors.
        self.last = self.last.max(number);
        let place = Place { number, added: self.rules.added() };
        for label in self.open_labels.drain(..) {
            self.labels.insert(label, Some(place));
        }
        let rule = rule(cursor, number, set, at)?;
        self.rules.add(rule);
        Ok(())
    }

    fn rule_number(&mut self, cursor: &mut Cursor<'_, '_>) -> Parse<u32> {
        let at = cursor.here();
        if !cursor.peek().is_some_and(|word| word.starts_with(|c: char| c.is_ascii_digit())) {
            return match self.last.checked_add(AUTOINC_STEP) {
                Some(DEFAULT_RULE) => Ok(DEFAULT_RULE + 1),
                Some(number) if number < u32::MAX => Ok(number),
                _ => {
                    Err(Fault::new(at, "no rule number is free after the last rule").hint("write the number"))
                }
            };
        }
        let number = cursor.number("rule number", 1, u32::MAX - 1)?;
        if number == DEFAULT_RULE {
            return Err(Fault::new(at, "rule 65535 is the default rule and cannot be added")
                .hint("set its action in the configuration"));
        }
        Ok(number)
    }

    fn delete(&mut self, cursor: &mut Cursor<'_, '_>, quiet: bool) -> Parse<()> {
        if cursor.eat("set") {
            let set = cursor.number("set", 0, 31)? as u8;
            self.rules.delete_set(set);
            self.last = self.rules.last_number();
            return cursor.nothing_left("\"delete set N\"");
        }
        if cursor.peek().is_none() {
            return Err(Fault::new(cursor.here(), "the rule number is missing"));
        }
        while let Some(token) = cursor.take() {
            let (lo, hi) = token.text.split_once('-').unwrap_or((&token.text, &token.text));
            let (Some(lo), Some(hi)) = (number(lo), number(hi)) else {
                let message = format!("{} is not a valid rule number", quoted(&token.text));
                return Err(Fault::new(token.position(), message));
            };
            if lo == DEFAULT_RULE && hi == DEFAULT_RULE {
                return Err(Fault::new(token.position(), "the default rule cannot be deleted"));
            }
            let any = self.rules.delete(lo, hi);
            self.last = self.rules.last_number();
            if !any {
                let message = format!("rule {} does not exist", token.text);
                self.note_absent(Fault::new(token.position(), message), quiet);
            }
        }
        Ok(())
    }

    /// Parses `enable firewall` and the like.
    fn switch(&mut self, cursor: &mut Cursor<'_, '_>, word: &str) -> Parse<()> {
        let token = cursor.need(&format!("the word after \"{word}\""))?;
        match &*token.text {
            // Already enabled, harmless.
            "firewall" | "verbose" | "dyn_keepalive" | "one_pass" if word == "enable" => Ok(()),
            "debug" | "verbose" | "altq" | "skipto_cache" => Ok(()),
            other => Err(Fault::new(
                token.position(),
                format!("\"{word} {other}\" is not supported in a rule file"),
            )
            .hint("set it in the configuration")),
        }
    }
}

/// Parses the ipfw(8) flags before a command. Flags about output have no effect. Returns true for `-q`, with which
/// table commands ignore existing or missing entries.
fn flags(cursor: &mut Cursor<'_, '_>) -> Parse<bool> {
    let mut quiet = false;
    while let Some(flags) = cursor.peek().and_then(|word| word.strip_prefix('-')) {
        let at = cursor.here();
        if flags.contains('n') {
            return Err(Fault::new(at, "\"-n\" only checks a command; ipfw does not execute it")
                .hint("remove the line or the flag"));
        }
        if flags.is_empty() || !flags.chars().all(|flag| "acdefiNqStTv".contains(flag)) {
            return Err(Fault::new(at, format!("unknown flag \"-{flags}\""))
                .hint("use \"-q\" or \"-f\"; preprocess the whole file before loading it"));
        }
        quiet |= flags.contains('q');
        cursor.take();
    }
    Ok(quiet)
}

/// Returns the command that a word abbreviates, as in ipfw: "del" for "delete".
fn whole_word(word: &str) -> &str {
    let mut fits = COMMANDS.iter().filter(|whole| word.len() >= 2 && whole.starts_with(word));
    match (fits.next(), fits.next()) {
        (Some(whole), None) => whole,
        _ => word,
    }
}

/// Parses the rest of `add N set N`.
fn rule(cursor: &mut Cursor<'_, '_>, number: u32, set: u8, at: Position) -> Parse<Rule> {
    let prob = action::prob(cursor)?;
    let comment = cursor.comment().map(str::to_owned);
    let comment_only = cursor.peek().is_none() && comment.is_some();
    let action = if comment_only { Action::Count } else { action::action(cursor)? };
    let log = action::log(cursor)?;
    let mut tag = action::tag(cursor)?;
    if cursor.peek() == Some("altq") {
        return Err(Fault::new(cursor.here(), "option \"altq\" is not supported: ALTQ is not available")
            .hint("use \"pipe\""));
    }
    // ipfw accepts log, altq and tag in any order.
    let log = if log.is_none() { action::log(cursor)? } else { log };
    if tag.is_none() {
        tag = action::tag(cursor)?;
    } else if let Some(word @ ("tag" | "untag")) = cursor.peek() {
        return Err(Fault::new(
            cursor.here(),
            format!("\"{word}\" after another tag option: a rule adds or removes one tag"),
        )
        .hint("add a \"count\" rule for the other"));
    }
    let mut rule = Rule {
        number,
        set,
        prob,
        action,
        log,
        tag,
        body: Body { form: Form::Options, ..Body::default() },
        state: None,
        defer: false,
        comment,
        at,
    };
    if matches!(rule.action, Action::CheckState(_)) {
        let here = cursor.here();
        if cursor.peek().is_some() {
            return Err(Fault::new(here, "check-state takes no protocol, address or option").hint(
                "check-state looks up every packet; put conditions into the rules that create states",
            ));
        }
        return Ok(rule);
    }
    if comment_only {
        return Ok(rule);
    }
    let whole = body::body(cursor)?;
    rule.body = whole.body;
    rule.state = whole.state;
    rule.defer = whole.defer;
    Ok(rule)
}
