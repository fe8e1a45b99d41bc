//! Parses `set`: disable, enable, move and swap sets, or run a command on the rules of one set.

use super::super::diagnostic::{Fault, quoted};
use super::super::rule::RESERVED_SET;
use super::super::token::Token;
use super::Builder;
use crate::rules::cursor::{self, Cursor, Parse};

impl Builder {
    /// `set disable N ... enable N ...`, `set move [rule] N to N`, `set swap N N`, `set show`.
    pub(super) fn set(&mut self, cursor: &mut Cursor<'_, '_>, quiet: bool) -> Parse<()> {
        let token = cursor.need("\"disable\", \"enable\", \"move\", \"swap\" or \"show\"")?;
        if token.text.starts_with(|c: char| c.is_ascii_digit()) {
            return self.in_set(cursor, token, quiet);
        }
        match &*token.text {
            "show" => cursor.nothing_left("\"set show\""),
            "disable" | "enable" => {
                let mut disable = token.text == "disable";
                while cursor.peek().is_some() {
                    if cursor.eat("disable") {
                        disable = true;
                    } else if cursor.eat("enable") {
                        disable = false;
                    } else {
                        let at = cursor.here();
                        let set = cursor.number("set", 0, 31)?;
                        if disable && set == u32::from(RESERVED_SET) {
                            return Err(Fault::new(at, "set 31 cannot be disabled"));
                        }
                        if disable {
                            self.ruleset.disabled_sets |= 1 << set;
                        } else {
                            self.ruleset.disabled_sets &= !(1 << set);
                        }
                    }
                }
                Ok(())
            }
            "move" => {
                let one_rule = cursor.eat("rule");
                let from = cursor.number("set or rule", 0, u32::MAX)?;
                if !cursor.eat("to") {
                    return Err(Fault::new(cursor.here(), "\"to\" is missing"));
                }
                let to = cursor.number("set", 0, 31)? as u8;
                match u8::try_from(from) {
                    _ if one_rule => self.rules.move_rule(from, to),
                    Ok(from @ 0..=RESERVED_SET) => self.rules.move_set(from, to),
                    _ => {}
                }
                cursor.nothing_left("\"set move\"")
            }
            "swap" => {
                let (a, b) = (cursor.number("set", 0, 30)? as u8, cursor.number("set", 0, 30)? as u8);
                self.rules.swap_sets(a, b);
                cursor.nothing_left("\"set swap\"")
            }
            other => Err(Fault::new(token.position(), format!("unknown set command {}", quoted(other)))
                .did_you_mean(other, ["disable", "enable", "move", "swap", "show"])),
        }
    }

    /// `set N delete RULE...`, `set N flush`, `set N zero`, `set N resetlog`, `set N show`.
    fn in_set(&mut self, cursor: &mut Cursor<'_, '_>, token: &Token<'_>, quiet: bool) -> Parse<()> {
        let set = cursor::number(&token.text).filter(|set| *set <= 31);
        let set = set.ok_or_else(|| cursor::bad_number(token.position(), &token.text, "set", 0, 31))? as u8;
        let word = cursor.need("\"delete\", \"flush\", \"zero\", \"resetlog\" or \"show\"")?;
        match &*word.text {
            "delete" => self.delete_in_set(cursor, set, quiet),
            "flush" => {
                self.rules.delete_set(set);
                self.last = self.rules.last_number();
                cursor.nothing_left("\"set N flush\"")
            }
            // A new ruleset has no counters, and a rule file shows nothing.
            "zero" | "resetlog" | "show" => Ok(()),
            other => {
                Err(Fault::new(word.position(), format!("unknown command for one set {}", quoted(other)))
                    .did_you_mean(other, ["delete", "flush", "zero", "resetlog", "show"]))
            }
        }
    }

    fn delete_in_set(&mut self, cursor: &mut Cursor<'_, '_>, set: u8, quiet: bool) -> Parse<()> {
        let mut at = cursor.here();
        let mut number = cursor.number("rule number", 1, u32::MAX - 1)?;
        loop {
            if !self.rules.delete_in_set(number, set) {
                let message = format!("rule {number} does not exist in set {set}");
                self.note_absent(Fault::new(at, message), quiet);
            }
            if cursor.peek().is_none() {
                self.last = self.rules.last_number();
                return Ok(());
            }
            at = cursor.here();
            number = cursor.number("rule number", 1, u32::MAX - 1)?;
        }
    }
}
