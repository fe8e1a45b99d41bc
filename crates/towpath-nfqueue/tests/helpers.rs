//! Compares the helper functions with those of Debian's libnetfilter_queue, and tests the calls with which that library accesses memory
//! outside of a packet.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Compiled programs, and a directory with this crate's library under its SONAME.
struct Programs {
    directory: tempfile::TempDir,
}

impl Programs {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let to = directory.path().join("ours/libnetfilter_queue.so.1");
        std::fs::create_dir(to.parent().expect("a directory")).expect("a directory");
        std::os::unix::fs::symlink(library(), to).expect("a link");
        Self { directory }
    }

    fn compile(&self, source: &str) -> PathBuf {
        let program = self.directory.path().join(Path::new(source).file_stem().expect("a name"));
        let output = Command::new("cc")
            .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-o"])
            .arg(&program)
            .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(source))
            .args(["-lnetfilter_queue", "-lmnl"])
            .output()
            .expect("cc starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        program
    }

    /// Runs a program with Debian's library or with this crate's. The program prints the path of its library to the standard error.
    fn run(&self, program: &Path, args: &[&str], ours: bool) -> String {
        let directory = self.directory.path().join("ours");
        let mut command = Command::new(program);
        command.args(args).env_remove("LD_LIBRARY_PATH");
        if ours {
            command.env("LD_LIBRARY_PATH", &directory);
        }
        let output = command.output().expect("the program starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{}: {said}", output.status);
        assert_eq!(Path::new(said.trim()).starts_with(&directory), ours, "{said}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    }
}

/// The library of this crate, next to this test's executable.
fn library() -> PathBuf {
    std::env::current_exe().expect("this test").with_file_name("libnetfilter_queue.so")
}

/// Fails at the first case whose lines differ.
fn compare(theirs: &str, ours: &str, separator: &str) {
    for (theirs, ours) in theirs.split(separator).zip(ours.split(separator)) {
        assert_eq!(theirs, ours);
    }
    assert_eq!(theirs.len(), ours.len());
}

#[towpath_testenv::needs(netfilter_queue, "cc")]
#[test]
fn packet_helpers_return_the_same_as_debians() {
    let programs = Programs::new();
    let program = programs.compile("tests/packets.c");
    for seed in ["1", "2", "3", "4", "5"] {
        let args = [seed, "20000"];
        let theirs = programs.run(&program, &args, false);
        // Some packets of each kind reach each function.
        for line in [
            "mangle ",
            "pktb_mangle 1",
            "tcp 20",
            "udp 40",
            "payload_len ",
            "set_transport -1",
            "set_transport 0",
        ] {
            assert!(theirs.lines().filter(|found| found.starts_with(line)).count() > 3, "{line}");
        }
        compare(&theirs, &programs.run(&program, &args, true), "case ");
    }
}

#[towpath_testenv::needs(netfilter_queue, "cc")]
#[test]
fn message_helpers_return_the_same_as_debians() {
    let programs = Programs::new();
    let program = programs.compile("tests/nlmsg.c");
    let theirs = programs.run(&program, &[], false);
    assert!(theirs.lines().count() > 1600);
    compare(&theirs, &programs.run(&program, &[], true), "\n");
}

#[towpath_testenv::needs(netfilter_queue, "cc")]
#[test]
fn calls_beyond_a_packet_fail() {
    let programs = Programs::new();
    programs.run(&programs.compile("tests/bounds.c"), &[], true);
}

/// The Debian library's functions and variables: `nm -D`, without the version of a symbol.
fn symbols(library: &Path) -> Vec<String> {
    let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library).output().expect("nm starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines()
        .filter_map(|line| Some(line.split_whitespace().nth(2)?.split('@').next()?.to_owned()))
        .collect()
}

fn soname(library: &Path) -> String {
    let output = Command::new("readelf").arg("-d").arg(library).output().expect("readelf starts");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines()
        .find(|line| line.contains("SONAME"))
        .expect("a SONAME")
        .split_once('[')
        .expect("a name")
        .1
        .to_owned()
}

#[towpath_testenv::needs(netfilter_queue, "cc", "nm", "readelf")]
#[test]
fn every_symbol_of_debians_library_is_there() {
    let output =
        Command::new("cc").arg("-print-file-name=libnetfilter_queue.so.1").output().expect("cc starts");
    let debians = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    assert_eq!(soname(&debians), soname(&library()));
    let (theirs, ours) = (symbols(&debians), symbols(&library()));
    assert!(theirs.len() > 80, "{theirs:?}");
    let missing: Vec<_> = theirs.iter().filter(|name| !ours.contains(name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}
