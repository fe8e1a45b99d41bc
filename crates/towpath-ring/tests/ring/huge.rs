//! The RX payload is in huge pages only if it consists of them and they are wanted.

use crate::world::{assert_conserved, message, pair};
use towpath_ring::{Config, Consumer, Geometry, Meta, Verdict};

fn config(kib: u32, huge_pages: bool) -> Config {
    let rx = Geometry::with(kib << 10, 1024).expect("a geometry");
    Config { rx, huge_pages, deadline: None, ..Config::default() }
}

fn round(channel: &mut towpath_ring::Channel, client: &mut Consumer) {
    for n in 0..300 {
        let bytes = message(n, 20_000);
        channel.send(&bytes, &Meta::default()).expect("room");
        let frame = client.try_recv().expect("received").expect("a frame");
        assert!(client.payload(&frame) == bytes);
        client.replace(frame, &bytes).expect("replaced");
        channel.poll_verdicts(0, |_, d| assert!(d.verdict == Verdict::Replace(&bytes)));
    }
    assert_conserved(channel);
}

#[test]
fn only_areas_that_consist_of_them_and_only_if_wanted() {
    // The system may have free huge pages; this configuration must not use them.
    for (kib, wanted) in [(1024, true), (2048 + 64, true), (4096, false)] {
        let (_world, mut channel, mut client) = pair(config(kib, wanted));
        assert_eq!(channel.stats().huge_pages, 0);
        round(&mut channel, &mut client);
    }
}
