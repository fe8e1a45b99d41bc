//! `towpath check`: prints the normalised rules, or all errors of a rule file.

use std::ops::ControlFlow;

use serde::Serialize;
use towpath_gate::rules::{self, Diagnostic, Parsed};
use towpath_wire as wire;

use crate::args::{Check, exit};
use crate::cli::against::{Changes, Packets, against, rule_file};
use crate::cli::captured::{Captured, NOT_IP};
use crate::cli::offline_gate::{Failure, OfflineGate};
use crate::cli::wiring::{Loaded, Wrong, parse, read, read_config};
use crate::cli::{answer, say, warn};

/// The JSON object of `--json`.
#[derive(Default, Serialize)]
struct Report {
    file: String,
    ok: bool,
    /// The normalised file: parses to the same rules, tables, pipes and sets.
    text: String,
    rules: Vec<Rule>,
    errors: Vec<Finding>,
    /// Warnings; rules covered by an earlier rule appear as `shadowed`.
    warnings: Vec<Finding>,
    /// Present with `--capture`.
    #[serde(skip_serializing_if = "Option::is_none")]
    unused: Option<Vec<Rule>>,
    /// Present with `--against`.
    #[serde(skip_serializing_if = "Option::is_none")]
    changes: Option<Changes>,
    /// Present with `--against` and `--capture`.
    #[serde(skip_serializing_if = "Option::is_none")]
    packets: Option<Packets>,
}

#[derive(Serialize)]
struct Rule {
    number: u32,
    set: u8,
    text: String,
}

#[derive(Serialize)]
struct Finding {
    kind: &'static str,
    file: String,
    line: u32,
    column: u32,
    /// Column after the last character of the word.
    end: u32,
    message: String,
    hint: Option<String>,
}

impl From<&rules::Rule> for Rule {
    fn from(rule: &rules::Rule) -> Self {
        Self { number: rule.number, set: rule.set, text: rule.to_string() }
    }
}

impl Finding {
    fn new(kind: &'static str, found: &Diagnostic) -> Self {
        Self {
            kind,
            file: found.file.to_string(),
            line: found.line,
            column: found.column,
            end: found.end,
            message: found.message.clone(),
            hint: found.hint.clone(),
        }
    }
}

pub(crate) fn run(args: &Check) -> u8 {
    match check(args) {
        Ok(code) => code,
        Err(failure) => failure.tell(),
    }
}

fn check(args: &Check) -> Result<u8, Failure> {
    let config = args.wiring.config.as_deref().map(read_config).transpose()?;
    let path = rule_file(args, config.as_ref());
    let file = path.display().to_string();
    let text = match read(&path) {
        Ok(text) => text,
        Err(message) if args.json => {
            let kind = "error";
            let unread =
                Finding { kind, file: file.clone(), line: 1, column: 1, end: 1, message, hint: None };
            let report = Report { file, errors: vec![unread], ..Report::default() };
            let text = serde_json::to_string(&report).expect("strings and numbers serialise");
            return Ok(answer(exit::BAD_RULES, &(text + "\n")));
        }
        Err(error) => return Err(Wrong::Rules(vec![format!("towpath: {error}")]).into()),
    };
    let Parsed { ruleset, mut warnings, .. } = parse(config.as_ref(), &file, &text);
    let mut report = Report { file, ok: ruleset.is_ok(), ..Report::default() };
    let mut code = exit::OK;
    let (mut errors, mut shadowed) = (Vec::new(), Vec::new());
    match ruleset {
        Ok(ruleset) => {
            shadowed = ruleset.shadowed(&report.file);
            warnings.extend(ruleset.strict_without_reass(&report.file));
            warnings.extend(ruleset.unconfigured_table_pipes(&report.file));
            warnings
                .extend(config.as_ref().and_then(|config| config.without_keepalives(&report.file, &ruleset)));
            report.text = ruleset.to_text();
            report.rules = ruleset.rules().iter().map(Rule::from).collect();
            let loaded = Loaded { ruleset, config };
            if let Some(old) = &args.against {
                let (changes, packets) = against(args, &loaded, old)?;
                (report.changes, report.packets) = (Some(changes), packets);
            }
            if !args.captures.is_empty() {
                report.unused = Some(unused(args, &loaded)?);
            }
        }
        Err(found) => {
            errors = found;
            code = exit::BAD_RULES;
        }
    }
    if args.json {
        report.errors = errors.iter().map(|error| Finding::new("error", error)).collect();
        report.warnings = warnings.iter().map(|warning| Finding::new("warning", warning)).collect();
        report.warnings.extend(shadowed.iter().map(|rule| Finding::new("shadowed", rule)));
        let text = serde_json::to_string(&report).expect("strings and numbers serialise");
        return Ok(answer(code, &(text + "\n")));
    }
    warnings.iter().chain(&shadowed).for_each(warn);
    errors.iter().for_each(say);
    Ok(answer(code, &report.text()))
}

/// Returns the rules that no packet of the captures matched.
fn unused(args: &Check, loaded: &Loaded) -> Result<Vec<Rule>, Failure> {
    let mut offline = OfflineGate::new(args.wiring.gate(loaded, None)?);
    let mut captured = Captured::default();
    for capture in &args.captures {
        captured.read(capture, |frame, now| {
            if let Ok(packet) = wire::parse(frame.link, frame.bytes, frame.wire_len) {
                offline.process(&packet, now);
            }
            ControlFlow::<()>::Continue(())
        })?;
    }
    captured.tell(NOT_IP);
    Ok(offline.gate.unused().map(Rule::from).collect())
}

impl Report {
    /// The text output: the rules; or, with `--capture` or `--against`, the unused rules and the changes.
    fn text(&self) -> String {
        let line = |rule: &Rule| format!("{:05} {}\n", rule.number, rule.text);
        let mut text = String::new();
        if self.unused.is_none() && self.changes.is_none() {
            text += &self.text;
        }
        text.extend(self.changes.iter().map(Changes::text));
        text.extend(self.packets.iter().map(Packets::text));
        match self.unused.as_deref() {
            Some([]) => text += "every rule was used\n",
            Some(unused) => {
                text += "not used:\n";
                text.extend(unused.iter().map(line));
            }
            None => {}
        }
        text
    }
}
