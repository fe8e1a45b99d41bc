//! The RX payload may be in huge pages. Without free huge pages, it is in ordinary ones.
//!
//! This test has a binary of its own: channels of other tests want huge pages too and would take the reserved ones.

use std::fs;

use towpath_ring::{Config, Geometry};
use world::{pair, replace_frames};

#[path = "ring/world.rs"]
mod world;

const PAGES: &str = "/proc/sys/vm/nr_hugepages";

/// Huge pages of the system, reserved until this is dropped.
struct HugePages(String);

impl HugePages {
    fn reserve(more: u32) -> Self {
        let before = fs::read_to_string(PAGES).unwrap_or_default();
        let wanted = before.trim().parse::<u32>().unwrap_or(0) + more;
        let set = fs::write(PAGES, wanted.to_string());
        let has = fs::read_to_string(PAGES).unwrap_or_default().trim().parse() == Ok(wanted);
        let reserved = Self(before);
        assert!(set.is_ok() && has, "{PAGES} cannot be set to {wanted}");
        reserved
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = fs::write(PAGES, self.0.trim());
    }
}

fn config() -> Config {
    let rx = Geometry::with(4 << 20, 1024).expect("a geometry");
    Config { rx, huge_pages: true, deadline: None, ..Config::default() }
}

#[towpath_testenv::needs(hugepages)]
#[test]
fn huge_pages_are_taken_while_there_are_some() {
    // Without free huge pages, the same configuration works.
    if fs::read_to_string(PAGES).is_ok_and(|n| n.trim() == "0") {
        let (_world, mut channel, mut client) = pair(config());
        assert_eq!(channel.stats().huge_pages, 0);
        replace_frames(&mut channel, &mut client);
    }
    let _pages = HugePages::reserve(4);
    let (_world, mut channel, mut client) = pair(config());
    assert_eq!(channel.stats().huge_pages, 1);
    replace_frames(&mut channel, &mut client);
    drop((channel, client));
}
