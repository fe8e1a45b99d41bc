//! NFQUEUE (nfnetlink_queue): packets that an iptables or nftables rule queues to user space wait in the kernel for a verdict.
//!
//! `iptables -A FORWARD -j NFQUEUE --queue-num 5` queues packets. Each needs exactly one [`Port::verdict`]; [`Port::flush`] sends
//! accept verdicts in batches. A verdict can replace the packet by at most 65,531 bytes, and change its mark. Needs CAP_NET_ADMIN in
//! the user namespace of the network namespace. Frames begin with the IP header.
//!
//! With [`Config::gso`] packets have up to 64 KiB and partial checksums; the port completes the checksum of a replacement. Packets
//! that did not fit into the queue are counted in [`Stats`]; the kernel drops them, or accepts them with [`Config::fail_open`].
//!
//! With [`Config::replies`] the port can send packets, such as a RST for a rejected packet, by a raw socket and the kernel's routes.
//!
//! Receiving grows the memory of the burst to 70 KiB per frame, for at most 64 frames.

mod config;
mod interfaces;
mod message;
mod pending;
mod raw_socket;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use towpath_wire::{checksum, gso};

use crate::hand_over::{HandOver, changed};
use crate::stats::Refused;
use crate::{
    Burst, Caps, Checksum, Error, Frame, LinkType, Meta, Object, Offload, Opener, Port, QueueVerdict,
    Received, Stats, TxDrop, clock, sys,
};
pub use config::Config;
use interfaces::Interfaces;
use message::{Message, Packet, Requests};
use pending::{Pending, Reply};
use raw_socket::RawSocket;

/// Bytes per message: the longest packet and its attributes. Not a multiple of the page size, to avoid cache set conflicts.
const STRIDE: usize = 65_536 + 4096 + 192;
/// Buffered bytes of verdicts that trigger sending them.
const OUT: usize = 64 << 10;
/// Limit on a verdict's payload: the length of an attribute has 16 bits.
const LONGEST: usize = 65_535 - 4;
/// Assumed MTU for inferring the segment size, which the kernel does not report.
const MTU: usize = 1500;

/// An NFQUEUE queue as a port.
///
/// ```no_run
/// use towpath_port::{Burst, Port, Received, QueueVerdict, nfqueue};
///
/// let mut port = nfqueue::Queue::open(nfqueue::Config::new(5))?;
/// let mut burst = Burst::new(64);
/// while port.receive(&mut burst)? != Received::End {
///     for frame in burst.iter() {
///         port.verdict(frame, QueueVerdict::Accept)?;
///     }
///     port.flush()?;
/// }
/// # Ok::<(), towpath_port::Error>(())
/// ```
#[derive(Debug)]
pub struct Queue {
    config: Config,
    name: String,
    socket: OwnedFd,
    /// The kernel's counters, in the network namespace where the queue was opened.
    counters: Option<File>,
    /// Messages that arrived before the configuration was acknowledged.
    early: VecDeque<Vec<u8>>,
    pending: Pending,
    interfaces: Interfaces,
    out: Requests,
    replies: Option<RawSocket>,
    stats: Stats,
    refused: Refused,
}

impl Queue {
    /// Binds to the queue and configures it.
    ///
    /// # Errors
    /// [`Error::Privilege`], [`Error::InUse`], [`Error::Unsupported`] (a kernel without NFQUEUE, or without connection tracking for it),
    /// [`Error::Io`].
    pub fn open(config: Config) -> Result<Self, Error> {
        let opener = Opener::local(&config);
        Self::open_with(config, &opener)
    }

