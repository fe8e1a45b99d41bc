//! `towpath ctl show frames`

use clap::Args;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use towpath_engine::FrameSnapshot;

use super::super::client::{Engine, Failure};
use super::super::command::{Access, Context, Handled, Progress, Query, Reply, Stream, name};
use super::super::protocol::{Code, Refusal, answer};
use super::super::text::{age, cell, items, table};

/// Frames of one answer.
const FRAMES: usize = 2048;

/// The frames of a channel that are not free
///
/// The states are those of memory-mapped netlink. VALID: the inspector has the frame. SKIP: the inspector holds the frame and
/// decides later ones first. COPY: the payload has its own memory. OVERDUE: the engine has decided the packet, and the
/// inspector has not returned the memory.
#[derive(Debug, Args, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShowFrames {
    /// The channel's number, from `show rings`
    channel: u32,
}

impl Query for ShowFrames {
    const WORDS: &'static str = "show frames";
    const ANSWER: &'static str = "frames";
    const ACCESS: Access = Access::Packets;

    fn handle(self, context: &Context<'_>) -> Handled {
        let channel = self.channel;
        context.query(
            move |target| target.engine()?.frames(channel),
            move |parts: Vec<Option<Vec<FrameSnapshot>>>| {
                if parts.iter().all(Option::is_none) {
                    return Err(no_channel(channel));
                }
                let frames = parts.into_iter().flatten().flatten().map(Frame::from).collect();
                Ok(Reply::Stream(Box::new(Listing { channel, frames, next: 0 })))
            },
        )
    }

    fn ask(&self, engine: &Engine) -> Result<Value, Failure> {
        let mut connection = engine.open(&name(Self::WORDS), self)?;
        let mut frames = Vec::new();
        loop {
            let mut answer = connection.answer(Self::ANSWER)?;
            if let Value::Array(part) = answer["frames"].take() {
                frames.extend(part);
            }
            if answer["more"] != true {
                return Ok(json!({ "channel": self.channel, "frames": frames }));
            }
        }
    }

    fn text(&self, answer: &Value) -> String {
        let frames = items(&answer["frames"]);
        if frames.is_empty() {
            return format!("channel {}: all frames are free\n", self.channel);
        }
        let header = ["seq", "state", "length", "kind", "age", "first", "frames"];
        let mut rows = vec![header.map(str::to_owned).to_vec()];
        rows.extend(frames.iter().map(|frame| {
            let kind = if frame["kind"] == "packet" { "packet" } else { "-" };
            vec![
                cell(&frame["seq"]),
                cell(&frame["state"]),
                cell(&frame["len"]),
                kind.to_owned(),
                age(&frame["age"]),
                cell(&frame["first"]),
                cell(&frame["frames"]),
            ]
        }));
        table(&rows)
    }
}

/// The refusal for a channel that does not exist.
pub(super) fn no_channel(channel: u32) -> Refusal {
    let message = format!(
        "there is no channel {channel}, or it has ended; `towpath ctl show rings` lists the channels"
    );
    Refusal::new(Code::NoChannel, message)
}

/// A message in a ring: frames that are not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct Frame {
    /// Its sequence number.
    seq: u32,
    /// Index of its first frame.
    first: u32,
    /// Number of frames.
    frames: u32,
    state: State,
    /// Bytes of its payload. `None` if no packet waits for it.
    len: Option<u32>,
    kind: Kind,
    /// Nanoseconds since it was published. `None` if no packet waits for it.
    age: Option<u64>,
}

/// The state of a frame, in the words of memory-mapped netlink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
enum State {
    Valid,
    Skip,
    Copy,
    Overdue,
}

/// The content of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    /// A packet that waits for its verdict, or a copy.
    Packet,
    /// A loss record, or a packet that was decided without the inspector.
    Other,
}

impl From<FrameSnapshot> for Frame {
    fn from(FrameSnapshot { out, len, age, oneshot }: FrameSnapshot) -> Self {
        Self {
            seq: out.seq.0,
            first: out.first,
            frames: out.frames,
            state: match (out.overdue, out.held) {
                (true, _) => State::Overdue,
                (false, true) => State::Skip,
                (false, false) if oneshot => State::Copy,
                (false, false) => State::Valid,
            },
            len,
            kind: if len.is_some() { Kind::Packet } else { Kind::Other },
            age,
        }
    }
}

/// Several answers, of which all but the last have `more`.
#[derive(Debug)]
struct Listing {
    channel: u32,
    frames: Vec<Frame>,
    next: usize,
}

impl Stream for Listing {
    fn produce(&mut self, output: &mut Vec<u8>) -> Progress {
        let Self { channel, frames, next } = self;
        let end = frames.len().min(*next + FRAMES);
        let more = end < frames.len();
        let body = json!({ "channel": channel, "frames": frames[*next..end], "more": more });
        output.extend(answer(ShowFrames::ANSWER, body));
        *next = end;
        if more { Progress::More } else { Progress::Done }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::session::{PENDING, Session, tests as session};
    use super::*;

    fn frame(seq: u32) -> Frame {
        Frame {
            seq,
            first: seq,
            frames: 1,
            state: State::Valid,
            len: Some(60),
            kind: Kind::Packet,
            age: Some(5),
        }
    }

    #[test]
    fn many_frames_are_several_answers() {
        let mut client = Session::new(0);
        session::ask(&mut client, "show-frames", json!({ "channel": 2 }));
        let frames: Vec<_> = (0..5000).map(frame).collect();
        let listing = Listing { channel: 2, frames: frames.clone(), next: 0 };
        client.handle_reply(Reply::Stream(Box::new(listing)), 0);
        assert!(client.poll_output().len() < 2 * PENDING);
        let (answers, _) = session::take(&mut client);
        let mut got: Vec<Value> = Vec::new();
        for (index, answer) in answers.iter().enumerate() {
            assert_eq!(answer.body["channel"], 2);
            assert_eq!(answer.body["more"], index + 1 < answers.len());
            got.extend(items(&answer.body["frames"]).iter().cloned());
        }
        assert_eq!(json!(got), json!(frames));
    }

    #[test]
    fn frames_have_the_states_of_memory_mapped_netlink() {
        let skip =
            Frame { first: 40, frames: 2, state: State::Skip, len: Some(1500), age: Some(9_999), ..frame(7) };
        let overdue = Frame { state: State::Overdue, len: None, kind: Kind::Other, age: None, ..skip };
        let text = |frames: &[Frame]| ShowFrames { channel: 3 }.text(&json!({ "frames": frames }));
        assert_eq!(
            text(&[skip, overdue]),
            "seq    state  length    kind     age  first  frames\n  \
               7     SKIP    1500  packet  9999ns     40  2\n  \
               7  OVERDUE       -       -       -     40  2\n"
        );
        assert_eq!(text(&[]), "channel 3: all frames are free\n");
    }
}
