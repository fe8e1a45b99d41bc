//! `towpath confine`: applies a [`Spec`] to this process and executes its program.
//!
//! Order: everything that needs a privilege precedes the change of the user, and the program is executed last. The standard
//! input is the socket on which the spec arrives. Its duplicate, closed on exec(2), reports an error; its end without a report
//! means that the program runs.

use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::fs::{Mode, OFlags};
use rustix::process::{Signal, getppid, set_parent_process_death_signal};
use rustix::thread::{
    CapabilitySet, CapabilitySets, capabilities, clear_ambient_capability_set,
    remove_capability_from_bounding_set, set_capabilities, set_no_new_privs,
};
use towpath_port::credentials;

use super::spec::{Identity, Spec};
use crate::sandbox::program::Paths;

/// Limit on the bytes of a spec: the kernel's limit on arguments and environment is of this order.
const SPEC_MAX: u64 = 8 << 20;

/// What failed, and why. Without a step, the program could not be executed.
#[derive(Debug)]
pub(super) struct Failed {
    step: &'static str,
    error: io::Error,
}

/// Reads a spec from standard input, applies it and executes the program. Returns the exit code if this fails.
pub fn confine() -> u8 {
    match socket() {
        Ok(mut status) => {
            let failed = match read(&mut status) {
                Ok(spec) => execute(&spec),
                Err(error) => Failed { step: "reading the description of the process", error },
            };
            // The starter may have ended.
            let _ = status.write_all(&failed.to_bytes());
        }
        Err(error) => {
            crate::output::say(format_args!("towpath: confine: {error}; the engine starts this command"))
        }
    }
    // As shells: the program cannot be executed.
    126
}

/// The socket of standard input, which becomes `/dev/null`.
fn socket() -> io::Result<UnixStream> {
    // Also marks the duplicate; 0, 1 and 2 stay.
    let socket = UnixStream::from(rustix::io::fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?);
    socket.peer_addr()?;
    rustix::stdio::dup2_stdin(std::fs::File::open("/dev/null")?)?;
    Ok(socket)
}

fn read(socket: &mut UnixStream) -> io::Result<Spec> {
    let mut text = Vec::new();
    socket.take(SPEC_MAX).read_to_end(&mut text)?;
    Ok(serde_json::from_slice(&text)?)
}

/// Returns only if a step fails.
fn execute(spec: &Spec) -> Failed {
    let (first, rest) =
        spec.words.split_first().map_or(("", &[][..]), |(first, rest)| (first.as_str(), rest));
    // Opened before the user changes: the directory of a program that the configuration of root names may be closed to its user.
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let opened = first.contains('/').then(|| rustix::fs::open(first, flags, Mode::empty()).ok()).flatten();
    if let Err(failed) = enter(spec) {
        return failed;
    }
    // Nothing but the execution follows.
    if let Err(error) = spec.sandbox.refuse_calls() {
        return Failed { step: "refusing system calls (`seccomp` of the sandbox)", error };
    }
    let run = |program: &str| {
        let environment = spec.environment.iter().map(|(name, value)| (name, value));
        Command::new(program).arg0(first).args(rest).env_clear().envs(environment).exec()
    };
    let mut error = match first {
        // By `/proc/self/exe` and not by its path, for the same reason.
        "towpath" => run("/proc/self/exe"),
        program => run(program),
    };
    if let Some(opened) = opened.filter(|_| error.kind() == io::ErrorKind::PermissionDenied) {
        // Fails for a script, whose interpreter cannot open the descriptor. The first error is then reported.
        let again = run(&format!("/proc/self/fd/{}", opened.as_raw_fd()));
        if again.kind() != io::ErrorKind::NotFound {
            error = again;
        }
    }
    Failed { step: "", error }
}