    fn open_with(config: Config, opener: &Opener) -> Result<Self, Error> {
        let name = format!("nfqueue{}", config.queue);
        let io = |source| Error::Io { name: name.clone(), source };
        let socket = sys::socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_NETFILTER)
            .map_err(|source| refused(&name, &config, source))?;
        sys::set(socket.as_fd(), libc::SOL_NETLINK, libc::NETLINK_NO_ENOBUFS, &[1]).map_err(io)?;
        let bytes = [config.receive_buffer];
        // SO_RCVBUFFORCE exceeds net.core.rmem_max and needs CAP_NET_ADMIN.
        sys::set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &bytes)
            .or_else(|_| sys::set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, &bytes))
            .map_err(io)?;
        let mut queue = Self {
            counters: File::open("/proc/thread-self/net/netfilter/nfnetlink_queue").ok(),
            early: VecDeque::new(),
            pending: Pending::default(),
            interfaces: Interfaces::default(),
            out: Requests::default(),
            replies: config.replies.then(|| RawSocket::of(opener.open(&Object::RawSockets).ok()?)).flatten(),
            stats: Stats::default(),
            refused: Refused::default(),
            socket,
            name,
            config,
        };
        queue.configure().map_err(|source| match source.raw_os_error() {
            // The kernel also returns EPERM if another socket is bound to the queue.
            Some(libc::EPERM) if queue.is_bound() => {
                refused(&queue.name, &queue.config, io::Error::from_raw_os_error(libc::EBUSY))
            }
            _ => refused(&queue.name, &queue.config, source),
        })?;
        Ok(queue)
    }

    /// Continues a queue that another process has bound.
    fn adopt(config: Config, port: HandOver, opener: &Opener) -> Result<Self, Error> {
        let name = format!("nfqueue{}", config.queue);
        let ([socket], [queue]) = port.parts(&name)?;
        if queue != u64::from(config.queue) {
            return Err(changed(&name, "`queue`"));
        }
        Ok(Self {
            counters: File::open("/proc/thread-self/net/netfilter/nfnetlink_queue").ok(),
            early: VecDeque::new(),
            pending: Pending::default(),
            interfaces: Interfaces::default(),
            out: Requests::default(),
            replies: config.replies.then(|| RawSocket::of(opener.open(&Object::RawSockets).ok()?)).flatten(),
            stats: Stats::default(),
            refused: Refused::default(),
            socket,
            name,
            config,
        })
    }

    /// Returns true if a socket is bound to the queue.
    fn is_bound(&self) -> bool {
        self.counters.as_ref().is_some_and(|file| lost(file, self.config.queue).is_some())
    }

    /// Binds, configures, and waits for the acknowledgement.
    fn configure(&mut self) -> io::Result<()> {
        let config = &self.config;
        // struct nfqnl_msg_config_cmd: BIND, and the protocol family, which is unused.
        let seq = self.out.begin(libc::NFQNL_MSG_CONFIG, config.queue, true);
        self.out.attribute(libc::NFQA_CFG_CMD, &[libc::NFQNL_CFG_CMD_BIND as u8, 0, 0, 2]);
        // struct nfqnl_msg_config_params: copy_range, copy_mode.
        let [a, b, c, d] = config.copy_range.to_be_bytes();
        self.out.attribute(libc::NFQA_CFG_PARAMS, &[a, b, c, d, libc::NFQNL_COPY_PACKET as u8]);
        self.out.attribute(libc::NFQA_CFG_QUEUE_MAXLEN, &config.max_len.to_be_bytes());
        let flags = [
            (config.gso, libc::NFQA_CFG_F_GSO),
            (config.fail_open, libc::NFQA_CFG_F_FAIL_OPEN),
            (config.conntrack, libc::NFQA_CFG_F_CONNTRACK),
        ];
        let known = flags.iter().fold(0, |bits, (_, bit)| bits | bit);
        let wanted = flags.iter().filter(|(on, _)| *on).fold(0, |bits, (_, bit)| bits | bit);
        self.out.attribute(libc::NFQA_CFG_FLAGS, &(wanted as u32).to_be_bytes());
        // A kernel without a feature rejects its bit in the mask even if the flag is off.
        let mask = if config.conntrack { known } else { known & !libc::NFQA_CFG_F_CONNTRACK };
        self.out.attribute(libc::NFQA_CFG_MASK, &(mask as u32).to_be_bytes());
        self.tell()?;
        self.answer(seq)
    }

    /// Waits for the acknowledgement of a request. Packets that arrive before it are kept.
    fn answer(&mut self, seq: u32) -> io::Result<()> {
        let timeout = Timespec { tv_sec: 5, tv_nsec: 0 };
        loop {
            let mut fds = [PollFd::new(&self.socket, PollFlags::IN)];
            if poll(&mut fds, Some(&timeout))? == 0 {
                return Err(io::ErrorKind::TimedOut.into());
            }
            let mut message = vec![0; STRIDE];
            let (len, _) = rustix::net::recv(&self.socket, &mut message[..], RecvFlags::DONTWAIT)?;
            message.truncate(len);
            match message::parse(&message) {
                Message::Answer { seq: of, errno } if of == seq => {
                    return if errno == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(errno)) };
                }
                _ => self.early.push_back(message),
            }
        }
    }

    /// Sends the requests in `out`.
    fn tell(&mut self) -> io::Result<()> {
        while !self.out.bytes().is_empty() {
            match rustix::net::send(&self.socket, self.out.bytes(), SendFlags::empty()) {
                Ok(_) => break,
                Err(Errno::INTR) => {}
                // Netlink processes requests synchronously; these errors mean a temporary lack of memory.
                Err(Errno::AGAIN | Errno::NOBUFS) => std::thread::yield_now(),
                Err(error) => return Err(error.into()),
            }
        }
        self.out.clear();
        Ok(())
    }

    fn tell_some(&mut self) -> Result<(), Error> {
        if self.out.bytes().len() < OUT {
            return Ok(());
        }
        self.tell().map_err(|source| Error::Io { name: self.name.clone(), source })
    }

    /// Processes one message, at `at` of the burst's own memory. Adds a packet to the burst.
    fn take(&mut self, burst: &mut Burst, at: usize, len: usize, now: &mut Option<u64>) {
        let message = match message::parse(burst.used_bytes(at..at + len)) {
            Message::Packet(packet) => packet,
            // ENOENT: the packet of a verdict is gone (its interface was deleted, or the queue was flushed).
            Message::Answer { errno: libc::ENOENT, .. } => {
                self.stats.verdict_late += 1;
                return;
            }
            Message::Answer { .. } | Message::Other => return,
        };
        let Packet { mut queued, in_interface, time_ns, payload, len, info } = message;
        let Self { interfaces, config, socket, .. } = self;
        queued.listed = [in_interface, queued.out_interface]
            .map(|index| interfaces.position(index, &config.interfaces, socket.as_fd()));
        let payload = at + payload.start..at + payload.end;
        let bytes = burst.used_bytes(payload.clone());
        let offload = offload(Frame::new(bytes, LinkType::RAW), info);
        self.pending.add(queued.id);
        self.stats.count_received(bytes.len());
        let frame = Frame {
            bytes: &[],
            wire_len: len.unwrap_or(0),
            time_ns: time_ns.unwrap_or_else(|| *now.get_or_insert_with(clock::now_ns)),
            link: LinkType::RAW,
            interface: if in_interface > 0 { in_interface } else { queued.out_interface },
            meta: Meta {
                queue: self.config.queue,
                offload,
                mark: queued.mark,
                connmark: None,
                queued: Some(queued),
            },
        };
        burst.add_own(payload, frame);
    }

    /// Checks that `bytes` can replace a packet. `cut`: the packet was truncated.
    fn replaces(&self, bytes: &[u8], cut: bool) -> Result<(), Error> {
        let (name, len) = (self.name.clone(), bytes.len());
        if len > LONGEST {
            return Err(Error::TooLong { name, len, max: LONGEST });
        }
        // The kernel would truncate the packet to these bytes, contrary to its length field.
        if cut && !is_whole(bytes) {
            return Err(Error::Cut { name, len });
        }
        Ok(())
    }

    fn begin(&mut self, verdict: i32, id: u32) {
        self.out.begin(libc::NFQNL_MSG_VERDICT, self.config.queue, false);
        self.out.verdict(verdict, id);
    }
}

