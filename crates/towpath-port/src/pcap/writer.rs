use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use super::blocks::{Blocks, Options, words};
use super::classic;
use towpath_wire::{checksum, gso};

use crate::{
    Burst, Caps, Checksum, Error, Frame, LinkType, MAX_FRAME, Meta, Offload, Port, Received, Stats, TxDrop,
};

/// A capture file as a port that sends.
///
/// Output is buffered. Call [`Writer::finish`] at the end; it also writes the header of a file without packets.
///
/// ```
/// use towpath_port::{Frame, LinkType, pcap};
///
/// let mut file = pcap::Writer::new("memory", Vec::new(), pcap::Format::PcapNg);
/// let frame = Frame::new(b"abc", LinkType::ETHERNET);
/// file.write(frame, Some("dropped by rule 100"))?;
/// file.finish()?;
/// # Ok::<(), towpath_port::Error>(())
/// ```
pub struct Writer {
    name: String,
    out: BufWriter<Box<dyn Write + Send>>,
    format: Format,
    resolution: Resolution,
    begun: Option<Begun>,
    /// Buffer for frames that are segmented or whose checksum is completed before writing.
    stage: Vec<u8>,
    stats: Stats,
}

/// Which file format to write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Classic pcap: one link type, no comments, times until 2106.
    #[default]
    Pcap,
    /// pcapng: any number of link types and interfaces, comments, times in nanoseconds.
    PcapNg,
}

/// Resolution of pcap timestamps. (pcapng is always written in nanoseconds.)
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Resolution {
    /// Microseconds, which every reader supports.
    #[default]
    Micros,
    /// Nanoseconds.
    Nanos,
}

/// The header that was written.
enum Begun {
    Pcap(LinkType),
    PcapNg(Blocks),
}

impl Format {
    /// The format for a file name: pcapng for `.pcapng` and `.ntar`, pcap otherwise.
    pub fn of(path: impl AsRef<Path>) -> Self {
        match path.as_ref().extension().and_then(|extension| extension.to_str()) {
            Some(extension) if ["pcapng", "ntar"].iter().any(|ng| extension.eq_ignore_ascii_case(ng)) => {
                Self::PcapNg
            }
            _ => Self::Pcap,
        }
    }
}

impl Writer {
    /// Creates (or empties) the file at `path`; `-` is standard output. The name determines the format.
    ///
    /// # Errors
    /// [`Error::Open`].
    pub fn create(path: impl AsRef<Path>) -> Result<Self, Error> {
        let path = path.as_ref();
        let format = Format::of(path);
        if path.as_os_str() == "-" {
            return Ok(Self::new("-", io::stdout(), format));
        }
        let name = path.display().to_string();
        match File::create(path) {
            Ok(file) => Ok(Self::new(name, file, format)),
            Err(source) => Err(Error::Open { name, source }),
        }
    }

    /// Writes a capture to any stream; `name` is the port's name.
    pub fn new(name: impl Into<String>, out: impl Write + Send + 'static, format: Format) -> Self {
        let out = BufWriter::with_capacity(1 << 17, Box::new(out) as Box<dyn Write + Send>);
        Self {
            name: name.into(),
            out,
            format,
            resolution: Resolution::default(),
            begun: None,
            stage: Vec::new(),
            stats: Stats::default(),
        }
    }

    /// Sets the resolution of timestamps (pcap only; default microseconds). No effect after the first frame.
    pub fn set_resolution(&mut self, resolution: Resolution) {
        if self.begun.is_none() {
            self.resolution = resolution;
        }
    }

    /// Writes one frame unchanged, with a comment if the format supports it (pcapng, truncated to 65,535 bytes).
    ///
    /// # Errors
    /// [`Error::LinkTypes`] and [`Error::Time`] when a pcap file cannot hold the frame, [`Error::TooLong`],
    /// [`Error::Io`]. Unless the error is `Io`, the file is unchanged.
    pub fn write(&mut self, frame: Frame<'_>, comment: Option<&str>) -> Result<(), Error> {
        let len = frame.bytes.len();
        if len > MAX_FRAME {
            return Err(Error::TooLong { name: self.name.clone(), len, max: MAX_FRAME });
        }
        match self.format {
            Format::Pcap => self.write_pcap(frame)?,
            Format::PcapNg => self.write_pcapng(frame, comment).map_err(|source| self.io(source))?,
        }
        self.stats.count_sent(len);
        Ok(())
    }

