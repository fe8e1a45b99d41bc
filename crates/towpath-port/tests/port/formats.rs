//! Files made byte by byte: every form of pcap and pcapng, valid and damaged.

use std::io::{self, Cursor, Read, Write};

use towpath_port::{Burst, Error, LinkType, MAX_FRAME, Port, Received, pcap};

/// The fields of a file in one byte order.
#[derive(Clone, Copy)]
enum Order {
    Little,
    Big,
}

use Order::{Big, Little};

impl Order {
    fn u16(self, value: u16) -> [u8; 2] {
        match self {
            Little => value.to_le_bytes(),
            Big => value.to_be_bytes(),
        }
    }

    fn u32(self, value: u32) -> [u8; 4] {
        match self {
            Little => value.to_le_bytes(),
            Big => value.to_be_bytes(),
        }
    }

    fn words(self, words: &[u32]) -> Vec<u8> {
        words.iter().flat_map(|word| self.u32(*word)).collect()
    }

    /// A pcap file header.
    fn pcap(self, magic: u32, link: u32) -> Vec<u8> {
        let version = [self.u16(2), self.u16(4)].concat();
        [self.u32(magic).to_vec(), version, self.words(&[0, 0, 65_535, link])].concat()
    }

    /// A pcapng block.
    fn block(self, kind: u32, body: &[u8]) -> Vec<u8> {
        let padding = vec![0; body.len().next_multiple_of(4) - body.len()];
        let len = (12 + body.len() + padding.len()) as u32;
        [self.words(&[kind, len]), body.to_vec(), padding, self.u32(len).to_vec()].concat()
    }

    fn section(self) -> Vec<u8> {
        let version = [self.u16(1), self.u16(0)].concat();
        self.block(0x0a0d_0d0a, &[self.words(&[0x1a2b_3c4d]), version, self.words(&[u32::MAX; 2])].concat())
    }

    fn interface(self, link: u16, snaplen: u32, options: &[(u16, &[u8])]) -> Vec<u8> {
        let head = [self.u16(link).to_vec(), vec![0; 2], self.u32(snaplen).to_vec()].concat();
        self.block(1, &[head, self.options(options)].concat())
    }

    fn options(self, options: &[(u16, &[u8])]) -> Vec<u8> {
        let option = |&(code, value): &(u16, &[u8])| {
            let padding = vec![0; value.len().next_multiple_of(4) - value.len()];
            [&self.u16(code)[..], &self.u16(value.len() as u16), value, &padding].concat()
        };
        options.iter().flat_map(option).collect()
    }

    fn enhanced(self, interface: u32, ticks: u64, bytes: &[u8], wire_len: u32) -> Vec<u8> {
        let head = [interface, (ticks >> 32) as u32, ticks as u32, bytes.len() as u32, wire_len];
        self.block(6, &[self.words(&head), bytes.to_vec()].concat())
    }
}

/// One received frame: bytes, length on the wire, time, link type, interface.
type Row = (Vec<u8>, u32, u64, u16, u32);

fn read(file: Vec<u8>) -> (Vec<Row>, Option<pcap::Warning>) {
    read_from(Cursor::new(file))
}

fn read_from(file: impl Read + Send + 'static) -> (Vec<Row>, Option<pcap::Warning>) {
    let mut reader = pcap::Reader::new("memory", file).expect("a capture");
    let mut burst = Burst::new(3);
    let mut rows = Vec::new();
    while reader.receive(&mut burst).expect("reading memory") == Received::Frames {
        let row = |frame: towpath_port::Frame<'_>| {
            (frame.bytes.to_vec(), frame.wire_len, frame.time_ns, frame.link.0, frame.interface)
        };
        rows.extend(burst.iter().map(row));
    }
    assert_eq!(reader.packets(), rows.len() as u64);
    (rows, reader.warning().cloned())
}

fn corrupt(warning: Option<pcap::Warning>) -> (u64, String) {
    match warning {
        Some(pcap::Warning { offset, damage: pcap::Damage::Corrupt(reason), .. }) => (offset, reason),
        other => panic!("expected a damaged file, got {other:?}"),
    }
}

