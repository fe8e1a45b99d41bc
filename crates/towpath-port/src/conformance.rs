//! The conformance suite: requirements of [`Port`] that every driver is tested against.
//!
//! A driver's tests implement [`Wire`] for a way through it, and call [`check`].

use std::iter;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;
use towpath_wire::checksum;

use rustix::event::epoll;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::{Burst, Caps, Error, Frame, LinkType, MAX_FRAME, Port, Received, State, Stats, TxDrop};

/// Timeout for frames on a live wire.
const PATIENCE: Duration = Duration::from_secs(60);

/// Frames that are sent before the first is received, except in checks that allow losses.
pub const FRAMES: usize = 256;

/// A path through one driver: frames sent to [`Wire::tx`] are received from [`Wire::into_rx`].
///
/// It must buffer [`FRAMES`] frames, 256 KiB in total.
pub trait Wire {
    /// The frames that it supports.
    fn shape(&self) -> Shape {
        Shape { link: LinkType::ETHERNET, longest: MAX_FRAME, recorded: true }
    }

    /// The sending end.
    fn tx(&mut self) -> &mut dyn Port;

    /// Ends sending and returns the receiving end.
    fn into_rx(self: Box<Self>) -> Box<dyn Port>;
}

/// The frames that a wire supports.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Link type: [`LinkType::ETHERNET`] or [`LinkType::RAW`].
    pub link: LinkType,
    /// Length of the longest frame in bytes.
    pub longest: usize,
    /// A recording: timestamps and wire lengths are kept, no other frames arrive, and it has an end. Otherwise it is a live wire.
    pub recorded: bool,
}

/// A wire between the queues of two ports, each of which several threads share: sends by the last queue, and receives from all. The
/// suite's frames are one flow, so their order is kept.
pub struct QueuesWire {
    /// The sending queues.
    pub tx: Vec<Box<dyn Port>>,
    /// The receiving queues.
    pub rx: Vec<Box<dyn Port>>,
    /// The frames that it supports.
    pub shape: Shape,
}

impl Wire for QueuesWire {
    fn shape(&self) -> Shape {
        self.shape
    }

    fn tx(&mut self) -> &mut dyn Port {
        &mut **self.tx.last_mut().expect("a port has queues")
    }

    fn into_rx(self: Box<Self>) -> Box<dyn Port> {
        let Self { tx, rx, .. } = *self;
        let ready = epoll::create(epoll::CreateFlags::CLOEXEC).expect("epoll");
        for (at, port) in rx.iter().enumerate() {
            let fd = port.poll_fd().expect("a live port has a descriptor to poll");
            epoll::add(&ready, fd, epoll::EventData::new_u64(at as u64), epoll::EventFlags::IN)
                .expect("epoll");
        }
        Box::new(Queues { rx, _tx: tx, ready })
    }
}

/// The receiving end of a [`QueuesWire`]. It keeps the sending end open: the two may be sides of one interface.
struct Queues {
    rx: Vec<Box<dyn Port>>,
    _tx: Vec<Box<dyn Port>>,
    /// Readable when one of the queues is.
    ready: OwnedFd,
}

impl Port for Queues {
    fn name(&self) -> &str {
        self.rx[0].name()
    }

    fn caps(&self) -> Caps {
        self.rx[0].caps()
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error> {
        for port in &mut self.rx {
            if port.receive(burst)? == Received::Frames {
                return Ok(Received::Frames);
            }
        }
        Ok(Received::Nothing)
    }

    fn send<'a>(&mut self, frames: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error> {
        self.rx[0].send(frames)
    }

    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.ready.as_fd())
    }

    fn take_refused(&mut self, each: &mut dyn FnMut(TxDrop, &[u8])) {
        self.rx[0].take_refused(each);
    }

    fn stats(&mut self) -> Stats {
        let mut sum = self.rx[0].stats();
        for port in &mut self.rx[1..] {
            let stats = port.stats();
            sum.received += stats.received;
            sum.rx_full += stats.rx_full;
            sum.rx_invalid += stats.rx_invalid;
        }
        sum
    }
}

/// Runs the suite. `wire` creates a new wire for each check.
///
/// # Panics
/// Panics if the driver does not conform; the message states the requirement.
pub fn check(mut wire: impl FnMut() -> Box<dyn Wire>) {
    keeps_what_frames_are(wire());
    nothing_sent_is_nothing_received(wire());
    [1, 2, 3, 100].into_iter().for_each(|frames| small_bursts_lose_nothing(wire(), frames));
    frames_of_a_burst_stay_until_it_is_cleared(wire());
    received_frames_can_be_changed(wire());
    takes_only_what_it_can_send(wire());
    refuses_what_is_too_long(wire());
    a_direction_it_lacks_is_an_error(wire());
}

