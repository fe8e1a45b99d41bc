//! What the kernel says about its interfaces and about its queues for packets: XDP programs and modes, offloads, rules that queue.
//!
//! Read by netlink(7), in the network namespace of the calling thread. Nothing changes.

use std::collections::HashMap;
use std::io;

use crate::rtnetlink::{attributes, dump, dump_on, find, half, put, query_on, word};

/// linux/rtnetlink.h, linux/if_link.h.
const RTM_NEWLINK: u16 = 16;
const RTM_GETLINK: u16 = 18;
const IFLA_IFNAME: u16 = 3;
const IFLA_MTU: u16 = 4;
const IFLA_NUM_RX_QUEUES: u16 = 32;
const IFLA_XDP: u16 = 43;
const IFLA_XDP_ATTACHED: u16 = 2;
const IFLA_XDP_PROG_ID: u16 = 4;
/// linux/genetlink.h: the family `nlctrl`.
const GENL_ID_CTRL: u16 = 16;
const CTRL_CMD_GETFAMILY: u8 = 3;
const CTRL_ATTR_FAMILY_ID: u16 = 1;
const CTRL_ATTR_FAMILY_NAME: u16 = 2;
/// linux/netdev.h (Linux 6.3).
const NETDEV_CMD_DEV_GET: u8 = 1;
const NETDEV_A_DEV_IFINDEX: u16 = 1;
const NETDEV_A_DEV_XDP_FEATURES: u16 = 3;
/// linux/ethtool_netlink.h (Linux 5.7).
const ETHTOOL_MSG_FEATURES_GET: u8 = 11;
const ETHTOOL_A_FEATURES_HEADER: u16 = 1;
const ETHTOOL_A_FEATURES_ACTIVE: u16 = 4;
const ETHTOOL_A_HEADER_DEV_NAME: u16 = 2;
const ETHTOOL_A_BITSET_BITS: u16 = 3;
const ETHTOOL_A_BITSET_BIT_NAME: u16 = 2;
/// linux/netlink.h.
const NLA_F_NESTED: u16 = 0x8000;
/// linux/netfilter/nfnetlink.h, linux/netfilter/nf_tables.h.
const NFNL_SUBSYS_NFTABLES: u16 = 10;
const NFT_MSG_NEWRULE: u16 = 6;
const NFT_MSG_GETRULE: u16 = 7;
const NFTA_RULE_TABLE: u16 = 1;
const NFTA_RULE_CHAIN: u16 = 2;
const NFTA_RULE_EXPRESSIONS: u16 = 4;
const NFTA_EXPR_NAME: u16 = 1;
const NFTA_EXPR_DATA: u16 = 2;
const NFTA_QUEUE_NUM: u16 = 1;
const NFTA_QUEUE_TOTAL: u16 = 2;
const NFTA_TARGET_NAME: u16 = 1;
const NFTA_TARGET_INFO: u16 = 3;

/// A network interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Link {
    /// Its index.
    pub index: u32,
    /// Its name.
    pub name: String,
    /// Its MTU.
    pub mtu: u32,
    /// Number of receive queues.
    pub rx_queues: u32,
    /// The XDP program on it.
    pub program: Option<XdpProgram>,
    /// What its driver can do with XDP. `None` before Linux 6.3.
    pub xdp: Option<XdpFeatures>,
}

/// An XDP program on an interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct XdpProgram {
    /// `native`, `generic`, `offloaded` or `several`.
    pub mode: &'static str,
    /// The program's number; 0 if there are several.
    pub id: u32,
}

/// The abilities of an interface's driver (`enum netdev_xdp_act`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XdpFeatures {
    /// Native mode: programs run in the driver.
    pub native: bool,
    /// Sockets without a copy.
    pub zero_copy: bool,
    /// Frames of several buffers in native mode.
    pub multi_buffer: bool,
    /// Native programs of other interfaces may redirect frames to it.
    pub target: bool,
    /// Also frames of several buffers.
    pub target_multi_buffer: bool,
}

