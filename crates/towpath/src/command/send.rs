//! `towpath send`: a file over TCP, and what zero copy gave.

use std::fs::File;
use std::hash::Hasher;
use std::net::{Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use clap::builder::ValueHint;
use clap::{Parser, ValueEnum};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::{Map, Value};
use towpath_send::{Choice, Counters, Limits, Options, Pages, PlainCause, Pool, SendError, Sender, Unarmed};
use twox_hash::XxHash3_64;

use crate::args::exit;
use crate::command::transfer::{ANSWER_BYTES, Answer, Status, bytes, cpu_time, header, read_full};
use crate::command::{answer, fail};

/// Memory that is in flight at most.
const IN_FLIGHT: usize = 32 << 20;

/// Send a file to `towpath recv`, without copying it where that works, and say what that gave
///
/// The file goes over TCP in messages that the kernel sends straight from this program's memory (MSG_ZEROCOPY), if probes
/// show that it does not copy them after all. Both ends compute a checksum. In the end it says how much went which way, what it
/// cost in CPU at either end, and what would make it better.
#[derive(Debug, Parser)]
#[command(after_help = "\
Example:
  towpath recv --listen 0.0.0.0:9000 --out copy.bin      on one machine, then on the other
  towpath send big.bin --to 192.0.2.7:9000
  towpath send big.bin --to 192.0.2.7:9000 --mode plain  what it costs without")]
pub(crate) struct Send {
    /// The file to send
    #[arg(value_name = "FILE", value_hint = ValueHint::FilePath)]
    file: PathBuf,

    /// The receiver, HOST:PORT
    #[arg(long, value_name = "ADDR")]
    to: String,

    /// Bytes of each message
    #[arg(long, value_name = "BYTES", default_value = "262144", value_parser = clap::value_parser!(u32).range(1..=16_777_216))]
    message: u32,

    /// Whether to copy
    #[arg(long, value_name = "MODE", default_value = "adaptive")]
    mode: Mode,

    /// How long the receiver may take nothing, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "30", value_parser = seconds)]
    timeout: Duration,

    /// Print the report as one JSON object
    #[arg(long)]
    json: bool,
}

/// The ways to send that a command line can ask for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Mode {
    /// Zero copy where probes show that it works
    Adaptive,
    /// Zero copy, whatever comes of it
    Zerocopy,
    /// Copies
    Plain,
}

pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is not a number of seconds"))?;
    if !(0.001..=86_400.0).contains(&seconds) {
        return Err("a timeout is between 0.001 and 86400 seconds".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

/// A bar on a terminal, nothing elsewhere.
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
    let name = args.file.display();
    let mut file = File::open(&args.file).map_err(|error| format!("{name}: {error}"))?;
    let metadata = file.metadata().map_err(|error| format!("{name}: {error}"))?;
    if !metadata.is_file() {
        return Err(format!("{name}: not a file; its length must be known before it is sent"));
    }
    let length = metadata.len();
    let stream = connect(&args.to, args.timeout)?;
    let answers = listen(&stream).map_err(|error| error.to_string())?;
    let keep = stream.try_clone().map_err(|error| error.to_string())?;

    let message = args.message as usize;
    let frames = (IN_FLIGHT / message).clamp(4, 512);
    let mut pool =
        Pool::new(frames, message, true).map_err(|error| format!("memory for {frames} messages: {error}"))?;
    let choice = match args.mode {
        Mode::Adaptive => Choice::Adaptive,
        Mode::Zerocopy => Choice::Zerocopy,
        Mode::Plain => Choice::Plain,
    };
    let options = Options { choice, max_frames: frames - 1, stall: Some(args.timeout), ..Options::default() };
    let congestion = rustix::net::sockopt::tcp_congestion(&stream).ok();
    let mut sender = Sender::new(stream, options).map_err(|error| error.to_string())?;

    let (start, cpu_before) = (Instant::now(), cpu_time());
    let told = |error: SendError| match answers.try_recv() {
        Ok(Ok(answer)) => refused(&args.to, answer.status),
        _ => format!("{}: {error}", args.to),
    };
    sender.queue(0, header(length).to_vec()).map_err(told)?;
    let bar = progress(length);
    let (mut sent, mut hash) = (0, XxHash3_64::new());
    while sent < length {
        if let Ok(Ok(answer)) = answers.try_recv() {
            return Err(refused(&args.to, answer.status));
        }
        // The quota is one less than the pool has: there is always one.
        let mut frame = pool.take().ok_or("no free frame")?;
        let most = usize::try_from(length - sent).unwrap_or(usize::MAX).min(message);
        let len =
            read_full(&mut file, &mut frame.spare()[..most]).map_err(|error| format!("{name}: {error}"))?;
        if len < most {
            return Err(format!("{name}: became shorter while it was sent"));
        }
        frame.filled(len);
        hash.write(&frame);
        sent += len as u64;
        sender.queue(0, frame).map_err(told)?;
        bar.set_position(sent);
    }
    let checksum = hash.finish();
    sender.queue(0, checksum.to_le_bytes().to_vec()).map_err(told)?;
    sender.flush().map_err(told)?;
    bar.finish_and_clear();

    let received = match answers.recv_timeout(args.timeout) {
        Ok(answer) => answer.map_err(|error| format!("{}: {error}", args.to))?,
        Err(_) => return Err(format!("{}: took everything, and does not answer", args.to)),
    };
    if received.status != Status::Whole {
        return Err(refused(&args.to, received.status));
    }
    if (received.received, received.checksum) != (length, checksum) {
        return Err(format!("{}: received something else: checksum {:016x}", args.to, received.checksum));
    }
    let seconds = start.elapsed().as_secs_f64();
    let unarmed = sender.unarmed();
    let closed = sender.close(args.timeout).map_err(|error| format!("{}: {error}", args.to))?;
    let cpu = cpu_time() - cpu_before;
    let _ = keep.shutdown(Shutdown::Both);
    Ok(Report::new(
        length,
        seconds,
        checksum,
        [cpu, received.cpu],
        &closed.counters,
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

/// Waits for the receiver's answer, which may come before everything is sent.
fn listen(stream: &TcpStream) -> std::io::Result<Receiver<Result<Answer, String>>> {
    let mut stream = stream.try_clone()?;
    let (tell, answers) = channel();
    thread::spawn(move || {
        let mut answer = [0; ANSWER_BYTES];
        let said = match read_full(&mut stream, &mut answer) {
            Ok(ANSWER_BYTES) => Answer::parse(&answer).ok_or("it is no `towpath recv`".to_owned()),
            Ok(0) => Err("ended the connection without an answer; is it `towpath recv`?".to_owned()),
            Ok(_) => Err("it is no `towpath recv`: its answer is cut short".to_owned()),
            Err(error) => Err(format!("waiting for its answer: {error}")),
        };
        // Nobody waits for it when sending failed.
        let _ = tell.send(said);
    });
    Ok(answers)
}

fn refused(to: &str, status: Status) -> String {
    let why = match status {
        Status::Whole => "the receiver had enough before the end",
        Status::Damaged => "what the receiver got is not what was sent: the checksums differ",
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

/// What `--json` prints.
#[derive(Serialize)]
struct Report {
    bytes: u64,
    seconds: f64,
    bytes_per_second: f64,
    checksum: String,
    /// By calls with MSG_ZEROCOPY; of them, in ranges that the kernel said it had copied.
    zerocopy_bytes: u64,
    copied_bytes: u64,
    plain_bytes: u64,
    /// By reason; reasons without bytes are left out.
    plain: Map<String, Value>,
    sender_cpu_seconds: f64,
    receiver_cpu_seconds: f64,
    zerocopy_calls: u64,
    plain_calls: u64,
    notifications: u64,
    no_buffers: u64,
    /// Microseconds from a call to the reading of its completion, upper ends of powers of two.
    pin_time_us: Option<[u64; 2]>,
    pages: &'static str,
    advice: Vec<String>,
}

impl Report {
    fn new(
        length: u64,
        seconds: f64,
        checksum: u64,
        [sender, receiver]: [Duration; 2],
        counters: &Counters,
        circumstances: &Circumstances,
    ) -> Self {
        let plain = PlainCause::ALL
            .into_iter()
            .filter(|cause| counters.plain_for(*cause) > 0)
            .map(|cause| (cause.name().to_owned(), counters.plain_for(cause).into()))
            .collect();
        let quantile = |share| counters.pin_time.quantile(share);
        Self {
            bytes: length,
            seconds,
            bytes_per_second: length as f64 / seconds,
            checksum: format!("{checksum:016x}"),
            zerocopy_bytes: counters.zerocopy_bytes,
            copied_bytes: counters.copied_bytes,
            plain_bytes: counters.plain_bytes(),
            plain,
            sender_cpu_seconds: sender.as_secs_f64(),
            receiver_cpu_seconds: receiver.as_secs_f64(),
            zerocopy_calls: counters.numbers,
            plain_calls: counters.plain_calls,
            notifications: counters.notifications,
            no_buffers: counters.no_buffers,
            pin_time_us: quantile(0.5).zip(quantile(0.99)).map(|(median, most)| [median, most]),
            pages: match circumstances.pages {
                Pages::Ordinary => "ordinary",
                Pages::Huge => "huge",
                Pages::Transparent => "transparent-huge",
            },
            advice: advice(counters, circumstances),
        }
    }
}

/// What would make it better, in sentences.
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
        Some(Unarmed::Choice) | None => {}
        Some(why) => advice.push(format!("this socket cannot send without copying: {why}")),
    }
    if counters.switches[towpath_send::Reason::Local as usize] > 0 {
        advice.push(
            "the receiver is on this machine, where the kernel copies always: try it between two machines"
                .into(),
        );
    } else if counters.copied_bytes > counters.zerocopy_bytes / 2 || counters.probes[1] > counters.probes[0] {
        advice.push(
            "the kernel copied after all: a packet capture on the device, a virtual device (veth, TUN), or one without \
             scatter-gather does that"
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
            "messages of {} are sent several in a call; from 64 KiB on zero copy pays best (--message 262144)",
            bytes(circumstances.message.into())
        ));
    }
    if circumstances.mode != Mode::Plain && counters.zerocopy_bytes > counters.plain_bytes() {
        advice.push("compare the CPU times with those of --mode plain".into());
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
        writeln!(f, "zero copy {} in {} calls", bytes(self.zerocopy_bytes), self.zerocopy_calls)?;
        writeln!(f, "  of it copied by the kernel after all {}", bytes(self.copied_bytes))?;
        writeln!(f, "plain     {} in {} calls", bytes(self.plain_bytes), self.plain_calls)?;
        for (cause, count) in &self.plain {
            writeln!(f, "  {cause} {}", bytes(count.as_u64().unwrap_or(0)))?;
        }
        for (who, cpu) in [("sender", self.sender_cpu_seconds), ("receiver", self.receiver_cpu_seconds)] {
            write!(f, "CPU       {who} {cpu:.3} s")?;
            match self.bytes {
                0 => writeln!(f)?,
                bytes => writeln!(f, ", {:.3} s/GB", cpu / (bytes as f64 / 1e9))?,
            }
        }
        if let Some([median, most]) = self.pin_time_us {
            writeln!(f, "in flight half of the calls up to {median} us, 99 of 100 up to {most} us")?;
        }
        for advice in &self.advice {
            writeln!(f, "advice: {advice}")?;
        }
        Ok(())
    }
}
