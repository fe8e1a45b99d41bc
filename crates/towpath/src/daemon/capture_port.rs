//! A port made of two capture files: it receives from one and sends to the other.

use towpath_port::pcap::{Reader, Writer};
use towpath_port::{Burst, Caps, Error, Frame, Port, Received, Stats};

/// The `pcap` driver's port.
pub(super) struct CapturePort {
    reader: Option<Reader>,
    writer: Option<Writer>,
}

impl CapturePort {
    pub(super) fn new(reader: Option<Reader>, writer: Option<Writer>) -> Self {
        Self { reader, writer }
    }
}

impl Drop for CapturePort {
    /// Finishes the output. A capture without packets gets its header here: the link type was unknown before.
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
        let mut caps = self.reader.as_ref().map(Port::caps).unwrap_or_default();
        caps.send = self.writer.is_some();
        caps
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
        match &mut self.reader {
            Some(reader) => reader.receive(burst),
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

    fn stats(&mut self) -> Stats {
        let mut stats = self.reader.as_mut().map(Port::stats).unwrap_or_default();
        if let Some(writer) = &mut self.writer {
            let sent = writer.stats();
            stats.sent = sent.sent;
            stats.sent_bytes = sent.sent_bytes;
            stats.dropped.tx_refused = sent.dropped.tx_refused;
        }
        stats
    }
}
