//! STARTTLS: the plaintext that precedes TLS on a connection (RFC 3207 for SMTP and LMTP; PostgreSQL documentation, "SSL Session
//! Encryption" in "Message Flow").
//!
//! What: the server answers what a client may ask before TLS, until it asks for TLS. TLS is required: everything else is refused, and
//! no worker sees any of it. After the handshake the connection begins anew (RFC 3207, 4.2: "the server MUST discard any knowledge
//! obtained from the client").
//!
//! Invariant: no byte that was received before the handshake is data of the session. A client's request for TLS is the last thing
//! that it sends before the answer; bytes after it in the same read end the connection, because an attacker on the path could have
//! added them (CVE-2011-0411, CVE-2021-23214).
//!
//! Bounds: [`LINE`], [`COMMANDS`], [`STARTUP`]; the handshake timeout limits the time.

use crate::framing::StartTls;

/// Maximum length of a command line with CR LF (RFC 5321, 4.5.3.1.4).
const LINE: usize = 512;
/// Maximum number of SMTP commands.
const COMMANDS: u32 = 16;
/// Maximum length of a startup message of PostgreSQL (MAX_STARTUP_PACKET_LENGTH of libpq/pqcomm.h).
const STARTUP: usize = 10_000;
/// Codes in the place of a protocol version (libpq/pqcomm.h).
const CANCEL_REQUEST: u32 = 80_877_102;
const SSL_REQUEST: u32 = 80_877_103;
const GSS_REQUEST: u32 = 80_877_104;
/// First byte of a TLS handshake record (RFC 8446, 5.1).
const TLS_HANDSHAKE: u8 = 0x16;

/// The step after the answers are sent.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Next {
    /// More plaintext.
    #[default]
    Read,
    /// TLS. Its first bytes, if the client did not ask for it.
    Tls(Vec<u8>),
    /// The end, for this reason.
    End(&'static str),
}

/// A connection before TLS: bytes in, bytes to send and [`Next`] out.
#[derive(Debug)]
pub(super) struct Prelude {
    protocol: StartTls,
    /// Received and not processed.
    received: Vec<u8>,
    /// To be sent.
    pub(super) send: Vec<u8>,
    /// SMTP: commands so far.
    commands: u32,
    /// PostgreSQL: GSS encryption was refused.
    gss: bool,
    pub(super) next: Next,
}

impl Prelude {
    pub(super) fn new(protocol: StartTls) -> Self {
        let send = match protocol {
            StartTls::Smtp => format!("220 {} ESMTP\r\n", host()).into_bytes(),
            StartTls::Postgres => Vec::new(),
        };
        Self { protocol, received: Vec::new(), send, commands: 0, gss: false, next: Next::Read }
    }

    /// Processes received bytes.
    pub(super) fn handle(&mut self, bytes: &[u8]) {
        self.received.extend_from_slice(bytes);
        while self.next == Next::Read {
            let progress = match self.protocol {
                StartTls::Smtp => self.command(),
                StartTls::Postgres => self.startup(),
            };
            if progress.is_none() {
                return;
            }
        }
    }

    /// Answers `text` and ends the connection.
    fn refuse(&mut self, text: &[u8], why: &'static str) {
        self.send.extend_from_slice(text);
        self.next = Next::End(why);
    }

    /// Answers an SMTP command. `None` if it is not complete.
    fn command(&mut self) -> Option<()> {
        let end = self.received.iter().take(LINE).position(|byte| *byte == b'\n');
        let Some(end) = end else {
            if self.received.len() >= LINE {
                self.refuse(b"500 5.5.2 Line too long\r\n", "a command line before STARTTLS was too long");
            }
            return None;
        };
        let rest = self.received.split_off(end + 1);
        let line = std::mem::replace(&mut self.received, rest);
        self.commands += 1;
        let Some(line) = line.strip_suffix(b"\r\n") else {
            self.refuse(b"500 5.5.2 A line ends with CR LF\r\n", "a line before STARTTLS ended with LF only");
            return None;
        };
        if self.commands > COMMANDS {
            self.refuse(
                b"421 4.7.0 Too many commands before STARTTLS\r\n",
                "too many commands before STARTTLS",
            );
            return None;
        }
        let mut words = line.split(|byte| *byte == b' ').filter(|word| !word.is_empty());
        let verb = words.next().unwrap_or_default().to_ascii_uppercase();
        let argument = words.next();
        match (&verb[..], argument) {
            (b"STARTTLS", None) if self.received.is_empty() => {
                self.send.extend_from_slice(b"220 2.0.0 Ready to start TLS\r\n");
                self.next = Next::Tls(Vec::new());
            }
            (b"STARTTLS", None) => {
                self.refuse(b"554 5.5.1 Data after STARTTLS\r\n", "plaintext after STARTTLS");
            }
            (b"STARTTLS", Some(_)) => {
                self.send.extend_from_slice(b"501 5.5.4 STARTTLS has no parameters\r\n")
            }
            (b"EHLO" | b"LHLO", Some(_)) => {
                self.send.extend_from_slice(format!("250-{}\r\n250 STARTTLS\r\n", host()).as_bytes());
            }
            (b"EHLO" | b"LHLO", None) => self.send.extend_from_slice(b"501 5.5.4 A domain is missing\r\n"),
            (b"NOOP", _) => self.send.extend_from_slice(b"250 2.0.0 Ok\r\n"),
            (b"QUIT", _) => self.refuse(b"221 2.0.0 Bye\r\n", "the client quit before STARTTLS"),
            _ => self.send.extend_from_slice(b"530 5.7.0 Must issue a STARTTLS command first\r\n"),
        }
        Some(())
    }

