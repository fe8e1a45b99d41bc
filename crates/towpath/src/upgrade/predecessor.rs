//! The new process's side: the process that started it, and the objects that it was passed.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use bytes::{Bytes, BytesMut};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::net::{AddressFamily, SocketType, sockopt};
use rustix::process::getppid;
use serde_json::Value;

use super::channel::{Channel, Packet};
use super::message::Message;
use super::{HANDSHAKE, OBJECTS, VARIABLE, VERSION};

/// A listening socket, or another thing that exists once.
#[derive(Debug)]
pub struct Object {
    /// The kind of the object.
    pub kind: String,
    /// Its name in the command line or the configuration.
    pub name: String,
    /// The data with which the service continues it.
    pub detail: Value,
    /// Its descriptor.
    pub fd: OwnedFd,
}

/// The process that started this one to be replaced by it.
#[derive(Debug)]
pub struct Predecessor {
    id: u32,
    channel: Channel,
    objects: Vec<Object>,
    /// The item whose bytes have not all arrived.
    partial: Option<Partial>,
}

#[derive(Debug)]
struct Partial {
    item: Item,
    bytes: BytesMut,
    length: usize,
}

/// A connection, or another thing of which there are many.
#[derive(Debug)]
pub struct Item {
    /// The data with which the service continues it.
    pub detail: Value,
    /// Its descriptor.
    pub fd: OwnedFd,
    /// Its bytes.
    pub bytes: Bytes,
}

/// A message of the old process after Go.
#[derive(Debug)]
pub enum Received {
    /// An item.
    Item(Item),
    /// Nothing yet.
    Nothing,
    /// There is no free descriptor.
    Full,
    /// This process may serve.
    Go,
    /// Everything was handed over. The files of the listeners belong to this process.
    Done,
    /// The old process ends, as it was told to. This one ends too.
    Ending,
}

impl Predecessor {
    /// The process that started this one for an upgrade, and its objects. `None` if this process was started otherwise. Standard input
    /// is /dev/null afterwards.
    ///
    /// # Errors
    /// Fails if the old process has another version, is another service, or does not say what it hands over within [`HANDSHAKE`]. It
    /// has been told.
    pub fn of_this_process(service: &str) -> io::Result<Option<Self>> {
        let Some(parent) = parent() else { return Ok(None) };
        let channel = Channel::new(fcntl_dupfd_cloexec(rustix::stdio::stdin(), 3)?)?;
        rustix::stdio::dup2_stdin(File::open("/dev/null")?)?;
        let mut this = Self { id: parent, channel, objects: Vec::new(), partial: None };
        match this.greet(service) {
            Ok(()) => Ok(Some(this)),
            Err(error) => {
                this.refuse(&error.to_string());
                Err(error)
            }
        }
    }

    /// The process `id`, which started this one, at the other end of a channel for a part of this program.
    ///
    /// # Errors
    /// Fails if the descriptor is closed.
    pub fn part(id: u32, socket: OwnedFd) -> io::Result<Self> {
        Ok(Self { id, channel: Channel::new(socket)?, objects: Vec::new(), partial: None })
    }

    fn greet(&mut self, service: &str) -> io::Result<()> {
        let invalid = |text: String| Err(io::Error::new(io::ErrorKind::InvalidData, text));
        let count = match self.channel.wait(HANDSHAKE)?.0 {
            Message::Hello { version, program, .. } if version != VERSION => {
                return invalid(format!(
                    "towpath {program} hands over by version {version} of the protocol, this one takes over by version {VERSION}"
                ));
            }
            Message::Hello { service: theirs, .. } if theirs != service => {
                return invalid(format!("a {theirs} cannot be replaced by a {service}"));
            }
            Message::Hello { objects, .. } if objects > OBJECTS => {
                return invalid(format!("{objects} objects are more than {OBJECTS}"));
            }
            Message::Hello { objects, .. } => objects,
            _ => return invalid("the first message is not a greeting".to_owned()),
        };
        for _ in 0..count {
            match self.channel.wait(HANDSHAKE)? {
                (Message::Object { kind, name, detail }, Some(fd)) => {
                    self.objects.push(Object { kind, name, detail, fd });
                }
                _ => return invalid("an object is missing".to_owned()),
            }
        }
        Ok(())
    }

