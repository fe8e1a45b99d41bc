//! `towpath replay`: replays captures through the rules, with inspector processes on the queues.

mod log_lines;

use std::fs::Metadata;
use std::io::IsTerminal;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};
use rustix::process::DumpableBehavior;
use towpath::control::{self, QueryInbox, Server};
use towpath::inspector;
use towpath::report::{self, Report};
use towpath::ruleset_manager::{Clock, RulesetManager};
use towpath::snapshot::{Saving, told};
use towpath_engine::egress::QueryServer;
use towpath_engine::queue::{DefaultVerdict, Policy, Queue, RingChannel};
use towpath_engine::{Introspect, ReplayEngine, ReplayIo};
use towpath_gate::{Restored, check_snapshot};
use towpath_port::pcap::{self, Resolution};
use towpath_port::{Burst, Port, Received};
use towpath_ring::Overload;
use towpath_wire::Time;

use self::log_lines::LogLines;
use crate::args::{PassOrDrop, QueuePolicy, Replay, exit};
use crate::cli::captured::{BURST, Captured, NOT_IP};
use crate::cli::ending::Ending;
use crate::cli::wiring::Wrong;
use crate::cli::{answer, fail, say, warn};

/// Number of bursts in flight between the thread that reads a slow capture and the engine.
const BURSTS: usize = 4;

/// Maximum time without a packet before the engine serves inspectors and `towpath ctl`.
const IDLE: Duration = Duration::from_millis(5);

/// Maximum interval between checks for a signal while the engine waits for an inspector, in nanoseconds.
const LOOK: u64 = 100_000_000;

pub(crate) fn run(args: &Replay) -> u8 {
    let ending = Ending::default();
    let text = match replay(args, &ending) {
        Ok(report) if args.json => {
            serde_json::to_string(&report).expect("strings and numbers serialise") + "\n"
        }
        Ok(report) => report.to_string(),
        Err(failure) => return ending.tell("the replay").unwrap_or_else(|| failure.tell()),
    };
    // With a capture on standard output, the report goes to standard error.
    if args.out.as_ref().is_some_and(|out| out.as_os_str() == "-") {
        // The report is not a log line: none of it may be lost.
        towpath::logging::finish();
        say(text.trim_end());
        return exit::OK;
    }
    answer(exit::OK, &text)
}

