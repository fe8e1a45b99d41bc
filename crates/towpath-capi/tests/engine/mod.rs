//! Runs the `towpath` program for the tests of this crate and of `towpath-py`.

use std::process::Command;

/// The `towpath` command in the target directory of these tests; built if missing.
pub(crate) fn towpath() -> Command {
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
    Command::new(program)
}
