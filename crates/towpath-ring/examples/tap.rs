//! Looks on at a group and slows nobody: `tap SOCKET`.

use std::error::Error;

use towpath_ring::Tap;

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::args().nth(1).ok_or("usage: tap SOCKET")?;
    let mut tap = Tap::attach(path)?;
    while let Some(message) = tap.recv()? {
        match message.header.gap() {
            Some(gap) => println!("{} messages were too fast", gap.count),
            None => println!("{} bytes: {}", message.payload.len(), String::from_utf8_lossy(message.payload)),
        }
    }
    Ok(())
}
