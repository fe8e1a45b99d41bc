//! Sends a file over TCP without copying it into the kernel. A template for other senders.
//!
//! `cargo run -p towpath-send --example sender -- 192.0.2.7:9000 FILE`

use std::error::Error;
use std::fs::File;
use std::io::Read;
use std::net::TcpStream;
use std::time::Duration;

use towpath_send::{Options, Pool, Sender};

const FRAMES: usize = 16;
const FRAME: usize = 1 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [address, path] = &words[..] else { return Err("usage: sender ADDRESS:PORT FILE".into()) };
    let mut file = File::open(path)?;
    // One frame more than the sender may hold: `queue` waits for a completion before the pool is empty.
    let mut pool = Pool::new(FRAMES, FRAME, false)?;
    let options = Options { max_frames: FRAMES - 1, ..Options::default() };
    let mut sender = Sender::new(TcpStream::connect(address)?, options)?;

    let mut bytes = vec![0; FRAME];
    loop {
        let length = file.read(&mut bytes)?;
        if length == 0 {
            break;
        }
        let mut frame = pool.take().ok_or("the pool is empty")?;
        frame.put(&bytes[..length]);
        // The sender owns the frame until the kernel has reported its completion. The frame then returns to the pool.
        sender.queue(0, frame)?;
    }
    // Sends the rest, shuts the connection down, and waits for the completions.
    let closed = sender.close(Duration::from_secs(30))?;
    let counters = closed.counters;
    println!("{} bytes without a copy, {} copied", counters.zerocopy_bytes, counters.plain_bytes());
    Ok(())
}
