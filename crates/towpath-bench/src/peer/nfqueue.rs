//! Kernel NFQUEUE in a separate network namespace: netlink as in libnetfilter_queue, recvmmsg of 64 messages, and one batch verdict per
//! call (linux/netfilter/nfnetlink_queue.h).
//!
//! The packets come from a flood over a veth pair; the generator's CPU also does the kernel's receive processing. They are queued in the raw
//! table, accepted by the consumer on the other CPU, and dropped in INPUT, which is the shortest path of a packet with a verdict.

use std::io::stdin;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_recv_buffer_size_force, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send, socket_with,
};

use crate::mmsg::Batch;
use crate::payload::fold;
use crate::peer::flood::set_option;
use crate::peer::{Skipped, netns};
use crate::pin::{self, Cpus};
use crate::raw::say;
use crate::side::Side;

/// Maximum payload of a netlink attribute: its length field has 16 bits, and its header 4 bytes.
const MAX_PAYLOAD: usize = 65_531;
/// Messages per recvmmsg call.
const RECEIVE: usize = 64;

/// Parameters: packets of `len` bytes, and `consumers` processes that decide `batch` packets at once.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Load {
    pub(crate) len: usize,
    pub(crate) consumers: u16,
    pub(crate) batch: usize,
}

/// Returns the decided packets per second of all consumers.
pub(crate) fn rate(cpus: Cpus, time: Duration, load: Load) -> Result<f64> {
    if !rustix::process::geteuid().is_root() {
        return Err(Skipped("needs root".to_owned()).into());
    }
    let len = load.len.min(usize::from(u16::MAX)).to_string();
    let mut flood = Side::start(&["flood".to_owned(), len, cpus.engine.to_string()], &[])?;
    flood.line()?;
    let mut consumers = Vec::new();
    for queue in 0..load.consumers {
        consumers.push(Side::start(&consumer(queue, cpus, time, load), &[])?);
    }
    for (queue, side) in consumers.iter_mut().enumerate() {
        side.line()?;
        if queue == 0 {
            netns::connect(flood.pid(), side.pid())?;
        }
    }
    let netns_pid = consumers[0].pid();
    for side in &mut consumers {
        side.tell(&netns_pid.to_string())?;
        match side.line()?.as_str() {
            "ready" => {}
            skipped => return Err(Skipped(skipped.to_owned()).into()),
        }
    }
    flood.tell("go")?;
    let mut sum = 0.0;
    for side in &mut consumers {
        sum += side.number()?;
    }
    consumers.into_iter().try_for_each(Side::finish)?;
    Ok(sum)
}

fn consumer(queue: u16, cpus: Cpus, time: Duration, load: Load) -> Vec<String> {
    let (len, batch) = (load.len.to_string(), load.batch.to_string());
    let (time, cpu) = (time.as_millis().to_string(), cpus.consumer.to_string());
    vec!["nfqueue".to_owned(), queue.to_string(), load.consumers.to_string(), len, batch, time, cpu]
}

/// Runs the consumer of queue `queue` of `queues`. Queue 0 creates the namespace and its rules; the others join it.
pub(crate) fn side(
    queue: u16,
    queues: u16,
    len: usize,
    batch: usize,
    time: Duration,
    cpu: usize,
) -> Result<()> {
    if queue == 0 {
        netns::unshare()?;
    }
    say("unshared")?;
    let mut netns_pid = String::new();
    stdin().read_line(&mut netns_pid)?;
    let set_up =
        if queue == 0 { netns::up_with_queues(queues) } else { netns::join(netns_pid.trim().parse()?) };
    match set_up {
        Err(error) if error.is::<Skipped>() => {
            return say(&error.to_string().replace("skipped: ", ""));
        }
        other => other?,
    }
    let socket = bind(queue, len)?;
    pin::to(cpu)?;
    say("ready")?;
    let rate = consume(&socket, queue, batch, time)?;
    say(&rate.to_string())
}

/// Runs a consumer in the namespace of process `netns_pid`: accepts packets until the process is killed.
pub(crate) fn live(netns_pid: u32, queue: u16, len: usize, batch: usize, cpu: usize) -> Result<()> {
    netns::join(netns_pid)?;
    let socket = bind(queue, len)?;
    // Receive GSO packets unsegmented.
    let gso = (libc::NFQA_CFG_F_GSO as u32).to_be_bytes();
    let message = Message::new(libc::NFQNL_MSG_CONFIG, queue)
        .attribute(libc::NFQA_CFG_FLAGS, &gso)
        .attribute(libc::NFQA_CFG_MASK, &gso);
    request(&socket, message)?;
    pin::to(cpu)?;
    say("ready")?;
    set_socket_timeout(&socket, Timeout::Recv, None)?;
    consume(&socket, queue, batch, Duration::MAX).map(drop)
}

