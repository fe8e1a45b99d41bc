//! The other side of a measurement: this program again, as a second process.
//!
//! A side is started with the words of a hidden subcommand, speaks lines on its standard output, listens to lines on
//! its standard input, and dies with the process that started it.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, Result, bail};
use rustix::io::{FdFlags, fcntl_getfd, fcntl_setfd};

pub(crate) struct Side {
    role: String,
    process: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
}

impl Side {
    /// Starts `towpath-bench side WORDS...` with `env` added to its environment.
    pub(crate) fn start(words: &[String], env: &[(&str, String)]) -> Result<Self> {
        let role = words.first().cloned().unwrap_or_default();
        let program = std::env::current_exe().context("finding this program")?;
        let mut process = Command::new(program)
            .arg("side")
            .args(words)
            .envs(env.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting the side {role}"))?;
        let (Some(stdin), Some(stdout)) = (process.stdin.take(), process.stdout.take()) else {
            bail!("the side {role} has no pipes");
        };
        Ok(Self { role, process, stdin, stdout: BufReader::new(stdout) })
    }

    pub(crate) fn pid(&self) -> u32 {
        self.process.id()
    }

    /// The next line that the side prints, without its end.
    pub(crate) fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        let read = self.stdout.read_line(&mut line).with_context(|| format!("reading from {}", self.role))?;
        if read == 0 {
            let status = self.process.wait()?;
            bail!("the side {} ended early ({status})", self.role);
        }
        Ok(line.trim_end().to_owned())
    }

    /// All that it still prints, until it ends.
    pub(crate) fn rest(&mut self) -> Result<String> {
        let mut text = String::new();
        self.stdout.read_to_string(&mut text).with_context(|| format!("reading from {}", self.role))?;
        Ok(text)
    }

    /// The next line, as a number.
    pub(crate) fn number(&mut self) -> Result<f64> {
        let line = self.line()?;
        line.parse().with_context(|| format!("the side {} said {line:?} where a number was due", self.role))
    }

    pub(crate) fn tell(&mut self, line: &str) -> Result<()> {
        writeln!(self.stdin, "{line}").with_context(|| format!("telling {} to {line}", self.role))
    }

    /// Waits for the side to end by itself.
    pub(crate) fn finish(mut self) -> Result<()> {
        let status = self.process.wait()?;
        if !status.success() {
            bail!("the side {} failed ({status})", self.role);
        }
        Ok(())
    }
}

impl Drop for Side {
    fn drop(&mut self) {
        // Both fail only when the process has ended and was waited for.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Lets the next side inherit `fd`; it finds it under the same number.
pub(crate) fn inherit(fd: &impl AsFd) -> Result<String> {
    let fd = fd.as_fd();
    fcntl_setfd(fd, fcntl_getfd(fd)? - FdFlags::CLOEXEC)?;
    Ok(fd.as_raw_fd().to_string())
}
