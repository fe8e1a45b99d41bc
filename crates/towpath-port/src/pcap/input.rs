//! A buffered view of a byte stream, plain or gzipped.
//!
//! A gzip stream may have several members (RFC 1952, 2.2) and trailing zeros, which tapes and some capture appliances add.
//!
//! Bytes are read into a buffer of fixed size, parsed in place through [`Input::available`], and consumed. Before reading more, the
//! remainder, less than one record, moves to the front.

use std::io::{self, BufRead, BufReader, Chain, Cursor, Read};

use flate2::bufread::GzDecoder;

use super::MAX_BLOCK;

/// The first two bytes of a gzip file (RFC 1952, 2.3.1).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

pub(super) struct Input {
    source: Source,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Bytes to skip when they are read.
    skip: u64,
    /// Offset of the first available byte in the (uncompressed) stream.
    offset: u64,
}

/// Result of [`Input::fill`].
pub(super) enum Filled {
    /// More bytes may be available.
    More,
    /// End of the stream.
    End,
}

enum Source {
    Plain(Counted),
    Gzip(Box<Gzip>),
}

/// The members of a gzip file, concatenated.
struct Gzip {
    /// Decoder of the current member; `None` while switching to the next.
    decoder: Option<GzDecoder<BufReader<Counted>>>,
}

/// Counts bytes read from the file, for the progress bar.
struct Counted {
    reader: Chain<Cursor<Vec<u8>>, Box<dyn Read + Send>>,
    taken: u64,
}

impl Input {
    /// # Errors
    /// The error of reading the first bytes.
    pub(super) fn new(mut reader: Box<dyn Read + Send>) -> io::Result<Self> {
        let mut magic = Vec::with_capacity(GZIP_MAGIC.len());
        (&mut reader).take(GZIP_MAGIC.len() as u64).read_to_end(&mut magic)?;
        let gzip = magic == GZIP_MAGIC;
        let counted = Counted { reader: Cursor::new(magic).chain(reader), taken: 0 };
        let source = match gzip {
            true => Source::Gzip(Box::new(Gzip::new(BufReader::with_capacity(1 << 16, counted)))),
            false => Source::Plain(counted),
        };
        let buffer = vec![0; MAX_BLOCK].into_boxed_slice();
        Ok(Self { source, buffer, start: 0, end: 0, skip: 0, offset: 0 })
    }

    /// The bytes read and not consumed.
    #[inline]
    pub(super) fn available(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Consumes the first `len` available bytes.
    #[inline]
    pub(super) fn consume(&mut self, len: usize) {
        debug_assert!(len <= self.end - self.start, "consumed more than is available");
        self.start += len;
        self.offset += len as u64;
    }

    /// Skips `len` bytes, including bytes that are not read yet.
    pub(super) fn skip(&mut self, len: u64) {
        let here = len.min((self.end - self.start) as u64);
        self.consume(here as usize);
        self.skip += len - here;
    }

    /// Reads once and appends to the available bytes.
    ///
    /// # Errors
    /// Errors of the reader; for gzip also `UnexpectedEof` for a truncated file, and `InvalidData` or `InvalidInput` for a
    /// damaged one.
    pub(super) fn fill(&mut self) -> io::Result<Filled> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let space = &mut self.buffer[self.end..];
        debug_assert!(!space.is_empty(), "no record is longer than the buffer");
        let read = loop {
            match self.source.read(space) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                done => break done?,
            }
        };
        if read == 0 {
            return Ok(Filled::End);
        }
        self.end += read;
        let skip = self.skip.min(read as u64);
        self.skip -= skip;
        self.consume(skip as usize);
        Ok(Filled::More)
    }

    /// At the end of the stream: returns true if it ended within a record (bytes remain, or were to be skipped).
    pub(super) fn is_inside(&self) -> bool {
        self.start < self.end || self.skip > 0
    }

    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    pub(super) fn is_gzip(&self) -> bool {
        matches!(self.source, Source::Gzip(_))
    }

    /// Bytes read from the file (compressed bytes, if it is).
    pub(super) fn taken(&self) -> u64 {
        match &self.source {
            Source::Plain(counted) => counted.taken,
            Source::Gzip(gzip) => {
                gzip.decoder.as_ref().map_or(0, |decoder| decoder.get_ref().get_ref().taken)
            }
        }
    }
}

impl Read for Source {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Plain(reader) => reader.read(into),
            Self::Gzip(gzip) => gzip.read(into),
        }
    }
}

impl Gzip {
    fn new(reader: BufReader<Counted>) -> Self {
        Self { decoder: Some(GzDecoder::new(reader)) }
    }
}

impl Read for Gzip {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while let Some(decoder) = &mut self.decoder {
            let read = decoder.read(into)?;
            if read > 0 || into.is_empty() {
                return Ok(read);
            }
            let reader = decoder.get_mut();
            while let [0, ..] = reader.fill_buf()? {
                let zeros = reader.buffer().iter().take_while(|byte| **byte == 0).count();
                reader.consume(zeros);
            }
            if reader.buffer().is_empty() {
                return Ok(0);
            }
            self.decoder = self.decoder.take().map(|decoder| GzDecoder::new(decoder.into_inner()));
        }
        Ok(0)
    }
}

impl Read for Counted {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let read = self.reader.read(into)?;
        self.taken += read as u64;
        Ok(read)
    }
}
