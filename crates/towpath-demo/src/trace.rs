//! A live trace of one flow: `towpath ctl trace` writes its packets with their verdicts, as pcapng.

use std::time::Duration;

use serde::Serialize;
use towpath_wire::LinkType;

use super::network::{GREEDY, Network};
use super::process::Process;
use super::{Failure, Stop, doing};

/// Time in which the trace must have its packets.
const PATIENCE: Duration = Duration::from_secs(20);
/// Packets kept for the screen.
const SHOWN: usize = 6;

/// Packets of a trace, by verdict.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Traced {
    pub(crate) packets: u64,
    pub(crate) passed: u64,
    pub(crate) dropped: u64,
    /// The last packets: port, verdict.
    #[serde(skip)]
    pub(crate) last: Vec<String>,
}

/// A running trace.
pub(super) struct Trace {
    process: Process,
    file: std::path::PathBuf,
}

impl Trace {
    /// Traces the connections of the source that exceeds its limit.
    pub(super) fn start(network: &Network) -> Result<Self, Failure> {
        let flow = format!("tcp {GREEDY} any");
        let socket = network.engine_socket();
        let socket = socket.to_str().ok_or_else(|| Failure::Broken("a path is not UTF-8".into()))?;
        let words = ["ctl", "--socket", socket, "trace", "--flow", &flow, "--out", "trace.pcapng"];
        let process = Process::start(&network.outside, network.files.path(), "trace", &words)?;
        Ok(Self { process, file: network.files.path().join("trace.pcapng") })
    }

    /// Waits until the engine traces: the file is created then.
    pub(super) fn wait(&mut self, stop: &Stop) -> Result<(), Failure> {
        let file = self.file.clone();
        self.process.wait_until(stop, |_| file.exists())
    }

    /// Ends the trace when it has a dropped packet and `passed` others.
    pub(super) fn end(mut self, stop: &Stop, passed: u64) -> Result<Traced, Failure> {
        let mut traced = Traced::default();
        stop.until(PATIENCE, || {
            traced = read(&std::fs::read(&self.file).map_err(doing("the trace"))?);
            Ok(traced.passed >= passed && traced.dropped > 0)
        })?;
        self.process.stop()?;
        Ok(traced)
    }
}

/// Counts the packets of a pcapng capture by the verdicts in their comments.
fn read(capture: &[u8]) -> Traced {
    let mut traced = Traced::default();
    let mut rest = capture;
    while let Some((block, after)) = block(rest) {
        rest = after;
        if let Some((frame, comment)) = packet(block) {
            traced.packets += 1;
            // "rule 510: pass, out by lan"
            let verdict = comment.split_once(": ").map_or(&*comment, |(_, verdict)| verdict);
            traced.passed += u64::from(verdict.starts_with("pass"));
            traced.dropped += u64::from(verdict.starts_with("drop"));
            if let Ok(packet) = towpath_wire::parse(LinkType::ETHERNET, frame, frame.len() as u32) {
                let comment = comment.trim_start_matches("rule ");
                traced.last.push(format!(":{} > :{} {comment}", packet.src_port, packet.dst_port));
            }
        }
    }
    let shown = traced.last.len().saturating_sub(SHOWN);
    traced.last.drain(..shown);
    traced
}

/// The first block, and the bytes after it.
fn block(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let length = u32::from_le_bytes(bytes.get(4..8)?.try_into().ok()?) as usize;
    if length < 12 {
        return None;
    }
    Some((bytes.get(..length)?, bytes.get(length..)?))
}

/// The bytes and the comment of an enhanced packet block (pcapng, section 4.3).
fn packet(block: &[u8]) -> Option<(&[u8], String)> {
    let word = |at: usize| Some(u32::from_le_bytes(block.get(at..at + 4)?.try_into().ok()?));
    if word(0)? != 6 {
        return None;
    }
    let length = word(20)? as usize;
    let frame = block.get(28..28 + length)?;
    let mut options = block.get(28 + length.next_multiple_of(4)..)?;
    loop {
        let half = |at: usize| Some(u16::from_le_bytes(options.get(at..at + 2)?.try_into().ok()?));
        let (code, length) = (half(0)?, usize::from(half(2)?));
        let value = options.get(4..4 + length)?;
        match code {
            0 => return None,
            1 => return Some((frame, String::from_utf8_lossy(value).into_owned())),
            _ => options = options.get(4 + length.next_multiple_of(4)..)?,
        }
    }
}

#[cfg(test)]
mod tests {
    use towpath_port::Frame;
    use towpath_port::pcap::{Blocks, Options};
    use towpath_wire::LinkType;

    use super::read;

    #[test]
    fn verdicts_are_counted_while_the_capture_is_written() {
        let (mut blocks, mut capture) = (Blocks::new(), Vec::new());
        blocks.section(&mut capture).unwrap();
        for comment in ["rule 510: pass, out by lan", "rule 500: drop, over_limit", "pass", "rule 9: reject"]
        {
            let frame = Frame::new(&[0x5a; 61], LinkType::ETHERNET);
            let options = Options { comment: Some(comment), flags: Some(1), dropped: None };
            blocks.packet(&mut capture, frame, &options).unwrap();
        }
        let all = read(&capture);
        assert_eq!((all.packets, all.passed, all.dropped), (4, 2, 1));
        // Without the end of the last block.
        let part = read(&capture[..capture.len() - 1]);
        assert_eq!((part.packets, part.passed, part.dropped), (3, 2, 1));
    }
}
