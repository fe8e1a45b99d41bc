//! Byte layout of the shared memory.
//!
//! The byte table is in the documentation (*Ring ABI*); this file states the same table for the compiler, and
//! asserts it at the end. Shared memory is an array of 64-bit words in the machine's byte order. Positions are word
//! indices; there are no pointers.

use crate::shm::geometry::{Geometry, GeometryError, PAGE};
use crate::shm::header::{Header, Kind, Layers};
use crate::shm::seq::Seq;
use crate::shm::sync::{AtomicU64, Ordering};

/// Version of the layout. The engine and the client must have the same version.
pub const VERSION: u16 = 7;
/// First word of a hello, of a welcome and of the engine's memory: `TPRG`.
pub(crate) const MAGIC: u32 = u32::from_le_bytes(*b"TPRG");

/// Words of a cache line.
const LINE: usize = 8;
/// Words of a frame header including its inline bytes: two cache lines, which the prefetcher loads together.
pub(crate) const HEADER_WORDS: usize = 2 * LINE;
/// Longest payload, in bytes, that is stored beside its header.
pub const INLINE_BYTES: usize = 64;
/// Header word: first word of the inline bytes.
pub(crate) const INLINE: usize = LINE;
/// Words of a release entry: mark and mask, then the verdict word.
pub(crate) const ENTRY_WORDS: usize = 2;
const PAGE_WORDS: usize = PAGE as usize / 8;

/// Engine memory: magic and version.
pub(crate) const IDENT: usize = 0;
/// Engine memory: sequence number after the last published RX frame.
pub(crate) const ENGINE_PUBLISHED: usize = 2 * LINE;
/// Engine memory: non-zero while the engine sleeps; a different number for each sleep.
pub(crate) const ENGINE_NEED_WAKEUP: usize = ENGINE_PUBLISHED + 1;
/// Engine memory: number of verdict records taken, modulo 2^32.
pub(crate) const ENGINE_RECORDS: usize = ENGINE_PUBLISHED + 2;

/// Either memory: CPU of the writer when it last reported, counted from 1. A hint.
pub(crate) const CPU: usize = 2 * LINE + 4;

/// Engine memory: frames lost for this client. In a cache line of its own: the client reads the line above with each verdict.
pub(crate) const ENGINE_LOST: usize = 3 * LINE;
/// Engine memory: 0, or bit 32 and a sequence number in bits 0-31. Frames before that number that the client had not decided were overdue
/// and got the default verdict.
pub(crate) const ENGINE_OVERDUE: usize = ENGINE_LOST + 1;

/// Client memory: sequence number after the last RX frame received. A statistic; the engine does not rely on it.
pub(crate) const CLIENT_CONSUMED: usize = 2 * LINE;
/// Client memory: non-zero while the client sleeps; a different number for each sleep.
pub(crate) const CLIENT_NEED_WAKEUP: usize = CLIENT_CONSUMED + 1;
/// Client memory: number of verdict records written, modulo 2^32.
pub(crate) const CLIENT_RECORDS: usize = CLIENT_CONSUMED + 2;
/// Client memory: sequence number after the last published TX frame.
pub(crate) const CLIENT_PUBLISHED: usize = CLIENT_CONSUMED + 3;
/// Client memory: messages that the client accepts in one frame; 0 means 1.
pub(crate) const CLIENT_BATCH_MAX: usize = CLIENT_CONSUMED + 5;
/// Client memory: 1 while the client does not wait for space for its messages: then the engine need not ring when it releases TX frames.
pub(crate) const CLIENT_NO_ROOM_WANTED: usize = CLIENT_CONSUMED + 6;
/// Client memory: the message that the client processes. In a cache line of its own: the client writes it for each message, and
/// the engine reads the lines above.
pub(crate) const CLIENT_AT: usize = 4 * LINE;

/// Largest number of lanes of a channel.
pub(crate) const MAX_LANES: u32 = 64;

/// Positions in the two memories of a lane that both sides map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) rx: Geometry,
    pub(crate) tx: Geometry,
    pub(crate) records: u32,
}

impl Layout {
    /// Largest number of records of a lane.
    pub(crate) const MAX_RECORDS: u32 = 1 << 16;

    pub(crate) fn check(&self) -> Result<(), GeometryError> {
        self.rx.check()?;
        self.tx.check()
    }

    /// First word of the RX headers, in the engine memory.
    pub(crate) const fn rx_headers(&self) -> usize {
        PAGE_WORDS
    }

    /// First RX note, in the engine memory: one per frame, rounded up to a power of two.
    pub(crate) const fn rx_notes(&self) -> usize {
        self.rx_headers() + self.rx.frame_nr as usize * HEADER_WORDS
    }

