//! Lanes that start small and grow: the rings of a lane are replaced by larger ones while frames are out.
//!
//! ```text
//! engine                                        client
//! makes the memory, offers it on the socket
//! says in the old memory: "from n on elsewhere" has received everything before n, and reads that
//! publishes n in the new rings                  takes the offer, maps it, says "from m on elsewhere" for its own ring
//! old rings: takes back what is out,            old rings: decides what it has, until nothing is left
//!   takes messages up to m
//! drops them when both are done                 drops them
//! ```
//!
//! Invariants: numbers go on, so they are dense and in order whatever ring they are in; there are at most two generations, and
//! the lane does not grow again before the older one is gone, so a client that holds on to a frame pins one ring, which
//! counts against its user's bytes. What belongs to the lane (need_wakeup, losses) stays in the first page of its first memory.
//! Race: the client reads "from n on elsewhere" after it has found no header n, with acquire; the engine wrote it, with
//! release, after all headers before n, so the client has seen them all or will look again.

use crate::engine::channel::{Channel, Full};
use crate::engine::endpoint::Config;
use crate::engine::quota::More;
use crate::engine::rings::{First, Rings};
use crate::handshake::messages::Offer;
use crate::shm::abi::{self, Layout};
use crate::shm::geometry::Geometry;
use crate::shm::seq::Seq;
use crate::shm::sync::Ordering;
use crate::shm::sys::{self, Sent};

/// Occasions to grow that are let pass when the client did not take an offer; twice as many each time.
const PATIENCE: u32 = 64;
/// Most of them.
const MOST_PATIENCE: u32 = 1 << 16;

/// How a lane grows. It begins with [`Config::rx`] and [`Config::tx`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Growth {
    /// Most bytes of either payload area. The default is 16 MiB.
    pub max_bytes: u32,
    /// How many times the ring must have been full, with room in between, before it grows; a message that is larger than it,
    /// and a client whose own ring is full, do not wait for that. The default is 8.
    pub after: u32,
}

impl Default for Growth {
    fn default() -> Self {
        Self { max_bytes: 16 << 20, after: 8 }
    }
}

/// A lane that may grow.
#[derive(Debug)]
pub(crate) struct Growing {
    growth: Growth,
    config: Config,
    /// Times that the ring was full since it is as large as it is.
    pressed: u32,
    /// Whether it was full when a message was last sent.
    full: bool,
    /// The client has said that its ring is full, and nothing came of it yet.
    asked: bool,
    /// A limit or the system has refused: not asked again.
    refused: bool,
    /// The client did not take the last offer: so many occasions are let pass before the next, and
    put_off: u32,
    /// so many when that comes to nothing, too.
    patience: u32,
    /// Rings that were made.
    #[cfg(test)]
    tried: u64,
    /// What the present rings count beyond the lane's first ones.
    more: Option<More>,
}

/// The rings before the present ones, until they are drained.
#[derive(Debug)]
pub(crate) struct Old {
    pub(crate) rings: Rings,
    /// The client's messages are in the present rings, and all before were taken.
    pub(crate) tx_moved: bool,
    _more: Option<More>,
}

impl Growing {
    pub(crate) fn new(config: &Config) -> Option<Box<Self>> {
        let growth = config.growth?;
        let config = config.clone();
        Some(Box::new(Self {
            growth,
            config,
            pressed: 0,
            full: false,
            asked: false,
            refused: false,
            put_off: 0,
            patience: PATIENCE,
            #[cfg(test)]
            tried: 0,
            more: None,
        }))
    }

    /// Whether the client waits for larger rings that it had no room to be offered.
    pub(crate) fn is_put_off(&self) -> bool {
        self.asked && self.patience > PATIENCE
    }

    /// The client reads nothing of what it is sent. To make rings takes long, and would be in vain for each message again.
    #[cold]
    fn put_off(&mut self) {
        self.put_off = self.patience;
        self.patience = (2 * self.patience).min(MOST_PATIENCE);
    }
}

/// Which ring is short of room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Short {
    /// The one towards the client, for a message of so many bytes.
    Rx(usize),
    /// The one towards us.
    Tx,
}

