//! A DNS server over TCP (RFC 1035, section 4.2.2; RFC 7766) that returns the same address for every name.
//!
//! ```text
//! cargo run --release -p towpath-mux --features io --example dns -- 127.0.0.1:5353 192.0.2.1
//! dig +tcp @127.0.0.1 -p 5353 example.org
//! ```

use std::error::Error;
use std::net::Ipv4Addr;

use towpath_mux::framing::Framing;
use towpath_mux::io::Server;
use towpath_mux::mux::Config;

/// Size of the header (RFC 1035, section 4.1.1).
const HEADER: usize = 12;
const A: u16 = 1;
const IN: u16 = 1;
const FORMAT_ERROR: u8 = 1;

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let address = args.next().unwrap_or_else(|| "127.0.0.1:5353".to_owned());
    let known: Ipv4Addr = args.next().map_or(Ok(Ipv4Addr::new(192, 0, 2, 1)), |address| address.parse())?;
    // RFC 7766, section 6.2.1.1: responses may be sent in any order.
    let framing: Framing = "dns-tcp".parse()?;
    let config = Config::for_framing(&framing);
    let server = Server::new(framing, config)?;
    println!("listening on {}", server.listen(address)?);
    server.serve(4, |message, out| {
        // Skip the two bytes of the length.
        if let Some(answer) = answer(&message.bytes()[2..], known) {
            out.extend_from_slice(&(answer.len() as u16).to_be_bytes());
            out.extend_from_slice(&answer);
        }
    })?;
    Ok(())
}

/// The response to a query; `None` if it has no complete header.
fn answer(query: &[u8], known: Ipv4Addr) -> Option<Vec<u8>> {
    let header = query.get(..HEADER)?;
    let asked = question(&query[HEADER..]).filter(|_| header[4..6] == [0, 1]);
    let (end, kind, class) = asked.unwrap_or((0, 0, 0));
    let found = kind == A && class == IN;
    let mut answer = query[..HEADER + end].to_vec();
    // QR and AA, with the query's opcode and RD; then the response code.
    answer[2] = 0x84 | header[2] & 0x79;
    answer[3] = if asked.is_some() { 0 } else { FORMAT_ERROR };
    let counts = [0, u8::from(asked.is_some()), 0, u8::from(found), 0, 0, 0, 0];
    answer[4..HEADER].copy_from_slice(&counts);
    if found {
        // Name: pointer to the question (section 4.1.4); TTL of a minute; four bytes of data.
        answer.extend([0xc0, HEADER as u8, 0, A as u8, 0, IN as u8, 0, 0, 0, 60, 0, 4]);
        answer.extend(known.octets());
    }
    Some(answer)
}

/// The first question: its end, type and class.
fn question(bytes: &[u8]) -> Option<(usize, u16, u16)> {
    let mut at = 0;
    loop {
        let label = usize::from(*bytes.get(at)?);
        at += 1 + label;
        match label {
            0 => break,
            64.. => return None,
            _ => {}
        }
    }
    let two = |at: usize| Some(u16::from_be_bytes([*bytes.get(at)?, *bytes.get(at + 1)?]));
    Some((at + 4, two(at)?, two(at + 2)?))
}
