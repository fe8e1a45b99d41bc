//! An echo server for any framing, with several worker threads.
//!
//! ```text
//! cargo run --release -p towpath-mux --features io --example echo -- 127.0.0.1:7007 line 4
//! printf 'hello\nworld\n' | nc -N 127.0.0.1 7007
//! ```

use std::error::Error;
use std::time::Duration;

use towpath_mux::framing::Framing;
use towpath_mux::io::Server;
use towpath_mux::mux::Config;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let address = args.next().unwrap_or_else(|| "127.0.0.1:7007".to_owned());
    let framing = args.next().unwrap_or_else(|| "line".to_owned()).parse::<Framing>()?;
    let workers: usize = args.next().map_or(Ok(4), |workers| workers.parse())?;

    let config = Config { idle: Some(Duration::from_secs(300)), ..Config::for_framing(&framing) };
    let server = Server::new(framing, config)?;
    println!("listening on {}", server.listen(address)?);
    // Each worker thread calls this function for each message that it receives; `answer` is sent to the message's connection.
    server.serve(workers, |message, answer| answer.extend_from_slice(message.bytes()))?;
    Ok(())
}
