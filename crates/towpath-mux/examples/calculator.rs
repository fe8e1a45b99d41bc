//! A calculator for Thrift clients: framed TBinaryProtocol, `i32 add(1: i32 a, 2: i32 b)`, `subtract` and
//! `multiply`.
//!
//! ```text
//! cargo run --release -p towpath-mux --features io --example calculator -- 127.0.0.1:9090
//! ```

use std::error::Error;

use towpath_mux::framing::Framing;
use towpath_mux::io::Server;
use towpath_mux::mux::Config;

/// TBinaryProtocol (doc/specs/thrift-binary-protocol.md of Apache Thrift).
const VERSION: u32 = 0x8001_0000;
const REPLY: u32 = 2;
const EXCEPTION: u32 = 3;
const STOP: u8 = 0;
const I32: u8 = 8;
const STRING: u8 = 11;
/// TApplicationException.UNKNOWN_METHOD.
const UNKNOWN_METHOD: i32 = 1;

fn main() -> Result<(), Box<dyn Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:9090".to_owned());
    let framing: Framing = "thrift-framed".parse()?;
    let config = Config::for_framing(&framing);
    let server = Server::new(framing, config)?;
    println!("listening on {}", server.listen(address)?);
    server.serve(4, |message, out| {
        // Skip the four bytes of the frame's length. Messages other than calls are not answered.
        if let Some(answer) = answer(&message.bytes()[4..]) {
            out.extend_from_slice(&(answer.len() as u32).to_be_bytes());
            out.extend_from_slice(&answer);
        }
    })?;
    Ok(())
}

/// The reply to a call.
fn answer(mut call: &[u8]) -> Option<Vec<u8>> {
    if take(&mut call)? & 0xffff_0000 != VERSION {
        return None;
    }
    let length = take(&mut call)? as usize;
    let name = call.split_off(..length)?;
    let number = take(&mut call)?;
    let result = arguments(call).and_then(|[a, b]| match name {
        b"add" => Some(a.wrapping_add(b)),
        b"subtract" => Some(a.wrapping_sub(b)),
        b"multiply" => Some(a.wrapping_mul(b)),
        _ => None,
    });
    let mut reply = Vec::new();
    let kind = if result.is_some() { REPLY } else { EXCEPTION };
    reply.extend((VERSION | kind).to_be_bytes());
    reply.extend((length as u32).to_be_bytes());
    reply.extend(name);
    reply.extend(number.to_be_bytes());
    match result {
        // Field 0 of the result struct is the return value.
        Some(result) => reply.extend([&[I32, 0, 0][..], &result.to_be_bytes()].concat()),
        None => {
            let text = b"add, subtract and multiply take two i32";
            reply.extend([&[STRING, 0, 1][..], &(text.len() as u32).to_be_bytes(), text].concat());
            reply.extend([&[I32, 0, 2][..], &UNKNOWN_METHOD.to_be_bytes()].concat());
        }
    }
    reply.push(STOP);
    Some(reply)
}

/// Fields 1 and 2 of the argument struct.
fn arguments(mut fields: &[u8]) -> Option<[i32; 2]> {
    let mut found = [None; 2];
    while *fields.split_off_first()? == I32 {
        let at = usize::from(u16::from_be_bytes(fields.split_off(..2)?.try_into().ok()?));
        *found.get_mut(at.checked_sub(1)?)? = Some(take(&mut fields)? as i32);
    }
    Some([found[0]?, found[1]?])
}

fn take(bytes: &mut &[u8]) -> Option<u32> {
    Some(u32::from_be_bytes(bytes.split_off(..4)?.try_into().ok()?))
}
