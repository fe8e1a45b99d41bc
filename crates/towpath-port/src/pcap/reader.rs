use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use super::classic::{self, Classic};
use super::input::{Filled, Input};
use super::ng::{self, Ng};
use super::{Resolution, Step};
use crate::{Burst, Caps, Error, Frame, Port, Received, Stats, TxDrop};

/// A capture file as a port that receives.
///
/// The reader streams with about 1 MiB of memory. A damaged or truncated file is not an error: the packets before the damage are
/// received, then [`Received::End`], and [`Reader::warning`] describes the damage.
///
/// ```
/// use towpath_port::{Burst, Port, Received, pcap};
///
/// // A pcap header (microseconds, Ethernet) and one packet of 3 bytes.
/// let file = [
///     &[0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 0, 0, 0][..],
///     &[1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 60, 0, 0, 0, b'a', b'b', b'c'],
/// ]
/// .concat();
/// let mut port = pcap::Reader::new("memory", std::io::Cursor::new(file))?;
/// let mut burst = Burst::new(32);
/// assert_eq!(port.receive(&mut burst)?, Received::Frames);
/// assert_eq!(burst.frame(0).bytes, b"abc");
/// assert_eq!((burst.frame(0).wire_len, burst.frame(0).time_ns), (60, 1_000_002_000));
/// assert_eq!(port.receive(&mut burst)?, Received::End);
/// assert!(port.warning().is_none());
/// # Ok::<(), towpath_port::Error>(())
/// ```
pub struct Reader {
    name: String,
    input: Input,
    format: Format,
    /// Size of the file; `None` for a pipe.
    total: Option<u64>,
    stats: Stats,
    warning: Option<Warning>,
    ended: bool,
}

enum Format {
    Classic(Classic),
    Ng(Ng),
}

/// A file that could be read in part only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning {
    /// Name of the port: the file's path.
    pub name: String,
    /// Offset of the first incomplete record in bytes (of the uncompressed data, if the file is gzipped).
    pub offset: u64,
    /// Packets before it. All were received.
    pub packets: u64,
    /// Kind of damage.
    pub damage: Damage,
    /// True if the file is gzipped.
    pub gzip: bool,
}

/// The kind of damage of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Damage {
    /// The file ends within a record.
    Truncated,
    /// Invalid data follows; the reason.
    Corrupt(String),
}

/// Progress of reading a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Bytes read from the file (compressed bytes, if it is).
    pub taken: u64,
    /// Size of the file in bytes; `None` for a pipe.
    pub total: Option<u64>,
}

impl Reader {
    /// Opens the capture at `path`; `-` is standard input. The port's name is the path.
    ///
    /// # Errors
    /// [`Error::Open`], [`Error::Io`], and [`Error::NotACapture`] without a complete file header.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        if path.as_os_str() == "-" {
            return Self::new("-", io::stdin());
        }
        let name = path.display().to_string();
        let opened = File::open(path).and_then(|file| Ok((file.metadata()?, file)));
        let (metadata, file) = match opened {
            Ok(opened) => opened,
            Err(source) => return Err(Error::Open { name, source }),
        };
        let mut reader = Self::new(name, file)?;
        reader.total = metadata.is_file().then_some(metadata.len());
        Ok(reader)
    }

    /// Reads a capture from a stream; `name` is the port's name.
    ///
    /// # Errors
    /// As [`Reader::open`].
    pub fn new(name: impl Into<String>, reader: impl Read + Send + 'static) -> Result<Self, Error> {
        let name = name.into();
        let not_a_capture =
            |reason: &str| Err(Error::NotACapture { name: name.clone(), reason: reason.into() });
        let mut input = match Input::new(Box::new(reader)) {
            Ok(input) => input,
            Err(source) => return Err(Error::Io { name, source }),
        };
        while input.available().len() < classic::HEADER {
            match input.fill() {
                Ok(Filled::More) => {}
                Ok(Filled::End) => break,
                Err(error) if input.is_gzip() && is_damage(&error) => {
                    return not_a_capture("it begins as gzip, but does not decompress");
                }
                Err(source) => return Err(Error::Io { name, source }),
            }
        }
        let available = input.available();
        let Some(magic) = available.first_chunk() else {
            return not_a_capture(if available.is_empty() { "it is empty" } else { "it is too short" });
        };
        let format = if u32::from_le_bytes(*magic) == ng::SECTION_HEADER {
            Format::Ng(Ng::new())
        } else if !Classic::recognise(magic) {
            return not_a_capture(&match known(magic) {
                Some(known) => known.told(&name),
                None => format!("it begins with the bytes {magic:02x?}"),
            });
        } else {
            let Some(header) = available.first_chunk().and_then(Classic::parse) else {
                return not_a_capture("its pcap header is cut short");
            };
            Format::Classic(header)
        };
        let total = None;
        let mut reader =
            Self { name, input, format, total, stats: Stats::default(), warning: None, ended: false };
        match reader.format {
            Format::Classic(_) => reader.input.consume(classic::HEADER),
            Format::Ng(_) => reader.first_section()?,
        }
        Ok(reader)
    }

    /// The part of the file that could not be read. Final after [`Port::receive`] returned [`Received::End`].
    pub fn warning(&self) -> Option<&Warning> {
        self.warning.as_ref()
    }

    /// Progress within the file.
    pub fn progress(&self) -> Progress {
        Progress { taken: self.input.taken(), total: self.total }
    }

    /// Packets received so far.
    pub fn packets(&self) -> u64 {
        self.stats.received
    }

    /// Resolution of the timestamps read so far.
    pub fn resolution(&self) -> Resolution {
        let nanos = match &self.format {
            Format::Classic(header) => header.nanos(),
            Format::Ng(section) => section.nanos(),
        };
        if nanos { Resolution::Nanos } else { Resolution::Micros }
    }

    /// A pcapng file needs a complete section header.
    fn first_section(&mut self) -> Result<(), Error> {
        let reason = loop {
            match self.format.next(self.input.available()) {
                Step::Skip(len) => {
                    self.input.skip(len);
                    return Ok(());
                }
                Step::Corrupt(reason) => break reason,
                Step::Frame { .. } | Step::More => {}
            }
            match self.input.fill() {
                Ok(Filled::More) => {}
                Err(error) if !(self.input.is_gzip() && is_damage(&error)) => {
                    return Err(Error::Io { name: self.name.clone(), source: error });
                }
                Ok(Filled::End) | Err(_) => break "its pcapng section header is cut short".into(),
            }
        };
        Err(Error::NotACapture { name: self.name.clone(), reason })
    }

    /// Reads more bytes. Returns false at the end, and sets the warning if the end is unexpected.
    fn fill(&mut self) -> Result<bool, Error> {
        match self.input.fill() {
            Ok(Filled::More) => return Ok(true),
            Ok(Filled::End) if !self.input.is_inside() => {}
            Ok(Filled::End) => self.warn(Damage::Truncated),
            Err(error) if !(self.input.is_gzip() && is_damage(&error)) => {
                return Err(Error::Io { name: self.name.clone(), source: error });
            }
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => self.warn(Damage::Truncated),
            Err(error) => self.warn(Damage::Corrupt(format!("gzip: {error}"))),
        }
        Ok(false)
    }

    fn warn(&mut self, damage: Damage) {
        self.warning = Some(Warning {
            name: self.name.clone(),
            offset: self.input.offset(),
            packets: self.packets(),
            damage,
            gzip: self.input.is_gzip(),
        });
    }
}

