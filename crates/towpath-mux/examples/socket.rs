//! Returns lines in capitals, by KCM's socket calls: one socket per thread, reading lines of any length in
//! pieces.
//!
//! ```text
//! cargo run --release -p towpath-mux --features io --example socket -- 127.0.0.1:7007 4
//! printf 'hello\nworld\n' | nc -N 127.0.0.1 7007
//! ```

use std::error::Error;
use std::thread;

use towpath_mux::framing::Framing;
use towpath_mux::io::{self, Flags, Kind, Server, Socket, To};
use towpath_mux::mux::Config;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let address = args.next().unwrap_or_else(|| "127.0.0.1:7007".to_owned());
    let threads: usize = args.next().map_or(Ok(4), |threads| threads.parse())?;

    let framing: Framing = "line".parse()?;
    let config = Config::for_framing(&framing);
    let server = Server::new(framing, config)?;
    println!("listening on {}", server.listen(address)?);
    let socket = server.socket(Kind::Seqpacket)?;
    let clones = (1..threads).map(|_| socket.try_clone()).collect::<Result<Vec<_>, _>>()?;
    thread::scope(|scope| {
        for handle in clones.into_iter().chain([socket]) {
            scope.spawn(|| serve(handle).unwrap_or_else(|error| eprintln!("{error}")));
        }
    });
    Ok(())
}

/// Answers messages until the mux has drained.
fn serve(mut socket: Socket) -> Result<(), io::Error> {
    let mut piece = [0; 512];
    loop {
        let read = match socket.recv(&mut piece, Flags::empty()) {
            Err(io::Error::Drained) => return Ok(()),
            read => read?,
        };
        let piece = &mut piece[..read.bytes];
        piece.make_ascii_uppercase();
        // The reply ends with the message.
        match socket.send(To::Requester, piece, read.flags & Flags::EOR) {
            // The requester has gone; other clients have not.
            Ok(_) | Err(io::Error::Gone) => {}
            Err(error) => return Err(error),
        }
    }
}
