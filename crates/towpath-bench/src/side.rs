//! A peer process of a measurement, which runs this program.
//!
//! A side is started by a hidden subcommand. It writes lines to its standard output, reads lines from its standard input, and is killed
//! when its parent exits.

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

    /// Reads the next line without its newline.
    pub(crate) fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        let read = self.stdout.read_line(&mut line).with_context(|| format!("reading from {}", self.role))?;
        if read == 0 {
            let status = self.process.wait()?;
            bail!("the side {} ended early ({status})", self.role);
        }
        Ok(line.trim_end().to_owned())
    }

    /// Reads the remaining output until the process ends.
    pub(crate) fn rest(&mut self) -> Result<String> {
        let mut text = String::new();
        self.stdout.read_to_string(&mut text).with_context(|| format!("reading from {}", self.role))?;
        Ok(text)
    }

    /// Reads the next line as a number.
    pub(crate) fn number(&mut self) -> Result<f64> {
        let line = self.line()?;
        line.parse().with_context(|| format!("the side {} printed {line:?} instead of a number", self.role))
    }

    pub(crate) fn tell(&mut self, line: &str) -> Result<()> {
        writeln!(self.stdin, "{line}").with_context(|| format!("telling {} to {line}", self.role))
    }

    /// Waits for the process to exit.
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
        // Both calls fail only if the process has been waited for already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Makes `fd` inheritable by the next side. The descriptor keeps its number, which is returned.
pub(crate) fn inherit(fd: &impl AsFd) -> Result<String> {
    let fd = fd.as_fd();
    fcntl_setfd(fd, fcntl_getfd(fd)? - FdFlags::CLOEXEC)?;
    Ok(fd.as_raw_fd().to_string())
}