impl Port for Queue {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> Caps {
        let send = self.replies.is_some();
        Caps { receive: true, send, verdicts: true, link: Some(LinkType::RAW), ..Caps::default() }
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
        burst.clear();
        let mut now = None;
        if !self.config.interfaces.is_empty() {
            self.interfaces.refresh();
        }
        while let Some(message) = self.early.pop_front() {
            let at = burst.used();
            burst.room(message.len()).copy_from_slice(&message);
            burst.advance(message.len());
            self.take(burst, at, message.len(), &mut now);
            if burst.is_full() {
                return Ok(Received::Frames);
            }
        }
        let most = burst.vacancies().min(sys::MESSAGES);
        let mut lens = [0; sys::MESSAGES];
        let at = burst.used();
        let memory = burst.room(most * STRIDE);
        let came = match sys::receive_many(self.socket.as_fd(), memory, STRIDE, &mut lens[..most]) {
            Ok(came) => came,
            Err(error) => match error.raw_os_error() {
                // ENOBUFS should not occur with NETLINK_NO_ENOBUFS; the kernel's counters include the loss.
                Some(libc::EAGAIN | libc::EINTR | libc::ENOBUFS) => 0,
                _ => return Err(Error::Io { name: self.name.clone(), source: error }),
            },
        };
        burst.advance(came * STRIDE);
        for (index, len) in lens[..came].iter().enumerate() {
            self.take(burst, at + index * STRIDE, (*len as usize).min(STRIDE), &mut now);
        }
        Ok(if burst.is_empty() { Received::Nothing } else { Received::Frames })
    }

