//! What uses the engine and its programs beside the packets: clients of the mux, inspectors that are killed, replays and sends.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::engine::{Engine, MUX, PATIENCE};
use super::traffic::joined;
use crate::hostile::within;
use crate::packet;
use crate::subject::replay::binary;

/// Requests of a connection that are not answered yet, at most.
const AHEAD: u64 = 8;
/// Bytes of most requests, and of each 16th, which leaves without a copy.
const SHORT: usize = 40;
const LONG: usize = 40_000;
/// Time between two batches of requests.
const PAUSE: Duration = Duration::from_millis(5);
/// Packets of the replayed capture, and bytes of the sent file.
pub(super) const PACKETS: u64 = 20_000;
pub(super) const FILE: usize = 8 << 20;

/// A connection to the mux. Every request is answered once, in order.
pub(super) struct Client {
    stop: Arc<AtomicBool>,
    pub(super) answered: Arc<AtomicU64>,
    thread: JoinHandle<Result<u64>>,
}

impl Client {
    pub(super) fn start(engine: &Engine) -> Result<Self> {
        let connect = || TcpStream::connect(("127.0.0.1", MUX)).context("connecting to the mux");
        let stream = within(engine.netns(), connect)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (over, count) = (Arc::clone(&stop), Arc::clone(&answered));
        let thread = thread::spawn(move || ask(stream, &over, &count));
        Ok(Self { stop, answered, thread })
    }

