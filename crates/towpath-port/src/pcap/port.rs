//! A port with a capture file in each direction.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::PathBuf;

use crate::driver::{Capability, DriverConfig, Options};
use crate::named::NamedPort;
use crate::pcap::pipe::PipeReader;
use crate::pcap::{Reader, Writer};
use crate::{Burst, Caps, Error, Frame, Opener, Port, Received, Stats, TxDrop};

/// Configuration of a port that reads and writes capture files. At least one file is needed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Config {
    /// The file that packets are read from; `-` is standard input.
    pub read: Option<PathBuf>,
    /// The file that packets are written to; `-` is standard output.
    pub write: Option<PathBuf>,
}

impl DriverConfig for Config {
    const NAMES: &'static [(&'static str, &'static str)] = &[("pcap", "capture files, read and written")];
    const CAPABILITIES: &'static [Capability] = &[];
    const MULTI_QUEUE: bool = false;

    fn from_options(_: &str, options: &dyn Options) -> Self {
        let (read, write) = (options.path("read"), options.path("write"));
        if read.is_none() && write.is_none() {
            options.invalid("a pcap port needs a file", "write read = \"FILE\" or write = \"FILE\"");
        }
        Self { read, write }
    }

    fn open(&self, name: &str, _: usize, _: &Opener) -> Result<Vec<Box<dyn Port>>, Error> {
        let reader = self.read.as_ref().map(Source::open).transpose()?;
        let writer = self.write.as_ref().map(Writer::create).transpose()?;
        Ok(vec![NamedPort::boxed(name, CapturePort { reader, writer })])
    }
}

/// A port that reads from one capture and writes to another.
struct CapturePort {
    reader: Option<Source>,
    writer: Option<Writer>,
}

/// The capture that a port reads.
enum Source {
    File(Box<Reader>),
    Pipe(Box<PipeReader>),
}

impl Source {
    /// Opens a capture, and reads its head: opening a pipe waits for its writer.
    fn open(path: &PathBuf) -> Result<Self, Error> {
        let reader = Reader::open(path)?;
        match reader.progress().total {
            Some(_) => Ok(Self::File(Box::new(reader))),
            None => Ok(Self::Pipe(Box::new(PipeReader::new(reader)?))),
        }
    }

    fn caps(&self) -> Caps {
        match self {
            Self::File(reader) => reader.caps(),
            Self::Pipe(reader) => reader.caps(),
        }
    }

    fn stats(&mut self) -> Stats {
        match self {
            Self::File(reader) => reader.stats(),
            Self::Pipe(reader) => reader.stats(),
        }
    }
}

impl Drop for CapturePort {
    /// Writes the file header of a capture without packets; its link type was unknown before.
    fn drop(&mut self) {
        if let Some(writer) = self.writer.take()
            && let Err(error) = writer.finish()
        {
            log::warn!("{error}");
        }
    }
}

impl Port for CapturePort {
    fn name(&self) -> &str {
        "captures"
    }

    fn caps(&self) -> Caps {
        let mut caps = self.reader.as_ref().map(Source::caps).unwrap_or_default();
        caps.send = self.writer.is_some();
        caps
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
        match &mut self.reader {
            Some(Source::File(reader)) => reader.receive(burst),
            Some(Source::Pipe(reader)) => reader.receive(burst),
            None => {
                burst.clear();
                Ok(Received::End)
            }
        }
    }

    fn send<'a>(&mut self, frames: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error> {
        match &mut self.writer {
            Some(writer) => writer.send(frames),
            None => Err(Error::Direction { name: self.name().to_owned(), verb: "send" }),
        }
    }

    fn flush(&mut self) -> Result<(), Error> {
        self.writer.as_mut().map_or(Ok(()), Port::flush)
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        match &self.reader {
            Some(Source::Pipe(reader)) => Some(reader.as_fd()),
            _ => None,
        }
    }

    fn take_refused(&mut self, each: &mut dyn FnMut(TxDrop, &[u8])) {
        if let Some(writer) = &mut self.writer {
            writer.take_refused(each);
        }
    }

    fn stats(&mut self) -> Stats {
        let mut stats = self.reader.as_mut().map(Source::stats).unwrap_or_default();
        if let Some(writer) = &mut self.writer {
            let sent = writer.stats();
            stats.sent = sent.sent;
            stats.sent_bytes = sent.sent_bytes;
            stats.tx_refused = sent.tx_refused;
        }
        stats
    }
}
