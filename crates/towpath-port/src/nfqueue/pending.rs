//! Packets that wait for verdicts, and batching of accept verdicts.
//!
//! Purpose: the kernel numbers packets in order and accepts one verdict for all waiting packets up to an id. Accept verdicts are deferred
//! until [`Pending::flush`]. Those before the first undecided packet are sent as one batch verdict, the others one by one.
//! Invariant: a batch verdict never covers an undecided packet. After a flush only undecided packets remain.
//! References: net/netfilter/nfnetlink_queue.c, nfqnl_recv_verdict_batch.

use std::collections::VecDeque;

#[derive(Debug, Default)]
pub(super) struct Pending {
    /// In order of id, which is the order of arrival.
    waiting: VecDeque<(u32, Decision)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    Waiting,
    /// Accepted; the verdict is not sent yet.
    Accept,
    /// The verdict was sent.
    Told,
}

/// A verdict to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    /// Accept all packets up to this id.
    UpTo(u32),
    /// Accept this packet.
    One(u32),
}

impl Pending {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Adds a packet.
    pub(super) fn add(&mut self, id: u32) {
        self.waiting.push_back((id, Decision::Waiting));
    }

    /// Marks a packet as accepted. Returns true if it was undecided.
    pub(super) fn accept(&mut self, id: u32) -> bool {
        self.decide(id, Decision::Accept)
    }

    /// Records that the verdict of a packet was sent. Returns true if it was undecided.
    pub(super) fn told(&mut self, id: u32) -> bool {
        self.decide(id, Decision::Told)
    }

    fn decide(&mut self, id: u32, decision: Decision) -> bool {
        // Ids wrap around; compare their distances from the first.
        let Some(&(first, _)) = self.waiting.front() else { return false };
        let distance = id.wrapping_sub(first);
        let found = self.waiting.binary_search_by_key(&distance, |(other, _)| other.wrapping_sub(first));
        let Some((_, state)) = found.ok().and_then(|at| self.waiting.get_mut(at)) else { return false };
        if *state != Decision::Waiting {
            return false;
        }
        *state = decision;
        true
    }

    /// Passes the deferred verdicts to `tell` and removes decided packets.
    pub(super) fn flush(&mut self, mut tell: impl FnMut(Reply)) {
        let mut up_to = None;
        while let Some(&(id, decision)) = self.waiting.front() {
            match decision {
                Decision::Waiting => break,
                Decision::Accept => up_to = Some(id),
                Decision::Told => {}
            }
            self.waiting.pop_front();
        }
        up_to.into_iter().for_each(|id| tell(Reply::UpTo(id)));
        // The undecided packets remain; the kernel bounds their number.
        self.waiting.retain(|(id, decision)| {
            if *decision == Decision::Accept {
                tell(Reply::One(*id));
            }
            *decision == Decision::Waiting
        });
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Compares with a model of the kernel: a set of ids.
        #[test]
        fn every_packet_gets_one_verdict_and_none_early(
            start: u32,
            gaps in prop::collection::vec(1_u32..3, 1..60),
            picks in prop::collection::vec((any::<prop::sample::Index>(), 0..3_u8), 0..200),
        ) {
            let mut pending = Pending::default();
            let mut kernel = Vec::new();
            let mut id = start;
            for gap in gaps {
                id = id.wrapping_add(gap);
                pending.add(id);
                kernel.push(id);
            }
            let all = kernel.clone();
            let mut decided = HashSet::new();
            for (pick, what) in picks {
                let id = *pick.get(&all);
                match what {
                    0 => prop_assert_eq!(pending.accept(id), decided.insert(id)),
                    1 => {
                        let new = decided.insert(id);
                        prop_assert_eq!(pending.told(id), new);
                        if new {
                            kernel.retain(|other| *other != id);
                        }
                    }
                    _ => pending.flush(|tell| match tell {
                        Reply::One(id) => kernel.retain(|other| *other != id),
                        Reply::UpTo(id) => kernel.retain(|other| other.wrapping_sub(start) > id.wrapping_sub(start)),
                    }),
                }
                let early = all.iter().filter(|id| !decided.contains(id) && !kernel.contains(id)).count();
                prop_assert_eq!(early, 0, "a batch verdict covered an undecided packet");
            }
            all.iter().for_each(|id| { pending.accept(*id); });
            pending.flush(|tell| match tell {
                Reply::One(id) => kernel.retain(|other| *other != id),
                Reply::UpTo(id) => kernel.retain(|other| other.wrapping_sub(start) > id.wrapping_sub(start)),
            });
            prop_assert!(kernel.is_empty() && pending.len() == 0);
        }
    }
}
