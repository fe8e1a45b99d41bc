//! The interfaces of the ports that offload flows.

use std::collections::HashMap;
use std::io;

use towpath_engine::offload::NoPath;
use towpath_port::offload::{Link, Links};

/// The interface of a port.
#[derive(Clone, Debug)]
pub struct Interface {
    /// Its name.
    pub name: String,
    /// A native XDP program redirects the packets that it receives.
    pub native: bool,
    /// The kernel's network stack processes its packets, too.
    pub shared: bool,
}

/// See the module documentation.
pub(super) struct Interfaces {
    /// By port.
    ports: Vec<Option<Interface>>,
    links: Links,
    known: Vec<Option<Link>>,
}

impl Interfaces {
    pub(super) fn new(ports: Vec<Option<Interface>>) -> io::Result<Self> {
        let mut interfaces = Self { ports, links: Links::new()?, known: Vec::new() };
        interfaces.read();
        Ok(interfaces)
    }

    /// Returns true if a property has changed since the last call. `tick`: a quarter of a second has passed.
    pub(super) fn have_changed(&mut self, tick: bool) -> bool {
        // The kernel does not report by rtnetlink(7) that a driver takes frames of native programs.
        (self.links.changed() || tick && self.is_native()) && self.read()
    }

    fn is_native(&self) -> bool {
        self.ports.iter().flatten().any(|interface| interface.native)
    }

    fn read(&mut self) -> bool {
        let features = if self.is_native() { self.links.xdp_features() } else { HashMap::new() };
        let link = |interface: &Option<Interface>| {
            let link = self.links.get(&interface.as_ref()?.name)?;
            Some(Link { xdp: features.get(&link.ifindex).copied(), ..link })
        };
        let known: Vec<_> = self.ports.iter().map(link).collect();
        let changed = known != self.known;
        self.known = known;
        changed
    }

    /// The link of a port that packets arrive on.
    pub(super) fn link(&self, port: usize) -> Result<Link, NoPath> {
        match self.ports.get(port) {
            Some(Some(_)) => self.known.get(port).copied().flatten().ok_or(NoPath::Down),
            _ => Err(NoPath::Port),
        }
    }

    /// The link of a port whose packets the kernel's network stack does not get.
    pub(super) fn exclusive_link(&self, port: usize) -> Option<Link> {
        let is_exclusive = self.ports.get(port)?.as_ref().is_some_and(|it| !it.shared);
        self.link(port).ok().filter(|_| is_exclusive)
    }

    /// The links of two ports: packets of `from` leave by `to`. Then whether `to` takes frames of one buffer only.
    pub(super) fn pair(&self, from: usize, to: usize) -> Result<(Link, Link, bool), NoPath> {
        let native = self.ports.get(from).is_some_and(|it| it.as_ref().is_some_and(|it| it.native));
        let (from, to) = (self.link(from)?, self.link(to)?);
        let takes = to.xdp.unwrap_or_default();
        if native && !takes.target {
            return Err(NoPath::Target);
        }
        Ok((from, to, native && !takes.target_multi_buffer))
    }
}
