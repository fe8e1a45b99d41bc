//! The reorder buffer: packets that wait for a verdict, and later packets of the same bucket that passed.
//!
//! What: each packet belongs to a bucket, and the packets of a bucket leave in the order in which they were added. While a bucket is
//! not clear, a packet that passes joins it at the back. Packets leave a bucket only at its front, once they are decided.
//! Buckets do not wait for each other. A replay has one bucket: all packets leave in the order of the capture. A live engine
//! gives each flow a bucket while the flow has packets in the buffer ([`ReorderBuffer::bucket_of`]), so that a flow that waits delays no
//! other. The hash of the flow selects a set of four buckets. Each of the first three belongs to one flow. Flows that find none share the
//! last one.
//!
//! Each packet is charged to an account ([`Shares`]), which bounds the packets and the bytes. A packet of no queue that waits only
//! for its turn is charged to the account of the packet at the front of its bucket: the one that it waits for.
//!
//! Invariants: a bucket is clear, or its front waits for a verdict, or the bucket is in `ready`, which
//! [`ReorderBuffer::flush`] empties. The accounts are charged with the entries that are not free, and with the sum of their `charged` bytes.

mod shares;
mod spare;
#[cfg(test)]
mod tests;

pub use self::shares::{Account, Limits, Shares, Usage};
use self::spare::SpareBuffers;

/// The name of a packet while it is in the buffer. Names are not reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct PacketId {
    generation: u32,
    at: u32,
}

/// The bytes of a packet and its metadata.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held<M> {
    bytes: Bytes,
    /// The metadata.
    pub meta: M,
}

/// The bytes of a packet.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Bytes {
    /// In the burst: the packet's index there, and its length.
    Borrowed(u32, u32),
    Own(Vec<u8>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    /// The packet waits for a verdict, for room, or for its turn.
    Waiting,
    /// The packet leaves when its turn comes.
    Passed,
    /// The packet was dropped or moved. The entry remains until its turn comes.
    Gone,
}

/// An entry of the buffer. Its contents, several cache lines, do not move while its state changes.
#[derive(Debug)]
struct Entry<M, W> {
    state: State,
    generation: u32,
    bucket: u16,
    account: Account,
    /// Bytes that the account is charged with. While a replacement is not yet in its place, this is the longer of the two.
    charged: u32,
    /// The next entry of the bucket or of the free list.
    next: u32,
    held: Held<M>,
    /// The packet's state on its path. `None` for a packet that never waited.
    walk: Option<W>,
}

#[derive(Clone, Copy, Debug)]
struct Bucket {
    front: u32,
    back: u32,
    /// The hash of the flow that it belongs to, while it is not clear.
    flow: u32,
}

/// Buckets of a set.
const WAYS: usize = 4;

/// No entry.
const NONE: u32 = u32::MAX;

const CLEAR: Bucket = Bucket { front: NONE, back: NONE, flow: 0 };

/// The reorder buffer. See the module's documentation.
#[derive(Debug)]
pub struct ReorderBuffer<M, W> {
    entries: Vec<Entry<M, W>>,
    /// The first free entry.
    free: u32,
    buckets: Box<[Bucket]>,
    /// Buckets whose front was decided.
    ready: Vec<u16>,
    shares: Shares,
    waiting: usize,
    /// Free byte buffers, so that the buffer allocates only until it is warm.
    spare: SpareBuffers,
    /// Packets that were added with borrowed bytes.
    borrowed: Vec<PacketId>,
}

impl Default for Bytes {
    fn default() -> Self {
        Self::Own(Vec::new())
    }
}

impl Bytes {
    fn len(&self) -> usize {
        match self {
            Self::Borrowed(_, len) => *len as usize,
            Self::Own(bytes) => bytes.len(),
        }
    }
}

impl<M> Held<M> {
    /// The packet's index in the burst, if its bytes are borrowed.
    pub fn borrowed(&self) -> Option<usize> {
        match self.bytes {
            Bytes::Borrowed(index, _) => Some(index as usize),
            Bytes::Own(_) => None,
        }
    }

    /// The bytes. `borrowed` returns the bytes at an index of the burst.
    pub fn bytes<'a>(&'a self, borrowed: impl FnOnce(usize) -> &'a [u8]) -> &'a [u8] {
        match &self.bytes {
            Bytes::Borrowed(index, _) => borrowed(*index as usize),
            Bytes::Own(bytes) => bytes,
        }
    }

    /// The bytes and the metadata for changes. Borrowed bytes are copied.
    pub fn parts_mut<'a>(&mut self, borrowed: impl FnOnce(usize) -> &'a [u8]) -> (&mut [u8], &mut M) {
        if let Bytes::Borrowed(index, _) = self.bytes {
            self.bytes = Bytes::Own(borrowed(index as usize).to_vec());
        }
        match &mut self.bytes {
            Bytes::Own(bytes) => (bytes, &mut self.meta),
            Bytes::Borrowed(..) => unreachable!("the bytes were copied"),
        }
    }
}