fn replay(args: &Replay, ending: &Ending) -> Result<Report, Failure> {
    let loaded = args.wiring.load(args.rules.as_deref())?;
    let ruleset = loaded.ruleset.clone();
    if args.control.is_some() || !args.queues.is_empty() {
        towpath::logging::start_or_warn();
    }
    let logs = ruleset.rules().iter().any(|rule| rule.log.is_some());
    let (mut gate, topology) = args.wiring.gate(&loaded, None)?;
    let walker = gate.walker().expect("it is the first");
    let book = Arc::new(RulesetManager::new(gate, ruleset, loaded.default_allow()));
    let captures = args.captures.iter().map(|path| Waiting::open(path)).collect::<Result<Vec<_>, _>>()?;
    let writer = |path: &PathBuf, option| writer(path, option, args);
    let out = args.out.as_ref().map(|path| writer(path, "--out")).transpose()?;
    let replies = args.replies.as_ref().map(|path| writer(path, "--replies")).transpose()?;
    let lines = LogLines::create(args)?;

    // Opening captures and outputs may block; until here, signals have their default action.
    let tidies = args.control.is_some() || args.states_out.is_some() || !args.queues.is_empty();
    if tidies {
        ending.listen().map_err(Failure::Signals)?;
    }
    let policy =
        Policy { deadline: nanos(args.deadline), default: args.default_verdict.into(), ..Policy::default() };
    let (_server, inbox) = match &args.control {
        Some(path) => {
            Server::open(path, Some(Arc::clone(&book))).map(|(server, inbox)| (Some(server), Some(inbox)))?
        }
        None => (None, None),
    };
    let unsaved = |error: std::io::Error| {
        let path = args.states_out.as_deref().unwrap_or(Path::new("")).display();
        Failure::States(format!("--states-out: {path}: {error}"))
    };
    let saving = args.states_out.as_deref().map(Saving::create).transpose().map_err(unsaved)?;
    // Declared before the engine: the processes end after their channels.
    let (queues, _processes) = match queues(args, policy.clone(), ending) {
        Ok(queues) => queues,
        Err(failure) => {
            // An output without packets is still a valid capture.
            let _ = [out, replies].into_iter().flatten().try_for_each(pcap::Writer::finish);
            return Err(failure);
        }
    };
    let snapshot = args.states_in.as_deref().map(read_states).transpose()?;
    let queries = Box::new(Queries { inbox, clock: book.clock() });
    let interrupted = ending.clone();
    let io = ReplayIo::new(out, replies, queries, Box::new(move || interrupted.signal().is_some()));
    let mut run = Run {
        engine: ReplayEngine::replay(io, walker, topology, queues, policy),
        captured: Captured::default(),
        lines,
        restore: Restore { book: Arc::clone(&book), snapshot, restored: None },
        ending,
    };

    let start = Instant::now();
    // Log lines would break the progress bar.
    let mut progress = Progress::new(&captures, !logs || args.log.is_some());
    for (path, capture) in args.captures.iter().zip(captures) {
        let mut capture = capture.begin(path)?;
        run.captured.begin();
        // Standard input or a pipe may deliver packets slowly; inspectors and `towpath ctl` are served meanwhile.
        if tidies && (path.as_os_str() == "-" || capture.progress().total.is_none()) {
            if let Some(capture) = run.take_slow(capture)? {
                run.captured.end(&capture);
            }
        } else {
            run.take(&mut capture, &mut progress)?;
            run.captured.end(&capture);
        }
    }
    run.engine.process_rest().map_err(Failure::Output)?;
    run.go_on()?;
    let Run { mut engine, captured, mut lines, mut restore, .. } = run;
    lines.write(&mut engine, true)?;
    let seconds = start.elapsed().as_secs_f64();
    progress.clear();

    // Without packets, the states of the snapshot have not been restored yet.
    let now = engine.clock();
    restore.at(now);
    if let Some(saving) = saving {
        book.clock().set(now);
        saving.finish(&book).map_err(unsaved)?;
    }
    let rules = book.rules();
    let restored = restore.restored.map(report::Restored::from);
    let report =
        Report { rules, seconds, restored, captures: args.captures.len(), ..Report::of(&mut engine) };
    captured.tell(NOT_IP);
    tell_queues(&report);
    engine.into_io().finish().map_err(Failure::Output)?;
    Ok(report)
}

/// Reads and validates a snapshot.
fn read_states(path: &Path) -> Result<Vec<u8>, Failure> {
    let wrong =
        |error: &dyn std::fmt::Display| Failure::Usage(format!("--states-in: {}: {error}", path.display()));
    let snapshot = std::fs::read(path).map_err(|error| wrong(&error))?;
    check_snapshot(&snapshot).map_err(|error| wrong(&error))?;
    Ok(snapshot)
}

/// The parts of a running replay.
struct Run<'a> {
    engine: ReplayEngine,
    captured: Captured,
    lines: LogLines,
    restore: Restore,
    ending: &'a Ending,
}

