//! Runs the `towpath` program for the tests of this crate, of `towpath-py` and of `towpath-nfqueue`.
// Each test program uses a part of it.
#![allow(dead_code)]

use std::net::UdpSocket;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};

use towpath_port::netns::{ip, until};

/// The `towpath` command in the target directory of these tests; built if missing.
pub(crate) fn towpath() -> Command {
    let deps = std::env::current_exe().expect("this test");
    let profile = deps.ancestors().nth(2).expect("target/PROFILE");
    let program = profile.join("towpath");
    if !program.exists() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "towpath", "--bin", "towpath", "--target-dir"]);
        cargo.arg(profile.parent().expect("target"));
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        let status = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().expect("cargo starts");
        assert!(status.success() && program.exists(), "towpath can be built");
    }
    Command::new(program)
}

/// An engine with a TUN port in this network namespace. It makes a state for each flow.
pub(crate) struct Running {
    child: Child,
    directory: tempfile::TempDir,
}

impl Running {
    pub(crate) fn start() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let write = |name: &str, text: &str| {
            std::fs::write(directory.path().join(name), text).expect("a file");
        };
        write(
            "t.toml",
            "rules = \"r.ipfw\"\nmonitor = \"t0\"\n[port.t0]\ndriver = \"tun\"\n[control]\nsocket = \"ctl.sock\"\n",
        );
        write("r.ipfw", "add 100 allow log udp from any to any keep-state\n");
        let child = towpath()
            .arg("run")
            .arg(directory.path().join("t.toml"))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("towpath starts");
        let engine = Self { child, directory };
        until(|| engine.ring().exists());
        ip("address add 10.9.0.1/24 dev t0");
        ip("link set t0 up");
        engine
    }

    /// The ring for dumps and events.
    pub(crate) fn ring(&self) -> PathBuf {
        self.directory.path().join("ctl.sock.ring")
    }

    /// Sends a datagram to this port, which makes a state.
    pub(crate) fn flow(&self, port: u16) {
        let socket = UdpSocket::bind("10.9.0.1:0").expect("a socket");
        socket.send_to(b"payload", ("10.9.0.2", port)).expect("a datagram");
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
