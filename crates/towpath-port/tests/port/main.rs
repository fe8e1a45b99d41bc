//! Captures: formats, round trips, and the captures of the examples.

mod captures;
mod examples;
mod formats;
mod roundtrip;
