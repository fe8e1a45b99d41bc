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
        let mut connection = self.connect()?;
        // A server that refuses the client answers and closes: read its answer even if the write fails.
        let _ = connection.stream.write_all(message);
        Ok(connection)
    }

    /// Connects without a request.
    ///
    /// # Errors
    ///
    /// Fails if there is no engine.
    pub fn connect(&self) -> Result<Connection, Failure> {
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
        Ok(Connection { stream, socket: socket.clone(), message: Vec::new() })
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

    /// A copy of the socket: shutdown(2) on it ends a call that waits.
    ///
    /// # Errors
    ///
    /// Fails without a free descriptor.
    pub fn socket(&self) -> Result<UnixStream, Failure> {
        self.stream.try_clone().map_err(|error| self.broken(&error))
    }

    /// Makes a request, after the last one was answered. Returns the members of its only answer, or why the engine refuses it.
    ///
    /// # Errors
    ///
    /// Fails if the engine does not answer, or answers something else. No further request is possible then.
    pub fn ask(
        &mut self,
        name: &str,
        body: impl Serialize,
        answer: &str,
    ) -> Result<Result<Value, Refusal>, Failure> {
        // As in `send`.
        let _ = self.stream.write_all(&request(name, body));
        match self.any_message()? {
            Message::Answer(Answer { name, body }) if name == answer => Ok(Ok(body)),
            Message::Answer(Answer { name, body }) if name == "error" => match serde_json::from_value(body) {
                Ok(refusal) => Ok(Err(refusal)),
                Err(error) => Err(unknown_error(&error)),
            },
            _ => Err(self.unexpected(&format!("something else than `{answer}`"))),
        }
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
        match self.any_message()? {
            Message::Answer(Answer { name, body }) if name == "error" => Err(refused(body)),
            message => Ok(message),
        }
    }

    fn any_message(&mut self) -> Result<Message<'_>, Failure> {
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
        Err(error) => unknown_error(&error),
    }
}

fn unknown_error(error: &serde_json::Error) -> Failure {
    Failure::new(exit::FAILED, format!("an error that this program does not know: {error}"))
}
