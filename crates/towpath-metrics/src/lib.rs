//! Counters and gauges: the name, kind, unit, label and help text of each are stated once, where its value is kept.
//!
//! [`metrics!`] declares a struct of plain `u64` fields together with its table of [`Metric`] descriptions, from which text,
//! JSON and OpenMetrics are rendered. Counting is an addition to a field; the table is constant data.
//!
//! ```
//! use towpath_metrics::{Kind, Metrics, Unit, metrics};
//!
//! metrics! {
//!     /// Traffic of one port.
//!     pub struct Stats in "port" {
//!         /// Frames received.
//!         pub received: counter packets,
//!         /// Frames dropped because the receive ring was full.
//!         pub rx_full: counter packets as "dropped": "Frames dropped, by reason." (reason = "rx_full"),
//!         /// Frames in the transmit queue.
//!         pub queued: gauge packets,
//!     }
//! }
//!
//! let mut stats = Stats::default();
//! stats.rx_full += 2;
//!
//! let rx_full = &Stats::TABLE[1];
//! assert_eq!((rx_full.name, rx_full.kind, rx_full.unit), ("rx_full", Kind::Counter, Unit::Packets));
//! assert_eq!(rx_full.help, "Frames dropped because the receive ring was full.");
//! // The family and the sample in OpenMetrics text.
//! assert_eq!(rx_full.family(), "towpath_port_dropped_packets");
//! assert_eq!(rx_full.label, Some(("reason", "rx_full")));
//! assert_eq!(rx_full.family_help, Some("Frames dropped, by reason."));
//!
//! let values: Vec<(&str, u64)> = stats.values().map(|(metric, value)| (metric.name, value)).collect();
//! assert_eq!(values, [("received", 0), ("rx_full", 2), ("queued", 0)]);
//! ```
#![forbid(unsafe_code)]

/// Whether a value only grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Counts events since the start. Never decreases.
    Counter,
    /// A current value. May decrease.
    Gauge,
    /// A distribution of durations: a [`Histogram`].
    Histogram,
}

/// A distribution of durations in buckets whose bounds are powers of two: from 1,024 ns to 2^34 ns (17 s), and longer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; Self::BOUNDS + 1],
    sum: u64,
}

impl Histogram {
    /// Number of bounds.
    const BOUNDS: usize = 25;

    /// The smallest bound is 2 to this power.
    const SHIFT: u32 = 10;

    /// Adds a duration.
    #[inline]
    pub fn add(&mut self, nanoseconds: u64) {
        self.add_many(nanoseconds, 1);
    }

    /// Adds `count` durations of the same length.
    #[inline]
    pub fn add_many(&mut self, nanoseconds: u64, count: u64) {
        // The first bucket counts durations of at most 1,024 ns.
        let above = nanoseconds.saturating_sub(1) >> Self::SHIFT;
        let bucket = (u64::BITS - above.leading_zeros()) as usize;
        self.counts[bucket.min(Self::BOUNDS)] += count;
        self.sum = self.sum.wrapping_add(nanoseconds.wrapping_mul(count));
    }

    /// Adds every duration of `other`.
    pub fn merge(&mut self, other: &Self) {
        self.counts.iter_mut().zip(other.counts).for_each(|(sum, more)| *sum += more);
        self.sum = self.sum.wrapping_add(other.sum);
    }

    /// The upper bound of each bucket in nanoseconds, inclusive, with the number of its durations. The last bucket has no bound.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<u64>, u64)> {
        let bound = |at: usize| (at < Self::BOUNDS).then(|| 1 << (Self::SHIFT as usize + at));
        self.counts.into_iter().enumerate().map(move |(at, count)| (bound(at), count))
    }

    /// The number of durations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of the durations in nanoseconds.
    pub const fn sum(&self) -> u64 {
        self.sum
    }
}

/// The unit of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Network packets or link-layer frames.
    Packets,
    /// Bytes.
    Bytes,
    /// Frames of a shared-memory ring.
    Frames,
    /// Messages of a multiplexor.
    Messages,
    /// Transport connections.
    Connections,
    /// Dynamic states.
    States,
    /// Nanoseconds. OpenMetrics text has seconds.
    Nanoseconds,
    /// Other events, which the metric's name states: system calls, wake-ups, retries.
    Events,
}