impl Channel {
    /// There was room.
    #[inline]
    pub(crate) fn at_ease(&mut self) {
        if let Some(growing) = &mut self.growing {
            growing.full = false;
        }
    }

    /// A message of `len` bytes has found no room; whether there are larger rings now.
    #[cold]
    pub(crate) fn pressed(&mut self, why: Full, len: usize) -> bool {
        let Some(growing) = &mut self.growing else { return false };
        let again = std::mem::replace(&mut growing.full, true);
        growing.pressed += u32::from(!again);
        let due = why == Full::TooLarge || growing.pressed >= growing.growth.after;
        due && self.grow(Short::Rx(len))
    }

    /// The client's own ring is full.
    #[cold]
    pub(crate) fn asked_to_grow(&mut self) {
        if let Some(growing) = &mut self.growing {
            growing.asked = true;
            self.grow(Short::Tx);
        }
    }

    /// Replaces the rings by larger ones, in which there is room.
    fn grow(&mut self, short: Short) -> bool {
        let Some(growing) = &mut self.growing else { return false };
        let next = self.rings.rx.frames.next_seq();
        if growing.refused || self.old.is_some() || self.life.is_over() {
            return false;
        }
        let Some(layout) = larger(&self.rings.layout, growing.growth.max_bytes, short) else { return false };
        if growing.put_off > 0 {
            growing.put_off -= 1;
            return false;
        }
        #[cfg(test)]
        {
            growing.tried += 1;
        }
        let mut more = match self.life.share.more(layout.total_bytes()) {
            Ok(more) => more,
            Err(over) => {
                log::warn!("the rings of client {:?} do not grow: {over}", self.life.name);
                growing.refused = true;
                self.stats.grow_refused += 1;
                return false;
            }
        };
        let generation = self.rings.generation.wrapping_add(1);
        let first = First { generation, rx: next, tx: Seq::FIRST };
        let made = Rings::make(&growing.config, layout, first, None).and_then(|(rings, _, memory)| {
            let offer = Offer { lane: self.lane, generation, layout };
            Ok((rings, sys::send(self.life.socket(self.lane), &offer.emit(), &memory.fds())?))
        });
        let rings = match made {
            Ok((rings, Sent::Yes)) => rings,
            // It does not read what it is sent: later, perhaps.
            Ok((_, Sent::Full | Sent::Gone)) => {
                growing.put_off();
                return false;
            }
            Err(e) => {
                log::warn!("the rings of client {:?} do not grow: {e}", self.life.name);
                growing.refused = true;
                self.stats.grow_refused += 1;
                return false;
            }
        };
        more.lend();
        growing.pressed = 0;
        growing.asked = false;
        growing.patience = PATIENCE;
        let before = growing.more.replace(more);
        let old = std::mem::replace(&mut self.rings, rings);
        // Release: pairs with the acquire load in Consumer::is_over, in the client. Whoever sees it finds every message before
        // `next` in the old ring, and the offer on the socket.
        old.own.word(abi::MOVED).store(abi::moved(next), Ordering::Release);
        self.old = Some(Box::new(Old { rings: old, tx_moved: false, _more: before }));
        self.stats.grown += 1;
        true
    }

    /// Whether the client's messages are in the present rings.
    pub(crate) fn has_tx_moved(&mut self) -> bool {
        let Some(old) = &mut self.old else { return true };
        if !old.tx_moved
            && let Some(next) = old.rings.transmit.moved(&old.rings.theirs)
        {
            self.rings.transmit.begin(next);
            old.tx_moved = true;
        }
        old.tx_moved
    }

    /// Drops the old rings when nothing is left of them.
    pub(crate) fn drop_drained(&mut self) {
        let drained = self.old.as_ref().is_some_and(|old| {
            let frames = &old.rings.rx.frames;
            frames.free() == frames.frame_nr() && old.rings.transmit.held == 0
        });
        if drained && (!self.demands.messages || self.has_tx_moved()) {
            self.old = None;
            if self.growing.as_ref().is_some_and(|growing| growing.asked) {
                self.grow(Short::Tx);
            }
        }
    }
}

