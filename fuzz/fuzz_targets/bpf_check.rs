//! Any instructions, of both sets, through the checker. What is refused says why; the program is listed all the same.
#![no_main]

use libfuzzer_sys::fuzz_target;
use towpath_bpf::{Code, Format, LoadOptions};

fuzz_target!(|data: &[u8]| {
    for format in [Format::Raw, Format::Classic, Format::ClassicText] {
        let Ok(code) = Code::load(data, &LoadOptions { format, name: None }) else { continue };
        let _ = code.to_string();
        if let Err(error) = code.verify() {
            let _ = error.to_string();
        }
    }
});