#[test]
fn classic_magics_and_orders() {
    for order in [Little, Big] {
        #[rustfmt::skip]
        let rows = [
            // magic, extra bytes in the record header, time
            (0xa1b2_c3d4, 0, 7_000_005_000),
            (0xa1b2_3c4d, 0, 7_000_000_005),
            (0xa1b2_cd34, 8, 7_000_005_000),
        ];
        for (magic, extra, time) in rows {
            // Bits above the link type describe the frame check sequence.
            let header = order.pcap(magic, 0x5400_0071);
            let record = [order.words(&[7, 5, 3, 60]), vec![0; extra], b"abc".to_vec()].concat();
            let (rows, warning) = read([header, record].concat());
            assert_eq!((rows, warning), (vec![(b"abc".to_vec(), 60, time, 113, 0)], None), "{magic:x}");
        }
    }
}

/// Before version 2.3, and in some files of 2.3, the wire length precedes the captured length.
#[test]
fn old_versions_have_their_lengths_the_other_way_around() {
    #[rustfmt::skip]
    let rows = [
        // version, the two lengths, length on the wire
        ((2, 4),    [3, 60], 60),
        ((2, 3),    [3, 60], 60),
        ((2, 3),    [60, 3], 60),
        ((2, 2),    [60, 3], 60),
        ((2, 0),    [3, 3],  3),
        ((543, 0),  [60, 3], 60),
    ];
    for order in [Little, Big] {
        for ((major, minor), lengths, wire_len) in rows {
            let mut header = order.pcap(0xa1b2_c3d4, 1);
            header[4..8].copy_from_slice(&[order.u16(major), order.u16(minor)].concat());
            let record = [order.words(&[7, 5]), order.words(&lengths), b"abc".to_vec()].concat();
            let (rows, warning) = read([header, record.repeat(2)].concat());
            let row = (b"abc".to_vec(), wire_len, 7_000_005_000, 1, 0);
            assert_eq!((rows, warning), (vec![row; 2], None), "{major}.{minor} {lengths:?}");
        }
    }
}

/// A captured length above the wire length: the packet ends at the wire length.
#[test]
fn bytes_beyond_the_wire_are_no_part_of_a_packet() {
    let classic =
        [Little.pcap(0xa1b2_c3d4, 1), [&Little.words(&[0, 0, 5, 3])[..], b"abcde"].concat()].concat();
    let ng = [Little.section(), Little.interface(1, 0, &[]), Little.enhanced(0, 0, b"abcde", 3)].concat();
    for file in [classic, ng] {
        assert_eq!(read(file), (vec![(b"abc".to_vec(), 3, 0, 1, 0)], None));
    }
}

#[test]
fn pcapng_blocks_in_both_orders() {
    for order in [Little, Big] {
        let offset_10s = match order {
            Little => 10u64.to_le_bytes(),
            Big => 10u64.to_be_bytes(),
        };
        let obsolete = [&order.u16(1)[..], &order.u16(0xffff), &order.words(&[0, 9, 2, 2]), b"pb"].concat();
        let file = [
            order.section(),
            order.interface(1, 0, &[]),
            order.interface(101, 4, &[(2, b"eth0"), (9, &[9]), (14, &offset_10s), (0, b"")]),
            order.interface(228, 0, &[(9, &[0x80 | 1])]),
            order.enhanced(0, 5, b"first", 60),
            order.block(0x0bad, b"custom block, skipped!"),
            order.block(0xa, &[0xff; 2_000]), // decryption secrets
            order.block(4, b"no name resolution records"),
            order.block(2, &obsolete),
            order.enhanced(2, 3, b"", 0),
            order.block(3, &[&order.u32(6)[..], b"simple"].concat()),
            // A second section begins with no interfaces.
            order.section(),
            order.interface(276, 4, &[]),
            order.block(3, &[&order.u32(6)[..], b"simple"].concat()),
        ]
        .concat();
        let (rows, warning) = read(file);
        #[rustfmt::skip]
        let expected: Vec<Row> = vec![
            (b"first".into(),  60, 5_000,          1,   0),
            (b"pb".into(),     2,  10_000_000_009, 101, 1),
            (b"".into(),       0,  1_500_000_000,  228, 2),
            (b"simple".into(), 6,  1_500_000_000,  1,   0),
            (b"simp".into(),   6,  1_500_000_000,  276, 3),
        ];
        assert_eq!((rows, warning), (expected, None));
    }
}

