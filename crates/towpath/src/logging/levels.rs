//! Levels by target. No IO.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;
use tracing::Level;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::filter::Targets;

use super::line::word;

/// Targets with a level of their own.
const TARGETS: usize = 64;

/// Bytes of a target's name.
const NAME: usize = 128;

/// The level of each target. A line is written if its level is at least as severe as that of its target; the longest name with
/// which the target begins counts.
#[derive(Clone, Debug, PartialEq)]
pub struct Levels(Targets);

/// `LEVEL` or `TARGET=LEVEL`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Directive {
    /// `None`: all targets without a level of their own.
    target: Option<String>,
    level: LevelFilter,
}

/// Why a directive is refused.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DirectiveError {
    /// The word is not a level.
    #[error("`{0}` is not a level; the levels are {LEVELS}")]
    Level(String),
    /// The name is empty or too long, or has another character.
    #[error("`{0}` is not a target; a target is a name such as `states` or `towpath::control`")]
    Target(String),
    /// There is no room for another target.
    #[error(
        "{TARGETS} targets have levels already; `towpath ctl log --reset` removes those that were set at run time"
    )]
    Full,
}

/// The words of levels.
const LEVELS: &str = "off, error, warning, info, debug, trace";

impl Levels {
    /// All targets at `level`.
    pub fn new(level: LevelFilter) -> Self {
        Self(Targets::new().with_default(level))
    }

    /// Changes the level of one target, or of all targets without a level of their own.
    ///
    /// # Errors
    ///
    /// [`DirectiveError::Full`] if there are too many targets.
    pub fn set(&mut self, directive: &Directive) -> Result<(), DirectiveError> {
        let Directive { target, level } = directive;
        let targets = std::mem::take(&mut self.0);
        let Some(target) = target else {
            self.0 = targets.with_default(*level);
            return Ok(());
        };
        let known = targets.iter().any(|(name, _)| name == target);
        if !known && targets.iter().count() >= TARGETS {
            self.0 = targets;
            return Err(DirectiveError::Full);
        }
        self.0 = targets.with_target(target, *level);
        Ok(())
    }

    /// The level of targets without a level of their own.
    pub fn level(&self) -> LevelFilter {
        self.0.default_level().unwrap_or(LevelFilter::OFF)
    }

    /// The targets with a level of their own, by name.
    pub fn targets(&self) -> Vec<(String, LevelFilter)> {
        let mut targets: Vec<_> = self.0.iter().map(|(name, level)| (name.to_owned(), level)).collect();
        targets.sort();
        targets
    }

    /// The most verbose level of any target.
    pub(super) fn most(&self) -> LevelFilter {
        self.0.iter().map(|(_, level)| level).chain([self.level()]).max().unwrap_or(LevelFilter::OFF)
    }

    pub(super) fn enables(&self, target: &str, level: Level) -> bool {
        self.0.would_enable(target, &level)
    }
}

/// The word of a level in configuration, requests and answers.
pub fn level_word(level: LevelFilter) -> &'static str {
    level.into_level().map_or("off", word)
}

/// A level by its word.
///
/// # Errors
///
/// [`DirectiveError::Level`] if it is not a level.
pub fn level(text: &str) -> Result<LevelFilter, DirectiveError> {
    match text {
        "off" => Ok(LevelFilter::OFF),
        "error" => Ok(LevelFilter::ERROR),
        "warning" | "warn" => Ok(LevelFilter::WARN),
        "info" => Ok(LevelFilter::INFO),
        "debug" => Ok(LevelFilter::DEBUG),
        "trace" => Ok(LevelFilter::TRACE),
        other => Err(DirectiveError::Level(other.to_owned())),
    }
}

impl Directive {
    /// The level of all targets without a level of their own.
    pub fn of_all(level: LevelFilter) -> Self {
        Self { target: None, level }
    }

    /// True for `TARGET=LEVEL`.
    pub fn has_target(&self) -> bool {
        self.target.is_some()
    }
}

impl FromStr for Directive {
    type Err = DirectiveError;

    fn from_str(text: &str) -> Result<Self, DirectiveError> {
        let Some((target, word)) = text.split_once('=') else {
            return Ok(Self::of_all(level(text)?));
        };
        let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, ':' | '_' | '-');
        if target.is_empty() || target.len() > NAME || !target.chars().all(is_part) {
            return Err(DirectiveError::Target(target.to_owned()));
        }
        Ok(Self { target: Some(target.to_owned()), level: level(word)? })
    }
}

impl fmt::Display for Levels {
    /// `info, states=debug`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(level_word(self.level()))?;
        for (target, level) in self.targets() {
            write!(f, ", {target}={}", level_word(level))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn levels(directives: &[&str]) -> Levels {
        let mut levels = Levels::new(LevelFilter::INFO);
        directives.iter().for_each(|text| levels.set(&text.parse().unwrap()).unwrap());
        levels
    }

    #[test]
    fn the_longest_name_counts() {
        let levels = levels(&["states=off", "towpath=error", "towpath::control=trace", "debug"]);
        assert_eq!(levels.to_string(), "debug, states=off, towpath=error, towpath::control=trace");
        for (target, level, enabled) in [
            ("states", Level::ERROR, false),
            ("towpath::daemon", Level::WARN, false),
            ("towpath::daemon", Level::ERROR, true),
            ("towpath::control::server", Level::TRACE, true),
            ("connections", Level::DEBUG, true),
            ("connections", Level::TRACE, false),
        ] {
            assert_eq!(levels.enables(target, level), enabled, "{target} {level}");
        }
        assert_eq!(levels.most(), LevelFilter::TRACE);
    }

    #[test]
    fn a_target_can_be_quieter_again_and_their_number_is_bounded() {
        let mut changed = levels(&["states=trace", "states=off"]);
        assert_eq!((changed.most(), changed.targets().len()), (LevelFilter::INFO, 1));
        for number in 1..TARGETS {
            changed.set(&format!("t{number}=info").parse().unwrap()).unwrap();
        }
        assert_eq!(changed.set(&"more=info".parse().unwrap()), Err(DirectiveError::Full));
        // A known one is changed, and nothing is lost.
        changed.set(&"states=debug".parse().unwrap()).unwrap();
        assert_eq!((changed.most(), changed.targets().len()), (LevelFilter::DEBUG, TARGETS));
    }

    #[test]
    fn errors_name_the_word() {
        for (text, expected) in [
            ("loud", "`loud` is not a level; the levels are off, error, warning, info, debug, trace"),
            ("states=", "`` is not a level; the levels are off, error, warning, info, debug, trace"),
            ("=info", "`` is not a target; a target is a name such as `states` or `towpath::control`"),
            ("a b=info", "`a b` is not a target; a target is a name such as `states` or `towpath::control`"),
        ] {
            assert_eq!(text.parse::<Directive>().unwrap_err().to_string(), expected);
        }
        assert!(format!("{}=info", "x".repeat(NAME + 1)).parse::<Directive>().is_err());
        assert_eq!("warn".parse::<Directive>(), "warning".parse());
    }
}