impl Run<'_> {
    /// Processes one capture.
    fn take(&mut self, capture: &mut pcap::Reader, progress: &mut Progress) -> Result<(), Failure> {
        // With a file, the next burst can be read ahead. With a pipe, reading ahead could block.
        let file = capture.progress().total.is_some();
        let [mut burst, mut next] = [Burst::new(BURST), Burst::new(BURST)];
        let mut received = capture.receive(&mut burst).map_err(Failure::Capture)?;
        while received == Received::Frames {
            // An error here is reported after the packets that were read before it.
            let behind = file.then(|| capture.receive(&mut next));
            self.take_burst(&burst, file.then_some(&next), capture.resolution())?;
            progress.advance(capture);
            received = behind.unwrap_or_else(|| capture.receive(&mut next)).map_err(Failure::Capture)?;
            std::mem::swap(&mut burst, &mut next);
        }
        progress.finish(capture);
        Ok(())
    }

    /// Processes a capture that may block. A thread reads it, so that inspectors are served meanwhile. On an error the thread is not
    /// joined, because its read may never return.
    fn take_slow(&mut self, mut capture: pcap::Reader) -> Result<Option<pcap::Reader>, Failure> {
        let (empty, empties) = sync_channel(BURSTS);
        let (full, fulls) = sync_channel(BURSTS);
        for _ in 0..BURSTS {
            let _ = empty.send(Burst::new(BURST));
        }
        let reader = std::thread::spawn(move || {
            while let Ok(mut burst) = empties.recv() {
                let received = capture.receive(&mut burst);
                let last = !matches!(received, Ok(Received::Frames));
                if full.send((received, burst, capture.resolution())).is_err() || last {
                    break;
                }
            }
            capture
        });
        loop {
            let (received, burst, resolution) = match fulls.recv_timeout(IDLE) {
                Ok(full) => full,
                Err(RecvTimeoutError::Timeout) => {
                    self.engine.process_verdicts().map_err(Failure::Output)?;
                    self.go_on()?;
                    self.lines.write(&mut self.engine, false)?;
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => break,
            };
            if received.map_err(Failure::Capture)? != Received::Frames {
                break;
            }
            self.take_burst(&burst, None, resolution)?;
            let _ = empty.send(burst);
        }
        // The thread has ended, or it panicked and printed the message.
        Ok(reader.join().ok())
    }

    /// Processes a burst; `next` is the following one ([`Captured::times`]).
    fn take_burst(
        &mut self,
        burst: &Burst,
        next: Option<&Burst>,
        resolution: Resolution,
    ) -> Result<(), Failure> {
        // The resolution of a pcapng capture is known only at its first packet.
        if resolution == Resolution::Nanos {
            self.engine.io_mut().set_resolution(Resolution::Nanos);
        }
        let times = self.captured.times(burst, next);
        if let Some(first) = times.first() {
            self.restore.at(*first);
        }
        self.engine.process_captured(burst, times).map_err(Failure::Output)?;
        self.go_on()?;
        self.lines.write(&mut self.engine, false)
    }

    /// Returns an error if a signal was received.
    fn go_on(&mut self) -> Result<(), Failure> {
        if self.ending.signal().is_none() {
            return Ok(());
        }
        self.engine.io_mut().close();
        Err(Failure::Ended)
    }
}

/// The queues, and the processes of their inspectors.
fn queues(
    args: &Replay,
    policy: Policy,
    ending: &Ending,
) -> Result<(Vec<Queue<RingChannel>>, Vec<inspector::Process>), Failure> {
    if !args.queues.is_empty() {
        // Otherwise, ptrace(2) lets other processes of the same user read and write this process's memory. A failure is ignored: the
        // call works on every Linux, and the rings do not depend on it.
        let _ = rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable);
    }
    let mut numbers: Vec<u16> = args.queues.iter().map(|arg| arg.number).collect();
    numbers.sort_unstable();
    numbers.dedup();
    for (index, policy) in args.queue_policies.iter().enumerate() {
        let number = policy.number;
        if !numbers.contains(&number) {
            return Err(Failure::Usage(format!(
                "--queue-policy {number}: there is no --queue {number}=COMMAND"
            )));
        }
        if args.queue_policies[..index].iter().any(|earlier| earlier.number == number) {
            return Err(Failure::Usage(format!("queue {number} has two policies")));
        }
        if let Some(Overload::Queue(other)) = policy.overload
            && (other == number || !numbers.contains(&other))
        {
            return Err(Failure::Usage(format!(
                "queue {number} hands packets to queue {other}: name another queue that has a --queue {other}=COMMAND"
            )));
        }
        if let Some(other) = policy.may_queue.iter().find(|other| !numbers.contains(other)) {
            return Err(Failure::Usage(format!(
                "queue {number} may name queue {other}, for which there is no --queue {other}=COMMAND"
            )));
        }
    }
    // Dropped after the queues, with which their channels end.
    let mut processes = Vec::new();
    let mut queues = Vec::new();
    let mut channels = 0;
    for number in numbers {
        let of_queue = args.queue_policies.iter().find(|policy| policy.number == number);
        let of_queue = of_queue.cloned().unwrap_or_default();
        let policy = of_queue.over(&policy);
        let mut socket = inspector::Socket::bind(number, &policy)?;
        let mut queue = Queue::new(number, policy);
        for arg in args.queues.iter().filter(|arg| arg.number == number) {
            for _ in 0..of_queue.workers.unwrap_or(1) {
                channels += 1;
                let (channel, process) = socket.start(&arg.words, &|| ending.signal().is_some())?;
                processes.push(process);
                queue.join(channels, channel);
            }
        }
        queues.push(queue);
    }
    Ok((queues, processes))
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl QueuePolicy {
    /// Returns `general`, overridden by the values that this policy sets.
    fn over(&self, general: &Policy) -> Policy {
        let high = self.high.unwrap_or(general.high);
        Policy {
            // A replay waits for its inspectors: otherwise runs would differ.
            stall: general.stall,
            deadline: self.deadline.map_or(general.deadline, nanos),
            default: self.default_verdict.map_or(general.default, DefaultVerdict::from),
            fanout: self.fanout.unwrap_or(general.fanout),
            overload: self.overload.unwrap_or(general.overload),
            high,
            // Default low mark: the inspector has room again with one packet less than the high mark.
            low: self.low.unwrap_or(if high == u32::MAX { general.low } else { high - 1 }),
            may_queue: self.may_queue.clone(),
            share: general.share,
        }
    }
}

