//! Gives the library the SONAME of libnetfilter_queue, and its dependency on libnfnetlink.
//!
//! Programs and plug-ins that call `nfnl_*` may need libnfnetlink only through libnetfilter_queue. The dependency is a name; the functions
//! are looked up when they are called, so an empty library of that name is enough to link.

use std::path::Path;
use std::process::Command;

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnetfilter_queue.so.1");
    println!("cargo:rerun-if-changed=build.rs");
    let out = std::env::var_os("OUT_DIR").expect("Cargo sets OUT_DIR");
    let library = Path::new(&out).join("libnfnetlink.so.0");
    // The linker of rustc.
    let linker = std::env::var_os("RUSTC_LINKER").unwrap_or_else(|| "cc".into());
    let status = Command::new(linker)
        .args(["-shared", "-nostdlib", "-Wl,-soname,libnfnetlink.so.0", "-x", "c", "/dev/null", "-o"])
        .arg(&library)
        .status()
        .expect("the linker starts");
    assert!(status.success(), "an empty library cannot be linked");
    let library = library.display();
    println!("cargo:rustc-cdylib-link-arg=-Wl,--push-state,--no-as-needed,{library},--pop-state");
}