    /// Sends new packets. Received packets leave by their verdict.
    fn send<'a>(&mut self, frames: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error> {
        let Self { name, replies, stats, refused, .. } = self;
        let Some(replies) = replies else {
            return Err(Error::Direction { name: name.clone(), verb: "send" });
        };
        let mut taken = 0;
        for frame in frames {
            if !matches!(frame.link, LinkType::RAW | LinkType::IPV4 | LinkType::IPV6) {
                let (name, link) = (name.clone(), LinkType::RAW);
                return Err(Error::LinkType { name, link, frame: frame.link });
            }
            taken += 1;
            match replies.send(frame.bytes) {
                Ok(()) => stats.count_sent(frame.bytes.len()),
                // No route, a netfilter rule against it, or longer than the path MTU.
                Err(errno) => {
                    let reason = TxDrop::from_errno(errno.raw_os_error());
                    stats.count_tx_drop(reason, 1);
                    refused.keep(reason, frame.bytes);
                }
            }
        }
        Ok(taken)
    }

    fn verdict(&mut self, frame: Frame<'_>, verdict: QueueVerdict) -> Result<(), Error> {
        let waits_not = || Error::Direction { name: self.name.clone(), verb: "give a second verdict" };
        let Some(queued) = frame.meta.queued else { return Err(waits_not()) };
        let marked = frame.meta.mark != queued.mark;
        let connmark =
            frame.meta.connmark.filter(|mark| queued.conntrack.is_some_and(|entry| entry.mark != *mark));
        let len = frame.bytes.len();
        if verdict == QueueVerdict::Accept && !marked && connmark.is_none() {
            if !self.pending.accept(queued.id) {
                return Err(waits_not());
            }
            self.stats.count_sent(len);
            return Ok(());
        }
        if !self.pending.told(queued.id) {
            return Err(waits_not());
        }
        if verdict == QueueVerdict::Replace
            && let Err(error) = self.replaces(frame.bytes, queued.cut)
        {
            // Without a verdict the packet would wait forever, and block batches of later ones.
            self.begin(libc::NF_DROP, queued.id);
            self.tell_some()?;
            return Err(error);
        }
        let kernels = match verdict {
            QueueVerdict::Accept | QueueVerdict::Replace if self.config.repeat && marked => libc::NF_REPEAT,
            QueueVerdict::Accept | QueueVerdict::Replace => libc::NF_ACCEPT,
            QueueVerdict::Drop => libc::NF_DROP,
            QueueVerdict::Repeat => libc::NF_REPEAT,
        };
        self.begin(kernels, queued.id);
        if marked {
            self.out.attribute(libc::NFQA_MARK, &frame.meta.mark.to_be_bytes());
        }
        if let Some(mark) = connmark {
            self.out.nested(libc::NFQA_CT, message::CTA_MARK, &mark.to_be_bytes());
        }
        if verdict == QueueVerdict::Replace {
            let place = self.out.attribute(libc::NFQA_PAYLOAD, frame.bytes);
            if let Checksum::Partial { start, offset } = frame.meta.offload.checksum {
                // Also for a GSO packet: the kernel assumes complete checksums in a replacement.
                checksum::finish(self.out.at_mut(place), start.into(), offset.into());
            }
        }
        if verdict != QueueVerdict::Drop {
            self.stats.count_sent(len);
        }
        self.tell_some()
    }

    fn flush(&mut self) -> Result<(), Error> {
        let queue = self.config.queue;
        let out = &mut self.out;
        self.pending.flush(|tell| match tell {
            Reply::UpTo(id) => {
                out.begin(libc::NFQNL_MSG_VERDICT_BATCH, queue, false);
                out.verdict(libc::NF_ACCEPT, id);
            }
            Reply::One(id) => {
                out.begin(libc::NFQNL_MSG_VERDICT, queue, false);
                out.verdict(libc::NF_ACCEPT, id);
            }
        });
        self.tell().map_err(|source| Error::Io { name: self.name.clone(), source })
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn is_midway(&self) -> bool {
        !self.early.is_empty()
    }

    fn hand_over(&mut self) -> io::Result<Option<HandOver>> {
        let numbers = [u64::from(self.config.queue)];
        Ok(Some(HandOver::of(None, vec![self.socket.try_clone()?], &numbers)))
    }

    fn continue_stats(&mut self, before: Stats) {
        self.stats = before;
    }

    fn take_refused(&mut self, each: &mut dyn FnMut(TxDrop, &[u8])) {
        self.refused.take(each);
    }

    fn stats(&mut self) -> Stats {
        if let Some(lost) = self.counters.as_ref().and_then(|file| lost(file, self.config.queue)) {
            self.stats.rx_full = lost;
        }
        self.stats
    }
}