/// A rule of nftables that queues packets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct QueueRule {
    /// Table and chain.
    pub place: String,
    /// The first queue.
    pub first: u16,
    /// Number of queues; at least 1.
    pub count: u16,
}

impl QueueRule {
    /// Returns true if the rule sends packets to this queue.
    pub fn has(&self, queue: u16) -> bool {
        (u32::from(self.first)..u32::from(self.first) + u32::from(self.count.max(1)))
            .contains(&u32::from(queue))
    }
}

/// All interfaces.
///
/// # Errors
/// Errors of netlink(7).
pub fn links() -> io::Result<Vec<Link>> {
    let mut links = Vec::new();
    dump(RTM_GETLINK, |kind, body| links.extend((kind == RTM_NEWLINK).then(|| link(body)).flatten()))?;
    if let Ok(features) = xdp_features() {
        for link in &mut links {
            link.xdp = features.get(&link.index).copied();
        }
    }
    Ok(links)
}

/// struct ifinfomsg has 16 bytes, the index at 4.
fn link(body: &[u8]) -> Option<Link> {
    let index = word(body.get(4..)?)?;
    let attributes = attributes(body.get(16..)?);
    let name = text(find(&attributes, IFLA_IFNAME)?);
    let program = find(&attributes, IFLA_XDP).and_then(program);
    let number = |kind| find(&attributes, kind).and_then(word).unwrap_or(0);
    let (mtu, rx_queues) = (number(IFLA_MTU), number(IFLA_NUM_RX_QUEUES));
    Some(Link { index, name, mtu, rx_queues, program, xdp: None })
}

fn program(xdp: &[u8]) -> Option<XdpProgram> {
    let xdp = attributes(xdp);
    // enum in linux/if_link.h: XDP_ATTACHED_NONE and so on.
    let mode = match find(&xdp, IFLA_XDP_ATTACHED)?.first()? {
        0 => return None,
        1 => "native",
        2 => "generic",
        3 => "offloaded",
        _ => "several",
    };
    Some(XdpProgram { mode, id: find(&xdp, IFLA_XDP_PROG_ID).and_then(word).unwrap_or(0) })
}

/// The abilities of the drivers, by index.
pub(crate) fn xdp_features() -> io::Result<HashMap<u32, XdpFeatures>> {
    let family = family("netdev")?;
    let mut features = HashMap::new();
    dump_on(libc::NETLINK_GENERIC, family, &[NETDEV_CMD_DEV_GET, 1, 0, 0], |kind, body| {
        if kind == family {
            features.extend(device(body));
        }
    })?;
    Ok(features)
}

/// struct genlmsghdr has 4 bytes.
fn device(body: &[u8]) -> Option<(u32, XdpFeatures)> {
    let attributes = attributes(body.get(4..)?);
    let index = word(find(&attributes, NETDEV_A_DEV_IFINDEX)?)?;
    let bits = find(&attributes, NETDEV_A_DEV_XDP_FEATURES).and_then(word)?;
    let has = |bit: u32| bits >> bit & 1 == 1;
    let features = XdpFeatures {
        native: has(0),
        zero_copy: has(3),
        multi_buffer: has(5),
        target: has(2),
        target_multi_buffer: has(6),
    };
    Some((index, features))
}

/// The number of a family of generic netlink.
fn family(name: &str) -> io::Result<u16> {
    let mut body = vec![CTRL_CMD_GETFAMILY, 1, 0, 0];
    put(&mut body, CTRL_ATTR_FAMILY_NAME, format!("{name}\0").as_bytes());
    let mut number = None;
    query_on(libc::NETLINK_GENERIC, GENL_ID_CTRL, &body, |_, body| {
        let attributes = attributes(body.get(4..).unwrap_or_default());
        number = number.or(find(&attributes, CTRL_ATTR_FAMILY_ID).map(half));
    })?;
    number.ok_or_else(|| io::ErrorKind::NotFound.into())
}

