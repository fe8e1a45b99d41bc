//! The scenes of `examples/rules`: one for each rule file there.

mod captive_portal;
mod closed;
mod ips_web_farm;
mod office_gateway;
mod simple_router;
mod workstation;

use std::path::Path as FilePath;

use towpath_port::Error;

use super::frames::{Host, Path};
use super::scene::Scene;

type Play = fn(&mut Scene);

/// Each scene under its rule file's name.
const SCENES: [(&str, Play); 6] = [
    ("captive-portal", captive_portal::play),
    ("closed", closed::play),
    ("ips-web-farm", ips_web_farm::play),
    ("office-gateway", office_gateway::play),
    ("simple-router", simple_router::play),
    ("workstation", workstation::play),
];

/// Writes the capture and the expectations of every scene.
pub(crate) fn write(directory: &FilePath) -> Result<(), Error> {
    for (name, play) in SCENES {
        let mut scene = Scene::default();
        play(&mut scene);
        scene.write(directory, name)?;
    }
    Ok(())
}

/// A host whose Ethernet address ends in `n`.
fn host(n: u8, ip: &str) -> Host {
    Host::new([0x02, 0, 0, 0, 0, n], ip, 64)
}

/// The broadcast addresses of Ethernet and IPv4.
fn everybody() -> Host {
    Host::new([0xff; 6], "255.255.255.255", 64)
}

/// A group of IPv6, with the Ethernet address that belongs to it (RFC 2464, 7).
fn group6(ip: &str) -> Host {
    let mut group = Host::new([0x33, 0x33, 0, 0, 0, 0], ip, 255);
    if let std::net::IpAddr::V6(ip) = group.ip {
        group.mac[2..].copy_from_slice(&ip.octets()[12..]);
    }
    group
}

/// A path through a port that is a VLAN.
fn on(vlan: u16, from: Host, to: Host) -> Path {
    Path { vlan: Some(vlan), ..Path::new(from, to) }
}

/// A DHCP message: BOOTP's fixed part, then the message type (RFC 2131, 2).
fn dhcp(kind: u8) -> Vec<u8> {
    let mut message = vec![0; 240];
    message[0] = if kind == 1 { 1 } else { 2 };
    message[1..3].copy_from_slice(&[1, 6]);
    message[236..240].copy_from_slice(&[0x63, 0x82, 0x53, 0x63]);
    message.extend([53, 1, kind, 255]);
    message
}

/// A neighbour solicitation or advertisement for an address (RFC 4861, 4.3 and 4.4), without its first eight bytes.
fn neighbour(target: Host, option: u8) -> Vec<u8> {
    let std::net::IpAddr::V6(ip) = target.ip else { panic!("neighbour discovery is for IPv6") };
    [&ip.octets()[..], &[option, 1], &target.mac].concat()
}

/// The quotation of an ICMP error: the header and eight bytes of the packet.
fn quoted(frame: &[u8], tagged: bool) -> Vec<u8> {
    let ip = if tagged { 18 } else { 14 };
    let header = if frame[ip] >> 4 == 4 { 20 } else { 40 };
    frame[ip..ip + header + 8].to_vec()
}

/// Type, code, and the four bytes after the checksum of an ICMP echo request.
const PING: ((u8, u8), [u8; 4]) = ((8, 0), [0x70, 0x01, 0, 1]);
const PONG: ((u8, u8), [u8; 4]) = ((0, 0), [0x70, 0x01, 0, 1]);
const PING6: ((u8, u8), [u8; 4]) = ((128, 0), [0x70, 0x01, 0, 1]);
const PONG6: ((u8, u8), [u8; 4]) = ((129, 0), [0x70, 0x01, 0, 1]);
