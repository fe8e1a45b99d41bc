//! The policy of a queue with several listeners.

/// Selection of the listener for a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fanout {
    /// The first listener. The others are standby.
    Exclusive,
    /// One listener per flow, by [`Meta::hash`](crate::Meta::hash). A flow moves only if its listener leaves, or to a listener that
    /// joins.
    FlowHash,
    /// One listener per CPU.
    Cpu,
    /// The listener with the fewest outstanding frames.
    LeastLoaded,
    /// Every listener; each has a copy and gives a verdict. With [`Overload::Block`], no listener gets a frame while
    /// one is above its marks. Set the marks below the capacity of the rings: a full ring loses that listener's
    /// copy, which is counted and reported to the listener.
    Broadcast,
    /// Every listener that has space. The queue never waits for a listener, and the verdicts have no effect.
    Mirror,
}

/// Policy for a frame whose listener has no space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Overload {
    /// The caller retries: back-pressure.
    Block,
    /// This frame is lost.
    DropNewest,
    /// The frame enters a backlog of this many frames; a full backlog loses its oldest frame.
    DropOldest(usize),
    /// The frame passes without inspection: fail open.
    Pass,
    /// The frame is dropped: fail closed.
    Drop,
    /// The frame goes to this queue.
    Queue(u16),
}

impl Overload {
    /// Returns true if a frame is kept or offered again until there is space. Otherwise its verdict is immediate,
    /// even for a frame that is too large.
    pub(super) fn waits(self) -> bool {
        matches!(self, Self::Block | Self::DropNewest | Self::DropOldest(_))
    }
}

/// Behaviour of a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// Selection of the listener. The default is [`Fanout::Exclusive`].
    pub fanout: Fanout,
    /// Policy for a frame without space. The default is [`Overload::Drop`].
    pub overload: Overload,
    /// High mark: a listener with this many outstanding frames is overloaded. By default there is no mark: overloaded if
    /// the ring is full.
    pub high: u32,
    /// Low mark: the listener is overloaded until it has this many frames or fewer.
    pub low: u32,
}

impl Default for Policy {
    /// Exclusive, fail closed, overloaded only if the ring is full.
    fn default() -> Self {
        Self { fanout: Fanout::Exclusive, overload: Overload::Drop, high: u32::MAX, low: u32::MAX }
    }
}
