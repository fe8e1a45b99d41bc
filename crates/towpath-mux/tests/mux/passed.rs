//! Peers that pass descriptors over a Unix socket.

use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use towpath_mux::io::{Flags, Kind, Server};
use towpath_mux::mux::{Cause, Config, Order};

/// Sends bytes with copies of a descriptor. Returns false if the socket refuses descriptors (Linux 6.16).
pub(super) fn pass(socket: &UnixStream, bytes: &[u8], fd: impl AsFd, count: usize) -> bool {
    let fds = vec![fd.as_fd(); count];
    let mut space = [MaybeUninit::uninit(); 4096];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
    match sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL) {
        Ok(sent) => sent == bytes.len(),
        Err(errno) => {
            assert_eq!(errno, rustix::io::Errno::PERM);
            false
        }
    }
}

/// Descriptors that were passed before the connection was attached, as on a kernel that cannot refuse them.
#[test]
fn a_peer_that_passes_descriptors_again_is_cut_and_they_are_closed() {
    for count in [1, 253] {
        let server = Server::new("line".parse().unwrap(), Config::new(Order::None)).unwrap();
        let mut socket = server.socket(Kind::Dgram).unwrap();
        let (mut watched, passed) = UnixStream::pair().unwrap();
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        // The first ones are closed. The second message with descriptors ends the connection.
        assert!(pass(&theirs, b"one\n", &passed, count) && pass(&theirs, b"two\n", &passed, count));
        drop(passed);
        let (own, mut honest) = UnixStream::pair().unwrap();
        socket.attach(ours, "line".parse().unwrap()).unwrap();
        socket.attach(own, "line".parse().unwrap()).unwrap();
        honest.write_all(b"three\n").unwrap();
        let mut buffer = [0; 16];
        loop {
            let message = socket.recv(&mut buffer, Flags::empty()).unwrap();
            match &buffer[..message.bytes] {
                b"one\n" => {}
                other => break assert_eq!(other, b"three\n"),
            }
        }
        assert_eq!(theirs.read(&mut [0]).unwrap_or(0), 0, "the connection ends");
        assert_eq!(watched.read(&mut [0]).unwrap(), 0, "all copies are closed");
        let ended = loop {
            match server.poll_ended() {
                Some(ended) => break ended,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        };
        assert_eq!(ended.cause, Cause::Descriptors);
        assert!(server.poll_ended().is_none(), "the honest connection is open");
    }
}

#[test]
fn a_listener_refuses_descriptors() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("mux.sock");
    let server = Server::new("line".parse().unwrap(), Config::new(Order::None)).unwrap();
    server.listen_unix(&path).unwrap();
    let mut socket = server.socket(Kind::Dgram).unwrap();
    let mut stream = UnixStream::connect(&path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    let (mut watched, passed) = UnixStream::pair().unwrap();
    if pass(&stream, b"one\n", &passed, 1) {
        // An older kernel: they are closed.
        drop(passed);
        assert_eq!(watched.read(&mut [0]).unwrap(), 0);
        return;
    }
    stream.write_all(b"two\n").unwrap();
    let mut buffer = [0; 16];
    let message = socket.recv(&mut buffer, Flags::empty()).unwrap();
    assert_eq!(&buffer[..message.bytes], b"two\n");
}