fn keeps_what_frames_are(mut wire: Box<dyn Wire>) {
    let shape = wire.shape();
    let lengths = [42, 43, 60, 61, 590, 1500, 1514, 9018, 65_535, 65_550, MAX_FRAME];
    let lengths = lengths.iter().filter(|len| **len <= shape.longest);
    let sent: Vec<_> = lengths.enumerate().map(|(index, &len)| Sample::new(index, len, shape)).collect();
    send_all(wire.tx(), &sent);
    assert_eq!(wire.tx().state().expect("state"), State::Up);
    let stats = wire.tx().stats();
    assert_eq!((stats.sent, stats.dropped()), (sent.len() as u64, 0), "{stats:?}");
    assert_eq!(stats.sent_bytes, sent.iter().map(|sample| sample.bytes.len() as u64).sum::<u64>());

    let mut rx = wire.into_rx();
    let received = receive_all(&mut *rx, &mut Burst::new(64), sent.len(), shape);
    assert_eq!(received.len(), sent.len(), "frames received");
    for (sent, received) in sent.iter().zip(&received) {
        assert!(sent.bytes == received.bytes, "bytes of the frame of {} bytes", sent.bytes.len());
        assert_eq!(sent.link, received.link, "link type");
        if shape.recorded {
            assert_eq!(sent.wire_len, received.wire_len, "length on the wire");
            assert_eq!(sent.time_ns, received.time_ns, "time");
        } else {
            assert_eq!(received.wire_len as usize, received.bytes.len(), "length on the wire");
            assert!(
                received.time_ns > 1_500_000_000_000_000_000,
                "a time of this century: {}",
                received.time_ns
            );
        }
    }
    let stats = rx.stats();
    assert!(stats.received >= sent.len() as u64, "{stats:?}");
    assert_eq!(stats.dropped(), 0, "{stats:?}");
    assert_eq!(rx.caps().ends, shape.recorded, "whether it ends");
}

fn nothing_sent_is_nothing_received(wire: Box<dyn Wire>) {
    let shape = wire.shape();
    let mut burst = Burst::new(4);
    let sample = Sample::new(0, 60, shape);
    burst.push(sample.frame()).expect("an empty burst has room");
    let mut rx = wire.into_rx();
    while rx.receive(&mut burst).expect("receive") == Received::Frames {
        assert!(
            !shape.recorded && burst.iter().all(|frame| !shape.is_sample(frame)),
            "receive clears the burst"
        );
    }
    assert!(burst.is_empty(), "receive clears the burst");
}

fn small_bursts_lose_nothing(mut wire: Box<dyn Wire>, frames: usize) {
    let shape = wire.shape();
    // Most frames are short: without privilege, the send buffer of a packet socket is 416 KiB, including what the kernel adds to
    // each frame (net.core.wmem_max, socket(7)).
    let len = |index| 42 + index * if index % 25 == 24 { 37 } else { 3 };
    let sent: Vec<_> =
        (0..200).map(|index| Sample::new(index, len(index).min(shape.longest), shape)).collect();
    send_all(wire.tx(), &sent);
    let received = receive_all(&mut *wire.into_rx(), &mut Burst::new(frames), sent.len(), shape);
    assert_eq!(received.len(), sent.len(), "frames received in bursts of {frames}");
    assert!(same(&sent, &received, shape), "frames received in bursts of {frames}, in order");
}

fn frames_of_a_burst_stay_until_it_is_cleared(mut wire: Box<dyn Wire>) {
    let shape = wire.shape();
    let sent: Vec<_> = (0..40).map(|index| Sample::new(index, 60 + index, shape)).collect();
    send_all(wire.tx(), &sent);
    let mut rx = wire.into_rx();
    let mut held = Vec::new();
    let mut count = 0;
    while count < sent.len() {
        let mut burst = Burst::new(7);
        match rx.receive(&mut burst).expect("receive") {
            Received::Frames => {
                count += burst.iter().filter(|frame| shape.is_sample(*frame)).count();
                held.push(burst);
            }
            Received::Nothing => wait(&mut *rx),
            Received::End => break,
        }
    }
    drop(rx);
    let frames = held.iter().flat_map(Burst::iter).filter(|frame| shape.is_sample(*frame));
    let received: Vec<_> = frames.map(Sample::from).collect();
    assert!(
        same(&sent, &received, shape),
        "frames that bursts hold while the port receives more, and after it is dropped"
    );
}

