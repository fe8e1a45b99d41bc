//! Several that may have something to be done, each in its turn, and not all of it at once.

/// Whose turn it is.
#[derive(Debug, Default)]
pub(super) struct RoundRobin {
    next: usize,
}

impl RoundRobin {
    /// Does what there is to be done, one thing for each of `all` in turn, from where it stopped the last time; `most` things, or fewer
    /// when none of them has anything. `one` says whether it had.
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
    fn one_that_always_has_something_keeps_nobody_waiting() {
        // What each has, and what was done for it.
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
        // Others have gone, and it goes on with who is left; with nobody there is nothing to do.
        round.turn(&mut all[..1], 4, one);
        assert_eq!(all[0].1, 8);
        round.turn(&mut [], 4, one);
        round.turn(&mut all[1..], 4, one);
        assert_eq!(all.map(|(_, done)| done), [8, 1, 0, 3]);
    }
}
