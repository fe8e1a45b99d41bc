//! The mux on real sockets: misbehaving peers, bounds, and churn.
#![cfg(feature = "io")]

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use towpath_mux::Time;
use towpath_mux::assembler::Limits;
use towpath_mux::io::{Admission, Admit, Peer, Server, Worker};
use towpath_mux::mux::{Bound, Cause, Config, Order};

const FRAMING: &str = "length=4 be adjust=4";

/// A server with echoing workers, and its address.
fn echo(workers: usize, limits: Limits, config: Config) -> (Server, SocketAddr, Vec<JoinHandle<u64>>) {
    let server = Server::with_limits(FRAMING.parse().expect("a framing"), limits, config).expect("epoll");
    let address = server.listen("127.0.0.1:0").expect("a port");
    let threads = (0..workers).map(|_| spawn(server.worker().expect("a worker"), u64::MAX)).collect();
    (server, address, threads)
}

/// Echoes a number of messages, then ends.
fn spawn(mut worker: Worker, most: u64) -> JoinHandle<u64> {
    thread::spawn(move || {
        let mut done = 0;
        while done < most {
            let Some(message) = worker.recv().expect("epoll") else { break };
            worker.reply(&message, message.bytes().clone());
            done += 1;
        }
        done
    })
}

fn stop(server: &Server, threads: Vec<JoinHandle<u64>>) -> u64 {
    server.drain(Some(Duration::from_secs(20)));
    let done = threads.into_iter().map(|thread| thread.join().expect("it does not panic")).sum();
    let show = server.show();
    assert_eq!(show.psocks, [], "all have gone");
    let totals = show.totals;
    assert_eq!(totals.received, totals.done + totals.undone + totals.discarded(), "{totals:?}");
    server.look(|mux| mux.check().expect("the counts fit"));
    done
}

fn message(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_be_bytes()[..], body].concat()
}

fn ask(stream: &mut (impl Read + Write), body: &[u8]) -> std::io::Result<()> {
    let asked = message(body);
    stream.write_all(&asked)?;
    let mut answer = vec![0; asked.len()];
    stream.read_exact(&mut answer)?;
    assert_eq!(answer, asked);
    Ok(())
}

/// The only worker always has messages of a peer that floods, so it never waits for sockets. It reads them nevertheless, and another
/// peer gets its turn.
#[test]
fn a_flood_does_not_keep_other_connections_from_being_read() {
    const FLOOD: usize = 300;
    let server = Server::new(FRAMING.parse().expect("a framing"), Config::new(Order::None)).expect("epoll");
    let address = server.listen("127.0.0.1:0").expect("a port");
    let [mut flood, mut light] = [0; 2].map(|_| TcpStream::connect(address).expect("it listens"));
    let mut worker = server.worker().expect("a worker");
    flood.write_all(&message(b"many").repeat(FLOOD)).expect("room");
    let mut before = 0;
    while let Some(received) = worker.recv().expect("epoll") {
        if received.bytes()[4..] == b"one"[..] {
            break;
        }
        before += 1;
        if before == 1 {
            light.write_all(&message(b"one")).expect("room");
        }
        // Messages take longer than the interval at which sockets are read.
        thread::sleep(Duration::from_millis(1));
    }
    assert!(before < FLOOD / 2, "{before} of {FLOOD} messages came first");
    drop((flood, light, worker));
}

/// The cause of the next end of a connection.
fn cause(server: &Server) -> Cause {
    loop {
        match server.poll_ended() {
            Some(ended) => return ended.cause,
            None => thread::yield_now(),
        }
    }
}

#[towpath_testenv::needs(ipv6)]
#[test]
fn ipv4_and_ipv6_may_share_a_port() {
    let (server, four, threads) = echo(1, Limits::default(), Config::new(Order::None));
    let six = server.listen(format!("[::]:{}", four.port())).expect("it is free");
    assert_eq!(six.port(), four.port());
    let mut stream = TcpStream::connect(four).expect("it listens");
    ask(&mut stream, b"by IPv4").expect("an answer");
    drop(stream);
    let mut stream = TcpStream::connect(("::1", six.port())).expect("it listens");
    ask(&mut stream, b"by IPv6").expect("an answer");
    drop(stream);
    assert!(stop(&server, threads) > 0);
}