impl Port for Reader {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> Caps {
        Caps { receive: true, ends: true, timestamps: true, ..Caps::default() }
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
        burst.clear();
        while !self.ended {
            match self.format.next(self.input.available()) {
                Step::Frame { frame, used } => {
                    if burst.push(frame).is_err() {
                        return Ok(Received::Frames);
                    }
                    self.stats.count_received(frame.bytes.len());
                    self.input.consume(used);
                }
                Step::Skip(len) => self.input.skip(len),
                // Reading a pipe may block; return the frames received so far first.
                Step::More if !burst.is_empty() => return Ok(Received::Frames),
                Step::More => self.ended = !self.fill()?,
                Step::Corrupt(reason) => {
                    self.warn(Damage::Corrupt(reason));
                    self.ended = true;
                }
            }
        }
        Ok(if burst.is_empty() { Received::End } else { Received::Frames })
    }

    fn send<'a>(&mut self, _: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error> {
        Err(Error::Direction { name: self.name.clone(), verb: "send" })
    }

    /// It only receives.
    fn take_refused(&mut self, _: &mut dyn FnMut(TxDrop, &[u8])) {}

    fn stats(&mut self) -> Stats {
        self.stats
    }
}

impl Format {
    #[inline]
    fn next<'a>(&mut self, available: &'a [u8]) -> Step<'a> {
        match self {
            Self::Classic(header) => header.next(available),
            Self::Ng(section) => section.next(available),
        }
    }
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader")
            .field("name", &self.name)
            .field("packets", &self.packets())
            .finish_non_exhaustive()
    }
}

impl fmt::Display for Warning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, offset, packets, damage, gzip } = self;
        let of = if *gzip { " of its uncompressed data" } else { "" };
        match damage {
            Damage::Truncated => {
                write!(f, "{name}: ends in the middle of a record that begins at byte {offset}{of}")?
            }
            Damage::Corrupt(reason) => write!(f, "{name}: damaged at byte {offset}{of}: {reason}")?,
        }
        match packets {
            0 => write!(f, "; no packet is before it"),
            1 => write!(f, "; the packet before it is used"),
            _ => write!(f, "; the {packets} packets before it are used"),
        }
    }
}

/// A format that can be converted to a capture.
enum Known {
    /// A compressed file; the program to decompress it.
    Compressed(&'static str),
    /// A capture in another format.
    Foreign(&'static str),
}

/// Recognises a format by the first bytes of a file.
fn known(magic: &[u8; 4]) -> Option<Known> {
    Some(match magic {
        [0x28, 0xb5, 0x2f, 0xfd] => Known::Compressed("zstd"),
        [0x04, 0x22, 0x4d, 0x18] => Known::Compressed("lz4"),
        [0xfd, b'7', b'z', b'X'] => Known::Compressed("xz"),
        [b'B', b'Z', b'h', b'1'..=b'9'] => Known::Compressed("bzip2"),
        b"snoo" => Known::Foreign("a snoop file"),
        // In either byte order, from hardware and from software.
        [0x1c, 0x00, 0x01, 0xab | 0xac] | [0xab | 0xac, 0x01, 0x00, 0x1c] => {
            Known::Foreign("an IXIA lcap file")
        }
        _ => return None,
    })
}

impl Known {
    fn told(self, name: &str) -> String {
        match self {
            Self::Compressed(program) => {
                format!(
                    "it is compressed with {program}; `{program} -dc {name} | ... -` has it read from a pipe"
                )
            }
            Self::Foreign(what) => format!("it is {what}; `editcap {name} FILE` makes it a capture"),
        }
    }
}

/// Returns true if an error of the gzip decoder is about the file's contents, not about reading it.
fn is_damage(error: &io::Error) -> bool {
    use io::ErrorKind::{InvalidData, InvalidInput, UnexpectedEof};
    matches!(error.kind(), InvalidData | InvalidInput | UnexpectedEof)
}
