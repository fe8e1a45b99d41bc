//! Flows, and a state table filled with them.

use std::hint::black_box;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use towpath_gate::rules::Ruleset;
use towpath_gate::state::{
    Ends, Flow, Hit, Install, Installed, Lookup, Name, Pages, RuleId, Segment, Settings, States,
};
use towpath_gate::{Dir, Gate, Ports, Step, Walk, Walker};
use towpath_wire::{self as wire, LinkType, Time};

/// Packets per burst.
pub(crate) const BURST: usize = 32;

/// Flows per lookup call: several bursts, as from several queues of a port.
const ASKED: usize = 4 * BURST;

/// Bursts between two reads of the clock.
const BURSTS: u64 = 64;

/// Time at the creation of a table. It advances by one microsecond per burst.
pub(crate) const START: Time = Time::from_secs(1_000_000);

/// Lifetime of a state in a table of [`Load::turning`], in seconds.
const TURN: u32 = 100;

/// Segment of every packet.
pub(crate) const PACKET: Segment = Segment {
    tcp_flags: 0,
    tcp_ack: 0,
    tcp_seq: 0,
    tcp_len: 0,
    tcp_fragment: false,
    tcp_window: 0,
    tcp_wscale: None,
    sctp_chunk: None,
    bytes: 50,
};

/// Family of the flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
    /// IPv4 flows that collide under a hash that combines words by addition or exclusive or.
    Crafted,
}

/// Returns flow `n` of a family: many clients of few servers.
#[inline]
pub(crate) fn flow(family: Family, n: u32) -> Flow {
    let (client, server, src_port) = (n >> 4, n & 255, 1024 + (n & 0xfff) as u16);
    let ends = match family {
        Family::Crafted => {
            let ends = Ends::V4(Ipv4Addr::from(n), Ipv4Addr::from(!n));
            return Flow { ends, proto: 17, src_port: n as u16, dst_port: !n as u16, zone: 0 };
        }
        Family::V4 => Ends::V4(Ipv4Addr::from(0x0a00_0000 | client), Ipv4Addr::from(0xc000_0200 | server)),
        Family::V6 => Ends::V6(
            Ipv6Addr::from(0x2001_0db8_u128 << 96 | u128::from(client)),
            Ipv6Addr::from(0x2001_0db8_ffff_u128 << 80 | u128::from(server)),
            0,
        ),
    };
    Flow { ends, proto: 17, src_port, dst_port: 443, zone: 0 }
}

/// Random numbers below a bound (Marsaglia 2003, "Xorshift RNGs"; the reduction is Lemire's, 2019).
#[derive(Debug, Clone, Copy)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    #[inline]
    pub(crate) fn below(&mut self, bound: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (((self.0 >> 32) * u64::from(bound)) >> 32) as u32
    }
}

/// A table with `flows` flows, of which this worker uses those from `first` on. It is aligned to two cache lines, which processors prefetch
/// in pairs, because workers of several threads are allocated next to each other.
#[repr(align(128))]
pub(crate) struct Load {
    pub(crate) states: States,
    pub(crate) family: Family,
    pub(crate) first: u32,
    pub(crate) flows: u32,
    pub(crate) now: Time,
    random: Random,
    frames: Frames,
}

/// Processing of each packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// Look up the state.
    Lookup,
    /// Parse the headers, look up the state, count and refresh it.
    FullPath,
    /// No processing: the cost of the packets themselves. Few flows have precomputed packets; packets of many flows are created.
    Packets,
}

impl Load {
    pub(crate) fn new(family: Family, flows: u32, pages: Pages) -> Result<Self> {
        let mut load = Self::filled(family, flows, pages)?;
        load.settle();
        Ok(load)
    }

    /// As [`Load::new`], without memory prepared for future states.
    pub(crate) fn filled(family: Family, flows: u32, pages: Pages) -> Result<Self> {
        let mut load = Self::empty(family, flows, pages, 100_000);
        for n in 0..flows {
            ensure!(load.install(n, load.now) == Some(Installed::New), "no room for flow {n}");
        }
        Ok(load)
    }

    fn empty(family: Family, flows: u32, pages: Pages, lifetime: u32) -> Self {
        let settings = Settings { dyn_max: 12_000_000, dyn_udp_lifetime: lifetime, ..Settings::default() };
        let random = Random(0x9e37_79b9_7f4a_7c15);
        Self {
            states: States::with_pages(settings, 0x5eed, pages),
            family,
            first: 0,
            flows,
            now: START,
            random,
            frames: Frames::new(family, 0, flows, random),
        }
    }

