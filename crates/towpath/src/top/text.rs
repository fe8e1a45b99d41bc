//! Text for a terminal: engine output without control characters, short numbers, wrapped lines.

use std::fmt::Write;

pub(super) use crate::output::printable as clean;

/// A number in at most 5 characters: `999`, `1.2k`, `12.3k`, `123k`, `1.2M`.
pub(super) fn short(number: f64) -> String {
    let mut rest = number.max(0.0);
    for unit in ["", "k", "M", "G", "T", "P", "E"] {
        // 999.5 would be rounded to four digits.
        if rest < 999.5 {
            return match unit.is_empty() {
                true if rest > 0.0 && rest < 9.95 && rest.fract() != 0.0 => format!("{rest:.1}"),
                true => format!("{rest:.0}"),
                false if rest < 99.95 => format!("{rest:.1}{unit}"),
                false => format!("{rest:.0}{unit}"),
            };
        }
        rest /= 1000.0;
    }
    ">1000E".to_owned()
}

/// Cuts the text into lines of at most `width` characters, at spaces where possible. At most `max` lines; the last one then ends in `...`.
pub(super) fn wrap(text: &str, width: usize, max: usize) -> Vec<String> {
    let (width, mut lines) = (width.max(4), Vec::new());
    let mut rest: Vec<char> = text.chars().collect();
    while rest.len() > width {
        if lines.len() + 1 >= max {
            rest.truncate(width - 3);
            rest.extend("...".chars());
            break;
        }
        let space = rest[..=width].iter().rposition(|c| *c == ' ').filter(|at| *at > width / 2);
        let line: String = rest.drain(..space.unwrap_or(width)).collect();
        lines.push(line);
        if space.is_some() {
            rest.remove(0);
        }
    }
    lines.push(rest.into_iter().collect());
    lines
}

/// The JSON text in ASCII: a terminal would obey the control characters from U+0080 on.
pub(super) fn ascii_json(json: &str) -> String {
    let mut text = String::with_capacity(json.len());
    for c in json.chars() {
        match c {
            ' '..='~' => text.push(c),
            _ => c.encode_utf16(&mut [0; 2]).iter().for_each(|unit| {
                write!(text, "\\u{unit:04x}").expect("writing to a String does not fail");
            }),
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use unicode_width::UnicodeWidthChar;

    use super::*;

    #[test]
    fn no_control_character_stays() {
        let rows = [
            ("lan0 -> wan", "lan0 -> wan"),
            ("a\u{1b}[2Jb\r\n", "a\\u{1b}[2Jb\\u{d}\\u{a}"),
            ("\u{9b}31m\u{7f}", "\\u{9b}31m\\u{7f}"),
            ("\u{202e}evil\u{200b}", "\\u{202e}evil\\u{200b}"),
            ("Büro", "Büro"),
            ("網", "\\u{7db2}"),
            ("e\u{301}", "e\\u{301}"),
        ];
        for (text, expected) in rows {
            assert_eq!(clean(text), expected);
        }
        for c in (0..=0x10_ffff).filter_map(char::from_u32) {
            let cleaned = clean(&c.to_string());
            assert!(cleaned.chars().all(|c| !c.is_control() && c.width() == Some(1)), "{c:?}");
            let json = ascii_json(&serde_json::json!([c.to_string()]).to_string());
            assert!(json.bytes().all(|byte| (b' '..=b'~').contains(&byte)), "{c:?}");
            assert_eq!(serde_json::from_str::<[String; 1]>(&json).unwrap(), [c.to_string()]);
        }
    }

    #[test]
    fn numbers_are_short() {
        let rows = [
            (0.0, "0"),
            (0.04, "0.0"),
            (1.0, "1"),
            (1.25, "1.2"),
            (9.99, "10"),
            (999.4, "999"),
            (999.6, "1.0k"),
            (12_345.0, "12.3k"),
            (99_960.0, "100k"),
            (1e9, "1.0G"),
            (u64::MAX as f64, "18.4E"),
        ];
        for (number, expected) in rows {
            assert_eq!(short(number), expected, "{number}");
            assert!(expected.len() <= 5);
        }
    }

    #[test]
    fn lines_are_wrapped_at_spaces() {
        assert_eq!(wrap("", 10, 3), [""]);
        assert_eq!(wrap("allow ip from any to any", 12, 9), ["allow ip", "from any to", "any"]);
        assert_eq!(wrap("0123456789abcdef", 10, 9), ["0123456789", "abcdef"]);
        assert_eq!(wrap("0123456789abcdef0123456789", 10, 2), ["0123456789", "abcdef0..."]);
        for width in 0..30 {
            let text = "deny tcp from 2001:db8::1 to any 22 // a comment";
            let lines = wrap(text, width, 99);
            assert!(lines.iter().all(|line| line.chars().count() <= width.max(4)));
            assert_eq!(lines.concat().replace(' ', ""), text.replace(' ', ""), "{width}");
        }
    }
}
