//! Patterns for port names, like fnmatch(3) without flags: `*` is any text, `?` any character, `[a-c]` one of
//! these, `[!a-c]` any other character. An unclosed `[` is a literal.
//!
//! Only the last `*` is retried, so that the time is at most the product of both lengths.

/// Returns true if the pattern matches all of `name`.
pub(crate) fn matches(pattern: &str, name: &str) -> bool {
    let (pattern, name): (Vec<char>, Vec<char>) = (pattern.chars().collect(), name.chars().collect());
    let (mut p, mut n) = (0, 0);
    // Position after the last `*`, and the next character to try it with.
    let mut retry = None;
    loop {
        if pattern.get(p) == Some(&'*') {
            p += 1;
            retry = Some((p, n));
            continue;
        }
        match (pattern.get(p), name.get(n)) {
            (None, None) => return true,
            (Some(_), Some(c)) => {
                if let Some(length) = one(&pattern[p..], *c) {
                    p += length;
                    n += 1;
                    continue;
                }
            }
            _ => {}
        }
        let Some((behind, tried)) = retry.filter(|(_, tried)| *tried < name.len()) else { return false };
        retry = Some((behind, tried + 1));
        (p, n) = (behind, tried + 1);
    }
}

/// Returns the length of the first pattern element if it matches `c`.
fn one(pattern: &[char], c: char) -> Option<usize> {
    match pattern {
        ['?', ..] => Some(1),
        ['\\', escaped, ..] => (*escaped == c).then_some(2),
        ['[', rest @ ..] => match class(rest, c) {
            Some((holds, length)) => holds.then_some(length + 1),
            None => (c == '[').then_some(1),
        },
        [literal, ..] => (*literal == c).then_some(1),
        [] => None,
    }
}

/// Returns whether `c` is in the class, and the length of the class including `]`; `None` without a `]`.
fn class(pattern: &[char], c: char) -> Option<(bool, usize)> {
    let negated = matches!(pattern, ['!' | '^', ..]);
    let mut at = usize::from(negated);
    let mut holds = false;
    let mut first = true;
    loop {
        match pattern.get(at..)? {
            [']', ..] if !first => return Some((holds != negated, at + 1)),
            [lo, '-', hi, ..] if *hi != ']' => {
                holds |= (*lo..=*hi).contains(&c);
                at += 3;
            }
            [one, ..] => {
                holds |= *one == c;
                at += 1;
            }
            [] => return None,
        }
        first = false;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_of_names() {
        let rows = [
            ("em*", "em0 em10 em", "e vem0"),
            ("em?", "em0 em1", "em em10"),
            ("em[01]", "em0 em1", "em2 em em01"),
            ("em[!01]", "em2", "em0 em1 em"),
            ("em[0-2]", "em1", "em3 em-"),
            ("*.100", "em0.100 .100", "em0.101 em0.1000"),
            ("e*m*0", "em0 exxmyy0 emm0", "em1 e0"),
            ("em[", "em[", "em em0"),
            ("a[]]b", "a]b", "ab"),
            ("*", "em0 x", ""),
        ];
        for (pattern, yes, no) in rows {
            assert!(yes.split(' ').all(|name| matches(pattern, name)), "{pattern}: {yes}");
            assert!(
                no.split(' ').filter(|n| !n.is_empty()).all(|name| !matches(pattern, name)),
                "{pattern}: {no}"
            );
        }
    }
}