#[test]
fn sections_may_differ_in_byte_order() {
    let part =
        |order: Order| [order.section(), order.interface(1, 0, &[]), order.enhanced(0, 1, b"x", 1)].concat();
    let (rows, warning) = read([part(Little), part(Big), part(Little)].concat());
    let interfaces: Vec<_> = rows.iter().map(|row| row.4).collect();
    assert_eq!((interfaces, warning), (vec![0, 1, 2], None));
}

/// Each damage stops the file where the damaged block begins; the packet before it is kept.
#[test]
fn pcapng_damage() {
    let good = [Little.section(), Little.interface(1, 0, &[]), Little.enhanced(0, 1, b"good", 4)].concat();
    let lying_end = [&Little.words(&[6, 36, 0, 0, 0, 0, 0, 0])[..], &Little.words(&[40])].concat();
    #[rustfmt::skip]
    let rows: [(Vec<u8>, &str); 12] = [
        (Little.words(&[6, 4, 0]),                              "says it has 4 bytes"),
        (Little.words(&[6, 0xffff_fff0, 0]),                    "says it has 4294967280 bytes"),
        (Little.words(&[6, 36, 0, 0, 0, 0, 0, 0, 35]),          "at its end 35"),
        (lying_end,                                             "at its end 40"),
        (Little.block(6, b"short"),                             "enhanced packet block of 20 bytes"),
        (Little.block(2, b"short"),                             "packet block of 20 bytes"),
        (Little.block(3, b""),                                  "simple packet block of 12 bytes"),
        (Little.enhanced(1, 0, b"x", 1),                        "interface 1, which was not described"),
        (Little.block(6, &Little.words(&[0, 0, 0, 5, 5, 0])),   "5 bytes, its block 36"),
        (Little.block(6, &Little.words(&[0, 0, 0, u32::MAX, 5])), "4294967295 bytes"),
        (Little.block(0x0a0d_0d0a, &[0; 16]),                   "without the byte-order magic"),
        ([Little.section(), Little.block(3, b"    ")].concat(), "no interface was described"),
    ];
    for (damage, reason) in rows {
        let (rows, warning) = read([good.clone(), damage, good.clone()].concat());
        assert_eq!(rows.len(), 1, "{reason}");
        let (offset, said) = corrupt(warning);
        assert!(said.contains(reason), "{said}, not {reason}");
        assert!(offset >= good.len() as u64, "{reason}: offset {offset}");
    }
}

#[test]
fn a_classic_record_too_long_is_damage_and_not_memory() {
    let header = Little.pcap(0xa1b2_c3d4, 1);
    let record = Little.words(&[0, 0, MAX_FRAME as u32 + 1, 60]);
    let (rows, warning) = read([header.clone(), Little.words(&[0, 0, 0, 0]), record].concat());
    assert_eq!(rows.len(), 1);
    let (offset, reason) = corrupt(warning);
    assert_eq!(offset, 40);
    assert!(reason.contains("262145"), "{reason}");

    let longest = [header, Little.words(&[0, 0, MAX_FRAME as u32, 1 << 20]), vec![1; MAX_FRAME]].concat();
    let (rows, warning) = read(longest);
    assert_eq!((rows[0].0.len(), rows[0].1, warning), (MAX_FRAME, 1 << 20, None));
}

