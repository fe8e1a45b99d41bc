//! The description of a process before it starts.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::limit::Limit;
use super::sandbox::Sandbox;

/// Variables of the engine's environment that a program of `towpath run` gets. Those that begin with `LC_` and `TOWPATH_` are passed, too.
const PASSED: &[&str] = &["PATH", "LANG", "TZ", "HOME", "TERM"];

/// A user and a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Identity {
    /// User id: real, effective and saved.
    pub user: u32,
    /// Group id. There are no supplementary groups.
    pub group: u32,
}

impl Identity {
    /// The user id of an engine that becomes `identity`: that of `identity`, or of this process if there is none.
    pub fn engine_user(identity: Option<Self>) -> u32 {
        identity.map_or_else(|| rustix::process::geteuid().as_raw(), |identity| identity.user)
    }
}

/// The settings of a program in the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Settings {
    /// The user; by default an unused id.
    pub user: Option<u32>,
    /// The group; by default that of the user.
    pub group: Option<u32>,
    /// Further variables of the environment: names to pass, or NAME=VALUE.
    pub env: Vec<String>,
    /// Resource limits.
    pub limits: Vec<Limit>,
    /// Directory of a cgroup (v2) that the process joins.
    pub cgroup: Option<PathBuf>,
    /// Further restrictions.
    pub sandbox: Sandbox,
}

/// A program of the configuration: its words and its settings.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Program {
    /// The command, split into words. It has at least one.
    pub words: Vec<String>,
    /// Its settings.
    pub settings: Settings,
}

/// The state in which a program starts. [`confine`](super::confine()) reads it and applies it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    /// The command.
    pub words: Vec<String>,
    /// The user and group; `None` keeps those of the starting process.
    pub identity: Option<Identity>,
    /// The whole environment.
    pub environment: Vec<(OsString, OsString)>,
    /// Resource limits.
    pub limits: Vec<Limit>,
    /// Directory of a cgroup (v2).
    pub cgroup: Option<PathBuf>,
    /// Further restrictions.
    pub sandbox: Sandbox,
    /// The process is killed when the process with this id, its parent, ends.
    pub dies_with: Option<u32>,
}

impl Program {
    /// A program with default settings.
    pub fn new(words: &[String]) -> Self {
        Self { words: words.to_vec(), settings: Settings::default() }
    }

    /// The program of a daemon: a cleared environment and limits.
    pub(crate) fn confined(&self, socket: &Path, identity: Option<Identity>) -> Spec {
        let Settings { env, limits, cgroup, sandbox, .. } = &self.settings;
        let mut environment: Vec<(OsString, OsString)> = std::env::vars_os()
            .filter(|(name, _)| {
                let name = name.to_string_lossy();
                // The home of the engine's user is not that of another user.
                if name == "HOME" && identity.is_some() {
                    return env.iter().any(|pass| pass == "HOME");
                }
                PASSED.contains(&&*name)
                    || name.starts_with("LC_")
                    || name.starts_with("TOWPATH_")
                    || env.iter().any(|pass| *pass == name)
            })
            .collect();
        let given = env.iter().filter_map(|text| text.split_once('='));
        environment.extend(given.map(|(name, value)| (name.into(), value.into())));
        environment.push(("TOWPATH_SOCKET".into(), socket.into()));
        let mut all = default_limits();
        all.retain(|limit| !limits.iter().any(|other| other.name == limit.name));
        all.extend(limits.iter().cloned());
        Spec {
            words: self.words.clone(),
            identity,
            environment,
            limits: all,
            cgroup: cgroup.clone(),
            sandbox: sandbox.clone(),
            dies_with: None,
        }
    }

    /// The program of a command that a user runs: the user's environment and limits.
    pub(super) fn interactive(&self, socket: &Path) -> Spec {
        let mut environment: Vec<(OsString, OsString)> = std::env::vars_os().collect();
        environment.push(("TOWPATH_SOCKET".into(), socket.into()));
        Spec {
            words: self.words.clone(),
            identity: None,
            environment,
            limits: Vec::new(),
            cgroup: None,
            sandbox: Sandbox::interactive(),
            dies_with: None,
        }
    }
}

/// Limits of a program without other settings: no core dump, which would contain packets, and few descriptors.
fn default_limits() -> Vec<Limit> {
    let limit = |name: &str, value| Limit { name: name.into(), value: Some(value) };
    vec![limit("core", 0), limit("nofile", 1024)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_is_an_allow_list() {
        let mut program = Program::new(&["true".into()]);
        program.settings.env = vec!["CARGO_MANIFEST_DIR".into(), "GREETING=hello world".into()];
        let spec = program.confined(Path::new("/s"), None);
        let value = |name: &str| {
            let found = spec.environment.iter().find(|(known, _)| known == name);
            found.map(|(_, value)| value.to_string_lossy().into_owned())
        };
        assert_eq!(value("PATH"), std::env::var("PATH").ok());
        assert_eq!(value("TOWPATH_SOCKET").as_deref(), Some("/s"));
        assert_eq!(value("GREETING").as_deref(), Some("hello world"));
        for (name, _) in &spec.environment {
            let name = name.to_string_lossy();
            let allowed = PASSED.contains(&&*name) || name.starts_with("LC_") || name.starts_with("TOWPATH_");
            assert!(allowed || ["GREETING", "CARGO_MANIFEST_DIR"].contains(&&*name), "{name}");
        }
    }

    #[test]
    fn configured_limits_replace_defaults() {
        let mut program = Program::new(&["true".into()]);
        program.settings.limits = vec![Limit::parse("nofile=77").unwrap()];
        let limits = program.confined(Path::new("/s"), None).limits;
        let files: Vec<_> = limits.iter().filter(|limit| limit.name == "nofile").collect();
        assert_eq!(files, [&Limit::parse("nofile=77").unwrap()]);
        assert!(limits.contains(&Limit::parse("core=0").unwrap()));
    }
}