    /// Its process id.
    pub const fn id(&self) -> u32 {
        self.id
    }

    /// Takes the first object of this kind and name.
    pub fn take(&mut self, kind: &str, name: &str) -> Option<Object> {
        let at = self.objects.iter().position(|object| object.kind == kind && object.name == name)?;
        Some(self.objects.remove(at))
    }

    /// Tells the old process that this one cannot serve.
    pub fn refuse(&self, reason: &str) {
        refuse(&self.channel, reason);
    }

    /// A function that [refuses](Self::refuse), for a part of the program that does not have the predecessor.
    ///
    /// # Errors
    /// Fails if there are no free descriptors.
    pub fn refusal(&self) -> io::Result<impl FnOnce(&str) + use<>> {
        let channel = self.channel.try_clone()?;
        Ok(move |reason: &str| refuse(&channel, reason))
    }

    /// Tells the old process that this one can serve, and waits until it does so. Objects that were not taken are closed: nothing
    /// listens there any more.
    ///
    /// # Errors
    /// The old process continues: it has ended the upgrade, or ends itself.
    pub fn begin(&mut self) -> io::Result<()> {
        self.channel.send(&Message::Ready, None)?;
        match self.channel.wait(HANDSHAKE)?.0 {
            Message::Go => {
                self.objects.clear();
                Ok(())
            }
            _ => Err(io::ErrorKind::InvalidData.into()),
        }
    }

    /// Tells the old process that this one can serve. Items follow, and then Go.
    ///
    /// # Errors
    /// The old process has ended the upgrade, or ends itself.
    pub fn ready(&self) -> io::Result<()> {
        self.channel.send(&Message::Ready, None)
    }

    /// Tells the old process that this one serves.
    ///
    /// # Errors
    /// The old process has ended the upgrade, or ends itself.
    pub fn serves(&self) -> io::Result<()> {
        self.channel.send(&Message::Serving, None)
    }

    /// Tells the old process that this one ends.
    pub fn end(&self) {
        let _ = self.channel.send(&Message::Ending, None);
    }

    /// Receives the next item.
    ///
    /// # Errors
    /// Fails if the old process has ended before everything was handed over, or has sent something that is not valid.
    pub fn receive(&mut self) -> io::Result<Received> {
        let invalid = || Err(io::ErrorKind::InvalidData.into());
        // Without a free descriptor, the one in the message would be lost.
        if fcntl_dupfd_cloexec(&self.channel, 0).is_err() {
            return Ok(Received::Full);
        }
        loop {
            let packet = match self.channel.receive() {
                Ok(Some(packet)) => packet,
                Ok(None) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(Received::Nothing),
                Err(error) => return Err(error),
            };
            match (packet, &mut self.partial) {
                (Packet::Bytes(part), Some(partial))
                    if part.len() <= partial.length - partial.bytes.len() =>
                {
                    partial.bytes.extend_from_slice(&part);
                }
                (Packet::Message(Message::Item { detail, bytes: length }, Some(fd)), None) => {
                    let item = Item { detail, fd, bytes: Bytes::new() };
                    self.partial = Some(Partial { item, bytes: BytesMut::new(), length });
                }
                (Packet::Message(Message::Go, None), None) => return Ok(Received::Go),
                (Packet::Message(Message::Done, _), None) => return Ok(Received::Done),
                (Packet::Message(Message::Ending, _), None) => return Ok(Received::Ending),
                _ => return invalid(),
            }
            if let Some(Partial { item, bytes, .. }) =
                self.partial.take_if(|partial| partial.bytes.len() == partial.length)
            {
                return Ok(Received::Item(Item { bytes: bytes.freeze(), ..item }));
            }
        }
    }
}

fn refuse(channel: &Channel, reason: &str) {
    let reason = reason.chars().take(1000).collect();
    // It may have ended.
    let _ = channel.send(&Message::Refused { reason }, None);
}

/// The parent, if the variable names it and standard input is its channel: a program that this process starts inherits the variable.
fn parent() -> Option<u32> {
    let named: u32 = std::env::var(VARIABLE).ok()?.parse().ok()?;
    let parent = getppid().map(|parent| parent.as_raw_nonzero().get().cast_unsigned());
    let input = rustix::stdio::stdin();
    let is_channel = sockopt::socket_domain(input) == Ok(AddressFamily::UNIX)
        && sockopt::socket_type(input) == Ok(SocketType::SEQPACKET);
    parent.filter(|parent| *parent == named && is_channel)
}

