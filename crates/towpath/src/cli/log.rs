//! Lines of the libraries' log on standard error: what is refused or goes wrong while the run goes on.

use log::{LevelFilter, Log, Metadata, Record};

use super::say;

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
        // What becomes of a server's workers, and what a daemon does, is news to whoever runs it.
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
