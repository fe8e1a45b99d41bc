//! A worker of `towpath mux` for tests: it answers with its process id, a space and the message, and simulates faults on request.
//! Messages have a length of four bytes before them.
//!
//! | message | action |
//! |---|---|
//! | `die` | exits without an answer |
//! | `die once FILE` | the same if FILE does not exist; creates it |
//! | `wait ADDRESS` | connects to ADDRESS and answers when that connection ends |
//! | `stop` | never answers |
//! | `send TEXT` | sends TEXT to any connection, and answers |
//! | `unsent` | answers with the messages of `send` that were not sent |
//! | `scribble` | overwrites the memory of its answers, and answers |
//! | `remember` | answers with index and generation of its connection |
//! | `to INDEX GENERATION TEXT` | sends TEXT to that connection |
//! | `own TEXT` | sends TEXT to the connection of the message |
//! | `parts N` | answers in N parts |
//! | `huge N` | answers with N bytes |
//!
//! These exceed its authority: `again` (a second answer), `unheld` (an answer to a message of another worker), `more` (more answers
//! than messages), `empty N` (N parts without bytes before the answer), `frame` (a frame that is not an answer), `bells N` (rings the
//! doorbell N times without news).
//!
//! With a number as argument, it accepts that many short messages in one frame.

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
            ["empty", count] => {
                for _ in 0..count.parse()? {
                    worker.reply_part(&message, b"")?;
                }
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

/// Sends a frame that the client library never sends.
fn raw(worker: &mut Worker, meta: Meta) -> Result<(), Box<dyn Error>> {
    worker.queue().send(&framed(b"raw"), &meta)?;
    worker.queue().flush();
    Ok(())
}

/// Rings the doorbell without news (docs/book/src/reference/ring-abi.md has their 16 bytes).
fn bells(worker: &Worker, count: usize) -> io::Result<()> {
    let bell = [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    for _ in 0..count {
        match rustix::net::send(worker, &bell, rustix::net::SendFlags::NOSIGNAL) {
            // The multiplexor has detached this worker.
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
