//! Shared code of tests of a running engine: `towpath ctl` on its control socket.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;

/// The control socket of an engine.
pub(crate) struct Control {
    socket: PathBuf,
}

impl Control {
    /// The socket of a configuration in `directory` with `socket = "ctl.sock"`.
    pub(crate) fn of(directory: &Path) -> Self {
        Self { socket: directory.join("ctl.sock") }
    }

    /// Output of `towpath ctl` with these words.
    pub(crate) fn ctl(&self, words: &str) -> Output {
        Command::new(env!("CARGO_BIN_EXE_towpath"))
            .args(["ctl", "--socket", self.socket.to_str().unwrap()])
            .args(words.split_whitespace())
            .output()
            .unwrap()
    }

    /// The same for words with `--json`, which must succeed. Repeated if the engine is too busy.
    pub(crate) fn json(&self, words: &str) -> Value {
        let mut output = self.ctl(words);
        for _ in 0..10 {
            if !String::from_utf8_lossy(&output.stderr).contains("did not answer in time") {
                break;
            }
            output = self.ctl(words);
        }
        assert!(output.status.success(), "{words}: {}", String::from_utf8_lossy(&output.stderr));
        serde_json::from_slice(&output.stdout).unwrap()
    }
}