impl From<PassOrDrop> for DefaultVerdict {
    fn from(verdict: PassOrDrop) -> Self {
        match verdict {
            PassOrDrop::Pass => Self::Pass,
            PassOrDrop::Drop => Self::Drop,
        }
    }
}

/// Creates an output file, after checking that it is neither one of the captures nor the other output.
fn writer(path: &Path, option: &str, args: &Replay) -> Result<pcap::Writer, Failure> {
    if args.out == args.replies {
        return Err(Failure::Usage("--out and --replies name the same file".to_owned()));
    }
    let out = file(path, &std::io::stdout());
    let is = |other: &PathBuf, standard: &dyn AsFd| out.is_some() && file(other, standard) == out;
    if args.captures.iter().any(|capture| is(capture, &std::io::stdin())) {
        return Err(Failure::Usage(format!(
            "{option} {} would overwrite a capture that is read",
            path.display()
        )));
    }
    // The file of --out exists by now.
    if option == "--replies" && args.out.as_ref().is_some_and(|out| is(out, &std::io::stdout())) {
        return Err(Failure::Usage("--out and --replies name the same file".to_owned()));
    }
    pcap::Writer::create(path).map_err(Failure::Output)
}

/// Identifies a regular file by device and inode, independent of its path. `None` if it does not exist or is not a regular file.
/// `-` stands for `standard`.
fn file(path: &Path, standard: &dyn AsFd) -> Option<(u64, u64)> {
    let metadata = match path.as_os_str() == "-" {
        true => std::fs::File::from(standard.as_fd().try_clone_to_owned().ok()?).metadata(),
        false => std::fs::metadata(path),
    };
    let metadata = metadata.ok().filter(Metadata::is_file)?;
    Some((metadata.dev(), metadata.ino()))
}

/// A capture that is not being read yet. Regular files are closed until then, to stay below the limit of open files.
enum Waiting {
    /// A file, with its length in bytes.
    File(u64),
    /// An input that can be read only once.
    Open(Box<pcap::Reader>),
}

impl Waiting {
    /// Checks that the input is a capture.
    fn open(path: &Path) -> Result<Self, Failure> {
        let reader = pcap::Reader::open(path).map_err(Failure::NoCapture)?;
        Ok(reader.progress().total.map_or_else(|| Self::Open(Box::new(reader)), Self::File))
    }

    fn begin(self, path: &Path) -> Result<pcap::Reader, Failure> {
        match self {
            Self::File(_) => pcap::Reader::open(path).map_err(Failure::NoCapture),
            Self::Open(reader) => Ok(*reader),
        }
    }

    fn total(&self) -> Option<u64> {
        match self {
            Self::File(len) => Some(*len),
            Self::Open(_) => None,
        }
    }
}

