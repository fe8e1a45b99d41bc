//! Programs of `examples/` that tests start.

use std::path::Path;

/// The path of an example. `cargo test -p towpath` builds examples, `cargo test -p towpath --test NAME` does not.
pub(crate) fn example(name: &str) -> String {
    let path = Path::new(env!("CARGO_BIN_EXE_towpath")).with_file_name("examples").join(name);
    assert!(path.exists(), "{} does not exist: run `cargo build -p towpath --examples`", path.display());
    path.to_str().expect("UTF-8").to_owned()
}
