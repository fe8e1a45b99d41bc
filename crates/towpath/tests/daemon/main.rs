//! `towpath run`, mostly between interfaces in network namespaces.

mod bridged;
mod configs;
#[path = "../common/deserter.rs"]
mod deserter;
mod end;
#[path = "../common/example.rs"]
mod example;
#[path = "../common/executable.rs"]
mod executable;
mod fleet;
mod flow_records;
mod guides;
mod leftovers;
mod limits;
mod live;
mod log;
mod metrics;
#[path = "../common/openssl.rs"]
mod openssl;
mod port_privileges;
mod privileges;
mod reload;
mod run;
mod sandbox;
mod services;
mod start;
mod stderr;
mod support;
mod systemd;
mod top;
