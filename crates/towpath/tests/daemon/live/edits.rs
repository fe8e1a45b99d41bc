//! An unnumbered rule file that is edited under TCP traffic.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, channel};

use rustix::process::Signal;
use towpath_port::netns::{Host, within};

use super::machines::*;
use crate::support::until;

/// Connections live by their states only: a segment without one ends at the last rule.
const FILE: &str = "\
add allow layer2 mac-type arp
add allow ip6 from any to any
add check-state
add allow tcp from any to any 9001 in recv wan setup keep-state
add allow tcp from any to any 9002 in recv wan setup keep-state :web
add allow tcp from any to any 9003 in recv wan setup limit src-addr 9
add deny tcp from any to any
";

/// Each edit of the file, as the file that follows the one before.
fn edits() -> Vec<String> {
    let mut lines: Vec<String> = FILE.lines().map(str::to_owned).collect();
    let mut files = vec![FILE.to_owned()];
    let mut edit = |change: &dyn Fn(&mut Vec<String>)| {
        change(&mut lines);
        files.push(lines.join("\n") + "\n");
    };
    let add = |text: &str| format!("add {text} ip from any to any");
    // At the top and in the middle, again and again.
    for _ in 0..3 {
        edit(&|lines| lines.insert(0, add("count")));
        edit(&|lines| lines.insert(4, "add deny udp from any to any".to_owned()));
        edit(&|lines| lines.insert(6, "add allow tcp from 10.9.9.9 to any keep-state".to_owned()));
    }
    // Removed.
    edit(&|lines| drop(lines.remove(0)));
    edit(&|lines| lines.retain(|line| !line.contains("10.9.9.9") && !line.contains("udp")));
    // Moved: the order of the rules that create the states.
    let find = |lines: &[String], what: &str| lines.iter().position(|line| line.contains(what)).unwrap();
    edit(&|lines| {
        let rule = lines.remove(find(lines, "9003"));
        lines.insert(0, rule);
    });
    edit(&|lines| {
        let (a, b) = (find(lines, "9001"), find(lines, "9002"));
        lines.swap(a, b);
    });
    // Renumbered, with a comment, wider, under another name, before another rule that creates the state.
    edit(&|lines| {
        lines
            .iter_mut()
            .zip(1..)
            .for_each(|(line, n)| *line = line.replace("add ", &format!("add {} ", 7 * n)))
    });
    edit(&|lines| {
        lines
            .iter_mut()
            .zip(1..)
            .for_each(|(line, n)| *line = line.replace(&format!("add {} ", 7 * n), "add "))
    });
    edit(&|lines| lines.iter_mut().for_each(|line| *line = line.replace("keep-state", "keep-state // all")));
    edit(&|lines| lines.iter_mut().for_each(|line| *line = line.replace("any 9001", "any 9000-9001")));
    edit(&|lines| lines.iter_mut().for_each(|line| *line = line.replace(":web", ":other")));
    edit(&|lines| lines.insert(0, "add allow tcp from 10.0.0.1 to any setup keep-state".to_owned()));
    files
}

/// Ends the clients when it is dropped. Otherwise a test that fails would wait for them.
struct Stop(Arc<AtomicBool>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Connections of the left machine to these ports of the right one, which stay until the end.
struct Connections {
    stop: Stop,
    /// Round trips of each connection.
    trips: Arc<[AtomicU64; 3]>,
    ends: [Receiver<()>; 2],
}

impl Connections {
    fn start(left: &Host, right: &Host) -> Self {
        const PORTS: [u16; 3] = [9001, 9002, 9003];
        let (ready, listens) = channel();
        let server = right.start(move || {
            let echo = |port: u16| {
                let listener = TcpListener::bind((RIGHT, port)).unwrap();
                move || {
                    let mut stream = listener.accept().unwrap().0;
                    let mut back = stream.try_clone().unwrap();
                    std::io::copy(&mut stream, &mut back).unwrap();
                }
            };
            let threads: Vec<_> = PORTS.map(echo).into_iter().map(std::thread::spawn).collect();
            ready.send(()).unwrap();
            threads.into_iter().for_each(|thread| thread.join().unwrap());
        });
        listens.recv().unwrap();
        let (stop, trips) = (Arc::new(AtomicBool::new(false)), Arc::<[AtomicU64; 3]>::default());
        let (over, count) = (Arc::clone(&stop), Arc::clone(&trips));
        let client = left.start(move || {
            std::thread::scope(|scope| {
                for (port, trips) in PORTS.iter().zip(&*count) {
                    let over = &over;
                    scope.spawn(move || {
                        let mut stream = TcpStream::connect((RIGHT, *port)).unwrap();
                        let (piece, mut back) = ([7; 500], [0; 500]);
                        while !over.load(Ordering::Relaxed) {
                            stream.write_all(&piece).unwrap();
                            stream.read_exact(&mut back).unwrap();
                            trips.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
            });
        });
        Self { stop: Stop(stop), trips, ends: [client, server] }
    }

    /// Waits until each connection has made some more round trips.
    fn go_on(&self) {
        let trips = || self.trips.each_ref().map(|trips| trips.load(Ordering::Relaxed));
        let before = trips();
        until(|| trips().iter().zip(before).all(|(now, before)| *now > before + 3));
    }

    fn end(self) {
        drop(self.stop);
        self.ends.into_iter().for_each(|end| end.recv().unwrap());
    }
}

#[towpath_testenv::needs(netns)]
#[test]
fn connections_outlive_edits_of_an_unnumbered_file() {
    within(|| {
        let (left, right) = machines();
        let files = files(BRIDGE, FILE);
        let mut engine = Engine::start(files.path());
        let connections = Connections::start(&left, &right);
        connections.go_on();
        let reload = |rules: &str, engine: &Engine| {
            std::fs::write(files.path().join("r.ipfw"), rules).unwrap();
            engine.signal(Signal::HUP);
            engine.log.line("reloaded: ");
            engine.log.line("re-checked ")
        };
        for (n, rules) in edits().iter().enumerate() {
            let line = reload(rules, &engine);
            assert!(line.contains("re-checked 3 states: 0 dropped"), "edit {n}: {line}\n{rules}");
            connections.go_on();
        }
        // No segment was lost, and the rules that stayed have counted on.
        let rules = engine.json("show rules --json")["rules"].clone();
        let deny =
            rules.as_array().unwrap().iter().find(|rule| rule["text"] == "deny tcp from any to any").unwrap();
        assert_eq!(deny["packets"], 0, "{rules}");
        let arp =
            rules.as_array().unwrap().iter().find(|rule| rule["text"].as_str().unwrap().contains("0x0806"));
        assert!(arp.unwrap()["packets"].as_u64() > Some(0), "{rules}");
        connections.end();
        // A connection that the new rules refuse ends with the re-check.
        let (ready, listens) = channel();
        let server = right.start(move || {
            let listener = TcpListener::bind((RIGHT, 9000)).unwrap();
            ready.send(()).unwrap();
            listener.accept().unwrap().0
        });
        listens.recv().unwrap();
        let ends = (left.run(|| TcpStream::connect((RIGHT, 9000)).unwrap()), server.recv().unwrap());
        let last = edits().pop().unwrap();
        let line = reload(&format!("add deny tcp from any to any 9000\n{last}"), &engine);
        assert!(line.contains(" 1 dropped"), "{line}");
        drop(ends);
        engine.signal(Signal::TERM);
        assert!(engine.child.wait().unwrap().success());
    });
}
