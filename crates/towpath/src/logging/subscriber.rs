//! The receivers of log lines: of `tracing` for this crate, and of `log` for the library crates. Both fill the queue.
//!
//! A line may name its peer (`tracing::warn!(peer = uid, ...)`, `log::warn!(peer = uid; ...)`): the rate limit is per place in the
//! source and peer. The registry and the formatters of tracing-subscriber are not used: there are no spans, and its writers block the
//! thread that logs.

use std::borrow::Cow;
use std::fmt::{self, Write};
use std::hash::{DefaultHasher, Hasher};
use std::sync::{PoisonError, RwLock};
use std::time::SystemTime;

use log::kv::{self, Key, VisitSource};
use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::level_filters::LevelFilter;
use tracing::span::{Attributes, Id, Record};
use tracing::subscriber::Interest;
use tracing::{Event, Level, Metadata, Subscriber};

use super::levels::{Directive, DirectiveError, Levels};
use super::limiter::Cause;
use super::line::{Head, Line};
use super::{Class, OPERATOR, PACKETS, STATES};

/// The name of the field that the rate limit uses, and of the message.
const PEER: &str = "peer";
const MESSAGE: &str = "message";

/// The levels in use and those of the configuration. Lines of known places do not take the lock: tracing caches their result, and `log`
/// compares with the most verbose level first.
static LEVELS: RwLock<Option<(Levels, Levels)>> = RwLock::new(None);

/// Installs the receivers, with these levels. Before, no line is written.
pub fn install(levels: Levels) {
    configure(levels);
    // A second call changes the levels only.
    let _ = tracing::dispatcher::set_global_default(tracing::Dispatch::new(Lines));
    let _ = log::set_logger(&Bridge);
    tracing::callsite::rebuild_interest_cache();
}

/// Replaces the levels by those of the configuration.
pub fn configure(levels: Levels) {
    replace(levels.clone(), levels);
}

/// The levels in use.
pub fn levels() -> Levels {
    let levels = LEVELS.read().unwrap_or_else(PoisonError::into_inner);
    levels.as_ref().map_or_else(|| Levels::new(LevelFilter::OFF), |(used, _)| used.clone())
}

/// Changes levels until the next [`configure`]: all of `directives`, or none. With `reset`, those of the configuration come first.
///
/// # Errors
///
/// Too many targets.
pub fn change_levels(reset: bool, directives: &[Directive]) -> Result<(), DirectiveError> {
    let mut levels = LEVELS.write().unwrap_or_else(PoisonError::into_inner);
    let Some((used, configured)) = levels.clone() else { return Ok(()) };
    let mut changed = if reset { configured.clone() } else { used };
    directives.iter().try_for_each(|directive| changed.set(directive))?;
    *levels = Some((changed.clone(), configured));
    drop(levels);
    applied(&changed);
    Ok(())
}

fn replace(used: Levels, configured: Levels) {
    *LEVELS.write().unwrap_or_else(PoisonError::into_inner) = Some((used.clone(), configured));
    applied(&used);
}

/// Makes both facades ask again. Called without the lock: tracing asks [`Lines`] for every place meanwhile.
fn applied(levels: &Levels) {
    log::set_max_level(match levels.most().into_level() {
        None => log::LevelFilter::Off,
        Some(Level::ERROR) => log::LevelFilter::Error,
        Some(Level::WARN) => log::LevelFilter::Warn,
        Some(Level::INFO) => log::LevelFilter::Info,
        Some(Level::DEBUG) => log::LevelFilter::Debug,
        Some(Level::TRACE) => log::LevelFilter::Trace,
    });
    tracing::callsite::rebuild_interest_cache();
}

fn enables(target: &str, level: Level) -> bool {
    let levels = LEVELS.read().unwrap_or_else(PoisonError::into_inner);
    levels.as_ref().is_some_and(|(used, _)| used.enables(target, level))
}

/// Puts a line into the queue, if the rate limit of its cause and peer admits it. It is made only then. Lines of packets and states have
/// limits of their own; those that answer the operator have none.
fn submit(target: &str, cause: Cause, peer: Option<u64>, line: impl FnOnce() -> Line) {
    match target {
        PACKETS | STATES => super::submit_line(line(), Class::Packet),
        OPERATOR => super::submit_line(line(), Class::Event),
        _ if super::admit(cause, peer) => super::submit_admitted(line(), cause, peer),
        _ => {}
    }
}