    /// First word of the TX release entries, in the engine memory.
    pub(crate) const fn tx_entries(&self) -> usize {
        (self.rx_notes() + notes(&self.rx)).next_multiple_of(LINE)
    }

    /// Bytes of the engine memory.
    pub(crate) const fn engine_bytes(&self) -> usize {
        pages(self.tx_entries() + self.tx.frame_nr as usize * ENTRY_WORDS)
    }

    /// First word of the RX release entries, in the client memory.
    pub(crate) const fn rx_entries(&self) -> usize {
        PAGE_WORDS
    }

    /// First word of the record ring, in the client memory.
    pub(crate) const fn record_ring(&self) -> usize {
        self.rx_entries() + self.rx.frame_nr as usize * ENTRY_WORDS
    }

    /// Position of the record ring.
    pub(crate) const fn records_place(&self) -> RecordsPlace {
        RecordsPlace {
            ring: self.record_ring(),
            records: self.records,
            written: CLIENT_RECORDS,
            taken: ENGINE_RECORDS,
        }
    }

    /// First word of the TX headers, in the client memory. Headers are aligned to two cache lines.
    pub(crate) const fn tx_headers(&self) -> usize {
        (self.record_ring() + self.records as usize * ENTRY_WORDS).next_multiple_of(HEADER_WORDS)
    }

    /// First TX note, in the client memory.
    pub(crate) const fn tx_notes(&self) -> usize {
        self.tx_headers() + self.tx.frame_nr as usize * HEADER_WORDS
    }

    /// Position of the RX ring's parts.
    pub(crate) const fn rx_place(&self) -> RingPlace {
        RingPlace {
            geometry: self.rx,
            headers: self.rx_headers(),
            notes: self.rx_notes(),
            entries: self.rx_entries(),
        }
    }

    /// Position of the TX ring's parts.
    pub(crate) const fn tx_place(&self) -> RingPlace {
        RingPlace {
            geometry: self.tx,
            headers: self.tx_headers(),
            notes: self.tx_notes(),
            entries: self.tx_entries(),
        }
    }

    /// Bytes of shared memory of one lane, payload areas included.
    pub(crate) const fn total_bytes(&self) -> u64 {
        (self.engine_bytes() + self.client_bytes() + self.rx.bytes() + self.tx.bytes()) as u64
    }

    /// Bytes of the client memory.
    pub(crate) const fn client_bytes(&self) -> usize {
        pages(self.tx_notes() + notes(&self.tx))
    }
}

/// Position of a ring's parts, in words of the memory that contains them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RingPlace {
    pub(crate) geometry: Geometry,
    /// First word of the headers, in the producer's memory.
    pub(crate) headers: usize,
    /// First note, in the producer's memory.
    pub(crate) notes: usize,
    /// First word of the release entries, in the consumer's memory.
    pub(crate) entries: usize,
}

/// Position of a record ring and of its two counters.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RecordsPlace {
    /// First word of the ring, in the consumer's memory.
    pub(crate) ring: usize,
    /// Number of records: a power of two.
    pub(crate) records: u32,
    /// Word of the consumer's memory: number of records written.
    pub(crate) written: usize,
    /// Word of the producer's memory: number of records taken.
    pub(crate) taken: usize,
}

impl RecordsPlace {
    pub(crate) fn record(&self, number: u32) -> usize {
        self.ring + (number & (self.records - 1)) as usize * ENTRY_WORDS
    }
}

/// Number of notes of a ring: its frames, rounded up to a power of two.
pub(crate) const fn notes(ring: &Geometry) -> usize {
    ring.frame_nr.next_power_of_two() as usize
}

pub(crate) const fn pages(words: usize) -> usize {
    (words * 8).next_multiple_of(PAGE as usize)
}

/// First header word of a frame without a message. No sequence number has this value.
pub(crate) const NO_MESSAGE: u64 = u64::MAX;

/// `seq | at << 32`: a note, which says that message `seq` is in frame `at` instead of the expected frame.
pub(crate) const fn note(seq: Seq, at: u32) -> u64 {
    seq.0 as u64 | (at as u64) << 32
}

/// Stores a header without its first word (the sequence number). The release store of that word publishes the rest.
#[inline(always)]
pub(crate) fn store_header(words: &[AtomicU64; HEADER_WORDS], h: &Header) {
    let pair = |low: u32, high: u32| u64::from(low) | u64::from(high) << 32;
    // Relaxed: ordered by the release store of word 0, which pairs with the consumer's acquire load of it.
    words[1].store(pair(h.len, u32::from(h.kind.0) | u32::from(h.flags) << 16), Ordering::Relaxed);
    words[2].store(pair(h.wire_len, h.group), Ordering::Relaxed);
    words[3].store(h.time, Ordering::Relaxed);
    words[4].store(pair(h.mark, h.port), Ordering::Relaxed);
    words[5].store(pair(h.pid, h.uid), Ordering::Relaxed);
    words[6].store(pair(h.gid, h.hash), Ordering::Relaxed);
    let Layers { link, network, payload } = h.layers;
    let layers = u64::from(link) | u64::from(network) << 16 | u64::from(payload) << 32;
    words[7].store(layers | u64::from(h.lost) << 48, Ordering::Relaxed);
}