    /// Flushes the output. Writes the file header if there was no frame.
    ///
    /// # Errors
    /// [`Error::Io`].
    pub fn finish(mut self) -> Result<(), Error> {
        let header = match (&self.begun, self.format) {
            (Some(_), _) => Ok(()),
            (None, Format::Pcap) => self.pcap_header(LinkType::ETHERNET),
            (None, Format::PcapNg) => Blocks::new().section(&mut self.out),
        };
        header.and_then(|()| self.out.flush()).map_err(|source| self.io(source))
    }

    /// Writes a frame of a live port as on a wire: segmented, with complete checksums.
    fn put(&mut self, frame: Frame<'_>) -> Result<(), Error> {
        let offload = frame.meta.offload;
        if offload.gso.is_none() && !matches!(offload.checksum, Checksum::Partial { .. }) {
            return self.write(frame, None);
        }
        let (mut bytes, mut places) = (std::mem::take(&mut self.stage), Vec::new());
        bytes.clear();
        if !gso::segment(frame.link, frame.bytes, offload, &mut bytes, &mut places) {
            bytes.extend_from_slice(frame.bytes);
            checksum::complete(&mut bytes, Offload { gso: None, ..offload });
            places.push(0..bytes.len());
        }
        let written = places.into_iter().try_for_each(|place| {
            let whole = Frame { bytes: &bytes[place], meta: Meta::default(), ..frame };
            self.write(Frame { wire_len: whole.bytes.len() as u32, ..whole }, None)
        });
        self.stage = bytes;
        written
    }

    fn write_pcap(&mut self, frame: Frame<'_>) -> Result<(), Error> {
        let time_ns = frame.time_ns;
        let Ok(seconds) = u32::try_from(time_ns / 1_000_000_000) else {
            return Err(Error::Time { name: self.name.clone(), time_ns });
        };
        match self.begun {
            Some(Begun::Pcap(file)) if file != frame.link => {
                return Err(Error::LinkTypes { name: self.name.clone(), file, frame: frame.link });
            }
            Some(_) => {}
            None => {
                self.pcap_header(frame.link).map_err(|source| self.io(source))?;
                self.begun = Some(Begun::Pcap(frame.link));
            }
        }
        let nanos = (time_ns % 1_000_000_000) as u32;
        let fraction = match self.resolution {
            Resolution::Micros => nanos / 1_000,
            Resolution::Nanos => nanos,
        };
        let caplen = frame.bytes.len() as u32;
        let header = [seconds, fraction, caplen, frame.wire_len.max(caplen)];
        let written = words(&mut self.out, &header).and_then(|()| self.out.write_all(frame.bytes));
        written.map_err(|source| self.io(source))
    }

    fn pcap_header(&mut self, link: LinkType) -> io::Result<()> {
        let magic = match self.resolution {
            Resolution::Micros => classic::MAGIC_MICROS,
            Resolution::Nanos => classic::MAGIC_NANOS,
        };
        let version = 4 << 16 | 2;
        words(&mut self.out, &[magic, version, 0, 0, MAX_FRAME as u32, u32::from(link.0)])
    }

    fn write_pcapng(&mut self, frame: Frame<'_>, comment: Option<&str>) -> io::Result<()> {
        if self.begun.is_none() {
            Blocks::new().section(&mut self.out)?;
        }
        let begun = self.begun.get_or_insert_with(|| Begun::PcapNg(Blocks::new()));
        let Begun::PcapNg(blocks) = begun else { unreachable!("a file keeps its format") };
        blocks.packet(&mut self.out, frame, &Options { comment, ..Options::default() })
    }

    fn io(&self, source: io::Error) -> Error {
        Error::Io { name: self.name.clone(), source }
    }
}

impl Port for Writer {
    fn name(&self) -> &str {
        &self.name
    }

    fn caps(&self) -> Caps {
        Caps { send: true, ..Caps::default() }
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
        burst.clear();
        Err(Error::Direction { name: self.name.clone(), verb: "receive" })
    }

    fn send<'a>(&mut self, frames: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error> {
        let mut sent = 0;
        for frame in frames {
            if let Err(error) = self.put(frame) {
                self.stats.tx_refused += u64::from(matches!(error, Error::Io { .. }));
                return Err(error);
            }
            sent += 1;
        }
        Ok(sent)
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.out.flush().map_err(|source| self.io(source))
    }

    /// An error of a write ends the port; no frame is dropped.
    fn take_refused(&mut self, _: &mut dyn FnMut(TxDrop, &[u8])) {}

    fn stats(&mut self) -> Stats {
        self.stats
    }
}

impl fmt::Debug for Writer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Writer")
            .field("name", &self.name)
            .field("format", &self.format)
            .finish_non_exhaustive()
    }
}