fn received_frames_can_be_changed(mut wire: Box<dyn Wire>) {
    let shape = wire.shape();
    let sent: Vec<_> = (0..5).map(|index| Sample::new(index, 80 + index, shape)).collect();
    send_all(wire.tx(), &sent);
    let mut rx = wire.into_rx();
    let mut burst = Burst::new(16);
    let mut seen = 0;
    while seen < sent.len() {
        match rx.receive(&mut burst).expect("receive") {
            Received::Frames => {}
            Received::Nothing => {
                wait(&mut *rx);
                continue;
            }
            Received::End => break,
        }
        for index in 0..burst.len() {
            if !shape.is_sample(burst.frame(index)) {
                continue;
            }
            let before = burst.frame(index).bytes.to_vec();
            burst.bytes_mut(index).iter_mut().for_each(|byte| *byte = !*byte);
            assert!(burst.frame(index).bytes.iter().zip(&before).all(|(new, old)| *new == !*old));
            assert!(before == sent[seen].bytes, "no neighbour was changed");
            seen += 1;
        }
    }
    assert_eq!(seen, sent.len());
}

fn takes_only_what_it_can_send(mut wire: Box<dyn Wire>) {
    let sample = Sample::new(0, 60, wire.shape());
    let mut frames = iter::repeat_n(sample.frame(), 5_000);
    let sent = wire.tx().send(&mut frames).expect("send");
    assert_eq!(sent + frames.len(), 5_000, "frames sent and frames left with the sender");
    let stats = wire.tx().stats();
    assert_eq!(stats.sent + stats.dropped(), sent as u64, "every frame taken is counted: {stats:?}");
}

fn refuses_what_is_too_long(mut wire: Box<dyn Wire>) {
    let shape = wire.shape();
    let longest = wire.tx().caps().max_frame.map_or(MAX_FRAME, |longest| longest as usize);
    let bytes = Sample::new(1, longest + 1, Shape { longest: longest + 1, ..shape });
    let (good, bad) = (Sample::new(0, 60, shape), bytes);
    let mut frames = [good.frame(), bad.frame(), good.frame()].into_iter();
    let error = wire.tx().send(&mut frames).expect_err("a frame beyond the longest");
    assert!(matches!(error, Error::TooLong { .. }), "{error}");
    assert_eq!(frames.len(), 1, "frames left with the sender");
    let received = receive_all(&mut *wire.into_rx(), &mut Burst::new(64), 1, shape);
    assert!(same(std::slice::from_ref(&good), &received, shape), "the frame before the one that is too long");
}

fn a_direction_it_lacks_is_an_error(mut wire: Box<dyn Wire>) {
    let mut burst = Burst::new(4);
    let tx = wire.tx();
    assert!(tx.caps().send, "the capabilities of the sending end");
    let received = tx.receive(&mut burst);
    assert_eq!(matches!(received, Err(Error::Direction { .. })), !tx.caps().receive);
    let mut rx = wire.into_rx();
    assert!(rx.caps().receive, "the capabilities of the receiving end");
    let sent = rx.send(&mut iter::empty());
    assert_eq!(matches!(sent, Err(Error::Direction { .. })), !rx.caps().send);
}

fn send_all(tx: &mut dyn Port, samples: &[Sample]) {
    let sent = tx.send(&mut samples.iter().map(Sample::frame)).expect("send");
    assert_eq!(sent, samples.len(), "frames sent");
    tx.flush().expect("flush");
    let stats = tx.stats();
    assert_eq!(stats.dropped(), 0, "{stats:?}");
}

/// Receives all frames of a recording, or `count` samples from a live wire.
#[track_caller]
fn receive_all(rx: &mut dyn Port, burst: &mut Burst, count: usize, shape: Shape) -> Vec<Sample> {
    let mut received = Vec::new();
    while shape.recorded || received.len() < count {
        match rx.receive(burst).expect("receive") {
            Received::Frames => {
                assert!(!burst.is_empty(), "a burst with frames has frames");
                received.extend(burst.iter().filter(|frame| shape.is_sample(*frame)).map(Sample::from));
            }
            Received::Nothing if !shape.recorded => wait(rx),
            Received::Nothing | Received::End => break,
        }
    }
    assert!(!shape.recorded || burst.is_empty(), "a burst without frames is empty");
    received
}

/// Waits until there is something to receive.
#[track_caller]
fn wait(rx: &mut dyn Port) {
    let fd = rx.poll_fd().expect("a live port has a descriptor to poll");
    let timeout = Timespec { tv_sec: PATIENCE.as_secs() as i64, tv_nsec: 0 };
    let ready = poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&timeout)).expect("poll");
    if ready == 0 {
        let devices = std::fs::read_to_string("/proc/thread-self/net/dev").unwrap_or_default();
        panic!("nothing came for {PATIENCE:?}: {:?}, interfaces\n{devices}", rx.stats());
    }
}

