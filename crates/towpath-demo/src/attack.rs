//! The attack: a port scan, a SYN flood, and a source that exceeds its connection limit.

use std::io;
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::OwnedFd;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketFlags, SocketType, bind, connect, getpeername, socket_with};
use serde::Serialize;
use towpath_port::{Frame, LinkType, Port, af_packet};
use towpath_wire::checksum;

use super::network::{GREEDY, LIMIT, Network, SCANNER, SERVER, SERVER_MAC, SYN_LIFETIME, WEB};
use super::{Failure, Stop, doing};

/// Highest port that the scan tries. It omits the web server's.
pub(super) const SCANNED: u16 = 1000;
/// Connections that the greedy source requests.
pub(super) const WANTED: u64 = 20;
/// Sockets open at a time, below the usual descriptor limit.
const AT_A_TIME: usize = 100;
/// Time the scanner waits for answers.
const ANSWERS: Duration = Duration::from_millis(40);
/// SYNs of the flood in one burst.
const BURST: u32 = 64;
/// Pause between two bursts.
const REST: Duration = Duration::from_millis(1);

/// Upper bound of the SYN flood's duration: the flood ends before its first states expire.
pub const FLOOD_MAX: Duration = Duration::from_secs(SYN_LIFETIME - 1);

/// A flood on another thread.
pub(super) type Flood = JoinHandle<Result<u64, towpath_port::Error>>;

/// Results of the attack, as the attackers saw them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Attack {
    /// Ports tried.
    pub(crate) scanned: u64,
    /// Ports that accepted a connection.
    pub(crate) open: u64,
    /// SYNs of the flood, each from another address.
    pub(crate) flood: u64,
    /// Connections that the greedy source requested.
    pub(crate) wanted: u64,
    /// Connections of the greedy source that were established.
    pub(crate) got: u64,
}

impl Attack {
    /// Tries every port up to [`SCANNED`] except the web server's.
    pub(super) fn scan(&mut self, network: &Network, stop: &Stop) -> Result<(), Failure> {
        let ports: Vec<u16> = (1..=SCANNED).filter(|port| *port != WEB).collect();
        self.scanned = ports.len() as u64;
        let stop = stop.clone();
        self.open = network
            .outside
            .run(move || {
                let mut open = 0;
                for ports in ports.chunks(AT_A_TIME).take_while(|_| !stop.is_set()) {
                    let sockets = connect_all(SCANNER, ports.iter().copied())?;
                    thread::sleep(ANSWERS);
                    open += connected(&sockets);
                }
                io::Result::Ok(open)
            })
            .map_err(doing("the port scan"))?;
        Ok(())
    }

    /// Sends SYNs from unused addresses for `length`, at most [`FLOOD_MAX`], on another thread.
    pub(super) fn flood(network: &Network, stop: &Stop, length: Duration) -> Flood {
        let stop = stop.clone();
        network.outside.start(move || flood(&stop, length.min(FLOOD_MAX)))
    }

    /// Waits for the end of a flood. Returns the number of SYNs.
    pub(super) fn flooded(flood: Flood) -> Result<u64, Failure> {
        let sent = flood.join().map_err(|_| Failure::Broken("the SYN flood panicked".into()))?;
        sent.map_err(|error| Failure::Broken(format!("the SYN flood: {error}")))
    }

    /// Requests more connections from one source than its limit.
    pub(super) fn exceed_limit(
        &mut self,
        network: &Network,
        stop: &Stop,
        patience: Duration,
    ) -> Result<(), Failure> {
        self.wanted = WANTED;
        let stop = stop.clone();
        self.got = network
            .outside
            .run(move || {
                let sockets = connect_all(GREEDY, (0..WANTED).map(|_| WEB))?;
                let end = Instant::now() + patience;
                // Connections within the limit are established at once. The wait below shows whether others are established too.
                while connected(&sockets) < LIMIT && Instant::now() < end && !stop.is_set() {
                    thread::sleep(Duration::from_millis(1));
                }
                thread::sleep(ANSWERS);
                io::Result::Ok(connected(&sockets))
            })
            .map_err(doing("the greedy source"))?;
        Ok(())
    }
}

