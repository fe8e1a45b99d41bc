//! The files that the engine may use after its start (landlock(7)).
//!
//! [`Files::of`] lists the places that a configuration names, without IO. [`Files::domain`] opens them. A file that is replaced has a new
//! inode, so a rule for a file covers its directory.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use landlock::{
    ABI, Access as _, AccessFs, BitFlags, LandlockStatus, PathBeneath, PathFd, RestrictSelfError, Ruleset,
    RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetError, make_bitflags,
};
use towpath_port::driver::{self, Capability};

use crate::config::{Config, EventOutput};

/// The latest version of Landlock whose rights are used. With an older kernel, those that it lacks are not restricted.
const LATEST: ABI = ABI::V5;

/// What may be done in a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Access {
    /// Files and directories are read.
    Read,
    /// Files and sockets are read, written, made and removed.
    Write,
    /// Directories with sockets are made and removed. No file is read.
    Directories,
    /// Devices are read, written and controlled.
    Device,
}

impl Access {
    fn rights(self) -> BitFlags<AccessFs> {
        match self {
            Self::Read => make_bitflags!(AccessFs::{ReadFile | ReadDir}),
            Self::Write => make_bitflags!(AccessFs::{
                ReadFile | ReadDir | WriteFile | Truncate | MakeReg | MakeSock | RemoveFile
            }),
            Self::Directories => make_bitflags!(AccessFs::{
                ReadDir | WriteFile | MakeReg | MakeSock | MakeDir | RemoveFile | RemoveDir
            }),
            Self::Device => make_bitflags!(AccessFs::{ReadFile | WriteFile | IoctlDev}),
        }
    }

    fn includes(self, other: Self) -> bool {
        self.rights().contains(other.rights())
    }
}

/// A place in the file system.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Place {
    /// The file of this name, also after it was replaced.
    File(PathBuf),
    /// A directory with everything below, or a device.
    Tree(PathBuf),
}

/// The places that an engine needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Files {
    needs: BTreeSet<(Place, Access)>,
}

/// What every engine reads: names of users and groups, facts about this process and the machine. Inodes of /proc are not permanent, so a
/// rule for a part of it could lose its effect.
const READ: &[&str] =
    &["/etc", "/proc", "/sys/devices/system/cpu", "/sys/kernel/mm/transparent_hugepage", "/sys/fs/cgroup"];

/// The engine's own program, for the names in a backtrace.
const PROGRAM: &str = "/proc/self/exe";

/// Devices that every engine may open.
const DEVICES: &[&str] = &["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"];

/// What resolving the names of hosts and verifying servers read besides /etc: libraries that the C library loads, and certificates.
const RESOLVER: &[&str] =
    &["/lib", "/lib64", "/usr/lib", "/usr/share/ca-certificates", "/usr/local/share/ca-certificates"];

/// Pinned links.
const BPF: &str = "/sys/fs/bpf";

impl Files {
    /// The places of a configuration. `read`: files that its rules name.
    pub(super) fn of(config: &Config, read: &[PathBuf]) -> Self {
        let mut files = Self { needs: BTreeSet::new() };
        files.all_engines();
        for path in [&config.file, &config.rules].into_iter().chain(read) {
            files.file(path, Access::Read);
        }
        let control = config.control.as_ref().map(|control| &*control.socket);
        let metrics = config.metrics.as_ref().and_then(|metrics| metrics.unix());
        let events = config.events.as_ref().and_then(|events| match &events.output {
            EventOutput::File(path) => Some(&**path),
            EventOutput::Unix(_) | EventOutput::Stdout => None,
        });
        let sockets = config.queues.iter().filter_map(|queue| queue.inspectors.socket.as_deref());
        let group = config.fleet.as_ref().and_then(|fleet| fleet.configuration.as_deref());
        let written = [control, metrics, events, config.states.as_deref(), group].into_iter().flatten();
        written.chain(sockets).for_each(|path| files.file(path, Access::Write));
        files.muxes(config);
        files.ports(config);
        files.services(config);
        files
    }

    fn all_engines(&mut self) {
        READ.iter().chain(&[PROGRAM]).for_each(|path| self.tree(path, Access::Read));
        DEVICES.iter().for_each(|path| self.tree(path, Access::Device));
        // A reload may add a queue or change its programs.
        self.needs.insert((Place::Tree(std::env::temp_dir()), Access::Directories));
    }