impl<M, W> ReorderBuffer<M, W> {
    /// Creates a buffer. With `separate` accounts, each queue has its share ([`Shares`]).
    pub fn new(buckets: u16, limits: Limits, separate: bool) -> Self {
        Self {
            entries: Vec::new(),
            free: NONE,
            buckets: vec![CLEAR; usize::from(buckets)].into(),
            ready: Vec::new(),
            shares: Shares::new(limits, separate),
            waiting: 0,
            spare: SpareBuffers::new(limits.bytes),
            borrowed: Vec::new(),
        }
    }

    /// Returns true if the buffer is empty.
    pub fn is_empty(&self) -> bool {
        self.shares.used().packets == 0
    }

    /// The accounts.
    pub fn shares(&self) -> &Shares {
        &self.shares
    }

    /// Sets the bounds. Packets that exceed them stay until they are decided.
    pub fn set_limits(&mut self, limits: Limits) {
        self.shares.set_limits(limits);
        self.spare.set_limit(limits.bytes);
    }

    /// The accounts, to open and to close some.
    pub fn shares_mut(&mut self) -> &mut Shares {
        &mut self.shares
    }

    /// Returns true if the bucket is empty: a packet of it that passes may leave at once.
    pub fn is_clear(&self, bucket: u16) -> bool {
        self.buckets[usize::from(bucket)].front == NONE
    }

    /// The bucket for the next packet of the flow with this hash. The packet must be added before another bucket is asked for.
    ///
    /// While a flow has packets in the buffer, its bucket stays the same: a flow that shares the last bucket of a set finds it not clear.
    pub fn bucket_of(&mut self, flow: u32) -> u16 {
        let sets = self.buckets.len() / WAYS;
        let first = ((u64::from(flow) * sets as u64) >> u32::BITS) as usize * WAYS;
        let Some([own @ .., shared]) = self.buckets.get(first..first + WAYS) else { return 0 };
        let mut way = WAYS - 1;
        for (at, bucket) in own.iter().enumerate() {
            if bucket.front == NONE {
                way = at;
            } else if bucket.flow == flow {
                return (first + at) as u16;
            }
        }
        if shared.front != NONE {
            way = WAYS - 1;
        }
        self.buckets[first + way].flow = flow;
        (first + way) as u16
    }

    /// Returns true if there is room for a packet, without regard to accounts.
    pub fn has_room(&self) -> bool {
        self.shares.has_room()
    }

    /// Returns true if the account may be charged with a packet of `len` bytes.
    #[inline]
    pub fn admits(&self, account: Account, len: usize) -> bool {
        self.shares.admits(account, Usage { packets: 1, bytes: len })
    }

    /// The account of the packet at the front of a bucket. The engine's account if the bucket is clear.
    pub fn front_account(&self, bucket: u16) -> Account {
        let front = self.buckets[usize::from(bucket)].front;
        self.entries.get(front as usize).map_or(Account::ENGINE, |entry| entry.account)
    }

    /// The account that a waiting packet is charged to. Returns `None` if it does not wait.
    pub fn account(&mut self, id: PacketId) -> Option<Account> {
        self.waiting_entry(id).map(|entry| entry.account)
    }

    /// Charges a packet to another account. No effect if it is not in the buffer.
    pub fn charge_to(&mut self, id: PacketId, account: Account) {
        let Self { entries, shares, .. } = self;
        if let Some(entry) = entry_mut(entries, id) {
            let usage = Usage { packets: 1, bytes: entry.charged as usize };
            shares.move_usage(entry.account, account, usage);
            entry.account = account;
        }
    }

    /// Charges a waiting packet with the bytes of its replacement, which follows. Returns false if its account has no room.
    pub fn admit_replacement(&mut self, id: PacketId, len: usize) -> bool {
        let Self { entries, shares, .. } = self;
        let Some(entry) = entry_mut(entries, id) else { return true };
        let more = Usage { packets: 0, bytes: len.saturating_sub(entry.charged as usize) };
        let admitted = more.bytes == 0 || shares.admits(entry.account, more);
        if admitted {
            shares.charge(entry.account, more);
            entry.charged += more.bytes as u32;
        }
        admitted
    }

    /// The number of packets that wait.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// The first waiting packet of the first bucket that is not clear.
    pub fn oldest_waiting(&self) -> Option<PacketId> {
        let mut at = self.buckets.iter().map(|bucket| bucket.front).find(|&front| front != NONE)?;
        while at != NONE {
            let entry = &self.entries[at as usize];
            if entry.state == State::Waiting {
                return Some(PacketId { generation: entry.generation, at });
            }
            at = entry.next;
        }
        None
    }

