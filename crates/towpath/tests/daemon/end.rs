//! The end of `towpath run`: the engine waits for the inspectors' verdicts, until a second signal.

use std::net::UdpSocket;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use towpath_port::netns::{Host, settled, veth, within};
use towpath_ring::Consumer;

use crate::bridged::BRIDGE;
use crate::support::{Control, Log, until};

/// Much longer than an end without a wait, much shorter than the wait for the inspector.
const PATIENCE: Duration = Duration::from_secs(60);

const WAITS: &str = r#"
[queue.1]
socket = "q1.sock"
deadline = 3000
[engine]
drain = 3000
"#;

#[towpath_testenv::needs(netns)]
#[test]
fn a_second_signal_waits_for_no_inspector() {
    within(|| {
        let left = Host::new();
        veth("wan", "l0");
        veth("lan", "r0");
        left.take("l0", "10.0.0.1/24");
        settled("wan");
        let directory = tempfile::tempdir().unwrap();
        let path = |name: &str| directory.path().join(name);
        std::fs::write(path("t.toml"), format!("{BRIDGE}{WAITS}")).unwrap();
        std::fs::write(path("r.ipfw"), "add inspect 1 ip from any to any\n").unwrap();
        let mut engine = Command::new(env!("CARGO_BIN_EXE_towpath"))
            .args(["run", path("t.toml").to_str().unwrap()])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Log::of(&mut engine);
        let control = Control::of(directory.path());
        until(|| control.ctl("show stats").status.success());
        let _inspector = Consumer::attach(path("q1.sock")).unwrap();
        // It has been welcomed; the engine's thread may not know of it yet.
        until(|| control.json("show queues --json")["queues"][0]["inspectors"] == 1);
        left.run(|| {
            towpath_port::netns::ip("neigh add 10.0.0.2 lladdr 02:00:00:00:00:02 dev l0");
            UdpSocket::bind("10.0.0.1:0").unwrap().send_to(b"held", "10.0.0.2:9").unwrap();
        });
        until(|| control.json("show queues --json")["queues"][0]["open"].as_u64() > Some(0));
        // If the engine has not handled the first signal when the second arrives, a third is necessary.
        let begun = Instant::now();
        while engine.try_wait().unwrap().is_none() {
            if begun.elapsed() > PATIENCE {
                engine.kill().unwrap();
            } else {
                kill_process(Pid::from_child(&engine), Signal::TERM).unwrap();
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        let (said, status) = (log.whole(), engine.wait().unwrap());
        assert!(status.success(), "{said}");
        assert!(said.contains("second stop signal"), "{said}");
        assert!(said.contains("inspectors still held packets after"), "{said}");
    });
}