/// A skipped block may be longer than the reader's buffer.
#[test]
fn a_long_block_is_skipped_in_the_stream() {
    const LEN: u32 = 64 << 20;
    let head = [Little.section(), Little.interface(1, 0, &[]), Little.words(&[0xa, LEN])].concat();
    let tail = [Little.u32(LEN).to_vec(), Little.enhanced(0, 1, b"after", 5)].concat();
    let body = u64::from(LEN) - 12;
    let (rows, warning) =
        read_from(Cursor::new(head.clone()).chain(io::repeat(0).take(body)).chain(Cursor::new(tail)));
    assert_eq!((rows.len(), warning), (1, None));

    let (rows, warning) = read_from(Cursor::new(head).chain(io::repeat(0).take(body / 2)));
    assert_eq!((rows.len(), warning.expect("a warning").damage), (0, pcap::Damage::Truncated));
}

#[test]
fn errors_of_other_files_describe_them() {
    #[rustfmt::skip]
    let rows: [(&[u8], &str); 15] = [
        (b"",                                     "it is empty"),
        (b"abc",                                  "too short"),
        (b"#!/bin/sh\necho not a capture\n",      "it begins with the bytes [23, 21, 2f, 62]"),
        (&[0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0],   "pcap header is cut short"),
        (&[0x0a, 0x0d, 0x0d, 0x0a],               "section header is cut short"),
        (&[0x0a, 0x0d, 0x0d, 0x0a, 28, 0, 0, 0, 1, 2, 3, 4], "byte-order magic"),
        (&[0x28, 0xb5, 0x2f, 0xfd, 4],            "it is compressed with zstd; `zstd -dc memory | ... -`"),
        (&[4, 0x22, 0x4d, 0x18, 0x64],            "`lz4 -dc memory |"),
        (&[0xfd, b'7', b'z', b'X', b'Z', 0],      "`xz -dc memory |"),
        (b"BZh91AY&SY",                           "`bzip2 -dc memory |"),
        (b"snoop\0\0\0\0\0\0\x02",                "it is a snoop file; `editcap memory FILE`"),
        (&[0xac, 0x01, 0x00, 0x1c, 1, 0, 0, 0],   "it is an IXIA lcap file"),
        (&[0x1c, 0x00, 0x01, 0xac, 1, 0, 0, 0],   "it is an IXIA lcap file"),
        (&[0x1f, 0x8b, 8, 0],                     "does not decompress"),
        (&[0x1f, 0x8b, 0xff, 0xff, 0, 0, 0, 0, 0, 0, 0, 0], "does not decompress"),
    ];
    for (file, expected) in rows {
        match pcap::Reader::new("memory", Cursor::new(file)) {
            Err(Error::NotACapture { reason, .. }) => {
                assert!(reason.contains(expected), "{reason}, not {expected}")
            }
            other => panic!("expected {expected}, got {other:?}"),
        }
    }
    let missing = pcap::Reader::open("no/such/file.pcap");
    assert!(matches!(missing, Err(Error::Open { .. })), "{missing:?}");
}

#[test]
fn a_header_alone_is_a_capture_without_packets() {
    assert_eq!(read(Big.pcap(0xa1b2_c3d4, 1)), (vec![], None));
    assert_eq!(read(Big.section()), (vec![], None));
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).expect("writing to memory");
    encoder.finish().expect("writing to memory")
}