    fn muxes(&mut self, config: &Config) {
        let directory = config.file.parent().unwrap_or(Path::new("."));
        for mux in &config.muxes {
            if let Some(path) = mux.framing.file(directory) {
                self.file(&path, Access::Read);
            }
            let tls =
                mux.tls.iter().flat_map(|tls| [Some(&tls.chain), Some(&tls.key), tls.client_ca.as_ref()]);
            tls.flatten().for_each(|path| self.file(path, Access::Read));
            let sockets = mux.listen.iter().filter_map(|address| address.strip_prefix("unix:"));
            sockets.for_each(|path| self.file(Path::new(path), Access::Write));
        }
    }

    fn ports(&mut self, config: &Config) {
        for port in &config.ports {
            match &port.driver {
                driver::Config::Pcap(own) => {
                    // `-` is standard input or output.
                    let named = |path: &&PathBuf| path.as_os_str() != "-";
                    own.read.iter().filter(named).for_each(|path| self.file(path, Access::Read));
                    own.write.iter().filter(named).for_each(|path| self.file(path, Access::Write));
                }
                driver::Config::Tun(own) => self.tree(&own.node, Access::Device),
                _ => {}
            }
            if port.driver.capabilities().contains(&Capability::Bpf) {
                self.tree(BPF, Access::Write);
                self.tree("/sys/kernel/btf", Access::Read);
            }
        }
    }

    fn services(&mut self, config: &Config) {
        if let Some(fleet) = &config.fleet {
            let identity = fleet.tls_identity.iter().flat_map(|(certificate, key)| [certificate, key]);
            let files = fleet.credentials.iter().chain(&fleet.tls_ca).chain(identity);
            files.for_each(|path| self.file(path, Access::Read));
        }
        if config.fleet.is_some() {
            RESOLVER.iter().for_each(|path| self.tree(path, Access::Read));
            self.file(Path::new("/etc/resolv.conf"), Access::Read);
        }
    }

    fn file(&mut self, path: &Path, access: Access) {
        self.needs.insert((Place::File(path.into()), access));
    }

    fn tree(&mut self, path: &str, access: Access) {
        self.needs.insert((Place::Tree(path.into()), access));
    }

    /// Opens the places that exist. `None`: the kernel does not have Landlock.
    pub(super) fn domain(&self) -> io::Result<Option<Domain>> {
        if abi().is_none() {
            return Ok(None);
        }
        let all = AccessFs::from_all(LATEST);
        let mut ruleset =
            Ruleset::default().handle_access(all).and_then(Ruleset::create).map_err(io::Error::other)?;
        let mut granted = Vec::new();
        for (place, access) in &self.needs {
            for path in place.paths() {
                // A place that does not exist needs no rule.
                let Ok(opened) = PathFd::new(&path) else { continue };
                let rule = PathBeneath::new(opened, access.rights());
                ruleset = ruleset.add_rule(rule).map_err(io::Error::other)?;
                granted.extend(fs::canonicalize(&path).ok().map(|path| (path, *access)));
            }
        }
        let spare = Mutex::new(ruleset.try_clone().ok());
        Ok(Some(Domain { ruleset, spare, granted }))
    }
}

impl Place {
    /// The paths of its rules: for a file, its directory and that of the file to which it links.
    fn paths(&self) -> Vec<PathBuf> {
        let path = match self {
            Self::Tree(path) => return vec![path.clone()],
            Self::File(path) => path,
        };
        let mut paths = vec![path_of_rule(path)];
        paths.extend(fs::canonicalize(path).ok().map(|path| path_of_rule(&path)));
        paths
    }

    const fn path(&self) -> &PathBuf {
        match self {
            Self::File(path) | Self::Tree(path) => path,
        }
    }
}

/// The directory of a file. The file itself if that would be the whole file system, and if it is a device or a FIFO.
fn path_of_rule(path: &Path) -> PathBuf {
    let directory = match path.parent() {
        Some(here) if here.as_os_str().is_empty() => Path::new("."),
        Some(directory) => directory,
        None => path,
    };
    let is_special = fs::metadata(path).is_ok_and(|found| {
        let kind = found.file_type();
        kind.is_char_device() || kind.is_block_device() || kind.is_fifo()
    });
    let is_root = fs::canonicalize(directory).is_ok_and(|directory| directory == Path::new("/"));
    if is_special || is_root { path.into() } else { directory.into() }
}

