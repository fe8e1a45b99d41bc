//! Shares of the reorder buffer: how many packets and bytes of it a queue and an inspector may hold.
//!
//! What: every packet in the buffer is charged to one account. Each inspector has an account, for the packets that it got and that have
//! not left. Each queue has an account, for packets that wait for room or that several inspectors have. The engine has one for all other
//! packets. Half of the buffer is guaranteed: each queue has a part in proportion to its weight (the engine has the weight 1), and divides
//! it evenly among its own account and its inspectors. The rest is common: an account takes from it what exceeds its guarantee, while there
//! is any.
//!
//! ```text
//! |<--------------------- limits --------------------->|
//! | engine | queue 1: own, a, b | queue 2: own, c | common |
//! ```
//!
//! Invariants: the sum over all accounts is `used`, and the sum of what exceeds the guarantees is `excess`. An account below its guarantee
//! is refused only while another one has not yet given back what it took before a queue or an inspector was added. `used` never exceeds
//! the limits.
//!
//! The accounts of a replay are not separate: it waits until there is room.

/// Bounds of a reorder buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Maximum number of packets. Default: 8192.
    pub packets: usize,
    /// Maximum number of bytes of these packets. Default: 16 MiB.
    pub bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { packets: 8192, bytes: 16 << 20 }
    }
}

/// The number of an account. It is used again when the account was closed and its last packet has left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account(u16);

impl Account {
    /// The account of the engine. It is always open.
    pub const ENGINE: Self = Self(0);
}

/// Packets and bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Packets.
    pub packets: usize,
    /// Bytes of the packets.
    pub bytes: usize,
}

impl Usage {
    fn add(&mut self, other: Self) {
        self.packets += other.packets;
        self.bytes += other.bytes;
    }

    fn sub(&mut self, other: Self) {
        self.packets -= other.packets;
        self.bytes -= other.bytes;
    }