impl Unit {
    /// The unit's word: `"packets"`, and `""` for [`Unit::Events`], whose names need no suffix.
    pub const fn word(self) -> &'static str {
        match self {
            Self::Packets => "packets",
            Self::Bytes => "bytes",
            Self::Frames => "frames",
            Self::Messages => "messages",
            Self::Connections => "connections",
            Self::States => "states",
            Self::Nanoseconds => "seconds",
            Self::Events => "",
        }
    }
}

/// One row of the table of counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Metric {
    /// The part of Towpath that counts: `"port"`, `"mux"`.
    pub group: &'static str,
    /// The field: the key in `--json` and the name in C and Python.
    pub name: &'static str,
    /// The name of the OpenMetrics family without prefix, group and unit. Rows that differ only in their label share one.
    pub stem: &'static str,
    /// Counter or gauge.
    pub kind: Kind,
    /// The unit of the value.
    pub unit: Unit,
    /// Name and value of the label that distinguishes this row within its family.
    pub label: Option<(&'static str, &'static str)>,
    /// Help text of one or two sentences.
    pub help: &'static str,
    /// The help text of the OpenMetrics family. One row of each family with labels states it.
    pub family_help: Option<&'static str>,
}

impl Metric {
    /// The name of the OpenMetrics family: `towpath_GROUP_STEM_UNIT`, without the `_total` that a counter's sample has. The unit is
    /// not repeated after a stem that ends in it.
    pub fn family(&self) -> String {
        let Self { group, stem, unit, .. } = self;
        let word = unit.word();
        match word.is_empty() || *stem == word || stem.strip_suffix(word).is_some_and(|s| s.ends_with('_')) {
            true => format!("towpath_{group}_{stem}"),
            false => format!("towpath_{group}_{stem}_{word}"),
        }
    }
}

/// A group of counters and gauges with their descriptions. [`metrics!`] implements it.
pub trait Metrics {
    /// The descriptions, in the order of the fields.
    fn table(&self) -> &'static [Metric];

    /// The value of the row `index` of [`table`](Self::table).
    ///
    /// # Panics
    ///
    /// Panics when the table has no such row.
    fn value(&self, index: usize) -> u64;

    /// Each description with its value, in the order of the fields.
    fn values(&self) -> Values<'_>
    where
        Self: Sized,
    {
        Values { of: self, index: 0 }
    }
}

impl dyn Metrics + '_ {
    /// Each description with its value, in the order of the fields.
    pub fn each(&self) -> Values<'_> {
        Values { of: self, index: 0 }
    }
}

/// Iterator over the rows of a group. See [`Metrics::values`].
#[derive(Clone)]
pub struct Values<'a> {
    of: &'a dyn Metrics,
    index: usize,
}

impl Iterator for Values<'_> {
    type Item = (&'static Metric, u64);

    fn next(&mut self) -> Option<Self::Item> {
        let metric = self.of.table().get(self.index)?;
        let value = self.of.value(self.index);
        self.index += 1;
        Some((metric, value))
    }
}

impl std::fmt::Debug for Values<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.clone().map(|(metric, value)| (metric.name, value))).finish()
    }
}

