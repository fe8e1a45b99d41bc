//! The kernel's NFQUEUE (nfnetlink_queue): packets that an iptables or nftables rule hands to user space wait in the kernel for a verdict.
//!
//! `iptables -A FORWARD -j NFQUEUE --queue-num 5` brings packets here. Each must get one [`Port::verdict`]; accepts are given together at
//! [`Port::flush`]. A packet can be replaced, by at most 65,531 bytes, and its mark changed. Needs CAP_NET_ADMIN in the network namespace's user
//! namespace. Frames begin with the IP header.
//!
//! With [`Config::gso`] the kernel hands over up to 64 KiB at a time with unfinished checksums; a replacement's are finished on its way
//! back. What the kernel could not hand over is counted in [`Stats`], and dropped by it, or let pass with
//! [`Config::fail_open`].
//!
//! With [`Config::replies`] packets of our own can be sent, too: answers to what is not let through. They go the way that the kernel's
//! routes say, by a raw socket.
//!
//! Bursts that receive from a queue grow to 70 KiB for each of at most 64 frames.

mod message;
mod replies;
#[cfg(test)]
mod tests;
mod window;

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};

use towpath_wire::{checksum, gso};

use crate::{
    Burst, Caps, Checksum, Error, Frame, LinkType, Meta, Offload, Port, Received, Stats, Verdict, clock, sys,
};
use message::{Message, Packet, Requests};
use replies::Replies;
use window::{Tell, Window};

/// Bytes for one message: the longest packet and its attributes. No multiple of a page, so that messages do not compete for cache lines.
const STRIDE: usize = 65_536 + 4096 + 192;
/// Bytes of verdicts after which they are given.
const OUT: usize = 64 << 10;
/// Longest payload of a verdict: an attribute's length has 16 bits.
const LONGEST: usize = 65_535 - 4;
/// What a frame is taken to be cut by; the kernel does not say.
const MTU: usize = 1500;

/// How a queue is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Config {
    /// Number of the queue.
    pub queue: u16,
    /// Most bytes of each packet that are handed over, 65,531 at most (NFQNL_MAX_COPY_RANGE). What is longer is cut short
    /// ([`Queued::cut`](crate::Queued::cut)).
    pub copy_range: u32,
    /// Packets to be cut come whole, with unfinished checksums (NFQA_CFG_F_GSO).
    pub gso: bool,
    /// What finds no room passes; otherwise it is dropped (NFQA_CFG_F_FAIL_OPEN).
    pub fail_open: bool,
    /// Say what connection tracking knows (NFQA_CFG_F_CONNTRACK).
    pub conntrack: bool,
    /// Most packets that wait in the kernel.
    pub max_len: u32,
    /// Bytes of the receive buffer, as far as the system allows.
    pub receive_buffer: u32,
    /// Packets of our own can be sent: needs CAP_NET_RAW, too. Without it the port opens all the same, and
    /// [`Caps::send`] is false.
    pub replies: bool,
}

impl Config {
    /// Queue `queue`: whole packets, GSO, fail closed, 20,000 packets, no replies.
    pub fn new(queue: u16) -> Self {
        Self {
            queue,
            copy_range: 0xffff,
            gso: true,
            fail_open: false,
            conntrack: false,
            max_len: 20_000,
            receive_buffer: 32 << 20,
            replies: false,
        }
    }
}

/// A queue as a port that receives and gives verdicts.
///
/// ```no_run
/// use towpath_port::{Burst, Port, Received, Verdict, nfqueue};
///
/// let mut port = nfqueue::Queue::open(nfqueue::Config::new(5))?;
/// let mut burst = Burst::new(64);
/// while port.receive(&mut burst)? != Received::End {
///     for frame in burst.iter() {
///         port.verdict(frame, Verdict::Accept)?;
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
    /// The kernel's counters, of the network namespace in which the queue was opened.
    counters: Option<File>,
    /// What came before the configuration was acknowledged.
    early: VecDeque<Vec<u8>>,
    window: Window,
    out: Requests,
    replies: Option<Replies>,
    stats: Stats,
}

