//! Round robin over sources of work, with a bound for each turn.

/// Position in the rotation.
#[derive(Debug, Default)]
pub(super) struct RoundRobin {
    next: usize,
}

impl RoundRobin {
    /// Offers each element of `all` one unit of work in turn, from where the last call stopped, until `most` units are done or no
    /// element has work. `one` does a unit and returns whether there was one.
    pub(super) fn turn<T>(&mut self, all: &mut [T], most: usize, mut one: impl FnMut(&mut T) -> bool) {
        let (mut done, mut idle) = (0, 0);
        while done < most && idle < all.len() {
            self.next %= all.len();
            match one(&mut all[self.next]) {
                true => (done, idle) = (done + 1, 0),
                false => idle += 1,
            }
            self.next += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_saturated_source_does_not_starve_others() {
        // (units left, units done) of each element.
        let mut all = [(usize::MAX, 0), (1, 0), (0, 0), (3, 0)];
        let one = |(left, done): &mut (usize, usize)| {
            let has = *left > 0;
            *left -= usize::from(has);
            *done += usize::from(has);
            has
        };
        let mut round = RoundRobin::default();
        round.turn(&mut all, 4, one);
        assert_eq!(all.map(|(_, done)| done), [2, 1, 0, 1]);
        round.turn(&mut all, 4, one);
        assert_eq!(all.map(|(_, done)| done), [4, 1, 0, 3]);
        // Elements may be removed between turns; without elements the call returns at once.
        round.turn(&mut all[..1], 4, one);
        assert_eq!(all[0].1, 8);
        round.turn(&mut [], 4, one);
        round.turn(&mut all[1..], 4, one);
        assert_eq!(all.map(|(_, done)| done), [8, 1, 0, 3]);
    }
}
