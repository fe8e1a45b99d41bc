//! A connection to an engine's control socket: a question, its answers, and what goes wrong on the way.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use towpath::control::protocol::{ANSWER_MAX, Answer, Code, JSON, PCAPNG, Request, emit, parse_answer};

use crate::args::exit;

/// How long the engine has for an answer, which it promises within half of that.
const PATIENCE: Duration = Duration::from_secs(10);

/// A connection to an engine.
pub(super) struct Connection {
    stream: UnixStream,
    socket: PathBuf,
    message: Vec<u8>,
}

pub(super) enum Message<'a> {
    Answer(Answer),
    Capture(&'a [u8]),
}

pub(super) struct Failure {
    pub(super) code: u8,
    pub(super) message: String,
}

impl Failure {
    pub(super) fn new(code: u8, message: String) -> Self {
        Self { code, message }
    }
}

impl Connection {
    pub(super) fn open(socket: &Path, request: Request) -> Result<Self, Failure> {
        let unreachable = |error: io::Error| {
            let hint = match error.kind() {
                ErrorKind::NotFound => {
                    "; no engine is there: is that the `socket` of its [control], or its --control?"
                }
                ErrorKind::ConnectionRefused => "; its engine has ended",
                ErrorKind::PermissionDenied => {
                    "; only the engine's user and root may, and whom `owner` and `group` of its [control] name"
                }
                _ => "",
            };
            Failure::new(exit::NO_ENGINE, format!("cannot connect to {}: {error}{hint}", socket.display()))
        };
        let stream = UnixStream::connect(socket).map_err(unreachable)?;
        stream.set_read_timeout(Some(PATIENCE)).map_err(unreachable)?;
        stream.set_write_timeout(Some(PATIENCE)).map_err(unreachable)?;
        let mut connection = Self { stream, socket: socket.into(), message: Vec::new() };
        // An engine that refuses us says why and closes: its answer is read all the same.
        let _ = connection.stream.write_all(&emit(&request));
        Ok(connection)
    }

    /// Whether to wait for messages however long they take.
    pub(super) fn is_patient(&mut self, patient: bool) -> Result<(), Failure> {
        let timeout = (!patient).then_some(PATIENCE);
        self.stream.set_read_timeout(timeout).map_err(|error| self.broken(&error))
    }

    pub(super) fn answer(&mut self) -> Result<Answer, Failure> {
        match self.message()? {
            Message::Answer(answer) => Ok(answer),
            Message::Capture(_) => Err(self.nonsense("with a capture that was not asked for")),
        }
    }

    pub(super) fn message(&mut self) -> Result<Message<'_>, Failure> {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).map_err(|error| self.broken(&error))?;
        let length = u32::from_le_bytes(length) as usize;
        if !(1..=ANSWER_MAX).contains(&length) {
            return Err(self.nonsense("with a message of impossible length"));
        }
        self.message.resize(length, 0);
        let mut message = std::mem::take(&mut self.message);
        let read = self.stream.read_exact(&mut message);
        self.message = message;
        read.map_err(|error| self.broken(&error))?;
        match self.message[0] {
            PCAPNG => Ok(Message::Capture(&self.message[1..])),
            JSON => match parse_answer(&self.message[1..]) {
                Ok(Answer::Error { code, message }) => Err(Failure::new(exit_code(code), message)),
                Ok(answer) => Ok(Message::Answer(answer)),
                Err(error) => Err(Failure::new(exit::FAILED, error)),
            },
            _ => Err(self.nonsense("with an unknown kind of message")),
        }
    }

    fn broken(&self, error: &io::Error) -> Failure {
        let socket = self.socket.display();
        match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
                Failure::new(exit::NO_ENGINE, format!("{socket}: the engine has ended"))
            }
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                let seconds = PATIENCE.as_secs();
                Failure::new(exit::FAILED, format!("{socket}: the engine did not answer within {seconds} s"))
            }
            _ => Failure::new(exit::FAILED, format!("{socket}: {error}")),
        }
    }

    pub(super) fn nonsense(&self, what: &str) -> Failure {
        let socket = self.socket.display();
        Failure::new(exit::FAILED, format!("{socket} answers {what}: is it an engine's control socket?"))
    }
}

fn exit_code(code: Code) -> u8 {
    match code {
        Code::NotPermitted | Code::Ended => exit::NO_ENGINE,
        Code::Version
        | Code::Request
        | Code::TooLong
        | Code::Busy
        | Code::NoChannel
        | Code::NoMux
        | Code::NotFound
        | Code::Invalid => exit::FAILED,
    }
}