fn enter(spec: &Spec) -> Result<(), Failed> {
    let failed = |step| move |error: rustix::io::Errno| Failed { step, error: error.into() };
    let system = |step| move |error: io::Error| Failed { step, error };
    match credentials::close_on_exec() {
        // An older kernel. Towpath's descriptors are closed on exec(2) in any case.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOSYS.raw_os_error()) => {}
        done => done.map_err(system("closing descriptors"))?,
    }
    if let Some(cgroup) = &spec.cgroup {
        // "0" is the process that writes (Documentation/admin-guide/cgroup-v2.rst).
        std::fs::write(cgroup.join("cgroup.procs"), "0").map_err(system("joining the cgroup"))?;
    }
    spec.sandbox
        .enter_namespaces()
        .map_err(system("entering new namespaces (`namespaces` of the sandbox)"))?;
    let paths = spec.sandbox.open_paths(spec).map_err(system("opening `read` and `write` of the sandbox"))?;
    for limit in &spec.limits {
        limit.apply().map_err(failed("setting a resource limit"))?;
    }
    // Only a process with CAP_SETPCAP can reduce the bounding set. Without it, no_new_privs has the same effect.
    if capabilities(None)
        .map_err(failed("reading the capabilities"))?
        .effective
        .contains(CapabilitySet::SETPCAP)
    {
        for capability in CapabilitySet::all().iter() {
            // EINVAL: the kernel does not know it.
            let _ = remove_capability_from_bounding_set(capability);
        }
    }
    if let Some(Identity { user, group }) = spec.identity {
        credentials::set_user(user, group).map_err(system("setting the user"))?;
    }
    clear_ambient_capability_set().map_err(failed("clearing the capabilities"))?;
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    set_capabilities(None, sets).map_err(failed("clearing the capabilities"))?;
    set_no_new_privs(true).map_err(failed("setting no_new_privs"))?;
    if let Some(parent) = spec.dies_with {
        // After the change of the user, which clears it.
        set_parent_process_death_signal(Some(Signal::KILL))
            .map_err(failed("setting the parent-death signal"))?;
        if getppid().is_none_or(|pid| pid.as_raw_pid().cast_unsigned() != parent) {
            let error = io::Error::other("the starting process has ended");
            return Err(Failed { step: "setting the parent-death signal", error });
        }
    }
    paths.map_or(Ok(()), Paths::restrict).map_err(system("restricting the files (Landlock)"))
}

impl Failed {
    /// errno(3) and the step.
    fn to_bytes(&self) -> Vec<u8> {
        let errno = self.error.raw_os_error().unwrap_or(0);
        let text = match errno {
            0 if self.step.is_empty() => self.error.to_string(),
            0 => format!("{}: {}", self.step, self.error),
            _ => self.step.to_owned(),
        };
        [&errno.to_ne_bytes(), text.as_bytes()].concat()
    }

    /// The error of a report: [`to_bytes`](Self::to_bytes). `None`: the program runs.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<io::Error> {
        let (errno, step) = bytes.split_first_chunk()?;
        let step = String::from_utf8_lossy(step);
        Some(match (i32::from_ne_bytes(*errno), &*step) {
            (0, step) => io::Error::other(step.to_owned()),
            (errno, "") => io::Error::from_raw_os_error(errno),
            (errno, step) => {
                let error = io::Error::from_raw_os_error(errno);
                io::Error::new(error.kind(), format!("{step}: {error}"))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_keep_the_error() {
        let errno = || io::Error::from_raw_os_error(2);
        let rows = [
            (Failed { step: "", error: errno() }, "No such file or directory (os error 2)"),
            (
                Failed { step: "joining the cgroup", error: errno() },
                "joining the cgroup: No such file or directory (os error 2)",
            ),
            (Failed { step: "", error: io::Error::other("a word has a NUL") }, "a word has a NUL"),
            (Failed { step: "reading", error: io::Error::other("no") }, "reading: no"),
        ];
        for (failed, expected) in rows {
            assert_eq!(Failed::from_bytes(&failed.to_bytes()).unwrap().to_string(), expected);
        }
        assert!(Failed::from_bytes(&[]).is_none());
    }
}
