//! How fast programs run: instructions a second in a loop, and nanoseconds for a framing decision of ten instructions.
//!
//! `cargo run --release -p towpath-bpf --example throughput`

use std::hint::black_box;
use std::time::Instant;

use towpath_bpf::{Context, Insn, LoadOptions, Program};

/// Ten instructions on every path: a 16-bit length in network order behind two bytes, which must be there.
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

/// A checksum-like loop: eight instructions a turn.
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

/// Instructions of a batch: short enough that some batch runs without an interruption.
const BATCH: u64 = 200_000;
const BATCHES: u32 = 1000;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let looping = load(&LOOP)?;
    let rate = 1e9
        / best(|| {
            let mut fuel = BATCH;
            // Ends out of fuel: that many instructions were run.
            let _ = black_box(looping.run(black_box(&[]), &mut Context::new(), &mut fuel));
            BATCH - fuel
        });
    println!("loop                  {:8.1} M instructions/s", rate / 1e6);

    // Ten classic instructions.
    let classic = "10\n40 0 0 2\n4 0 0 4\n7 0 0 0\n135 0 0 0\n2 0 0 3\n96 0 0 3\n21 0 1 0\n6 0 0 0\n84 0 0 65535\n22 0 0 0\n";
    let classic = Program::load(classic.as_bytes(), &LoadOptions::default())?;
    for (name, program) in [("ten, direct access", load(&DECISION)?), ("ten, classic", classic)] {
        println!("{name:20}  {:8.1} ns a decision", decision(&program));
    }
    Ok(())
}

fn load(code: &[Insn]) -> Result<Program, Box<dyn std::error::Error>> {
    let bytes: Vec<u8> = code.iter().flat_map(|insn| insn.emit()).collect();
    Ok(Program::load(&bytes, &LoadOptions::default())?)
}

fn decision(program: &Program) -> f64 {
    let message = [0, 1, 0, 60, 0xaa, 0xbb];
    let mut context = Context::new();
    best(|| {
        for _ in 0..BATCH / 10 {
            let _ = black_box(program.run(black_box(&message), &mut context, &mut 1000));
        }
        BATCH / 10
    })
}

/// Nanoseconds for one of what `batch` counts, in the batch that was interrupted least.
fn best(mut batch: impl FnMut() -> u64) -> f64 {
    let mut best = f64::INFINITY;
    for _ in 0..BATCHES {
        let start = Instant::now();
        let count = batch();
        best = best.min(start.elapsed().as_secs_f64() * 1e9 / count as f64);
    }
    best
}

const fn insn(code: u8, dst: u8, src: u8, off: i16, imm: i32) -> Insn {
    Insn { code, dst, src, off, imm }
}
