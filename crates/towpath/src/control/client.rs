//! The client of the control socket.

use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;

use super::protocol::{ANSWER_MAX, Answer, Code, JSON, PCAPNG, Refusal, parse_answer, request};
use crate::exit;

/// Maximum time for an answer: twice the server's own limit.
const TIMEOUT: Duration = Duration::from_secs(10);

/// An engine, by the path of its control socket.
#[derive(Debug)]
pub struct Engine {
    socket: PathBuf,
}

/// A connection for one request.
#[derive(Debug)]
pub struct Connection {
    stream: UnixStream,
    socket: PathBuf,
    message: Vec<u8>,
}

/// A message of the engine.
#[derive(Debug)]
pub enum Message<'a> {
    /// One object.
    Answer(Answer),
    /// Blocks of a capture.
    Capture(&'a [u8]),
}

/// Why a subcommand failed, and the exit code.
#[derive(Debug)]
pub struct Failure {
    /// The exit code.
    pub code: u8,
    /// For people.
    pub message: String,
}

impl Failure {
    /// Creates a failure.
    pub fn new(code: u8, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

impl Engine {
    /// The engine at this control socket.
    pub fn at(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// The control socket.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Makes a request and returns the members of its only answer.
    ///
    /// # Errors
    ///
    /// Fails if there is no engine, if it refuses the request, or if it does not answer.
    pub fn ask(&self, name: &str, body: impl Serialize, answer: &str) -> Result<Value, Failure> {
        self.open(name, body)?.answer(answer)
    }

    /// Makes a request.
    ///
    /// # Errors
    ///
    /// Fails if there is no engine.
    pub fn open(&self, name: &str, body: impl Serialize) -> Result<Connection, Failure> {
        self.send(&request(name, body))
    }

    /// Sends a serialized request.
    ///
    /// # Errors
    ///
    /// Fails if there is no engine.
    pub fn send(&self, message: &[u8]) -> Result<Connection, Failure> {
        let socket = &self.socket;
        let unreachable = |error: io::Error| {
            let hint = match error.kind() {
                ErrorKind::NotFound => {
                    "; no engine is there: pass the `socket` of its [control], or its --control, with --socket"
                }
                ErrorKind::ConnectionRefused => "; its engine has ended",
                ErrorKind::PermissionDenied => {
                    "; only the engine's user and root may connect, and the `owner` and `group` of its [control]"
                }
                _ => "",
            };
            Failure::new(exit::NO_ENGINE, format!("cannot connect to {}: {error}{hint}", socket.display()))
        };
        let stream = UnixStream::connect(socket).map_err(unreachable)?;
        stream.set_read_timeout(Some(TIMEOUT)).map_err(unreachable)?;
        stream.set_write_timeout(Some(TIMEOUT)).map_err(unreachable)?;
        let mut connection = Connection { stream, socket: socket.clone(), message: Vec::new() };
        // A server that refuses the client answers and closes: read its answer even if the write fails.
        let _ = connection.stream.write_all(message);
        Ok(connection)
    }
}

impl Connection {
    /// Waits for further messages without a time limit.
    ///
    /// # Errors
    ///
    /// Fails if setsockopt(2) fails.
    pub fn wait_forever(&mut self) -> Result<(), Failure> {
        self.stream.set_read_timeout(None).map_err(|error| self.broken(&error))
    }

    /// Reads an answer of this name and returns its members.
    ///
    /// # Errors
    ///
    /// Fails if the engine refuses the request, answers something else, or does not answer.
    pub fn answer(&mut self, name: &str) -> Result<Value, Failure> {
        match self.message()? {
            Message::Answer(answer) if answer.name == name => Ok(answer.body),
            _ => Err(self.unexpected(&format!("something else than `{name}`"))),
        }
    }

    /// Reads a message.
    ///
    /// # Errors
    ///
    /// Fails if the engine refuses the request or does not answer.
    pub fn message(&mut self) -> Result<Message<'_>, Failure> {
        let mut length = [0; 4];
        self.stream.read_exact(&mut length).map_err(|error| self.broken(&error))?;
        let length = u32::from_le_bytes(length) as usize;
        if !(1..=ANSWER_MAX).contains(&length) {
            return Err(self.unexpected("a message of impossible length"));
        }
        self.message.resize(length, 0);
        let mut message = std::mem::take(&mut self.message);
        let read = self.stream.read_exact(&mut message);
        self.message = message;
        read.map_err(|error| self.broken(&error))?;
        match self.message[0] {
            PCAPNG => Ok(Message::Capture(&self.message[1..])),
            JSON => match parse_answer(&self.message[1..]) {
                Ok(Answer { name, body }) if name == "error" => Err(refused(body)),
                Ok(answer) => Ok(Message::Answer(answer)),
                Err(error) => Err(Failure::new(exit::FAILED, error)),
            },
            _ => Err(self.unexpected("a message of unknown kind")),
        }
    }

    fn broken(&self, error: &io::Error) -> Failure {
        let socket = self.socket.display();
        match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset => {
                Failure::new(exit::NO_ENGINE, format!("{socket}: the engine has ended"))
            }
            ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                let seconds = TIMEOUT.as_secs();
                Failure::new(exit::FAILED, format!("{socket}: the engine did not answer within {seconds} s"))
            }
            _ => Failure::new(exit::FAILED, format!("{socket}: {error}")),
        }
    }

    /// The failure for an answer that does not belong to the request.
    pub fn unexpected(&self, what: &str) -> Failure {
        let socket = self.socket.display();
        Failure::new(exit::FAILED, format!("{socket} answers {what}; is it the control socket of an engine?"))
    }
}

fn refused(body: Value) -> Failure {
    match serde_json::from_value(body) {
        Ok(Refusal { code: Code::NotPermitted | Code::Ended, message }) => {
            Failure::new(exit::NO_ENGINE, message)
        }
        Ok(Refusal { message, .. }) => Failure::new(exit::FAILED, message),
        Err(error) => {
            Failure::new(exit::FAILED, format!("an error that this program does not know: {error}"))
        }
    }
}
