//! A file through the engine: `towpath send` on one host, `towpath recv` on the other.

use std::fmt;
use std::io::Write;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::digits::bytes;
use super::network::{Ends, FILES};
use super::process::Process;
use super::{Failure, Stop, doing};

/// Timeout of the transfer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Result of the transfer.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Transfer {
    pub(crate) bytes: u64,
    /// The checksums of both sides are equal.
    pub(crate) whole: bool,
    pub(crate) bytes_per_second: f64,
    /// Bytes sent without a copy, and bytes that the kernel copied after all.
    pub(crate) zerocopy_bytes: u64,
    pub(crate) copied_bytes: u64,
    /// Bytes sent with a copy.
    pub(crate) plain_bytes: u64,
    /// The main reason for copies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) plain_because: Option<String>,
    pub(crate) sender_cpu_seconds: f64,
    pub(crate) receiver_cpu_seconds: f64,
}

impl Transfer {
    /// Returns true if the transfer met every expectation.
    pub(super) fn well(&self) -> bool {
        self.whole && self.zerocopy_bytes + self.plain_bytes >= self.bytes
    }
}

impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let same = if self.whole { "intact" } else { "NOT intact" };
        let speed = bytes(self.bytes_per_second as u64);
        write!(f, "{} at {speed}/s, {same}; ", bytes(self.bytes))?;
        let lent = self.zerocopy_bytes.saturating_sub(self.copied_bytes);
        if lent > 0 && lent >= self.plain_bytes {
            return write!(f, "{} zero-copy", bytes(lent));
        }
        write!(f, "{}", because(self.plain_because.as_deref()))
    }
}

/// The summary that `towpath send` prints.
fn because(word: Option<&str>) -> &str {
    match word {
        // The policy probes whether zero copy pays.
        Some("copying" | "probing") => "this path copies",
        Some("unarmed") => "no zero-copy socket",
        Some("budget" | "no-buffers") => "copied: ulimit -l",
        Some(word) => word,
        None => "this path copies",
    }
}

/// Sends a file of `mib` MiB.
pub(super) fn send(ends: Ends<'_>, stop: &Stop, megabytes: u64) -> Result<Transfer, Failure> {
    let directory = ends.files;
    let (original, copy) = (directory.join("file.bin"), directory.join("copy.bin"));
    write(&original, megabytes).map_err(doing("the file to send"))?;
    let address = ends.address(FILES);
    let mut receiver = Process::start(
        ends.inside,
        directory,
        "recv",
        &["recv", "--listen", &address, "--out", "copy.bin", "--json"],
    )?;
    receiver.wait_until(stop, |receiver| receiver.said().contains("listening on"))?;
    let address = receiver.listening()?.to_string();
    let sender =
        Process::start(ends.outside, directory, "send", &["send", "file.bin", "--to", &address, "--json"])?;
    let said = sender.answer(stop, PATIENCE)?;
    receiver.answer(stop, PATIENCE)?;
    let said: Value =
        serde_json::from_str(&said).map_err(|error| Failure::Broken(format!("towpath send: {error}")))?;
    let number = |name: &str| said[name].as_u64().unwrap_or(0);
    let seconds = |name: &str| said[name].as_f64().unwrap_or(0.0);
    let whole = std::fs::read(&original).map_err(doing("the file"))?
        == std::fs::read(&copy).map_err(doing("the copy"))?;
    Ok(Transfer {
        bytes: number("bytes"),
        whole,
        bytes_per_second: seconds("bytes_per_second"),
        zerocopy_bytes: number("zerocopy_bytes"),
        copied_bytes: number("copied_bytes"),
        plain_bytes: number("plain_bytes"),
        plain_because: most(&said["plain"]),
        sender_cpu_seconds: seconds("sender_cpu_seconds"),
        receiver_cpu_seconds: seconds("receiver_cpu_seconds"),
    })
}

/// The reason with the most bytes.
fn most(reasons: &Value) -> Option<String> {
    let reasons = reasons.as_object()?.iter();
    reasons.max_by_key(|(_, bytes)| bytes.as_u64()).map(|(reason, _)| reason.clone())
}

/// Content that differs at every offset.
fn write(path: &std::path::Path, megabytes: u64) -> std::io::Result<()> {
    let mut file = std::fs::File::create(path)?;
    let mut piece = Vec::with_capacity(1 << 20);
    for megabyte in 0..megabytes {
        piece.clear();
        for word in 0..(1_u64 << 17) {
            piece.extend_from_slice(
                &((megabyte << 17 | word).wrapping_mul(0x9e37_79b9_7f4a_7c15)).to_le_bytes(),
            );
        }
        file.write_all(&piece)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{Transfer, most};

    #[test]
    fn copied_bytes_have_a_reason() {
        let rows = [
            (60, 0, json!({"small": 4}), "kB zero-copy"),
            (4, 4, json!({"copying": 20, "probing": 40}), "this path copies"),
            (0, 0, json!({"unarmed": 64}), "no zero-copy socket"),
            (8, 0, json!({"budget": 56}), "copied: ulimit -l"),
            (0, 0, json!({"stuck": 64}), "stuck"),
        ];
        for (zerocopy_bytes, copied_bytes, plain, says) in rows {
            let plain_bytes = 64 - zerocopy_bytes;
            let transfer = Transfer {
                bytes: 64,
                whole: true,
                zerocopy_bytes,
                copied_bytes,
                plain_bytes,
                plain_because: most(&plain),
                ..Transfer::default()
            };
            assert!(transfer.to_string().ends_with(says), "{transfer}");
            assert!(transfer.well());
        }
    }
}
