//! An engine and its clients, within a process and between processes.

mod bind;
mod conformance;
mod death;
mod hand_over;
mod huge;
mod lanes;
mod loss_record;
mod membarrier;
mod oneshot;
mod permission;
mod property;
mod reservation;
mod two_processes;
mod world;