#[test]
fn gzip_whole_in_parts_cut_and_damaged() {
    let file =
        [Little.pcap(0xa1b2_c3d4, 1), [&Little.words(&[1, 2, 500, 500])[..], &[7; 500]].concat().repeat(90)];
    let file = file.concat();
    let (plain, _) = read(file.clone());
    assert_eq!(plain.len(), 90);
    assert_eq!(read(gzip(&file)), (plain.clone(), None));

    let members = [gzip(&file[..1_000]), gzip(&file[1_000..])].concat();
    assert_eq!(read(members), (plain.clone(), None));

    // Zeros after the file: padding to a block size. Another member may follow them; anything else is damage.
    for zeros in [1, 512, 100_000] {
        let padded = [gzip(&file), vec![0; zeros]].concat();
        assert_eq!(read(padded.clone()), (plain.clone(), None), "{zeros} zeros");
        let (rows, warning) = read([padded, b"x".to_vec()].concat());
        assert_eq!(rows, plain, "{zeros} zeros and a byte");
        assert!(warning.is_some(), "{zeros} zeros and a byte");
    }
    let parts = [gzip(&file[..1_000]), vec![0; 9], gzip(&file[1_000..])].concat();
    assert_eq!(read(parts), (plain.clone(), None));

    // Random bytes, so that half of the compressed file contains about half of the packets.
    let mut noise = 1u32;
    let random: Vec<u8> = std::iter::repeat_with(|| {
        noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (noise >> 24) as u8
    })
    .take(500 * 90)
    .collect();
    let records = random.chunks(500).flat_map(|bytes| [&Little.words(&[1, 2, 500, 500])[..], bytes].concat());
    let compressed = gzip(&Little.pcap(0xa1b2_c3d4, 1).into_iter().chain(records).collect::<Vec<_>>());
    let (rows, warning) = read(compressed[..compressed.len() / 2].to_vec());
    assert!((20..70).contains(&rows.len()), "{} packets of half a file", rows.len());
    assert_eq!(warning.expect("a warning").damage, pcap::Damage::Truncated);

    let mut damaged = compressed;
    let end = damaged.len() - 8;
    damaged[end] ^= 1; // the checksum
    let (rows, warning) = read(damaged);
    assert_eq!(rows.len(), 90);
    assert!(corrupt(warning).1.contains("gzip"));
}

/// A pipe that delivers one byte at a time, and one that fails.
#[test]
fn slow_and_failing_streams() {
    struct Slow(Cursor<Vec<u8>>);
    impl Read for Slow {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            let len = into.len().min(1);
            self.0.read(&mut into[..len])
        }
    }
    let file =
        [Little.section(), Little.interface(1, 0, &[]), Little.enhanced(0, 1, b"x", 1).repeat(5)].concat();
    let (rows, warning) = read_from(Slow(Cursor::new(file.clone())));
    assert_eq!((rows.len(), warning), (5, None));

    struct Fails;
    impl Read for Fails {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::Error::other("the disk is gone"))
        }
    }
    let mut reader = pcap::Reader::new("memory", Cursor::new(file).chain(Fails)).expect("a capture");
    let mut burst = Burst::new(64);
    assert_eq!(reader.receive(&mut burst).expect("what was read before"), Received::Frames);
    assert_eq!(burst.len(), 5);
    let error = reader.receive(&mut burst).expect_err("the failure");
    assert_eq!(error.to_string(), "memory: the disk is gone");
}

#[test]
fn warnings_and_errors_read_well() {
    let whole =
        [Little.pcap(0xa1b2_c3d4, 1), Little.words(&[0, 0, 4, 4, 0]), Little.words(&[0, 0, 4])].concat();
    let (_, warning) = read(whole);
    let text = "memory: ends in the middle of a record that begins at byte 44; the packet before it is used";
    assert_eq!(warning.expect("a warning").to_string(), text);
    let error =
        Error::LinkTypes { name: "out.pcap".into(), file: LinkType::ETHERNET, frame: LinkType::LINUX_SLL };
    assert!(error.to_string().contains("ETHERNET (1)"), "{error}");
    assert!(error.to_string().contains(".pcapng"), "{error}");
}

#[test]
fn progress_ends_at_the_size_of_the_file() {
    let path = concat!(env!("CARGO_TARGET_TMPDIR"), "/progress.pcap.gz");
    let file = [Little.pcap(0xa1b2_c3d4, 1), Little.words(&[0, 0, 4, 4, 0]).repeat(1_000)].concat();
    std::fs::write(path, gzip(&file)).expect("a file");
    let mut reader = pcap::Reader::open(path).expect("a capture");
    let mut burst = Burst::new(64);
    while reader.receive(&mut burst).expect("reading") == Received::Frames {}
    let progress = reader.progress();
    assert_eq!(Some(progress.taken), progress.total);
    assert_eq!(reader.packets(), 1_000);
}
