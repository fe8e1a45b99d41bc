//! journald's native protocol (<https://systemd.io/JOURNAL_NATIVE_PROTOCOL>): one datagram with the fields of an entry.
//!
//! The crate tracing-journald sends on the thread that logs, and sendto(2) blocks while journald does not read. Here the log's writer
//! thread sends, which may block.

use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::AsFd;
use std::os::unix::net::UnixDatagram;
use std::path::PathBuf;

use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::io::Errno;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, sendmsg_addr};
use serde_json::Value;
use tracing::Level;

use super::line::Line;

/// The socket of journald.
const SOCKET: &str = "/run/systemd/journal/socket";

/// Before the names of a line's fields: `TOWPATH_PEER`.
const PREFIX: &str = "TOWPATH_";

/// Sends lines to journald. Opened with the first line.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    socket: Option<UnixDatagram>,
}

impl Journal {
    pub(super) fn new() -> Self {
        Self::at(SOCKET.into())
    }

    pub(super) fn at(path: PathBuf) -> Self {
        Self { path, socket: None }
    }

    /// Sends a line. Blocks while journald does not read.
    ///
    /// # Errors
    ///
    /// There is no journald.
    pub(super) fn send(&mut self, line: &Line) -> io::Result<()> {
        let socket = match &mut self.socket {
            Some(socket) => socket,
            none => none.insert(UnixDatagram::unbound()?),
        };
        let entry = entry(line);
        // By path each time, as sd_journal_send(3) does: journald may have been started again.
        match socket.send_to(&entry, &self.path) {
            Ok(_) => Ok(()),
            // The datagram is larger than the send buffer: the entry travels in a sealed memfd.
            Err(error) if error.raw_os_error() == Some(Errno::MSGSIZE.raw_os_error()) => {
                send_in_memfd(socket, &self.path, &entry)
            }
            Err(error) => Err(error),
        }
    }
}

fn send_in_memfd(socket: &UnixDatagram, path: &PathBuf, entry: &[u8]) -> io::Result<()> {
    let memfd = memfd_create("towpath-log", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut rest = entry;
    while !rest.is_empty() {
        rest = &rest[rustix::io::write(&memfd, rest)?..];
    }
    fcntl_add_seals(&memfd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE | SealFlags::SEAL)?;
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [memfd.as_fd()];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    let address = SocketAddrUnix::new(path)?;
    sendmsg_addr(socket, &address, &[IoSlice::new(&[])], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// The datagram of a line.
fn entry(line: &Line) -> Vec<u8> {
    let mut entry = Vec::with_capacity(line.message.len() + 128);
    put(&mut entry, "PRIORITY", priority(line.level));
    put(&mut entry, "SYSLOG_IDENTIFIER", "towpath");
    put(&mut entry, "TOWPATH_TARGET", &line.target);
    for (name, value) in &line.fields {
        let name: String = name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        let name = format!("{PREFIX}{}", name.to_ascii_uppercase());
        match value {
            Value::String(text) => put(&mut entry, &name, text),
            other => put(&mut entry, &name, &other.to_string()),
        }
    }
    put(&mut entry, "MESSAGE", &line.message);
    entry
}

/// Appends a field: `NAME=VALUE`, or with a length if the value has a newline.
fn put(entry: &mut Vec<u8>, name: &str, value: &str) {
    entry.extend(name.as_bytes());
    if value.contains('\n') {
        entry.push(b'\n');
        entry.extend((value.len() as u64).to_le_bytes());
    } else {
        entry.push(b'=');
    }
    entry.extend(value.as_bytes());
    entry.push(b'\n');
}

/// The priority of syslog(3).
fn priority(level: Level) -> &'static str {
    match level {
        Level::ERROR => "3",
        Level::WARN => "4",
        Level::INFO => "6",
        Level::DEBUG | Level::TRACE => "7",
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek};

    use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
    use serde_json::json;

    use super::super::line::Head;
    use super::*;

    fn line(message: &str) -> Line {
        let mut line = Line::new(Level::WARN, Head::Level, message.to_owned());
        line.fields = vec![("peer".into(), json!(7)), ("src-port".into(), json!("x\ny"))];
        line
    }

    #[test]
    fn fields_have_priorities_and_values_with_newlines_have_lengths() {
        let mut expected =
            b"PRIORITY=4\nSYSLOG_IDENTIFIER=towpath\nTOWPATH_TARGET=towpath\nTOWPATH_PEER=7\n".to_vec();
        expected.extend(b"TOWPATH_SRC_PORT\n\x03\0\0\0\0\0\0\0x\ny\nMESSAGE=refused\n");
        assert_eq!(entry(&line("refused")), expected);
    }

    #[test]
    fn entries_arrive_and_long_ones_in_a_sealed_memfd() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("journal");
        let mut journal = Journal::at(path.clone());
        assert!(journal.send(&line("unread")).is_err());
        let reader = UnixDatagram::bind(&path).unwrap();
        journal.send(&line("short")).unwrap();
        let mut bytes = [0; 1024];
        let length = reader.recv(&mut bytes).unwrap();
        assert_eq!(bytes[..length], entry(&line("short")));

        let long = line(&"x".repeat(1 << 20));
        journal.send(&long).unwrap();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = recvmsg(&reader, &mut [], &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
        assert_eq!(received.bytes, 0);
        let passed = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut descriptors) => descriptors.next(),
            _ => None,
        });
        let passed = passed.unwrap();
        // journald refuses a memfd without this seal.
        assert!(rustix::fs::fcntl_get_seals(&passed).unwrap().contains(SealFlags::WRITE));
        let mut file = std::fs::File::from(passed);
        file.rewind().unwrap();
        let mut content = Vec::new();
        file.read_to_end(&mut content).unwrap();
        assert_eq!(content, entry(&long));
    }
}
