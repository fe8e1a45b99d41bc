//! Any bytes as an ELF object: every program in it by name, loaded, listed, run.
#![no_main]

use libfuzzer_sys::fuzz_target;
use towpath_bpf::{Code, Context, ElfError, Format, LoadError, LoadOptions};

fuzz_target!(|data: &[u8]| {
    let mut options = LoadOptions { format: Format::Elf, name: None };
    match Code::load(data, &options) {
        Ok(code) => run(&code),
        Err(LoadError::Elf(ElfError::Several(names))) => {
            for name in names {
                options.name = name.split(" (").next().map(str::to_owned);
                if let Ok(code) = Code::load(data, &options) {
                    run(&code);
                }
            }
        }
        Err(error) => drop(error.to_string()),
    }
});

fn run(code: &Code) {
    let _ = code.to_string();
    if let Ok(program) = code.verify() {
        let _ = program.run(&[0x30, 2, 0, 4, 5], &mut Context::new(), &mut 2000);
    }
}
