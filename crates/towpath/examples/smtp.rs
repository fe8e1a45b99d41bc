//! A mail server that speaks first (RFC 5321): it greets a connection when it is opened, keeps the state of each connection, and closes
//! it after QUIT. Mail goes to stdout.
//!
//! ```text
//! towpath mux 127.0.0.1:2525 --framing line --order sticky --workers 4 --worker target/debug/examples/smtp
//! python3 -c 'import smtplib; smtplib.SMTP("127.0.0.1", 2525).sendmail("a@example", "b@example", "Subject: hello\n\nworld\n")'
//! ```

use std::collections::HashMap;
use std::error::Error;

use towpath_ring::{Connection, Event, Options, Worker};

/// The mail that a connection sends, after DATA.
type Mail = Option<Vec<u8>>;

fn main() -> Result<(), Box<dyn Error>> {
    let mut worker = Worker::attach_env_with(&Options { events: true, ..Options::default() })?;
    let mut open: HashMap<Connection, Mail> = HashMap::new();
    while let Some(event) = worker.recv_event()? {
        match event {
            Event::Opened(opened) => {
                open.insert(opened.connection(), None);
                if opened.info.resumed {
                    // The worker that had its state has gone.
                    worker.reply(&opened.message, b"421 service restarted, try again\r\n")?;
                    worker.close_after(&opened.message)?;
                } else {
                    let local = &opened.info.local;
                    worker.reply(&opened.message, format!("220 {local} ready\r\n").as_bytes())?;
                }
                worker.done(opened.message);
            }
            Event::Message(message) => {
                let line = worker.payload(&message).to_vec();
                let mail = open.entry(message.connection()).or_default();
                if let Some(answer) = answer(&line, mail) {
                    worker.reply(&message, format!("{answer}\r\n").as_bytes())?;
                    if answer.starts_with("221") {
                        worker.close_after(&message)?;
                    }
                }
                worker.done(message);
            }
            Event::Ended(ended) => {
                open.remove(&ended.connection);
            }
        }
    }
    Ok(())
}

fn answer(line: &[u8], mail: &mut Mail) -> Option<&'static str> {
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    match mail {
        Some(text) if line == b"." => {
            print!("{}", String::from_utf8_lossy(text));
            *mail = None;
            return Some("250 accepted");
        }
        Some(text) => {
            // RFC 5321, 4.5.2: the first dot of a line with more is removed.
            text.extend_from_slice(line.strip_prefix(b".").unwrap_or(line));
            text.push(b'\n');
            return None;
        }
        None => {}
    }
    let verb = line.split(|byte| *byte == b' ').next().unwrap_or_default().to_ascii_uppercase();
    Some(match &verb[..] {
        b"HELO" | b"EHLO" => "250 hello",
        b"MAIL" | b"RCPT" | b"RSET" | b"NOOP" => "250 ok",
        b"DATA" => {
            *mail = Some(Vec::new());
            "354 end with a line of one dot"
        }
        b"QUIT" => "221 bye",
        _ => "502 unknown command",
    })
}