/// Twice the rings, or as much as the message that is too long needs to find room twice; none when the one that is short cannot be more.
fn larger(layout: &Layout, max_bytes: u32, short: Short) -> Option<Layout> {
    let len = if let Short::Rx(len) = short { len } else { 0 };
    let max = u64::from(max_bytes).min(Geometry::MAX_BYTES);
    let grown = |ring: Geometry, len: u64| {
        let block = u64::from(ring.block_size);
        let most = (max / block).min(u64::from(Geometry::MAX_FRAMES / (ring.block_size / ring.frame_size)));
        let wanted = (2 * u64::from(ring.block_nr)).max((2 * len).div_ceil(block)).min(most);
        let block_nr = u32::try_from(wanted).unwrap_or(0).max(ring.block_nr);
        Geometry { block_nr, frame_nr: ring.block_size / ring.frame_size * block_nr, ..ring }
    };
    let larger = Layout { rx: grown(layout.rx, len as u64), tx: grown(layout.tx, 0), ..*layout };
    let helps = if short == Short::Tx { larger.tx != layout.tx } else { larger.rx != layout.rx };
    (helps && larger.check().is_ok()).then_some(larger)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::handshake::messages::Notice;
    use crate::shm::sys::Received;
    use crate::{Meta, mock};

    #[test]
    fn rings_double_until_they_are_as_large_as_they_may_be() {
        let layout = Layout {
            rx: Geometry::with(64 << 10, 1024).unwrap(),
            tx: Geometry::with(8 << 10, 1024).unwrap(),
            records: 4,
        };
        let mut sizes = Vec::new();
        let mut now = layout;
        while let Some(next) = larger(&now, 300 << 10, Short::Tx) {
            // The ring towards the client is as large as it may be before the other one is: nothing more is done for it.
            let most = larger(&now, 300 << 10, Short::Rx(0));
            assert_eq!(most, (now.rx.bytes() < 256 << 10).then_some(next));
            assert_eq!(larger(&now, 300 << 10, Short::Rx(1 << 30)).is_some(), most.is_some());
            sizes.push((next.rx.bytes() >> 10, next.tx.bytes() >> 10));
            now = next;
        }
        // In blocks of 64 KiB and of pages.
        assert_eq!(sizes, [(128, 16), (256, 32), (256, 64), (256, 128), (256, 256), (256, 300)]);
        // A message that is larger than the ring fits twice.
        assert_eq!(larger(&layout, 16 << 20, Short::Rx(1 << 20)).unwrap().rx.bytes(), 2 << 20);
        // An argument of a verdict can name each frame.
        let most = Layout { rx: Geometry::with(64 << 20, 1024).unwrap(), ..layout };
        assert_eq!(larger(&most, u32::MAX, Short::Tx).unwrap().rx, most.rx);
    }

    /// Each message that finds no room would make rings that nobody takes.
    #[test]
    fn a_client_that_reads_nothing_is_offered_rings_seldom() {
        let growth = Some(Growth { max_bytes: 64 << 10, after: 1 });
        let config = Config { growth, deadline: None, ..mock::config() };
        let (mut lanes, clients) = mock::channel(&config);
        let (channel, client) = (&mut lanes[0], &clients[0]);
        while sys::send(channel.life.socket(0), &Notice::Doorbell.emit(), &[]).unwrap() == Sent::Yes {}
        while channel.send(&[1; 200], &Meta::default()).is_ok() {}
        for _ in 0..10_000 {
            assert_eq!(channel.send(&[1; 200], &Meta::default()), Err(Full::Lent));
        }
        let tried = channel.growing.as_ref().unwrap().tried;
        assert!((2..10).contains(&tried), "{tried} times");
        // What it asks for itself is no other matter.
        for _ in 0..100 {
            sys::send(&client.socket, &Notice::Full.emit(), &[]).unwrap();
            assert!(channel.check_peer());
        }
        assert!(channel.growing.as_ref().unwrap().tried < 10);
        // But it is offered some in the end, though it does not ask again.
        while !matches!(sys::recv(&client.socket, &mut [0; 8]), Ok(Received::Nothing)) {}
        for _ in 0..=MOST_PATIENCE {
            assert!(channel.check_peer());
        }
        assert_eq!(channel.stats().grown, 1);
        assert!(channel.send(&[1; 200], &Meta::default()).is_ok());
    }
}
