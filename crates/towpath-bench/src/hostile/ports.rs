//! The ports of the attacked engine, and the network around them.
//!
//! ```text
//! sender  near0 == wan  [engine]  lan == far0  receiver
//! ```
//!
//! `pcap` ports read and write captures in the engine's directory. `af_packet` and `af_xdp` ports are the ends of two veth pairs, whose
//! other ends are in a second network namespace. Both namespaces end with the processes that created them.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use rustix::net::{RecvFlags, SendFlags, recv, send, sockopt};
use serde::Serialize;

use crate::live::netns_proc::NetnsProc;
use crate::peer::flood::{bind, unbound_socket};
use crate::peer::netns;

/// Ports of the engine, and their other ends.
const PORTS: [&str; 2] = ["wan", "lan"];
const ENDS: [&str; 2] = ["near0", "far0"];
/// Receive buffer of the far end: several seconds of packets.
const RECEIVE_BUFFER: usize = 16 << 20;
/// ETH_P_IP of include/uapi/linux/if_ether.h.
const IPV4: u16 = 0x0800;

/// The driver of the engine's ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub(crate) enum Driver {
    /// Captures; one engine thread
    Pcap,
    /// Packet sockets on veth devices (needs root and `ip`)
    AfPacket,
    /// XDP sockets on veth devices (needs root and `ip`)
    AfXdp,
}

/// The ports of one engine.
pub(super) enum Ports {
    /// A FIFO that the engine reads as a capture, and the capture that it writes. The handle keeps the FIFO open until
    /// [`Ports::sender`].
    Captures(Option<File>),
    Links {
        driver: Driver,
        engine: Box<NetnsProc>,
        ends: Box<NetnsProc>,
    },
}

/// Sends packets to the engine.
pub(super) enum Sender {
    Capture(File),
    Link(OwnedFd),
}

impl Ports {
    /// Makes the ports of an engine with `threads` threads whose files are in `directory`.
    pub(super) fn make(driver: Driver, threads: u32, directory: &Path) -> Result<Self> {
        if driver == Driver::Pcap {
            return Ok(Self::Captures(Some(fifo(&directory.join("in.pcap"))?)));
        }
        if !rustix::process::geteuid().is_root() {
            bail!("ports on veth devices need root; without root, use --port pcap");
        }
        let (mut engine, mut ends) = (Box::new(NetnsProc::start()?), Box::new(NetnsProc::start()?));
        for namespace in [&mut engine, &mut ends] {
            // No router discovery: the engine receives the packets of the sender only.
            namespace.set("ipv6/conf/all/disable_ipv6", "1")?;
            namespace.set("ipv6/conf/default/disable_ipv6", "1")?;
        }
        // The mux's clients are in the engine's namespace.
        engine.run("ip link set lo up")?;
        for (end, port) in ENDS.into_iter().zip(PORTS) {
            let (near, queues) = (ends.pid(), format!("numrxqueues {threads} numtxqueues {threads}"));
            engine.run(&format!(
                "ip link add {port} {queues} type veth peer name {end} {queues} netns {near}"
            ))?;
            engine.run(&format!("ip link set {port} up"))?;
            ends.run(&format!("ip link set {end} up"))?;
        }
        Ok(Self::Links { driver, engine, ends })
    }

    /// The process whose network namespace the engine is in. None: that of this process.
    pub(super) fn netns(&self) -> Option<u32> {
        match self {
            Self::Captures(_) => None,
            Self::Links { engine, .. } => Some(engine.pid()),
        }
    }

    /// The ports in the engine's configuration.
    pub(super) fn configuration(&self) -> String {
        let [from, to] = PORTS;
        let ports = match self {
            Self::Captures(_) => format!(
                "[port.{from}]\ndriver = \"pcap\"\nread = \"in.pcap\"\n[port.{to}]\ndriver = \"pcap\"\nwrite = \"out.pcap\"\n"
            ),
            Self::Links { driver, .. } => {
                let word = if *driver == Driver::AfXdp { "af_xdp" } else { "af_packet" };
                format!("[port.{from}]\ndriver = \"{word}\"\n[port.{to}]\ndriver = \"{word}\"\n")
            }
        };
        ports + &format!("[[bridge]]\nports = [\"{from}\", \"{to}\"]\n")
    }

