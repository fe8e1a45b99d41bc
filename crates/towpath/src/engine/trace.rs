//! Following packets: what became of each, for who asked for a rule's or a flow's.
//!
//! A trace is a tap: what finds no room is left out and counted. Nobody follows: one look at an empty list for each packet.

use towpath_gate::{Walk, Walker};
use towpath_wire as wire;

use super::Meta;
use super::path::Fate;
use crate::control::{Note, Sieve, Tap, Traced};

/// Traces at a time.
const TRACES: usize = 8;

/// Who follows packets.
#[derive(Debug, Default)]
pub(super) struct Traces(Vec<(Sieve, Tap)>);

impl Traces {
    /// Copies of the packets that `sieve` takes go to `tap` from now on.
    pub(super) fn add(&mut self, sieve: Sieve, tap: Tap) -> Result<(), Tap> {
        self.tidy();
        if self.0.len() >= TRACES {
            return Err(tap);
        }
        self.0.push((sieve, tap));
        Ok(())
    }

    /// Lets go of those whose client is gone, also when nothing comes that they would be told.
    pub(super) fn tidy(&mut self) {
        self.0.retain(|(_, tap)| !tap.is_over());
    }

    /// Whether nobody follows.
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The packet is decided: it passes when it has no fate. `number` is its place among all packets, `arrival` the port
    /// that it came in by.
    #[cold]
    pub(super) fn tell(
        &mut self,
        (number, arrival): (u64, u32),
        (bytes, meta): (&[u8], &Meta),
        walk: &Walk,
        fate: Option<Fate>,
        walker: &Walker,
    ) {
        self.tidy();
        let Ok(packet) = wire::parse(meta.link, bytes, meta.wire_len) else { return };
        for (_, tap) in self.0.iter_mut().filter(|(sieve, _)| sieve.takes(&packet, walk.rule())) {
            let what = match fate {
                None => match meta.out.and_then(|port| walker.ports().name(port)) {
                    Some(port) => format!("pass, out by {port}"),
                    None => "pass".to_owned(),
                },
                Some(Fate::Dropped) => "drop".to_owned(),
                Some(Fate::NoRoute) => "drop, there is no route".to_owned(),
                Some(Fate::Expired) => "drop, it has no hop left".to_owned(),
                Some(Fate::Rejected(_)) => "reject".to_owned(),
            };
            tap.push(Traced {
                seq: number as u32,
                time: meta.time,
                wire_len: meta.wire_len,
                link: meta.link_type,
                port: arrival,
                queue: 0,
                bytes: bytes.into(),
                after: 0,
                note: Note::Decided { rule: walk.rule(), what },
            });
        }
    }
}