    /// Answers a first message of PostgreSQL: its length, which includes itself, and a code. `None` if it is not complete.
    fn startup(&mut self) -> Option<()> {
        // TLS without a request (PostgreSQL 17, "Direct SSL").
        if self.received.first() == Some(&TLS_HANDSHAKE) {
            self.next = Next::Tls(std::mem::take(&mut self.received));
            return None;
        }
        let (&[a, b, c, d, e, f, g, h], rest) = self.received.split_first_chunk()?;
        let length = u32::from_be_bytes([a, b, c, d]) as usize;
        match u32::from_be_bytes([e, f, g, h]) {
            SSL_REQUEST if length == 8 && rest.is_empty() => {
                self.send.push(b'S');
                self.next = Next::Tls(Vec::new());
            }
            SSL_REQUEST if length == 8 => self.refuse(b"", "plaintext after SSLRequest"),
            GSS_REQUEST if length == 8 && !self.gss => {
                self.gss = true;
                self.send.push(b'N');
                self.received.drain(..8);
            }
            CANCEL_REQUEST => self.refuse(b"", "a CancelRequest without TLS"),
            version if matches!(version >> 16, 2 | 3) && (8..=STARTUP).contains(&length) => {
                // The whole message: the close would otherwise reset the connection, and the client would lose the reason.
                if self.received.len() < length {
                    return None;
                }
                self.refuse(&no_encryption(), "a PostgreSQL startup message without TLS");
            }
            _ => self.refuse(b"", "not a first message of PostgreSQL"),
        }
        Some(())
    }
}

/// ErrorResponse (PostgreSQL documentation, "Message Formats", "Error and Notice Message Fields"). 28000 is
/// invalid_authorization_specification.
fn no_encryption() -> Vec<u8> {
    let fields = b"SFATAL\0VFATAL\0C28000\0Mthe server requires TLS: set sslmode=require\0\0";
    [b"E", &(4 + fields.len() as u32).to_be_bytes()[..], fields].concat()
}

