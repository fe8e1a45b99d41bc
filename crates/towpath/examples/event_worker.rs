//! A worker of `towpath mux` that asks for connection events, for tests. Messages are lines.
//!
//! It answers an opened event with `opened PID RESUMED PEER LOCAL LISTENER SERVER-NAME`, and a line with `PID LINE`. It collects ended
//! events as `INDEX CAUSE`.
//!
//! | line | action |
//! |---|---|
//! | `quit` | answers `bye` and closes the connection |
//! | `reset` | resets the connection |
//! | `die` | exits without an answer |
//! | `name` | answers with index and generation of the connection |
//! | `ends` | answers with the ended events |
//! | `hold` | keeps the message |
//! | `push INDEX GENERATION TEXT` | sends TEXT to that connection |
//! | `close INDEX GENERATION` | closes that connection |
//! | `payload` | sends a close with a payload |
//!
//! | argument | effect |
//! |---|---|
//! | `http` | messages are HTTP requests: answers in HTTP/1.0 and closes |
//! | `silent` | does not answer opened events |
//! | `deaf` | asks for no events |
//! | `journal FILE`, `journal-recv FILE` | appends each message to FILE, and exits after one that starts with `die` |
//! | `tls` | answers an opened event with `STARTTLS SERVER-NAME/PROTOCOL/CLIENT-NAMES` |
//! | `late FILE` | exits at the first opened event if FILE does not exist |

use std::error::Error;
use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::Path;

use towpath_ring::{Connection, Event, Kind, Message, Meta, Opened, Options, Worker};

fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let mode = args.first().map_or("", String::as_str);
    let options = Options { events: mode != "deaf" && mode != "http", ..Options::default() };
    let mut worker = Worker::attach_env_with(&options)?;
    if mode == "http" {
        worker.serve(|_, reply| {
            reply.extend_from_slice(b"HTTP/1.0 200 OK\r\nContent-Type: text/plain\r\n\r\nhello\n");
            reply.close();
        })?;
        return Ok(());
    }
    if mode.starts_with("journal") {
        return journal(worker, &args[1], mode == "journal");
    }
    let (mut ends, mut held) = (String::new(), Vec::new());
    while let Some(event) = worker.recv_event()? {
        match event {
            Event::Opened(opened) => {
                if mode == "late" && !Path::new(&args[1]).exists() {
                    std::fs::write(&args[1], b"")?;
                    std::process::exit(1);
                }
                match mode {
                    "silent" => {}
                    "tls" => {
                        let info = &opened.info;
                        let protocol = String::from_utf8_lossy(&info.protocol);
                        let names = info.client_names.join(",");
                        let line = format!("{} {}/{protocol}/{names}\n", info.starttls, info.server_name);
                        worker.reply(&opened.message, line.as_bytes())?;
                    }
                    _ => greet(&mut worker, &opened)?,
                }
                worker.done(opened.message);
            }
            Event::Ended(ended) => write!(ends, "{} {};", ended.connection.index, ended.info.cause)?,
            Event::Message(message) => {
                if worker.payload(&message) == b"hold" {
                    held.push(message);
                    continue;
                }
                answer(&mut worker, &message, &mut ends)?;
                worker.done(message);
            }
        }
    }
    Ok(())
}

/// Writes each message to a file, and answers it.
fn journal(worker: Worker, file: &str, shares: bool) -> Result<(), Box<dyn Error>> {
    let mut file = File::options().create(true).append(true).open(file)?;
    let mut note = |line: &[u8]| {
        file.write_all(&[line, b"\n"].concat()).expect("the file can be written");
        if line.starts_with(b"die") {
            std::process::exit(1);
        }
    };
    let mut worker = worker.taking(16);
    if shares {
        return Ok(worker.serve(|message, reply| {
            note(message.payload());
            reply.extend_from_slice(message.bytes());
        })?);
    }
    while let Some(message) = worker.recv()? {
        note(worker.payload(&message));
        worker.reply(&message, b"ok\n")?;
        worker.done(message);
    }
    Ok(())
}

fn greet(worker: &mut Worker, opened: &Opened) -> Result<(), Box<dyn Error>> {
    let (pid, info) = (std::process::id(), &opened.info);
    let line = format!(
        "opened {pid} {} {} {} {} {}\n",
        info.resumed, info.peer, info.local, info.listener, info.server_name
    );
    Ok(worker.reply(&opened.message, line.as_bytes())?)
}

fn answer(worker: &mut Worker, message: &Message, ends: &mut String) -> Result<(), Box<dyn Error>> {
    let line = String::from_utf8_lossy(worker.payload(message)).trim_end().to_owned();
    let words: Vec<&str> = line.splitn(4, ' ').collect();
    let Connection { index, generation } = message.connection();
    let named = |index: &str, generation: &str| -> Result<Connection, Box<dyn Error>> {
        Ok(Connection { index: index.parse()?, generation: generation.parse()? })
    };
    match words[..] {
        ["quit"] => {
            worker.reply(message, b"bye\n")?;
            worker.close_after(message)?;
        }
        ["reset"] => worker.reset_connection(message.connection())?,
        ["die"] => std::process::exit(1),
        ["name"] => worker.reply(message, format!("{index} {generation}\n").as_bytes())?,
        ["ends"] => worker.reply(message, format!("{}\n", std::mem::take(ends)).as_bytes())?,
        ["push", index, generation, text] => {
            worker.forward(named(index, generation)?, format!("{text}\n").as_bytes())?;
            worker.reply(message, b"ok\n")?;
        }
        ["close", index, generation] => {
            worker.close_connection(named(index, generation)?)?;
            worker.reply(message, b"ok\n")?;
        }
        ["payload"] => {
            let meta = Meta { kind: Kind::CLOSE, port: index, group: generation, ..Meta::default() };
            worker.queue().send(b"x", &meta)?;
        }
        _ => worker.reply(message, format!("{} {line}\n", std::process::id()).as_bytes())?,
    }
    Ok(())
}