/// Starts connections to these ports of the server.
fn connect_all(from: Ipv4Addr, ports: impl Iterator<Item = u16>) -> io::Result<Vec<OwnedFd>> {
    ports
        .map(|port| {
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let socket = socket_with(AddressFamily::INET, SocketType::STREAM, flags, None)?;
            bind(&socket, &SocketAddrV4::new(from, 0))?;
            match connect(&socket, &SocketAddrV4::new(SERVER, port)) {
                Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(socket),
                Err(error) => Err(error.into()),
            }
        })
        .collect()
}

fn connected(sockets: &[OwnedFd]) -> u64 {
    sockets.iter().filter(|socket| getpeername(socket).is_ok()).count() as u64
}

/// Sends SYNs for `length` from the calling thread's namespace. Returns their number.
pub(super) fn flood(stop: &Stop, length: Duration) -> Result<u64, towpath_port::Error> {
    let mut port = af_packet::Socket::open(af_packet::Config::new("l0"))?;
    let end = Instant::now() + length;
    let mut number = 0;
    while Instant::now() < end && !stop.is_set() {
        let frames: Vec<[u8; 60]> = (number..number + BURST).map(syn).collect();
        let mut frames = frames.iter().map(|bytes| Frame::new(bytes, LinkType::ETHERNET));
        let sent = port.send(&mut frames)?;
        port.flush()?;
        number += sent as u32;
        thread::sleep(REST);
    }
    Ok(u64::from(number))
}

/// Builds SYN `number`: RFC 9293's fixed header, from an address of 198.18.0.0/15 (RFC 2544, benchmarking).
fn syn(number: u32) -> [u8; 60] {
    let mut frame = [0; 60];
    let source = 0xc612_0000 | number.wrapping_mul(2_654_435_761) >> 15;
    frame[..6].copy_from_slice(&SERVER_MAC);
    frame[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 9]);
    frame[12..14].copy_from_slice(&[0x08, 0x00]);
    let ip = &mut frame[14..34];
    // Version 4, header length 20, total length 40, Don't Fragment, TTL 64, TCP.
    ip[..10].copy_from_slice(&[0x45, 0, 0, 40, 0, 0, 0x40, 0, 64, 6]);
    ip[12..16].copy_from_slice(&source.to_be_bytes());
    ip[16..20].copy_from_slice(&SERVER.octets());
    let tcp = &mut frame[34..54];
    tcp[..2].copy_from_slice(&(1024 + (number % 60_000) as u16).to_be_bytes());
    tcp[2..4].copy_from_slice(&WEB.to_be_bytes());
    tcp[4..8].copy_from_slice(&number.to_be_bytes());
    // Data offset 20 bytes, SYN, a window.
    tcp[12..16].copy_from_slice(&[0x50, 0x02, 0xff, 0xff]);
    let _ = checksum::renew(LinkType::ETHERNET, &mut frame, towpath_port::Offload::default());
    frame
}

#[cfg(test)]
mod tests {
    use super::{checksum, syn};

    #[test]
    fn a_syn_has_valid_checksums_and_an_unused_address() {
        for number in [0, 1, 77, u32::MAX] {
            let frame = syn(number);
            assert_eq!(checksum::sum(&frame[14..34], 0), 0xffff, "IP's of {number}");
            // Pseudo header: addresses, protocol, length.
            let pseudo = checksum::sum(&frame[26..34], 6 + 20);
            assert_eq!(checksum::sum(&frame[34..54], pseudo), 0xffff, "TCP's of {number}");
            assert_eq!((frame[26], frame[27] & 0xfe), (198, 18));
        }
    }
}