/// The receiver of `tracing`.
struct Lines;

impl Subscriber for Lines {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        if self.enabled(metadata) { Interest::always() } else { Interest::never() }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.is_event() && enables(metadata.target(), *metadata.level())
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        let levels = LEVELS.read().unwrap_or_else(PoisonError::into_inner);
        levels.as_ref().map(|(used, _)| used.most())
    }

    fn event(&self, event: &Event<'_>) {
        let metadata = event.metadata();
        let file = metadata.file().unwrap_or_default();
        let cause = Cause { file, line: metadata.line().unwrap_or(0) };
        let mut peer = PeerHash(None);
        event.record(&mut peer);
        submit(metadata.target(), cause, peer.0, || {
            let mut parts = Parts::default();
            event.record(&mut parts);
            parts.line(*metadata.level(), metadata.target().into())
        });
    }

    // There are no spans.
    fn new_span(&self, _: &Attributes<'_>) -> Id {
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}

/// The receiver of `log`.
struct Bridge;

impl log::Log for Bridge {
    fn enabled(&self, metadata: &log::Metadata<'_>) -> bool {
        enables(metadata.target(), level(metadata.level()))
    }

    fn log(&self, record: &log::Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let file = record.file_static().unwrap_or_default();
        let cause = Cause { file, line: record.line().unwrap_or(0) };
        let peer = record.key_values().get(PEER.into()).and_then(|value| hash(&value));
        submit(record.target(), cause, peer, || {
            let mut parts = Parts { message: record.args().to_string(), ..Parts::default() };
            // The visitor does not fail.
            let _ = record.key_values().visit(&mut parts);
            parts.line(level(record.level()), record.target().to_owned().into())
        });
    }

    fn flush(&self) {}
}

fn level(level: log::Level) -> Level {
    match level {
        log::Level::Error => Level::ERROR,
        log::Level::Warn => Level::WARN,
        log::Level::Info => Level::INFO,
        log::Level::Debug => Level::DEBUG,
        log::Level::Trace => Level::TRACE,
    }
}

/// The hash of the peer's name. Two peers with the same hash share a limit.
fn hash(name: &dyn fmt::Display) -> Option<u64> {
    struct Name(DefaultHasher);

    impl Write for Name {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            self.0.write(text.as_bytes());
            Ok(())
        }
    }

    let mut hasher = Name(DefaultHasher::new());
    write!(hasher, "{name}").ok()?;
    Some(hasher.0.finish())
}

/// Finds the peer of a line.
struct PeerHash(Option<u64>);

impl Visit for PeerHash {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == PEER {
            self.0 = hash(&fmt::from_fn(|f| value.fmt(f)));
        }
    }
}

/// The message and the fields of a line.
#[derive(Default)]
struct Parts {
    message: String,
    fields: Vec<(Cow<'static, str>, Value)>,
}

impl Parts {
    fn line(self, level: Level, target: Cow<'static, str>) -> Line {
        let Self { message, fields } = self;
        Line { time: SystemTime::now(), level, target, head: Head::Level, message, fields }
    }

    fn put(&mut self, field: &Field, value: impl Into<Value>) {
        self.fields.push((field.name().into(), value.into()));
    }
}

impl Visit for Parts {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.record_str(field, &format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        match field.name() {
            MESSAGE => self.message = value.to_owned(),
            _ => self.put(field, value),
        }
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.put(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.put(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.put(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.put(field, value);
    }
}

impl<'kvs> VisitSource<'kvs> for Parts {
    fn visit_pair(&mut self, key: Key<'kvs>, value: kv::Value<'kvs>) -> Result<(), kv::Error> {
        let number = value.to_u64().map(Value::from).or_else(|| value.to_i64().map(Value::from));
        let value = number.unwrap_or_else(|| Value::from(value.to_string()));
        self.fields.push((key.as_str().to_owned().into(), value));
        Ok(())
    }
}
