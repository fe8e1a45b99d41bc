//! `towpath top`: on a terminal (tmux), and `--once`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;
use towpath_port::netns::within;

use super::live::machines::*;
use crate::support::until;

/// A terminal of 80 columns and 24 lines, in a tmux server of its own.
struct Screen {
    server: PathBuf,
}

impl Screen {
    fn run(directory: &Path, socket: &Path, more: &str) -> Self {
        let screen = Self { server: directory.join("tmux") };
        let program = env!("CARGO_BIN_EXE_towpath");
        let command = format!(
            "'{program}' top --interval 0.2 {more} --socket '{}'; echo ended: $?; exec cat",
            socket.display()
        );
        screen.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", &command]);
        screen
    }

    fn tmux(&self, words: &[&str]) -> String {
        let output = Command::new("tmux").arg("-S").arg(&self.server).args(words).output().unwrap();
        assert!(output.status.success(), "{words:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    fn keys(&self, keys: &[&str]) {
        self.tmux(&[&["send-keys"][..], keys].concat());
    }

    fn text(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    /// Waits until the screen has these words; returns its text.
    fn shows(&self, words: &[&str]) -> String {
        let mut text = String::new();
        let begun = Instant::now();
        while !words.iter().all(|word| text.contains(word)) {
            assert!(begun.elapsed() < Duration::from_secs(60), "{words:?} never appear:\n{text}");
            text = self.text();
        }
        text
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = Command::new("tmux").arg("-S").arg(&self.server).arg("kill-server").output();
    }
}

#[towpath_testenv::needs(netns, "tmux")]
#[test]
fn the_views_are_shown_on_a_terminal() {
    within(|| {
        let rules = "add 100 allow layer2 mac-type arp\nadd 200 deny udp from any to any 9 // an unwanted port\n\
                     add 300 allow ip from any to any keep-state :web\n";
        let ((left, right), files) = (machines(), files(BRIDGE, rules));
        let mut engine = Engine::start(files.path());
        let socket = files.path().join("ctl.sock");
        let screen = Screen::run(files.path(), &socket, "");
        let head = screen.shows(&["towpath top", "running", "[1 ports]", "af_packet", "q:quit"]);
        assert_eq!(head.lines().count(), 24, "{head}");

        // Traffic of one flow, and dropped packets, until the test ends.
        let server = right.run(|| std::net::UdpSocket::bind("10.0.0.2:5000").unwrap());
        let sender = left.run(|| std::net::UdpSocket::bind("10.0.0.1:4000").unwrap());
        let send = || {
            for _ in 0..50 {
                sender.send_to(b"hello", "10.0.0.2:5000").unwrap();
                sender.send_to(b"dropped", "10.0.0.2:9").unwrap();
            }
        };
        let traffic = |words: &[&str]| {
            let mut text = String::new();
            until(|| {
                send();
                text = screen.text();
                words.iter().all(|word| text.contains(word))
            });
            text
        };
        screen.keys(&["3"]);
        traffic(&["[3 flows]", "udp 10.0.0.1:4000 <-> 10.0.0.2:5000 :web", "bit/sv"]);
        screen.keys(&["2"]);
        traffic(&["[2 rules]", "deny udp from any to any 9 // an unwanted"]);
        screen.keys(&["6"]);
        traffic(&["[6 drops]", "engine", "rule"]);
        // Follow the reason.
        screen.keys(&["t"]);
        traffic(&["trace: ", "udp 10.0.0.1:4000 > 10.0.0.2:9, 49 bytes: rule 200: drop"]);
        // Escape and a digit together are another key.
        screen.keys(&["Escape"]);
        screen.shows(&["?:help"]);
        screen.keys(&["4"]);
        screen.shows(&["[4 inspectors]", "none"]);
        screen.keys(&["5"]);
        screen.shows(&["[5 muxes]", "this engine has no multiplexor"]);

        // Down to a flow, its rule and its trace; then its end.
        screen.keys(&["3", "/", ":5000", "Enter"]);
        traffic(&["filter: :5000", ":5000 :web"]);
        screen.keys(&["Enter"]);
        traffic(&["src_port       4000", "its rule: 00300 allow ip from any to any keep-state :web"]);
        screen.keys(&["t"]);
        traffic(&["packets, the newest first", ":5000, 47 bytes: rule 300: pass, out by lan"]);
        screen.keys(&["e"]);
        screen.shows(&["End udp 10.0.0.1:4000 <-> 10.0.0.2:5000 :web? y"]);
        screen.keys(&["y"]);
        screen.shows(&["the state has ended", "none that the filter accepts"]);
        drop(server);

        // A pause, a small terminal, and an engine that goes and comes back.
        screen.keys(&["1", "p"]);
        screen.shows(&["PAUSED"]);
        screen.keys(&["p"]);
        screen.tmux(&["resize-window", "-x", "60", "-y", "20"]);
        screen.shows(&["The terminal is 60x20"]);
        screen.tmux(&["resize-window", "-x", "80", "-y", "24"]);
        screen.shows(&["[1 ports]", "running"]);
        engine.stop();
        screen.shows(&["NO ENGINE", "cannot connect to", "af_packet"]);
        engine = Engine::start(files.path());
        screen.shows(&["running", "af_packet"]);
        screen.keys(&["?"]);
        screen.shows(&["trace the packets of a rule"]);
        screen.keys(&["x", "q"]);
        screen.shows(&["ended: 0"]);
        engine.stop();
    });
}

/// A signal ends the view, and the terminal works as before.
#[towpath_testenv::needs("tmux")]
#[test]
fn a_signal_restores_the_terminal() {
    let directory = tempfile::tempdir().unwrap();
    let screen = Screen::run(directory.path(), &directory.path().join("none"), "");
    screen.shows(&["NO ENGINE", "no engine is there"]);
    screen.keys(&["C-c"]);
    let text = screen.shows(&["ended: 0"]);
    // The alternate screen is gone.
    assert!(!text.contains("towpath top"), "{text}");
}

/// Control characters in the engine's answers are shown as escapes.
#[towpath_testenv::needs("tmux")]
#[test]
fn a_hostile_engine_does_not_reach_the_terminal() {
    use std::io::{Read, Write};
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut length = [0; 4];
            while stream.read_exact(&mut length).is_ok() {
                let mut request = vec![0; u32::from_le_bytes(length) as usize];
                if stream.read_exact(&mut request).is_err() {
                    break;
                }
                let request: Value = serde_json::from_slice(&request[1..]).unwrap();
                let name = request["do"].as_str().unwrap().trim_start_matches("show-").to_owned();
                let evil = "\u{1b}[2J\u{1b}]0;evil\u{7}\u{9b}31m";
                let answer = serde_json::json!({
                    "towpath": 1, "answer": name, "stats": { "packets": evil, "dropped_by": { evil: 3 } },
                    "ports": [{ "name": format!("lan{evil}"), "driver": evil, "lost": [[evil, 1]] }], "queues": evil,
                });
                let answer = answer.to_string();
                let mut message = (answer.len() as u32 + 1).to_le_bytes().to_vec();
                message.push(1);
                message.extend(answer.as_bytes());
                let _ = stream.write_all(&message);
            }
        }
    });
    let screen = Screen::run(directory.path(), &socket, "");
    screen.shows(&["lan\\u{1b}[2J\\u{1b}]0;evil\\u{7}\\u{9b}31m", "[1 ports]"]);
    screen.keys(&["6"]);
    screen.shows(&["port lan\\u{1b}[2J", "[6 drops]"]);
    let title = screen.tmux(&["display-message", "-p", "#{pane_title}"]);
    assert!(!title.contains("evil"), "{title}");
}

