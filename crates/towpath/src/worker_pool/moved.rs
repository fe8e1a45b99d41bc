//! A connection on its way to another process, as text.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use towpath_mux::assembler::Progress;
use towpath_mux::framing::{Message, State};
use towpath_mux::io::Resume;
use towpath_mux::mux;

/// The state of a connection that is handed over. Its socket and the bytes of its incomplete message are passed separately.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct MovedConnection {
    listener: String,
    used: bool,
    copies: bool,
    need: usize,
    asked: usize,
    /// Length, bytes to strip at the front and at the end, mark and hash of the current message, if they are known.
    known: Option<(usize, usize, usize, u32, u32)>,
    /// State of the framing.
    messages: u64,
    scanned: usize,
    midstream: bool,
    pending: u64,
    cb: [u32; 5],
}

impl MovedConnection {
    /// As the detail of an item.
    pub(super) fn detail(&self) -> Value {
        serde_json::to_value(self).expect("numbers and text")
    }

    /// From the detail of an item.
    pub(super) fn parse(detail: Value) -> Option<Self> {
        serde_json::from_value(detail).ok()
    }
}

impl From<Resume> for MovedConnection {
    fn from(resume: Resume) -> Self {
        let Resume { core: mux::Resume { progress, used }, listener, copies } = resume;
        let Progress { state, known, need, asked } = progress;
        let State { messages, scanned, midstream, pending, cb } = state;
        let known = known.map(|Message { length, skip, trim, mark, hash }| (length, skip, trim, mark, hash));
        Self { listener, used, copies, need, asked, known, messages, scanned, midstream, pending, cb }
    }
}

impl From<MovedConnection> for Resume {
    fn from(moved: MovedConnection) -> Self {
        let MovedConnection {
            listener,
            used,
            copies,
            need,
            asked,
            known,
            messages,
            scanned,
            midstream,
            pending,
            cb,
        } = moved;
        let state = State { messages, scanned, midstream, pending, cb };
        let known = known.map(|(length, skip, trim, mark, hash)| Message { length, skip, trim, mark, hash });
        let progress = Progress { state, known, need, asked };
        Self { core: mux::Resume { progress, used }, listener, copies }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_the_same_after_its_way() {
        let state =
            State { messages: 1, scanned: 2, midstream: true, pending: u64::MAX, cb: [4, 5, 6, 7, 8] };
        let known = Some(Message { length: 9, skip: 1, trim: 2, mark: u32::MAX, hash: 3 });
        let progress = Progress { state, known, need: 10, asked: 4 };
        let core = mux::Resume { progress, used: true };
        let resume = Resume { core, listener: "127.0.0.1:7007".to_owned(), copies: true };
        for resume in [resume, Resume::default()] {
            let text = MovedConnection::from(resume.clone()).detail().to_string();
            let moved = MovedConnection::parse(serde_json::from_str(&text).unwrap()).unwrap();
            assert_eq!(Resume::from(moved), resume);
        }
        assert!(MovedConnection::parse(Value::Null).is_none());
    }
}
