//! Log lines that never make a thread wait.
//!
//! ```text
//! tracing (this crate) ─┐ level of      limit of        queue of        thread `log`:
//! log (libraries) ──────┴ the target -> cause and peer -> lines ------> text or JSON on standard error, or journald
//! ```
//!
//! [`start`] begins the thread `log`, which alone writes. Other threads put lines into a queue of [`LINES`] lines and
//! [`BYTES`] bytes; a line without room is lost and counted. Lines of `log` rules and of states use at most half of the queue. [`admit`]
//! limits the lines of each cause and peer (`limiter.rs`); suppressed lines are counted, and summaries say how many they were. After a
//! loss, the first write that succeeds is followed by a line with the number of lost lines. The writer formats the lines ([`Format`]).
//!
//! [`finish`] waits for the writer as long as it makes progress, at most [`FLUSH_MAX`]. Before [`start`] and after a complete
//! [`finish`], [`submit`] writes directly: commands that serve no peers lose no line.
//!
//! Locks: the queue's lock is held for a push or a look-up in a table, never during a system call that can wait.

mod journal;
mod levels;
mod limiter;
mod line;
mod subscriber;

use std::backtrace::{Backtrace, BacktraceStatus};
use std::collections::VecDeque;
use std::io::{self, ErrorKind, Write};
use std::panic::PanicHookInfo;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde_json::json;
use towpath_metrics::metrics;
use tracing::Level;

use self::journal::Journal;
pub use self::levels::{Directive, DirectiveError, Levels, level, level_word};
pub use self::limiter::Cause;
use self::limiter::{Limiter, Summary};
pub(crate) use self::line::{Head, Line};
pub use self::subscriber::{change_levels, configure, install, levels};
use crate::quantity::count;
use crate::sandbox::{self, Role};

/// Lines that may wait.
pub const LINES: usize = 4096;

/// Bytes of lines that may wait.
pub const BYTES: usize = 1 << 20;

/// [`finish`] gives up after this time without a written line.
pub const FLUSH_STALLED: Duration = Duration::from_millis(500);

/// [`finish`] gives up after this time.
pub const FLUSH_MAX: Duration = Duration::from_secs(3);

/// Shortest time between two reports of lost lines.
const REPORT: Duration = Duration::from_secs(1);

/// Pause of the writer while a non-blocking standard error takes nothing.
const RETRY: Duration = Duration::from_millis(10);

/// The target of the lines of `log` rules: `tracing::info!(target: PACKETS, ...)`. Their limits are those of the rules.
pub const PACKETS: &str = "packets";

/// The target of connections that ended or were not attached.
pub const CONNECTIONS: &str = "connections";

/// The target of the events of states.
pub const STATES: &str = "states";

/// Target of the lines that answer a signal or a command of the operator. They have no limit but the size of the queue.
pub const OPERATOR: &str = "operator";

/// The targets that do not have the name of a module, and their lines.
pub const NAMED: [(&str, &str); 4] = [
    (PACKETS, "packets of `log` rules, and dropped packets"),
    (CONNECTIONS, "connections of muxes that ended or were not attached"),
    (STATES, "events of states; off by default"),
    (OPERATOR, "answers to signals, reloads, and changes of levels"),
];

/// How lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text on standard error
    Text = 0,
    /// One JSON object per line on standard error
    Json = 1,
    /// journald's native protocol, with priorities and fields
    Journald = 2,
}

/// The [`Format`], and whether text has the time. Relaxed in all accesses: they guard no other data.
static FORMAT: AtomicU8 = AtomicU8::new(Format::Text as u8);
static TIMES: AtomicBool = AtomicBool::new(false);

impl Format {
    /// The format of a service: journald's protocol if standard error is a stream to journald (JOURNAL_STREAM of systemd.exec(5)),
    /// text otherwise.
    pub fn detect() -> Self {
        let stream = std::env::var("JOURNAL_STREAM").unwrap_or_default();
        let numbers =
            stream.split_once(':').and_then(|(dev, ino)| Some((dev.parse().ok()?, ino.parse().ok()?)));
        let stderr = rustix::fs::fstat(rustix::stdio::stderr()).map(|stat| (stat.st_dev, stat.st_ino));
        match (numbers, stderr) {
            (Some(stream), Ok(stderr)) if stream == stderr => Self::Journald,
            _ => Self::Text,
        }
    }