    /// All packets that wait.
    pub fn waiting_ids(&self) -> Vec<PacketId> {
        let waits = |(_, entry): &(u32, &Entry<M, W>)| entry.state == State::Waiting;
        let id = |(at, entry): (u32, &Entry<M, W>)| PacketId { generation: entry.generation, at };
        (0..).zip(&self.entries).filter(waits).map(id).collect()
    }

    /// Adds a packet that waits. Copies its bytes.
    pub fn push_waiting(
        &mut self,
        bytes: &[u8],
        meta: M,
        walk: W,
        (bucket, account): (u16, Account),
    ) -> PacketId {
        let held = self.store(bytes, meta);
        self.waiting += 1;
        self.push(State::Waiting, held, Some(walk), (bucket, account))
    }

    /// Adds a packet that waits, at `index` of the current burst. Its `len` bytes are borrowed until [`keep`](Self::keep).
    pub fn push_borrowed(
        &mut self,
        index: usize,
        len: usize,
        meta: M,
        walk: W,
        (bucket, account): (u16, Account),
    ) -> PacketId {
        self.waiting += 1;
        let held = Held { bytes: Bytes::Borrowed(index as u32, len as u32), meta };
        let id = self.push(State::Waiting, held, Some(walk), (bucket, account));
        self.borrowed.push(id);
        id
    }

