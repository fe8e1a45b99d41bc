//! Framing: the BPF interpreter's speed against the limits of the specification, and message extraction against tokio-util's
//! `LengthDelimitedCodec`.
//!
//! Batches are short, so that some run without an interruption. A repetition is the best of its batches; a figure is the median of the
//! repetitions.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use bytes::BytesMut;
use tokio_util::codec::{Decoder, LengthDelimitedCodec};
use towpath_bpf::{Context, Insn, LoadOptions, Program};
use towpath_mux::Time;
use towpath_mux::assembler::{Assembler, Event, Limits};
use towpath_mux::framing::Framing;

use crate::metric::{Better, Metric, Report};
use crate::stat::median;

const REPS: usize = 5;
const BATCHES: usize = 200;
/// Instructions per batch.
const BATCH: u64 = 200_000;
/// Bytes per read of a socket.
const READ: usize = 16 << 10;
/// Messages per stream.
const MESSAGES: usize = 4000;

/// Ten instructions on every path: a 16-bit length in network order at offset 2, after a bounds check.
const DECISION: [Insn; 10] = [
    insn(0x61, 2, 1, 76, 0), // r2 = data
    insn(0x61, 3, 1, 80, 0), // r3 = data_end
    insn(0xbf, 4, 2, 0, 0),  // r4 = r2
    insn(0x07, 4, 0, 0, 4),  // r4 += 4
    insn(0xb7, 0, 0, 0, 0),  // r0 = 0
    insn(0x2d, 4, 3, 3, 0),  // if r4 > r3 goto exit
    insn(0x69, 0, 2, 2, 0),  // r0 = *(u16 *)(r2 + 2)
    insn(0xdc, 0, 0, 0, 16), // r0 = be16 r0
    insn(0x07, 0, 0, 0, 4),  // r0 += 4
    insn(0x95, 0, 0, 0, 0),  // exit
];

/// The same decision in ten classic BPF instructions, in the format of `tcpdump -ddd`.
const CLASSIC: &str = "10\n40 0 0 2\n4 0 0 4\n7 0 0 0\n135 0 0 0\n2 0 0 3\n96 0 0 3\n21 0 1 0\n6 0 0 0\n84 0 0 65535\n22 0 0 0\n";

/// A checksum-like loop with eight instructions per iteration.
const LOOP: [Insn; 12] = [
    insn(0xb7, 0, 0, 0, 0),        // r0 = 0
    insn(0xb7, 2, 0, 0, 1),        // r2 = 1
    insn(0xb7, 3, 0, 0, 1 << 30),  // r3 = 2^30
    insn(0x0f, 0, 2, 0, 0),        // r0 += r2
    insn(0xbf, 4, 0, 0, 0),        // r4 = r0
    insn(0x77, 4, 0, 0, 3),        // r4 >>= 3
    insn(0xaf, 0, 4, 0, 0),        // r0 ^= r4
    insn(0x27, 2, 0, 0, 3),        // r2 *= 3
    insn(0x57, 0, 0, 0, 0xffffff), // r0 &= 0xffffff
    insn(0x07, 3, 0, 0, -1),       // r3 += -1
    insn(0x55, 3, 0, -8, 0),       // if r3 != 0 goto the top
    insn(0x95, 0, 0, 0, 0),        // exit
];

/// Measures and prints all metrics. Returns true if they meet their targets.
pub(crate) fn run(json: bool) -> Result<bool> {
    let mut report = Report::new(json);
    let looping = load(&LOOP)?;
    let rates: Vec<f64> = (0..REPS).map(|_| 1e3 / best(|| steps(&looping))).collect();
    report.push(Metric::new("BPF instructions in a loop", median(&rates), 100.0, "M/s", Better::Higher, 1.0));

    let classic = Program::load(CLASSIC.as_bytes(), &LoadOptions::default())?;
    for (name, program) in [("eBPF", load(&DECISION)?), ("classic BPF", classic)] {
        let times: Vec<f64> = (0..REPS).map(|_| best(|| decisions(&program))).collect();
        let name = format!("decision of ten instructions, {name}");
        report.push(Metric::new(&name, median(&times), 60.0, "ns", Better::Lower, 1.0));
    }
    for len in [64, 256, 1500, 64 << 10] {
        report.push(messages(len)?);
    }
    Ok(report.finish()?)
}

