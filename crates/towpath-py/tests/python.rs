//! The module in a real Python, with real engines at the other end: runs `tests/test_towpath.py`.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The command line, which cargo builds where this crate's tests are; made if it is not there yet.
fn towpath() -> PathBuf {
    let deps = std::env::current_exe().expect("this test");
    let profile = deps.ancestors().nth(2).expect("target/PROFILE");
    let program = profile.join("towpath");
    if !program.exists() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "towpath", "--bin", "towpath", "--target-dir"]);
        cargo.arg(profile.parent().expect("target"));
        if profile.ends_with("release") {
            cargo.arg("--release");
        }
        let status = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status().expect("cargo starts");
        assert!(status.success() && program.exists(), "towpath can be built");
    }
    program
}

#[test]
fn the_module_in_python() {
    let old = "import sys; sys.exit(sys.version_info < (3, 11))";
    if !Command::new("python3").args(["-c", old]).status().is_ok_and(|status| status.success()) {
        println!("no python3 of version 3.11 or later: the module is not tried");
        return;
    }
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = tempfile::tempdir().expect("a directory");
    let built = std::env::current_exe().expect("this test").with_file_name("");
    let status = Command::new(here.join("install")).arg(directory.path()).arg(built).status().expect("sh");
    assert!(status.success());
    let output = Command::new("python3")
        .args(["-B", "-X", "dev", "-m", "unittest", "-v", "test_towpath"])
        .current_dir(here.join("tests"))
        .env("PYTHONPATH", directory.path())
        .env("TOWPATH", towpath())
        .output()
        .expect("python3 starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    // None of them found is no success.
    assert!(said.contains("test_verdicts_of_every_kind"), "{said}");
}
