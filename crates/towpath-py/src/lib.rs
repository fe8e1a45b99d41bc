//! Towpath for Python: the module `towpath`. Its documentation is in the docstrings and in `docs/book/src/reference/python.md`; its types are in
//! `towpath.pyi`.
//!
//! What: each class has one of `towpath-ring`'s clients, a handle of `towpath-mux`'s, or a sender of `towpath-send`'s. Whatever may wait does so without the
//! interpreter's lock, and looks for signals when one came, or ten times a second where none ends the wait, so that ^C works. What arrives
//! is copied into `bytes` once; what is sent is read where Python has it, if that is `bytes`, and always by a sender (`loan.rs`). An object is used by one thread at a time:
//! another gets a RuntimeError.
#![deny(unsafe_code)]

mod data;
mod descriptor;
mod failure;
mod inspector;
mod loan;
mod mux;
mod sender;
mod wait;
mod worker;

/// A struct of counters as Python shows objects: `MuxCounters(received=2, done=1)`.
fn repr(of: &str, counters: &impl std::fmt::Debug) -> String {
    let fields = format!("{counters:?}").replace(": ", "=").replace(" { ", "(").replace(" }", ")");
    format!("{of}{fields}")
}

/// Inspectors, workers, multiplexors and senders of Towpath, a network data plane in user space.
///
/// What fails raises OSError with the number of errno(3) (PermissionError, FileNotFoundError, TimeoutError and so on), what is used
/// when it is closed or decided ValueError.
#[pyo3::pymodule(name = "towpath")]
mod towpath {
    #[pymodule_export]
    use crate::inspector::{Frame, Inspector, Verdict};
    #[pymodule_export]
    use crate::mux::{Counters as MuxCounters, Mux, Received};
    #[pymodule_export]
    use crate::sender::{Counters as SenderCounters, Sender};
    #[pymodule_export]
    use crate::worker::{Connection, Message, Worker};
    use pyo3::prelude::*;
    use pyo3::types::PyModule;
    use towpath_mux::io::Flags;
    use towpath_ring::Kind;

    #[pymodule_export]
    const PACKET: u16 = Kind::PACKET.0;
    #[pymodule_export]
    const MESSAGE: u16 = Kind::MESSAGE.0;
    #[pymodule_export]
    const EVENT: u16 = Kind::EVENT.0;
    #[pymodule_export]
    const GAP: u16 = Kind::GAP.0;

    #[pymodule_export]
    const MSG_BATCH: u32 = Flags::BATCH.bits();

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