/// Binds the queue and requests whole packets.
fn bind(queue: u16, len: usize) -> Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, Some(netlink::NETFILTER))?;
    // Full buffers drop packets; reads should not also fail with ENOBUFS.
    set_option(&socket, libc::SOL_NETLINK, libc::NETLINK_NO_ENOBUFS, 1)?;
    set_socket_recv_buffer_size_force(&socket, 32 << 20)?;
    // struct nfqnl_msg_config_cmd: command, padding, pf (big endian).
    let command = [libc::NFQNL_CFG_CMD_BIND as u8, 0, 0, libc::AF_INET as u8];
    request(&socket, Message::new(libc::NFQNL_MSG_CONFIG, queue).attribute(libc::NFQA_CFG_CMD, &command))?;
    // struct nfqnl_msg_config_params: copy_range (big endian), copy_mode.
    let mut parameters = [0; 5];
    parameters[..4].copy_from_slice(&0xffff_u32.to_be_bytes());
    parameters[4] = libc::NFQNL_COPY_PACKET as u8;
    let waiting = ((64 << 20) / len.max(1)).clamp(256, 20_000) as u32;
    let message = Message::new(libc::NFQNL_MSG_CONFIG, queue)
        .attribute(libc::NFQA_CFG_PARAMS, &parameters)
        .attribute(libc::NFQA_CFG_QUEUE_MAXLEN, &waiting.to_be_bytes());
    request(&socket, message)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(Duration::from_secs(3)))?;
    Ok(socket)
}

/// Accepts all packets for `time` from the first packet on. Returns packets per second.
fn consume(socket: &OwnedFd, queue: u16, batch: usize, time: Duration) -> Result<f64> {
    let mut messages = Batch::new((0..RECEIVE).map(|_| vec![0; MAX_PAYLOAD + 2048].into()).collect());
    let mut start = None;
    let (mut packets, mut undecided, mut sum) = (0_u64, 0, 0);
    loop {
        let received = match messages.receive(socket, RECEIVE) {
            Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => bail!("no packet within 3 s"),
            received => received.context("recvmmsg")?.context("the netlink socket ended")?,
        };
        let began = *start.get_or_insert_with(Instant::now);
        let mut last = 0;
        for n in 0..received {
            let Some((id, payload)) = parse(messages.received(n)) else { bail!("not a packet message") };
            sum ^= fold(payload);
            last = id;
            packets += 1;
            undecided += 1;
            if undecided == batch {
                let kind = if batch == 1 { libc::NFQNL_MSG_VERDICT } else { libc::NFQNL_MSG_VERDICT_BATCH };
                accept(socket, queue, kind, last)?;
                undecided = 0;
            }
        }
        // An incomplete batch: waiting for more would delay these packets until the next arrive.
        if undecided > 0 && batch == RECEIVE {
            accept(socket, queue, libc::NFQNL_MSG_VERDICT_BATCH, last)?;
            undecided = 0;
        }
        let elapsed = began.elapsed();
        if elapsed >= time {
            std::hint::black_box(sum);
            return Ok(packets as f64 / elapsed.as_secs_f64());
        }
    }
}

/// Accepts packet `id`, or with NFQNL_MSG_VERDICT_BATCH all packets up to it.
fn accept(socket: &OwnedFd, queue: u16, kind: libc::c_int, id: u32) -> Result<()> {
    // struct nfqnl_msg_verdict_hdr: verdict, id, both big endian.
    let mut verdict = [0; 8];
    verdict[..4].copy_from_slice(&(libc::NF_ACCEPT as u32).to_be_bytes());
    verdict[4..].copy_from_slice(&id.to_be_bytes());
    let message = Message::new(kind, queue).attribute(libc::NFQA_VERDICT_HDR, &verdict);
    send(socket, &message.bytes, SendFlags::empty()).context("sending a verdict")?;
    Ok(())
}

