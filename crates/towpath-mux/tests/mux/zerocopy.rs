//! Zero-copy senders: how their connections end.
#![cfg(feature = "io")]

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use rustix::net::sockopt;
use towpath_mux::io::{Ended, Server, ZerocopySender, ZerocopySenders};
use towpath_mux::mux::{Cause, Config, Order, Outcome, Transmit};

/// Supports TCP only, as the kernel does.
#[derive(Debug)]
struct Tcp;

#[derive(Debug)]
struct Connection(OwnedFd);

impl ZerocopySenders for Tcp {
    fn min_bytes(&self) -> usize {
        100
    }

    fn open(&self, socket: BorrowedFd<'_>) -> Option<Box<dyn ZerocopySender>> {
        let tcp = sockopt::socket_domain(socket).expect("a socket") == rustix::net::AddressFamily::INET;
        tcp.then(|| {
            Box::new(Connection(socket.try_clone_to_owned().expect("a descriptor")))
                as Box<dyn ZerocopySender>
        })
    }
}

impl ZerocopySender for Connection {
    fn write(&mut self, transmit: &mut Transmit) -> Outcome {
        loop {
            let Some(wrote) = transmit.slices(1).next().map(|piece| rustix::io::write(&self.0, piece)) else {
                return Outcome::Taken;
            };
            match wrote {
                Ok(bytes) => transmit.advance(bytes),
                Err(rustix::io::Errno::AGAIN) => return Outcome::Blocked,
                Err(errno) => return Outcome::Failed(errno.raw_os_error()),
            }
        }
    }

    fn handle_error_queue(&mut self) -> Result<bool, i32> {
        // SO_ERROR is reported once (socket(7)).
        sockopt::socket_error(&self.0).expect("a socket").map_err(rustix::io::Errno::raw_os_error)?;
        Ok(true)
    }
}

fn echo() -> (Server, JoinHandle<()>) {
    let server = Server::new("line".parse().expect("a framing"), Config::new(Order::None)).expect("epoll");
    server.set_zerocopy(Arc::new(Tcp));
    let mut worker = server.worker().expect("a worker");
    let thread = thread::spawn(move || {
        while let Some(message) = worker.recv().expect("epoll") {
            worker.reply(&message, message.bytes().clone());
        }
    });
    (server, thread)
}

fn ask(stream: &mut (impl Read + Write), length: usize) {
    let asked = [vec![b'x'; length - 1], b"\n".to_vec()].concat();
    stream.write_all(&asked).expect("it reads");
    let mut answer = vec![0; length];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer, asked);
}

fn ended(server: &Server) -> Ended {
    loop {
        match server.poll_ended() {
            Some(ended) => return ended,
            None => thread::yield_now(),
        }
    }
}

#[test]
fn a_reset_is_reported_with_a_zerocopy_sender() {
    let (server, thread) = echo();
    let address = server.listen("127.0.0.1:0").expect("a port");
    for length in [10, 1000] {
        for reset in [false, true] {
            let mut stream = TcpStream::connect(address).expect("it listens");
            ask(&mut stream, length);
            if reset {
                // A linger time of 0 resets the connection (tcp(7)).
                sockopt::set_socket_linger(&stream, Some(std::time::Duration::ZERO)).expect("an option");
            }
            drop(stream);
            let expected =
                if reset { Cause::Reset(rustix::io::Errno::CONNRESET.raw_os_error()) } else { Cause::Clean };
            assert_eq!(ended(&server).cause, expected, "{length} bytes");
        }
    }
    server.drain(None);
    thread.join().expect("it does not panic");
}

/// Completions belong to the sender alone: only connections without a sender are given back.
#[test]
fn only_connections_without_a_zerocopy_sender_are_given_back() {
    let (server, thread) = echo();
    let (unix, mut peer) = UnixStream::pair().expect("sockets");
    let id = server.attach(unix, b"").expect("epoll");
    ask(&mut peer, 1000);
    server.unattach(id, None);
    assert!(ended(&server).socket.is_some(), "it has no sender");

    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    for (length, given) in [(10, true), (1000, false)] {
        let mut peer = TcpStream::connect(listener.local_addr().expect("an address")).expect("it listens");
        let id = server.attach(listener.accept().expect("it connects").0, b"").expect("epoll");
        ask(&mut peer, length);
        server.unattach(id, None);
        assert_eq!(ended(&server).socket.is_some(), given, "{length} bytes");
    }
    server.drain(None);
    thread.join().expect("it does not panic");
}
