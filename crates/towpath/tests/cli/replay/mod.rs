//! `towpath replay` as a user runs it: exit codes, the report, and inspectors that go wrong.

mod bench;
mod commands;
mod inspectors;
mod packets;