fn same(sent: &[Sample], received: &[Sample], shape: Shape) -> bool {
    if shape.recorded {
        return sent == received;
    }
    sent.len() == received.len() && sent.iter().zip(received).all(|(sent, got)| sent.bytes == got.bytes)
}

impl Shape {
    /// Whether a frame is one of the suite's.
    fn is_sample(&self, frame: Frame<'_>) -> bool {
        let ip = if self.link == LinkType::ETHERNET { 14 } else { 0 };
        frame.link == self.link && frame.bytes.get(ip + 12..ip + 20) == Some(&ADDRESSES)
    }
}

/// RFC 2544: addresses for tests of devices.
const ADDRESSES: [u8; 8] = [198, 18, 0, 1, 198, 18, 0, 2];

/// A frame that owns its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sample {
    bytes: Vec<u8>,
    wire_len: u32,
    time_ns: u64,
    link: LinkType,
}

impl Sample {
    /// A UDP datagram over IPv4 with correct checksums, in a frame of `len` bytes or the length of its headers, whichever is more. Every byte of the payload depends on `index`.
    fn new(index: usize, len: usize, shape: Shape) -> Self {
        let ip = if shape.link == LinkType::ETHERNET { 14 } else { 0 };
        let len = len.max(ip + 28);
        let mut bytes: Vec<u8> = (0..len).map(|at| (at * 31 + index * 7) as u8).collect();
        if ip > 0 {
            bytes[..12].copy_from_slice(&[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2]);
            bytes[12..14].copy_from_slice(&[8, 0]);
        }
        // A length that the field cannot hold is truncated: only drivers that ignore this field get such a frame.
        let total = ((len - ip) as u16).to_be_bytes();
        let datagram = ((len - ip - 20) as u16).to_be_bytes();
        bytes[ip..ip + 12].copy_from_slice(&[
            0x45,
            0,
            total[0],
            total[1],
            0,
            index as u8,
            0x40,
            0,
            64,
            17,
            0,
            0,
        ]);
        bytes[ip + 12..ip + 20].copy_from_slice(&ADDRESSES);
        bytes[ip + 20..ip + 28].copy_from_slice(&[0x20, 0, 0x20, 1, datagram[0], datagram[1], 0, 0]);
        checksum::renew(shape.link, &mut bytes, crate::Offload::default());
        let time_ns = 1_700_000_000_000_000_000 + index as u64 * 1_000;
        Self { bytes, wire_len: (len + index % 3) as u32, time_ns, link: shape.link }
    }

    fn frame(&self) -> Frame<'_> {
        let Self { bytes, wire_len, time_ns, link } = self;
        Frame { wire_len: *wire_len, time_ns: *time_ns, ..Frame::new(bytes, *link) }
    }
}

impl From<Frame<'_>> for Sample {
    fn from(frame: Frame<'_>) -> Self {
        let Frame { bytes, wire_len, time_ns, link, .. } = frame;
        Self { bytes: bytes.to_vec(), wire_len, time_ns, link }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Cursor, Write};
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::{Loopback, pcap};

    #[test]
    fn loopback() {
        struct Lo(Loopback);

        impl Wire for Lo {
            fn tx(&mut self) -> &mut dyn Port {
                &mut self.0
            }

            fn into_rx(mut self: Box<Self>) -> Box<dyn Port> {
                self.0.close();
                Box::new(self.0)
            }
        }

        check(|| Box::new(Lo(Loopback::new("lo0", 256))));
    }

    #[test]
    fn pcap() {
        check(|| Box::new(File::new(pcap::Format::Pcap)));
    }

    #[test]
    fn pcapng() {
        check(|| Box::new(File::new(pcap::Format::PcapNg)));
    }

    /// A capture in memory, written and then read.
    struct File {
        writer: pcap::Writer,
        bytes: Shared,
    }

    #[derive(Clone, Default)]
    struct Shared(Arc<Mutex<Vec<u8>>>);

    impl File {
        fn new(format: pcap::Format) -> Self {
            let bytes = Shared::default();
            Self { writer: pcap::Writer::new("memory", bytes.clone(), format), bytes }
        }
    }

    impl Wire for File {
        fn tx(&mut self) -> &mut dyn Port {
            &mut self.writer
        }

        fn into_rx(self: Box<Self>) -> Box<dyn Port> {
            self.writer.finish().unwrap();
            let bytes = std::mem::take(&mut *self.bytes.0.lock().unwrap());
            Box::new(pcap::Reader::new("memory", Cursor::new(bytes)).unwrap())
        }
    }

    impl Write for Shared {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
}