/// Readable when there is an item, or the channel was closed.
impl AsFd for Predecessor {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;
    use towpath_port::netns::until;

    use super::*;

    fn predecessor() -> (Channel, Predecessor) {
        let (channel, other) = Channel::pair().unwrap();
        let channel_of = Channel::new(other).unwrap();
        (channel, Predecessor { id: 1, channel: channel_of, objects: Vec::new(), partial: None })
    }

    fn hello(version: u32, service: &str, objects: usize) -> Message {
        Message::Hello { version, program: "0.1.0".to_owned(), service: service.to_owned(), objects }
    }

    #[test]
    fn greetings_that_cannot_be_answered_are_refused() {
        let object = Message::Object { kind: String::new(), name: String::new(), detail: json!(null) };
        let rows: [(&[Message], &str); 5] = [
            (&[hello(VERSION + 1, "mux", 0)], "this one takes over by version 3"),
            (&[hello(VERSION, "run", 0)], "a run cannot be replaced by a mux"),
            (&[hello(VERSION, "mux", OBJECTS + 1)], "1025 objects are more than 1024"),
            (&[Message::Done], "the first message is not a greeting"),
            // Without its descriptor.
            (&[hello(VERSION, "mux", 1), object], "an object is missing"),
        ];
        for (messages, expected) in rows {
            let (channel, mut predecessor) = predecessor();
            messages.iter().for_each(|message| channel.send(message, None).unwrap());
            let error = predecessor.greet("mux").unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn items_arrive_whole_or_not_at_all() {
        let (channel, mut predecessor) = predecessor();
        let item = |bytes| Message::Item { detail: json!(bytes), bytes };
        channel.send(&item(0), Some(channel.as_fd())).unwrap();
        channel.send(&item(40_000), Some(channel.as_fd())).unwrap();
        let sent = channel.send_bytes(&[7; 40_000]).unwrap();
        let Received::Item(Item { bytes, .. }) = predecessor.receive().unwrap() else { panic!("no item") };
        assert!(bytes.is_empty());
        assert!(matches!(predecessor.receive().unwrap(), Received::Nothing));
        channel.send_bytes(&vec![7; 40_000 - sent]).unwrap();
        let Received::Item(Item { bytes, detail, .. }) = predecessor.receive().unwrap() else {
            panic!("no item")
        };
        assert_eq!((bytes, detail), (Bytes::from_static(&[7; 40_000]), json!(40_000)));
        channel.send(&Message::Done, None).unwrap();
        assert!(matches!(predecessor.receive().unwrap(), Received::Done));
        drop(channel);
        // A child that another test has forked holds a copy of it until it calls execve(2).
        let mut end = None;
        until(|| {
            end = predecessor.receive().err();
            end.is_some()
        });
        assert_eq!(end.unwrap().kind(), io::ErrorKind::UnexpectedEof);
    }

    #[test]
    fn items_that_are_not_valid_are_refused() {
        type Send = fn(&Channel) -> io::Result<()>;
        let item = |channel: &Channel, bytes| {
            channel.send(&Message::Item { detail: json!(null), bytes }, Some(channel.as_fd()))
        };
        let rows: [Send; 6] = [
            |channel| channel.send_bytes(b"without an item").map(drop),
            |channel| channel.send(&Message::Item { detail: json!(null), bytes: 0 }, None),
            |channel| channel.send(&Message::Ready, None),
            |channel| channel.send_bytes(b"more").map(drop),
            |channel| channel.send(&Message::Done, None),
            |channel| channel.send(&Message::Item { detail: json!(null), bytes: 0 }, Some(channel.as_fd())),
        ];
        for (at, send) in rows.into_iter().enumerate() {
            let (channel, mut predecessor) = predecessor();
            if at > 2 {
                item(&channel, 3).unwrap();
            }
            send(&channel).unwrap();
            assert_eq!(predecessor.receive().unwrap_err().kind(), io::ErrorKind::InvalidData, "row {at}");
        }
    }
}
