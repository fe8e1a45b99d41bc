//! The engine of live ports and of inspectors on rings.
//!
//! The program `towpath` is optimized for size. What it calls for each burst is therefore compiled here.

use std::sync::Arc;

use towpath_port::{Burst, Error, Port};

use crate::egress::PortIo;
use crate::engine::Engine;
use crate::meta::Meta;
use crate::queue::RingChannel;

/// An engine with live ports, and inspectors on rings.
pub type LiveEngine = Engine<PortIo<RingChannel>>;

impl LiveEngine {
    /// Processes a burst that the port number `at` received ([`process_burst_borrowed`](Self::process_burst_borrowed)).
    pub fn process_received(&mut self, burst: &Arc<Burst>, at: u32) {
        let Ok(()) = self.process_burst_borrowed(burst, |frame| Meta::received(frame, at));
    }

    /// Collects verdicts and serves queries while no packet arrives ([`idle`](Self::idle)).
    pub fn process_verdicts(&mut self) {
        let Ok(()) = self.idle();
    }

    /// Drops every undecided packet ([`abandon`](Self::abandon)). Returns their number.
    pub fn drop_undecided(&mut self) -> u64 {
        let Ok(dropped) = self.abandon();
        dropped
    }

    /// Sends what is queued for the port number `at` ([`PortIo::transmit`]).
    pub fn transmit(
        &mut self,
        at: usize,
        port: &mut dyn Port,
        burst: &Burst,
        complain: &mut dyn FnMut(&Error),
    ) {
        self.io.transmit(at, port, burst, complain);
    }
}