/// The restriction of threads to the places of a configuration.
#[derive(Debug)]
pub(super) struct Domain {
    ruleset: RulesetCreated,
    /// For a thread that gets its first turn when there is no free descriptor.
    spare: Mutex<Option<RulesetCreated>>,
    /// The places, without symbolic links.
    granted: Vec<(PathBuf, Access)>,
}

/// E2BIG: a thread has 16 domains, of which it inherited some.
const TOO_MANY: i32 = libc::E2BIG;

impl Domain {
    /// Restricts the calling thread, and the threads and processes that it starts from now on.
    pub(super) fn restrict(&self) -> io::Result<()> {
        let spare = |error| self.spare.lock().unwrap_or_else(PoisonError::into_inner).take().ok_or(error);
        match self.ruleset.try_clone().or_else(spare)?.restrict_self() {
            Err(RulesetError::RestrictSelf(RestrictSelfError::RestrictSelfCall { source, .. }))
                if source.raw_os_error() == Some(TOO_MANY) =>
            {
                Ok(())
            }
            done => done.map(drop).map_err(io::Error::other),
        }
    }

    /// The first path that another configuration needs and that threads of this domain cannot use.
    pub(super) fn refuses<'a>(&self, files: &'a Files) -> Option<&'a Path> {
        let permits = |path: &PathBuf, access: Access| {
            // A missing place cannot be made either.
            let Ok(path) = fs::canonicalize(path) else { return false };
            self.granted.iter().any(|(place, own)| path.starts_with(place) && own.includes(access))
        };
        let named = files.needs.iter().filter(|(place, _)| matches!(place, Place::File(_)));
        let refused =
            |(place, access): &&(Place, Access)| !place.paths().iter().all(|path| permits(path, *access));
        named.clone().find(refused).map(|(place, _)| place.path().as_path())
    }
}

