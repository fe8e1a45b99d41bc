//! A worker of `towpath mux --framing 'http1 body=stream'` that takes uploads in parts, for tests.
//!
//! The answer to a request has the number of bytes after its head, their checksum, and the number of parts. `GET /state` has instead: the
//! process id, the number of messages in parts that this process has begun, and how many of them were cut. `Expect: 100-continue` is
//! answered with the first part. `/refuse` is answered with 413 and closed at its first part. With the argument `whole`, it does not
//! take parts.

use std::collections::HashMap;
use std::error::Error;
use std::io::Write;

use towpath_ring::{Connection, Options, Reply, View, Worker};

#[derive(Default)]
struct Upload {
    bytes: u64,
    parts: u32,
    sum: Sum,
    refused: bool,
}

/// A checksum of words that depends on their order. The parts may end anywhere.
#[derive(Default)]
struct Sum {
    sum: u64,
    rest: Vec<u8>,
}

impl Sum {
    fn add(&mut self, mut bytes: &[u8]) {
        while !self.rest.is_empty() && !bytes.is_empty() {
            self.rest.push(bytes[0]);
            bytes = &bytes[1..];
            if self.rest.len() == 8 {
                let word = std::mem::take(&mut self.rest);
                self.word(&word);
            }
        }
        let words = bytes.chunks_exact(8);
        self.rest.extend_from_slice(words.remainder());
        words.for_each(|word| self.word(word));
    }

    fn word(&mut self, word: &[u8]) {
        let word = u64::from_le_bytes(word.try_into().unwrap_or_default());
        self.sum = self.sum.rotate_left(7).wrapping_mul(3) ^ word;
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let parts = std::env::args().nth(1).as_deref() != Some("whole");
    let mut worker = Worker::attach_env_with(&Options { parts, ..Options::default() })?;
    let (mut uploads, mut begun, mut cut) = (HashMap::new(), 0, 0);
    worker.serve(|part, answer| {
        begun += u32::from(part.part() == 1);
        cut += u32::from(part.is_cut());
        serve(&mut uploads, (begun, cut), part, answer).expect("an answer is in memory");
    })?;
    Ok(())
}

fn serve(
    uploads: &mut HashMap<Connection, Upload>,
    (begun, cut): (u32, u32),
    part: View<'_>,
    answer: &mut Reply,
) -> std::io::Result<()> {
    let mut body = part.payload();
    if part.part() <= 1 {
        let end = body.windows(4).position(|at| at == b"\r\n\r\n").map_or(body.len(), |at| at + 4);
        let (head, rest) = body.split_at(end);
        let head = String::from_utf8_lossy(head);
        if head.starts_with("GET /state ") {
            return ok(answer, &format!("{} {begun} {cut}", std::process::id()));
        }
        let refused = head.contains(" /refuse ");
        if refused {
            write!(
                answer,
                "HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            )?;
            answer.close();
        } else if head.contains("Expect: 100-continue") {
            write!(answer, "HTTP/1.1 100 Continue\r\n\r\n")?;
        }
        uploads.insert(part.connection(), Upload { refused, ..Upload::default() });
        body = rest;
    }
    let Some(upload) = uploads.get_mut(&part.connection()) else { return Ok(()) };
    upload.bytes += body.len() as u64;
    upload.parts += 1;
    upload.sum.add(body);
    if part.more() {
        return Ok(());
    }
    let Some(Upload { bytes, parts, sum, refused }) = uploads.remove(&part.connection()) else {
        return Ok(());
    };
    if part.is_cut() || refused {
        return Ok(());
    }
    ok(answer, &format!("{bytes} {:x} {parts}", sum.sum))
}

fn ok(answer: &mut Reply, text: &str) -> std::io::Result<()> {
    write!(answer, "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{text}", text.len())
}