    /// Opens the sender's end. With captures, writes fail when the engine has ended.
    pub(super) fn sender(&mut self, directory: &Path) -> Result<Sender> {
        match self {
            Self::Captures(held) => {
                let nonblocking = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
                let path = directory.join("in.pcap");
                let opened = OpenOptions::new().write(true).custom_flags(nonblocking).open(path);
                *held = None;
                Ok(Sender::Capture(opened.context("opening the capture")?))
            }
            Self::Links { ends, .. } => {
                let socket = within(ends.pid(), || packet_socket(ENDS[0], 0));
                Ok(Sender::Link(socket.context("opening the sender's packet socket")?))
            }
        }
    }

    /// Opens the receiver's end, which does not block. None with captures: the engine writes a file.
    pub(super) fn receiver(&self) -> Result<Option<OwnedFd>> {
        let Self::Links { ends, .. } = self else { return Ok(None) };
        let socket = within(ends.pid(), || packet_socket(ENDS[1], IPV4))
            .context("opening the receiver's packet socket")?;
        sockopt::set_socket_recv_buffer_size_force(&socket, RECEIVE_BUFFER)?;
        rustix::io::ioctl_fionbio(&socket, true)?;
        Ok(Some(socket))
    }
}

impl Sender {
    /// Sends a frame that was made at `time`. Returns false if there is no room now.
    pub(super) fn send(&mut self, frame: &[u8], time: Duration) -> Result<bool> {
        match self {
            Self::Capture(capture) => {
                let len = frame.len() as u32;
                let record = [time.as_secs() as u32 + 1_700_000_000, time.subsec_micros(), len, len];
                let record = record.iter().flat_map(|word| word.to_le_bytes());
                let bytes: Vec<u8> = record.chain(frame.iter().copied()).collect();
                // All or nothing: a record is shorter than PIPE_BUF (pipe(7)).
                match capture.write_all(&bytes) {
                    Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(false),
                    written => written.map(|()| true).context("writing the capture"),
                }
            }
            Self::Link(socket) => match send(&*socket, frame, SendFlags::DONTWAIT) {
                Ok(_) => Ok(true),
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::NOBUFS) => Ok(false),
                Err(error) => Err(error).context("sending a packet"),
            },
        }
    }
}

/// A packet socket that receives `protocol`; 0 receives nothing (packet(7)). It does not set PACKET_QDISC_BYPASS: on a device with
/// several queues the kernel then selects the queue by the packet's flow, and with that option by the sender's CPU.
fn packet_socket(interface: &str, protocol: u16) -> Result<OwnedFd> {
    let socket = unbound_socket()?;
    bind(&socket, interface, protocol)?;
    Ok(socket)
}

/// Receives a frame. None: there is none now.
pub(super) fn receive<'a>(socket: &OwnedFd, into: &'a mut [u8]) -> Result<Option<&'a [u8]>> {
    match recv(socket, &mut *into, RecvFlags::DONTWAIT) {
        Ok((len, _)) => Ok(Some(&into[..len])),
        Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => Ok(None),
        Err(error) => Err(error).context("receiving packets"),
    }
}

/// Runs `open` on a thread in the network namespace of process `pid`. Sockets stay in the namespace in which they were opened.
pub(crate) fn within<T: Send>(pid: u32, open: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    thread::scope(|scope| {
        let thread = scope.spawn(|| {
            netns::join(pid)?;
            open()
        });
        thread.join().unwrap_or_else(|_| bail!("its thread panicked"))
    })
}

/// Makes a FIFO with the head of a capture, and returns a handle that keeps it open.
fn fifo(path: &Path) -> Result<File> {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).context("making a FIFO")?;
    // A FIFO that is opened for both directions does not wait for a reader (fifo(7)).
    let mut capture = OpenOptions::new().read(true).write(true).open(path)?;
    // Classic pcap (draft-ietf-opsawg-pcap): magic number, version 2.4, snapshot length, Ethernet.
    let head = [0xa1b2_c3d4, 2 | 4 << 16, 0, 0, 65_535, 1_u32];
    capture.write_all(&head.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>())?;
    Ok(capture)
}
