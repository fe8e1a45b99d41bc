//! What the kernel's network stack does with the packets of an interface: its addresses, the interfaces above it, and forwarding.
//!
//! Read by rtnetlink(7), in the network namespace of the calling thread.

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use crate::rtnetlink::{attributes, dump, find, word};

/// linux/rtnetlink.h.
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const RTM_NEWADDR: u16 = 20;
const RTM_GETADDR: u16 = 22;
/// linux/if_link.h, linux/if_addr.h.
const IFLA_IFNAME: u16 = 3;
const IFLA_LINK: u16 = 5;
const IFLA_MASTER: u16 = 10;
const IFLA_LINKINFO: u16 = 18;
const IFLA_INFO_KIND: u16 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;

/// The kernel's use of one interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelPath {
    /// Addresses of the interface and of the interfaces above it (its bridge or bond, its VLANs), each with the name of the
    /// interface. IPv6 link-local addresses are omitted.
    pub addresses: Vec<(String, IpAddr)>,
    /// The kernel's bridge or bond that has the interface.
    pub master: Option<String>,
    /// The kernel forwards IPv4 packets (`net.ipv4.ip_forward`), and has a route.
    pub forwards_v4: bool,
    /// The kernel forwards IPv6 packets (`net.ipv6.conf.all.forwarding`), and has a route.
    pub forwards_v6: bool,
    /// Another interface than the loopback device has an address, to which the kernel also accepts packets here.
    pub others: bool,
}

#[derive(Clone, Debug, Default)]
struct Link {
    index: u32,
    name: String,
    master: Option<u32>,
    /// The interface below a VLAN or a macvlan.
    below: Option<u32>,
}

impl KernelPath {
    /// Reads the kernel's use of `interface`. An interface that does not exist has none.
    ///
    /// # Errors
    /// Errors of netlink(7).
    pub fn of(interface: &str) -> io::Result<Self> {
        let (links, addresses) = (links()?, addresses()?);
        let flag = |path: &str| fs::read_to_string(path).is_ok_and(|text| text.trim() == "1");
        let named = |index: u32| {
            links.iter().find(|link| link.index == index).map_or_else(|| "?".into(), |link| link.name.clone())
        };
        let Some(own) = links.iter().find(|link| link.name == interface) else { return Ok(Self::default()) };
        let mut path = Self {
            forwards_v4: flag("/proc/sys/net/ipv4/ip_forward") && has_route_v4(),
            forwards_v6: flag("/proc/sys/net/ipv6/conf/all/forwarding") && has_route_v6(),
            ..Self::default()
        };
        path.master = own.master.map(named);
        // The interface and those above it: each round adds one level.
        let mut stack = vec![own.index];
        let mut at = 0;
        while let Some(index) = stack.get(at).copied() {
            at += 1;
            let master = links.iter().find(|link| link.index == index).and_then(|link| link.master);
            let above = links.iter().filter(|link| link.below == Some(index)).map(|link| link.index);
            let above: Vec<u32> = above.chain(master).filter(|index| !stack.contains(index)).collect();
            stack.extend(above);
        }
        for (index, address) in addresses {
            if stack.contains(&index) {
                path.addresses.push((named(index), address));
            } else if !address.is_loopback() {
                path.others = true;
            }
        }
        Ok(path)
    }

    /// Returns true if the kernel delivers, forwards or bridges packets of the interface.
    pub fn is_used(&self) -> bool {
        let Self { addresses, master, forwards_v4, forwards_v6, others } = self;
        !addresses.is_empty() || master.is_some() || *forwards_v4 || *forwards_v6 || *others
    }

    /// The kernel's use in words; empty if there is none.
    pub fn words(&self) -> String {
        let mut words = Vec::new();
        if !self.addresses.is_empty() {
            let list: Vec<_> = self.addresses.iter().map(|(_, address)| address.to_string()).collect();
            words.push(format!("it has {}", list.join(", ")));
        } else if self.others {
            words.push("it has addresses on other interfaces".into());
        }
        words.extend(self.master.iter().map(|master| format!("it passes them to {master}")));
        for (forwards, what) in
            [(self.forwards_v4, "net.ipv4.ip_forward"), (self.forwards_v6, "net.ipv6.conf.all.forwarding")]
        {
            if forwards {
                words.push(format!("it forwards ({what} = 1)"));
            }
        }
        words.join(", ")
    }
}

/// Returns true if there is a route for IPv4.
fn has_route_v4() -> bool {
    // A line with the names of the columns, and one for each route.
    fs::read_to_string("/proc/thread-self/net/route").is_ok_and(|text| text.lines().count() > 1)
}

/// Returns true if there is a route for IPv6, besides those of the loopback device and of link-local and multicast addresses.
fn has_route_v6() -> bool {
    let is_route =
        |line: &str| !line.starts_with("fe80") && !line.starts_with("ff") && !line.ends_with(" lo");
    fs::read_to_string("/proc/thread-self/net/ipv6_route")
        .is_ok_and(|text| text.lines().any(|line| is_route(line.trim_end())))
}