/// The version of Landlock that the kernel has, as far as it is known here. `None`: none. Restricts a thread that ends.
pub(crate) fn abi() -> Option<u32> {
    let attempt = || {
        let ruleset = Ruleset::default().handle_access(AccessFs::Execute).ok()?.create().ok()?;
        match ruleset.restrict_self().ok()?.landlock {
            LandlockStatus::Available { effective_abi, kernel_abi } => {
                Some(kernel_abi.map_or(effective_abi as u32, i32::cast_unsigned))
            }
            LandlockStatus::NotEnabled | LandlockStatus::NotImplemented => None,
        }
    };
    std::thread::scope(|scope| scope.spawn(attempt).join()).ok().flatten()
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::ErrorKind;
    use std::os::unix::net::UnixListener;

    use super::*;

    fn config(directory: &Path, more: &str) -> Config {
        let head = "rules = \"rules/r.ipfw\"\nmonitor = \"a\"\n[port.a]\ndriver = \"tap\"\n";
        Config::parse(&directory.join("t.toml").display().to_string(), &format!("{head}{more}")).unwrap()
    }

    #[test]
    fn a_configuration_names_its_places() {
        let more = "[queue.1]\nsocket = \"/run/q/s\"\n[mux.m]\nlisten = \"unix:/run/m/s\"\nframing = \"line\"\nworker = \"w\"\n\
                    [control]\nsocket = \"/run/c/s\"\n[metrics]\nlisten = \"unix:/run/e/s\"\n[events]\noutput = \"/log/e\"\n";
        let files = Files::of(&config(Path::new("/c"), more), &["/tables/t".into()]);
        let file = |path: &str, access| (Place::File(path.into()), access);
        let own: Vec<_> =
            files.needs.iter().filter(|(place, _)| matches!(place, Place::File(_))).cloned().collect();
        let expected = [
            file("/c/rules/r.ipfw", Access::Read),
            file("/c/t.toml", Access::Read),
            file("/log/e", Access::Write),
            file("/run/c/s", Access::Write),
            file("/run/e/s", Access::Write),
            file("/run/m/s", Access::Write),
            file("/run/q/s", Access::Write),
            file("/tables/t", Access::Read),
        ];
        assert_eq!(own, expected);
        let has = |path: &str, access| files.needs.contains(&(Place::Tree(path.into()), access));
        assert!(has("/dev/net/tun", Access::Device) && has("/etc", Access::Read));
        assert!(!has("/usr/lib", Access::Read) && !has(BPF, Access::Write));
    }

    #[test]
    fn a_file_is_covered_by_its_directories() {
        let directory = tempfile::tempdir().unwrap();
        let at = directory.path();
        fs::create_dir(at.join("real")).unwrap();
        fs::write(at.join("real/file"), "").unwrap();
        std::os::unix::fs::symlink("real/file", at.join("link")).unwrap();
        let paths = |path: &Path| Place::File(path.into()).paths();
        let real = fs::canonicalize(at).unwrap().join("real");
        assert_eq!(paths(&at.join("link")), [at.to_owned(), real]);
        assert_eq!(paths(&at.join("missing")), [at.to_owned()]);
        assert_eq!(paths(Path::new("here")), [Path::new(".").to_owned()]);
        // Not all devices, and not the whole file system.
        assert_eq!(paths(Path::new("/dev/null"))[0], Path::new("/dev/null"));
        assert_eq!(paths(Path::new("/file"))[0], Path::new("/file"));
    }

    /// Runs in a thread of its own: a restriction cannot be removed.
    fn restricted(domain: &Domain, run: impl FnOnce() + Send) {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                domain.restrict().unwrap();
                run();
            });
        });
    }

    #[towpath_testenv::needs(landlock)]
    #[test]
    fn a_thread_uses_no_other_file() {
        let (directory, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (at, run) = (directory.path(), directory.path().join("run"));
        fs::create_dir(at.join("rules")).unwrap();
        fs::create_dir(&run).unwrap();
        for path in [at.join("t.toml"), at.join("rules/r.ipfw"), other.path().join("secret")] {
            fs::write(path, "old").unwrap();
        }
        let config = Config { states: Some(run.join("states")), ..config(at, "") };
        let denied =
            |result: io::Result<()>| result.is_err_and(|error| error.kind() == ErrorKind::PermissionDenied);
        let domain = Files::of(&config, &[]).domain().unwrap().expect("the kernel has Landlock");
        restricted(&domain, || {
            assert_eq!(fs::read_to_string(at.join("rules/r.ipfw")).unwrap(), "old");
            assert!(fs::read_to_string("/proc/self/status").is_ok());
            File::options().write(true).open("/dev/null").unwrap();
            // As a snapshot and a socket are written, moved and removed.
            fs::write(run.join("new"), "states").unwrap();
            fs::rename(run.join("new"), run.join("states")).unwrap();
            drop(UnixListener::bind(run.join("s")).unwrap());
            fs::remove_file(run.join("s")).unwrap();
            assert!(denied(File::open(other.path().join("secret")).map(drop)));
            assert!(denied(fs::read_dir("/usr").map(drop)));
            assert!(denied(fs::write("/var/towpath-test", "")));
            assert!(denied(std::os::unix::fs::symlink("x", run.join("link"))));
            assert!(denied(fs::write("/proc/self/comm", "x")));
        });
        // As an editor replaces a file: the new file has another inode.
        fs::write(at.join("rules/r.new"), "new").unwrap();
        fs::rename(at.join("rules/r.new"), at.join("rules/r.ipfw")).unwrap();
        restricted(&domain, || {
            assert_eq!(fs::read_to_string(at.join("rules/r.ipfw")).unwrap(), "new");
        });
    }

    #[towpath_testenv::needs(landlock)]
    #[test]
    fn another_configuration_may_name_other_files_in_the_same_directories() {
        let (directory, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let at = directory.path();
        fs::create_dir(at.join("rules")).unwrap();
        let first = config(at, "");
        let domain = Files::of(&first, &[]).domain().unwrap().expect("the kernel has Landlock");
        let refused = |config: &Config| domain.refuses(&Files::of(config, &[])).map(Path::to_owned);
        assert_eq!(refused(&first), None);
        assert_eq!(refused(&Config { rules: at.join("rules/new.ipfw"), ..first.clone() }), None);
        let outside = other.path().join("r.ipfw");
        assert_eq!(refused(&Config { rules: outside.clone(), ..first.clone() }), Some(outside));
        // The directory of the configuration is read only.
        let states = at.join("states");
        assert_eq!(refused(&Config { states: Some(states.clone()), ..first.clone() }), Some(states));
        let missing = at.join("missing/r.ipfw");
        assert_eq!(refused(&Config { rules: missing.clone(), ..first }), Some(missing));
    }
}
