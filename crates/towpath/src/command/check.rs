//! `towpath check`: the rules as they were understood, or every error in them.

use std::path::Path;

use serde::Serialize;
use towpath_gate::rules::{self, Diagnostic, Ruleset};

use crate::args::{Check, exit};
use crate::command::{fail, warn};

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    file: String,
    ok: bool,
    rules: Vec<Rule>,
    errors: Vec<Finding>,
    warnings: Vec<Finding>,
}

#[derive(Serialize)]
struct Rule {
    number: u32,
    set: u8,
    text: String,
}

#[derive(Serialize)]
struct Finding {
    line: u32,
    column: u32,
    message: String,
    hint: Option<String>,
}

impl From<&rules::Rule> for Rule {
    fn from(rule: &rules::Rule) -> Self {
        Self { number: rule.number, set: rule.set, text: rule.to_string() }
    }
}

impl From<&Diagnostic> for Finding {
    fn from(found: &Diagnostic) -> Self {
        Self {
            line: found.line,
            column: found.column,
            message: found.message.clone(),
            hint: found.hint.clone(),
        }
    }
}

pub(crate) fn run(args: &Check) -> u8 {
    let text = match read(&args.file) {
        Ok(text) => text,
        Err(error) => return fail(exit::BAD_RULES, error),
    };
    let file = args.file.display().to_string();
    let parsed = Ruleset::parse(&file, &text);
    let (rules, errors): (Vec<Rule>, _) = match &parsed.ruleset {
        Ok(ruleset) => (ruleset.rules().iter().map(Rule::from).collect(), &[][..]),
        Err(errors) => (Vec::new(), &errors[..]),
    };
    let ok = errors.is_empty();
    if args.json {
        let findings = |list: &[Diagnostic]| list.iter().map(Finding::from).collect();
        let report =
            Report { file, ok, rules, errors: findings(errors), warnings: findings(&parsed.warnings) };
        println!("{}", serde_json::to_string(&report).expect("strings and numbers serialise"));
    } else {
        parsed.warnings.iter().for_each(warn);
        errors.iter().for_each(|error| eprintln!("{error}"));
        for Rule { number, text, .. } in rules {
            println!("{number:05} {text}");
        }
    }
    if ok { exit::OK } else { exit::BAD_RULES }
}

/// The text of a rule file; an error that names the file.
pub(crate) fn read(path: &Path) -> Result<String, String> {
    let bytes = std::fs::read(path).map_err(|error| format!("{}: {error}", path.display()))?;
    // Comments may be in any encoding; a word that is not UTF-8 is unknown and will be named with its place.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
