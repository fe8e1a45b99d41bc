//! Flows and a table that has them.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use towpath_gate::gate::{Dir, Ports, Step, Walk};
use towpath_gate::packet::Link;
use towpath_gate::rules::Ruleset;
use towpath_gate::state::{
    Ends, Flow, Hit, Install, Installed, Lookup, Name, Pages, RuleId, Segment, Settings, States,
};
use towpath_gate::{Gate, Time, wire};

/// Packets of a burst.
pub(crate) const BURST: usize = 32;

/// Bursts between two looks at the clock.
const BURSTS: u64 = 64;

/// What time it is when a table is made. It goes on by a microsecond with each burst.
pub(crate) const START: Time = Time::from_secs(1_000_000);

/// Every packet of these flows.
pub(crate) const PACKET: Segment = Segment {
    tcp_flags: 0,
    tcp_ack: 0,
    tcp_seq: 0,
    tcp_len: 0,
    tcp_window: 0,
    tcp_wscale: None,
    sctp_chunk: None,
    bytes: 50,
};

/// Which flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    V4,
    V6,
}

/// Flow `n` of a family: many clients of few servers.
#[inline]
pub(crate) fn flow(family: Family, n: u32) -> Flow {
    let (client, server, src_port) = (n >> 4, n & 255, 1024 + (n & 0xfff) as u16);
    let ends = match family {
        Family::V4 => Ends::V4(Ipv4Addr::from(0x0a00_0000 | client), Ipv4Addr::from(0xc000_0200 | server)),
        Family::V6 => Ends::V6(
            Ipv6Addr::from(0x2001_0db8_u128 << 96 | u128::from(client)),
            Ipv6Addr::from(0x2001_0db8_ffff_u128 << 80 | u128::from(server)),
            0,
        ),
    };
    Flow { ends, proto: 17, src_port, dst_port: 443, tenant: 0 }
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

/// A table with the flows 0 to `flows`, of which a worker looks at those from `first` on.
pub(crate) struct Load {
    pub(crate) states: States,
    pub(crate) family: Family,
    pub(crate) first: u32,
    pub(crate) flows: u32,
    pub(crate) now: Time,
    random: Random,
    /// A frame for each flow while they are few, which stay in the cache; else for each packet of a burst, made anew.
    frames: Vec<Vec<u8>>,
}

/// What is done with each packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Work {
    /// The state is found.
    Lookup,
    /// The headers are parsed, the state is found, counts and is refreshed.
    FullPath,
}

impl Load {
    pub(crate) fn new(family: Family, flows: u32, pages: Pages) -> Result<Self> {
        let settings = Settings { dyn_max: 12_000_000, dyn_udp_lifetime: 100_000, ..Settings::default() };
        let mut load = Self {
            states: States::with_pages(settings, 0x5eed, pages),
            family,
            first: 0,
            flows,
            now: START,
            random: Random(0x9e37_79b9_7f4a_7c15),
            frames: frames(family, flows),
        };
        for n in 0..flows {
            ensure!(load.install(n, load.now) == Some(Installed::New), "flow {n} found no room");
        }
        load.settle();
        Ok(load)
    }

    /// The same table for another thread.
    pub(crate) fn worker(&self, seed: u64) -> Option<Self> {
        Some(Self {
            states: self.states.worker()?,
            random: Random(seed),
            frames: self.frames.clone(),
            ..*self
        })
    }

    /// Lets growth that has begun come to its end.
    pub(crate) fn settle(&mut self) {
        while self.states.prepare() {}
    }

    pub(crate) fn install(&mut self, n: u32, now: Time) -> Option<Installed> {
        let (flow, how) = (flow(self.family, n), Install::default());
        self.states.install(&flow, Name::DEFAULT, &PACKET, RuleId(1), &how, now).ok()
    }

    /// Works for `time`, in bursts or one by one: packets per second.
    pub(crate) fn rate(&mut self, work: Work, bursts: bool, time: Duration) -> Result<f64> {
        let start = Instant::now();
        let (mut packets, mut found) = (0_u64, 0_u64);
        loop {
            for _ in 0..BURSTS {
                found += self.burst(work, bursts);
                packets += BURST as u64;
            }
            let took = start.elapsed();
            if took >= time {
                ensure!(found == packets, "of {packets} packets only {found} found their states");
                return Ok(packets as f64 / took.as_secs_f64());
            }
        }
    }

    /// One burst; how many packets found their state.
    #[inline]
    pub(crate) fn burst(&mut self, work: Work, bursts: bool) -> u64 {
        self.now = self.now + Duration::from_micros(1);
        match (work, bursts) {
            (Work::Lookup, true) => self.lookup_burst(),
            (Work::Lookup, false) => self.lookups(),
            (Work::FullPath, true) => self.path_burst(),
            (Work::FullPath, false) => self.paths(),
        }
    }

    fn next(&mut self) -> Flow {
        let n = self.first + self.random.below(self.flows);
        flow(self.family, n)
    }

