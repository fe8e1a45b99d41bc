//! The example capture in the repository is what its generator writes.

#[path = "../examples/generate/frames.rs"]
mod frames;
#[path = "../examples/generate/office.rs"]
mod office;

use towpath_port::{Burst, Port, Received, pcap};

const KEPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/office.pcap");

#[test]
fn the_capture_is_what_the_generator_writes() {
    let path = concat!(env!("CARGO_TARGET_TMPDIR"), "/office.pcap");
    let mut file = pcap::Writer::create(path).expect("a new file");
    office::write(&mut file).expect("writing the story");
    file.finish().expect("writing the rest");
    let (generated, kept) = (std::fs::read(path).expect(path), std::fs::read(KEPT).expect(KEPT));
    let hint = "cargo run -p towpath-port --example generate -- examples";
    assert!(
        generated == kept,
        "examples/office.pcap is not what its generator writes; write it again: {hint}"
    );
}

#[test]
fn the_capture_is_a_minute_of_a_few_hundred_packets() {
    let mut reader = pcap::Reader::open(KEPT).expect("a capture");
    let mut burst = Burst::new(64);
    let mut times = Vec::new();
    while reader.receive(&mut burst).expect("reading") == Received::Frames {
        times.extend(burst.iter().map(|frame| frame.time_ns));
    }
    assert!(times.is_sorted_by(|earlier, later| earlier < later), "each packet is later than the one before");
    assert!((400..1_000).contains(&times.len()), "{} packets", times.len());
    let seconds = (times[times.len() - 1] - times[0]) / 1_000_000_000;
    assert!((50..70).contains(&seconds), "{seconds} seconds");
}
