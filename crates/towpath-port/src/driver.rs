//! The table of port drivers.
//!
//! A driver is a folder of this crate and one line of the table at the end of this file. Its `Config` implements
//! [`DriverConfig`]: names and help, configuration keys, required capabilities, and how to open ports.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::OwnedFd;
use std::path::PathBuf;

use crate::claim::Claim;
use crate::offload::Flows;
use crate::waiting::WaitingPort;
use crate::{Error, HandOver, LinkType, Object, Opener, Port, hand_over};

/// The values of one port's configuration keys, from a configuration file or any other source.
///
/// A method returns `None` if the key is absent. It also reports a value of the wrong type or outside the range, and
/// then returns `None`.
pub trait Options {
    /// A string.
    fn text(&self, key: &'static str) -> Option<String>;
    /// A boolean.
    fn flag(&self, key: &'static str) -> Option<bool>;
    /// A whole number.
    fn number(&self, key: &'static str, range: RangeInclusive<u64>) -> Option<u64>;
    /// The index of one of `words`.
    fn word(&self, key: &'static str, words: &[&str]) -> Option<usize>;
    /// A list of strings, or one string.
    fn texts(&self, key: &'static str) -> Option<Vec<String>>;
    /// A path, relative to the directory of the configuration.
    fn path(&self, key: &'static str) -> Option<PathBuf>;
    /// The key `interface`: the name of a network interface. The default is the port's name.
    fn interface(&self) -> String;
    /// Reports that the keys of the port do not belong together; `hint` says what to write.
    fn invalid(&self, message: &str, hint: &str);
}

/// A privilege that a driver needs to open a port (capabilities(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Capability {
    /// `CAP_NET_RAW`.
    NetRaw,
    /// `CAP_NET_ADMIN`.
    NetAdmin,
    /// `CAP_BPF`.
    Bpf,
    /// `CAP_PERFMON`.
    PerfMon,
}

/// The configuration of one driver's ports.
pub trait DriverConfig: Sized {
    /// The driver's names with one line of help each. Several names stand for variants of one driver (`tun`, `tap`).
    const NAMES: &'static [(&'static str, &'static str)];
    /// Capabilities needed to open a port, and to open it again.
    const CAPABILITIES: &'static [Capability];
    /// Capabilities needed while a port is used, if another process opens its objects.
    const CAPABILITIES_IN_USE: &'static [Capability] = &[];
    /// Returns false if a port can be used by one worker only.
    const MULTI_QUEUE: bool;
    /// Returns true if the verdict on a packet goes back to the port that received it ([`Port::verdict`]).
    const VERDICTS: bool = false;

    /// Reads the configuration of a port of the driver called `driver`.
    fn from_options(driver: &str, options: &dyn Options) -> Self;

    /// Capabilities that a port of this configuration needs: [`CAPABILITIES`](Self::CAPABILITIES), or fewer.
    fn capabilities(&self) -> &'static [Capability] {
        Self::CAPABILITIES
    }

    /// Further capabilities of a process that opens a port of this configuration. Without them, the port lacks a function or is slower.
    fn capabilities_optional(&self) -> &'static [Capability] {
        &[]
    }

    /// The port's packets are not forwarded.
    fn set_monitor(&mut self) {}

    /// The kernel forwards packets of decided flows ([`offload`](crate::offload)). Returns false if the driver does not support it.
    fn set_flows(&mut self, flows: Flows) -> bool {
        let _ = flows;
        false
    }

    /// Ends [`set_flows`](Self::set_flows).
    fn clear_flows(&mut self) {}

    /// Returns true if native XDP programs redirect the packets of decided flows. Few interfaces take these.
    fn redirects_natively(&self) -> bool {
        false
    }

    /// Returns true if the kernel's network stack processes the packets of the port, too.
    fn shares_with_kernel(&self) -> bool {
        false
    }

    /// What the kernel does with the packets of the port besides: a warning, if the configuration permits it.
    fn kernel_warning(&self) -> Option<String> {
        None
    }

    /// Opens one port per worker. The descriptors that need a privilege come from `opener`.
    ///
    /// # Errors
    /// The reason, and what to do about it.
    fn open(&self, name: &str, workers: usize, opener: &Opener) -> Result<Vec<Box<dyn Port>>, Error>;

    /// Continues the ports that another process has handed over, one per worker. The claim of their medium is in `opener`.
    ///
    /// # Errors
    /// The configuration differs in what cannot change, or the reasons of [`open`](Self::open).
    fn adopt(&self, name: &str, ports: Vec<HandOver>, opener: &Opener) -> Result<Vec<Box<dyn Port>>, Error> {
        let _ = (ports, opener);
        Err(Error::Config {
            name: name.to_owned(),
            what: "ports of this driver cannot be handed over".into(),
        })
    }

    /// Opens an object with the privileges of this process.
    ///
    /// # Errors
    /// The system's error; `InvalidInput` if ports of this configuration do not have the object.
    fn open_object(&self, object: &Object) -> io::Result<Vec<OwnedFd>> {
        let _ = object;
        Err(io::ErrorKind::InvalidInput.into())
    }

    /// The driver's name.
    fn name(&self) -> &'static str {
        Self::NAMES[0].0
    }

    /// The network interface, if the port has one.
    fn interface(&self) -> Option<&str> {
        None
    }

    /// A resource that one port can have at a time, for error messages: "`eth0`", "queue 5".
    fn exclusive(&self) -> Option<String> {
        self.interface().map(|name| format!("`{name}`"))
    }

    /// The link type of the port's frames, if the configuration determines it.
    fn link(&self) -> Option<LinkType> {
        None
    }
}

macro_rules! drivers {
    ($($(#[$doc:meta])* $variant:ident($module:ident),)*) => {
        /// The configuration of a port, by driver.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Config {
            $($(#[$doc])* $variant(crate::$module::Config),)*
        }

        /// The names of all drivers, each with one line of help.
        pub fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
            [$(<crate::$module::Config as DriverConfig>::NAMES,)*].into_iter().flatten().copied()
        }

        impl Config {
            /// Reads the configuration of a port; `None` if there is no driver called `driver`.
            pub fn from_options(driver: &str, options: &dyn Options) -> Option<Self> {
                $(if crate::$module::Config::NAMES.iter().any(|(name, _)| *name == driver) {
                    return Some(Self::$variant(DriverConfig::from_options(driver, options)));
                })*
                None
            }

            /// Opens one port per worker with the privileges of this process.
            ///
            /// # Errors
            /// As [`open_with`](Self::open_with).
            pub fn open(&self, name: &str, workers: usize) -> Result<Vec<Box<dyn Port>>, Error> {
                self.open_with(name, workers, &self.local_opener())
            }

            /// Opens one port per worker. The descriptors that need a privilege come from `opener`, also when a port is opened again.
            ///
            /// # Errors
            /// The reason, and what to do about it. [`Error::Config`] if the driver supports one worker only.
            pub fn open_with(
                &self,
                name: &str,
                workers: usize,
                opener: &Opener,
            ) -> Result<Vec<Box<dyn Port>>, Error> {
                if workers > 1 && !self.is_multi_queue() {
                    let what = format!("{} ports support one thread only: set [engine] threads = 1", self.name());
                    return Err(Error::Config { name: name.into(), what });
                }
                let claimed = match self.interface() {
                // Each port with such a name gets another interface.
                Some(interface) if !interface.contains('%') => {
                    opener.with_claim(Claim::take(name, &format!("`{interface}`"))?)
                }
                _ => opener.clone(),
            };
                match self { $(Self::$variant(config) => config.open(name, workers, &claimed),)* }
            }

            /// As [`open_with`](Self::open_with). Ports of an interface that does not exist are [`State::Gone`](crate::State::Gone); they
            /// open when [`Port::reopen`] finds it.
            ///
            /// # Errors
            /// As [`open_with`](Self::open_with), except [`Error::NoInterface`].
            pub fn open_optional(
                &self,
                name: &str,
                workers: usize,
                opener: &Opener,
            ) -> Result<Vec<Box<dyn Port>>, Error> {
                match self.open_with(name, workers, opener) {
                    Err(Error::NoInterface { .. }) => {
                        let (config, opener, port) = (self.clone(), opener.clone(), name.to_owned());
                        let open = move || config.open_with(&port, workers, &opener);
                        Ok(WaitingPort::boxed(name, workers, open))
                    }
                    opened => opened,
                }
            }

            /// Continues the ports that another process has handed over ([`Port::hand_over`]), one per worker. A port whose interface did
            /// not exist there is opened as by [`open_optional`](Self::open_optional). Call [`Port::resume`] before the first frame.
            ///
            /// # Errors
            /// The configuration differs in what cannot change, or the reasons of [`open_with`](Self::open_with).
            pub fn adopt(
                &self,
                name: &str,
                workers: usize,
                mut ports: Vec<HandOver>,
                opener: &Opener,
            ) -> Result<Vec<Box<dyn Port>>, Error> {
                if ports.len() != workers {
                    return Err(hand_over::changed(name, "the number of threads"));
                }
                let mut claims = Vec::new();
                for port in &mut ports {
                    if port.descriptors.is_empty() {
                        return self.open_optional(name, workers, opener);
                    }
                    // Each port has a copy of the claim first, if there is one.
                    let numbers = port.numbers.len().min(1);
                    if port.numbers.drain(..numbers).any(|claimed| claimed == 1) {
                        claims.push(port.descriptors.remove(0));
                    }
                }
                let opener = match claims.pop() {
                    Some(claim) => opener.with_claim(Claim::of(claim)),
                    None => opener.clone(),
                };
                match self { $(Self::$variant(config) => config.adopt(name, ports, &opener),)* }
            }

            /// The opener that has the privileges of this process.
            pub fn local_opener(&self) -> Opener {
                match self { $(Self::$variant(config) => Opener::local(config),)* }
            }

            /// The port's packets are not forwarded: a port whose configuration says nothing else leaves them to the kernel too.
            pub fn set_monitor(&mut self) {
                match self { $(Self::$variant(config) => config.set_monitor(),)* }
            }

            /// The kernel forwards packets of decided flows. Returns false if the driver does not support it.
            pub fn set_flows(&mut self, flows: Flows) -> bool {
                match self { $(Self::$variant(config) => config.set_flows(flows),)* }
            }

            /// Ends [`set_flows`](Self::set_flows).
            pub fn clear_flows(&mut self) {
                match self { $(Self::$variant(config) => config.clear_flows(),)* }
            }

            /// Returns true if native XDP programs redirect the packets of decided flows. Few interfaces take these.
            pub fn redirects_natively(&self) -> bool {
                match self { $(Self::$variant(config) => config.redirects_natively(),)* }
            }

            /// Returns true if the kernel's network stack processes the packets of the port, too.
            pub fn shares_with_kernel(&self) -> bool {
                match self { $(Self::$variant(config) => config.shares_with_kernel(),)* }
            }

            /// What the kernel does with the packets of the port besides, or why the port cannot be opened as it is configured.
            pub fn kernel_warning(&self) -> Option<String> {
                match self { $(Self::$variant(config) => config.kernel_warning(),)* }
            }

            /// The network interface, if the port has one.
            pub fn interface(&self) -> Option<&str> {
                match self { $(Self::$variant(config) => DriverConfig::interface(config),)* }
            }

            /// Opens an object of a port with the privileges of this process.
            ///
            /// # Errors
            /// The system's error; `InvalidInput` if ports of this configuration do not have the object.
            pub fn open_object(&self, object: &Object) -> io::Result<Vec<OwnedFd>> {
                match self { $(Self::$variant(config) => config.open_object(object),)* }
            }

            /// Further capabilities of a process that opens the port. Without them, the port lacks a function or is slower.
            pub fn capabilities_optional(&self) -> &'static [Capability] {
                match self { $(Self::$variant(config) => DriverConfig::capabilities_optional(config),)* }
            }

            /// Capabilities needed while the port is used, if another process opens its objects.
            pub fn capabilities_in_use(&self) -> &'static [Capability] {
                match self { $(Self::$variant(_) => crate::$module::Config::CAPABILITIES_IN_USE,)* }
            }

            /// The driver's name.
            pub fn name(&self) -> &'static str {
                match self { $(Self::$variant(config) => config.name(),)* }
            }

            /// Capabilities needed to open the port, and to open it again.
            pub fn capabilities(&self) -> &'static [Capability] {
                match self { $(Self::$variant(config) => DriverConfig::capabilities(config),)* }
            }

            /// Returns true if several workers can share the port.
            pub fn is_multi_queue(&self) -> bool {
                match self { $(Self::$variant(_) => crate::$module::Config::MULTI_QUEUE,)* }
            }

            /// Returns true if the verdict on a packet goes back to the port that received it ([`Port::verdict`]).
            pub fn returns_verdicts(&self) -> bool {
                match self { $(Self::$variant(_) => crate::$module::Config::VERDICTS,)* }
            }

            /// A resource that one port can have at a time, for error messages: "`eth0`", "queue 5".
            pub fn exclusive(&self) -> Option<String> {
                match self { $(Self::$variant(config) => config.exclusive(),)* }
            }

            /// Returns true if a process of this network namespace has a port on the interface.
            pub fn is_open(&self) -> bool {
                self.interface().is_some_and(|interface| Claim::is_taken(&format!("`{interface}`")))
            }

            /// The link type of the port's frames, if the configuration determines it.
            pub fn link(&self) -> Option<LinkType> {
                match self { $(Self::$variant(config) => DriverConfig::link(config),)* }
            }
        }
    };
}

drivers! {
    /// A network interface, by a packet socket.
    AfPacket(af_packet),
    /// A network interface, by XDP sockets.
    AfXdp(af_xdp),
    /// A TUN or TAP device.
    Tun(tun),
    /// A queue of the kernel's NFQUEUE.
    Nfqueue(nfqueue),
    /// Capture files.
    Pcap(pcap),
}
