//! pcapng blocks as they are written: a section, the interfaces of its packets as they appear, packets, statistics.
//!
//! The blocks are written to any [`Write`], for example a `Vec`.

use std::collections::HashMap;
use std::io::{self, Write};

use super::ng;
use crate::{Frame, LinkType, MAX_FRAME};

/// Writes pcapng blocks (draft-ietf-opsawg-pcapng, section 4), little-endian, with times in nanoseconds.
///
/// ```
/// use towpath_port::{Frame, LinkType, pcap::{Blocks, Options}};
///
/// let mut stream = Vec::new();
/// let mut blocks = Blocks::new();
/// blocks.section(&mut stream)?;
/// blocks.name(3, "lan0");
/// let frame = Frame { interface: 3, ..Frame::new(b"abc", LinkType::ETHERNET) };
/// blocks.packet(&mut stream, frame, &Options { comment: Some("dropped"), ..Options::default() })?;
/// blocks.statistics(&mut stream, 1, 1, 0)?;
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Blocks {
    numbers: HashMap<(LinkType, u32), u32>,
    last: Option<((LinkType, u32), u32)>,
    names: HashMap<u32, String>,
}

/// Options of a packet block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options<'a> {
    /// `opt_comment`; at most 65,535 bytes of it are kept.
    pub comment: Option<&'a str>,
    /// `epb_flags`: 1 inbound, 2 outbound.
    pub flags: Option<u32>,
    /// `epb_dropcount`: packets lost between the last one of the interface and this one.
    pub dropped: Option<u64>,
}

/// Maximum number of interfaces that a section describes. Further ones share one interface for each link type.
const MAX_INTERFACES: usize = 1 << 16;

// Options of a block, appendix A and sections 3.5, 4.2, 4.3, 4.6.
const OPT_ENDOFOPT: u16 = 0;
const OPT_COMMENT: u16 = 1;
const IF_NAME: u16 = 2;
const EPB_FLAGS: u16 = 2;
const EPB_DROPCOUNT: u16 = 4;
const ISB_IFRECV: u16 = 4;
const ISB_IFDROP: u16 = 5;

/// Type of the interface statistics block.
const INTERFACE_STATISTICS: u32 = 5;

impl Blocks {
    /// Creates the writer. Writes nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Writes the section header, the first block of a stream.
    ///
    /// # Errors
    /// Errors of the stream.
    pub fn section(&mut self, out: &mut impl Write) -> io::Result<()> {
        let (version, unknown_length) = (1, u32::MAX);
        let block =
            [ng::SECTION_HEADER, 28, ng::BYTE_ORDER_MAGIC, version, unknown_length, unknown_length, 28];
        words(out, &block)
    }

    /// Sets the name (`if_name`) of the frames' interface `interface`. Call it before the interface's first packet.
    pub fn name(&mut self, interface: u32, name: impl Into<String>) {
        self.names.insert(interface, name.into());
    }

    /// Writes a packet, preceded by the description of its interface if the interface is new.
    ///
    /// # Errors
    /// Errors of the stream.
    pub fn packet(
        &mut self,
        out: &mut impl Write,
        frame: Frame<'_>,
        options: &Options<'_>,
    ) -> io::Result<()> {
        let interface = self.interface(out, frame.link, frame.interface)?;
        let mut tail = Vec::new();
        if let Some(comment) = options.comment {
            let comment = &comment[..comment.floor_char_boundary(usize::from(u16::MAX))];
            option(&mut tail, OPT_COMMENT, comment.as_bytes());
        }
        if let Some(flags) = options.flags {
            option(&mut tail, EPB_FLAGS, &flags.to_le_bytes());
        }
        if let Some(dropped) = options.dropped {
            option(&mut tail, EPB_DROPCOUNT, &dropped.to_le_bytes());
        }
        if !tail.is_empty() {
            option(&mut tail, OPT_ENDOFOPT, &[]);
        }
        let caplen = frame.bytes.len();
        let padding = caplen.next_multiple_of(4) - caplen;
        let len = (32 + caplen + padding + tail.len()) as u32;
        let (high, low) = ((frame.time_ns >> 32) as u32, frame.time_ns as u32);
        let wire_len = frame.wire_len.max(caplen as u32);
        words(out, &[ng::ENHANCED_PACKET, len, interface, high, low, caplen as u32, wire_len])?;
        out.write_all(frame.bytes)?;
        out.write_all(&[0; 3][..padding])?;
        out.write_all(&tail)?;
        words(out, &[len])
    }

    /// Writes a statistics block for each interface: the packets received and lost from the start of the stream until `time_ns`. If
    /// written repeatedly, the last one applies.
    ///
    /// # Errors
    /// Errors of the stream.
    pub fn statistics(
        &mut self,
        out: &mut impl Write,
        time_ns: u64,
        received: u64,
        dropped: u64,
    ) -> io::Result<()> {
        let mut options = Vec::new();
        option(&mut options, ISB_IFRECV, &received.to_le_bytes());
        option(&mut options, ISB_IFDROP, &dropped.to_le_bytes());
        option(&mut options, OPT_ENDOFOPT, &[]);
        let len = (24 + options.len()) as u32;
        for interface in 0..self.numbers.len() as u32 {
            let (high, low) = ((time_ns >> 32) as u32, time_ns as u32);
            words(out, &[INTERFACE_STATISTICS, len, interface, high, low])?;
            out.write_all(&options)?;
            words(out, &[len])?;
        }
        Ok(())
    }

    /// Returns the stream's number of a frame's interface. Writes the interface's description if it is new.
    fn interface(&mut self, out: &mut impl Write, link: LinkType, interface: u32) -> io::Result<u32> {
        let key = (link, interface);
        if let Some((last, number)) = self.last
            && last == key
        {
            return Ok(number);
        }
        let key = if self.numbers.len() < MAX_INTERFACES { key } else { (link, u32::MAX) };
        if let Some(&number) = self.numbers.get(&key) {
            self.last = Some((key, number));
            return Ok(number);
        }
        let number = self.numbers.len() as u32;
        self.numbers.insert(key, number);
        self.last = Some((key, number));
        let mut options = Vec::new();
        if let Some(name) = self.names.get(&interface) {
            option(&mut options, IF_NAME, &name.as_bytes()[..name.len().min(usize::from(u16::MAX))]);
        }
        option(&mut options, ng::IF_TSRESOL, &[9]);
        option(&mut options, OPT_ENDOFOPT, &[]);
        let len = (20 + options.len()) as u32;
        words(out, &[ng::INTERFACE_DESCRIPTION, len, u32::from(link.0), MAX_FRAME as u32])?;
        out.write_all(&options)?;
        words(out, &[len])?;
        Ok(number)
    }
}

/// Appends an option: code, length, value, and padding to 32 bits.
fn option(into: &mut Vec<u8>, code: u16, value: &[u8]) {
    into.extend(code.to_le_bytes());
    into.extend((value.len() as u16).to_le_bytes());
    into.extend(value);
    into.resize(into.len().next_multiple_of(4), 0);
}

/// Writes little-endian words. Both formats are written in little-endian order.
pub(super) fn words(out: &mut impl Write, words: &[u32]) -> io::Result<()> {
    words.iter().try_for_each(|word| out.write_all(&word.to_le_bytes()))
}
