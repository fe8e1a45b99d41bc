//! `towpath run`, mostly between interfaces in network namespaces.

mod bridged;
mod configs;
mod end;
mod guides;
mod leftovers;
mod limits;
mod live;
mod metrics;
#[path = "../common/openssl.rs"]
mod openssl;
mod privileges;
mod reload;
mod run;
mod services;
mod start;
mod stderr;
mod support;
mod top;
