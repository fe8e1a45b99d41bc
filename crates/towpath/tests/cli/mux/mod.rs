//! `towpath mux` with worker processes, including their deaths.

mod daemon;
mod end;
mod events;
mod hostile;
mod messages;
mod parts;
mod remote;
mod report;
mod start;
mod tls;
mod upgrade;
mod upgrade_failures;
mod workers;