/// Sends a request and reads the kernel's acknowledgement.
fn request(socket: &OwnedFd, mut message: Message) -> Result<()> {
    message.ask_for_ack();
    send(socket, &message.bytes, SendFlags::empty()).context("sending to nfnetlink_queue")?;
    let mut answer = [0_u8; 512];
    let (_, len) = recv(socket, &mut answer[..], RecvFlags::empty()).context("reply of nfnetlink_queue")?;
    // struct nlmsghdr (16 bytes), then struct nlmsgerr, which starts with the error.
    ensure!(len >= 20, "nfnetlink_queue replied with {len} bytes");
    let error = i32::from_ne_bytes([answer[16], answer[17], answer[18], answer[19]]);
    if error != 0 {
        bail!("nfnetlink_queue refused: {}", Errno::from_raw_os_error(-error));
    }
    Ok(())
}

/// Returns the id and the payload of a packet message (NFQNL_MSG_PACKET).
fn parse(message: &[u8]) -> Option<(u32, &[u8])> {
    const HEADERS: usize = 20;
    let kind = u16::from_ne_bytes([*message.get(4)?, *message.get(5)?]);
    if kind & 0xff != libc::NFQNL_MSG_PACKET as u16 {
        return None;
    }
    let mut rest = message.get(HEADERS..)?;
    let (mut id, mut payload) = (None, &[][..]);
    while let Some((header, _)) = rest.split_first_chunk::<4>() {
        let len = usize::from(u16::from_ne_bytes([header[0], header[1]]));
        let value = rest.get(4..len)?;
        match i32::from(u16::from_ne_bytes([header[2], header[3]]) & libc::NLA_TYPE_MASK as u16) {
            libc::NFQA_PACKET_HDR => id = value.first_chunk().map(|id| u32::from_be_bytes(*id)),
            libc::NFQA_PAYLOAD => payload = value,
            _ => {}
        }
        rest = rest.get(len.next_multiple_of(4)..).unwrap_or_default();
    }
    Some((id?, payload))
}

/// A netlink message of nfnetlink_queue.
struct Message {
    bytes: Vec<u8>,
}

impl Message {
    /// Writes struct nlmsghdr, then struct nfgenmsg with the queue number.
    fn new(kind: i32, queue: u16) -> Self {
        let kind = (libc::NFNL_SUBSYS_QUEUE << 8) as u16 | kind as u16;
        let mut bytes = Vec::with_capacity(64);
        bytes.extend_from_slice(&0_u32.to_ne_bytes());
        bytes.extend_from_slice(&kind.to_ne_bytes());
        bytes.extend_from_slice(&(libc::NLM_F_REQUEST as u16).to_ne_bytes());
        bytes.extend_from_slice(&[0; 8]);
        bytes.extend_from_slice(&[libc::AF_UNSPEC as u8, libc::NFNETLINK_V0 as u8]);
        bytes.extend_from_slice(&queue.to_be_bytes());
        Self { bytes }.measured()
    }

    fn attribute(mut self, kind: i32, value: &[u8]) -> Self {
        self.bytes.extend_from_slice(&(4 + value.len() as u16).to_ne_bytes());
        self.bytes.extend_from_slice(&(kind as u16).to_ne_bytes());
        self.bytes.extend_from_slice(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self.measured()
    }

    fn ask_for_ack(&mut self) {
        let flags = (libc::NLM_F_REQUEST | libc::NLM_F_ACK) as u16;
        self.bytes[6..8].copy_from_slice(&flags.to_ne_bytes());
    }

    fn measured(mut self) -> Self {
        let len = self.bytes.len() as u32;
        self.bytes[..4].copy_from_slice(&len.to_ne_bytes());
        self
    }
}

#[cfg(test)]
mod tests {
    use super::{Message, parse};

    #[test]
    fn parse_packet_message() {
        let mut header = [0; 7];
        header[..4].copy_from_slice(&77_u32.to_be_bytes());
        let message = Message::new(libc::NFQNL_MSG_PACKET, 3)
            .attribute(libc::NFQA_PACKET_HDR, &header)
            .attribute(libc::NFQA_PAYLOAD, b"payload");
        assert_eq!(parse(&message.bytes), Some((77, &b"payload"[..])));
        assert_eq!(message.bytes.len() % 4, 0);
    }

    #[test]
    fn parse_rejects_other_messages() {
        assert_eq!(parse(&Message::new(libc::NFQNL_MSG_CONFIG, 0).bytes), None);
        assert_eq!(parse(&Message::new(libc::NFQNL_MSG_PACKET, 0).bytes), None);
        assert_eq!(parse(&[0; 5]), None);
    }
}
