//! Counters as Python objects and dicts. Their names are those of the tables of the crates that count.

use std::collections::BTreeMap;

use pyo3::exceptions::PyAttributeError;
use pyo3::prelude::*;
use towpath_metrics::{Metric, Metrics};

/// Counters by table and name.
pub(crate) type Tables = BTreeMap<&'static str, BTreeMap<&'static str, u64>>;

/// A snapshot of a multiplexor's counters; received = done + undone + queued + in_hand. _fields lists the names.
#[pyclass(name = "MuxCounters", eq, frozen)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct MuxCounters(pub(crate) towpath_mux::mux::Summary);

#[pymethods]
impl MuxCounters {
    #[classattr]
    #[pyo3(name = "_fields")]
    fn fields() -> Vec<&'static str> {
        names(towpath_mux::mux::Summary::TABLE)
    }

    fn __getattr__(&self, name: &str) -> PyResult<u64> {
        get(&self.0, name)
    }

    fn __dir__(&self) -> Vec<&'static str> {
        names(towpath_mux::mux::Summary::TABLE)
    }

    fn __repr__(&self) -> String {
        repr("MuxCounters", &self.0)
    }
}

/// A snapshot of a sender's counters. _fields lists the names.
#[pyclass(name = "SenderCounters", eq, frozen)]
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct SenderCounters(pub(crate) towpath_send::Summary);

#[pymethods]
impl SenderCounters {
    #[classattr]
    #[pyo3(name = "_fields")]
    fn fields() -> Vec<&'static str> {
        names(towpath_send::Summary::TABLE)
    }

    fn __getattr__(&self, name: &str) -> PyResult<u64> {
        get(&self.0, name)
    }

    fn __dir__(&self) -> Vec<&'static str> {
        names(towpath_send::Summary::TABLE)
    }

    fn __repr__(&self) -> String {
        repr("SenderCounters", &self.0)
    }
}

/// The counters of the tables.
pub(crate) fn tables(groups: &[&dyn Metrics]) -> Tables {
    let mut tables = Tables::new();
    for (metric, value) in groups.iter().flat_map(|group| group.each()) {
        tables.entry(metric.group).or_default().insert(metric.name, value);
    }
    tables
}

fn names(table: &[Metric]) -> Vec<&'static str> {
    table.iter().map(|metric| metric.name).collect()
}

fn get(counters: &dyn Metrics, name: &str) -> PyResult<u64> {
    let found = counters.each().find(|(metric, _)| metric.name == name);
    found.map(|(_, value)| value).ok_or_else(|| PyAttributeError::new_err(format!("no counter {name:?}")))
}

/// Formats counters as a Python repr: `MuxCounters(received=2, done=1)`.
fn repr(class: &str, counters: &dyn Metrics) -> String {
    let fields: Vec<String> =
        counters.each().map(|(metric, value)| format!("{}={value}", metric.name)).collect();
    format!("{class}({})", fields.join(", "))
}
