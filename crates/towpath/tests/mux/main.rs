//! `towpath mux` with worker processes, including their deaths.

mod end;
mod front;
mod messages;
mod start;
mod told;
mod workers;
