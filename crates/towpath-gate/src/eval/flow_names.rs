//! Numbers of flow names.
//!
//! A state stores the number of its flow name. A name gets a number when a rule or a restored state first uses it,
//! and keeps the number while one of them uses it. There are 65,535 numbers. When all are in use, unused ones are
//! reclaimed.
//!
//! Invariant: two names never share a number, because `check-state :a` would then find the states of `:b`. If no
//! number is free, a restored state is refused. Rules always get a number: a file has fewer names than there are
//! numbers, and states of deleted rules are removed to free theirs.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU16;

use crate::state::Name;

/// Number of numbers.
const MAX_NAMES: usize = u16::MAX as usize;

/// Names and their numbers.
#[derive(Clone, Debug)]
pub(super) struct FlowNames {
    numbers: HashMap<Box<str>, Name>,
    /// The name of each number, from 1; `None` if the number is free.
    names: Vec<Option<Box<str>>>,
    free: Vec<Name>,
}

impl FlowNames {
    pub(super) fn new() -> Self {
        Self { numbers: HashMap::new(), names: vec![Some("default".into())], free: Vec::new() }
    }

    pub(super) fn numbers(&self) -> &HashMap<Box<str>, Name> {
        &self.numbers
    }

    /// Returns the number of a name.
    pub(super) fn get(&self, name: &str) -> Option<Name> {
        if name == "default" { Some(Name::DEFAULT) } else { self.numbers.get(name).copied() }
    }

    /// Returns the name of a number.
    pub(super) fn name(&self, name: Name) -> Option<&str> {
        self.names.get(slot(name))?.as_deref()
    }

    /// Returns how many numbers are free.
    pub(super) fn free(&self) -> usize {
        MAX_NAMES - self.names.len() + self.free.len()
    }

    /// Returns the number of a name, and assigns one if it has none. `None` if all numbers are in use.
    pub(super) fn intern(&mut self, name: &str) -> Option<Name> {
        if let Some(number) = self.get(name) {
            return Some(number);
        }
        let number = match self.free.pop() {
            Some(number) => number,
            None => {
                let number = u16::try_from(self.names.len() + 1).ok().and_then(NonZeroU16::new)?;
                self.names.push(None);
                Name(number)
            }
        };
        self.names[slot(number)] = Some(name.into());
        self.numbers.insert(name.into(), number);
        Some(number)
    }

    /// Frees the numbers that are not in `used`.
    pub(super) fn retain(&mut self, used: &HashSet<Name>) {
        let Self { numbers, names, free } = self;
        numbers.retain(|_, number| {
            let keep = used.contains(number);
            if !keep {
                names[slot(*number)] = None;
                free.push(*number);
            }
            keep
        });
        // The order of a hash map is arbitrary.
        free.sort_unstable_by_key(|number| std::cmp::Reverse(number.0));
    }
}

/// Index of a number in `names`.
fn slot(name: Name) -> usize {
    usize::from(name.0.get()) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_number_has_one_name() {
        let mut names = FlowNames::new();
        let numbers: HashSet<Name> =
            (1..MAX_NAMES).map(|n| names.intern(&format!("n{n}")).unwrap()).collect();
        assert_eq!((numbers.len(), names.free()), (MAX_NAMES - 1, 0));
        assert!(!numbers.contains(&Name::DEFAULT));
        assert_eq!(names.intern("default"), Some(Name::DEFAULT));
        assert_eq!((names.intern("more"), names.intern("n7")), (None, names.get("n7")));
        let (seven, eight) = (names.get("n7").unwrap(), names.get("n8").unwrap());
        names.retain(&numbers.iter().copied().filter(|number| ![seven, eight].contains(number)).collect());
        assert_eq!((names.free(), names.get("n7"), names.name(seven)), (2, None, None));
        assert_eq!((names.intern("more"), names.intern("other")), (Some(seven), Some(eight)));
        assert_eq!(names.intern("n7"), None);
        assert_eq!(names.name(seven), Some("more"));
    }
}