#[test]
fn replies_arrive_in_every_order_mode() {
    for order in [Order::None, Order::Replies, Order::Serial, Order::Sticky] {
        let (server, address, threads) = echo(4, Limits::default(), Config::new(order));
        let clients: Vec<_> = (0..8)
            .map(|client| {
                thread::spawn(move || {
                    let mut stream = TcpStream::connect(address).expect("it listens");
                    let asked: Vec<Vec<u8>> = (0..2000u32)
                        .map(|number| {
                            message(
                                &[&number.to_be_bytes()[..], &vec![client; number as usize % 300]].concat(),
                            )
                        })
                        .collect();
                    let mut reader = stream.try_clone().expect("a descriptor");
                    let length = asked.iter().map(Vec::len).sum::<usize>();
                    let answers = thread::spawn(move || {
                        let mut answers = vec![0; length];
                        reader.read_exact(&mut answers).expect("all answers");
                        answers
                    });
                    for piece in asked.concat().chunks(7777) {
                        stream.write_all(piece).expect("it reads");
                    }
                    let answers = answers.join().expect("it does not panic");
                    let mut found = Vec::new();
                    let mut rest = &answers[..];
                    while let Some((head, _)) = rest.split_first_chunk::<4>() {
                        let (one, more) = rest.split_at(4 + u32::from_be_bytes(*head) as usize);
                        found.push(one.to_vec());
                        rest = more;
                    }
                    if order == Order::None {
                        found.sort_unstable_by_key(|one| one[4..8].to_vec());
                    }
                    assert_eq!(found, asked);
                })
            })
            .collect();
        for client in clients {
            client.join().expect("it does not panic");
        }
        assert_eq!(stop(&server, threads), 16_000, "{order:?}");
    }
}

#[test]
fn large_messages_and_unix_sockets() {
    let (server, _, threads) = echo(2, Limits::default(), Config::new(Order::None));
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("mux");
    server.listen_unix(&path).expect("a socket");
    let mut stream = UnixStream::connect(&path).expect("it listens");
    for length in [0, 1, 65_532, 65_533, 5 << 20] {
        ask(&mut stream, &vec![7; length]).expect("an answer");
    }
    drop(stream);
    assert_eq!(cause(&server), Cause::Clean);
    stop(&server, threads);
}

/// Single bytes, a length of 4 GiB, garbage, an end inside a message: each ends only its own connection, with
/// a cause.
#[test]
fn bad_peers_end_only_their_connections() {
    let limits = Limits {
        message: 1 << 20,
        body_time: Some(Duration::from_millis(200)),
        head_time: Some(Duration::from_millis(200)),
        ..Limits::default()
    };
    let config = Config {
        send_bytes: Bound::of(1 << 16),
        send_time: Some(Duration::from_millis(200)),
        ..Config::new(Order::None)
    };
    let (server, address, threads) = echo(2, limits, config);
    let mut good = TcpStream::connect(address).expect("it listens");
    let bad = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(address).expect("it listens");
        stream.write_all(bytes).expect("it reads");
        stream
    };
    let name = |cause: &Cause| match cause {
        Cause::Framing(failure) => failure.cause.name().to_owned(),
        cause => cause.to_string(),
    };

    let drip = bad(b"\0\0\0");
    assert_eq!(name(&cause(&server)), "ETIMEDOUT");
    ask(&mut good, b"still here").expect("an answer");

    // Sends requests and reads nothing.
    let mut deaf = TcpStream::connect(address).expect("it listens");
    let request = message(&[1; 60_000]);
    while let Ok(()) = deaf.write_all(&request) {}
    assert!(matches!(cause(&server), Cause::SendTimeout | Cause::SendFull));
    ask(&mut good, b"still here").expect("an answer");
    drop((drip, good));
    stop(&server, threads);

    // No timeouts, so that nothing else ends these connections.
    let (server, address, threads) =
        echo(2, Limits { message: 1 << 20, ..Limits::default() }, Config::new(Order::None));
    let mut good = TcpStream::connect(address).expect("it listens");
    let bad = |bytes: &[u8]| {
        let mut stream = TcpStream::connect(address).expect("it listens");
        stream.write_all(bytes).expect("it reads");
        stream
    };
    let huge = bad(&[0xff; 4]);
    assert_eq!(name(&cause(&server)), "EMSGSIZE");
    let garbage = bad(b"GET / HTTP/1.1\r\n\r\n");
    assert_eq!(name(&cause(&server)), "EMSGSIZE");
    let cut = bad(b"\0\0\0\x09half");
    cut.shutdown(Shutdown::Write).expect("it is open");
    assert_eq!(cause(&server), Cause::Inside { bytes: 8, length: Some(13) });
    ask(&mut good, b"still here").expect("an answer");
    drop((huge, garbage, good));
    stop(&server, threads);
}