fn tell_queues(report: &Report) {
    for queue in &report.queues {
        match &queue.trouble {
            Some(trouble) => {
                let lost = queue.stats.lost();
                warn(format_args!("queue {}: {trouble}; {lost} decided by default", queue.number));
            }
            None if queue.stats.lost() > 0 => warn(format_args!(
                "queue {}: {} of {} frames decided by default",
                queue.number,
                queue.stats.lost(),
                queue.stats.frames
            )),
            None => {}
        }
    }
}

/// The queries of `towpath ctl`.
struct Queries {
    inbox: Option<QueryInbox>,
    /// The captures' time, for queries about states.
    clock: Clock,
}

impl QueryServer for Queries {
    fn serve(&mut self, engine: &mut dyn Introspect) -> u64 {
        self.clock.set(engine.clock());
        self.inbox.as_mut().map_or(u64::MAX, |inbox| inbox.serve_engine(engine)).min(LOOK)
    }
}

/// Restores the states of a snapshot at the first packet's time.
struct Restore {
    book: Arc<RulesetManager>,
    snapshot: Option<Vec<u8>>,
    /// The result.
    restored: Option<Restored>,
}

impl Restore {
    /// Restores the states; later calls do nothing.
    fn at(&mut self, now: Time) {
        if let Some(snapshot) = self.snapshot.take() {
            let restored = self.book.restore(&snapshot, now).expect("it was checked");
            if restored.refused > 0 {
                warn(format_args!("--states-in: {}", told(restored)));
            }
            self.restored = Some(restored);
        }
    }
}

/// A progress bar on standard error, if that is a terminal and the captures' length is known.
struct Progress {
    bar: ProgressBar,
    /// Bytes of the finished captures.
    done: u64,
}

impl Progress {
    fn new(captures: &[Waiting], shown: bool) -> Self {
        let total: Option<u64> = captures.iter().map(Waiting::total).sum();
        let bar = match total {
            Some(total) if shown && std::io::stderr().is_terminal() => ProgressBar::new(total),
            _ => ProgressBar::hidden(),
        };
        let style = "{wide_bar} {bytes}/{total_bytes}, {eta} left";
        bar.set_style(ProgressStyle::with_template(style).expect("a constant template"));
        Self { bar, done: 0 }
    }

    fn advance(&self, capture: &pcap::Reader) {
        // The bar limits its redraw rate itself.
        self.bar.set_position(self.done + capture.progress().taken);
    }

    fn finish(&mut self, capture: &pcap::Reader) {
        self.done += capture.progress().taken;
    }

    fn clear(&self) {
        self.bar.finish_and_clear();
    }
}

/// Why a replay failed.
enum Failure {
    Usage(String),
    Wrong(Wrong),
    /// A capture cannot be opened or is not a capture.
    NoCapture(towpath_port::Error),
    /// Reading a capture failed.
    Capture(towpath_port::Error),
    /// Writing an output failed.
    Output(towpath_port::Error),
    Inspector(inspector::Error),
    /// The states cannot be written.
    States(String),
    /// The lines of `log` rules cannot be written.
    Log(String),
    /// The control socket cannot be created.
    Control(control::BindError),
    /// The signal handlers cannot be installed.
    Signals(std::io::Error),
    /// A signal was received.
    Ended,
}

impl Failure {
    fn tell(self) -> u8 {
        match self {
            Self::Usage(message) => fail(exit::USAGE, message),
            Self::Wrong(wrong) => wrong.tell(),
            Self::NoCapture(error) => fail(exit::NO_CAPTURE, error),
            Self::Capture(error) | Self::Output(error) => fail(exit::FAILED, error),
            Self::States(error) | Self::Log(error) => fail(exit::FAILED, error),
            Self::Inspector(error) => fail(exit::INSPECTOR, error),
            Self::Control(error) => fail(exit::NO_ENGINE, format_args!("--control: {error}")),
            Self::Signals(error) => fail(exit::FAILED, format_args!("signals: {error}")),
            Self::Ended => exit::FAILED,
        }
    }
}

impl From<Wrong> for Failure {
    fn from(wrong: Wrong) -> Self {
        Self::Wrong(wrong)
    }
}

impl From<control::BindError> for Failure {
    fn from(error: control::BindError) -> Self {
        Self::Control(error)
    }
}

impl From<inspector::Error> for Failure {
    fn from(error: inspector::Error) -> Self {
        Self::Inspector(error)
    }
}
