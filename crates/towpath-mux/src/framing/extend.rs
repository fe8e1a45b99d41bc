//! Presets with clauses that extend them: `resp key=1`, `line max=1M`.

use super::clause::Clause;
use super::coded::Coded;
use super::compile;
use super::error::{Fault, ParseError, hint};
use super::preset::{Form, Preset};
use super::value::{key, number};
use super::{Kind, text};
use crate::framing::body::Key;

use std::sync::Arc;

/// Keys that may follow the name of a preset. Each replaces its key in every case of the preset.
const EXTENDING: &[&str] = &["key", "mark", "max", "min", "head", "strip", "trim", "body"];
/// Keys for presets in code.
const EXTENDING_CODE: &[&str] = &["key", "max"];

pub(super) fn kind(preset: &Preset, clauses: Vec<Clause>) -> Result<Kind, Fault> {
    let keys = if preset.text().is_some() { EXTENDING } else { EXTENDING_CODE };
    for (at, clause) in clauses.iter().enumerate() {
        if !keys.contains(&clause.key.as_str()) {
            let hint = hint(&clause.key, keys.iter().copied());
            let message =
                format!("{} cannot extend {}, only {} can{hint}", clause.key, preset.name, keys.join(", "));
            return Err(Fault::new(clause.at, message));
        }
        if clauses[..at].iter().any(|other| other.key == clause.key) {
            return Err(Fault::new(clause.at, format!("{} is given twice", clause.key)));
        }
    }
    match preset.form {
        Form::Text(written) => {
            let preset = declared(written).map_err(|error| Fault::new(0, error.to_string()))?;
            let extended = extend(preset, &clauses);
            Ok(Kind::Declared(Arc::new(compile::declared(&extended)?)))
        }
        Form::Coded(protocol) => {
            let mut coded = Coded { protocol, max: usize::MAX, key: None };
            for clause in &clauses {
                match clause.key.as_str() {
                    "max" => {
                        let value = clause.value.as_ref().map(number).transpose()?;
                        let max = value.and_then(|value| usize::try_from(value).ok()).filter(|max| *max > 0);
                        coded.max =
                            max.ok_or_else(|| Fault::new(clause.at, "max must be a number of bytes"))?;
                    }
                    _ => coded.key = Some(key(clause)?),
                }
                if matches!(coded.key, Some(Key::Word(_))) && !protocol.has_words() {
                    let message = format!("{} has no words; write offset:length: key=8:4", preset.name);
                    return Err(Fault::new(clause.at, message));
                }
            }
            Ok(Kind::Coded(coded))
        }
    }
}

/// The clauses of a preset, without positions in the user's text.
fn declared(written: &str) -> Result<Vec<Clause>, ParseError> {
    fn forget(clauses: &mut [Clause]) {
        for clause in clauses {
            clause.at = 0;
            forget(clause.group.as_deref_mut().unwrap_or(&mut []));
        }
    }
    let mut clauses = text::clauses(written)?;
    forget(&mut clauses);
    Ok(clauses)
}

/// Puts the clauses into each group that has messages.
fn extend(mut group: Vec<Clause>, clauses: &[Clause]) -> Vec<Clause> {
    let ends = |clause: &Clause| matches!(clause.key.as_str(), "giveback" | "refuse");
    let mut is_rule = !group.iter().any(ends);
    for clause in &mut group {
        is_rule &= !matches!(clause.key.as_str(), "when" | "else");
        clause.group = clause.group.take().map(|inner| extend(inner, clauses));
    }
    if is_rule {
        group.retain(|clause| clauses.iter().all(|other| other.key != clause.key));
        group.extend(clauses.iter().cloned());
    }
    group
}