/// Thousands of connections are opened, used and reset while workers start and end.
#[test]
fn connections_and_workers_come_and_go() {
    let (server, address, mut threads) = echo(1, Limits::default(), Config::new(Order::None));
    let over = AtomicBool::new(false);
    let answered = AtomicU64::new(0);
    thread::scope(|scope| {
        let clients: Vec<_> = (0..4u32)
            .map(|client| {
                let answered = &answered;
                scope.spawn(move || {
                    for number in 0..500u32 {
                        let mut stream = match TcpStream::connect(address) {
                            Ok(stream) => stream,
                            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => return,
                            Err(error) => panic!("{error}"),
                        };
                        let body = vec![number as u8; (number * 37 + client) as usize % 2000];
                        match number % 4 {
                            0 => ask(&mut stream, &body).expect("an answer"),
                            1 => stream.write_all(&message(&body)).expect("it reads"),
                            2 => stream.write_all(&message(&body)[..2]).expect("it reads"),
                            _ => {
                                ask(&mut stream, &body).expect("an answer");
                                ask(&mut stream, &body).expect("another answer");
                            }
                        }
                        answered.fetch_add(1, Ordering::Relaxed);
                    }
                })
            })
            .collect();
        let server = &server;
        let over = &over;
        let changing = scope.spawn(move || {
            let mut done = Vec::new();
            while !over.load(Ordering::Relaxed) {
                // No more workers start once the server drains.
                let some = |most| server.worker().into_iter().map(move |worker| spawn(worker, most));
                let workers: Vec<_> = [3, 20, 1].into_iter().flat_map(some).collect();
                done.extend(workers.into_iter().map(|worker| worker.join().expect("it does not panic")));
            }
            done.into_iter().sum::<u64>()
        });
        for client in clients {
            client.join().expect("it does not panic");
        }
        // Draining ends the workers that wait for messages.
        over.store(true, Ordering::Relaxed);
        server.drain(Some(Duration::from_secs(20)));
        let done = changing.join().expect("it does not panic");
        threads.push(thread::spawn(move || done));
    });
    let done = stop(&server, threads);
    assert_eq!(done, server.show().totals.done);
    assert_eq!(server.look(|mux| mux.bytes()), 0);
}

/// A worker that panics: another one gets its message.
#[test]
fn a_worker_that_panics_loses_nothing() {
    let (server, address, _) = echo(0, Limits::default(), Config::new(Order::None));
    let mut worker = server.worker().expect("a worker");
    let dies = thread::spawn(move || {
        let message = worker.recv().expect("epoll");
        assert!(message.is_none(), "this worker panics on purpose");
    });
    let mut stream = TcpStream::connect(address).expect("it listens");
    stream.write_all(&message(b"x")).expect("it reads");
    assert!(dies.join().is_err());
    let threads = vec![spawn(server.worker().expect("a worker"), u64::MAX)];
    let mut answer = [0; 5];
    stream.read_exact(&mut answer).expect("an answer");
    assert_eq!(answer[..], message(b"x"));
    drop(stream);
    assert_eq!(stop(&server, threads), 1);
}

/// An admission policy with a fixed decision that records its calls.
#[derive(Debug, Default)]
struct Gate {
    answers: Mutex<Vec<Admit>>,
    inside: Mutex<Vec<Peer>>,
}

impl Admission for Gate {
    fn admit(&self, peer: &Peer, _: Time) -> Admit {
        let answer = self.answers.lock().expect("no panic").pop().unwrap_or(Admit::Pass);
        if answer == Admit::Pass {
            self.inside.lock().expect("no panic").push(*peer);
        }
        answer
    }

    fn closed(&self, peer: &Peer, _: Time) {
        let mut inside = self.inside.lock().expect("no panic");
        let at = inside.iter().position(|one| one == peer).expect("it came in, and leaves once");
        inside.remove(at);
    }
}

