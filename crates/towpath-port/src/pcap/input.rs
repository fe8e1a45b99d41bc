//! A sliding window over a stream of bytes, plain or gzipped.
//!
//! A gzipped one may have several members (RFC 1952, 2.2), and zeros behind them, with which tapes and some capture boxes
//! fill a block.
//!
//! Bytes are read into one buffer of fixed size, looked at in place through [`Input::window`], and consumed. What is
//! left when more must be read is less than one record; it is moved to the front.

use std::io::{self, BufRead, BufReader, Chain, Cursor, Read};

use flate2::bufread::GzDecoder;

use super::MAX_BLOCK;

/// What the first two bytes of a gzip file are (RFC 1952, 2.3.1).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

pub(super) struct Input {
    source: Source,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
    /// Bytes still to be dropped as they are read.
    skip: u64,
    /// Position of the window's first byte in the (uncompressed) stream.
    offset: u64,
}

/// What [`Input::fill`] did.
pub(super) enum Filled {
    /// The window may have grown.
    More,
    /// There is nothing more to read.
    End,
}

enum Source {
    Plain(Counted),
    Gzip(Box<Gzip>),
}

/// Members of a gzip file, one behind the other.
struct Gzip {
    /// Of the member that is being read; none while it is exchanged for the next one's.
    decoder: Option<GzDecoder<BufReader<Counted>>>,
}

/// Counts what is taken from the file, for the progress bar.
struct Counted {
    reader: Chain<Cursor<Vec<u8>>, Box<dyn Read + Send>>,
    taken: u64,
}

impl Input {
    /// # Errors
    /// When the first bytes cannot be read.
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

    /// The bytes at hand.
    #[inline]
    pub(super) fn window(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Takes `len` bytes, which the window has, off its front.
    #[inline]
    pub(super) fn consume(&mut self, len: usize) {
        debug_assert!(len <= self.end - self.start, "consumed more than the window has");
        self.start += len;
        self.offset += len as u64;
    }

    /// Drops `len` bytes, whether they were read yet or not.
    pub(super) fn skip(&mut self, len: u64) {
        let here = len.min((self.end - self.start) as u64);
        self.consume(here as usize);
        self.skip += len - here;
    }

    /// Reads once, after what the window has.
    ///
    /// # Errors
    /// What the reader says; under gzip also `UnexpectedEof` when the file is cut short, and `InvalidData` or
    /// `InvalidInput` when it is damaged.
    pub(super) fn fill(&mut self) -> io::Result<Filled> {
        if self.start > 0 {
            self.buffer.copy_within(self.start..self.end, 0);
            self.end -= self.start;
            self.start = 0;
        }
        let space = &mut self.buffer[self.end..];
        debug_assert!(!space.is_empty(), "nothing that is needed is longer than the buffer");
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

    /// Whether the stream, at its end, stopped inside something: bytes are left, or were to be skipped.
    pub(super) fn is_inside(&self) -> bool {
        self.start < self.end || self.skip > 0
    }

    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    pub(super) fn is_gzip(&self) -> bool {
        matches!(self.source, Source::Gzip(_))
    }

    /// Bytes taken from the file so far, compressed if it is.
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
