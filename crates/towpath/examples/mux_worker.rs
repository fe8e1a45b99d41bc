//! A worker of `towpath mux` that answers with its process id, a space and what it was asked; and that goes wrong when it is
//! told to, for tests and for trying out what a front does about it. Messages have a length of four bytes before them.
//!
//! `die` is gone without a word; `die once FILE` too, unless the file is there, which it makes;
//! `wait ADDRESS` connects there and answers when that connection ends;
//! `stop` answers never;
//! `send TEXT` sends that text to any connection, and then answers; `unsent` answers with what came back of it;
//! `scribble` writes over everything that it has answered, where that lies in memory, and then answers.
//!
//! `remember` answers with the index and the generation of its connection, and `to INDEX GENERATION TEXT` sends TEXT to
//! that one; `own TEXT` sends TEXT to the connection of the message; `parts N` answers in that many parts; `huge N` has
//! that many bytes in its answer.
//! It exceeds its authority at `again` (answers twice), `unheld` (answers to what it does not have), `more` (more answers
//! than messages), `frame` (a frame that is not an answer) and `bells N` (rings the doorbell N times without news).
//!
//! With a number as its argument it takes so many short messages at once.

use std::error::Error;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::net::TcpStream;

use towpath_ring::{Connection, Kind, Meta, Unsent, Worker};

fn main() -> Result<(), Box<dyn Error>> {
    let mut worker = Worker::attach_env()?;
    if let Some(at_once) = std::env::args().nth(1) {
        worker = worker.taking(at_once.parse()?);
        return Ok(worker.serve(|message, reply| reply.extend_from_slice(&answer(&message.bytes()[4..])))?);
    }
    while let Some(message) = worker.recv()? {
        let body = worker.bytes(&message)[4..].to_vec();
        let connection = message.connection();
        let words: Vec<&str> = std::str::from_utf8(&body).unwrap_or_default().splitn(4, ' ').collect();
        match words[..] {
            ["send", ..] => worker.send(&body[5..])?,
            ["own", ..] => worker.forward(connection, &body[4..])?,
            ["to", index, generation, text] => {
                let connection = Connection { index: index.parse()?, generation: generation.parse()? };
                worker.forward(connection, text.as_bytes())?;
            }
            ["parts", count] => {
                let answer = answer(&body);
                let count = count.parse::<usize>()?.max(1);
                for part in answer.chunks(answer.len().div_ceil(count)) {
                    worker.reply_part(&message, part)?;
                }
                worker.reply(&message, b"")?;
                worker.done(message);
                continue;
            }
            ["huge", bytes] => {
                worker.reply(&message, &framed(&vec![b'x'; bytes.parse()?]))?;
                worker.done(message);
                continue;
            }
            ["again"] => worker.reply(&message, &answer(&body))?,
            ["unheld"] => raw(&mut worker, Meta { kind: Kind::REPLY, port: 1 << 30, ..Meta::default() })?,
            ["frame"] => raw(&mut worker, Meta { kind: Kind(0x8000), ..Meta::default() })?,
            ["more"] => {
                let many = Meta { kind: Kind::REPLY, port: message.seq().0, mark: 2, ..Meta::default() };
                raw(&mut worker, many)?;
            }
            ["bells", count] => bells(&worker, count.parse()?)?,
            _ => {}
        }
        let answer = match &body[..] {
            b"remember" => framed(
                format!("{} {} {}", std::process::id(), connection.index, connection.generation).as_bytes(),
            ),
            b"unsent" => {
                let back = std::iter::from_fn(|| worker.poll_unsent());
                let said = |it: Unsent| {
                    format!("{} {:?} {}", it.errno, it.connection, String::from_utf8_lossy(&it.bytes))
                };
                answer(back.map(said).collect::<Vec<_>>().join(", ").as_bytes())
            }
            body => answer(body),
        };
        worker.reply(&message, &answer)?;
        worker.done(message);
    }
    Ok(())
}

fn answer(body: &[u8]) -> Vec<u8> {
    let text = std::str::from_utf8(body).unwrap_or_default();
    match text.split(' ').collect::<Vec<_>>()[..] {
        // As kill -9: no destructor runs, and the channel is not closed.
        ["die"] => std::process::abort(),
        ["die", "once", mark] if std::path::Path::new(mark).exists() => {}
        ["die", "once", mark] => {
            let _ = std::fs::write(mark, b"");
            std::process::abort();
        }
        ["wait", address] => {
            let _ = TcpStream::connect(address).and_then(|mut stream| stream.read(&mut [0]));
        }
        ["scribble"] => scribble().expect("its own memory"),
        ["stop"] => loop {
            std::thread::park();
        },
        _ => {}
    }
    framed(&[format!("{} ", std::process::id()).as_bytes(), body].concat())
}

fn framed(body: &[u8]) -> Vec<u8> {
    [&(body.len() as u32).to_be_bytes(), body].concat()
}

/// A frame that the client library does not send.
fn raw(worker: &mut Worker, meta: Meta) -> Result<(), Box<dyn Error>> {
    worker.queue().send(&framed(b"raw"), &meta)?;
    worker.queue().flush();
    Ok(())
}

/// Doorbells that the front did not ask for (docs/book/src/reference/ring-abi.md has their 16 bytes).
fn bells(worker: &Worker, count: usize) -> io::Result<()> {
    let bell = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for _ in 0..count {
        match rustix::net::send(worker, &bell, rustix::net::SendFlags::NOSIGNAL) {
            // The front has closed the channel: it had enough.
            Err(rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET) => break,
            sent => drop(sent?),
        }
    }
    Ok(())
}

/// Writes over the memory in which answers are, as proc_pid_maps(5) and proc_pid_mem(5) have it.
fn scribble() -> io::Result<()> {
    let mut memory = std::fs::OpenOptions::new().write(true).open("/proc/self/mem")?;
    for line in std::fs::read_to_string("/proc/self/maps")?.lines().filter(|line| line.contains("towpath-tx"))
    {
        let range = line.split([' ', '-']).take(2).map(|end| u64::from_str_radix(end, 16));
        let [Ok(from), Ok(to)] = range.collect::<Vec<_>>()[..] else { continue };
        memory.seek(SeekFrom::Start(from))?;
        memory.write_all(&vec![b'!'; (to - from) as usize])?;
    }
    Ok(())
}