    /// The frame of the next packet, which is in place `at` of its burst.
    #[inline]
    fn next_frame(&mut self, at: usize) -> usize {
        let n = self.first + self.random.below(self.flows);
        if self.frames.len() > BURST {
            return n as usize;
        }
        readdress(&mut self.frames[at], self.family, n);
        at
    }

    fn lookup_burst(&mut self) -> u64 {
        let flows: [Flow; BURST] = std::array::from_fn(|_| self.next());
        let mut hits = [None; BURST];
        self.states.peek_burst(&flows, Lookup::Any, self.now, &mut hits);
        found(&hits)
    }

    fn lookups(&mut self) -> u64 {
        let mut all = 0;
        for _ in 0..BURST {
            let (flow, mut hit) = ([self.next()], [None]);
            self.states.peek_burst(&flow, Lookup::Any, self.now, &mut hit);
            all += found(&hit);
        }
        all
    }

    fn path_burst(&mut self) -> u64 {
        let mut packets = [(flow(self.family, 0), PACKET); BURST];
        let at: [usize; BURST] = std::array::from_fn(|at| self.next_frame(at));
        for (&at, packet) in at.iter().zip(&mut packets) {
            if let Some(parsed) = parsed(&self.frames[at]) {
                *packet = parsed;
            }
        }
        let mut hits = [None; BURST];
        self.states.lookup_burst(&packets, Lookup::Any, self.now, &mut hits);
        found(&hits)
    }

    fn paths(&mut self) -> u64 {
        let mut all = 0;
        for at in 0..BURST {
            let at = self.next_frame(at);
            let Some((flow, segment)) = parsed(&self.frames[at]) else { continue };
            all += u64::from(self.states.lookup(&flow, Lookup::Any, &segment, self.now).is_some());
        }
        all
    }
}

/// A gate with twenty rules, states first, and as many flows as have a frame each.
pub(crate) struct RulesLoad {
    gate: Gate,
    frames: Vec<Vec<u8>>,
    now: Time,
    random: Random,
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
        let gate = Gate::new(rules, Ports::new(), settings, 0x5eed);
        let frames = frames(Family::V4, flows);
        let mut load = Self { gate, frames, now: START, random: Random(0x9e37_79b9_7f4a_7c15) };
        (0..load.frames.len()).for_each(|at| _ = load.burst([at; BURST]));
        ensure!(load.gate.states().len() == flows as usize, "not every flow has a state");
        Ok(load)
    }

    /// Packets per second.
    pub(crate) fn rate(&mut self, time: Duration) -> Result<f64> {
        let start = Instant::now();
        let (mut packets, mut passed) = (0_u64, 0_u64);
        loop {
            for _ in 0..BURSTS {
                let flows = self.frames.len() as u32;
                let at = std::array::from_fn(|_| self.random.below(flows) as usize);
                passed += self.burst(at);
                packets += BURST as u64;
            }
            let took = start.elapsed();
            if took >= time {
                ensure!(passed == packets, "of {packets} packets only {passed} passed");
                return Ok(packets as f64 / took.as_secs_f64());
            }
        }
    }

    /// One burst of these frames; how many packets passed.
    fn burst(&mut self, at: [usize; BURST]) -> u64 {
        self.now = self.now + Duration::from_micros(1);
        let mut passed = 0;
        for at in at {
            let frame = &self.frames[at];
            let parsed = wire::parse(Link::Ethernet, frame, frame.len() as u32);
            let Ok(packet) = &parsed else { continue };
            let mut walk = Walk::new(Dir::In, None, None);
            passed += u64::from(self.gate.walk(&mut walk, packet, self.now) == Step::Pass);
        }
        self.gate.expire(self.now, 0);
        passed
    }
}

fn found(hits: &[Option<Hit>]) -> u64 {
    hits.iter().filter(|hit| hit.is_some()).count() as u64
}

#[inline(always)]
pub(crate) fn parsed(frame: &[u8]) -> Option<(Flow, Segment)> {
    // Borrowed, not moved: a packet is a cache line and more.
    let parsed = wire::parse(Link::Ethernet, frame, frame.len() as u32);
    let Ok(packet) = &parsed else { return None };
    Some((packet.flow()?, packet.segment()))
}

/// Flows that have a frame each: half of a usual second-level cache.
const FRAMES: u32 = 8192;

fn frames(family: Family, flows: u32) -> Vec<Vec<u8>> {
    let of_flow = |n| {
        let mut frame = frame(family);
        readdress(&mut frame, family, n);
        frame
    };
    match flows {
        33..=FRAMES => (0..flows).map(of_flow).collect(),
        _ => (0..BURST as u32).map(of_flow).collect(),
    }
}

/// A UDP packet of 64 bytes with its Ethernet header.
pub(crate) fn frame(family: Family) -> Vec<u8> {
    let mut frame = vec![0_u8; 64];
    match family {
        Family::V4 => {
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

/// Makes the frame a packet of flow `n`.
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
    fn flows_differ_and_their_packets_parse_to_them() {
        for family in [Family::V4, Family::V6] {
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