    /// The word of the format in options.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Json => "json",
            Self::Journald => "journald",
        }
    }

    pub(crate) fn current() -> Self {
        match FORMAT.load(Ordering::Relaxed) {
            1 => Self::Json,
            2 => Self::Journald,
            _ => Self::Text,
        }
    }
}

/// Sets the format of a service. Its text has times.
pub fn set_format(format: Format) {
    TIMES.store(true, Ordering::Relaxed);
    FORMAT.store(format as u8, Ordering::Relaxed);
}

metrics! {
    /// Log lines by outcome.
    pub struct LogStats in "log" {
        /// Log lines written to standard error or journald.
        pub written: counter events as "lines": "Log lines, by outcome." (outcome = "written"),
        /// Log lines suppressed by the rate limit of their cause and peer, and by the limits of `log` rules.
        pub suppressed: counter events as "lines" (outcome = "suppressed"),
        /// Log lines lost because a queue of the log was full or standard error failed.
        pub lost: counter events as "lines" (outcome = "lost"),
    }
}

/// The subject of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The engine.
    Event,
    /// A packet or a state: a line of a `log` rule, or an event.
    Packet,
}

impl Class {
    /// The share of the queue: lines and bytes.
    fn room(self) -> (usize, usize) {
        match self {
            Self::Event => (LINES, BYTES),
            Self::Packet => (LINES / 2, BYTES / 2),
        }
    }
}

static QUEUE: OnceLock<LogQueue> = OnceLock::new();

/// Starts the writer for standard error. Panics are reported through it, too.
///
/// # Errors
///
/// Fails if the thread cannot be created.
pub fn start() -> io::Result<()> {
    if QUEUE.get().is_none() && QUEUE.set(LogQueue::start(io::stderr())?).is_ok() {
        std::panic::set_hook(Box::new(report_panic));
    }
    Ok(())
}

/// As [`start`]. Without the thread, a warning says so.
pub fn start_or_warn() {
    if let Err(error) = start() {
        tracing::warn!(
            "cannot start the log thread: the engine blocks if standard error is not read: {error}"
        );
    }
}

/// Returns true if a line of `cause` about `peer` (the hash of its name) may be submitted. A suppressed line is counted.
pub fn admit(cause: Cause, peer: Option<u64>) -> bool {
    QUEUE.get().is_none_or(|queue| queue.admit(cause, peer))
}

/// Submits an admitted line. Never waits after [`start`].
fn submit_admitted(line: Line, cause: Cause, peer: Option<u64>) {
    submit_noted(line, Class::Event, Some((cause, peer)));
}

/// Submits a message as it is. Never waits after [`start`]. Without [`start`], writes the line; errors are ignored: a closed pipe
/// (`2>&1 | tee`) must not end a daemon.
pub fn submit(message: String, class: Class) {
    submit_line(Line::new(Level::INFO, Head::None, message), class);
}

/// As [`submit`].
pub(crate) fn submit_line(line: Line, class: Class) {
    submit_noted(line, class, None);
}

fn submit_noted(line: Line, class: Class, admitted: Option<(Cause, Option<u64>)>) {
    let line = match QUEUE.get() {
        None => line,
        Some(queue) => match queue.submit_noted(line, class, admitted) {
            Ok(()) => return,
            Err(line) => line,
        },
    };
    if Format::current() == Format::Journald && Journal::new().send(&line).is_ok() {
        return;
    }
    // One write: other processes may use the same terminal.
    let _ = io::stderr().write_all((text(&line) + "\n").as_bytes());
}

/// The line for standard error.
fn text(line: &Line) -> String {
    match Format::current() {
        Format::Json => line.json(),
        // Without journald, its stream takes text.
        Format::Text | Format::Journald => line.text(TIMES.load(Ordering::Relaxed)),
    }
}

/// Waits until all lines are written, while the writer makes progress. Bounded by [`FLUSH_STALLED`] and [`FLUSH_MAX`].
pub fn finish() {
    if let Some(queue) = QUEUE.get() {
        queue.finish(FLUSH_STALLED, FLUSH_MAX);
    }
}

/// Counts lines of `log` rules that their rule's limit suppressed. A line of the log has their number.
pub fn count_suppressed(lines: u64) {
    if let Some(queue) = QUEUE.get() {
        queue.lock().stats.suppressed += lines;
    }
}

/// Counts lines that were lost before they were submitted. A line of the log has their number.
pub fn count_lost(lines: u64) {
    if let Some(queue) = QUEUE.get() {
        let mut queue = queue.lock();
        queue.stats.lost += lines;
        queue.reported += lines;
    }
}