    /// Creates a table for `flows` flows at a time; each further flow replaces the oldest.
    pub(crate) fn turning(family: Family, flows: u32) -> Result<Self> {
        ensure!(flows > 0, "a turning table needs flows");
        Ok(Self::empty(family, flows, Pages::Huge, TURN))
    }

    /// Installs the first flows of a turning table, in bursts with prefetched lines or one by one. Returns the time taken.
    pub(crate) fn fill(&mut self, bursts: bool) -> Result<Duration> {
        let start = Instant::now();
        let flows = self.flows;
        while self.first < flows {
            self.make(bursts, (flows - self.first).min(BURST as u32))?;
        }
        Ok(start.elapsed())
    }

    /// Turns the table for `time`. Returns the installed states per second; as many expire and are collected.
    pub(crate) fn turn(&mut self, bursts: bool, time: Duration) -> Result<f64> {
        let (start, first) = (Instant::now(), self.first);
        loop {
            for _ in 0..BURSTS {
                self.make(bursts, BURST as u32)?;
            }
            let took = start.elapsed();
            if took >= time {
                return Ok(f64::from(self.first - first) / took.as_secs_f64());
            }
        }
    }

    /// Installs the next flows and then collects, as a worker does after its bursts.
    fn make(&mut self, bursts: bool, count: u32) -> Result<()> {
        let (family, first) = (self.family, self.first);
        let step = Duration::from_secs(TURN.into()) / self.flows;
        if bursts {
            let mut hits = [None; BURST];
            let flows = (first..first + count).map(|n| flow(family, n));
            self.states.peek_burst(flows, Lookup::Any, self.now, &mut hits);
            ensure!(found(&hits) == 0, "the flow exists already");
        }
        for n in first..first + count {
            self.now = self.now + step;
            ensure!(self.install(n, self.now) == Some(Installed::New), "no room for flow {n}");
            if !bursts {
                self.states.expire(self.now, 2);
            }
        }
        if bursts {
            self.states.expire(self.now, 2 * BURST);
        }
        self.first = first + count;
        Ok(())
    }

    /// Creates a worker of the same table for another thread, with `flows` flows from `first` on.
    pub(crate) fn worker(&self, seed: u64, first: u32, flows: u32) -> Option<Self> {
        let Self { family, now, .. } = *self;
        let (states, random) = (self.states.worker()?, Random(seed));
        Some(Self {
            states,
            family,
            first,
            flows,
            now,
            random,
            frames: Frames::new(family, first, flows, random),
        })
    }

    /// Completes a growth in progress.
    pub(crate) fn settle(&mut self) {
        while self.states.prepare() {}
    }

    pub(crate) fn install(&mut self, n: u32, now: Time) -> Option<Installed> {
        let (flow, how) = (flow(self.family, n), Install::default());
        self.states.install(&flow, Name::DEFAULT, &PACKET, RuleId(1), &how, now).ok()
    }

    /// Works for `time`, in bursts or one by one. Returns packets per second.
    pub(crate) fn rate(&mut self, work: Work, bursts: bool, time: Duration) -> Result<f64> {
        let start = Instant::now();
        let (mut packets, mut found) = (0_u64, 0_u64);
        loop {
            for _ in 0..BURSTS {
                found += self.burst(work, bursts);
                packets += if (work, bursts) == (Work::Lookup, true) { ASKED } else { BURST } as u64;
            }
            let took = start.elapsed();
            if took >= time {
                ensure!(found == packets, "only {found} of {packets} packets found their states");
                return Ok(packets as f64 / took.as_secs_f64());
            }
        }
    }

    /// Looks up flows without states for `time`, in bursts. Returns packets per second.
    pub(crate) fn misses(&mut self, time: Duration) -> Result<f64> {
        let (start, mut packets) = (Instant::now(), 0_u64);
        loop {
            for _ in 0..BURSTS {
                ensure!(self.burst(Work::Lookup, true) == 0, "a flow has a state");
                packets += ASKED as u64;
            }
            let took = start.elapsed();
            if took >= time {
                return Ok(packets as f64 / took.as_secs_f64());
            }
        }
    }

    /// Processes one burst. Returns the number of packets with a state.
    #[inline]
    pub(crate) fn burst(&mut self, work: Work, bursts: bool) -> u64 {
        self.now = self.now + Duration::from_micros(1);
        match (work, bursts) {
            (Work::Lookup, true) => self.lookup_burst(),
            (Work::Lookup, false) => self.lookups(),
            (Work::FullPath, true) => self.path_burst(),
            (Work::FullPath, false) => self.paths(),
            (Work::Packets, _) => self.packets(),
        }
    }