    fn beyond(self, guarantee: Self) -> Self {
        Self {
            packets: self.packets.saturating_sub(guarantee.packets),
            bytes: self.bytes.saturating_sub(guarantee.bytes),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Row {
    /// Index of the group. The engine's is 0.
    group: usize,
    used: Usage,
    guarantee: Usage,
    /// No packet is charged to it any more.
    closed: bool,
}

/// A queue, or the engine.
#[derive(Clone, Copy, Debug)]
struct Group {
    weight: usize,
    /// Open accounts.
    accounts: usize,
    /// Packets that were refused.
    refused: u64,
}

/// The accounts. See the module's documentation.
#[derive(Debug)]
pub struct Shares {
    limits: Limits,
    rows: Vec<Row>,
    groups: Vec<Group>,
    /// Closed accounts without packets.
    free: Vec<Account>,
    used: Usage,
    /// The sum of what exceeds the guarantees.
    excess: Usage,
    common: Usage,
    separate: bool,
}

impl Shares {
    /// Creates the engine's account. If the accounts are not `separate`, no account has a guarantee, and
    /// [`admits`](Self::admits) refuses only what would double the limits.
    pub fn new(limits: Limits, separate: bool) -> Self {
        let mut shares = Self {
            limits,
            rows: Vec::new(),
            groups: Vec::new(),
            free: Vec::new(),
            used: Usage::default(),
            excess: Usage::default(),
            common: Usage::default(),
            separate,
        };
        shares.add_queue(1);
        shares
    }

    /// Sets the limits. What exceeds them stays until it leaves.
    pub(super) fn set_limits(&mut self, limits: Limits) {
        self.limits = limits;
        self.divide();
    }

    /// Adds a queue, and returns its own account.
    pub fn add_queue(&mut self, weight: u16) -> Account {
        self.groups.push(Group { weight: weight.into(), accounts: 0, refused: 0 });
        self.open_in(self.groups.len() - 1)
    }

    /// Opens an account for an inspector of the queue with this account.
    pub fn open(&mut self, queue: Account) -> Account {
        self.open_in(self.rows[usize::from(queue.0)].group)
    }

    fn open_in(&mut self, group: usize) -> Account {
        let row = Row { group, used: Usage::default(), guarantee: Usage::default(), closed: false };
        let account = match self.free.pop() {
            Some(account) => {
                self.rows[usize::from(account.0)] = row;
                account
            }
            // No number is left: the inspector has no separate guarantee.
            None if self.rows.len() > usize::from(u16::MAX) => return Account::ENGINE,
            None => {
                self.rows.push(row);
                Account((self.rows.len() - 1) as u16)
            }
        };
        self.groups[group].accounts += 1;
        self.divide();
        account
    }

    /// Closes an inspector's account. Its packets stay charged until they leave.
    pub fn close(&mut self, account: Account) {
        let row = &mut self.rows[usize::from(account.0)];
        if account == Account::ENGINE || std::mem::replace(&mut row.closed, true) {
            return;
        }
        let (group, empty) = (row.group, row.used == Usage::default());
        self.groups[group].accounts -= 1;
        if empty {
            self.free.push(account);
        }
        self.divide();
    }

    /// Computes the guarantees again.
    fn divide(&mut self) {
        let Self { limits, rows, groups, separate, .. } = self;
        let weights: usize = groups.iter().map(|group| group.weight).sum();
        let mut guaranteed = Usage::default();
        self.excess = Usage::default();
        for row in rows {
            let Group { weight, accounts, .. } = groups[row.group];
            let part = |limit: usize| match *separate && !row.closed {
                true => (limit as u128 / 2 * weight as u128 / (weights * accounts) as u128) as usize,
                false => 0,
            };
            row.guarantee = Usage { packets: part(limits.packets), bytes: part(limits.bytes) };
            guaranteed.add(row.guarantee);
            self.excess.add(row.used.beyond(row.guarantee));
        }
        let all = Usage { packets: limits.packets, bytes: limits.bytes };
        self.common = all.beyond(guaranteed);
    }

    /// Returns true if `more` may be charged to the account.
    #[inline]
    pub fn admits(&self, account: Account, more: Usage) -> bool {
        let Self { limits, used, excess, common, .. } = self;
        if !self.separate {
            return used.packets + more.packets <= 2 * limits.packets
                && used.bytes + more.bytes <= 2 * limits.bytes;
        }
        let Row { used: own, guarantee, closed, .. } = self.rows[usize::from(account.0)];
        let admits = |more: usize,
                      limit: usize,
                      used: usize,
                      own: usize,
                      guarantee: usize,
                      excess: usize,
                      common: usize| {
            let beyond = (own + more).saturating_sub(guarantee) - own.saturating_sub(guarantee);
            used + more <= limit && (beyond == 0 || excess + beyond <= common)
        };
        !closed
            && admits(
                more.packets,
                limits.packets,
                used.packets,
                own.packets,
                guarantee.packets,
                excess.packets,
                common.packets,
            )
            && admits(
                more.bytes,
                limits.bytes,
                used.bytes,
                own.bytes,
                guarantee.bytes,
                excess.bytes,
                common.bytes,
            )
    }

    /// Returns true if there is room for a packet without regard to accounts.
    pub(crate) fn has_room(&self) -> bool {
        self.used.packets < self.limits.packets && self.used.bytes < self.limits.bytes
    }

    /// Counts a packet that was refused, for the account's queue.
    pub(crate) fn count_refused(&mut self, account: Account) {
        self.groups[self.rows[usize::from(account.0)].group].refused += 1;
    }

    /// The packets and bytes of the account's queue and of its inspectors, and the number of refused packets.
    pub(crate) fn usage(&self, account: Account) -> (Usage, u64) {
        let group = self.rows[usize::from(account.0)].group;
        let mut used = Usage::default();
        self.rows.iter().filter(|row| row.group == group).for_each(|row| used.add(row.used));
        (used, self.groups[group].refused)
    }

    /// The sum of the charges of all accounts.
    pub fn used(&self) -> Usage {
        self.used
    }

    /// Charges another account with what `from` was charged with.
    pub(crate) fn move_usage(&mut self, from: Account, to: Account, usage: Usage) {
        if from != to {
            self.release(from, usage);
            self.charge(to, usage);
        }
    }

    #[inline]
    pub(crate) fn charge(&mut self, account: Account, more: Usage) {
        let row = &mut self.rows[usize::from(account.0)];
        self.excess.sub(row.used.beyond(row.guarantee));
        row.used.add(more);
        self.excess.add(row.used.beyond(row.guarantee));
        self.used.add(more);
    }

    #[inline]
    pub(crate) fn release(&mut self, account: Account, less: Usage) {
        let row = &mut self.rows[usize::from(account.0)];
        self.excess.sub(row.used.beyond(row.guarantee));
        row.used.sub(less);
        self.excess.add(row.used.beyond(row.guarantee));
        self.used.sub(less);
        if row.closed && row.used == Usage::default() && less.packets > 0 {
            self.free.push(account);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMITS: Limits = Limits { packets: 48, bytes: 4800 };

    fn usage(packets: usize, bytes: usize) -> Usage {
        Usage { packets, bytes }
    }

    /// Fills an account with packets of 1 byte, and returns their number.
    fn fill(shares: &mut Shares, account: Account) -> usize {
        let mut count = 0;
        while shares.admits(account, usage(1, 1)) {
            shares.charge(account, usage(1, 1));
            count += 1;
        }
        count
    }

    #[test]
    fn each_queue_and_each_inspector_has_its_guarantee() {
        let mut shares = Shares::new(LIMITS, true);
        let queues = [shares.add_queue(1), shares.add_queue(1)];
        let inspectors = [shares.open(queues[0]), shares.open(queues[1])];
        // 24 are guaranteed: 8 for each of the engine and the queues, 4 for each account of a queue.
        assert_eq!(fill(&mut shares, inspectors[0]), 4 + 24);
        assert_eq!(fill(&mut shares, inspectors[1]), 4);
        assert_eq!(fill(&mut shares, queues[1]), 4);
        assert_eq!(fill(&mut shares, Account::ENGINE), 8);
        assert_eq!(fill(&mut shares, queues[0]), 4);
        assert_eq!(shares.used().packets, LIMITS.packets);
        shares.count_refused(inspectors[0]);
        assert_eq!(shares.usage(queues[0]), (usage(32, 32), 1));
    }

    #[test]
    fn a_weight_is_a_proportion() {
        let mut shares = Shares::new(LIMITS, true);
        let (light, heavy) = (shares.add_queue(1), shares.add_queue(4));
        assert_eq!(fill(&mut shares, Account::ENGINE), 4 + 24);
        assert_eq!((fill(&mut shares, light), fill(&mut shares, heavy)), (4, 16));
    }

    #[test]
    fn a_closed_account_is_used_again_when_it_is_empty() {
        let mut shares = Shares::new(LIMITS, true);
        let queue = shares.add_queue(1);
        let first = shares.open(queue);
        shares.charge(first, usage(1, 9));
        shares.close(first);
        shares.close(first);
        let second = shares.open(queue);
        assert_ne!(first, second);
        shares.release(first, usage(0, 9));
        shares.release(first, usage(1, 0));
        assert_eq!(shares.open(queue), first);
        for _ in 0..1000 {
            let inspector = shares.open(queue);
            shares.close(inspector);
        }
        assert_eq!(shares.rows.len(), 5);
        shares.close(Account::ENGINE);
        assert!(shares.admits(Account::ENGINE, usage(1, 1)));
    }

    #[test]
    fn accounts_of_a_replay_are_not_separate() {
        let mut shares = Shares::new(LIMITS, false);
        let queue = shares.add_queue(1);
        assert_eq!(fill(&mut shares, queue), 96);
        assert!(!shares.has_room() && !shares.admits(Account::ENGINE, usage(1, 1)));
    }

    #[derive(Clone, Debug)]
    enum Op {
        Open(usize),
        Close(usize),
        Add(usize, usize),
        Leave(usize),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            1 => (0usize..3).prop_map(Op::Open),
            1 => (0usize..8).prop_map(Op::Close),
            8 => (0usize..8, 0usize..400).prop_map(|(account, bytes)| Op::Add(account, bytes)),
            5 => (0usize..64).prop_map(Op::Leave),
        ]
    }

    /// An account of the model: its queue, and the bytes of its packets.
    #[derive(Debug)]
    struct Plain {
        account: Account,
        queue: usize,
        open: bool,
        packets: Vec<usize>,
    }

    const WEIGHTS: [usize; 3] = [1, 1, 2];

    impl Plain {
        fn used(&self) -> [usize; 2] {
            [self.packets.len(), self.packets.iter().sum()]
        }

        fn guarantee(&self, all: &[Self]) -> [usize; 2] {
            let members = all.iter().filter(|other| other.open && other.queue == self.queue).count();
            let part = |limit: usize| {
                if self.open {
                    limit / 2 * WEIGHTS[self.queue] / (WEIGHTS.iter().sum::<usize>() * members)
                } else {
                    0
                }
            };
            [part(LIMITS.packets), part(LIMITS.bytes)]
        }
    }

    /// The model's answer, from the definition: what would exceed the guarantees fits into the rest, and all fits into the limits.
    fn admits(all: &[Plain], which: usize, bytes: usize) -> bool {
        let limits = [LIMITS.packets, LIMITS.bytes];
        [1, bytes].into_iter().enumerate().all(|(at, more)| {
            let guarantees: Vec<usize> = all.iter().map(|plain| plain.guarantee(all)[at]).collect();
            let common = limits[at] - guarantees.iter().sum::<usize>();
            let used: Vec<usize> = all.iter().map(|plain| plain.used()[at]).collect();
            let beyond = |used: &[usize]| -> usize {
                used.iter().zip(&guarantees).map(|(used, guarantee)| used.saturating_sub(*guarantee)).sum()
            };
            let mut after = used.clone();
            after[which] += more;
            after.iter().sum::<usize>() <= limits[at]
                && (beyond(&after) == beyond(&used) || beyond(&after) <= common)
        })
    }

    proptest! {
        #[test]
        fn agrees_with_the_definition(ops in proptest::collection::vec(op(), 1..300)) {
            let mut shares = Shares::new(LIMITS, true);
            let plain = |account, queue| Plain { account, queue, open: true, packets: Vec::new() };
            let mut all = vec![plain(Account::ENGINE, 0)];
            let queues = [Account::ENGINE, shares.add_queue(1), shares.add_queue(2)];
            all.extend([plain(queues[1], 1), plain(queues[2], 2)]);
            for op in ops {
                match op {
                    Op::Open(queue) => all.push(plain(shares.open(queues[queue]), queue)),
                    Op::Close(at) if at + 3 < all.len() => {
                        shares.close(all[at + 3].account);
                        all[at + 3].open = false;
                    }
                    Op::Add(at, bytes) => {
                        let at = at % all.len();
                        if all[at].open {
                            let fits = shares.admits(all[at].account, usage(1, bytes));
                            prop_assert_eq!(fits, admits(&all, at, bytes));
                            if fits {
                                shares.charge(all[at].account, usage(1, bytes));
                                all[at].packets.push(bytes);
                            }
                        }
                    }
                    Op::Leave(at) => {
                        let at = at % all.len();
                        if let Some(bytes) = all[at].packets.pop() {
                            shares.release(all[at].account, usage(0, bytes));
                            shares.release(all[at].account, usage(1, 0));
                        }
                    }
                    Op::Close(_) => {}
                }
                // The number of a closed account that is empty is used again.
                all.retain(|plain| plain.open || !plain.packets.is_empty());
                let sum = |at: usize| all.iter().map(|plain| plain.used()[at]).sum::<usize>();
                prop_assert_eq!(shares.used(), usage(sum(0), sum(1)));
                prop_assert!(shares.used().packets <= LIMITS.packets && shares.used().bytes <= LIMITS.bytes);
            }
        }
    }
}
