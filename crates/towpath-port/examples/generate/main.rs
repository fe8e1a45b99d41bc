//! Writes the captures of Towpath's examples and measurements. Each run writes the same bytes.
//!
//! ```text
//! cargo run -p towpath-port --example generate -- examples           # examples/office.pcap, examples/rules/*
//! cargo run --release -p towpath-port --example generate -- --flood 1000000 flood.pcap
//! ```

mod dns;
mod flood;
mod frames;
mod office;
mod rules;
mod scene;
mod tcp;

use std::path::Path;
use std::process::ExitCode;

use towpath_port::{Error, pcap};

const USAGE: &str = "usage: generate DIRECTORY | generate --flood PACKETS FILE";

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let written = match args[..] {
        ["--flood", packets, file] => match packets.parse() {
            Ok(packets) => flood(packets, Path::new(file)),
            Err(error) => return usage(&format!("{packets}: {error}")),
        },
        [directory] if !directory.starts_with('-') => examples(Path::new(directory)),
        _ => return usage("one directory, or --flood"),
    };
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("generate: {error}");
            ExitCode::FAILURE
        }
    }
}

fn examples(directory: &Path) -> Result<(), Error> {
    let mut file = pcap::Writer::create(directory.join("office.pcap"))?;
    office::write(&mut file)?;
    file.finish()?;
    rules::write(&directory.join("rules"))
}

fn flood(packets: u64, path: &Path) -> Result<(), Error> {
    let mut file = pcap::Writer::create(path)?;
    flood::write(packets, &mut file)?;
    file.finish()
}

fn usage(problem: &str) -> ExitCode {
    eprintln!("generate: {problem}\n{USAGE}");
    ExitCode::from(64)
}