/// The counters. Zero without [`start`].
pub fn stats() -> LogStats {
    QUEUE.get().map(LogQueue::stats).unwrap_or_default()
}

/// Reports a panic without waiting: a thread that panics must end although nothing reads the log.
fn report_panic(info: &PanicHookInfo<'_>) {
    let thread = thread::current();
    let mut text = format!("thread '{}' {info}", thread.name().unwrap_or("<unnamed>"));
    let trace = Backtrace::capture();
    if trace.status() == BacktraceStatus::Captured {
        text += &format!("\nstack backtrace:\n{trace}");
    }
    if let Some(queue) = QUEUE.get() {
        queue.submit_in_panic(Line::new(Level::ERROR, Head::None, text));
    }
}

/// The queue of one output and its writer.
#[derive(Debug)]
struct LogQueue(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    /// Signalled when the writer has something to do.
    work: Condvar,
    /// Signalled when a line was written, and at the writer's end.
    progress: Condvar,
    start: Instant,
}

#[derive(Debug, Default)]
struct Queue {
    lines: VecDeque<Line>,
    bytes: usize,
    limiter: Limiter,
    stats: LogStats,
    /// Lost lines that were reported.
    reported: u64,
    /// The writer ends when everything is written.
    finishing: bool,
    /// The writer has ended.
    ended: bool,
}

impl Queue {
    fn push(&mut self, line: Line, class: Class) {
        let (lines, bytes) = class.room();
        let size = line.size();
        if self.lines.len() >= lines || self.bytes + size > bytes {
            self.stats.lost += 1;
            return;
        }
        self.bytes += size;
        self.lines.push_back(line);
    }

    fn pop(&mut self) -> Option<Line> {
        let line = self.lines.pop_front()?;
        self.bytes -= line.size();
        Some(line)
    }
}