#[towpath_testenv::needs(netns, "ping")]
#[test]
fn one_sample_has_rates() {
    within(|| {
        let (left, _right) = machines();
        let files =
            files(BRIDGE, "add 100 allow layer2 mac-type arp\nadd 200 allow ip from any to any keep-state\n");
        let engine = Engine::start(files.path());
        let socket = files.path().join("ctl.sock");
        let once = |more: &[&str]| {
            let output = Command::new(env!("CARGO_BIN_EXE_towpath"))
                .args(["top", "--once", "--interval", "0.3", "--socket", socket.to_str().unwrap()])
                .args(more)
                .output()
                .unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            String::from_utf8(output.stdout).unwrap()
        };
        let pings = left.start(ping);
        let mut object = Value::Null;
        until(|| {
            object = serde_json::from_str(&once(&["--json"])).unwrap();
            object["totals"]["packets_per_second"].as_f64().is_some_and(|rate| rate > 0.0)
                && object["flows"][0]["packets_per_second"].as_f64().is_some_and(|rate| rate > 0.0)
        });
        assert!(object["seconds"].as_f64().unwrap() >= 0.3);
        assert_eq!(object["ports"].as_array().unwrap().len(), 2, "{object}");
        assert!(object["rules"][1]["bits_per_second"].is_number(), "{object}");
        assert_eq!(object["flows"][0]["flow"].as_str().unwrap().split(' ').next(), Some("icmp"), "{object}");
        assert!(object["notes"]["muxes"].as_str().unwrap().contains("no multiplexor"), "{object}");
        let text = once(&["--count", "1"]);
        for word in ["packets ", "\nports\n", "\nflows\n", "\ndrops\n", "keep-state", "icmp 10.0.0.1"] {
            assert!(text.contains(word), "{word}: {text}");
        }
        drop(pings);
        engine.stop();
        let output = Command::new(env!("CARGO_BIN_EXE_towpath"))
            .args(["top", "--once", "--socket", "/no/such"])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(5));
        // Without a terminal.
        let output = Command::new(env!("CARGO_BIN_EXE_towpath")).arg("top").output().unwrap();
        assert_eq!(output.status.code(), Some(64));
        assert!(String::from_utf8_lossy(&output.stderr).contains("--once"));
    });
}

fn ping() {
    let _ = Command::new("ping").args(["-i", "0.05", "-w", "20", "-q", "10.0.0.2"]).output();
}
