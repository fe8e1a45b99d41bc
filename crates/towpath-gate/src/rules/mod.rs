//! The rule language: text to rules and back, and the walk of a packet through them.
