//! A worker of `towpath mux` that answers with its process id, a space and what it was asked; and that goes wrong when it is
//! told to, for tests and for trying out what a front does about it. Messages have a length of four bytes before them.
//!
//! `die` is gone without a word; `die once FILE` too, unless the file is there, which it makes;
//! `wait ADDRESS` connects there and answers when that connection ends;
//! `stop` answers never;
//! `send TEXT` sends that text to any connection, and then answers; `unsent` answers with what came back of it;
//! `scribble` writes over everything that it has answered, where that lies in memory, and then answers.
//!
//! With a number as its argument it takes so many short messages at once.

use std::error::Error;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::net::TcpStream;

use towpath_ring::{Unsent, Worker};

fn main() -> Result<(), Box<dyn Error>> {
    let mut worker = Worker::attach_env()?;
    if let Some(at_once) = std::env::args().nth(1) {
        worker = worker.taking(at_once.parse()?);
        return Ok(worker.serve(|message, reply| reply.extend_from_slice(&answer(&message.bytes()[4..])))?);
    }
    while let Some(message) = worker.recv()? {
        let body = worker.bytes(&message)[4..].to_vec();
        if let Some(text) = body.strip_prefix(b"send ") {
            worker.send(text)?;
        }
        let answer = match &body[..] {
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
        // As kill -9 would: no destructor, no goodbye.
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
    let mut answer = vec![0; 4];
    answer.extend_from_slice(format!("{} ", std::process::id()).as_bytes());
    answer.extend_from_slice(body);
    let length = (answer.len() - 4) as u32;
    answer[..4].copy_from_slice(&length.to_be_bytes());
    answer
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
