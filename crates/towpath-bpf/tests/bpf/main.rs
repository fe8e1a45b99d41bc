//! Programs: the verifier, the interpreter, and objects that clang compiles.

mod asm;
mod clang;
mod model;
mod objects;
mod rows;
mod verifier_errors;
