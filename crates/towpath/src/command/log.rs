//! Lines of the libraries' log on standard error: what is refused or goes wrong while the run goes on.

use log::{LevelFilter, Log, Metadata, Record};

struct Stderr;

/// Warnings and errors of the libraries are printed from here on.
pub(crate) fn start() {
    // The only logger of the program: it cannot be there already.
    if log::set_logger(&Stderr).is_ok() {
        log::set_max_level(LevelFilter::Info);
    }
}

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // What becomes of a server's workers is news to whoever runs it.
        metadata.level() <= LevelFilter::Warn || metadata.target() == "towpath::front"
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            eprintln!("towpath: {}: {}", record.level().as_str().to_lowercase(), record.args());
        }
    }

    fn flush(&self) {}
}
