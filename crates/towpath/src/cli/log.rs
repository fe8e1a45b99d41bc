//! Prints the libraries' log to standard error.

use log::{LevelFilter, Log, Metadata, Record};

use super::say;

struct Stderr;

/// Installs the logger; from now on, warnings and errors of the libraries are printed.
pub(crate) fn start() {
    // This is the program's only logger, so `set_logger` cannot fail.
    if log::set_logger(&Stderr).is_ok() {
        log::set_max_level(LevelFilter::Info);
    }
}

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        // The worker pool and the daemon also log events of interest to the operator (info level).
        let daemon = ["towpath::worker_pool", "towpath::daemon"]
            .iter()
            .any(|part| metadata.target().starts_with(part));
        metadata.level() <= LevelFilter::Warn || daemon
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            say(format_args!("towpath: {}: {}", record.level().as_str().to_lowercase(), record.args()));
        }
    }

    fn flush(&self) {}
}
