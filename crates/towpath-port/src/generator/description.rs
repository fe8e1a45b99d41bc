use std::fmt;
use std::str::FromStr;

/// A description of traffic.
///
/// Its text form is words of `name=value` in any order. Omitted names have the values of [`Description::default`]:
/// ```
/// use towpath_port::generator::{Description, Protocol};
///
/// let description: Description = "flows=2000 size=64:7,576:4,1500:1 protocol=tcp:3,udp:1 rate=100000 seed=7".parse().unwrap();
/// assert_eq!(description.flows, 2000);
/// assert_eq!(description.sizes, [(64, 7), (576, 4), (1500, 1)]);
/// assert_eq!(description.protocols, [(Protocol::Tcp, 3), (Protocol::Udp, 1)]);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description {
    /// `seed=`: the same seed and description give the same frames.
    pub seed: u64,
    /// `flows=`: number of flows, from 1 to 16,777,216 (default 1,000).
    pub flows: u32,
    /// `size=64` or `size=64:7,1500:1`: frame lengths in bytes without the frame check sequence, from 60 to 9,014, each with a weight (default 64).
    pub sizes: Vec<(u16, u32)>,
    /// `protocol=udp` or `protocol=tcp:3,udp:1`: protocols with their share of the flows (default udp).
    pub protocols: Vec<(Protocol, u32)>,
    /// `rate=`: frames per second of their timestamps; 0 means 1,000,000 (default).
    pub rate: u64,
    /// `paced=yes`: frames are generated at that rate by the system's clock, and late frames are not dropped. Otherwise (default) they
    /// are generated as fast as they are received.
    pub paced: bool,
    /// `frames=`: total number of frames; 0 means unlimited (default).
    pub frames: u64,
}

/// A flow's protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// SYN, then data in sequence.
    Tcp,
    /// Datagrams.
    Udp,
    /// Echo requests.
    Icmp,
}

/// An invalid word of a description.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DescriptionError {
    word: String,
    expected: &'static str,
}

impl Default for Description {
    /// 1,000 UDP flows of 64-byte frames, unlimited.
    fn default() -> Self {
        Self {
            seed: 1,
            flows: 1000,
            sizes: vec![(64, 1)],
            protocols: vec![(Protocol::Udp, 1)],
            rate: 0,
            paced: false,
            frames: 0,
        }
    }
}

impl FromStr for Description {
    type Err = DescriptionError;

    fn from_str(text: &str) -> Result<Self, DescriptionError> {
        let mut description = Self::default();
        for word in text.split_whitespace() {
            let wrong = |expected| DescriptionError { word: word.into(), expected };
            let (name, value) = word.split_once('=').ok_or_else(|| wrong("name=value"))?;
            let number = |range: std::ops::RangeInclusive<u64>, expected| {
                value.parse().ok().filter(|number| range.contains(number)).ok_or_else(|| wrong(expected))
            };
            match name {
                "seed" => description.seed = number(0..=u64::MAX, "a number")?,
                "flows" => description.flows = number(1..=1 << 24, "a number from 1 to 16777216")? as u32,
                "rate" => description.rate = number(0..=1_000_000_000, "frames each second")?,
                "frames" => description.frames = number(0..=u64::MAX, "a number")?,
                "paced" if ["yes", "no"].contains(&value) => description.paced = value == "yes",
                "size" => {
                    let size = |text: &str| text.parse().ok().filter(|size| (60..=9014).contains(size));
                    description.sizes = weighted(value, size)
                        .ok_or_else(|| wrong("lengths from 60 to 9014, as 64 or 64:7,1500:1"))?;
                }
                "protocol" => {
                    description.protocols = weighted(value, Protocol::named)
                        .ok_or_else(|| wrong("tcp, udp or icmp, as udp or tcp:3,udp:1"))?;
                }
                _ => return Err(wrong("seed, flows, size, protocol, rate, paced (yes or no) or frames")),
            }
        }
        Ok(description)
    }
}

/// Parses `a:2,b:1`, or `a` alone with weight 1. Weights are at least 1.
fn weighted<T>(text: &str, mut parse: impl FnMut(&str) -> Option<T>) -> Option<Vec<(T, u32)>> {
    text.split(',')
        .map(|part| {
            let (what, weight) = part.split_once(':').unwrap_or((part, "1"));
            let weight = weight.parse().ok().filter(|weight| (1..=1_000_000).contains(weight))?;
            Some((parse(what)?, weight))
        })
        .collect()
}

impl Protocol {
    fn named(name: &str) -> Option<Self> {
        match name {
            "tcp" => Some(Self::Tcp),
            "udp" => Some(Self::Udp),
            "icmp" => Some(Self::Icmp),
            _ => None,
        }
    }
}

impl fmt::Display for DescriptionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "generator: {}: expected {}", self.word, self.expected)
    }
}

impl std::error::Error for DescriptionError {}
