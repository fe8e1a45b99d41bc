//! Runs `tests/test_towpath.py`: the module in a Python process, against real engines.

#[path = "../../towpath-capi/tests/engine/mod.rs"]
mod engine;

use std::path::Path;
use std::process::Command;

#[towpath_testenv::needs(python, "openssl")]
#[test]
fn the_module_in_python() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let directory = tempfile::tempdir().expect("a directory");
    let built = std::env::current_exe().expect("this test").with_file_name("");
    let status = Command::new(here.join("install")).arg(directory.path()).arg(built).status().expect("sh");
    assert!(status.success());
    let output = Command::new("python3")
        .args(["-B", "-X", "dev", "-m", "unittest", "-v", "test_towpath"])
        .current_dir(here.join("tests"))
        .env("PYTHONPATH", directory.path())
        .env("TOWPATH", engine::towpath().get_program())
        .output()
        .expect("python3 starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    // unittest also succeeds if it finds no tests.
    assert!(said.contains("test_verdicts_of_every_kind"), "{said}");
}
