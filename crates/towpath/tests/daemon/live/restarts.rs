//! An engine that is killed, and the connections through it.

use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rustix::process::Signal;
use towpath_gate::rules::Ruleset;
use towpath_gate::{Gate, Ports, state};
use towpath_port::netns::within;
use towpath_wire::Time;

use super::machines::*;
use crate::support::until;

/// Only the first packet of a connection makes a state. All other packets need one.
const SETUP: &str = "add 100 allow layer2 mac-type arp\nadd 200 check-state\n\
                     add 300 allow tcp from any to any setup recv wan keep-state\n";

/// Returns true if the file of states has an established connection.
fn has_connection(directory: &Path) -> bool {
    let Ok(file) = std::fs::read(directory.join("states")) else { return false };
    let ruleset = Ruleset::parse("t", SETUP).ruleset.unwrap();
    let mut gate = Gate::new(ruleset, Ports::new(), state::Settings::default(), 1);
    let now = Time::from_secs(1);
    gate.restore(&file, now).is_ok() && gate.states().list(now).any(|state| state.seconds() > 100)
}

fn inode(file: &Path) -> Option<u64> {
    std::fs::metadata(file).ok().map(|file| file.ino())
}

/// One word in each direction. Returns false if a word does not arrive in some seconds.
fn exchange(ends: &mut [TcpStream; 2]) -> bool {
    for (from, to) in [(0, 1), (1, 0)] {
        ends[from].write_all(b"towpath").unwrap();
        let mut word = [0; 7];
        match ends[to].read_exact(&mut word) {
            Ok(()) => assert_eq!(&word, b"towpath"),
            Err(error) => {
                assert!(matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut), "{error}");
                return false;
            }
        }
    }
    true
}

#[towpath_testenv::needs(netns)]
#[test]
fn connections_survive_a_killed_engine() {
    for (config, survives) in
        [("states = \"states\"\nstates-every = \"0.2s\"\n", true), ("states = \"states\"\n", false)]
    {
        within(|| {
            let (left, right) = machines();
            let files = files(&format!("{config}{BRIDGE}"), SETUP);
            let mut engine = Engine::start(files.path());
            let listener = right.run(|| TcpListener::bind((RIGHT, 7)).unwrap());
            let client = left.run(|| TcpStream::connect((RIGHT, 7)).unwrap());
            let mut ends = [client, listener.accept().unwrap().0];
            let timeout = |ends: &[TcpStream; 2], seconds| {
                let timeout = Some(Duration::from_secs(seconds));
                ends.iter().for_each(|end| end.set_read_timeout(timeout).unwrap());
            };
            timeout(&ends, 60);
            assert!(exchange(&mut ends));
            timeout(&ends, if survives { 60 } else { 4 });
            let file = files.path().join("states");
            let mut before = None;
            // The second engine saves the states that it restored.
            for _ in 0..2 {
                // A connection that is older than the interval is in the file of this engine.
                if survives {
                    until(|| inode(&file) != before && has_connection(files.path()));
                    before = inode(&file);
                }
                engine.signal(Signal::KILL);
                engine.child.wait().unwrap();
                engine = Engine::start(files.path());
                assert_eq!(exchange(&mut ends), survives, "{config}");
            }
            let said = engine.stop();
            assert_eq!(
                said.contains("1 state restored as they were before the engine was killed"),
                survives,
                "{said}"
            );
        });
    }
}
