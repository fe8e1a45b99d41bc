//! The sandbox of a started program: `[queue.N.sandbox]` and `[mux.NAME.sandbox]`.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use towpath_port::namespace;

use crate::sandbox::program::{self, Paths};

use super::spec::Spec;

/// What a program may not do, besides the restrictions of its user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Sandbox {
    /// Refuse system calls that inspectors and workers do not need. `None`: if the kernel accepts the filter.
    pub seccomp: Option<bool>,
    /// New namespaces of the process.
    pub namespaces: Vec<Namespace>,
    /// Paths that it may read; `None`: all.
    pub read: Option<Vec<PathBuf>>,
    /// Paths that it may read and write; `None`: all, or none if `read` is given.
    pub write: Option<Vec<PathBuf>>,
}

/// A namespace (namespaces(7)).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Namespace {
    /// Interfaces, addresses, and abstract Unix sockets.
    Net,
    /// System V IPC and POSIX message queues.
    Ipc,
    /// The names of the host.
    Uts,
    /// The root of the cgroups.
    Cgroup,
}

impl Namespace {
    /// The namespaces with their names in the configuration.
    pub const ALL: &[(&str, Self)] =
        &[("net", Self::Net), ("ipc", Self::Ipc), ("uts", Self::Uts), ("cgroup", Self::Cgroup)];

    /// The namespace of this name.
    pub fn of_word(word: &str) -> Option<Self> {
        Self::ALL.iter().find(|(name, _)| *name == word).map(|(_, namespace)| *namespace)
    }

    const fn kind(self) -> namespace::Kind {
        match self {
            Self::Net => namespace::Kind::Network,
            Self::Ipc => namespace::Kind::Ipc,
            Self::Uts => namespace::Kind::Uts,
            Self::Cgroup => namespace::Kind::Cgroup,
        }
    }
}

impl Sandbox {
    /// That of a command that a user runs: none.
    pub(super) fn interactive() -> Self {
        Self { seccomp: Some(false), ..Self::default() }
    }

    /// Moves this process into its namespaces. Needs CAP_SYS_ADMIN.
    pub(super) fn enter_namespaces(&self) -> io::Result<()> {
        let kinds: Vec<_> = self.namespaces.iter().map(|namespace| namespace.kind()).collect();
        if kinds.is_empty() {
            return Ok(());
        }
        namespace::enter(&kinds)
    }

    /// Opens the paths that the program may use. `None`: every path.
    pub(super) fn open_paths(&self, spec: &Spec) -> io::Result<Option<Paths>> {
        if self.read.is_none() && self.write.is_none() {
            return Ok(None);
        }
        let programs = programs(spec);
        Paths::open(self.read.as_deref(), self.write.as_deref().unwrap_or_default(), &programs).map(Some)
    }

    /// Refuses system calls to this process from here on. A filter that the configuration does not name may fail.
    pub(super) fn refuse_calls(&self) -> io::Result<()> {
        match self.seccomp {
            Some(false) => Ok(()),
            Some(true) => program::refuse_calls(),
            None => {
                let _ = program::refuse_calls();
                Ok(())
            }
        }
    }
}

/// The files of a program that is to be executed, and of the program that `towpath nfq` executes.
fn programs(spec: &Spec) -> Vec<PathBuf> {
    let first = spec.words.first().map(String::as_str);
    let second = match &spec.words[..] {
        [own, command, separator, program, ..]
            if [own, command, separator].iter().copied().eq(["towpath", "nfq", "--"]) =>
        {
            Some(program.as_str())
        }
        _ => None,
    };
    let path = spec.environment.iter().find(|(name, _)| name == "PATH").map(|(_, path)| path.as_os_str());
    let find = |word: &str| match word {
        "towpath" => Some("/proc/self/exe".into()),
        word if word.contains('/') => Some(word.into()),
        word => in_path(path.unwrap_or(OsStr::new("/usr/bin:/bin")), word),
    };
    [first, second].into_iter().flatten().filter_map(find).collect()
}

/// The first file of this name in the directories of PATH.
fn in_path(path: &OsStr, name: &str) -> Option<PathBuf> {
    std::env::split_paths(path).map(|directory| directory.join(name)).find(|file| Path::is_file(file))
}
