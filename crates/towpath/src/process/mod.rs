//! Processes that the engine starts: inspectors, and workers of muxes.
//!
//! A started program is hostile until proven otherwise. Each one gets no capability, `no_new_privs`, no descriptor except standard
//! input (`/dev/null`), output and error, its own process group, and the user, environment, limits, cgroup and [`Sandbox`] of its [`Spec`].
//!
//! [`Starter`] starts this executable as `towpath confine` ([`confine()`]). That process reads the [`Spec`] from its standard input,
//! applies it to itself, and executes the program. Thus no code runs between fork(2) and execve(2), the engine needs no
//! unsafe code, and its memory is not copied (posix_spawn(3)).
//!
//! The program `towpath` is executed as `/proc/self/exe`, and a program with a directory is opened before the user changes: they start
//! also if their directory is closed to the user, such as a clone below /root.

mod child;
mod confine;
mod limit;
mod sandbox;
pub(crate) mod socket_directory;
mod spec;
mod starter;

pub use child::Child;
pub use confine::confine;
pub use limit::{LIMITS, Limit};
pub use sandbox::{Namespace, Sandbox};
pub use spec::{Identity, Program, Settings, Spec};
pub(crate) use starter::spawn;
pub use starter::{Local, Place, Remote, RemoteView, RemoteWorker, Started, Starter};
