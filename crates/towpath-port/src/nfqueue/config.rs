use std::io;
use std::os::fd::OwnedFd;

use crate::driver::{Capability, DriverConfig, Options};
use crate::named::NamedPort;
use crate::nfqueue::{Queue, RawSocket};
use crate::{Error, HandOver, Object, Opener, Port};

/// Configuration of an NFQUEUE queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Queue number.
    pub queue: u16,
    /// Bytes per packet that the kernel copies, at most 65,531 (NFQNL_MAX_COPY_RANGE, default). Longer packets are truncated
    /// ([`Queued::cut`](crate::Queued::cut)).
    pub copy_range: u32,
    /// Receive GSO packets unsegmented, with partial checksums (NFQA_CFG_F_GSO, default true).
    pub gso: bool,
    /// Accept packets when the queue is full; otherwise drop them (NFQA_CFG_F_FAIL_OPEN, default false).
    pub fail_open: bool,
    /// Receive the connection tracking entry (NFQA_CFG_F_CONNTRACK, default false).
    pub conntrack: bool,
    /// A packet that is accepted with another mark than it came with begins again at the first rule of its hook (NF_REPEAT, default
    /// false).
    pub repeat: bool,
    /// Names of the interfaces whose positions in this list a packet has ([`Queued::listed`](crate::Queued::listed)). Default: none.
    pub interfaces: Vec<String>,
    /// Limit on packets waiting in the kernel (default 20,000).
    pub max_len: u32,
    /// Bytes of the receive buffer (default 32 MiB), limited by net.core.rmem_max without CAP_NET_ADMIN.
    pub receive_buffer: u32,
    /// Open a raw socket to send replies (default false). Needs CAP_NET_RAW; without it the port opens, and
    /// [`Caps::send`](crate::Caps::send) is false.
    pub replies: bool,
}

impl Config {
    /// The defaults for queue number `queue`: whole packets, GSO, fail closed, no replies.
    pub fn new(queue: u16) -> Self {
        Self {
            queue,
            copy_range: 0xffff,
            gso: true,
            fail_open: false,
            conntrack: false,
            repeat: false,
            interfaces: Vec::new(),
            max_len: 20_000,
            receive_buffer: 32 << 20,
            replies: false,
        }
    }
}

impl DriverConfig for Config {
    const NAMES: &'static [(&'static str, &'static str)] = &[("nfqueue", "a queue of the kernel's NFQUEUE")];
    const CAPABILITIES: &'static [Capability] = &[Capability::NetAdmin];
    /// The kernel checks it for each verdict.
    const CAPABILITIES_IN_USE: &'static [Capability] = &[Capability::NetAdmin];
    const MULTI_QUEUE: bool = true;
    const VERDICTS: bool = true;

    /// For replies.
    fn capabilities_optional(&self) -> &'static [Capability] {
        &[Capability::NetRaw]
    }

    fn from_options(_: &str, options: &dyn Options) -> Self {
        let queue = options.number("queue", 0..=65_535).unwrap_or(0) as u16;
        Self {
            fail_open: options.word("fail", &["open", "closed"]) == Some(0),
            copy_range: options.number("copy-range", 0..=65_535).unwrap_or(65_535) as u32,
            gso: options.flag("gso").unwrap_or(true),
            conntrack: options.flag("conntrack").unwrap_or(false),
            repeat: options.flag("repeat").unwrap_or(false),
            max_len: options.number("queue-length", 1..=u64::from(u32::MAX)).unwrap_or(20_000) as u32,
            interfaces: options.texts("interfaces").unwrap_or_default(),
            replies: true,
            ..Self::new(queue)
        }
    }

    /// Thread number n reads queue number `queue` + n, as with `--queue-balance`.
    fn open(&self, name: &str, threads: usize, opener: &Opener) -> Result<Vec<Box<dyn Port>>, Error> {
        let mut queues: Vec<Box<dyn Port>> = Vec::new();
        for thread in 0..threads.max(1) {
            let number = u16::try_from(usize::from(self.queue) + thread).map_err(|_| Error::Unsupported {
                name: name.to_owned(),
                what: format!(
                    "{threads} threads need {threads} queues from {} on; the last one is 65535",
                    self.queue
                ),
            })?;
            let queue = Queue::open_with(Self { queue: number, ..self.clone() }, opener)?;
            if !queue.caps().send && thread == 0 {
                log::warn!("{name}: without CAP_NET_RAW a reject drops the packet and sends no reply");
            }
            queues.push(NamedPort::boxed(name, queue));
        }
        Ok(queues)
    }

    fn adopt(&self, name: &str, ports: Vec<HandOver>, opener: &Opener) -> Result<Vec<Box<dyn Port>>, Error> {
        let adopt = |(thread, port): (usize, HandOver)| {
            let queue = self.queue.wrapping_add(thread as u16);
            Queue::adopt(Self { queue, ..self.clone() }, port, opener)
                .map(|queue| NamedPort::boxed(name, queue))
        };
        ports.into_iter().enumerate().map(adopt).collect()
    }

    fn open_object(&self, object: &Object) -> io::Result<Vec<OwnedFd>> {
        match object {
            Object::RawSockets => Ok(RawSocket::open()?),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        }
    }

    fn exclusive(&self) -> Option<String> {
        Some(format!("queue {}", self.queue))
    }
}