/// The name of this host (RFC 5321, 4.2: a greeting and the reply to EHLO begin with it).
fn host() -> String {
    let name = rustix::system::uname();
    let name = name.nodename().to_string_lossy();
    let valid = !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_graphic());
    if valid { name.into_owned() } else { "localhost".to_owned() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Answers to these reads, with the host's name replaced, and what follows.
    fn talk(protocol: StartTls, reads: &[&[u8]]) -> (String, Next) {
        let mut prelude = Prelude::new(protocol);
        reads.iter().for_each(|read| prelude.handle(read));
        let said = String::from_utf8_lossy(&prelude.send).replace(&host(), "HOST");
        (said, prelude.next)
    }

    fn request(code: u32) -> Vec<u8> {
        [8u32.to_be_bytes(), code.to_be_bytes()].concat()
    }

    fn startup() -> Vec<u8> {
        let body = b"user\0me\0\0";
        [&(8 + body.len() as u32).to_be_bytes()[..], &0x3_0000u32.to_be_bytes(), body].concat()
    }

    #[test]
    fn smtp_clients_are_led_to_tls() {
        let tls = Next::Tls(Vec::new());
        let long = [b'a'; LINE];
        let noops = b"NOOP\r\n".repeat(17);
        #[rustfmt::skip]
        let rows: [(&[&[u8]], &str, Next); 15] = [
            (&[], "", Next::Read),
            (&[b"EHLO a\r\n", b"STARTTLS\r\n"], "250-HOST|250 STARTTLS|220 2.0.0 Ready to start TLS|", tls.clone()),
            (&[b"ehlo a\r\nstartt", b"ls\r", b"\n"], "250-HOST|250 STARTTLS|220 2.0.0 Ready to start TLS|", tls.clone()),
            (&[b"LHLO a\r\n"], "250-HOST|250 STARTTLS|", Next::Read),
            (&[b"EHLO\r\n"], "501 5.5.4 A domain is missing|", Next::Read),
            (&[b"STARTTLS now\r\n", b"STARTTLS\r\n"], "501 5.5.4 STARTTLS has no parameters|220 2.0.0 Ready to start TLS|", tls),
            (&[b"STARTTLS\r\nSTARTTLS\r\n"], "554 5.5.1 Data after STARTTLS|", Next::End("plaintext after STARTTLS")),
            (&[b"STARTTLS\r\nR"], "554 5.5.1 Data after STARTTLS|", Next::End("plaintext after STARTTLS")),
            (&[b"HELO a\r\nMAIL FROM:<a@b>\r\nNOOP\r\n"], "530 5.7.0 Must issue a STARTTLS command first|530 5.7.0 Must issue a STARTTLS command first|250 2.0.0 Ok|", Next::Read),
            (&[b"\r\n"], "530 5.7.0 Must issue a STARTTLS command first|", Next::Read),
            (&[b"QUIT\r\nNOOP\r\n"], "221 2.0.0 Bye|", Next::End("the client quit before STARTTLS")),
            (&[b"EHLO a\n"], "500 5.5.2 A line ends with CR LF|", Next::End("a line before STARTTLS ended with LF only")),
            (&[&long[1..]], "", Next::Read),
            (&[&long], "500 5.5.2 Line too long|", Next::End("a command line before STARTTLS was too long")),
            (&[&noops], &format!("{}421 4.7.0 Too many commands before STARTTLS|", "250 2.0.0 Ok|".repeat(16)), Next::End("too many commands before STARTTLS")),
        ];
        for (reads, said, next) in rows {
            let (all, then) = talk(StartTls::Smtp, reads);
            assert_eq!(
                (all.replace("\r\n", "|"), then),
                (format!("220 HOST ESMTP|{said}"), next),
                "{reads:?}"
            );
        }
    }

    #[test]
    fn postgres_clients_are_led_to_tls() {
        let (ssl, gss, cancel) = (request(SSL_REQUEST), request(GSS_REQUEST), request(CANCEL_REQUEST));
        let tls = Next::Tls(Vec::new());
        let fatal = String::from_utf8(no_encryption()).expect("text");
        let other = Next::End("not a first message of PostgreSQL");
        let plain = Next::End("a PostgreSQL startup message without TLS");
        let (whole, huge) = (startup(), [&20_000u32.to_be_bytes()[..], &0x3_0000u32.to_be_bytes()].concat());
        #[rustfmt::skip]
        let rows: [(&[&[u8]], &str, Next); 14] = [
            (&[], "", Next::Read),
            (&[&ssl], "S", tls.clone()),
            (&[&ssl[..3], &ssl[3..]], "S", tls.clone()),
            (&[&gss, &ssl], "NS", tls.clone()),
            (&[&[&gss[..], &ssl].concat()], "NS", tls),
            (&[&[&ssl[..], &whole].concat()], "", Next::End("plaintext after SSLRequest")),
            (&[&[&ssl[..], &ssl].concat()], "", Next::End("plaintext after SSLRequest")),
            (&[&gss, &gss], "N", other.clone()),
            (&[&[TLS_HANDSHAKE, 3, 1]], "", Next::Tls(vec![TLS_HANDSHAKE, 3, 1])),
            (&[&whole], &fatal, plain),
            (&[&whole[..9]], "", Next::Read),
            (&[&cancel, &[0; 8]], "", Next::End("a CancelRequest without TLS")),
            (&[&huge], "", other.clone()),
            (&[b"GET / HTTP/1.1\r\n"], "", other),
        ];
        for (reads, said, next) in rows {
            assert_eq!(talk(StartTls::Postgres, reads), (said.to_owned(), next), "{reads:?}");
        }
    }

    proptest! {
        #[test]
        fn memory_is_bounded_whatever_is_sent(reads: Vec<Vec<u8>>, smtp: bool) {
            let mut prelude = Prelude::new(if smtp { StartTls::Smtp } else { StartTls::Postgres });
            for read in reads.iter().filter(|read| read.len() <= 4096) {
                if prelude.next != Next::Read {
                    break;
                }
                prelude.handle(read);
                prop_assert!(prelude.received.len() <= STARTUP + 4096);
            }
        }
    }
}