impl Queue {
    /// Binds to the queue.
    ///
    /// # Errors
    /// [`Error::Privilege`], [`Error::InUse`], [`Error::Unsupported`] (a kernel without NFQUEUE, or without connection tracking for it),
    /// [`Error::Io`].
    pub fn open(config: Config) -> Result<Self, Error> {
        let name = format!("nfqueue{}", config.queue);
        let io = |source| Error::Io { name: name.clone(), source };
        let socket = sys::socket(libc::AF_NETLINK, libc::SOCK_RAW, libc::NETLINK_NETFILTER)
            .map_err(|source| refused(&name, &config, source))?;
        sys::set(socket.as_fd(), libc::SOL_NETLINK, libc::NETLINK_NO_ENOBUFS, &[1]).map_err(io)?;
        let bytes = [config.receive_buffer];
        // Only the administrator of the machine may go beyond net.core.rmem_max.
        sys::set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUFFORCE, &bytes)
            .or_else(|_| sys::set(socket.as_fd(), libc::SOL_SOCKET, libc::SO_RCVBUF, &bytes))
            .map_err(io)?;
        let mut queue = Self {
            counters: File::open("/proc/thread-self/net/netfilter/nfnetlink_queue").ok(),
            early: VecDeque::new(),
            window: Window::default(),
            out: Requests::default(),
            replies: config.replies.then(|| Replies::open().ok()).flatten(),
            stats: Stats::default(),
            socket,
            name,
            config,
        };
        queue.configure().map_err(|source| match source.raw_os_error() {
            // The kernel says EPERM also when the queue is another socket's.
            Some(libc::EPERM) if queue.is_bound() => {
                refused(&queue.name, &queue.config, io::Error::from_raw_os_error(libc::EBUSY))
            }
            _ => refused(&queue.name, &queue.config, source),
        })?;
        Ok(queue)
    }

    /// Whether somebody has the queue.
    fn is_bound(&self) -> bool {
        self.counters.as_ref().is_some_and(|file| lost(file, self.config.queue).is_some())
    }

    /// Binds and configures, and waits for the kernel's answer.
    fn configure(&mut self) -> io::Result<()> {
        let config = &self.config;
        // struct nfqnl_msg_config_cmd: BIND, and the family, which no longer matters.
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
        // A kernel that lacks a feature refuses also to be told that it is not wanted.
        let mask = if config.conntrack { known } else { known & !libc::NFQA_CFG_F_CONNTRACK };
        self.out.attribute(libc::NFQA_CFG_MASK, &(mask as u32).to_be_bytes());
        self.tell()?;
        self.answer(seq)
    }

    /// The kernel's answer to a request. It answers at once; packets that are there before it are kept.
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

    /// Gives the kernel what is in `out`.
    fn tell(&mut self) -> io::Result<()> {
        while !self.out.bytes().is_empty() {
            match rustix::net::send(&self.socket, self.out.bytes(), SendFlags::empty()) {
                Ok(_) => break,
                Err(Errno::INTR) => {}
                // Netlink takes requests into the kernel at once; these mean that there is no memory for the moment.
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

    /// What one message of the kernel means; adds a packet to the burst, whose own memory has the message at `at`.
    fn take(&mut self, burst: &mut Burst, at: usize, len: usize, now: &mut Option<u64>) {
        let message = match message::parse(burst.used_bytes(at..at + len)) {
            Message::Packet(packet) => packet,
            // ENOENT: the packet that a verdict was for is gone (its interface is, or the queue was flushed).
            Message::Answer { errno: libc::ENOENT, .. } => {
                self.stats.dropped.verdict_late += 1;
                return;
            }
            Message::Answer { .. } | Message::Other => return,
        };
        let Packet { queued, in_interface, time_ns, payload, len, info } = message;
        let payload = at + payload.start..at + payload.end;
        let bytes = burst.used_bytes(payload.clone());
        let offload = offload(Frame::new(bytes, LinkType::RAW), info);
        self.window.add(queued.id);
        self.stats.count_received(bytes.len());
        let frame = Frame {
            bytes: &[],
            wire_len: len.unwrap_or(0),
            time_ns: time_ns.unwrap_or_else(|| *now.get_or_insert_with(clock::now_ns)),
            link: LinkType::RAW,
            interface: if in_interface > 0 { in_interface } else { queued.out_interface },
            meta: Meta { queue: self.config.queue, offload, mark: queued.mark, queued: Some(queued) },
        };
        burst.add_own(payload, frame);
    }

    /// Whether the kernel can be given `bytes` in place of a packet; `cut` is one that was not handed over whole.
    fn replaces(&self, bytes: &[u8], cut: bool) -> Result<(), Error> {
        let (name, len) = (self.name.clone(), bytes.len());
        if len > LONGEST {
            return Err(Error::TooLong { name, len, max: LONGEST });
        }
        // The kernel would cut the packet down to these bytes, and its next hop would drop it for its length.
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
                // ENOBUFS is not to come with NETLINK_NO_ENOBUFS; the kernel's counters have the loss.
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

    /// Packets of our own; those that came in are sent on by their verdict.
    fn send<'a>(&mut self, frames: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error> {
        let Self { name, replies, stats, .. } = self;
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
                Err(Errno::AGAIN | Errno::NOBUFS) => stats.dropped.tx_full += 1,
                // No way there, a rule of the kernel's against it, or longer than the way there takes.
                Err(_) => stats.dropped.tx_refused += 1,
            }
        }
        Ok(taken)
    }

    fn verdict(&mut self, frame: Frame<'_>, verdict: Verdict) -> Result<(), Error> {
        let waits_not = || Error::Direction { name: self.name.clone(), verb: "give a second verdict" };
        let Some(queued) = frame.meta.queued else { return Err(waits_not()) };
        let marked = frame.meta.mark != queued.mark;
        if verdict == Verdict::Accept && !marked {
            return if self.window.accept(queued.id) { Ok(()) } else { Err(waits_not()) };
        }
        if !self.window.told(queued.id) {
            return Err(waits_not());
        }
        let len = frame.bytes.len();
        if verdict == Verdict::Replace
            && let Err(error) = self.replaces(frame.bytes, queued.cut)
        {
            // Without a verdict it would wait in the kernel for ever, and every later one with it that is given together.
            self.begin(libc::NF_DROP, queued.id);
            self.tell_some()?;
            return Err(error);
        }
        let kernels = match verdict {
            Verdict::Accept | Verdict::Replace => libc::NF_ACCEPT,
            Verdict::Drop => libc::NF_DROP,
            Verdict::Repeat => libc::NF_REPEAT,
        };
        self.begin(kernels, queued.id);
        if marked {
            self.out.attribute(libc::NFQA_MARK, &frame.meta.mark.to_be_bytes());
        }
        if verdict == Verdict::Replace {
            let place = self.out.attribute(libc::NFQA_PAYLOAD, frame.bytes);
            if let Checksum::Partial { start, offset } = frame.meta.offload.checksum {
                // Also of a packet that the kernel will cut: it takes replaced bytes for finished.
                checksum::finish(self.out.at_mut(place), start.into(), offset.into());
            }
        }
        self.stats.count_sent(len);
        self.tell_some()
    }

    fn flush(&mut self) -> Result<(), Error> {
        let queue = self.config.queue;
        let out = &mut self.out;
        self.window.flush(|tell| match tell {
            Tell::UpTo(id) => {
                out.begin(libc::NFQNL_MSG_VERDICT_BATCH, queue, false);
                out.verdict(libc::NF_ACCEPT, id);
            }
            Tell::One(id) => {
                out.begin(libc::NFQNL_MSG_VERDICT, queue, false);
                out.verdict(libc::NF_ACCEPT, id);
            }
        });
        self.tell().map_err(|source| Error::Io { name: self.name.clone(), source })
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.socket.as_fd())
    }

    fn stats(&mut self) -> Stats {
        if let Some(lost) = self.counters.as_ref().and_then(|file| lost(file, self.config.queue)) {
            self.stats.dropped.rx_full = lost;
        }
        self.stats
    }
}

