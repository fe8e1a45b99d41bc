//! `towpath mux` with worker processes, including their deaths.

mod daemon;
mod end;
mod events;
mod hostile;
mod messages;
mod report;
mod start;
mod workers;