    #[inline]
    fn next(&mut self) -> Flow {
        let n = self.first + self.random.below(self.flows);
        flow(self.family, n)
    }

    fn lookup_burst(&mut self) -> u64 {
        let Self { states, random, family, first, flows, now, .. } = self;
        let asked = (0..ASKED).map(|_| flow(*family, *first + random.below(*flows)));
        let mut hits = [None; ASKED];
        states.peek_burst(asked, Lookup::Any, *now, &mut hits);
        found(&hits)
    }

    fn lookups(&mut self) -> u64 {
        let mut all = 0;
        for _ in 0..BURST {
            let flow = self.next();
            all += u64::from(self.states.peek(&flow, Lookup::Any, self.now).is_some());
        }
        all
    }

    fn path_burst(&mut self) -> u64 {
        let Self { states, random, first, flows, now, frames, .. } = self;
        // A closure that is used once, so that the compiler inlines the parser.
        let packets = frames
            .burst(|| *first + random.below(*flows))
            .map(|frame| wire::plain(LinkType::ETHERNET, frame, FRAME as u32));
        let mut hits = [None; BURST];
        _ = states.lookup_burst(packets, Lookup::Any, *now, &mut hits);
        found(&hits)
    }

    fn packets(&mut self) -> u64 {
        let Self { random, first, flows, frames, .. } = self;
        frames.burst(|| *first + random.below(*flows)).map(black_box).count() as u64
    }

    fn paths(&mut self) -> u64 {
        let Self { states, random, first, flows, now, frames, .. } = self;
        let packets = frames.burst(|| *first + random.below(*flows)).filter_map(parsed);
        let found =
            packets.filter(|(flow, segment)| states.lookup(flow, Lookup::Any, segment, *now).is_some());
        found.count() as u64
    }
}

/// A gate with twenty rules after the state lookup, and a walker.
pub(crate) struct RulesLoad {
    walker: Walker,
    frames: Frames,
    now: Time,
}

impl RulesLoad {
    pub(crate) fn new(flows: u32) -> Result<Self> {
        let mut text = "add check-state\n".to_owned();
        for n in 1..=18 {
            text += &format!("add deny tcp from 10.{n}.0.0/16 to any {n}\n");
        }
        text += "add allow udp from any to any keep-state\n";
        let Ok(rules) = Ruleset::parse("bench", &text).ruleset else { bail!("the rules do not parse") };
        let settings = Settings { dyn_udp_lifetime: 100_000, ..Settings::default() };
        let mut gate = Gate::new(rules, Ports::new(), settings, 0x5eed);
        let walker = gate.walker().context("no room for a walker")?;
        let mut load = Self { walker, frames: Frames::new(Family::V4, 0, flows, Random(1)), now: START };
        ensure!(matches!(load.frames.kept, Kept::Few { .. }), "too many flows: {flows}");
        for frame in load.frames.bytes.as_chunks::<FRAME>().0 {
            ensure!(walked(&mut load.walker, frame, START), "a packet does not pass");
        }
        ensure!(gate.states().len() == flows as usize, "not every flow has a state");
        Ok(load)
    }

    /// Returns packets per second.
    pub(crate) fn rate(&mut self, time: Duration) -> Result<f64> {
        let start = Instant::now();
        let (mut packets, mut passed) = (0_u64, 0_u64);
        loop {
            for _ in 0..BURSTS {
                passed += self.burst();
                packets += BURST as u64;
            }
            let took = start.elapsed();
            if took >= time {
                ensure!(passed == packets, "only {passed} of {packets} packets passed");
                return Ok(packets as f64 / took.as_secs_f64());
            }
        }
    }

    /// Processes one burst. Returns the number of passed packets.
    pub(crate) fn burst(&mut self) -> u64 {
        let Self { walker, frames, now } = self;
        *now = *now + Duration::from_micros(1);
        let burst = frames.burst(|| 0);
        walker
            .prefetch(None, burst.clone().map(|frame| wire::plain(LinkType::ETHERNET, frame, FRAME as u32)));
        let mut passed = 0;
        for (at, frame) in burst.enumerate() {
            passed += u64::from(walker.try_pass(at, *now).is_some() || walked(walker, frame, *now));
        }
        walker.expire(*now, 0);
        passed
    }
}

/// Evaluates the rules for a packet. Returns true if it passes.
#[inline(never)]
fn walked(walker: &mut Walker, frame: &[u8], now: Time) -> bool {
    let Ok(packet) = wire::parse(LinkType::ETHERNET, frame, frame.len() as u32) else { return false };
    walker.walk(&mut Walk::new(Dir::In, None, None), &packet, now) == Step::Pass
}

