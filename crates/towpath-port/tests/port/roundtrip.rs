//! Written captures are read back, by this crate and by an independent reader. Random damage never causes a panic.

use std::io::{self, Cursor, Write};
use std::sync::{Arc, Mutex};

use pcap_parser::{Block, PcapBlockOwned, PcapError};
use proptest::prelude::*;
use towpath_port::{Burst, Error, Frame, LinkType, Port, Received, pcap};

#[derive(Clone, Debug, PartialEq)]
struct Owned {
    bytes: Vec<u8>,
    wire_len: u32,
    time_ns: u64,
    link: u16,
    interface: u32,
    comment: Option<String>,
}

impl Owned {
    fn frame(&self) -> Frame<'_> {
        let Self { bytes, wire_len, time_ns, link, interface, .. } = self;
        let link = LinkType(*link);
        Frame {
            bytes,
            wire_len: *wire_len,
            time_ns: *time_ns,
            link,
            interface: *interface,
            meta: Default::default(),
        }
    }
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic before").write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn write(frames: &[Owned], format: pcap::Format, resolution: pcap::Resolution) -> Result<Vec<u8>, Error> {
    let out = Shared::default();
    let mut writer = pcap::Writer::new("memory", out.clone(), format);
    writer.set_resolution(resolution);
    frames.iter().try_for_each(|frame| writer.write(frame.frame(), frame.comment.as_deref()))?;
    writer.finish()?;
    let bytes = std::mem::take(&mut *out.0.lock().expect("no panic before"));
    Ok(bytes)
}

/// Bytes, length on the wire, time, link type.
type Row = (Vec<u8>, u32, u64, u16);

fn read(file: Vec<u8>) -> Result<Vec<Row>, Error> {
    let mut reader = pcap::Reader::new("memory", Cursor::new(file))?;
    let mut burst = Burst::new(5);
    let mut rows = Vec::new();
    while reader.receive(&mut burst)? == Received::Frames {
        rows.extend(burst.iter().map(|f| (f.bytes.to_vec(), f.wire_len, f.time_ns, f.link.0)));
    }
    Ok(rows)
}

/// The same with pcap-parser, with comments.
fn read_independently(file: Vec<u8>) -> Vec<(Row, Option<String>)> {
    let mut reader = pcap_parser::create_reader(1 << 20, Cursor::new(file)).expect("a capture");
    let (mut rows, mut links, mut unit) = (Vec::new(), Vec::new(), 0);
    loop {
        let (used, block) = match reader.next() {
            Ok(block) => block,
            Err(PcapError::Incomplete(_)) => {
                reader.refill().expect("reading memory");
                continue;
            }
            Err(PcapError::Eof) => return rows,
            Err(error) => panic!("{error:?}"),
        };
        match block {
            PcapBlockOwned::LegacyHeader(header) => {
                links.push(header.network.0 as u16);
                unit = if header.is_nanosecond_precision() { 1 } else { 1_000 };
            }
            PcapBlockOwned::Legacy(record) => {
                let time = u64::from(record.ts_sec) * 1_000_000_000 + u64::from(record.ts_usec) * unit;
                rows.push(((record.data.to_vec(), record.origlen, time, links[0]), None));
            }
            PcapBlockOwned::NG(Block::InterfaceDescription(interface)) => {
                assert_eq!(interface.if_tsresol, 9);
                links.push(interface.linktype.0 as u16);
            }
            PcapBlockOwned::NG(Block::EnhancedPacket(packet)) => {
                let time = u64::from(packet.ts_high) << 32 | u64::from(packet.ts_low);
                let bytes = packet.data[..packet.caplen as usize].to_vec();
                let comment = packet.options.iter().find(|option| option.code.0 == 1);
                let comment = comment.map(|option| option.as_str().expect("UTF-8").to_owned());
                rows.push(((bytes, packet.origlen, time, links[packet.if_id as usize]), comment));
            }
            PcapBlockOwned::NG(_) => {}
        }
        reader.consume(used);
    }
}

