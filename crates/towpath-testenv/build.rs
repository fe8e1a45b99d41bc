//! Makes Cargo expand [`needs`] again when the answer may have changed.
use std::path::Path;

fn main() {
    for variable in ["CI", "TOWPATH_SHARED", "HOME", "USER", "PATH"] {
        println!("cargo:rerun-if-env-changed={variable}");
    }
    // A path that does not exist would rebuild the tests each time.
    for directory in ["/usr/bin", "/usr/sbin", "/usr/local/bin", "build.rs"] {
        if Path::new(directory).exists() {
            println!("cargo:rerun-if-changed={directory}");
        }
    }
}
