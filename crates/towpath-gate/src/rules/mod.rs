//! The rule language: parser and printer.
//!
//! The language is that of ipfw(8) with a few additions; `docs/book/src/reference/rules.md` lists every word.
//! [`Ruleset::parse`] parses a file and reports all errors at once.
//!
//! ```
//! use towpath_gate::rules::Ruleset;
//!
//! let parsed = Ruleset::parse("office.ipfw", "add allow tcp from any to me 22 setup keep-state\n");
//! let ruleset = parsed.ruleset.unwrap();
//! assert_eq!(
//!     ruleset.rules()[0].to_string(),
//!     "allow tcp from any to me 22 setup keep-state :default"
//! );
//!
//! let errors = Ruleset::parse("office.ipfw", "add allow tcp form any to any keepstate").ruleset.unwrap_err();
//! assert_eq!(
//!     errors[1].to_string(),
//!     r#"office.ipfw:1:31: unknown option "keepstate"; did you mean "keep-state"?"#
//! );
//! ```

pub mod address;
mod contradiction;
mod cursor;
mod diagnostic;
pub(crate) mod glob;
mod keywords;
mod offloads;
pub mod option;
mod parse;
pub mod ports;
mod print;
pub mod protocol;
mod rule;
mod ruleset;
mod shadowed;
mod strict_fragments;
pub mod table;
mod table_pipes;
mod token;

pub(crate) use option::mac;
pub(crate) use parse::{jump_position, order};
pub(crate) use print::block_text;

pub use diagnostic::{Diagnostic, Position};
pub use rule::{
    Action, Body, DEFAULT_RULE, Form, Limit, Log, NextHop, RESERVED_SET, ReturnTo, Rule, StateName,
    StateOption, Tag, Target,
};
pub use ruleset::{Parsed, Pipe, Ruleset};
