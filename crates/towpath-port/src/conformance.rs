//! What every driver must do, checked the same way for each.
//!
//! A driver's tests implement [`Wire`] for a way through it, and call [`check`].

use std::iter;

use crate::{Burst, Error, Frame, LinkType, MAX_FRAME, Meta, Port, Received};

/// A way through one driver: what is sent to [`Wire::tx`] comes out of [`Wire::into_rx`].
///
/// It must take at least 256 frames before the first is received.
pub trait Wire {
    /// The end that takes frames.
    fn tx(&mut self) -> &mut dyn Port;

    /// Everything was sent: the end that gives the frames back.
    fn into_rx(self: Box<Self>) -> Box<dyn Port>;
}

/// Runs the suite over wires that `wire` makes, a new one for each check.
///
/// # Panics
/// When the driver does not conform; the message says in what.
pub fn check(mut wire: impl FnMut() -> Box<dyn Wire>) {
    keeps_what_frames_are(wire());
    nothing_sent_is_nothing_received(wire());
    [1, 2, 3, 100].into_iter().for_each(|frames| small_bursts_lose_nothing(wire(), frames));
    takes_only_what_it_can_send(wire());
    refuses_what_is_too_long(wire());
    a_direction_it_lacks_is_an_error(wire());
}

fn keeps_what_frames_are(mut wire: Box<dyn Wire>) {
    let lengths = [14, 15, 16, 17, 60, 1514, 9018, 65_535, 65_550, MAX_FRAME];
    let sent: Vec<_> = lengths.iter().enumerate().map(|(index, &len)| Sample::new(index, len)).collect();
    send_all(wire.tx(), &sent);
    let received = receive_all(wire.into_rx(), &mut Burst::new(64));
    assert_eq!(received.len(), sent.len(), "frames received");
    for (sent, received) in sent.iter().zip(&received) {
        assert!(sent.bytes == received.bytes, "bytes of the frame of {} bytes", sent.bytes.len());
        assert_eq!(sent.wire_len, received.wire_len, "length on the wire");
        assert_eq!(sent.time_ns, received.time_ns, "time");
    }
}

fn nothing_sent_is_nothing_received(wire: Box<dyn Wire>) {
    let mut burst = Burst::new(4);
    burst.push(Sample::new(0, 60).frame()).expect("an empty burst has room");
    let mut rx = wire.into_rx();
    assert_ne!(rx.receive(&mut burst).expect("receive"), Received::Frames);
    assert!(burst.is_empty(), "receive clears the burst");
}

fn small_bursts_lose_nothing(mut wire: Box<dyn Wire>, frames: usize) {
    let sent: Vec<_> = (0..200).map(|index| Sample::new(index, 14 + 37 * index)).collect();
    send_all(wire.tx(), &sent);
    let received = receive_all(wire.into_rx(), &mut Burst::new(frames));
    assert!(sent == received, "frames received in bursts of {frames}, in order");
}

fn takes_only_what_it_can_send(mut wire: Box<dyn Wire>) {
    let sample = Sample::new(0, 60);
    let mut frames = iter::repeat_n(sample.frame(), 100_000);
    let sent = wire.tx().send(&mut frames).expect("send");
    assert_eq!(sent + frames.len(), 100_000, "frames sent and frames left with the sender");
}

fn refuses_what_is_too_long(mut wire: Box<dyn Wire>) {
    let (good, bad) = (Sample::new(0, 60), Sample::new(1, MAX_FRAME + 1));
    let mut frames = [good.frame(), bad.frame(), good.frame()].into_iter();
    let error = wire.tx().send(&mut frames).expect_err("a frame beyond MAX_FRAME");
    assert!(matches!(error, Error::TooLong { .. }), "{error}");
    assert_eq!(frames.len(), 1, "frames left with the sender");
    let received = receive_all(wire.into_rx(), &mut Burst::new(64));
    assert!(received == std::slice::from_ref(&good), "the frame before the one that is too long");
}

fn a_direction_it_lacks_is_an_error(mut wire: Box<dyn Wire>) {
    let mut burst = Burst::new(4);
    let tx = wire.tx();
    assert!(tx.caps().send, "the end that takes frames says so");
    let received = tx.receive(&mut burst);
    assert_eq!(matches!(received, Err(Error::Direction { .. })), !tx.caps().receive);
    let mut rx = wire.into_rx();
    assert!(rx.caps().receive, "the end that gives frames says so");
    let sent = rx.send(&mut iter::empty());
    assert_eq!(matches!(sent, Err(Error::Direction { .. })), !rx.caps().send);
}

fn send_all(tx: &mut dyn Port, samples: &[Sample]) {
    let sent = tx.send(&mut samples.iter().map(Sample::frame)).expect("send");
    assert_eq!(sent, samples.len(), "frames sent");
    tx.flush().expect("flush");
}

fn receive_all(mut rx: Box<dyn Port>, burst: &mut Burst) -> Vec<Sample> {
    let mut received = Vec::new();
    while rx.receive(burst).expect("receive") == Received::Frames {
        assert!(!burst.is_empty(), "a burst with frames has frames");
        received.extend(burst.iter().map(Sample::from));
    }
    assert!(burst.is_empty(), "a burst without frames is empty");
    received
}

/// A frame that owns its bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Sample {
    bytes: Vec<u8>,
    wire_len: u32,
    time_ns: u64,
    link: LinkType,
}

impl Sample {
    /// Ethernet to nowhere, of an unassigned ethertype; every byte depends on `index`.
    fn new(index: usize, len: usize) -> Self {
        let mut bytes: Vec<u8> = (0..len).map(|at| (at * 31 + index * 7) as u8).collect();
        bytes[..6].copy_from_slice(&[2, 0, 0, 0, 0, 1]);
        bytes[6..12].copy_from_slice(&[2, 0, 0, 0, 0, 2]);
        bytes[12..14].copy_from_slice(&[0x88, 0xb5]); // IEEE Std 802, local experimental
        let time_ns = 1_700_000_000_000_000_000 + index as u64 * 1_000;
        Self { bytes, wire_len: (len + index % 3) as u32, time_ns, link: LinkType::ETHERNET }
    }

    fn frame(&self) -> Frame<'_> {
        let Self { bytes, wire_len, time_ns, link } = self;
        Frame {
            bytes,
            wire_len: *wire_len,
            time_ns: *time_ns,
            link: *link,
            interface: 0,
            meta: Meta::default(),
        }
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
