//! The RX payload is in huge pages only if it consists of them and they are wanted.

use crate::world::{pair, replace_frames};
use towpath_ring::{Config, Geometry};

fn config(kib: u32, huge_pages: bool) -> Config {
    let rx = Geometry::with(kib << 10, 1024).expect("a geometry");
    Config { rx, huge_pages, deadline: None, ..Config::default() }
}

#[test]
fn only_areas_that_consist_of_them_and_only_if_wanted() {
    // The system may have free huge pages; this configuration must not use them.
    for (kib, wanted) in [(1024, true), (2048 + 64, true), (4096, false)] {
        let (_world, mut channel, mut client) = pair(config(kib, wanted));
        assert_eq!(channel.stats().huge_pages, 0);
        replace_frames(&mut channel, &mut client);
    }
}
