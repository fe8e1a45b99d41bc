//! The Python module `towpath`. The docstrings and `docs/book/src/reference/python.md` document it; `towpath.pyi` declares its types.
//!
//! Each class wraps a client of `towpath-ring`, a handle of `towpath-mux` or a sender of `towpath-send`. A blocking call releases
//! the interpreter's lock. It checks for signals after each interrupted wait, or every 100 ms where a signal does not interrupt
//! the wait, so ^C works. Received data is copied once, into `bytes`. Data to send is read in place if it is `bytes`; a sender
//! reads every buffer in place (`buffer_export.rs`). An object may be used by one thread at a time; a concurrent call from another
//! thread raises RuntimeError.
#![deny(unsafe_code)]

mod asynchronous;
mod buffer_export;
mod counters;
mod data;
mod descriptor;
mod failure;
mod framing;
mod inspector;
mod mux;
mod mux_event;
mod sender;
mod wait;
mod worker;
mod worker_event;

/// Inspectors, workers, multiplexors and senders of Towpath, a network data plane in user space.
///
/// Failed system and protocol operations raise OSError with an errno(3) (PermissionError, FileNotFoundError, TimeoutError and
/// others). Using a closed object, or deciding a frame twice, raises ValueError.
// Objects are checked for concurrent use, and hold no state outside of themselves: the interpreter's lock is not needed.
#[pyo3::pymodule(name = "towpath", gil_used = false)]
mod towpath {
    #[pymodule_export]
    use crate::counters::{MuxCounters, SenderCounters};
    #[pymodule_export]
    use crate::framing::{Framing, FramingState};
    #[pymodule_export]
    use crate::inspector::{Frame, Inspector, Verdict};
    #[pymodule_export]
    use crate::mux::{Mux, Received};
    #[pymodule_export]
    use crate::mux_event::{Admit, ConnectionInfo, Connector, MuxEnded, MuxEvent};
    #[pymodule_export]
    use crate::sender::Sender;
    #[pymodule_export]
    use crate::worker::{Connection, Delivery, Message, Unsent, Worker};
    #[pymodule_export]
    use crate::worker_event::{Ended, Opened};
    use pyo3::prelude::*;
    use pyo3::types::PyModule;
    use towpath_mux::io::Flags;
    use towpath_ring::{Kind, group};

    #[pymodule_export]
    const PACKET: u16 = Kind::PACKET.0;
    #[pymodule_export]
    const MESSAGE: u16 = Kind::MESSAGE.0;
    #[pymodule_export]
    const EVENT: u16 = Kind::EVENT.0;
    #[pymodule_export]
    const DUMP: u16 = Kind::DUMP.0;
    #[pymodule_export]
    const DONE: u16 = Kind::DONE.0;
    #[pymodule_export]
    const ERROR: u16 = Kind::ERROR.0;
    #[pymodule_export]
    const GAP: u16 = Kind::GAP.0;

    #[pymodule_export]
    const GROUP_STATES: u32 = group::STATES;
    #[pymodule_export]
    const GROUP_EVENTS: u32 = group::EVENTS;
    #[pymodule_export]
    const GROUP_PACKETS: u32 = group::PACKETS;

    #[pymodule_export]
    const MSG_BATCH: u32 = Flags::BATCH.bits();

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
