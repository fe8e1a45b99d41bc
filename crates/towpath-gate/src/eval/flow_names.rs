//! The numbers of flow names.
//!
//! What: states have a number for their name. A name gets one when a rule, or a state of a snapshot, first has it, and keeps
//! it as long as one has. There are 65,535; when all are given away, those are taken back that nobody has any more.
//!
//! Invariant: two names never have one number at a time, as every `check-state :a` would find the states of `:b` then. So
//! who finds no number gets none: a snapshot's state stays out. For rules there always is one, as a file has fewer names than
//! there are numbers: what takes it away are then states of rules that are gone, and these go.

use std::collections::{HashMap, HashSet};
use std::num::NonZeroU16;

use crate::state::Name;

/// Numbers that there are.
const NUMBERS: usize = u16::MAX as usize;

/// The names that have numbers.
#[derive(Clone, Debug)]
pub(super) struct FlowNames {
    numbers: HashMap<Box<str>, Name>,
    /// The name of each number from 1 on; none for one that was taken back.
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

    /// The name's number, if it has one.
    pub(super) fn get(&self, name: &str) -> Option<Name> {
        if name == "default" { Some(Name::DEFAULT) } else { self.numbers.get(name).copied() }
    }

    /// The name of a number.
    pub(super) fn name(&self, name: Name) -> Option<&str> {
        self.names.get(place(name))?.as_deref()
    }

    /// Each name, by its number from 1 on.
    pub(super) fn all(&self) -> impl ExactSizeIterator<Item = &str> {
        self.names.iter().map(|name| name.as_deref().unwrap_or_default())
    }

    /// How many more can be given numbers.
    pub(super) fn room(&self) -> usize {
        NUMBERS - self.names.len() + self.free.len()
    }

    /// The name's number, which it gets now if it has none. None when all are given away.
    pub(super) fn give(&mut self, name: &str) -> Option<Name> {
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
        self.names[place(number)] = Some(name.into());
        self.numbers.insert(name.into(), number);
        Some(number)
    }

    /// Takes the numbers back that nobody has.
    pub(super) fn keep(&mut self, used: &HashSet<Name>) {
        let Self { numbers, names, free } = self;
        numbers.retain(|_, number| {
            let keep = used.contains(number);
            if !keep {
                names[place(*number)] = None;
                free.push(*number);
            }
            keep
        });
        // The order of a map is nobody's business.
        free.sort_unstable_by_key(|number| std::cmp::Reverse(number.0));
    }
}

/// Where the name of a number is kept.
fn place(name: Name) -> usize {
    usize::from(name.0.get()) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_one_names_at_a_time() {
        let mut names = FlowNames::new();
        let numbers: HashSet<Name> = (1..NUMBERS).map(|n| names.give(&format!("n{n}")).unwrap()).collect();
        assert_eq!((numbers.len(), names.room()), (NUMBERS - 1, 0));
        assert!(!numbers.contains(&Name::DEFAULT));
        assert_eq!(names.give("default"), Some(Name::DEFAULT));
        assert_eq!((names.give("more"), names.give("n7")), (None, names.get("n7")));
        let (seven, eight) = (names.get("n7").unwrap(), names.get("n8").unwrap());
        names.keep(&numbers.iter().copied().filter(|number| ![seven, eight].contains(number)).collect());
        assert_eq!((names.room(), names.get("n7"), names.name(seven)), (2, None, None));
        assert_eq!((names.give("more"), names.give("other")), (Some(seven), Some(eight)));
        assert_eq!(names.give("n7"), None);
        assert_eq!(names.name(seven), Some("more"));
    }
}
