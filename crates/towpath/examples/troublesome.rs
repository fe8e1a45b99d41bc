//! An inspector that simulates faults, for tests.
//!
//! | argument | action |
//! |---|---|
//! | `die N` | passes N frames, then exits while it holds frames |
//! | `stall N` | passes N frames, then gives no more verdicts |
//! | `upper` | replaces every payload by itself in capitals |
//! | `reject` | rejects every frame |
//! | `hold` | holds every frame, and decides them from the last to the first |

use std::error::Error;

use towpath_ring::{Consumer, Verdict};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = args.iter().map(String::as_str).collect();
    let mut queue = Consumer::attach_env()?;
    match words[..] {
        ["die", n] => {
            pass(&mut queue, n.parse()?)?;
            let mut frames = Vec::new();
            queue.recv_batch(&mut frames, 16)?;
            // As kill -9: no destructor runs, and the channel is not closed.
            std::process::abort();
        }
        ["stall", n] => {
            pass(&mut queue, n.parse()?)?;
            let mut unanswered = Vec::new();
            while let Some(frame) = queue.recv()? {
                unanswered.push(frame);
            }
        }
        ["upper"] => {
            while let Some(frame) = queue.recv()? {
                let at = usize::from(frame.header().layers.payload);
                let mut bytes = queue.payload(&frame).to_vec();
                bytes[at..].make_ascii_uppercase();
                queue.replace(frame, &bytes)?;
            }
        }
        ["reject"] => {
            while let Some(frame) = queue.recv()? {
                queue.verdict(frame, Verdict::Reject);
            }
        }
        ["hold"] => {
            let mut batch = Vec::new();
            while queue.recv_batch(&mut batch, 64)? > 0 {
                for frame in &batch {
                    queue.hold(frame);
                }
                for frame in batch.drain(..).rev() {
                    queue.verdict(frame, Verdict::Pass);
                }
            }
        }
        _ => return Err("usage: troublesome die N | stall N | upper | reject | hold".into()),
    }
    Ok(())
}

fn pass(queue: &mut Consumer, n: u64) -> Result<(), Box<dyn Error>> {
    for _ in 0..n {
        let Some(frame) = queue.recv()? else { break };
        queue.verdict(frame, Verdict::Pass);
    }
    queue.flush();
    Ok(())
}
