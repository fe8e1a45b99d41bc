//! The example captures in the repository are what their generator writes.

#[path = "../../examples/generate/dns.rs"]
mod dns;
#[path = "../../examples/generate/frames.rs"]
mod frames;
#[path = "../../examples/generate/office.rs"]
mod office;
#[path = "../../examples/generate/rules/mod.rs"]
mod rules;
#[path = "../../examples/generate/scene.rs"]
mod scene;
#[path = "../../examples/generate/tcp.rs"]
mod tcp;

use std::path::Path;

use towpath_port::{Burst, Port, Received, pcap};

const EXAMPLES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples");
const OFFICE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../examples/office.pcap");
const AGAIN: &str = "write it again: cargo run -p towpath-port --example generate -- examples";

fn assert_same(generated: &Path, kept: &Path) {
    let read =
        |path: &Path| std::fs::read(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    assert!(read(generated) == read(kept), "{} is not what its generator writes; {AGAIN}", kept.display());
}

#[test]
fn the_capture_is_what_the_generator_writes() {
    let path = concat!(env!("CARGO_TARGET_TMPDIR"), "/office.pcap");
    let mut file = pcap::Writer::create(path).expect("a new file");
    office::write(&mut file).expect("writing the story");
    file.finish().expect("writing the rest");
    assert_same(path.as_ref(), OFFICE.as_ref());
}

#[test]
fn the_scenes_of_the_rule_files_are_what_the_generator_writes() {
    let generated = Path::new(env!("CARGO_TARGET_TMPDIR")).join("rules");
    std::fs::create_dir_all(&generated).expect("a directory");
    rules::write(&generated).expect("writing the scenes");
    let kept = Path::new(EXAMPLES).join("rules");
    let mut compared = 0;
    for entry in std::fs::read_dir(&kept).expect("examples/rules") {
        let name = entry.expect("an entry").file_name();
        if name.to_string_lossy().ends_with(".ipfw") {
            for extension in ["pcap", "expected"] {
                assert_same(
                    &generated.join(&name).with_extension(extension),
                    &kept.join(&name).with_extension(extension),
                );
                compared += 1;
            }
        }
    }
    assert_eq!(compared, 12, "six rule files, each with a capture and what is expected");
}

#[test]
fn the_capture_is_a_minute_of_a_few_hundred_packets() {
    let mut reader = pcap::Reader::open(OFFICE).expect("a capture");
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