fn frames(links: &'static [u16]) -> impl Strategy<Value = Vec<Owned>> {
    let time = 0..u64::from(u32::MAX) * 1_000_000_000;
    let bytes = prop::collection::vec(any::<u8>(), 0..200);
    let comment = prop::option::of("[a-zé]{0,9}");
    let frame = (bytes, 0u32..9_000, time, prop::sample::select(links), 0u32..3, comment);
    let frame = frame.prop_map(|(bytes, extra, time_ns, link, interface, comment)| {
        let wire_len = bytes.len() as u32 + extra;
        Owned { bytes, wire_len, time_ns, link, interface, comment }
    });
    prop::collection::vec(frame, 0..20)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn pcap_is_read_back(frames in frames(&[113]), nanos: bool) {
        let (resolution, unit) = match nanos {
            true => (pcap::Resolution::Nanos, 1),
            false => (pcap::Resolution::Micros, 1_000),
        };
        let file = write(&frames, pcap::Format::Pcap, resolution).expect("writing to memory");
        let expected: Vec<Row> = frames
            .into_iter()
            .map(|f| (f.bytes, f.wire_len, f.time_ns / unit * unit, f.link))
            .collect();
        let independent: Vec<Row> = read_independently(file.clone()).into_iter().map(|(row, _)| row).collect();
        prop_assert_eq!(&independent, &expected);
        prop_assert_eq!(read(file).expect("a capture"), expected);
    }

    #[test]
    fn pcapng_is_read_back(frames in frames(&[1, 101, 113, 276])) {
        let file = write(&frames, pcap::Format::PcapNg, pcap::Resolution::Micros).expect("writing to memory");
        let expected: Vec<(Row, Option<String>)> = frames
            .into_iter()
            .map(|f| ((f.bytes, f.wire_len, f.time_ns, f.link), f.comment))
            .collect();
        prop_assert_eq!(read_independently(file.clone()), expected.clone());
        let rows: Vec<Row> = expected.into_iter().map(|(row, _)| row).collect();
        prop_assert_eq!(read(file).expect("a capture"), rows);
    }

    /// Changed bytes or a truncation, in both formats, result in packets, a warning or an error, never in a panic.
    #[test]
    fn damage_never_panics(
        frames in frames(&[1]),
        ng: bool,
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        cut in any::<prop::sample::Index>(),
    ) {
        let format = if ng { pcap::Format::PcapNg } else { pcap::Format::Pcap };
        let mut file = write(&frames, format, pcap::Resolution::Nanos).expect("writing to memory");
        for (at, value) in changes {
            let at = at.index(file.len());
            file[at] = value;
        }
        file.truncate(cut.index(file.len() + 1));
        match read(file) {
            Ok(rows) => prop_assert!(rows.len() <= frames.len() + 40),
            Err(Error::NotACapture { .. }) => {}
            Err(error) => prop_assert!(false, "{}", error),
        }
    }

    #[test]
    fn noise_never_panics(ng: bool, noise in prop::collection::vec(any::<u8>(), 0..300)) {
        let format = if ng { pcap::Format::PcapNg } else { pcap::Format::Pcap };
        let mut file = write(&[], format, pcap::Resolution::Micros).expect("writing to memory");
        file.extend(noise);
        read(file).expect("a capture");
    }
}

#[test]
fn a_pcap_file_refuses_a_second_link_type_and_times_after_2106() {
    let frame =
        |link, time_ns| Owned { bytes: vec![1], wire_len: 1, time_ns, link, interface: 0, comment: None };
    let two = [frame(1, 0), frame(113, 0)];
    let error = write(&two, pcap::Format::Pcap, pcap::Resolution::Micros).expect_err("two link types");
    assert!(matches!(error, Error::LinkTypes { file: LinkType::ETHERNET, frame: LinkType::LINUX_SLL, .. }));
    let late = [frame(1, (1 << 32) * 1_000_000_000)];
    let error = write(&late, pcap::Format::Pcap, pcap::Resolution::Micros).expect_err("a time after 2106");
    assert!(matches!(error, Error::Time { .. }));
    for frames in [&two[..], &late[..]] {
        write(frames, pcap::Format::PcapNg, pcap::Resolution::Micros).expect("pcapng holds both");
    }
}