/// The offloads that are on, under the kernel's names, such as `rx-gro` and `rx-lro`.
///
/// # Errors
/// Errors of netlink(7); before Linux 5.7, and without such an interface.
pub fn offloads(interface: &str) -> io::Result<Vec<String>> {
    let family = family("ethtool")?;
    let mut header = Vec::new();
    put(&mut header, ETHTOOL_A_HEADER_DEV_NAME, format!("{interface}\0").as_bytes());
    let mut body = vec![ETHTOOL_MSG_FEATURES_GET, 1, 0, 0];
    put(&mut body, ETHTOOL_A_FEATURES_HEADER | NLA_F_NESTED, &header);
    let mut names = Vec::new();
    query_on(libc::NETLINK_GENERIC, family, &body, |kind, body| {
        if kind == family {
            names.extend(features(body).unwrap_or_default());
        }
    })?;
    names.sort_unstable();
    Ok(names)
}

fn features(body: &[u8]) -> Option<Vec<String>> {
    let all = attributes(body.get(4..)?);
    let active = attributes(find(&all, ETHTOOL_A_FEATURES_ACTIVE)?);
    let bits = attributes(find(&active, ETHTOOL_A_BITSET_BITS)?);
    let name = |bit: &[u8]| Some(text(find(&attributes(bit), ETHTOOL_A_BITSET_BIT_NAME)?));
    Some(bits.iter().filter_map(|(_, bit)| name(bit)).collect())
}

/// The rules of nftables, those of `iptables-nft` included, that queue packets. Needs CAP_NET_ADMIN.
///
/// # Errors
/// Errors of netlink(7).
pub fn queue_rules() -> io::Result<Vec<QueueRule>> {
    let request = NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_GETRULE;
    let mut rules = Vec::new();
    // struct nfgenmsg: all families.
    dump_on(libc::NETLINK_NETFILTER, request, &[0; 4], |kind, body| {
        if kind == NFNL_SUBSYS_NFTABLES << 8 | NFT_MSG_NEWRULE {
            rules.extend(queue_rule(body));
        }
    })?;
    Ok(rules)
}

fn queue_rule(body: &[u8]) -> Option<QueueRule> {
    let rule = attributes(body.get(4..)?);
    let place = [NFTA_RULE_TABLE, NFTA_RULE_CHAIN].map(|kind| text(find(&rule, kind).unwrap_or_default()));
    for (_, expression) in attributes(find(&rule, NFTA_RULE_EXPRESSIONS)?) {
        let expression = attributes(expression);
        let Some(data) = find(&expression, NFTA_EXPR_DATA).map(attributes) else { continue };
        let number = |kind| find(&data, kind).map(|bytes| u16::from_be(half(bytes)));
        let queues = match &*text(find(&expression, NFTA_EXPR_NAME).unwrap_or_default()) {
            "queue" => number(NFTA_QUEUE_NUM).map(|first| (first, number(NFTA_QUEUE_TOTAL).unwrap_or(1))),
            // struct xt_NFQ_info: the number; from version 1 on also the count.
            "target" if text(find(&data, NFTA_TARGET_NAME).unwrap_or_default()) == "NFQUEUE" => {
                let info = find(&data, NFTA_TARGET_INFO).unwrap_or_default();
                Some((half(info), info.get(2..).map_or(1, half)))
            }
            _ => None,
        };
        if let Some((first, count)) = queues {
            return Some(QueueRule { place: place.join(" "), first, count: count.max(1) });
        }
    }
    None
}

