//! A capture that is not a file (a FIFO, standard input, a device), as a live port. A read may block for any time; a thread does it.
//!
//! The thread fills bursts and hands them to the port. [`BURSTS`] bursts go round, so a port that is not read holds the writer of the
//! pipe back. Invariant: an event of `ready` follows each burst.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, SyncSender, TryRecvError, sync_channel};
use std::thread;

use rustix::event::{EventfdFlags, eventfd};

use super::Reader;
use crate::{Burst, Caps, Error, Port, Received, Stats};

/// Bursts that the thread fills in turn, and the frames of each.
const BURSTS: usize = 2;
const FRAMES: usize = 64;

/// A capture that a thread reads.
pub(super) struct PipeReader {
    caps: Caps,
    /// Readable when a burst is ready.
    ready: Arc<OwnedFd>,
    state: State,
    stats: Stats,
}

enum State {
    /// The thread is started by the first [`PipeReader::receive`]: the thread that opens a port may have privileges.
    Opened(Box<Reader>),
    Reading(Box<Reading>),
    Ended,
}

struct Reading {
    filled: Receiver<Filled>,
    empty: SyncSender<Burst>,
    /// The burst whose frames are handed out, and the number of those that were.
    current: Option<(Filled, usize)>,
}

/// The result of one call of [`Reader::receive`], and the counters after it.
struct Filled {
    burst: Burst,
    result: Result<Received, Error>,
    stats: Stats,
}

impl PipeReader {
    pub(super) fn new(reader: Reader) -> Result<Self, Error> {
        let ready = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(|error| Error::Io { name: reader.name().to_owned(), source: error.into() })?;
        let (caps, ready) = (reader.caps(), Arc::new(ready));
        Ok(Self { caps, ready, state: State::Opened(Box::new(reader)), stats: Stats::default() })
    }

    pub(super) fn caps(&self) -> Caps {
        self.caps
    }

    pub(super) fn stats(&self) -> Stats {
        self.stats
    }

    /// As [`Port::receive`]. Does not block.
    pub(super) fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
        burst.clear();
        if let State::Opened(_) = self.state {
            self.start()?;
        }
        loop {
            let State::Reading(reading) = &mut self.state else { return Ok(Received::End) };
            let Reading { filled, empty, current } = &mut **reading;
            if current.is_none() {
                let received = filled.try_recv().or_else(|_| {
                    // The event is cleared before the channel is checked once more: a burst that arrives later sets it again.
                    let _ = rustix::io::read(&*self.ready, &mut [0; 8]);
                    filled.try_recv()
                });
                match received {
                    Ok(received) => {
                        self.stats = received.stats;
                        *current = Some((received, 0));
                    }
                    Err(TryRecvError::Empty) => return Ok(Received::Nothing),
                    Err(TryRecvError::Disconnected) => self.state = State::Ended,
                }
                continue;
            }
            if let Some((received, taken)) = current {
                while *taken < received.burst.len() && burst.push(received.burst.frame(*taken)).is_ok() {
                    *taken += 1;
                }
            }
            if !burst.is_empty() {
                return Ok(Received::Frames);
            }
            // All frames of this burst were handed out.
            if let Some((received, _)) = current.take() {
                match received.result {
                    Ok(Received::Frames) => {
                        let _ = empty.try_send(received.burst);
                    }
                    last => {
                        self.state = State::Ended;
                        return last;
                    }
                }
            }
        }
    }

    /// Starts the thread.
    fn start(&mut self) -> Result<(), Error> {
        let State::Opened(reader) = std::mem::replace(&mut self.state, State::Ended) else { return Ok(()) };
        let name = reader.name().to_owned();
        let (sender, filled) = sync_channel(BURSTS);
        let (empty, bursts) = sync_channel(BURSTS);
        for _ in 0..BURSTS {
            let _ = empty.try_send(Burst::new(FRAMES));
        }
        let ready = Arc::clone(&self.ready);
        // Not joined: read(2) may never return.
        thread::Builder::new()
            .name("pcap".into())
            .spawn(move || read(*reader, &bursts, &sender, &ready))
            .map_err(|source| Error::Io { name, source })?;
        self.state = State::Reading(Box::new(Reading { filled, empty, current: None }));
        Ok(())
    }
}

impl AsFd for PipeReader {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.ready.as_fd()
    }
}

/// Reads until the end of the capture, or until the port is dropped.
fn read(mut reader: Reader, empty: &Receiver<Burst>, filled: &SyncSender<Filled>, ready: &OwnedFd) {
    while let Ok(mut burst) = empty.recv() {
        let result = reader.receive(&mut burst);
        let ended = !matches!(result, Ok(Received::Frames));
        if filled.send(Filled { burst, result, stats: reader.stats() }).is_err() {
            return;
        }
        // Cannot fail: at most one event per burst, and the counter has 64 bits.
        let _ = rustix::io::write(ready, &1_u64.to_ne_bytes());
        if ended {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Write};

    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    use super::*;

    fn is_ready(port: &PipeReader, wait: Option<&Timespec>) -> bool {
        let mut fds = [PollFd::new(port, PollFlags::IN)];
        poll(&mut fds, wait).unwrap() == 1
    }

    /// Waits for the thread, without a time limit.
    fn received(port: &mut PipeReader, burst: &mut Burst) -> Received {
        loop {
            match port.receive(burst).unwrap() {
                Received::Nothing => assert!(is_ready(port, None)),
                received => return received,
            }
        }
    }

    #[test]
    fn a_pipe_is_received_without_waiting_for_its_writer() {
        let (read, mut write) = io::pipe().unwrap();
        // A pcap header (microseconds, Ethernet).
        write
            .write_all(&[0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 1, 0, 0, 0])
            .unwrap();
        let mut port = PipeReader::new(Reader::new("pipe", read).unwrap()).unwrap();
        assert!(port.caps().receive && port.caps().ends);
        let mut burst = Burst::new(3);
        let zero = Timespec { tv_sec: 0, tv_nsec: 0 };
        // The writer sends nothing: neither call waits.
        assert_eq!(port.receive(&mut burst).unwrap(), Received::Nothing);
        assert!(!is_ready(&port, Some(&zero)));
        let record = |byte: u8| [1, 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, byte];
        for round in 0..3_u8 {
            let frames: Vec<u8> = (0..100).collect();
            for byte in &frames {
                write.write_all(&record(*byte)).unwrap();
            }
            let mut seen = Vec::new();
            while seen.len() < frames.len() {
                assert_eq!(received(&mut port, &mut burst), Received::Frames);
                seen.extend(burst.iter().map(|frame| frame.bytes[0]));
            }
            assert_eq!(seen, frames);
            assert_eq!(port.receive(&mut burst).unwrap(), Received::Nothing);
            assert_eq!(port.stats().received, 100 * (u64::from(round) + 1));
        }
        drop(write);
        assert_eq!(received(&mut port, &mut burst), Received::End);
        assert_eq!(port.receive(&mut burst).unwrap(), Received::End);
    }
}