/// The addresses of the interface with this index, including link-local ones.
pub(crate) fn addresses_of(index: u32) -> io::Result<Vec<IpAddr>> {
    let mut found = Vec::new();
    dump(RTM_GETADDR, |kind, body| {
        found.extend(address(kind, body).filter(|(of, _)| *of == index).map(|(_, address)| address));
    })?;
    found.sort_unstable();
    Ok(found)
}

/// All addresses but IPv6 link-local ones, with the index of their interface.
fn addresses() -> io::Result<Vec<(u32, IpAddr)>> {
    let mut found = Vec::new();
    dump(RTM_GETADDR, |kind, body| {
        let is_link_local =
            |address: &IpAddr| matches!(address, IpAddr::V6(six) if six.is_unicast_link_local());
        found.extend(address(kind, body).filter(|(_, address)| !is_link_local(address)));
    })?;
    Ok(found)
}

/// One message of addresses: struct ifaddrmsg has family, prefix length, flags, scope and index.
fn address(kind: u16, body: &[u8]) -> Option<(u32, IpAddr)> {
    if kind != RTM_NEWADDR {
        return None;
    }
    let index = word(body.get(4..)?)?;
    let attributes = attributes(body.get(8..)?);
    // IFA_ADDRESS is the peer's address on a point-to-point interface.
    let bytes = find(&attributes, IFA_LOCAL).or_else(|| find(&attributes, IFA_ADDRESS))?;
    let address = match bytes.len() {
        4 => IpAddr::from(Ipv4Addr::from(<[u8; 4]>::try_from(bytes).ok()?)),
        16 => IpAddr::from(Ipv6Addr::from(<[u8; 16]>::try_from(bytes).ok()?)),
        _ => return None,
    };
    Some((index, address))
}

fn links() -> io::Result<Vec<Link>> {
    let mut found = Vec::new();
    dump(RTM_GETLINK, |kind, body| found.extend(link(kind, body)))?;
    Ok(found)
}

/// The interfaces: index and name.
pub(crate) fn interface_names() -> io::Result<Vec<(u32, String)>> {
    Ok(links()?.into_iter().map(|link| (link.index, link.name)).collect())
}

/// One message of links: struct ifinfomsg has family, type, index, flags and change.
fn link(kind: u16, body: &[u8]) -> Option<Link> {
    if kind != RTM_NEWLINK {
        return None;
    }
    let index = word(body.get(4..)?)?;
    let all = attributes(body.get(16..)?);
    let number = |kind| find(&all, kind).and_then(word);
    let info = find(&all, IFLA_LINKINFO).map(attributes).unwrap_or_default();
    let text =
        |bytes: &[u8]| String::from_utf8_lossy(bytes.split(|byte| *byte == 0).next()?).into_owned().into();
    let info_kind: Option<String> = find(&info, IFLA_INFO_KIND).and_then(text);
    // IFLA_LINK of a veth device is the other end, which may be in another namespace.
    let stacked =
        info_kind.is_some_and(|kind| ["vlan", "macvlan", "ipvlan", "macvtap", "ipvtap"].contains(&&*kind));
    Some(Link {
        index,
        name: find(&all, IFLA_IFNAME).and_then(text)?,
        master: number(IFLA_MASTER),
        below: number(IFLA_LINK).filter(|_| stacked),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::{ip, veth, within};

    #[towpath_testenv::needs(netns)]
    #[test]
    fn addresses_of_the_interface_and_of_those_above_it() {
        within(|| {
            veth("v0", "v1");
            assert_eq!(KernelPath::of("v0").unwrap(), KernelPath::default());
            ip("addr add 10.1.0.1/24 dev v1");
            let path = KernelPath::of("v0").unwrap();
            assert_eq!((path.addresses.len(), path.others, path.is_used()), (0, true, true));
            ip("addr add 10.2.0.1/24 dev v0");
            ip("link add link v0 name m0 type macvlan");
            ip("addr add 10.3.0.1/24 dev m0");
            let path = KernelPath::of("v0").unwrap();
            let address = |name: &str, second| (name.to_owned(), IpAddr::from([10, second, 0, 1]));
            assert_eq!(path.addresses, [address("v0", 2), address("m0", 3)]);
            assert_eq!(path.words(), "it has 10.2.0.1, 10.3.0.1");
            ip("link add br0 type bridge");
            ip("link set v1 master br0");
            ip("addr add 10.4.0.1/24 dev br0");
            std::fs::write("/proc/sys/net/ipv4/ip_forward", "1").unwrap();
            let path = KernelPath::of("v1").unwrap();
            assert_eq!(path.addresses, [address("v1", 1), address("br0", 4)]);
            assert_eq!(
                path.words(),
                "it has 10.1.0.1, 10.4.0.1, it passes them to br0, it forwards (net.ipv4.ip_forward = 1)"
            );
            assert_eq!(KernelPath::of("v9").unwrap().addresses, []);
        });
    }
}
