//! Every file of the shared captures has the number of packets of the inventory. Damaged files cause no panic.

use std::io::Cursor;
use std::path::{Path, PathBuf};

use towpath_port::{Burst, Error, Port, Received, pcap};

fn captures() -> PathBuf {
    Path::new(towpath_testenv::shared!()).join("captures")
}

/// Number of complete packets, their bytes on the wire, and the warning.
fn read(mut reader: pcap::Reader) -> (u64, u64, Option<pcap::Warning>) {
    let mut burst = Burst::new(64);
    let (mut packets, mut bytes) = (0, 0);
    while reader.receive(&mut burst).expect("reading a file") == Received::Frames {
        packets += burst.len() as u64;
        bytes += burst.iter().map(|frame| u64::from(frame.wire_len)).sum::<u64>();
    }
    (packets, bytes, reader.warning().cloned())
}

struct Row {
    file: String,
    packets: u64,
    wire_bytes: u64,
    /// The reference reader found no damage.
    well_formed: bool,
}

fn inventory(captures: &Path) -> Vec<Row> {
    let text = std::fs::read_to_string(captures.join("INVENTORY.tsv")).expect("the inventory");
    let mut lines = text.lines().map(|line| line.split('\t').collect::<Vec<_>>());
    let header = lines.next().expect("a header");
    let column =
        |name: &str| header.iter().position(|column| *column == name).expect("a column of the inventory");
    let (file, packets, wire, rc) =
        (column("file"), column("packets"), column("wire_bytes"), column("tshark_rc"));
    let row = |cells: Vec<&str>| Row {
        file: cells[file].into(),
        packets: cells[packets].parse().expect("a number"),
        wire_bytes: cells[wire].parse().expect("a number"),
        well_formed: cells[rc] == "0",
    };
    lines.map(row).collect()
}

#[towpath_testenv::needs(shared)]
#[test]
fn every_capture_has_the_packets_of_the_inventory() {
    let captures = captures();
    let mut files = 0;
    for row in inventory(&captures) {
        let reader = match pcap::Reader::open(captures.join(&row.file)) {
            Ok(reader) => reader,
            Err(error) => {
                assert!(!row.well_formed, "{error}");
                continue;
            }
        };
        let (packets, bytes, warning) = read(reader);
        if row.well_formed {
            assert_eq!((packets, bytes), (row.packets, row.wire_bytes), "{}: packets, bytes", row.file);
            assert_eq!(warning, None, "{}", row.file);
        } else {
            println!("{}: {packets} packets of {}: {warning:?}", row.file, row.packets);
        }
        files += 1;
    }
    assert!(files > 0, "the inventory has files");
}

/// A capture that is truncated at any byte gives fewer packets, in order, and a warning unless it ends between two records.
#[towpath_testenv::needs(shared)]
#[test]
fn a_capture_cut_anywhere_gives_what_is_whole() {
    let captures = captures();
    #[rustfmt::skip]
    let files = [
        "linktype/gopacket__test_dns.pcap",          // microseconds
        "pcapng/pcpp__nanosecs.pcap",                // nanoseconds
        "linktype/pcpp__microsecs_big_endian.pcap",  // big-endian
        "app/rpc-mux/deepflow__nats-nrpc2.pcap",     // modified
        "pcapng/gopacket__le-test100.pcapng",        // several interfaces, simple packets, comments
        "pcapng/gopacket__be-test201.pcapng",        // several sections
        "pcapng/gopacket__le-test016.pcapng",        // options
    ];
    for file in files {
        let whole = std::fs::read(captures.join(file)).expect(file);
        let (all, _, warning) = read(pcap::Reader::new(file, Cursor::new(whole.clone())).expect(file));
        assert_eq!(warning, None, "{file}");
        let mut before = 0;
        for cut in 0..whole.len() {
            let reader = match pcap::Reader::new(file, Cursor::new(whole[..cut].to_vec())) {
                Ok(reader) => reader,
                Err(Error::NotACapture { .. }) => {
                    assert_eq!(before, 0, "{file} cut at {cut}");
                    continue;
                }
                Err(error) => panic!("{file} cut at {cut}: {error}"),
            };
            let (packets, _, warning) = read(reader);
            assert!((before..=all).contains(&packets), "{file} cut at {cut}: {packets} packets");
            before = packets;
            if let Some(warning) = warning {
                assert_eq!(warning.damage, pcap::Damage::Truncated, "{file} cut at {cut}");
                assert!(warning.offset < cut as u64, "{file} cut at {cut}: damage at {}", warning.offset);
                assert_eq!(warning.packets, packets);
            }
        }
    }
}

/// Reproducible random changes of bytes result in packets, a warning or an error, and never in more packets than the file can hold.
#[towpath_testenv::needs(shared)]
#[test]
fn changed_bytes_do_no_harm() {
    let captures = captures();
    let mut noise = 1u64;
    let mut next = move |below: usize| {
        noise = noise.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (noise >> 33) as usize % below
    };
    for row in inventory(&captures) {
        let whole = std::fs::read(captures.join(&row.file)).expect(&row.file);
        if whole.len() > 1 << 16 || row.file.ends_with(".gz") {
            continue;
        }
        for changes in [1, 4, 16, 64] {
            let mut changed = whole.clone();
            for _ in 0..changes {
                let at = next(changed.len());
                changed[at] = next(256) as u8;
            }
            match pcap::Reader::new(&row.file, Cursor::new(changed)) {
                Ok(reader) => {
                    let (packets, _, _) = read(reader);
                    // No record of any format is shorter than 16 bytes.
                    assert!(packets <= whole.len() as u64 / 16, "{}: {packets} packets", row.file);
                }
                Err(Error::NotACapture { .. }) => {}
                Err(error) => panic!("{error}"),
            }
        }
    }
}