/// Extracts messages with a 32-bit length from reads of 16 KiB, alternating with the codec.
fn messages(len: usize) -> Result<Metric> {
    let mut stream = Vec::new();
    let count = MESSAGES.min((16 << 20) / len);
    for n in 0..count {
        stream.extend_from_slice(&(len as u32 - 4).to_be_bytes());
        stream.extend((0..len - 4).map(|at| (at + n) as u8));
    }
    let framing: Framing = "length=4 be adjust=4 max=16M".parse().context("our framing")?;
    let expected = ours(&framing, &stream);
    ensure!(
        expected.0 == count as u64 && expected == codec(&stream),
        "both should find the same {count} messages"
    );
    let (mut mine, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..REPS {
        mine.push(1e3 / best_of(20, || ours(&framing, black_box(&stream)).0));
        theirs.push(1e3 / best_of(20, || codec(black_box(&stream)).0));
    }
    let name = format!("messages of {len} B, over tokio-util's codec");
    Ok(Metric::new(&name, median(&mine), median(&theirs), "M/s", Better::Higher, 1.0))
}

/// Returns the number of messages and a sum over one byte of each.
fn ours(framing: &Framing, stream: &[u8]) -> (u64, u64) {
    let mut assembler = Assembler::new(framing.clone(), Limits::default());
    let mut found = (0, 0);
    for read in stream.chunks(READ) {
        let mut rest = read;
        while !rest.is_empty() {
            let took = assembler.handle_bytes(rest);
            rest = &rest[took..];
            while let Some(event) = assembler.poll(Time::default()) {
                let Event::Message(message) = event else { return found };
                found = (found.0 + 1, found.1 + u64::from(message.payload[message.payload.len() - 1]));
            }
        }
    }
    found
}

fn codec(stream: &[u8]) -> (u64, u64) {
    let mut codec = LengthDelimitedCodec::builder().max_frame_length(16 << 20).new_codec();
    let mut buffer = BytesMut::with_capacity(READ);
    let mut found = (0, 0);
    for read in stream.chunks(READ) {
        buffer.extend_from_slice(read);
        while let Ok(Some(message)) = codec.decode(&mut buffer) {
            found = (found.0 + 1, found.1 + u64::from(message[message.len() - 1]));
        }
    }
    found
}

fn load(code: &[Insn]) -> Result<Program> {
    let bytes: Vec<u8> = code.iter().flat_map(|insn| insn.emit()).collect();
    Ok(Program::load(&bytes, &LoadOptions::default())?)
}

/// Runs until the fuel, a number of instructions, is exhausted.
fn steps(program: &Program) -> u64 {
    let mut fuel = BATCH;
    let _ = black_box(program.run(black_box(&[]), &mut Context::new(), &mut fuel));
    BATCH - fuel
}

fn decisions(program: &Program) -> u64 {
    let message = [0, 1, 0, 60, 0xaa, 0xbb];
    let mut context = Context::new();
    for _ in 0..BATCH / 10 {
        let _ = black_box(program.run(black_box(&message), &mut context, &mut 1000));
    }
    BATCH / 10
}

fn best(batch: impl FnMut() -> u64) -> f64 {
    best_of(BATCHES, batch)
}

/// Returns the minimum time per counted item over the batches, in nanoseconds.
fn best_of(batches: usize, mut batch: impl FnMut() -> u64) -> f64 {
    let one = |_| {
        let start = Instant::now();
        let count = batch();
        start.elapsed().as_secs_f64() * 1e9 / count as f64
    };
    (0..batches).map(one).fold(f64::INFINITY, f64::min)
}

const fn insn(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> Insn {
    Insn { code, dst, src, off, imm }
}
