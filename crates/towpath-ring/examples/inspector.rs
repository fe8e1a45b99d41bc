//! An inspector: drops every packet whose payload contains a word. Copy it to start your own.
//!
//! Towpath starts it and says in TOWPATH_SOCKET where to attach:
//! `towpath replay capture.pcap --rules rules.ipfw --queue 1="inspector password"`

use std::error::Error;

use towpath_ring::{Consumer, Frame, Verdict};

fn main() -> Result<(), Box<dyn Error>> {
    let word = std::env::args().nth(1).ok_or("usage: inspector WORD")?.into_bytes();
    if word.is_empty() {
        return Err("the word must not be empty".into());
    }
    let mut queue = Consumer::attach_env()?;
    let mut batch: Vec<Frame> = Vec::new();
    let (mut seen, mut dropped) = (0u64, 0u64);

    // Frames come in batches; the payload is read where it lies, and the verdict gives the frame back.
    while queue.recv_batch(&mut batch, 64)? > 0 {
        for frame in batch.drain(..) {
            let found = queue.payload(&frame).windows(word.len()).any(|w| w == word);
            seen += 1;
            dropped += u64::from(found);
            queue.verdict(frame, if found { Verdict::Drop } else { Verdict::Pass });
        }
    }
    eprintln!("inspector: {seen} packets, {dropped} dropped");
    Ok(())
}