/// Copies a header; reads each word once. The caller checks the copy.
#[inline(always)]
pub(crate) fn load_header(words: &[AtomicU64; HEADER_WORDS]) -> Header {
    // Relaxed: the caller has loaded word 0 with acquire. A hostile producer may change the other words meanwhile;
    // the checks on the copy cover that.
    let word = |i: usize| words[i].load(Ordering::Relaxed);
    let low = |w: u64| w as u32;
    let high = |w: u64| (w >> 32) as u32;
    let (w1, w2, w4, w5, w6, w7) = (word(1), word(2), word(4), word(5), word(6), word(7));
    Header {
        len: low(w1),
        kind: Kind((w1 >> 32) as u16),
        flags: (w1 >> 48) as u16,
        wire_len: low(w2),
        group: high(w2),
        time: word(3),
        mark: low(w4),
        port: high(w4),
        pid: low(w5),
        uid: high(w5),
        gid: low(w6),
        hash: high(w6),
        layers: Layers { link: w7 as u16, network: (w7 >> 16) as u16, payload: (w7 >> 32) as u16 },
        lost: (w7 >> 48) as u16,
    }
}

/// Stores at most [`INLINE_BYTES`] beside the header.
#[inline]
pub(crate) fn store_inline(words: &[AtomicU64; HEADER_WORDS], bytes: &[u8]) {
    let (whole, rest) = bytes.as_chunks::<8>();
    let mut words = words[INLINE..].iter();
    for (chunk, word) in whole.iter().zip(words.by_ref()) {
        // Relaxed: as in store_header.
        word.store(u64::from_ne_bytes(*chunk), Ordering::Relaxed);
    }
    if let (Some(word), false) = (words.next(), rest.is_empty()) {
        let mut chunk = [0; 8];
        chunk[..rest.len()].copy_from_slice(rest);
        // Relaxed: as in store_header.
        word.store(u64::from_ne_bytes(chunk), Ordering::Relaxed);
    }
}

/// Copies the inline bytes.
#[inline]
pub(crate) fn load_inline(words: &[AtomicU64; HEADER_WORDS]) -> [u8; INLINE_BYTES] {
    let mut bytes = [0; INLINE_BYTES];
    for (word, chunk) in words[INLINE..].iter().zip(bytes.chunks_exact_mut(8)) {
        // Relaxed: as in load_header.
        chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
    }
    bytes
}

// The byte table, asserted. A change here is a new VERSION.
const _: () = {
    let layout = Layout { rx: Geometry::RX, tx: Geometry::TX, records: 256 };
    assert!(HEADER_WORDS * 8 == 128 && ENTRY_WORDS * 8 == 16 && INLINE_BYTES == LINE * 8);
    assert!(
        IDENT == 0
            && ENGINE_PUBLISHED * 8 == 128
            && ENGINE_NEED_WAKEUP * 8 == 136
            && ENGINE_RECORDS * 8 == 144
            && ENGINE_LOST * 8 == 192
            && ENGINE_OVERDUE * 8 == 200
    );
    assert!(CLIENT_CONSUMED * 8 == 128 && CLIENT_NEED_WAKEUP * 8 == 136);
    assert!(CLIENT_RECORDS * 8 == 144 && CLIENT_PUBLISHED * 8 == 152);
    assert!(CLIENT_BATCH_MAX * 8 == 168 && CLIENT_NO_ROOM_WANTED * 8 == 176 && CLIENT_AT * 8 == 256);
    assert!(layout.rx_headers() * 8 == 4096);
    assert!(layout.rx_notes() * 8 == 4096 + 4096 * 128);
    assert!(layout.tx_entries() * 8 == 4096 + 4096 * 128 + 4096 * 8);
    assert!(layout.engine_bytes() == 4096 + 4096 * 128 + 4096 * 8 + 1024 * 16);
    assert!(layout.rx_entries() * 8 == 4096);
    assert!(layout.record_ring() * 8 == 4096 + 4096 * 16);
    assert!(layout.tx_headers() * 8 == 4096 + 4096 * 16 + 256 * 16);
    assert!(layout.tx_notes() * 8 == 4096 + 4096 * 16 + 256 * 16 + 1024 * 128);
    assert!(layout.client_bytes() == 4096 + 4096 * 16 + 256 * 16 + 1024 * 128 + 1024 * 8);
};
