//! Arguments and results of a lookup.

use std::num::NonZeroU16;

/// A flow name (`keep-state :web`), interned by the ruleset. [`Name::DEFAULT`] is `:default`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(pub NonZeroU16);

impl Name {
    /// `:default`, the name of the states of rules without a flow name.
    pub const DEFAULT: Self = Self(NonZeroU16::MIN);
}

/// The identity of a rule. Never reused: a rule that is added again under the number of a deleted one has another identity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleId(pub u32);

/// The direction of a packet in its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// The direction of the packet that made the state.
    Forward = 0,
    /// The opposite direction.
    Reverse = 1,
}

/// The result of a successful lookup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hit {
    /// The rule that made the state. Its action applies to the packet.
    pub rule: RuleId,
    /// The direction of the packet.
    pub direction: Direction,
}

/// Which states a lookup may find.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lookup {
    /// States of any name (`check-state :any`). If there are several, the newest.
    Any,
    /// States of this name only.
    Named(Name),
}
