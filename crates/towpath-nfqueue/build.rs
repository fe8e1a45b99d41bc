//! Gives the library the SONAME of libnetfilter_queue.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libnetfilter_queue.so.1");
    println!("cargo:rerun-if-changed=build.rs");
}
