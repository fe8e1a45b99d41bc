//! `[offload]`: flows whose packets the kernel forwards.

use towpath_port::driver;
use towpath_port::offload::Flows;

use super::Port;
use super::reader::Table;

/// Which flows are offloaded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Offload {
    /// Packets of a state after which its flow is offloaded.
    pub after: u64,
    /// The states of all rules; otherwise those of rules with `offload`.
    pub all: bool,
    /// The kernel drops the packets of flows that inspectors block, and of addresses that rules deny.
    pub deny: bool,
    /// Entries of the map.
    pub entries: u32,
    /// Flows go on until their lifetime ends if the engine is killed (`fail = "open"`).
    pub outlive: bool,
}

impl Offload {
    /// What the ports need.
    pub fn flows(&self) -> Flows {
        Flows { entries: self.entries, outlive: self.outlive, deny: self.deny }
    }
}

impl Default for Offload {
    fn default() -> Self {
        Self { after: 2, all: false, deny: false, entries: 65_536, outlive: true }
    }
}

pub(super) fn take<S>(top: &Table<'_, '_>, ports: &mut [(S, Port)]) -> Option<Offload> {
    let table = top.table("offload")?;
    let default = Offload::default();
    let entries = table.number("entries").map_or(default.entries, |entries| entries as u32);
    let offload = Offload {
        after: table.number("after").unwrap_or(default.after),
        all: table.word("rules") == Some("all"),
        deny: table.flag("deny").unwrap_or(false),
        entries,
        outlive: table.word("fail") != Some("closed"),
    };
    let mut any = false;
    for (_, port) in ports {
        any |= port.driver.set_flows(offload.flows());
    }
    if !any {
        let names =
            driver::names().map(|(name, _)| name).filter(|name| ["af_packet", "af_xdp"].contains(name));
        let hint = format!("use {} ports, or remove the table", names.collect::<Vec<_>>().join(" or "));
        top.wrong(&table.span, "no port of this configuration can offload flows".to_owned(), hint);
    }
    table.finish();
    Some(offload)
}