#[test]
fn admission_decides_about_peers_and_learns_of_ends() {
    let (server, address, threads) = echo(2, Limits::default(), Config::new(Order::None));
    let gate = Arc::new(Gate::default());
    gate.answers.lock().expect("no panic").extend([Admit::Pass, Admit::Reset, Admit::Deny, Admit::Pass]);
    server.set_admission(Arc::clone(&gate) as Arc<dyn Admission>);
    let mut first = TcpStream::connect(address).expect("it listens");
    ask(&mut first, b"one").expect("an answer");
    let mut denied = TcpStream::connect(address).expect("it listens");
    assert_eq!(denied.read(&mut [0]).expect("closed"), 0);
    let mut reset = TcpStream::connect(address).expect("it listens");
    assert_eq!(reset.read(&mut [0]).expect_err("reset").kind(), ErrorKind::ConnectionReset);
    let mut fourth = TcpStream::connect(address).expect("it listens");
    ask(&mut fourth, b"four").expect("an answer");
    let inside = || gate.inside.lock().expect("no panic").clone();
    let peer = |stream: &TcpStream| Peer {
        local: stream.peer_addr().expect("connected"),
        remote: stream.local_addr().expect("connected"),
    };
    assert_eq!(inside(), [peer(&first), peer(&fourth)]);
    let left = peer(&fourth);
    drop(first);
    while inside().len() > 1 {
        thread::yield_now();
    }
    assert_eq!(inside(), [left]);
    let accept_stats = server.accept_stats();
    assert_eq!(
        (accept_stats.accepted, accept_stats.denied, accept_stats.reset, accept_stats.refused),
        (4, 1, 1, 0)
    );
    stop(&server, threads);
    assert_eq!(inside(), []);
}

/// No thread is woken for parts of a long message: the kernel waits for the rest.
#[test]
fn a_long_message_is_read_in_a_few_pieces() {
    const LENGTH: usize = 1 << 20;
    let server = Server::new("length=4 be adjust=4".parse().unwrap(), Config::new(Order::None)).unwrap();
    let address = server.listen("127.0.0.1:0").unwrap();
    let threads = server.clone();
    let lengths = thread::spawn(move || {
        threads.serve(2, |message, answer| {
            answer.extend_from_slice(&(message.payload().len() as u32).to_be_bytes());
        })
    });
    let mut client = TcpStream::connect(address).unwrap();
    client.set_nodelay(true).unwrap();
    client.write_all(&(LENGTH as u32).to_be_bytes()).unwrap();
    // One segment each.
    for _ in 0..LENGTH / 1024 {
        client.write_all(&[7; 1024]).unwrap();
    }
    let mut answer = [0; 4];
    client.read_exact(&mut answer).unwrap();
    assert_eq!(u32::from_be_bytes(answer) as usize, LENGTH + 4);
    let reads = server.show().psock_totals.rx_need_more;
    // While 64 KiB are missing, the kernel waits for them, or for 256 KiB. The last 64 segments may be read
    // one by one.
    assert!(reads <= 80, "{reads} reads before the message was whole");
    server.drain(None);
    lengths.join().unwrap().unwrap();
}

/// Connections that arrive together wait in the backlog; their SYNs are not dropped.
#[towpath_testenv::needs(somaxconn)]
#[test]
fn the_backlog_holds_many_connections() {
    let server = Server::new("line".parse().expect("a framing"), Config::new(Order::None)).expect("epoll");
    let address = server.listen("127.0.0.1:0").expect("a port");
    // There is no worker yet that accepts.
    let patience = Duration::from_secs(30);
    let mut clients: Vec<_> = (0..400)
        .map(|_| TcpStream::connect_timeout(&address, patience).expect("it has room for so many"))
        .collect();
    let mut worker = server.worker().expect("a worker");
    let echo =
        thread::spawn(move || worker.serve(|message, answer| answer.extend_from_slice(message.bytes())));
    for client in &mut clients {
        client.write_all(b"hello\n").expect("it is open");
        client.read_exact(&mut [0; 6]).expect("an answer");
    }
    assert_eq!(server.accept_stats().accepted, 400);
    server.drain(None);
    drop(clients);
    echo.join().expect("it does not panic").expect("epoll");
}
