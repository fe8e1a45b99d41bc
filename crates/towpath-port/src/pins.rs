//! Links of BPF programs that stay after the engine: files of the BPF file system.

use std::os::fd::{AsFd, BorrowedFd};
use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::claim::Claim;
use crate::sys;

/// A pinned link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Its file.
    pub path: PathBuf,
    /// The index of the interface that it is attached to; `None` if the interface is gone.
    pub interface: Option<u32>,
    /// It is the program of flow offload; otherwise that of a closed port.
    pub offload: bool,
}

impl Pin {
    /// Returns true if an engine has the interface, or the interface is in another network namespace.
    pub fn is_in_use(&self) -> bool {
        let name =
            self.path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_prefix(PREFIX));
        let Some(name) = name else { return true };
        let name = of_flows(name).unwrap_or(name);
        let interface = decoded(name.split_once('@').map_or(name, |(interface, _)| interface));
        let interface = interface.as_str();
        let own = if self.offload { path_of_flows(interface) } else { path(interface) };
        if self.interface.is_some() && own != self.path {
            return true;
        }
        Claim::is_taken(&format!("`{interface}`"))
    }
}

/// All links that engines have pinned and that this process may open.
pub fn all() -> Vec<Pin> {
    let Ok(entries) = fs::read_dir(DIRECTORY) else { return Vec::new() };
    let pin = |path: PathBuf| {
        let offload = of_flows(path.file_name()?.to_str()?.strip_prefix(PREFIX)?).is_some();
        let link = sys::bpf_path(&path).ok()?;
        let interface = sys::bpf_link_interface(link.as_fd()).ok()?;
        Some(Pin { path, interface, offload })
    };
    let mut found: Vec<_> = entries.flatten().filter_map(|entry| pin(entry.path())).collect();
    found.sort_unstable_by(|one, other| one.path.cmp(&other.path));
    found
}

/// The beginning of a file's name.
const PREFIX: &str = "towpath-";
/// Before the name of the interface: the program of flow offload. No interface has a name with a colon.
const FLOWS: &str = "flows:";
/// A dot in the name of the interface: the BPF file system refuses dots.
const DOT: &str = "::";
/// The BPF file system.
const DIRECTORY: &str = "/sys/fs/bpf";
/// asm-generic/socket.h.
const SO_NETNS_COOKIE: i32 = 71;
/// The cookie of the initial network namespace, the first that the kernel gives.
const INITIAL: u64 = 1;

/// The file of the link on `interface` in this network namespace: `/sys/fs/bpf/towpath-INTERFACE`, with `@COOKIE` for namespaces other than the
/// initial one, and `::` for each dot. The file system belongs to the mount namespace, and has interfaces of one name from several network namespaces.
pub fn path(interface: &str) -> PathBuf {
    file("", interface)
}

/// The file of the link of flow offload: as [`path`], with `flows:` before the interface.
pub fn path_of_flows(interface: &str) -> PathBuf {
    file(FLOWS, interface)
}

fn file(kind: &str, interface: &str) -> PathBuf {
    let suffix = match netns_cookie() {
        Some(cookie) if cookie != INITIAL => format!("@{cookie}"),
        _ => String::new(),
    };
    Path::new(DIRECTORY).join(format!("{PREFIX}{kind}{}{suffix}", encoded(interface)))
}

fn encoded(interface: &str) -> String {
    interface.replace('.', DOT)
}

fn decoded(name: &str) -> String {
    name.replace(DOT, ".")
}

/// The rest of a name that begins with [`FLOWS`]. An interface called `flows.x` has two colons, or more for more dots: an even number.
fn of_flows(name: &str) -> Option<&str> {
    let rest = name.strip_prefix(FLOWS)?;
    rest.bytes().take_while(|byte| *byte == b':').count().is_multiple_of(2).then_some(rest)
}

/// The number of the network namespace, which no other has until the machine is started again (Linux 5.14).
fn netns_cookie() -> Option<u64> {
    let socket = sys::socket(libc::AF_INET, libc::SOCK_DGRAM, 0).ok()?;
    let mut words = [0; 2];
    sys::get(socket.as_fd(), libc::SOL_SOCKET, SO_NETNS_COOKIE, &mut words).ok()?;
    let ([a, b, c, d], [e, f, g, h]) = (words[0].to_ne_bytes(), words[1].to_ne_bytes());
    Some(u64::from_ne_bytes([a, b, c, d, e, f, g, h]))
}

/// Removes the files of `interface` whose links are detached: those of an engine that has stopped, but not of one that was killed.
pub fn tidy(interface: &str) {
    for path in [path(interface), path_of_flows(interface)] {
        let link = sys::bpf_path(&path);
        if link.is_ok_and(|link| matches!(sys::bpf_link_interface(link.as_fd()), Ok(None))) {
            // The next engine on the interface tries again.
            let _ = fs::remove_file(path);
        }
    }
}

/// Pins a new link at `path` in place of an old one. The old link ends after the new one has begun.
pub(crate) fn replace(path: &Path, link: BorrowedFd<'_>) -> io::Result<()> {
    let old = sys::bpf_path(path);
    if old.is_ok() {
        fs::remove_file(path)?;
    }
    sys::bpf_pin(path, link)
}

/// Removes the link pinned at `path`. Returns false if there was none. The program is detached when this returns: the kernel would detach it
/// later than the file is gone.
pub(crate) fn remove(path: &Path) -> io::Result<bool> {
    if let Ok(link) = sys::bpf_path(path) {
        // A link whose interface is gone is detached.
        let _ = sys::bpf_detach(link.as_fd());
    }
    match fs::remove_file(path) {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_have_no_dots_and_are_read_back() {
        for interface in ["eth0", "eth0.100", ".x", "flows.x", "flows..x", "a.b.c"] {
            for (kind, flows) in [("", false), (FLOWS, true)] {
                let path = file(kind, interface);
                let name = path.file_name().unwrap().to_str().unwrap().strip_prefix(PREFIX).unwrap();
                let name = name.split_once('@').map_or(name, |(name, _)| name);
                assert!(!name.contains('.'), "{name}");
                assert_eq!(of_flows(name).is_some(), flows, "{name}");
                assert_eq!(decoded(of_flows(name).unwrap_or(name)), interface);
            }
        }
    }
}
