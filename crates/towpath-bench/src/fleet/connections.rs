//! TCP connections through a group of gates: a server that echoes, and a client that sends a byte on each connection in turn.

use std::io::{ErrorKind, Read, Write, stdin};
use std::mem::MaybeUninit;
use std::net::{Ipv4Addr, SocketAddrV4, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};

use crate::mux::idle::allow_descriptors;
use crate::peer::netns;
use crate::raw::say;

pub(crate) const CLIENT: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
pub(crate) const SERVER: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 2);
const PORT: u16 = 7;

/// Every connection sends once in this time, in this many parts.
const ROUND: Duration = Duration::from_millis(500);
const PARTS: u32 = 50;

/// The ends of all connections in one process.
struct Ends {
    epoll: OwnedFd,
    streams: Vec<TcpStream>,
}

impl Ends {
    fn new() -> Result<Self> {
        allow_descriptors()?;
        Ok(Self { epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?, streams: Vec::new() })
    }

    fn add(&mut self, stream: TcpStream) -> Result<()> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        epoll::add(&self.epoll, &stream, EventData::new_u64(self.streams.len() as u64), EventFlags::IN)?;
        self.streams.push(stream);
        Ok(())
    }

    /// Waits for `time` at most, and passes what was received to `each`, with its connection. A connection that has failed is silent
    /// from then on.
    fn wait(&mut self, time: Duration, mut each: impl FnMut(usize, &mut TcpStream, &[u8])) -> Result<()> {
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); 256];
        let time = Timespec { tv_sec: time.as_secs().try_into()?, tv_nsec: time.subsec_nanos().into() };
        let (events, _) = match epoll::wait(&self.epoll, &mut room, Some(&time)) {
            Err(rustix::io::Errno::INTR) => return Ok(()),
            events => events?,
        };
        for event in events.iter() {
            let at = event.data.u64() as usize;
            let stream = &mut self.streams[at];
            let mut bytes = [0; 64];
            match stream.read(&mut bytes) {
                Ok(read @ 1..) => each(at, stream, &bytes[..read]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Ok(_) | Err(_) => epoll::delete(&self.epoll, &*stream)?,
            }
        }
        Ok(())
    }
}

/// Runs the server for this many connections, until it is killed.
pub(crate) fn server(netns_pid: u32, connections: usize) -> Result<()> {
    netns::join(netns_pid)?;
    let mut ends = Ends::new()?;
    let listener = TcpListener::bind((SERVER, PORT)).context("listening")?;
    say("ready")?;
    for _ in 0..connections {
        ends.add(listener.accept()?.0)?;
    }
    loop {
        // The socket's buffer has room for the few bytes of one client. If the connection has failed, the next read tells.
        ends.wait(Duration::from_secs(1), |_, stream, bytes| {
            let _ = stream.write_all(bytes);
        })?;
    }
}

/// What the client knows of a connection.
#[derive(Clone, Copy, Default)]
struct Exchange {
    /// A byte was sent and has not come back.
    sent: Option<Instant>,
    /// A byte has come back since the routes changed.
    answered: bool,
}

/// Runs the client. After the line `changed` it measures: the routes lead through the other gate. After `stop` it prints the number of
/// connections on which a byte has come back since, and the longest wait in ns.
pub(crate) fn client(netns_pid: u32, connections: usize) -> Result<()> {
    netns::join(netns_pid)?;
    let mut ends = Ends::new()?;
    for _ in 0..connections {
        ends.add(TcpStream::connect(SocketAddrV4::new(SERVER, PORT)).context("connecting")?)?;
    }
    say("ready")?;
    let orders = orders();
    let mut exchanges = vec![Exchange::default(); connections];
    let (mut changed, mut longest) = (None::<Instant>, Duration::ZERO);
    for part in 0.. {
        match orders.try_recv().as_deref() {
            Ok("changed") => changed = Some(Instant::now()),
            Ok("stop") => break,
            Ok(other) => bail!("unknown order {other:?}"),
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) => bail!("the parent has gone"),
        }
        let begun = Instant::now();
        for at in (0..connections).filter(|at| *at as u32 % PARTS == part % PARTS) {
            if exchanges[at].sent.is_none() && ends.streams[at].write_all(b"t").is_ok() {
                exchanges[at].sent = Some(Instant::now());
            }
        }
        while let Some(left) = (ROUND / PARTS).checked_sub(begun.elapsed()) {
            ends.wait(left, |at, _, _| {
                let exchange = &mut exchanges[at];
                if let (Some(sent), Some(changed)) = (exchange.sent.take(), changed) {
                    longest = longest.max(sent.max(changed).elapsed());
                    exchange.answered = true;
                }
            })?;
        }
    }
    say(&exchanges.iter().filter(|exchange| exchange.answered).count().to_string())?;
    say(&longest.as_nanos().to_string())
}

/// Lines of the standard input.
fn orders() -> Receiver<String> {
    let (send, receive) = channel();
    thread::spawn(move || {
        for line in stdin().lines().map_while(Result::ok) {
            if send.send(line).is_err() {
                return;
            }
        }
    });
    receive
}
