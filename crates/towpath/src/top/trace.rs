//! Lines of a trace: the packets of a pcapng stream with their verdicts. No IO.

use std::net::SocketAddr;

use towpath_wire::LinkType;

use super::flows::protocol;

/// Block types and options of pcapng (draft-ietf-opsawg-pcapng, sections 4.1 to 4.3).
const SECTION: u32 = 0x0a0d_0d0a;
const INTERFACE: u32 = 1;
const PACKET: u32 = 6;
const OPT_END: u16 = 0;
const OPT_COMMENT: u16 = 1;
const IF_NAME: u16 = 2;

/// Interfaces that are remembered.
const INTERFACES: usize = 4096;

/// Reads blocks as they arrive. A malformed block is left out.
#[derive(Debug, Default)]
pub(super) struct TraceLines {
    /// Link type and name.
    interfaces: Vec<(LinkType, String)>,
}

impl TraceLines {
    /// Returns a line for each packet. `blocks` are whole blocks.
    pub(super) fn take(&mut self, blocks: &[u8]) -> Vec<String> {
        let (mut lines, mut rest) = (Vec::new(), blocks);
        while let Some(length) = word(rest, 4).map(|length| length as usize) {
            let Some(block) = rest.get(..length).filter(|block| block.len() >= 12) else { break };
            match word(block, 0) {
                Some(SECTION) => self.interfaces.clear(),
                Some(INTERFACE) => self.interface(block),
                Some(PACKET) => lines.extend(self.packet(block)),
                _ => {}
            }
            rest = &rest[length..];
        }
        lines
    }

    fn interface(&mut self, block: &[u8]) {
        let link = half(block, 8).unwrap_or(0);
        let name = option(block.get(16..).unwrap_or_default(), IF_NAME).unwrap_or_default();
        if self.interfaces.len() < INTERFACES {
            self.interfaces.push((LinkType(link), name));
        }
    }

    fn packet(&self, block: &[u8]) -> Option<String> {
        let interface = word(block, 8)? as usize;
        let (captured, length) = (word(block, 20)? as usize, word(block, 24)?);
        let frame = block.get(28..28usize.checked_add(captured)?)?;
        let comment =
            option(block.get(28 + captured.next_multiple_of(4)..)?, OPT_COMMENT).unwrap_or_default();
        let (link, name) =
            self.interfaces.get(interface).cloned().unwrap_or((LinkType::ETHERNET, "?".into()));
        Some(format!("{name} {}, {length} bytes: {comment}", describe(link, frame, length)))
    }
}

/// `tcp 10.0.0.1:4000 > 192.0.2.1:22 S`.
fn describe(link: LinkType, frame: &[u8], length: u32) -> String {
    let Ok(packet) = towpath_wire::parse(link, frame, length) else { return "malformed packet".to_owned() };
    let Some(flow) = packet.flow() else { return format!("ethertype {:#06x}", packet.ethertype) };
    let (src, dst) = flow.ends.addresses();
    let ports = packet.src_port != 0 || packet.dst_port != 0;
    let end =
        |address, port| if ports { SocketAddr::new(address, port).to_string() } else { address.to_string() };
    let flags = "FSRPAUEC".chars().enumerate().filter(|(bit, _)| packet.tcp_flags >> bit & 1 == 1);
    let flags: String = flags.map(|(_, letter)| letter).collect();
    let words = format!(
        "{} {} > {} {flags}",
        protocol(packet.proto.into()),
        end(src, packet.src_port),
        end(dst, packet.dst_port)
    );
    words.trim_end().to_owned()
}

/// The text of an option.
fn option(mut options: &[u8], wanted: u16) -> Option<String> {
    loop {
        let (code, length) = (half(options, 0)?, usize::from(half(options, 2)?));
        let value = options.get(4..4 + length)?;
        match code {
            OPT_END => return None,
            code if code == wanted => return Some(String::from_utf8_lossy(value).into_owned()),
            _ => options = options.get(4 + length.next_multiple_of(4)..)?,
        }
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().map(|bytes| u32::from_le_bytes(*bytes))
}

fn half(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().map(|bytes| u16::from_le_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use towpath_port::Frame;
    use towpath_port::pcap::{Blocks, Options};

    use super::*;

    fn capture() -> Vec<u8> {
        let (mut blocks, mut capture) = (Blocks::new(), Vec::new());
        blocks.section(&mut capture).unwrap();
        blocks.name(0, "lan".to_owned());
        let mut frame = vec![0; 12];
        frame.extend([8, 0, 0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 192, 0, 2, 1]);
        frame.extend([0x0f, 0xa0, 0, 22, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x12, 0, 0, 0, 0, 0, 0]);
        for (frame, comment) in [(&frame[..], "rule 100: pass, out by wan"), (&[0x5a; 61], "drop, no_route")]
        {
            let options = Options { comment: Some(comment), flags: Some(1), dropped: None };
            blocks.packet(&mut capture, Frame::new(frame, LinkType::ETHERNET), &options).unwrap();
        }
        capture
    }

    #[test]
    fn packets_have_their_verdicts() {
        let lines = TraceLines::default().take(&capture());
        assert_eq!(lines[0], "lan tcp 10.0.0.1:4000 > 192.0.2.1:22 SA, 54 bytes: rule 100: pass, out by wan");
        assert_eq!(lines[1], "lan ethertype 0x5a5a, 61 bytes: drop, no_route");
    }

    #[test]
    fn malformed_blocks_are_no_panic() {
        let whole = capture();
        for end in 0..whole.len() {
            TraceLines::default().take(&whole[..end]);
        }
        for at in 0..whole.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut broken = whole.clone();
                broken[at] = value;
                TraceLines::default().take(&broken);
            }
        }
    }
}
