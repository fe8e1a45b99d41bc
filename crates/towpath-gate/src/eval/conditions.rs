//! A checksum of what decides, besides the rules, which states they create: the disabled sets, the entries of the tables,
//! the zones and addresses of the ports, and the routes if a rule tests them. A snapshot has the checksum of the gate that
//! wrote it.

use std::net::IpAddr;

use super::gate::Gate;
use super::routes::Route;
use super::snapshot::CRC;
use crate::rules::option::{Term, Test};
use crate::rules::table::Listing;

impl Gate {
    /// The checksum. Tables and ports count by name, whatever their order. Takes time in proportion to the entries and routes.
    pub(super) fn conditions(&self) -> u32 {
        let mut digest = CRC.digest();
        digest.update(&self.disabled_sets.to_le_bytes());
        let mut names: Vec<&str> = self.table_names.keys().map(|name| &**name).collect();
        names.sort_unstable();
        for (name, table) in names.into_iter().filter_map(|name| Some((name, self.table(name)?))) {
            digest.update(format!("table {name} {}\n", table.type_text()).as_bytes());
            for (key, value) in Listing::new(table).iter_from(0) {
                let (key, value) = (table.show_key(&key), table.show_value(&value));
                digest.update(format!("{key} {value}\n").as_bytes());
            }
        }
        let ports = self.ports();
        let mut ids: Vec<_> = ports.ids().filter_map(|id| Some((ports.name(id)?, id))).collect();
        ids.sort_unstable();
        for (name, id) in ids {
            let mut addresses: Vec<IpAddr> = ports.addresses(id).to_vec();
            addresses.sort_unstable();
            // A port without zone and addresses decides only by its name, which each state records.
            if ports.zone(id) == 0 && addresses.is_empty() {
                continue;
            }
            digest.update(format!("port {name} {} {addresses:?}\n", ports.zone(id)).as_bytes());
        }
        let tests_routes =
            |term: &Term| matches!(term.test, Test::VerRevPath | Test::VerSrcReach | Test::AntiSpoof);
        if self.rules.iter().any(|(_, rule)| rule.body.blocks().flatten().any(tests_routes)) {
            for (net, Route { port, connected, .. }) in self.routes().iter() {
                let port = ports.name(port).unwrap_or("?");
                digest.update(format!("route {net} {port} {connected}\n").as_bytes());
            }
        }
        digest.finalize()
    }
}
