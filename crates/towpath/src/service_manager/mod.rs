//! The service manager that started this process, by the interfaces of systemd: sd_notify(3), sd_watchdog_enabled(3) and
//! sd_listen_fds(3).
//!
//! | file | what |
//! |---|---|
//! | `notify.rs` | messages to the manager: ready, reloading, stopping, the status, descriptors to keep |
//! | `watchdog.rs` | the thread that notifies the manager while all packet threads advance |
//! | `sockets.rs` | listening sockets that the manager has passed, and those that it keeps for the next process |
//!
//! Without a manager, each of them does nothing. The crate sd-notify would not do: its sends block, and it takes no ownership of the
//! descriptors that it finds.

mod notify;
mod sockets;
mod watchdog;

pub use notify::{RELOADED, notify, reloading};
pub use sockets::{Address, Passed, Sockets};
pub(crate) use watchdog::{Heartbeat, Watchdog};
