//! Measures the cost of zero copy: `rate ADDR BYTES_PER_MESSAGE plain|zerocopy|io_uring|adaptive MEGABYTES [GATHER [BATCH]]`.
//!
//! Sends the same frames repeatedly, and prints CPU seconds per gigabyte with the sender's counters.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::net::{self, AddressFamily, SocketType, sockopt};
use towpath_send::{BackEnd, CopyMode, Options, Pool, Sender};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [to, message, how, megabytes, rest @ ..] = words.as_slice() else {
        return Err(
            "usage: rate ADDR BYTES_PER_MESSAGE plain|zerocopy|io_uring|adaptive MEGABYTES [GATHER [BATCH]]"
                .into(),
        );
    };
    let (message, total): (usize, u64) = (message.parse()?, megabytes.parse::<u64>()? * 1_000_000);
    let gather = rest.first().map_or(Ok(0), |bytes| bytes.parse())?;
    let batch = rest.get(1).map_or(Ok(1), |calls| calls.parse())?;
    let choice = match how.as_str() {
        "plain" => CopyMode::Plain,
        "zerocopy" | "io_uring" => CopyMode::Zerocopy,
        _ => CopyMode::Adaptive,
    };
    let frames = ((16 << 20) / message).max(2);
    let mut pool = Pool::new(frames + 1, message, std::env::var_os("HUGE").is_some())?;
    // Untouched memory maps to the shared zero page, which is slow to pin.
    let mut all: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
    for frame in &mut all {
        frame.put(&vec![0x5a; message]);
    }
    drop(all);
    let to: SocketAddr = to.parse()?;
    let family = if to.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let stream = net::socket(family, SocketType::STREAM, None)?;
    // Before connecting: a connection that started with BBR stays paced, at the cost of its timers.
    sockopt::set_tcp_congestion(&stream, "cubic")?;
    sockopt::set_socket_send_buffer_size(&stream, 4 << 20)?;
    net::connect(&stream, &to)?;
    let options = Options {
        choice,
        back_end: if how == "io_uring" { BackEnd::IoUring } else { BackEnd::MsgZerocopy },
        min_zerocopy: 1,
        gather,
        batch,
        max_frames: frames,
        read_every: 64,
        ..Options::default()
    };
    let mut sender = Sender::new(stream, options)?;
    let (cpu, start) = (spent()?, Instant::now());
    let mut sent = 0;
    while sent < total {
        let mut frame = pool.take().ok_or("no free frame")?;
        frame.filled(message);
        sender.queue(0, frame)?;
        sent += message as u64;
    }
    let closed = sender.close(Duration::from_secs(20))?;
    let cpu = spent()? - cpu;
    let gigabytes = sent as f64 / 1e9;
    println!(
        "{message} {how} cpu_s/GB={:.4} wall={:.2} finished={} {:?}",
        cpu / gigabytes,
        start.elapsed().as_secs_f64(),
        closed.finished,
        closed.counters,
    );
    Ok(())
}

/// CPU seconds of this thread, the only one: /proc/self/schedstat, in nanoseconds.
fn spent() -> Result<f64, Box<dyn std::error::Error>> {
    let text = std::fs::read_to_string("/proc/self/schedstat")?;
    Ok(text.split(' ').next().unwrap_or_default().parse::<f64>()? / 1e9)
}
