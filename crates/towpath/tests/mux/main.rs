//! `towpath mux`, from the outside: workers that are processes, and what becomes of messages when they die.

mod end;
mod front;
mod messages;
mod start;
mod told;
mod workers;
