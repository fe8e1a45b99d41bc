//! Workers that die, get stuck, are notified of unsent messages, or are replaced.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::thread;

use rustix::process::{Resource, Rlimit, Signal, getrlimit, setrlimit};

use super::daemon::{Mux, answer, ask, counted, discarded, example, kill, message, split, workers};

#[test]
fn a_worker_is_notified_of_unsent_messages() {
    let mux = Mux::start(&example("mux_worker"), &["--workers", "1"]);
    let mut stream = mux.connect();
    for text in ["one", "two"] {
        ask(&mut stream, format!("send {text}").as_bytes());
    }
    // ENOTCONN: not in connected mode.
    let mut heard = Vec::new();
    while heard.len() < 2 {
        let answer = ask(&mut stream, b"unsent");
        let said = String::from_utf8_lossy(split(&answer).1);
        heard.extend(said.split(", ").filter(|said| !said.is_empty()).map(str::to_owned));
    }
    assert_eq!(heard, ["107 None one", "107 None two"]);
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
}

#[test]
fn a_message_whose_worker_dies_goes_to_another() {
    let mut mux = Mux::start(&example("mux_worker"), &["--workers", "2"]);
    let mut stream = mux.connect();
    let directory = tempfile::tempdir().expect("a directory");
    // The worker dies once and leaves a file as a mark.
    let mark = directory.path().join("mark");
    let body = format!("die once {}", mark.display());
    let answered = ask(&mut stream, body.as_bytes());
    assert!(mark.exists());
    assert_eq!(split(&answered).1, body.as_bytes());
    mux.until("another one is started");
    // A message that kills every worker is abandoned, and its connection ends. Other connections are not
    // affected.
    let mut other = mux.connect();
    stream.write_all(&message(b"die")).expect("open");
    assert_eq!(stream.read(&mut [0; 16]).expect("an end"), 0, "the connection ends");
    mux.until("was given up");
    assert_eq!(split(&ask(&mut other, b"still here")).1, b"still here");
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
    let (received, done, undone, left) = counted(&errors);
    assert_eq!((received, done, undone, left), (3, 2, 1, 0), "{errors}");
}

#[test]
fn nothing_is_lost_when_workers_are_killed_and_connections_reset() {
    workers().iter().for_each(|worker| kills(worker));
}

fn kills(worker: &str) {
    let mut mux = Mux::start(worker, &["--workers", "3", "--redeliver", "200"]);
    // Clients reset their connections while messages are in progress.
    for _ in 0..20 {
        let mut stream = mux.connect();
        let asked: Vec<u8> = (0..50u32).flat_map(|number| message(&number.to_be_bytes())).collect();
        stream.write_all(&asked).expect("it is open");
        let answered = answer(&mut stream).expect("an answer");
        kill(split(&answered).0, Signal::KILL);
        // Unread bytes make the close a reset.
        drop(stream);
    }
    let clients: Vec<_> = (0..4u32)
        .map(|client| {
            let mut stream = mux.connect();
            thread::spawn(move || {
                for number in 0..200u32 {
                    let body = [client.to_be_bytes(), number.to_be_bytes()].concat();
                    let answered = ask(&mut stream, &body);
                    let (pid, echo) = split(&answered);
                    assert_eq!(echo, body, "the reply belongs to the request");
                    if number % 20 == 7 {
                        kill(pid, Signal::KILL);
                    }
                }
            })
        })
        .collect();
    for client in clients {
        client.join().expect("every question is answered");
    }
    mux.until("another one is started");
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
    let (received, done, undone, left) = counted(&errors);
    assert_eq!((undone, left), (0, 0), "{errors}");
    assert_eq!(received, done + discarded(&errors), "{errors}");
    assert!(received >= 820);
}

#[test]
fn a_message_that_kills_workers_is_identified() {
    let mux = Mux::start(&format!("{} 16", example("mux_worker")), &["--workers", "2", "--undone", "keep"]);
    let mut stream = mux.connect();
    let mut ask = |deadly: Option<usize>| {
        let body = |number| if Some(number) == deadly { "die".to_owned() } else { number.to_string() };
        let asked: Vec<u8> = (0..300).flat_map(|number| message(body(number).as_bytes())).collect();
        stream.write_all(&asked).expect("it is open");
        let mut answered = BTreeSet::new();
        for _ in 0..300 - usize::from(deadly.is_some()) {
            let answer = answer(&mut stream).expect("an answer");
            answered.insert(String::from_utf8_lossy(split(&answer).1).into_owned());
        }
        assert_eq!(answered, (0..300).filter(|number| Some(*number) != deadly).map(body).collect());
    };
    // The first messages are delivered one by one, until their service time is known.
    (0..10).for_each(|_| ask(None));
    [0, 7, 150, 299].into_iter().for_each(|number| ask(Some(number)));
    ask(None);
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
    assert_eq!(counted(&errors), (15 * 300, 15 * 300 - 4, 4, 0), "{errors}");
}

