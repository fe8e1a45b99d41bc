//! A mail server that speaks first (RFC 5321): it greets a connection when it is opened, and closes it after QUIT. Mail goes to stdout.
//!
//! ```text
//! towpath mux 127.0.0.1:2525 --framing smtp --workers 4 --worker target/debug/examples/smtp
//! python3 -c 'import smtplib; smtplib.SMTP("127.0.0.1", 2525).sendmail("a@example", "b@example", "Subject: hello\n\nworld\n")'
//! ```
//!
//! With `--tls cert.pem,key.pem --starttls`, the multiplexor greets, and a client begins with TLS: `smtplib.SMTP(...).starttls()`.

use std::error::Error;

use towpath_ring::{Event, Options, Worker};

/// The mark of a mail (docs/book/src/reference/framing.md, "smtp").
const MAIL: u32 = 1;

fn main() -> Result<(), Box<dyn Error>> {
    let mut worker = Worker::attach_env_with(&Options { events: true, ..Options::default() })?;
    while let Some(event) = worker.recv_event()? {
        match event {
            Event::Opened(opened) => {
                if opened.info.resumed {
                    // The worker that served it has gone.
                    worker.reply(&opened.message, b"421 service restarted, try again\r\n")?;
                    worker.close_after(&opened.message)?;
                } else if !opened.info.starttls {
                    let local = &opened.info.local;
                    worker.reply(&opened.message, format!("220 {local} ready\r\n").as_bytes())?;
                }
                worker.done(opened.message);
            }
            Event::Message(message) => {
                let answer = answer(worker.payload(&message), message.mark());
                worker.reply(&message, format!("{answer}\r\n").as_bytes())?;
                if answer.starts_with("221") {
                    worker.close_after(&message)?;
                }
                worker.done(message);
            }
            Event::Ended(_) => {}
        }
    }
    Ok(())
}

fn answer(payload: &[u8], mark: u32) -> &'static str {
    if mark == MAIL {
        for line in payload.split_inclusive(|byte| *byte == b'\n') {
            // RFC 5321, 4.5.2: the first dot of a line is removed.
            print!("{}", String::from_utf8_lossy(line.strip_prefix(b".").unwrap_or(line)));
        }
        return "250 accepted";
    }
    let line = payload.trim_ascii_end();
    let verb = line.split(|byte| *byte == b' ').next().unwrap_or_default().to_ascii_uppercase();
    match &verb[..] {
        b"HELO" | b"EHLO" => "250 hello",
        b"MAIL" | b"RCPT" | b"RSET" | b"NOOP" => "250 ok",
        b"DATA" => "354 end with a line of one dot",
        b"QUIT" => "221 bye",
        _ => "502 unknown command",
    }
}
