//! Prints the libraries' log to standard error.
//!
//! A line may name its peer (`log::warn!(peer = uid; ...)`): the rate limit is per place in the source and peer.

use std::fmt::{self, Write};
use std::hash::{DefaultHasher, Hasher};

use log::{LevelFilter, Log, Metadata, Record};
use towpath::logging::{self, Cause, Class, OPERATOR, PACKETS};

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
        // The worker pool, the daemon and the metrics endpoint also log events of interest to the operator (info level).
        let daemon = ["towpath::worker_pool", "towpath::daemon", "towpath::metrics", OPERATOR]
            .iter()
            .any(|part| metadata.target().starts_with(part));
        metadata.level() <= LevelFilter::Warn || daemon
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let line = || format!("towpath: {}: {}", record.level().as_str().to_lowercase(), record.args());
        if record.target() == PACKETS {
            return logging::submit(line(), Class::Packet);
        }
        if record.target() == OPERATOR {
            return logging::submit(line(), Class::Event);
        }
        let file = record.file_static().unwrap_or_default();
        let (cause, peer) = (Cause { file, line: record.line().unwrap_or(0) }, peer(record));
        // The line is formatted only if it is admitted.
        if logging::admit(cause, peer) {
            logging::submit_admitted(line(), cause, peer);
        }
    }

    fn flush(&self) {
        logging::finish();
    }
}

/// The hash of the peer's name. Two peers with the same hash share a limit.
fn peer(record: &Record<'_>) -> Option<u64> {
    struct Name(DefaultHasher);

    impl Write for Name {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            self.0.write(text.as_bytes());
            Ok(())
        }
    }

    let value = record.key_values().get("peer".into())?;
    let mut name = Name(DefaultHasher::new());
    write!(name, "{value}").ok()?;
    Some(name.0.finish())
}