#[test]
fn a_comment_is_cut_between_characters() {
    let comment = Some("é".repeat(40_000));
    let frame = Owned { bytes: vec![1], wire_len: 1, time_ns: 0, link: 1, interface: 0, comment };
    let file = write(&[frame], pcap::Format::PcapNg, pcap::Resolution::Micros).expect("writing to memory");
    let rows = read_independently(file);
    assert_eq!(rows[0].1.as_ref().map(String::len), Some(65_534));
}

/// A full disk is reported at the latest when the file is finished.
#[test]
fn a_full_disk_is_an_error() {
    struct Full;
    impl Write for Full {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(io::ErrorKind::StorageFull.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    for format in [pcap::Format::Pcap, pcap::Format::PcapNg] {
        let error = pcap::Writer::new("out", Full, format).finish().expect_err("no space");
        assert!(matches!(error, Error::Io { .. }), "{error}");
    }
}

#[test]
fn the_name_chooses_the_format() {
    #[rustfmt::skip]
    let rows = [
        ("a.pcap",      pcap::Format::Pcap),
        ("a.pcapng",    pcap::Format::PcapNg),
        ("dir.x/A.PCAPNG", pcap::Format::PcapNg),
        ("a",           pcap::Format::Pcap),
        ("-",           pcap::Format::Pcap),
    ];
    for (path, format) in rows {
        assert_eq!(pcap::Format::of(path), format, "{path}");
    }
}

/// A frame with partial checksums or a large segment is written to the file as it would be on the wire.
#[test]
fn a_file_has_complete_checksums_and_segments() {
    use towpath_port::{Checksum, Gso, GsoKind, Meta, Offload};
    use towpath_wire::checksum;
    let udp = |payload: &[u8]| {
        let mut right = Vec::new();
        let builder =
            etherparse::PacketBuilder::ethernet2([2; 6], [4; 6]).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
        builder.udp(1, 2).write(&mut right, payload).unwrap();
        let mut unfinished = right.clone();
        // RFC 768: addresses, protocol, length.
        let fixed = checksum::sum(&[0, 17, right[38], right[39]], 0);
        let pseudo = checksum::sum(&right[26..34], fixed);
        unfinished[40..42].copy_from_slice(&pseudo.to_be_bytes());
        (right, unfinished)
    };
    let (right, unfinished) = udp(b"hello");
    let (_, several) = udp(&[7; 2500]);
    let partial = Checksum::Partial { start: 34, offset: 6 };
    let gso = Some(Gso { kind: GsoKind::Udp, size: 1000, ecn: false });
    let meta = |gso| Meta { offload: Offload { checksum: partial, gso }, ..Meta::default() };
    let frames = [(&unfinished, meta(None)), (&several, meta(gso)), (&right, Meta::default())];
    for format in [pcap::Format::Pcap, pcap::Format::PcapNg] {
        let out = Shared::default();
        let mut writer = pcap::Writer::new("memory", out.clone(), format);
        let mut frames =
            frames.iter().map(|(bytes, meta)| Frame { meta: *meta, ..Frame::new(bytes, LinkType::ETHERNET) });
        assert_eq!(writer.send(&mut frames).unwrap(), 3);
        writer.finish().unwrap();
        let file = std::mem::take(&mut *out.0.lock().unwrap());
        let mut reader = pcap::Reader::new("memory", Cursor::new(file)).unwrap();
        let mut burst = Burst::new(64);
        assert_eq!(reader.receive(&mut burst).unwrap(), Received::Frames);
        let lens: Vec<_> = burst.iter().map(|frame| (frame.bytes.len(), frame.wire_len)).collect();
        assert_eq!(lens, [(47, 47), (1042, 1042), (1042, 1042), (542, 542), (47, 47)]);
        assert_eq!((burst.frame(0).bytes, burst.frame(4).bytes), (&right[..], &right[..]));
    }
}