    /// Waits until more requests are answered.
    pub(super) fn goes_on(&self) -> Result<()> {
        let (before, begun) = (self.answered.load(Ordering::Relaxed), Instant::now());
        while self.answered.load(Ordering::Relaxed) < before + 2 * AHEAD {
            ensure!(!self.thread.is_finished(), "a connection of the mux has ended");
            ensure!(begun.elapsed() < PATIENCE, "a request of the mux is not answered");
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Returns the number of requests, each of which was answered.
    pub(super) fn finish(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        joined(self.thread)
    }
}

fn ask(mut stream: TcpStream, stop: &AtomicBool, answered: &AtomicU64) -> Result<u64> {
    let (mut sent, mut got) = (0_u64, 0_u64);
    let mut message = vec![0; 4 + LONG];
    let mut answer = vec![0; 4 + LONG];
    loop {
        let over = stop.load(Ordering::Relaxed);
        while !over && sent < got + AHEAD {
            stream.write_all(request(&mut message, sent))?;
            sent += 1;
        }
        while got < sent {
            let expected = request(&mut message, got);
            let answer = &mut answer[..expected.len()];
            stream.read_exact(answer).with_context(|| format!("the answer to request {got}"))?;
            ensure!(answer == expected, "request {got} got another answer");
            got += 1;
            answered.store(got, Ordering::Relaxed);
        }
        if over {
            return Ok(got);
        }
        thread::sleep(PAUSE);
    }
}

/// The request with this number.
fn request(message: &mut [u8], number: u64) -> &[u8] {
    let len = if number % 16 == 15 { LONG } else { SHORT };
    message[..4].copy_from_slice(&(len as u32).to_be_bytes());
    message[4..12].copy_from_slice(&number.to_le_bytes());
    &message[..4 + len]
}

/// An inspector of the first queue, which this program starts.
pub(super) struct Inspector(Child);

impl Inspector {
    pub(super) fn start(engine: &Engine) -> Result<Self> {
        let child = Command::new(binary()?)
            .args(["inspect", "--queue", "1", "--match", "nothing-like-this", "--verdict", "drop"])
            .env("TOWPATH_SOCKET", engine.directory().join("q1.sock"))
            .stdout(Stdio::null())
            .spawn()
            .context("starting towpath inspect")?;
        Ok(Self(child))
    }

    pub(super) fn pid(&self) -> Pid {
        Pid::from_child(&self.0)
    }

    /// Returns an error if it has ended.
    pub(super) fn lives(&mut self) -> Result<()> {
        let ended = self.0.try_wait()?;
        ensure!(ended.is_none(), "an inspector has ended: {ended:?}");
        Ok(())
    }
}

impl Drop for Inspector {
    fn drop(&mut self) {
        // Both fail only if it has been waited for already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Kills a process with SIGKILL.
pub(super) fn kill(pid: i32) -> Result<()> {
    kill_process(Pid::from_raw(pid).context("a process id")?, Signal::KILL).context("killing a process")
}

/// A capture and a file, for replays and sends.
pub(super) struct Files {
    capture: PathBuf,
    rules: PathBuf,
    file: PathBuf,
    copy: PathBuf,
}

impl Files {
    pub(super) fn make(directory: &Path) -> Result<Self> {
        let at = |name: &str| directory.join(name);
        let files =
            Self { capture: at("in.pcap"), rules: at("replay.ipfw"), file: at("sent"), copy: at("received") };
        // Classic pcap (draft-ietf-opsawg-pcap): magic number, version 2.4, snapshot length, Ethernet.
        let head = [0xa1b2_c3d4_u32, 2 | 4 << 16, 0, 0, 65_535, 1];
        let mut bytes: Vec<u8> = head.iter().flat_map(|word| word.to_le_bytes()).collect();
        let mut frame = packet::frame(200);
        for number in 0..PACKETS as u32 {
            packet::set_flow(&mut frame, number % 1000);
            let length = frame.len() as u32;
            let record = [1_700_000_000 + number / 1000, number % 1000 * 1000, length, length];
            bytes.extend(record.iter().flat_map(|word| word.to_le_bytes()));
            bytes.extend_from_slice(&frame);
        }
        fs::write(&files.capture, bytes)?;
        fs::write(
            &files.rules,
            "add 10 allow udp from any to any keep-state\nadd 20 deny ip from any to any\n",
        )?;
        let pattern = |at: u64| (at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
        fs::write(&files.file, (0..FILE as u64).map(pattern).collect::<Vec<_>>())?;
        Ok(files)
    }

    /// Replays the capture and checks that every packet has one outcome.
    pub(super) fn replay(&self) -> Result<()> {
        let mut command = Command::new(binary()?);
        command.args(["replay", "--json", "--rules"]).arg(&self.rules).arg(&self.capture);
        let said = command.output().context("starting towpath replay")?;
        ensure!(said.status.success(), "towpath replay: {}", String::from_utf8_lossy(&said.stderr).trim());
        let report: Value =
            serde_json::from_slice(&said.stdout).context("reading the report of the replay")?;
        let counts = ["packets", "passed", "dropped", "rejected"].map(|name| report[name].as_u64());
        ensure!(counts == [Some(PACKETS), Some(PACKETS), Some(0), Some(0)], "a replay: {counts:?}");
        Ok(())
    }

    /// Sends the file. Both ends compare its checksum.
    pub(super) fn send(&self, engine: &Engine) -> Result<()> {
        let mut receiver = engine.command(&binary()?)?;
        receiver.args(["recv", "--listen", "127.0.0.1:0", "--out"]).arg(&self.copy);
        let mut receiver = receiver.stdout(Stdio::null()).stderr(Stdio::piped()).spawn()?;
        let mut said = BufReader::new(receiver.stderr.take().context("no standard error")?);
        let mut line = String::new();
        said.read_line(&mut line)?;
        let address = line.strip_prefix("listening on ").with_context(|| format!("towpath recv: {line}"))?;
        let mut sender = engine.command(&binary()?)?;
        sender.arg("send").arg(&self.file).args(["--mode", "zerocopy", "--to", address.trim()]);
        let sent = sender.output()?;
        let mut rest = String::new();
        said.read_to_string(&mut rest)?;
        let received = receiver.wait()?;
        ensure!(sent.status.success(), "towpath send: {}", String::from_utf8_lossy(&sent.stderr).trim());
        ensure!(received.success(), "towpath recv: {rest}");
        Ok(())
    }
}
