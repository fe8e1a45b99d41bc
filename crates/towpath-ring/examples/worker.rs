//! A worker of `towpath mux` that answers each line in capitals. Copy it to start your own.
//!
//! `towpath mux 127.0.0.1:7007 --framing line --workers 4 --worker target/debug/examples/worker`

use std::error::Error;

use towpath_ring::Worker;

fn main() -> Result<(), Box<dyn Error>> {
    // Towpath starts it and says in TOWPATH_SOCKET where to attach.
    let mut worker = Worker::attach_env()?.taking(16);
    // If this process dies at a message, another worker gets it.
    worker.serve(|message, answer| answer.extend(message.bytes().to_ascii_uppercase()))?;
    Ok(())
}
