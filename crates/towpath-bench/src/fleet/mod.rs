//! Groups of gates: replication in this process, and connections through two engines of which one is killed. Every measurement starts a
//! nats-server(1) of its own on loopback.

pub(crate) mod connections;
pub(crate) mod member;
pub(crate) mod packets;
pub(crate) mod remote;
pub(crate) mod server;
pub(crate) mod tables;
pub(crate) mod take_over;