impl LogQueue {
    fn start(out: impl Write + Send + 'static) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            work: Condvar::new(),
            progress: Condvar::new(),
            start: Instant::now(),
        });
        let writer = Writer { shared: Arc::clone(&shared), out, journal: Journal::new(), report: None };
        // Not joined: write(2) may never return.
        thread::Builder::new().name("log".into()).spawn(|| writer.run())?;
        Ok(Self(shared))
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.0.lock()
    }

    fn admit(&self, cause: Cause, peer: Option<u64>) -> bool {
        let mut queue = self.lock();
        // A thread may wait for the lock: the time is read while it is held, so that it does not go back.
        let now = self.0.now();
        let pending = queue.limiter.pending();
        let admitted = queue.ended || queue.limiter.admit(cause, peer, now);
        queue.stats.suppressed += u64::from(!admitted);
        if queue.limiter.pending() > pending {
            // The writer sleeps until the next summary that it knows of.
            self.0.work.notify_one();
        }
        admitted
    }

    #[cfg(test)]
    fn submit(&self, message: String, class: Class) -> Result<(), String> {
        let line = Line::new(Level::INFO, Head::None, message);
        self.submit_noted(line, class, None).map_err(|line| line.message)
    }

    /// Submits a line; summaries of its cause and peer quote it. Returns the line if the writer has ended.
    fn submit_noted(
        &self,
        line: Line,
        class: Class,
        admitted: Option<(Cause, Option<u64>)>,
    ) -> Result<(), Line> {
        let mut queue = self.lock();
        if queue.ended {
            return Err(line);
        }
        if let Some((cause, peer)) = admitted {
            queue.limiter.note(cause, peer, &line.message);
        }
        queue.push(line, class);
        self.0.work.notify_one();
        Ok(())
    }

    /// Submits the line of a panic, if the panic left the lock free.
    fn submit_in_panic(&self, line: Line) {
        for _ in 0..100 {
            match self.0.queue.try_lock() {
                Ok(mut queue) => {
                    queue.push(line, Class::Event);
                    return self.0.work.notify_one();
                }
                Err(TryLockError::Poisoned(poisoned)) => {
                    poisoned.into_inner().push(line, Class::Event);
                    return self.0.work.notify_one();
                }
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    fn stats(&self) -> LogStats {
        self.lock().stats
    }

    /// Returns true if everything was written.
    fn finish(&self, stalled: Duration, most: Duration) -> bool {
        let end = Instant::now() + most;
        let mut queue = self.lock();
        queue.finishing = true;
        self.0.work.notify_one();
        while !queue.ended {
            let left = stalled.min(end.saturating_duration_since(Instant::now()));
            let before = queue.stats;
            let (relocked, wait) =
                self.0.progress.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner);
            queue = relocked;
            if left.is_zero() || wait.timed_out() && queue.stats == before && !queue.ended {
                return false;
            }
        }
        true
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        // The contents are consistent after every statement that may panic.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Nanoseconds since the start.
    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }
}

/// The only thread that writes.
struct Writer<W> {
    shared: Arc<Shared>,
    out: W,
    journal: Journal,
    /// Time of the last report of lost lines.
    report: Option<Instant>,
}

impl<W: Write> Writer<W> {
    fn run(mut self) {
        crate::background::begin();
        let shared = Arc::clone(&self.shared);
        let mut queue = shared.lock();
        let mut restricted = false;
        loop {
            // The thread writes lines before the engine is restricted. A failure is a line, for which the queue must be free.
            if !restricted && sandbox::has_begun() {
                restricted = true;
                drop(queue);
                sandbox::follow(Role::Log);
                queue = shared.lock();
            }
            let (now, finishing) = (shared.now(), queue.finishing);
            // Summaries and reports are written even if the queue is full.
            let summaries = match queue.limiter.poll_timeout() {
                Some(due) if finishing || due <= now => queue.limiter.poll_summaries(now, finishing),
                _ => Vec::new(),
            };
            let mut own: Vec<Line> = summaries.iter().map(summary).collect();
            let line = queue.pop();
            own.extend(self.report(&mut queue, line.is_none()));
            if line.is_none() && own.is_empty() {
                if finishing {
                    break;
                }
                let next = queue.limiter.poll_timeout().map_or(u64::MAX, |due| due.saturating_sub(now));
                let sleep = Duration::from_nanos(next).min(Duration::from_secs(3600));
                queue = shared.work.wait_timeout(queue, sleep).unwrap_or_else(PoisonError::into_inner).0;
                continue;
            }
            drop(queue);
            let mut wrote = LogStats::default();
            for line in line.into_iter().chain(own) {
                match self.write(line) {
                    Ok(()) => wrote.written += 1,
                    Err(_) => wrote.lost += 1,
                }
            }
            queue = shared.lock();
            queue.stats.add(&wrote);
            // A failed output does not recover: a report would fail as well.
            queue.reported += wrote.lost;
            shared.progress.notify_all();
        }
        queue.ended = true;
        shared.progress.notify_all();
    }

    /// Returns the report of lost lines: when the queue has become empty, otherwise once in [`REPORT`].
    fn report(&mut self, queue: &mut Queue, empty: bool) -> Option<Line> {
        let lost = queue.stats.lost - queue.reported;
        if lost == 0 || !empty && self.report.is_some_and(|last| last.elapsed() < REPORT) {
            return None;
        }
        self.report = Some(Instant::now());
        queue.reported = queue.stats.lost;
        let message = format!("{} lost: the log was not read fast enough", count(lost, "log line"));
        let fields = vec![("lost".into(), json!(lost))];
        Some(Line { fields, ..Line::new(Level::WARN, Head::Level, message) })
    }

    /// Sends a line to journald, or writes it in one write(2), if the output takes it: other processes may use the same terminal.
    fn write(&mut self, line: Line) -> io::Result<()> {
        if Format::current() == Format::Journald && self.journal.send(&line).is_ok() {
            return Ok(());
        }
        let line = text(&line) + "\n";
        let mut rest = line.as_bytes();
        while !rest.is_empty() {
            match self.out.write(rest) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(n) => rest = &rest[n..],
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // Another process has set O_NONBLOCK on the shared open file description.
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(RETRY),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// The line about suppressed lines.
fn summary(Summary { suppressed, sample }: &Summary) -> Line {
    let message = format!("{} suppressed like: {sample}", count(*suppressed, "further line"));
    let fields = vec![("suppressed".into(), json!(suppressed))];
    Line { fields, ..Line::new(Level::WARN, Head::Level, message) }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::sync::mpsc::{Receiver, Sender, channel};

    use super::*;

    const CAUSE: Cause = Cause { file: "a.rs", line: 1 };

    /// An output that takes a write for each permit, and all of them once the permits' sender is gone.
    struct Gated {
        permits: Receiver<()>,
        written: Arc<Mutex<String>>,
    }

    impl Write for Gated {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let _ = self.permits.recv();
            self.written.lock().unwrap().push_str(std::str::from_utf8(bytes).unwrap());
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn gated() -> (LogQueue, Sender<()>, Arc<Mutex<String>>) {
        let (permits, taken) = channel();
        let written = Arc::new(Mutex::new(String::new()));
        let out = Gated { permits: taken, written: Arc::clone(&written) };
        (LogQueue::start(out).unwrap(), permits, written)
    }

    /// Waits until the writer holds a line.
    fn until_stuck(queue: &LogQueue) {
        queue.submit("first".into(), Class::Event).unwrap();
        while !queue.lock().lines.is_empty() {
            thread::yield_now();
        }
    }

    #[test]
    fn a_full_queue_loses_lines_and_says_so_once_when_the_writer_recovers() {
        let (queue, permits, written) = gated();
        until_stuck(&queue);
        for number in 0..LINES + 10 {
            queue.submit(number.to_string(), Class::Event).unwrap();
        }
        assert_eq!((queue.stats().lost, queue.lock().lines.len()), (10, LINES));
        // The writer is stuck: the wait ends, and nothing was written.
        assert!(!queue.finish(Duration::ZERO, Duration::ZERO));
        assert_eq!(*written.lock().unwrap(), "");
        drop(permits);
        assert!(queue.finish(Duration::MAX, Duration::from_secs(600)));
        let written = written.lock().unwrap();
        let lines: Vec<&str> = written.lines().collect();
        assert_eq!((lines[0], lines.len()), ("first", LINES + 2));
        let reports: Vec<&&str> = lines.iter().filter(|line| line.contains("10 log lines lost")).collect();
        assert_eq!(reports.len(), 1, "{lines:?}");
        assert_eq!(queue.stats(), LogStats { written: LINES as u64 + 2, suppressed: 0, lost: 10 });
        // The writer has ended: lines are written directly.
        assert_eq!(queue.submit("late".into(), Class::Event), Err("late".into()));
    }

    #[test]
    fn bytes_are_bounded_and_packets_leave_half_of_the_queue() {
        let (queue, _permits, _) = gated();
        until_stuck(&queue);
        let submit = |len: usize, class: Class| {
            let before = queue.stats().lost;
            queue.submit("x".repeat(len), class).unwrap();
            queue.stats().lost == before
        };
        assert!(!submit(BYTES / 2 + 1, Class::Packet));
        assert!(submit(BYTES / 2, Class::Packet));
        assert!(!submit(1, Class::Packet));
        assert!(submit(BYTES / 2, Class::Event));
        assert!(!submit(1, Class::Event));
        let (queue, _permits, _) = gated();
        until_stuck(&queue);
        for _ in 0..LINES {
            queue.submit(String::new(), Class::Packet).unwrap();
        }
        assert_eq!(queue.stats().lost as usize, LINES / 2);
    }

    #[test]
    fn suppressed_lines_are_counted_and_summarized_at_the_end() {
        let (queue, permits, written) = gated();
        drop(permits);
        let passed = (0..1000).filter(|_| queue.admit(CAUSE, Some(7))).count() as u64;
        assert!((16..100).contains(&passed), "{passed}");
        queue.lock().limiter.note(CAUSE, Some(7), "refused");
        assert!(queue.finish(Duration::MAX, Duration::from_secs(600)));
        assert_eq!(queue.stats().suppressed, 1000 - passed);
        let line = format!("towpath: warning: {} further lines suppressed like: refused\n", 1000 - passed);
        assert_eq!(*written.lock().unwrap(), line);
    }

    #[test]
    fn a_closed_output_costs_its_lines_only() {
        let (read, write) = io::pipe().unwrap();
        drop(read);
        let queue = LogQueue::start(write).unwrap();
        for _ in 0..3 {
            queue.submit("x".into(), Class::Event).unwrap();
        }
        assert!(queue.finish(Duration::MAX, Duration::from_secs(600)));
        assert_eq!(queue.stats(), LogStats { lost: 3, ..LogStats::default() });
    }

    #[test]
    fn a_panic_is_submitted_although_its_thread_holds_the_lock() {
        let (mut read, write) = io::pipe().unwrap();
        let queue = LogQueue::start(write).unwrap();
        let held = queue.lock();
        let line = |text: &str| Line::new(Level::ERROR, Head::None, text.to_owned());
        queue.submit_in_panic(line("lost"));
        drop(held);
        queue.submit_in_panic(line("thread 'engine-0' panicked"));
        assert!(queue.finish(Duration::MAX, Duration::from_secs(600)));
        drop(queue);
        let mut text = String::new();
        read.read_to_string(&mut text).unwrap();
        assert_eq!(text, "thread 'engine-0' panicked\n");
    }
}
