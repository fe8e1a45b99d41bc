//! Programs that tests write and start.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

/// Writes a shell script that any user may start. It is copied by another process: a child that another test forks meanwhile would keep
/// this process's descriptor open for writing, and execve(2) would fail (ETXTBSY).
pub(crate) fn write_script(path: &Path, lines: &str) {
    let (text, new) = (path.with_extension("text"), path.with_extension("new"));
    std::fs::write(&text, format!("#!/bin/sh\n{lines}\n")).expect("a file");
    assert!(Command::new("cp").arg(&text).arg(&new).status().expect("cp").success());
    std::fs::set_permissions(&new, Permissions::from_mode(0o755)).expect("a mode");
    std::fs::rename(&new, path).expect("it replaces an old one");
}
