//! Gives the library its SONAME. The number changes when a program that was linked before no longer works.

fn main() {
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libtowpath.so.1");
    println!("cargo:rerun-if-changed=build.rs");
}
