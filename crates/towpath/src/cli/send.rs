//! `towpath send`: sends a file over TCP and reports what zero copy saved.

mod source;

use std::hash::Hasher;
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use clap::builder::ValueHint;
use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::{Map, Value};
use towpath_send::{
    Closed, CopyMode, Counters, Limits, Options, Pages, PlainCause, Pool, SendError, Sender, Unarmed,
};
use twox_hash::XxHash3_64;

use crate::args::exit;
use crate::cli::transfer::{
    ALIVE, ANSWER_BYTES, Answer, Header, Record, Status, bytes, cpu_time, read_full, thread_time,
};
use crate::cli::{answer, fail, warn};
use source::{Piece, Source};
use towpath::metrics::Layout;

/// Maximum memory of messages in flight, in bytes.
const IN_FLIGHT: usize = 32 << 20;
/// Bytes per stretch in `--mode compare`; the modes alternate after each stretch.
const STRETCH: u64 = 32 << 20;

/// Send a file to `towpath recv`, without copying where possible, and report the cost
///
/// Sends the file over TCP in messages that the kernel transmits directly from this program's memory (MSG_ZEROCOPY), where probes
/// show that the kernel does not copy them after all. Both ends compute a checksum. The final report has the bytes sent with and
/// without a copy, the CPU time of both ends, and advice. With --mode compare, stretches of the file are sent alternately with and
/// without a copy, to measure what zero copy saves on this path. Holes of a sparse file are not sent. A file that changes while it is
/// sent is reported; one that becomes shorter is an error.
///
/// One file is sent, from its start. Directories, and transfers that are resumed, are tasks for rsync.
#[derive(Debug, Parser)]
#[command(after_help = "\
Example:
  towpath recv --listen 0.0.0.0:9000 --out copy.bin      on one machine, then on the other
  towpath send big.bin --to 192.0.2.7:9000
  towpath send big.bin --to 192.0.2.7:9000 --mode compare  what each way costs
  tar -c dir | towpath send - --to 192.0.2.7:9000          a stream, to `towpath recv --out - | tar -x`")]
pub(crate) struct Send {
    /// The file to send; `-` is standard input
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: PathBuf,

    /// The receiver's address, HOST:PORT
    #[arg(long, value_name = "ADDR")]
    to: String,

    /// Message size, in bytes
    #[arg(long, value_name = "BYTES", default_value = "262144", value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    message: u32,

    /// Copy mode
    #[arg(long, value_name = "MODE", default_value = "adaptive")]
    mode: Mode,

    /// Maximum time without progress at the receiver, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    timeout: Duration,

    /// Print the report as one JSON object
    #[arg(long)]
    json: bool,
}

/// Send modes that the command line accepts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Zero copy where probes show that it works
    Adaptive,
    /// Zero copy always, even if the kernel copies
    Zerocopy,
    /// Copy always
    Plain,
    /// Alternate between zero copy and copy
    Compare,
}

impl Mode {
    const fn choice(self) -> CopyMode {
        match self {
            Self::Adaptive => CopyMode::Adaptive,
            Self::Zerocopy | Self::Compare => CopyMode::Zerocopy,
            Self::Plain => CopyMode::Plain,
        }
    }
}

pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    if !(0.001..=86_400.0).contains(&seconds) {
        return Err("a timeout is between 0.001 and 86400 seconds".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// A progress bar if standard error is a terminal, nothing otherwise.
pub(crate) fn progress(length: u64) -> ProgressBar {
    let style = "{wide_bar} {binary_bytes} of {binary_total_bytes}, {binary_bytes_per_sec}, {eta} left";
    let bar = ProgressBar::new(length);
    if let Ok(style) = ProgressStyle::with_template(style) {
        bar.set_style(style);
    }
    bar
}

pub(crate) fn run(args: &Send) -> u8 {
    match send(args) {
        Ok(report) if args.json => {
            answer(exit::OK, &(serde_json::to_string(&report).expect("strings and numbers serialise") + "\n"))
        }
        Ok(report) => answer(exit::OK, &report.to_string()),
        Err(error) => fail(exit::FAILED, error),
    }
}

fn send(args: &Send) -> Result<Report, String> {
    let mut source = Source::open(&args.file)?;
    let stream = connect(&args.to, args.timeout)?;
    let answers = listen(&stream).map_err(|error| error.to_string())?;
    let keep = stream.try_clone().map_err(|error| error.to_string())?;

    let message = args.message as usize;
    let frames = (IN_FLIGHT / message).clamp(4, 512);
    let mut pool =
        Pool::new(frames, message, true).map_err(|error| format!("memory for {frames} messages: {error}"))?;
    let options = Options {
        choice: args.mode.choice(),
        max_frames: frames - 1,
        stall: Some(args.timeout),
        ..Options::default()
    };
    let congestion = rustix::net::sockopt::tcp_congestion(&stream).ok();
    let mut sender = Sender::new(stream, options).map_err(|error| error.to_string())?;

    let (start, cpu_before) = (Instant::now(), cpu_time());
    let told = |error: SendError| match answers.poll() {
        Some(Ok(answer)) => refused(&args.to, answer.status),
        _ => format!("{}: {error}", args.to),
    };
    // At once: the receiver waits for it.
    sender.send(Header { length: source.length() }.emit().to_vec()).map_err(told)?;
    let mut cost = Cost::default();
    let bar = source.length().map_or_else(ProgressBar::hidden, progress);
    let (mut sent, mut holes, mut hash) = (0, 0, XxHash3_64::new());
    loop {
        if let Some(Ok(answer)) = answers.poll() {
            return Err(refused(&args.to, answer.status));
        }
        if args.mode == Mode::Compare && sent % STRETCH < message as u64 {
            // Wait for the data in flight, so that its cost is counted for the mode that sent it.
            cost.of(&mut sender, |sender| sender.drain(args.timeout).map(drop)).map_err(told)?;
            let plain = sent / STRETCH % 2 == 1;
            sender.set_choice(if plain { CopyMode::Plain } else { CopyMode::Zerocopy });
        }
        // `max_frames` is one less than the pool's size, so a frame is always free.
        let mut frame = pool.take().ok_or("no free frame")?;
        let (len, record) = match source.next(&mut frame.spare()[..message])? {
            Piece::End => break,
            Piece::Hole(bytes) => {
                let record = Record::Hole(bytes).emit();
                hash.write(&record);
                holes += bytes;
                sender.queue(0, record.to_vec()).map_err(told)?;
                continue;
            }
            Piece::Data { len, record } => (len, record),
        };
        if let Some(bytes) = record {
            sender.queue(0, Record::Data(bytes).emit().to_vec()).map_err(told)?;
        }
        frame.filled(len);
        hash.write(&frame);
        sent += len as u64;
        // The writer of a stream may write nothing more for a while.
        let waits = source.length().is_none() && len < message;
        let send = |sender: &mut Sender| if waits { sender.send(frame) } else { sender.queue(0, frame) };
        cost.of(&mut sender, send).map_err(told)?;
        bar.set_position(sent + holes);
    }
    let (length, checksum) = (sent + holes, hash.finish());
    sender.queue(0, Record::End.emit().to_vec()).map_err(told)?;
    sender.queue(0, checksum.to_le_bytes().to_vec()).map_err(told)?;
    cost.of(&mut sender, Sender::flush).map_err(told)?;
    bar.finish_and_clear();

    let received = match answers.wait(args.timeout) {
        Some(answer) => answer.map_err(|error| format!("{}: {error}", args.to))?,
        None => return Err(format!("{}: no message from the receiver for {:?}", args.to, args.timeout)),
    };
    if received.status != Status::Whole {
        return Err(refused(&args.to, received.status));
    }
    if (received.received, received.checksum) != (length, checksum) {
        return Err(format!("{}: the receiver has other data: checksum {:016x}", args.to, received.checksum));
    }
    let seconds = start.elapsed().as_secs_f64();
    let unarmed = sender.unarmed();
    let closed = sender.close(args.timeout).map_err(|error| format!("{}: {error}", args.to))?;
    let cpu = cpu_time() - cpu_before;
    let _ = keep.shutdown(Shutdown::Both);
    let changed = source.change();
    changed.iter().for_each(|change| warn(format_args!("{change}")));
    Ok(Report::new(
        (length, holes, changed.is_some()),
        seconds,
        checksum,
        [cpu, received.cpu],
        &cost,
        &closed,
        &Circumstances {
            unarmed,
            pages: pool.pages(),
            message: args.message,
            limits: Limits::read(),
            mode: args.mode,
            congestion,
        },
    ))
}

fn connect(to: &str, timeout: Duration) -> Result<TcpStream, String> {
    let addresses: Vec<SocketAddr> =
        to.to_socket_addrs().map_err(|error| format!("{to}: {error}; expected HOST:PORT"))?.collect();
    let mut failed = format!("{to}: no address");
    for address in addresses {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => return Ok(stream),
            Err(error) => {
                failed = format!("connecting to {address}: {error}; is `towpath recv` running there?")
            }
        }
    }
    Err(failed)
}

/// Messages from the receiver.
struct Answers(Receiver<Said>);

enum Said {
    /// The receiver is still taking data.
    Alive,
    Answer(Result<Answer, String>),
}

impl Answers {
    /// Returns the receiver's answer, if it has arrived.
    fn poll(&self) -> Option<Result<Answer, String>> {
        self.0.try_iter().find_map(Said::answer)
    }

    /// Waits for the answer. Fails after `patience` without a message from the receiver.
    fn wait(&self, patience: Duration) -> Option<Result<Answer, String>> {
        loop {
            match self.0.recv_timeout(patience) {
                Ok(said) => match said.answer() {
                    None => {}
                    answer => return answer,
                },
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return None,
            }
        }
    }
}

impl Said {
    fn answer(self) -> Option<Result<Answer, String>> {
        if let Self::Answer(answer) = self { Some(answer) } else { None }
    }
}

/// Starts a thread that reads the receiver's answer, which may arrive before everything is sent.
fn listen(stream: &TcpStream) -> std::io::Result<Answers> {
    let mut stream = stream.try_clone()?;
    let (tell, answers) = channel();
    thread::spawn(move || {
        let mut answer = [0; ANSWER_BYTES];
        let said = loop {
            match read_full(&mut stream, &mut answer[..1]) {
                Ok(1) if answer[0] == ALIVE => {
                    if tell.send(Said::Alive).is_err() {
                        return;
                    }
                }
                Ok(0) => {
                    break Err("ended the connection without an answer; is it `towpath recv`?".to_owned());
                }
                first => {
                    break first.and_then(|_| read_full(&mut stream, &mut answer[1..])).map_or_else(
                        |error| Err(format!("waiting for its answer: {error}")),
                        |rest| match rest + 1 {
                            ANSWER_BYTES => {
                                Answer::parse(&answer).ok_or("it is not `towpath recv`".to_owned())
                            }
                            _ => Err("it is not `towpath recv`: its answer is truncated".to_owned()),
                        },
                    );
                }
            }
        };
        // If sending failed, the answer's channel has no reader.
        let _ = tell.send(Said::Answer(said));
    });
    Ok(Answers(answers))
}

/// CPU time of the sending calls and of reading completions, by mode. Excludes reading and hashing the file.
#[derive(Default)]
struct Cost {
    zerocopy: Duration,
    plain: Duration,
    last_plain: bool,
}

impl Cost {
    /// Runs `what` and adds its CPU time to the mode that sent most of its bytes, or to the previous mode if it sent none.
    fn of(
        &mut self,
        sender: &mut Sender,
        what: impl FnOnce(&mut Sender) -> Result<(), SendError>,
    ) -> Result<(), SendError> {
        let ways = |sender: &Sender| [sender.counters().zerocopy_bytes, sender.counters().plain_bytes()];
        let (before, start) = (ways(sender), thread_time());
        let done = what(sender);
        let spent = thread_time().saturating_sub(start);
        let [zerocopy, plain] = ways(sender);
        let (zerocopy, plain) = (zerocopy - before[0], plain - before[1]);
        if zerocopy + plain > 0 {
            self.last_plain = plain > zerocopy;
        }
        *(if self.last_plain { &mut self.plain } else { &mut self.zerocopy }) += spent;
        done
    }
}

fn refused(to: &str, status: Status) -> String {
    let why = match status {
        Status::Whole => "the receiver reported completion before all data was sent",
        Status::Damaged => "the received data differ from the sent data: the checksums differ",
        Status::DiskFull => "the receiver's disk is full",
        Status::CannotWrite => "the receiver cannot write its file",
    };
    format!("{to}: {why}")
}

struct Circumstances {
    unarmed: Option<Unarmed>,
    pages: Pages,
    message: u32,
    limits: Limits,
    mode: Mode,
    congestion: Option<String>,
}

/// Minimum bytes per mode for reporting its cost; below, the cost of a few calls dominates.
const WORTH: u64 = 16 << 20;

/// The counters in the JSON object.
const COUNTERS: Layout = Layout {
    families: &[("plain", "plain"), ("switches", "switches"), ("probes", "probes")],
    renamed: &[("numbers", "zerocopy_calls")],
    moved: &[],
    hidden: &[],
};

/// The JSON object of `--json`.
#[derive(Serialize)]
struct Report {
    bytes: u64,
    /// Bytes of holes, which were not sent.
    hole_bytes: u64,
    /// The file changed while it was sent.
    changed: bool,
    seconds: f64,
    bytes_per_second: f64,
    checksum: String,
    plain_bytes: u64,
    /// The sender's counters. `plain` has the bytes sent with a copy, by cause; causes without bytes are omitted.
    #[serde(flatten)]
    fields: Map<String, Value>,
    #[serde(skip)]
    counters: Counters,
    sender_cpu_seconds: f64,
    receiver_cpu_seconds: f64,
    /// CPU time of the sending calls, by mode.
    zerocopy_cpu_seconds: f64,
    plain_cpu_seconds: f64,
    /// Microseconds from a send call to reading its completion (p50, p99); upper bounds of power-of-two buckets.
    pin_time_us: Option<[u64; 2]>,
    pages: &'static str,
    advice: Vec<String>,
}

impl Report {
    fn new(
        (length, hole_bytes, changed): (u64, u64, bool),
        seconds: f64,
        checksum: u64,
        [sender, receiver]: [Duration; 2],
        cost: &Cost,
        closed: &Closed,
        circumstances: &Circumstances,
    ) -> Self {
        let asked = matches!(circumstances.unarmed, None | Some(Unarmed::Requested));
        let mut fields = COUNTERS.object(&closed.counters);
        if let Some(plain) = fields.get_mut("plain").and_then(Value::as_object_mut) {
            plain.retain(|_, bytes| *bytes != 0);
            if let Some(bytes) = plain.remove(PlainCause::Unarmed.name()) {
                let name = if asked { "as-asked" } else { PlainCause::Unarmed.name() };
                plain.insert(name.to_owned(), bytes);
            }
        }
        let quantile = |share| closed.distributions.pin_time.quantile(share);
        Self {
            bytes: length,
            hole_bytes,
            changed,
            seconds,
            bytes_per_second: length as f64 / seconds,
            checksum: format!("{checksum:016x}"),
            plain_bytes: closed.counters.plain_bytes(),
            fields,
            counters: closed.counters,
            sender_cpu_seconds: sender.as_secs_f64(),
            receiver_cpu_seconds: receiver.as_secs_f64(),
            zerocopy_cpu_seconds: cost.zerocopy.as_secs_f64(),
            plain_cpu_seconds: cost.plain.as_secs_f64(),
            pin_time_us: quantile(0.5).zip(quantile(0.99)).map(|(median, most)| [median, most]),
            pages: match circumstances.pages {
                Pages::Ordinary => "ordinary",
                Pages::Huge => "huge",
                Pages::Transparent => "transparent-huge",
            },
            advice: advice(&closed.counters, circumstances),
        }
    }
}

/// Suggestions for better results, as sentences.
fn advice(counters: &Counters, circumstances: &Circumstances) -> Vec<String> {
    let mut advice = Vec::new();
    let short = counters.no_buffers > 0 || counters.plain_for(PlainCause::Budget) > 0;
    if let (true, Some(locked)) = (short, circumstances.limits.locked) {
        advice.push(format!(
            "the locked-memory limit is {}, and the memory in flight did not fit: raise it (ulimit -l, LimitMEMLOCK=) to {}",
            bytes(locked),
            bytes(2 * IN_FLIGHT as u64),
        ));
    }
    if short && circumstances.limits.optmem < 128 << 10 {
        advice.push(format!(
            "net.core.optmem_max is {}, which bounds calls in flight: sysctl -w net.core.optmem_max=1048576",
            bytes(circumstances.limits.optmem),
        ));
    }
    match circumstances.unarmed {
        Some(Unarmed::Requested) | None => {}
        Some(why) => advice.push(format!("this socket cannot send without copying: {why}")),
    }
    if counters.switched_local > 0 {
        advice.push(
            "the receiver is on this machine, where the kernel always copies: send between two machines"
                .into(),
        );
    } else if counters.copied_bytes > counters.zerocopy_bytes / 2
        || counters.probes_copied > counters.probes_not_copied
    {
        advice.push(
            "the kernel copied: the cause is a packet capture on the device, a virtual device (veth, TUN), or a device without \
             scatter-gather"
                .into(),
        );
    }
    if circumstances.congestion.as_deref() == Some("bbr") {
        advice.push(
            "the congestion control is BBR, whose timers run on the sender's CPU: compare with \
             sysctl -w net.ipv4.tcp_congestion_control=cubic"
                .into(),
        );
    }
    if circumstances.mode != Mode::Plain && circumstances.message < 64 << 10 {
        advice.push(format!(
            "one call sends several messages of {}; zero copy saves most with messages of 64 KiB and more (--message 262144)",
            bytes(circumstances.message.into())
        ));
    }
    if matches!(circumstances.mode, Mode::Adaptive | Mode::Zerocopy)
        && counters.zerocopy_bytes > counters.plain_bytes()
    {
        advice.push("--mode compare measures the cost of both modes".into());
    }
    advice
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(
            f,
            "sent {} in {:.2} s: {}/s, checksum {}, as received",
            bytes(self.bytes),
            self.seconds,
            bytes(self.bytes_per_second as u64),
            self.checksum
        )?;
        if self.hole_bytes > 0 {
            writeln!(f, "holes     {}, not sent", bytes(self.hole_bytes))?;
        }
        writeln!(f, "zero copy {} in {} calls", bytes(self.counters.zerocopy_bytes), self.counters.numbers)?;
        writeln!(f, "  copied by the kernel {}", bytes(self.counters.copied_bytes))?;
        writeln!(f, "plain     {} in {} calls", bytes(self.plain_bytes), self.counters.plain_calls)?;
        for (cause, count) in self.fields["plain"].as_object().into_iter().flatten() {
            writeln!(f, "  {cause} {}", bytes(count.as_u64().unwrap_or(0)))?;
        }
        for (who, cpu) in [("sender", self.sender_cpu_seconds), ("receiver", self.receiver_cpu_seconds)] {
            write!(f, "CPU       {who} {cpu:.3} s")?;
            match self.bytes {
                0 => writeln!(f)?,
                bytes => writeln!(f, ", {:.3} s/GB", cpu / (bytes as f64 / 1e9))?,
            }
        }
        let ways = [
            ("zero copy", self.zerocopy_cpu_seconds, self.counters.zerocopy_bytes),
            ("plain", self.plain_cpu_seconds, self.plain_bytes),
        ];
        let worth = ways.map(|(_, _, bytes)| bytes >= WORTH);
        for ((way, cpu, bytes), _) in ways.iter().zip(worth).filter(|(_, worth)| *worth) {
            let each = cpu / (*bytes as f64 / 1e9);
            writeln!(f, "          sender's calls, {way}: {cpu:.3} s, {each:.3} s/GB")?;
        }
        if worth == [true; 2] {
            let [zerocopy, plain] = ways.map(|(_, cpu, bytes)| cpu / bytes as f64);
            writeln!(f, "          zero copy costs {:.0}% of plain sends", 100.0 * zerocopy / plain)?;
        }
        if let Some([median, most]) = self.pin_time_us {
            writeln!(f, "time to completion: p50 ≤ {median} us, p99 ≤ {most} us")?;
        }
        for advice in &self.advice {
            writeln!(f, "advice: {advice}")?;
        }
        Ok(())
    }
}
