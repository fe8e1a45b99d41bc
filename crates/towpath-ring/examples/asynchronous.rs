//! An inspector in a tokio program: it passes everything, and says how much it was.
//!
//! `towpath replay capture.pcap --rules rules.ipfw --queue 1=target/debug/examples/asynchronous`

use std::error::Error;

use towpath_ring::{AsyncConsumer, Consumer, Verdict};

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut queue = AsyncConsumer::new(Consumer::attach_env()?)?;
    let (mut frames, mut bytes) = (0u64, 0u64);
    // Other tasks of the program run while there is nothing to do here.
    while let Some(frame) = queue.next().await? {
        frames += 1;
        bytes += queue.payload(&frame).len() as u64;
        queue.verdict(frame, Verdict::Pass);
    }
    println!("{frames} frames, {bytes} bytes");
    Ok(())
}
