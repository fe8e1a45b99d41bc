//! The walk: the state of one packet during evaluation.

use super::port::{PortId, Ports};
use crate::state::{Lookup, Name, RuleId};

/// Maximum nesting of `call`, as in ipfw.
pub const CALL_DEPTH: usize = 16;
/// Maximum number of tags on one packet. Further tags are counted and not attached.
pub const MAX_TAGS: usize = 16;
/// Maximum number of calls, returns and state hits per packet. Without it some rulesets would loop without end.
pub(crate) const MAX_JUMPS: u16 = 256;

/// Direction of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dir {
    /// Incoming: received on a port.
    In,
    /// Outgoing: about to be transmitted on a port.
    Out,
}

/// Progress of one packet through the rules. The caller keeps it while an inspector holds the packet.
#[derive(Clone, Copy, Debug)]
pub struct Walk {
    pub(crate) dir: Dir,
    pub(crate) recv: Option<PortId>,
    pub(crate) xmit: Option<PortId>,
    /// Identity and number of the rule at which the walk stopped; `None` before the first rule.
    pub(crate) stopped: Option<(RuleId, u32)>,
    pub(crate) cache: LookupCache,
    /// The rule whose state the packet replies to; `None` in the direction of the state's first packet.
    pub(crate) answers: Option<RuleId>,
    pub(crate) stack: [RuleId; CALL_DEPTH],
    pub(crate) depth: u8,
    pub(crate) tag_count: u8,
    pub(crate) tags: [u16; MAX_TAGS],
    pub(crate) mark: u32,
    /// The mark of the kernel's connection tracking entry, if the packet came with one.
    pub(crate) connmark: Option<u32>,
    /// The pipe that was charged for the packet; 0 before the first. A pipe ends the walk, so the outgoing walk needs only the
    /// pipe of the incoming one.
    pub(crate) charged_pipe: u32,
    pub(crate) jumps: u16,
    pub(crate) zone: u16,
    /// `state-timeout` of the states that later rules make.
    pub(crate) timeout: Option<u32>,
    pub(crate) edits: Edits,
}

/// The last state lookup of the walk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LookupCache {
    /// No lookup yet.
    Empty,
    /// The last lookup was for this name.
    Named(Name),
    /// The last lookup was for any name.
    Any,
}

impl LookupCache {
    /// Returns true if the lookup can return a new result: it has a name that was not looked up for this packet. After a
    /// lookup of any name, no further lookup is needed.
    #[inline]
    pub(crate) fn needs(self, lookup: Lookup) -> bool {
        match self {
            Self::Empty => true,
            Self::Named(last) => lookup != Lookup::Named(last),
            Self::Any => false,
        }
    }
}

/// Changes that rules made to a packet. The caller applies them when the packet leaves ([`towpath_wire::edit`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Edits {
    /// Code point to set, 0 to 63.
    pub dscp: Option<u8>,
    /// Upper limit for the packet's maximum segment size.
    pub mss: Option<u16>,
}

impl Walk {
    /// Creates the walk of a packet before its first rule.
    pub fn new(dir: Dir, recv: Option<PortId>, xmit: Option<PortId>) -> Self {
        Self {
            dir,
            recv,
            xmit,
            stopped: None,
            cache: LookupCache::Empty,
            answers: None,
            stack: [RuleId(0); CALL_DEPTH],
            depth: 0,
            tag_count: 0,
            tags: [0; MAX_TAGS],
            mark: 0,
            connmark: None,
            charged_pipe: 0,
            jumps: 0,
            zone: 0,
            timeout: None,
            edits: Edits::default(),
        }
    }

    /// Sets the zone of the packet. Each zone has separate states. Without this call, or with 0, the zone is that of the receive
    /// port ([`Ports::set_zone`]), or of the transmit port of a packet that was not received.
    #[must_use]
    pub fn with_zone(mut self, zone: u16) -> Self {
        self.zone = zone;
        self
    }

    /// The zone of the packet, after its walk began.
    pub fn zone(&self) -> u16 {
        self.zone
    }

    /// Sets the zone of the packet by its port, unless it has one.
    #[inline]
    pub(crate) fn enter_zone(&mut self, ports: &Ports) {
        if let Some(port) = self.recv.or(self.xmit)
            && self.zone == 0
        {
            self.zone = ports.zone(port);
        }
    }

    /// Starts the outgoing walk for transmission on `xmit`. Keeps what belongs to the packet: mark, tags,
    /// edits and the charged pipe. Resets the position among the rules and the last lookup.
    pub fn leave(&mut self, xmit: PortId) {
        *self = Self {
            tag_count: self.tag_count,
            tags: self.tags,
            mark: self.mark,
            connmark: self.connmark,
            charged_pipe: self.charged_pipe,
            edits: self.edits,
            ..Self::new(Dir::Out, self.recv, Some(xmit)).with_zone(self.zone)
        };
    }

    /// Starts the walk of the received packet again at the first rule, as if it had just arrived. Keeps the mark and the charged pipe.
    pub fn restart(&mut self) {
        *self = Self {
            mark: self.mark,
            connmark: self.connmark,
            charged_pipe: self.charged_pipe,
            ..Self::new(Dir::In, self.recv, self.xmit.filter(|_| self.dir == Dir::In))
        };
    }

    /// Mark of the packet.
    pub fn mark(&self) -> u32 {
        self.mark
    }

    /// Sets the mark, as an inspector's verdict may do.
    pub fn set_mark(&mut self, mark: u32) {
        self.mark = mark;
    }

    /// Mark of the kernel's connection tracking entry, if the packet came with one.
    pub fn connmark(&self) -> Option<u32> {
        self.connmark
    }

    /// Sets the marks that the packet came with: its own, and that of the kernel's connection tracking entry.
    #[must_use]
    pub fn with_marks(mut self, mark: u32, connmark: Option<u32>) -> Self {
        (self.mark, self.connmark) = (mark, connmark);
        self
    }

    /// Tags of the packet.
    pub fn tags(&self) -> &[u16] {
        &self.tags[..usize::from(self.tag_count)]
    }

    /// Changes to apply before the packet leaves.
    pub fn edits(&self) -> Edits {
        self.edits
    }

    /// Direction.
    pub fn dir(&self) -> Dir {
        self.dir
    }

    /// Receive port.
    pub fn recv(&self) -> Option<PortId> {
        self.recv
    }

    /// Transmit port.
    pub fn xmit(&self) -> Option<PortId> {
        self.xmit
    }

    /// Number of the rule that decided last.
    pub fn rule(&self) -> Option<u32> {
        self.stopped.map(|(_, number)| number)
    }

    /// Attaches a tag. Returns false if the packet has no room.
    pub(crate) fn tag(&mut self, tag: u16) -> bool {
        if self.tags().contains(&tag) {
            return true;
        }
        let Some(slot) = self.tags.get_mut(usize::from(self.tag_count)) else { return false };
        *slot = tag;
        self.tag_count += 1;
        true
    }

    pub(crate) fn untag(&mut self, tag: u16) {
        if let Some(at) = self.tags().iter().position(|t| *t == tag) {
            self.tag_count -= 1;
            self.tags[at] = self.tags[usize::from(self.tag_count)];
        }
    }

    /// Counts a jump. Returns false above the limit.
    pub(crate) fn jump(&mut self) -> bool {
        self.jumps += 1;
        self.jumps <= MAX_JUMPS
    }
}
