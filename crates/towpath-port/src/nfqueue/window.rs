//! Which packets wait for verdicts, and which verdicts can be given together.
//!
//! What: the kernel numbers packets in order, and takes one verdict for all that wait up to a number. So accepts are held back until
//! [`Window::flush`], and given together as far as everything before them is decided too.
//! Invariant: a batch never covers a packet that waits for its verdict still. After a flush only those are here.
//! References: net/netfilter/nfnetlink_queue.c, nfqnl_recv_verdict_batch.

use std::collections::VecDeque;

#[derive(Debug, Default)]
pub(super) struct Window {
    /// In the order of their numbers, which is the order in which they came.
    waiting: VecDeque<(u32, Decision)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Decision {
    Waiting,
    /// To be accepted as it is; not said yet.
    Accept,
    /// The kernel was told.
    Told,
}

/// What the kernel is to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tell {
    /// Accept all up to this one.
    UpTo(u32),
    /// Accept this one.
    One(u32),
}

impl Window {
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// A packet came.
    pub(super) fn add(&mut self, id: u32) {
        self.waiting.push_back((id, Decision::Waiting));
    }

    /// It is to be accepted as it is. Returns whether it was waiting.
    pub(super) fn accept(&mut self, id: u32) -> bool {
        self.decide(id, Decision::Accept)
    }

    /// The kernel was told what to do with it. Returns whether it was waiting.
    pub(super) fn told(&mut self, id: u32) -> bool {
        self.decide(id, Decision::Told)
    }

    fn decide(&mut self, id: u32, decision: Decision) -> bool {
        // Numbers wrap around: they are compared by their distance from the first.
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

    /// What is to be told now; forgets what is decided at the front.
    pub(super) fn flush(&mut self, mut tell: impl FnMut(Tell)) {
        let mut up_to = None;
        while let Some(&(id, decision)) = self.waiting.front() {
            match decision {
                Decision::Waiting => break,
                Decision::Accept => up_to = Some(id),
                Decision::Told => {}
            }
            self.waiting.pop_front();
        }
        up_to.into_iter().for_each(|id| tell(Tell::UpTo(id)));
        // What is left waits, and the kernel bounds how many do.
        self.waiting.retain(|(id, decision)| {
            if *decision == Decision::Accept {
                tell(Tell::One(*id));
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
        /// Against a kernel that is a set of numbers.
        #[test]
        fn everything_is_decided_once_and_nothing_before_its_time(
            start: u32,
            gaps in prop::collection::vec(1_u32..3, 1..60),
            picks in prop::collection::vec((any::<prop::sample::Index>(), 0..3_u8), 0..200),
        ) {
            let mut window = Window::default();
            let mut kernel = Vec::new();
            let mut id = start;
            for gap in gaps {
                id = id.wrapping_add(gap);
                window.add(id);
                kernel.push(id);
            }
            let all = kernel.clone();
            let mut decided = HashSet::new();
            for (pick, what) in picks {
                let id = *pick.get(&all);
                match what {
                    0 => prop_assert_eq!(window.accept(id), decided.insert(id)),
                    1 => {
                        let new = decided.insert(id);
                        prop_assert_eq!(window.told(id), new);
                        if new {
                            kernel.retain(|other| *other != id);
                        }
                    }
                    _ => window.flush(|tell| match tell {
                        Tell::One(id) => kernel.retain(|other| *other != id),
                        Tell::UpTo(id) => kernel.retain(|other| other.wrapping_sub(start) > id.wrapping_sub(start)),
                    }),
                }
                let early = all.iter().filter(|id| !decided.contains(id) && !kernel.contains(id)).count();
                prop_assert_eq!(early, 0, "decided before its time");
            }
            all.iter().for_each(|id| { window.accept(*id); });
            window.flush(|tell| match tell {
                Tell::One(id) => kernel.retain(|other| *other != id),
                Tell::UpTo(id) => kernel.retain(|other| other.wrapping_sub(start) > id.wrapping_sub(start)),
            });
            prop_assert!(kernel.is_empty() && window.len() == 0);
        }
    }
}