/// Returns true if `bytes` contain the complete IP packet according to its header (RFC 791 section 3.1, RFC 8200 section 3).
fn is_whole(bytes: &[u8]) -> bool {
    let word =
        |at: usize| bytes.get(at..at + 2).map_or(0, |word| usize::from(word[0]) << 8 | usize::from(word[1]));
    match bytes.first().map(|first| first >> 4) {
        Some(4) => (20..=bytes.len()).contains(&word(2)),
        // A payload length of 0 means a jumbogram.
        Some(6) => word(4) > 0 && 40 + word(4) <= bytes.len(),
        _ => false,
    }
}

/// Offload metadata from the `NFQA_SKB_` bits.
fn offload(frame: Frame<'_>, info: u32) -> Offload {
    let info = info as i32;
    let checksum = match info {
        info if info & libc::NFQA_SKB_CSUMNOTREADY != 0 => checksum::locate(frame.link, frame.bytes),
        _ => Checksum::Unverified,
    };
    let gso = if info & libc::NFQA_SKB_GSO != 0 { gso::infer(frame.link, frame.bytes, MTU) } else { None };
    Offload { checksum, gso }
}

/// Packets that did not fit the queue or the socket: the columns after the copy range in /proc/net/netfilter/nfnetlink_queue.
fn lost(file: &File, queue: u16) -> Option<u64> {
    // Each read of the file ends at a line end. The file has one line per queue.
    let (mut text, mut part) = (Vec::new(), [0; 4096]);
    loop {
        match rustix::io::pread(file, &mut part, text.len() as u64).ok()? {
            0 => break,
            len => text.extend_from_slice(&part[..len]),
        }
    }
    let text = std::str::from_utf8(&text).ok()?;
    let mut lines = text.lines().map(|line| line.split_whitespace().map(str::parse::<u64>));
    lines.find_map(|mut columns| {
        let number = columns.next()?.ok()?;
        let dropped = columns.nth(4)?.ok()? + columns.next()?.ok()?;
        (number == u64::from(queue)).then_some(dropped)
    })
}

fn refused(name: &str, config: &Config, source: io::Error) -> Error {
    let name = name.to_owned();
    match source.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => Error::Privilege { name, capability: "CAP_NET_ADMIN" },
        Some(libc::EBUSY) => {
            let what = format!("another process reads queue {}: stop it, or use another number", config.queue);
            Error::InUse { name, what }
        }
        Some(libc::EOPNOTSUPP) if config.conntrack => Error::Unsupported {
            name,
            what: "this kernel reports no connection tracking data (CONFIG_NETFILTER_NETLINK_GLUE_CT): disable conntrack".into(),
        },
        Some(libc::EPROTONOSUPPORT | libc::EINVAL | libc::EOPNOTSUPP) => Error::Unsupported {
            name,
            what: "this kernel has no NFQUEUE: `modprobe nfnetlink_queue` (CONFIG_NETFILTER_NETLINK_QUEUE)".into(),
        },
        _ => Error::Io { name, source },
    }
}
