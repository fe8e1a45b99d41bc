//! `towpath inspect`: searches the payload of a queue's packets and gives verdicts.

use regex::bytes::Regex;
use towpath_ring::{Consumer, Decision, Frame, Verdict};

use crate::args::{Inspect, PassOrDrop, exit};
use crate::cli::{fail, say};

/// Maximum number of frames per batch.
const BATCH: usize = 64;

pub(crate) fn run(args: &Inspect) -> u8 {
    let pattern = match Regex::new(&args.pattern) {
        Ok(pattern) => pattern,
        Err(error) => return fail(exit::USAGE, format_args!("--match: {error}")),
    };
    let consumer = match Consumer::attach_as(&args.socket, "towpath-inspect") {
        Ok(consumer) => consumer,
        Err(error) => return fail(exit::INSPECTOR, error),
    };
    match inspect(args, &pattern, consumer) {
        Ok(()) => exit::OK,
        Err(error) => fail(exit::INSPECTOR, error),
    }
}

/// Gives verdicts until the engine closes the channel.
fn inspect(args: &Inspect, pattern: &Regex, mut consumer: Consumer) -> Result<(), String> {
    let (matching, other) = match args.verdict {
        PassOrDrop::Drop => (Verdict::Drop, Verdict::Pass),
        PassOrDrop::Pass => (Verdict::Pass, Verdict::Drop),
    };
    let matching = Decision { flow: args.flow, ..matching.into() };
    let mut batch = Vec::with_capacity(BATCH);
    while consumer.recv_batch(&mut batch, BATCH).map_err(|error| error.to_string())? > 0 {
        for frame in batch.drain(..) {
            if let Some(gap) = frame.header().loss_record() {
                if args.verbose {
                    let why = gap.loss.map_or("for an unknown reason".to_owned(), |loss| format!("{loss:?}"));
                    say(format_args!("queue {}: {} packets were lost: {why}", args.queue, gap.count));
                }
                consumer.verdict(frame, Verdict::Pass);
                continue;
            }
            if frame.header().group != u32::from(args.queue) {
                return Err(format!(
                    "this socket is queue {}'s, not queue {}'s",
                    frame.header().group,
                    args.queue
                ));
            }
            let found = pattern.is_match(payload(&consumer, &frame));
            if found && args.verbose {
                say(format_args!("queue {}: packet {} matches, {:?}", args.queue, frame.seq(), args.verdict));
            }
            consumer.verdict(frame, if found { matching } else { other.into() });
        }
    }
    Ok(())
}

/// The payload of the upper layer.
fn payload<'a>(consumer: &'a Consumer, frame: &Frame) -> &'a [u8] {
    let bytes = consumer.payload(frame);
    bytes.get(usize::from(frame.header().layers.payload)..).unwrap_or_default()
}