/// Declares a struct of `u64` counters and gauges and implements [`Metrics`] for it. See the crate's example.
///
/// A field is `name: KIND UNIT`, where KIND is `counter` or `gauge` and UNIT is a [`Unit`] in lower case. `as "STEM"` gives
/// the OpenMetrics family another name than the field's, and `(label = "value")` the label that distinguishes the field
/// within its family. `as "STEM": "HELP"`, in one row of a family with labels, gives the family its help text. The field's
/// documentation is its own help text. The struct gets `Clone`, `Copy`, `Debug`, `Default`,
/// `PartialEq`, `Eq`, the constant `TABLE`, `add`, which adds every field of another value, `set`, which sets a field by its name, and
/// `since`.
#[macro_export]
macro_rules! metrics {
    (
        $(#[$attr:meta])*
        $vis:vis struct $name:ident in $group:literal {
            $(
                $(#[doc = $help:literal])+
                $fvis:vis $field:ident: $kind:ident $unit:ident
                    $(as $stem:literal $(: $about:literal)?)? $(($label:ident = $value:literal))?
            ),+ $(,)?
        }
    ) => {
        $(#[$attr])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        $vis struct $name {
            $($(#[doc = $help])+ $fvis $field: u64,)+
        }

        impl $name {
            /// The descriptions of the fields, in their order.
            $vis const TABLE: &'static [$crate::Metric] = &[$($crate::Metric {
                group: $group,
                name: stringify!($field),
                stem: $crate::metrics!(@stem $field $($stem)?),
                kind: $crate::metrics!(@kind $kind),
                unit: $crate::metrics!(@unit $unit),
                label: $crate::metrics!(@label $($label $value)?),
                help: concat!($($help),+).trim_ascii(),
                family_help: $crate::metrics!(@about $($($about)?)?),
            }),+];

            /// Adds every field of `other`.
            #[allow(dead_code)]
            $vis fn add(&mut self, other: &Self) {
                $(self.$field += other.$field;)+
            }

            /// Sets the field `name`, if there is one.
            #[allow(dead_code)]
            $vis fn set(&mut self, name: &str, value: u64) {
                match name {
                    $(stringify!($field) => self.$field = value,)+
                    _ => {}
                }
            }

            /// The counters since the earlier value `before`. Gauges keep their current values.
            #[allow(dead_code)]
            $vis fn since(&self, before: &Self) -> Self {
                Self { $($field: $crate::metrics!(@since $kind self.$field, before.$field),)+ }
            }
        }

        impl $crate::Metrics for $name {
            fn table(&self) -> &'static [$crate::Metric] {
                Self::TABLE
            }

            fn value(&self, index: usize) -> u64 {
                [$(self.$field),+][index]
            }
        }
    };
    (@stem $field:ident $stem:literal) => { $stem };
    (@stem $field:ident) => { stringify!($field) };
    (@kind counter) => { $crate::Kind::Counter };
    (@kind gauge) => { $crate::Kind::Gauge };
    (@unit packets) => { $crate::Unit::Packets };
    (@unit bytes) => { $crate::Unit::Bytes };
    (@unit frames) => { $crate::Unit::Frames };
    (@unit messages) => { $crate::Unit::Messages };
    (@unit connections) => { $crate::Unit::Connections };
    (@unit states) => { $crate::Unit::States };
    (@unit nanoseconds) => { $crate::Unit::Nanoseconds };
    (@unit events) => { $crate::Unit::Events };
    (@since counter $now:expr, $before:expr) => { $now.saturating_sub($before) };
    (@since gauge $now:expr, $before:expr) => { $now };
    (@about) => { None };
    (@about $about:literal) => { Some($about) };
    (@label) => { None };
    (@label $label:ident $value:literal) => { Some((stringify!($label), $value)) };
}

#[cfg(test)]
mod tests {
    use super::*;

    metrics! {
        /// A group.
        struct Counts in "group" {
            /// Help in
            /// two lines.
            packets: counter packets,
            /// A stem that ends in its unit.
            lost: counter bytes as "lost_bytes" (reason = "full"),
            /// Without a unit.
            wakeups: counter events,
        }
    }

    #[test]
    fn family_has_the_unit_once() {
        let families: Vec<String> = Counts::TABLE.iter().map(Metric::family).collect();
        assert_eq!(families, ["towpath_group_packets", "towpath_group_lost_bytes", "towpath_group_wakeups"]);
        assert_eq!(Counts::TABLE[0].help, "Help in two lines.");
    }

    #[test]
    fn durations_are_in_the_bucket_of_their_bound() {
        let rows = [
            (0, Some(1024)),
            (1024, Some(1024)),
            (1025, Some(2048)),
            (2048, Some(2048)),
            (1 << 34, Some(1 << 34)),
            ((1 << 34) + 1, None),
            (1 << 60, None),
        ];
        let mut all = Histogram::default();
        for (duration, bound) in rows {
            let mut one = Histogram::default();
            one.add(duration);
            assert_eq!(
                one.buckets().find(|(_, count)| *count == 1).map(|(bound, _)| bound),
                Some(bound),
                "{duration}"
            );
            all.merge(&one);
        }
        all.add_many(3, 10);
        assert_eq!((all.count(), all.buckets().count()), (17, 26));
        assert_eq!(all.sum(), rows.iter().map(|(duration, _)| duration).sum::<u64>() + 30);
    }

    #[test]
    fn add_adds_every_field() {
        let mut counts = Counts { packets: 1, lost: 2, wakeups: 3 };
        counts.add(&Counts { packets: 10, lost: 20, wakeups: 30 });
        let dynamic: &dyn Metrics = &counts;
        assert_eq!(dynamic.each().map(|(_, value)| value).collect::<Vec<_>>(), [11, 22, 33]);
        assert_eq!(
            counts.since(&Counts { packets: 11, lost: 2, wakeups: 40 }),
            Counts { lost: 20, ..Counts::default() }
        );
    }
}