/// Text that may end in a zero byte.
fn text(bytes: &[u8]) -> String {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    String::from_utf8_lossy(&bytes[..end]).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::netns::{run, veth, within};

    #[towpath_testenv::needs(netns)]
    #[test]
    fn the_loopback_device_has_no_program_and_has_offloads() {
        let links = links().unwrap();
        let lo = links.iter().find(|link| link.name == "lo").expect("the loopback device");
        assert_eq!(lo.program, None);
        assert!(offloads("lo").unwrap().iter().any(|name| name == "tx-tcp-segmentation"));
        assert!(offloads("no-such-device").is_err());
    }

    #[towpath_testenv::needs(netns, "ethtool")]
    #[test]
    fn offloads_are_those_of_the_namespace() {
        within(|| {
            veth("v0", "v1");
            run("ethtool", "-K v0 gro on");
            assert!(offloads("v0").unwrap().iter().any(|name| name == "rx-gro"));
            run("ethtool", "-K v0 gro off");
            assert!(!offloads("v0").unwrap().iter().any(|name| name == "rx-gro"));
            // veth has native mode, and copies.
            let link = links().unwrap().into_iter().find(|link| link.name == "v0").unwrap();
            assert!(link.xdp.is_none_or(|xdp| xdp.native && !xdp.zero_copy), "{link:?}");
            assert_eq!((link.mtu, link.program), (1500, None));
            assert!(link.rx_queues > 0);
        });
    }

    #[towpath_testenv::needs(netns, nfqueue, "iptables-nft")]
    #[test]
    fn queue_rules_are_found() {
        within(|| {
            assert_eq!(queue_rules().unwrap(), []);
            run("iptables-nft", "-A OUTPUT -p tcp -j NFQUEUE --queue-balance 7:9");
            let rules = queue_rules().unwrap();
            assert_eq!(rules, [QueueRule { place: "filter OUTPUT".into(), first: 7, count: 3 }]);
        });
    }

    #[test]
    fn a_rule_has_its_queues() {
        let be = |number: u16| number.to_be_bytes();
        let nest = |parts: &[(u16, &[u8])]| {
            let mut body = Vec::new();
            parts.iter().for_each(|(kind, value)| put(&mut body, *kind, value));
            body
        };
        let rule = |name: &[u8], data: &[u8]| {
            let expression = nest(&[(NFTA_EXPR_NAME, name), (NFTA_EXPR_DATA, data)]);
            let list = nest(&[(1, &expression)]);
            let rule = nest(&[
                (NFTA_RULE_TABLE, b"filter\0"),
                (NFTA_RULE_CHAIN, b"FORWARD\0"),
                (NFTA_RULE_EXPRESSIONS, &list),
            ]);
            [vec![0; 4], rule].concat()
        };
        let queue = nest(&[(NFTA_QUEUE_NUM, &be(5)), (NFTA_QUEUE_TOTAL, &be(4))]);
        let found = queue_rule(&rule(b"queue\0", &queue)).unwrap();
        assert_eq!(found, QueueRule { place: "filter FORWARD".into(), first: 5, count: 4 });
        assert!(found.has(8) && !found.has(9) && !found.has(4));
        let info = [7u16.to_ne_bytes(), 1u16.to_ne_bytes()].concat();
        let target = nest(&[(NFTA_TARGET_NAME, b"NFQUEUE\0"), (NFTA_TARGET_INFO, &info)]);
        assert!(queue_rule(&rule(b"target\0", &target)).unwrap().has(7));
        assert_eq!(queue_rule(&rule(b"counter\0", &[])), None);
        let whole = rule(b"queue\0", &queue);
        for end in 0..whole.len() {
            let _ = queue_rule(&whole[..end]);
        }
        assert_eq!(
            program(&nest(&[(IFLA_XDP_ATTACHED, &[2]), (IFLA_XDP_PROG_ID, &9u32.to_ne_bytes())])),
            Some(XdpProgram { mode: "generic", id: 9 })
        );
        assert_eq!(program(&nest(&[(IFLA_XDP_ATTACHED, &[0])])), None);
    }
}
