//! Generated traffic: flows, sizes, protocols and a rate from a description; reproducible by seed.
//!
//! For benchmarks and demonstrations. Each flow is one direction of a conversation over IPv4 in Ethernet, with correct checksums. A TCP flow
//! begins with a SYN and continues with data in sequence. The next flow and the frame length are random.

mod description;

use towpath_wire::checksum;

pub use description::{Description, DescriptionError, Protocol};

use crate::{Burst, Caps, Error, Frame, LinkType, Meta, Offload, Port, Received, Stats, TxDrop, clock};

/// Length of the Ethernet, IPv4 and TCP headers.
const HEADERS: usize = 14 + 20 + 20;
/// 2023-11-14 22:13:20 UTC: start time of unpaced traffic.
const EPOCH_NS: u64 = 1_700_000_000_000_000_000;

/// A port that generates frames.
///
/// ```
/// use towpath_port::{Burst, Port, Received, generator::Generator};
///
/// let mut port = Generator::new("gen0", "frames=100 size=60".parse()?);
/// let mut burst = Burst::new(64);
/// assert_eq!(port.receive(&mut burst)?, Received::Frames);
/// assert_eq!(burst.len(), 64);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Generator {
    name: String,
    description: Description,
    random: Random,
    /// Next sequence number per flow; 0 before its SYN.
    sequence: Vec<u32>,
    begun_ns: Option<u64>,
    stats: Stats,
}

impl Generator {
    /// A generator that starts with the first receive.
    pub fn new(name: impl Into<String>, description: Description) -> Self {
        let tcp = description.protocols.iter().any(|(protocol, _)| *protocol == Protocol::Tcp);
        Self {
            name: name.into(),
            random: Random(description.seed),
            sequence: vec![0; if tcp { description.flows as usize } else { 0 }],
            begun_ns: None,
            stats: Stats::default(),
            description,
        }
    }

    fn interval_ns(&self) -> f64 {
        1e9 / if self.description.rate == 0 { 1e6 } else { self.description.rate as f64 }
    }

    /// The number of frames due now.
    fn due(&mut self) -> u64 {
        let all = if self.description.frames == 0 { u64::MAX } else { self.description.frames };
        let left = all - self.stats.received;
        if !self.description.paced {
            self.begun_ns.get_or_insert(EPOCH_NS);
            return left;
        }
        let now = clock::now_ns();
        let begun = *self.begun_ns.get_or_insert(now);
        let due = (now.saturating_sub(begun) as f64 / self.interval_ns()) as u64 + 1;
        due.saturating_sub(self.stats.received).min(left)
    }

    /// Generates the next frame in the burst's own memory.
    fn make(&mut self, burst: &mut Burst, begun_ns: u64) {
        let flow = (self.random.next() % u64::from(self.description.flows)) as u32;
        // All properties of a flow derive from its number and the seed.
        let mut of_flow = Random(self.description.seed ^ (u64::from(flow) << 32 | 0x5bd1));
        let protocol = of_flow.pick(&self.description.protocols);
        let len = usize::from(self.random.pick(&self.description.sizes)).max(match protocol {
            Protocol::Tcp => HEADERS,
            _ => HEADERS - 12,
        });
        let start = burst.used();
        let frame = burst.room(len);
        let ports = of_flow.next();
        headers(frame, flow, protocol, ports);
        match protocol {
            Protocol::Tcp => {
                let sequence = &mut self.sequence[flow as usize];
                let syn = *sequence == 0;
                frame[38..42].copy_from_slice(&sequence.to_be_bytes());
                frame[46] = 5 << 4;
                frame[47] = if syn { 0x02 } else { 0x18 }; // SYN; PSH and ACK
                frame[48..50].copy_from_slice(&0xffff_u16.to_be_bytes());
                if syn {
                    // A SYN has no data; padding follows its header.
                    frame[16..18].copy_from_slice(&40_u16.to_be_bytes());
                    *sequence = 1;
                } else {
                    *sequence = sequence.wrapping_add((len - HEADERS) as u32).max(1);
                }
            }
            Protocol::Udp => frame[38..40].copy_from_slice(&((len - 34) as u16).to_be_bytes()),
            Protocol::Icmp => frame[34] = 8,
        }
        checksum::renew(LinkType::ETHERNET, frame, Offload::default());
        if protocol == Protocol::Udp && frame[40..42] == [0, 0] {
            let value = !checksum::sum(&frame[34..], pseudo(frame));
            frame[40..42].copy_from_slice(&(if value == 0 { 0xffff } else { value }).to_be_bytes());
        }
        burst.advance(len);
        let time_ns = begun_ns + (self.stats.received as f64 * self.interval_ns()) as u64;
        let (link, meta) = (LinkType::ETHERNET, Meta::default());
        burst.add_own(
            start..start + len,
            Frame { bytes: &[], wire_len: 0, time_ns, link, interface: 0, meta },
        );
        self.stats.count_received(len);
    }
}