/// Four threads open and reset connections at random while workers are killed.
#[towpath_testenv::needs(files)]
#[test]
fn nothing_is_lost_among_thousands_of_connections() {
    const CONNECTIONS: usize = 500;
    let limit = getrlimit(Resource::Nofile);
    setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }).expect("up to there it may");
    let worker = format!("{} 16", example("mux_worker"));
    let mux = Mux::start(&worker, &["--workers", "3", "--redeliver", "200"]);
    let client = &|client: u64| {
        // xorshift64* (Vigna 2016).
        let mut state = 0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(client + 1);
        let mut random = move |below: u64| {
            state ^= state >> 12;
            state ^= state << 25;
            state ^= state >> 27;
            (state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) % below
        };
        let body = |number: usize, at: u8| [&client.to_be_bytes()[..], &number.to_be_bytes(), &[at]].concat();
        let mut answered = 0;
        let mut streams: Vec<_> = (0..CONNECTIONS)
            .map(|number| {
                let mut stream = mux.connect();
                let asked: Vec<u8> = (0..3).flat_map(|at| message(&body(number, at))).collect();
                stream.write_all(&asked).expect("it is open");
                (number, stream)
            })
            .collect();
        while !streams.is_empty() {
            let (number, mut stream) = streams.swap_remove(random(streams.len() as u64) as usize);
            if random(3) == 0 {
                // Ends inside a message; unread replies make it a reset.
                stream.write_all(&message(&[0; 100])[..50]).expect("it is open");
                continue;
            }
            let mut bodies = BTreeSet::new();
            for _ in 0..3 {
                let answer = answer(&mut stream).expect("an answer");
                let (pid, echo) = split(&answer);
                bodies.insert(echo.to_vec());
                if random(100) == 0 {
                    kill(pid, Signal::KILL);
                }
            }
            assert_eq!(bodies, (0..3).map(|at| body(number, at)).collect(), "its own replies, each once");
            answered += 3;
        }
        answered
    };
    let answered: u64 = thread::scope(|scope| {
        let clients: Vec<_> = (0..4).map(|number| scope.spawn(move || client(number))).collect();
        clients.into_iter().map(|client| client.join().expect("every question is answered")).sum()
    });
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
    let (received, done, undone, left) = counted(&errors);
    assert_eq!((undone, left), (0, 0), "{errors}");
    assert_eq!(received, done + discarded(&errors), "{errors}");
    assert!(received >= answered && errors.contains("another one is started"), "{answered}: {errors}");
}

#[test]
fn other_requests_are_answered_when_a_message_is_abandoned() {
    let mux = Mux::start(&example("mux_worker"), &["--workers", "2", "--redeliver", "0"]);
    let mut stream = mux.connect();
    let body = |number: u32| if number == 0 { b"die".to_vec() } else { number.to_be_bytes().to_vec() };
    // They arrive in one segment.
    stream.write_all(&(0..300).flat_map(|number| message(&body(number))).collect::<Vec<_>>()).expect("open");
    let mut answered = BTreeSet::new();
    while let Ok(answer) = answer(&mut stream) {
        answered.insert(split(&answer).1.to_vec());
    }
    assert_eq!(answered, (1..300).map(body).collect());
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
    assert_eq!(counted(&errors), (300, 299, 1, 0), "{errors}");
}

#[test]
fn a_stuck_worker_is_killed_when_there_is_a_limit() {
    let mux = Mux::start(&example("mux_worker"), &["--workers", "1", "--timeout", "10", "--redeliver", "0"]);
    let mut stream = mux.connect();
    stream.write_all(&message(b"stop")).expect("open");
    assert_eq!(stream.read_to_end(&mut Vec::new()).expect("an end"), 0, "the connection ends");
    assert_eq!(split(&ask(&mut mux.connect(), b"next")).1, b"next");
    let (_, errors) = mux.finish();
    assert!(errors.contains("killed: it had a message for too long"), "{errors}");
}

#[test]
fn hangup_replaces_the_workers_one_by_one() {
    let mut mux = Mux::start(&example("mux_worker"), &["--workers", "2"]);
    let pids = |mux: &Mux| -> BTreeSet<u32> {
        // Both workers answer: each waits until both have begun.
        let gate = TcpListener::bind("127.0.0.1:0").expect("a port");
        let body = message(format!("wait {}", gate.local_addr().expect("an address")).as_bytes());
        let mut streams = [mux.connect(), mux.connect()];
        let both = streams.each_mut().map(|stream| {
            stream.write_all(&body).expect("open");
            gate.accept().expect("a worker")
        });
        drop(both);
        streams.iter_mut().map(|stream| split(&answer(stream).expect("an answer")).0).collect()
    };
    let before = pids(&mux);
    assert_eq!(before.len(), 2);
    // A client sends requests meanwhile; every one is answered.
    let mut stream = mux.connect();
    let (stop, stopped) = std::sync::mpsc::channel::<()>();
    let asks = thread::spawn(move || {
        let mut count = 0u64;
        while stopped.try_recv() == Err(std::sync::mpsc::TryRecvError::Empty) {
            ask(&mut stream, b"meanwhile");
            count += 1;
        }
        count
    });
    mux.signal(Signal::HUP);
    mux.until("all workers were replaced");
    stop.send(()).expect("it asks");
    assert!(asks.join().expect("every question is answered") > 0);
    let after = pids(&mux);
    assert!(before.is_disjoint(&after), "{before:?} {after:?}");
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
    assert!(errors.contains(" 0 workers started again"), "{errors}");
}

#[test]
fn descriptors_are_reserved_for_workers() {
    let mut mux = Mux::limited("ulimit -n 64", &example("mux_worker"), &["--workers", "1"]);
    let mut stream = mux.connect();
    let mut pid = split(&ask(&mut stream, b"who")).0;
    // More connections than descriptors: the last ones wait.
    let clients: Vec<_> = (0..80).map(|_| mux.connect()).collect();
    let line = mux.until("cannot accept until a connection ends");
    assert!(line.contains("LimitNOFILE="), "{line}");
    for _ in 0..3 {
        kill(pid, Signal::KILL);
        let before = std::mem::replace(&mut pid, split(&ask(&mut stream, b"who")).0);
        assert_ne!(pid, before, "another process was started");
    }
    drop(clients);
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
}