fn found(hits: &[Option<Hit>]) -> u64 {
    hits.iter().filter(|hit| hit.is_some()).count() as u64
}

#[inline(always)]
pub(crate) fn parsed(frame: &[u8]) -> Option<(Flow, Segment)> {
    wire::plain(LinkType::ETHERNET, frame, frame.len() as u32)
}

/// Length of a frame in bytes.
const FRAME: usize = 64;

/// Packets that stay in the cache while flows are few: an eighth of a common second-level cache, and a network card's ring.
const RING: u32 = 4096;

/// Contiguous frames, as in a port's memory.
#[derive(Debug, Clone)]
struct Frames {
    bytes: Vec<u8>,
    family: Family,
    kept: Kept,
}

/// The set of frames.
#[derive(Debug, Clone, Copy)]
enum Kept {
    /// Precomputed packets of all flows in random order; `next` starts the next burst.
    Few { next: usize },
    /// Packets of one burst, created for each burst.
    Many,
}

impl Frames {
    fn new(family: Family, first: u32, flows: u32, mut random: Random) -> Self {
        let few = flows <= RING;
        // Every flow once, then random flows.
        let mut of: Vec<u32> = if few { (0..flows).collect() } else { vec![0; BURST] };
        if few {
            of.resize_with(RING as usize, || random.below(flows));
            (1..of.len()).rev().for_each(|at| of.swap(at, random.below(at as u32 + 1) as usize));
        }
        let mut bytes = frame(family).repeat(of.len());
        bytes.chunks_exact_mut(FRAME).zip(of).for_each(|(frame, n)| readdress(frame, family, first + n));
        let kept = if few { Kept::Few { next: 0 } } else { Kept::Many };
        Self { bytes, family, kept }
    }

    /// Returns the frames of the next burst. With many flows, `flow` selects them.
    #[inline(always)]
    fn burst(&mut self, mut flow: impl FnMut() -> u32) -> impl Iterator<Item = &[u8]> + Clone {
        let start = match &mut self.kept {
            Kept::Few { next } => {
                let start = *next;
                *next = (start + BURST * FRAME) % self.bytes.len();
                start
            }
            Kept::Many => {
                for frame in self.bytes.chunks_exact_mut(FRAME) {
                    readdress(frame, self.family, flow());
                }
                0
            }
        };
        self.bytes[start..start + BURST * FRAME].chunks_exact(FRAME)
    }
}

/// Creates a UDP packet of 64 bytes with its Ethernet header.
pub(crate) fn frame(family: Family) -> Vec<u8> {
    let mut frame = vec![0_u8; 64];
    match family {
        Family::V4 | Family::Crafted => {
            frame[12..14].copy_from_slice(&[0x08, 0x00]);
            frame[14..24].copy_from_slice(&[0x45, 0, 0, 50, 0, 0, 0, 0, 64, 17]);
            frame[38..40].copy_from_slice(&30_u16.to_be_bytes());
        }
        Family::V6 => {
            frame[12..14].copy_from_slice(&[0x86, 0xdd]);
            frame[14..22].copy_from_slice(&[0x60, 0, 0, 0, 0, 10, 17, 64]);
            frame[58..60].copy_from_slice(&10_u16.to_be_bytes());
        }
    }
    readdress(&mut frame, family, 0);
    frame
}

/// Sets the frame's flow to `n`.
#[inline]
fn readdress(frame: &mut [u8], family: Family, n: u32) {
    let Flow { ends, src_port, dst_port, .. } = flow(family, n);
    let ports = match ends {
        Ends::V4(src, dst) => {
            frame[26..30].copy_from_slice(&src.octets());
            frame[30..34].copy_from_slice(&dst.octets());
            34
        }
        Ends::V6(src, dst, _) => {
            frame[22..38].copy_from_slice(&src.octets());
            frame[38..54].copy_from_slice(&dst.octets());
            54
        }
    };
    frame[ports..ports + 2].copy_from_slice(&src_port.to_be_bytes());
    frame[ports + 2..ports + 4].copy_from_slice(&dst_port.to_be_bytes());
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn packets_parse_to_distinct_flows() {
        for family in [Family::V4, Family::V6, Family::Crafted] {
            let flows: HashSet<Flow> = (0..100_000).map(|n| flow(family, n)).collect();
            assert_eq!(flows.len(), 100_000);
            let mut frame = frame(family);
            for n in [0, 1, 12_345, 4_999_999] {
                readdress(&mut frame, family, n);
                assert_eq!(parsed(&frame), Some((flow(family, n), PACKET)));
            }
        }
    }
}