/// Writes Ethernet and IPv4 headers and ports or echo identifier. The payload repeats the flow number.
fn headers(frame: &mut [u8], flow: u32, protocol: Protocol, ports: u64) {
    for (byte, fill) in frame.iter_mut().zip(flow.to_be_bytes().into_iter().cycle()) {
        *byte = fill;
    }
    let [_, a, b, c] = flow.to_be_bytes();
    frame[..14].copy_from_slice(&[2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0]);
    let total = ((frame.len() - 14) as u16).to_be_bytes();
    let number = match protocol {
        Protocol::Tcp => 6,
        Protocol::Udp => 17,
        Protocol::Icmp => 1,
    };
    frame[14..26].copy_from_slice(&[0x45, 0, total[0], total[1], 0, 0, 0x40, 0, 64, number, 0, 0]);
    // Destinations are the benchmarking addresses of RFC 2544. Sources are from 10/8, one per flow.
    frame[26..34].copy_from_slice(&[10, a, b, c, 198, 18, 0, 1]);
    let zeroed = frame.len().min(HEADERS);
    frame[34..zeroed].fill(0);
    let source = 1024 + (ports % 60_000) as u16;
    let destination = [53, 80, 443, 5000][(ports >> 32) as usize % 4];
    match protocol {
        Protocol::Icmp => frame[38..40].copy_from_slice(&source.to_be_bytes()),
        _ => {
            frame[34..36].copy_from_slice(&source.to_be_bytes());
            frame[36..38].copy_from_slice(&u16::to_be_bytes(destination));
        }
    }
}

fn pseudo(frame: &[u8]) -> u16 {
    let len = (frame.len() - 34) as u16;
    checksum::sum(&frame[26..34], checksum::sum(&len.to_be_bytes(), 17))
}

impl Port for Generator {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> Caps {
        Caps {
            receive: true,
            ends: self.description.frames > 0,
            timestamps: true,
            link: Some(LinkType::ETHERNET),
            ..Caps::default()
        }
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
        burst.clear();
        let due = self.due();
        let begun_ns = self.begun_ns.unwrap_or(EPOCH_NS);
        for _ in 0..due {
            if !burst.has_room() {
                break;
            }
            self.make(burst, begun_ns);
        }
        let ended = self.description.frames > 0 && self.stats.received == self.description.frames;
        Ok(match (burst.is_empty(), ended) {
            (false, _) => Received::Frames,
            (true, false) => Received::Nothing,
            (true, true) => Received::End,
        })
    }

    fn send<'a>(&mut self, _: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error> {
        Err(Error::Direction { name: self.name.clone(), verb: "send" })
    }

    /// It only receives.
    fn take_refused(&mut self, _: &mut dyn FnMut(TxDrop, &[u8])) {}

    fn stats(&mut self) -> Stats {
        self.stats
    }
}

/// Splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
#[derive(Clone, Debug)]
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut value = self.0;
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    fn pick<T: Copy>(&mut self, among: &[(T, u32)]) -> T {
        let total: u64 = among.iter().map(|(_, weight)| u64::from(*weight)).sum();
        let mut at = self.next() % total.max(1);
        for (what, weight) in among {
            match at.checked_sub(u64::from(*weight)) {
                Some(rest) => at = rest,
                None => return *what,
            }
        }
        among[0].0
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn frames(description: &str) -> Vec<(u64, Vec<u8>)> {
        let mut port = Generator::new("gen0", description.parse().unwrap());
        let mut burst = Burst::new(7);
        let mut frames = Vec::new();
        while port.receive(&mut burst).unwrap() == Received::Frames {
            frames.extend(burst.iter().map(|frame| (frame.time_ns, frame.bytes.to_vec())));
        }
        assert_eq!(port.receive(&mut burst).unwrap(), Received::End);
        frames
    }

    #[test]
    fn the_same_seed_gives_the_same_frames() {
        let text = "flows=50 frames=500 size=64:2,1514:1 protocol=tcp:1,udp:1,icmp:1";
        assert_eq!(frames(text), frames(text));
        assert_ne!(frames(text), frames(&format!("{text} seed=2")));
    }

    #[test]
    fn frames_are_as_described() {
        let frames = frames("flows=50 frames=2000 size=64:2,1514:1 protocol=tcp:1,udp:1,icmp:1 rate=1000");
        assert_eq!(frames.len(), 2000);
        let mut sizes = HashMap::new();
        let mut flows: HashMap<[u8; 4], u32> = HashMap::new();
        for (at, (time_ns, bytes)) in frames.iter().enumerate() {
            assert_eq!(*time_ns, EPOCH_NS + at as u64 * 1_000_000);
            *sizes.entry(bytes.len()).or_insert(0) += 1;
            let found = towpath_wire::parse(LinkType::ETHERNET, bytes, 0).expect("an IP packet");
            let end = 14 + found.ip_len as usize;
            assert_eq!(checksum::sum(&bytes[14..34], 0), 0xffff, "IPv4 checksum");
            let mut filled = bytes.clone();
            assert!(checksum::fill(LinkType::ETHERNET, &mut filled, 0));
            assert_eq!(&filled, bytes, "checksum of protocol {}", found.proto);
            let source: [u8; 4] = bytes[26..30].try_into().unwrap();
            if found.proto == 6 {
                let seq = u32::from_be_bytes(bytes[38..42].try_into().unwrap());
                let next = flows.entry(source).or_insert(0);
                assert_eq!(seq, *next, "in sequence");
                let syn = bytes[47] == 2;
                assert_eq!(syn, *next == 0);
                *next = if syn { 1 } else { seq + (end - 54) as u32 };
            } else {
                flows.insert(source, 0);
            }
        }
        assert_eq!(flows.len(), 50);
        assert!(sizes.len() == 2 && (1200..1500).contains(&sizes[&64]), "{sizes:?}");
    }

    #[test]
    fn errors_name_the_word() {
        #[rustfmt::skip]
        let rows = [
            ("flows",           "generator: flows: expected name=value"),
            ("flows=0",         "generator: flows=0: expected a number from 1 to 16777216"),
            ("size=20",         "generator: size=20: expected lengths from 60 to 9014, as 64 or 64:7,1500:1"),
            ("size=64:0",       "generator: size=64:0: expected lengths from 60 to 9014, as 64 or 64:7,1500:1"),
            ("protocol=sctp",   "generator: protocol=sctp: expected tcp, udp or icmp, as udp or tcp:3,udp:1"),
            ("paced=perhaps",   "generator: paced=perhaps: expected seed, flows, size, protocol, rate, paced (yes or no) or frames"),
        ];
        for (text, expected) in rows {
            assert_eq!(text.parse::<Description>().unwrap_err().to_string(), expected);
        }
    }
}