/// Whether these are all bytes of an IP packet, as its header counts them (RFC 791 section 3.1, RFC 8200 section 3).
fn is_whole(bytes: &[u8]) -> bool {
    let word =
        |at: usize| bytes.get(at..at + 2).map_or(0, |word| usize::from(word[0]) << 8 | usize::from(word[1]));
    match bytes.first().map(|first| first >> 4) {
        Some(4) => (20..=bytes.len()).contains(&word(2)),
        // A payload of 0 is a jumbogram's.
        Some(6) => word(4) > 0 && 40 + word(4) <= bytes.len(),
        _ => false,
    }
}

/// What is left to be done, from `NFQA_SKB_` bits.
fn offload(frame: Frame<'_>, info: u32) -> Offload {
    let info = info as i32;
    let checksum = match info {
        info if info & libc::NFQA_SKB_CSUMNOTREADY != 0 => checksum::locate(frame.link, frame.bytes),
        _ => Checksum::Unverified,
    };
    let gso = if info & libc::NFQA_SKB_GSO != 0 { gso::infer(frame.link, frame.bytes, MTU) } else { None };
    Offload { checksum, gso }
}

/// Packets that found no room in the queue or in our socket: the columns after the copy range in /proc/net/netfilter/nfnetlink_queue.
fn lost(file: &File, queue: u16) -> Option<u64> {
    // The file ends a part at a line's end, and has a line for every queue of the machine.
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
            what: "this kernel does not tell about connections (CONFIG_NETFILTER_NETLINK_GLUE_CT): leave conntrack off".into(),
        },
        Some(libc::EPROTONOSUPPORT | libc::EINVAL | libc::EOPNOTSUPP) => Error::Unsupported {
            name,
            what: "this kernel has no NFQUEUE: `modprobe nfnetlink_queue` (CONFIG_NETFILTER_NETLINK_QUEUE)".into(),
        },
        _ => Error::Io { name, source },
    }
}