    /// Ends the burst: copies the borrowed bytes of packets that still wait.
    pub fn keep<'a>(&mut self, burst: impl Fn(usize) -> &'a [u8]) {
        let mut borrowed = std::mem::take(&mut self.borrowed);
        for id in borrowed.drain(..) {
            let Self { entries, spare, .. } = self;
            if let Some(entry) = entry_mut(entries, id)
                && let Bytes::Borrowed(index, _) = entry.held.bytes
            {
                entry.held.bytes = Bytes::Own(spare.copy(burst(index as usize)));
            }
        }
        self.borrowed = borrowed;
    }

    /// Adds a packet that passed. Copies its bytes.
    pub fn push_passed(&mut self, bytes: &[u8], meta: M, (bucket, account): (u16, Account)) {
        let held = self.store(bytes, meta);
        let id = self.push(State::Passed, held, None, (bucket, account));
        self.note(id);
    }

    /// A waiting packet and its state on its path. `None` if it does not wait.
    pub fn waiting_mut(&mut self, id: PacketId) -> Option<(&mut Held<M>, &mut W)> {
        let Entry { held, walk, .. } = self.waiting_entry(id)?;
        Some((held, walk.as_mut()?))
    }

    /// The same, with the accounts.
    pub fn waiting_with_shares(&mut self, id: PacketId) -> Option<(&mut Held<M>, &mut W, &Shares)> {
        let Self { entries, shares, .. } = self;
        let entry = entry_mut(entries, id).filter(|entry| entry.state == State::Waiting)?;
        Some((&mut entry.held, entry.walk.as_mut()?, shares))
    }

    /// A waiting packet passes. From now on it waits only for its turn: it is charged to the account of the packet at the front of its
    /// bucket, if that account has room. No effect if it does not wait.
    pub fn pass(&mut self, id: PacketId) {
        let Some(entry) = self.waiting_entry(id) else { return };
        entry.state = State::Passed;
        let (bucket, own, len) = (entry.bucket, entry.account, entry.charged as usize);
        self.waiting -= 1;
        let front = self.front_account(bucket);
        if front != own && self.admits(front, len) {
            self.charge_to(id, front);
        }
        self.note(id);
    }

    /// A waiting packet does not pass. No effect if it does not wait.
    pub fn discard(&mut self, id: PacketId) {
        let Some(entry) = self.waiting_entry(id) else { return };
        entry.state = State::Gone;
        let (account, charged) = (entry.account, std::mem::take(&mut entry.charged) as usize);
        self.waiting -= 1;
        self.shares.release(account, Usage { packets: 0, bytes: charged });
        self.reclaim(id.at);
        self.note(id);
    }

    /// Moves a waiting packet to the back of another bucket. Returns its new name, or `None` if it does not wait. Its entry in the old
    /// bucket counts as a packet until its turn comes.
    pub fn move_to(&mut self, id: PacketId, bucket: u16) -> Option<PacketId>
    where
        M: Copy,
    {
        let entry = self.waiting_entry(id)?;
        entry.state = State::Gone;
        let (bytes, walk, account) =
            (std::mem::take(&mut entry.held.bytes), entry.walk.take(), entry.account);
        let charged = std::mem::take(&mut entry.charged) as usize;
        let held = Held { bytes, meta: entry.held.meta };
        self.shares.release(account, Usage { packets: 0, bytes: charged });
        self.note(id);
        let borrowed = matches!(held.bytes, Bytes::Borrowed(..));
        let id = self.push(State::Waiting, held, walk, (bucket, account));
        if borrowed {
            self.borrowed.push(id);
        }
        Some(id)
    }

    /// Replaces the bytes of a waiting packet. No effect if it does not wait.
    pub fn replace(&mut self, id: PacketId, bytes: &[u8]) {
        let Self { entries, spare, shares, .. } = self;
        let Some(entry) = entry_mut(entries, id).filter(|entry| entry.state == State::Waiting) else {
            return;
        };
        if let Bytes::Own(own) = std::mem::replace(&mut entry.held.bytes, Bytes::Own(spare.copy(bytes))) {
            spare.keep(own);
        }
        let before = std::mem::replace(&mut entry.charged, bytes.len() as u32);
        shares.release(entry.account, Usage { packets: 0, bytes: before as usize });
        shares.charge(entry.account, Usage { packets: 0, bytes: bytes.len() });
    }

    /// Calls `out` with each passed packet that follows no waiting packet of its bucket.
    ///
    /// # Errors
    ///
    /// Returns an error of `out`. That packet is removed, and the others remain.
    pub fn flush<E>(&mut self, mut out: impl FnMut(&Held<M>) -> Result<(), E>) -> Result<(), E> {
        while let Some(&bucket) = self.ready.last() {
            let at = self.buckets[usize::from(bucket)].front;
            let Some(entry) = self.entries.get(at as usize) else {
                self.ready.pop();
                continue;
            };
            match entry.state {
                State::Waiting => {
                    self.ready.pop();
                }
                State::Passed => {
                    let sent = out(&entry.held);
                    self.reclaim(at);
                    self.unlink(bucket, at);
                    sent?;
                }
                State::Gone | State::Free => self.unlink(bucket, at),
            }
        }
        Ok(())
    }

    fn waiting_entry(&mut self, id: PacketId) -> Option<&mut Entry<M, W>> {
        entry_mut(&mut self.entries, id).filter(|entry| entry.state == State::Waiting)
    }

    fn push(
        &mut self,
        state: State,
        held: Held<M>,
        walk: Option<W>,
        (bucket, account): (u16, Account),
    ) -> PacketId {
        let charged = held.bytes.len() as u32;
        self.shares.charge(account, Usage { packets: 1, bytes: charged as usize });
        let mut entry = Entry { state, generation: 0, bucket, account, charged, next: NONE, held, walk };
        let at = match self.free {
            NONE => {
                self.entries.push(entry);
                (self.entries.len() - 1) as u32
            }
            at => {
                let place = &mut self.entries[at as usize];
                self.free = place.next;
                entry.generation = place.generation;
                *place = entry;
                at
            }
        };
        let ends = &mut self.buckets[usize::from(bucket)];
        match std::mem::replace(&mut ends.back, at) {
            NONE => ends.front = at,
            back => self.entries[back as usize].next = at,
        }
        PacketId { generation: self.entries[at as usize].generation, at }
    }

    /// A packet was decided: its bucket may have packets that leave.
    fn note(&mut self, id: PacketId) {
        let bucket = self.entries[id.at as usize].bucket;
        if self.buckets[usize::from(bucket)].front == id.at {
            self.ready.push(bucket);
        }
    }

    /// Removes the front of a bucket.
    fn unlink(&mut self, bucket: u16, at: u32) {
        let entry = &mut self.entries[at as usize];
        let charged = std::mem::take(&mut entry.charged) as usize;
        self.shares.release(entry.account, Usage { packets: 1, bytes: charged });
        let next = std::mem::replace(&mut entry.next, self.free);
        entry.state = State::Free;
        // Older names of this entry are invalid from now on.
        entry.generation = entry.generation.wrapping_add(1);
        self.free = at;
        let ends = &mut self.buckets[usize::from(bucket)];
        ends.front = next;
        if next == NONE {
            ends.back = NONE;
        }
    }

    fn store(&mut self, bytes: &[u8], meta: M) -> Held<M> {
        Held { bytes: Bytes::Own(self.spare.copy(bytes)), meta }
    }

    /// Keeps the byte buffer of an entry for another one.
    fn reclaim(&mut self, at: u32) {
        let entry = &mut self.entries[at as usize];
        if let Bytes::Own(buffer) = std::mem::take(&mut entry.held.bytes) {
            self.spare.keep(buffer);
        }
    }
}

#[inline]
fn entry_mut<M, W>(entries: &mut [Entry<M, W>], id: PacketId) -> Option<&mut Entry<M, W>> {
    entries.get_mut(id.at as usize).filter(|entry| entry.generation == id.generation)
}
