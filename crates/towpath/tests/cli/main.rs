//! Commands of `towpath` that need no network interfaces.

mod bpf;
mod captures;
#[path = "../common/child.rs"]
mod child;
mod conversations;
mod ctl;
#[path = "../common/deserter.rs"]
mod deserter;
mod docs;
#[path = "../common/example.rs"]
mod example;
mod example_rules;
#[path = "../common/executable.rs"]
mod executable;
mod frame;
mod framing;
mod mux;
mod mux_send;
#[path = "../common/openssl.rs"]
mod openssl;
mod redis;
mod replay;
mod replay_captures;
mod replay_end;
mod replay_states;
mod states;
mod transfer;
mod yanet;
