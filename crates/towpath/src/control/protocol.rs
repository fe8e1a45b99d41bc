//! Requests and answers on the control socket. `docs/book/src/reference/ctl.md` is the same for readers without Rust.
//!
//! Every message is a little-endian `u32`, the number of bytes that follow it, one byte for what they are, and the
//! bytes: [`JSON`] an object, [`PCAPNG`] blocks of a capture.

use serde::{Deserialize, Serialize};

use super::records;
use crate::report;

/// The protocol's version: the number of `"towpath"` in every object.
pub const VERSION: u16 = 1;

/// Bytes of the longest request, length field excluded.
pub const REQUEST_MAX: usize = 4096;

/// Bytes of the longest answer, length field excluded.
pub const ANSWER_MAX: usize = 1 << 20;

/// The rest of the message is one JSON object.
pub const JSON: u8 = 1;

/// The rest of the message is whole pcapng blocks.
pub const PCAPNG: u8 = 2;

/// What a client can ask for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "kebab-case", deny_unknown_fields)]
pub enum Request {
    /// Every channel, with its ring.
    ShowRings,
    /// The multiplexor.
    ShowMux,
    /// Sends without a copy.
    ShowSend,
    /// The frames of one channel that are not free.
    ShowFrames {
        /// The channel's number.
        channel: u32,
    },
    /// What one channel gets from now on, as a capture.
    Trace {
        /// The channel's number.
        channel: u32,
        /// End after so many packets.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        count: Option<u64>,
    },
    /// What becomes of packets from now on, as a capture: of those that a rule decides, of those of a flow.
    Follow {
        /// The rule's number.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rule: Option<u32>,
        /// The flow, in the words of [`FlowFilter::new`](super::FlowFilter::new).
        #[serde(default, skip_serializing_if = "Option::is_none")]
        flow: Option<String>,
        /// End after so many packets.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        count: Option<u64>,
    },
    /// The rules with their counters.
    ShowRules {
        /// Index of the first one: what the last answer said is next.
        #[serde(default)]
        from: u64,
    },
    /// The dynamic states.
    ShowStates {
        /// Where to go on: what the last answer said is next; 0 is the beginning.
        #[serde(default)]
        from: u64,
        /// With what `ipfw -v` adds.
        #[serde(default)]
        verbose: bool,
    },
    /// The states that most goes through.
    ShowTop {
        /// How many at most; 100 are shown at most.
        #[serde(default)]
        count: u64,
        /// By bytes; by packets otherwise.
        #[serde(default)]
        bytes: bool,
    },
    /// What happens to states from now on, as it happens.
    Events,
    /// The tables.
    ShowTables,
    /// The entries of one table.
    ShowTable {
        /// Its name.
        name: String,
        /// Index of the first one.
        #[serde(default)]
        from: u64,
    },
    /// The entry that a table has for a key.
    Lookup {
        /// The table's name.
        name: String,
        /// The key, as a rule file writes it; of addresses the longest prefix that has it counts.
        key: String,
    },
    /// The pipes.
    ShowPipes,
    /// Every setting.
    ShowSettings,
    /// The queues with their counters.
    ShowQueues,
    /// The ports with their counters.
    ShowPorts,
    /// What became of the packets.
    ShowStats,
    /// Changes rules, tables, pipes or sets: commands of a rule file, one a line; all of them or none.
    Command {
        /// The commands.
        text: String,
        /// Only to be looked at: the answer is what they would change.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        check: bool,
    },
    /// Changes a setting.
    Set {
        /// Its name, with or without `net.inet.ip.fw.`.
        name: String,
        /// Switches are 0 and 1.
        value: u64,
    },
}

impl Request {
    /// Whether it changes anything.
    pub fn changes(&self) -> bool {
        matches!(self, Self::Command { .. } | Self::Set { .. })
    }

    /// Whether it shows what is in somebody's packets, or the memory of a channel to an inspector.
    pub fn looks_into_packets(&self) -> bool {
        matches!(self, Self::ShowFrames { .. } | Self::Trace { .. } | Self::Follow { .. })
    }
}

/// What the engine says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "answer", rename_all = "kebab-case")]
pub enum Answer {
    /// To [`Request::ShowRings`].
    Rings {
        /// By channel.
        rings: Vec<Ring>,
    },
    /// To [`Request::ShowMux`].
    Mux {
        /// As it stands.
        mux: Box<super::mux::Mux>,
    },
    /// To [`Request::ShowSend`].
    Send {
        /// As it stands.
        send: Box<super::send::Send>,
    },
    /// To [`Request::ShowFrames`]; several of them when there are many frames.
    Frames {
        /// The channel's number.
        channel: u32,
        /// In the order of the ring.
        frames: Vec<Frame>,
        /// Another one follows.
        more: bool,
    },
    /// To [`Request::Trace`] and [`Request::Follow`] (channel 0): the capture follows, in messages of [`PCAPNG`].
    Tracing {
        /// The channel's number.
        channel: u32,
    },
    /// The end of a trace.
    Traced {
        /// Packets that were sent.
        packets: u64,
        /// Packets that could not be: this client read too slowly, or too many were undecided.
        dropped: u64,
        /// Why it ended.
        why: End,
    },
    /// To [`Request::ShowRules`].
    Rules {
        /// In order, the default rule last.
        rules: Vec<report::Rule>,
        /// Where to go on; none at the end.
        next: Option<u64>,
        /// Another number when rules or tables have changed: then the pages before are of others.
        #[serde(default)]
        version: u64,
    },
    /// To [`Request::ShowStates`].
    States {
        /// In no order that means anything.
        states: Vec<records::State>,
        /// Where to go on; none at the end.
        next: Option<u64>,
    },
    /// To [`Request::ShowTop`].
    Top {
        /// The first with the most.
        states: Vec<records::State>,
    },
    /// To [`Request::Events`]: they follow.
    Watching {},
    /// Some of them.
    Events {
        /// In the order of their times.
        events: Vec<records::Event>,
        /// Events that found no room since the beginning, or that this client was too slow for.
        lost: u64,
    },
    /// To [`Request::ShowTables`].
    Tables {
        /// By name.
        tables: Vec<records::Table>,
    },
    /// To [`Request::ShowTable`].
    Table {
        /// Its name.
        name: String,
        /// Keys and values as ipfw prints them.
        entries: Vec<(String, String)>,
        /// Where to go on; none at the end.
        next: Option<u64>,
        /// As that of the rules.
        #[serde(default)]
        version: u64,
    },
    /// To [`Request::Lookup`].
    Entry {
        /// The entry's key, as ipfw prints it.
        key: String,
        /// Its value.
        value: String,
    },
    /// To [`Request::ShowPipes`].
    Pipes {
        /// By number.
        pipes: Vec<records::Pipe>,
    },
    /// To [`Request::ShowSettings`].
    Settings {
        /// Names and values.
        settings: Vec<(String, u64)>,
    },
    /// To [`Request::ShowQueues`].
    Queues {
        /// By number.
        queues: Vec<records::Queue>,
    },
    /// To [`Request::ShowPorts`].
    Ports {
        /// In the order of the configuration.
        ports: Vec<records::Port>,
    },
    /// To [`Request::ShowStats`].
    Stats {
        /// The counters.
        stats: Box<records::Stats>,
    },
    /// To [`Request::Command`].
    Done {
        /// What changed, or would.
        changes: records::Changes,
    },
    /// To [`Request::Set`].
    Set {
        /// The setting's short name.
        name: String,
        /// What it was.
        before: u64,
        /// What it is.
        value: u64,
    },
    /// The request is not granted.
    Error {
        /// For programs.
        code: Code,
        /// For people.
        message: String,
    },
}

/// Why a trace ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum End {
    /// As many packets as were asked for.
    Count,
    /// The engine is done, or the inspector is gone.
    Channel,
}

/// Why a request is not granted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// Another version of the protocol; the message names both.
    Version,
    /// No request.
    Request,
    /// Longer than [`REQUEST_MAX`].
    TooLong,
    /// Neither the engine's user nor root.
    NotPermitted,
    /// Too many clients, or the engine does not answer.
    Busy,
    /// There is no such channel.
    NoChannel,
    /// This engine has no multiplexor.
    NoMux,
    /// There is no such table or no such entry, or this engine has nothing of that kind.
    NotFound,
    /// The commands or the setting have errors; the message has a line for each.
    Invalid,
    /// The engine has ended.
    Ended,
}

/// A channel and its ring towards the inspector.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ring {
    /// The channel's number, from 1.
    pub channel: u32,
    /// The queue that it serves.
    pub queue: u16,
    /// What the inspector calls itself.
    pub name: String,
    /// Its process.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// How it ended, if it has.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub gone: Option<String>,
    /// Which inspector of the queue gets a frame.
    pub fanout: String,
    /// What becomes of a frame that finds no room.
    pub overload: String,
    /// Bytes of a block.
    pub block_size: u32,
    /// Blocks.
    pub block_nr: u32,
    /// Bytes of a frame.
    pub frame_size: u32,
    /// Frames.
    pub frame_nr: u32,
    /// Messages that are out and undecided.
    pub depth: u32,
    /// Frames that are not free, also those whose decision did not wait for the inspector.
    pub used: u32,
    /// Most messages that were out at a time.
    pub high_water: u32,
    /// Nanoseconds since the oldest undecided message was published; none when there is none.
    pub oldest: Option<u64>,
    /// Messages held: later ones go on.
    pub held: u32,
    /// Messages published, gap records included.
    pub published: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What the inspector decided.
    pub verdicts: Verdicts,
    /// Messages decided without it, by reason.
    pub defaults: Defaults,
    /// Messages that it did not get, by reason.
    pub lost: Lost,
    /// Times that a message found no room.
    pub full: u64,
    /// Verdicts that came too late.
    pub late: u64,
    /// Words without meaning.
    pub violations: u64,
    /// Doorbells rung.
    pub wakeups: u64,
    /// Messages that travelled in a memory of their own.
    pub oneshots: u64,
    /// Gap records published.
    pub gaps: u64,
    /// Whether the payload is in huge pages.
    pub huge_pages: bool,
    /// Traces that are under way.
    pub traces: u32,
}

/// An inspector's decisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verdicts {
    /// All of them.
    pub decided: u64,
    /// Of these, by a cumulative verdict.
    pub cumulative: u64,
    /// Passes, also to another queue and back to the rules.
    pub pass: u64,
    /// Drops.
    pub drop: u64,
    /// Rejects.
    pub reject: u64,
    /// Replaced payloads.
    pub replace: u64,
    /// Of these, for the flow from then on.
    pub flow: u64,
}

/// Messages decided without their inspector.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Defaults {
    /// It let the deadline pass.
    pub overdue: u64,
    /// Its answer had no meaning.
    pub garbage: u64,
    /// It was gone.
    pub drained: u64,
}

/// Messages that an inspector did not get; the names are those of gap records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// No room.
    pub no_room: u64,
    /// Gave way to a newer one.
    pub oldest: u64,
    /// Dropped by policy.
    pub dropped: u64,
    /// Passed by policy.
    pub passed: u64,
    /// Handed to another queue.
    pub handed_on: u64,
    /// Larger than what may be sent.
    pub too_large: u64,
    /// Others.
    pub other: u64,
}

/// A message that is out: frames that are not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Frame {
    /// Its number.
    pub seq: u32,
    /// Index of its first frame.
    pub first: u32,
    /// How many frames it takes.
    pub frames: u32,
    /// Where it is on its way.
    pub state: State,
    /// Bytes of its payload; none when nobody waits for it any more.
    pub len: Option<u32>,
    /// What it is: a packet, or a gap record.
    pub kind: Kind,
    /// Nanoseconds since it was published; none when nobody waits for it any more.
    pub age: Option<u64>,
}

/// The state of a frame, in memory-mapped netlink's words.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum State {
    /// Complete, and the inspector's.
    Valid,
    /// Held: later ones go on.
    Skip,
    /// In a memory of its own.
    Copy,
    /// Decided without the inspector, which still has the memory.
    Overdue,
}

/// What a frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A packet that waits for its verdict, or a copy.
    Packet,
    /// A gap record, or a packet that was decided without the inspector.
    Other,
}

/// What stands around a request or an answer in a message.
#[derive(Debug, Serialize, Deserialize)]
struct Envelope<T> {
    towpath: u16,
    #[serde(flatten)]
    body: T,
}

/// A request or answer as a message.
pub fn emit<T: Serialize>(body: &T) -> Vec<u8> {
    let object =
        serde_json::to_vec(&Envelope { towpath: VERSION, body }).expect("strings and numbers serialise");
    frame(JSON, &object)
}

/// Bytes of a kind as a message.
pub fn frame(kind: u8, bytes: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(5 + bytes.len());
    message.extend((bytes.len() as u32 + 1).to_le_bytes());
    message.push(kind);
    message.extend(bytes);
    message
}

/// The request in the bytes of a message.
///
/// # Errors
/// Why there is none, as the answer says it.
pub fn parse_request(bytes: &[u8]) -> Result<Request, (Code, String)> {
    let wrong = |message: String| (Code::Request, message);
    let Some((&JSON, object)) = bytes.split_first() else {
        return Err(wrong(format!("a request begins with the byte {JSON} and goes on with a JSON object")));
    };
    let mut value: serde_json::Value =
        serde_json::from_slice(object).map_err(|error| wrong(format!("the request is not JSON: {error}")))?;
    let version = value.as_object_mut().and_then(|object| object.remove("towpath"));
    match version.as_ref().and_then(serde_json::Value::as_u64) {
        Some(version) if version == u64::from(VERSION) => {}
        Some(version) => {
            return Err((
                Code::Version,
                format!("the engine speaks control protocol version {VERSION}, the client {version}"),
            ));
        }
        None => {
            return Err(wrong("the request has no \"towpath\": VERSION".to_owned()));
        }
    }
    serde_json::from_value(value).map_err(|error| wrong(format!("no such request: {error}")))
}

/// The answer in the bytes of a message, which began with [`JSON`].
///
/// # Errors
/// What is wrong with it.
pub fn parse_answer(object: &[u8]) -> Result<Answer, String> {
    let envelope: Envelope<serde_json::Value> =
        serde_json::from_slice(object).map_err(|error| format!("no answer of an engine: {error}"))?;
    if envelope.towpath != VERSION {
        return Err(format!(
            "the engine speaks control protocol version {}, this program {VERSION}; use releases that match",
            envelope.towpath
        ));
    }
    serde_json::from_value(envelope.body)
        .map_err(|error| format!("no answer that this program knows: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_what_the_documentation_says() {
        type Row = (&'static str, Result<Request, (Code, &'static str)>);
        let rows: &[Row] = &[
            (r#"{"towpath":1,"do":"show-rings"}"#, Ok(Request::ShowRings)),
            (r#"{"do":"show-frames","channel":3,"towpath":1}"#, Ok(Request::ShowFrames { channel: 3 })),
            (r#"{"towpath":1,"do":"trace","channel":3}"#, Ok(Request::Trace { channel: 3, count: None })),
            (
                r#"{"towpath":1,"do":"trace","channel":3,"count":9}"#,
                Ok(Request::Trace { channel: 3, count: Some(9) }),
            ),
            (
                r#"{"towpath":1,"do":"command","text":"flush"}"#,
                Ok(Request::Command { text: "flush".into(), check: false }),
            ),
            (
                r#"{"towpath":1,"do":"command","text":"flush","check":true}"#,
                Ok(Request::Command { text: "flush".into(), check: true }),
            ),
            (
                r#"{"towpath":1,"do":"lookup","name":"T","key":"10.0.0.1"}"#,
                Ok(Request::Lookup { name: "T".into(), key: "10.0.0.1".into() }),
            ),
            (r#"{"towpath":2,"do":"fly"}"#, Err((Code::Version, "version 1, the client 2"))),
            (r#"{"do":"show-rings"}"#, Err((Code::Request, "no \"towpath\""))),
            (r#"{"towpath":1,"do":"fly"}"#, Err((Code::Request, "fly"))),
            (r#"{"towpath":1,"do":"show-frames"}"#, Err((Code::Request, "channel"))),
            (r#"{"towpath":1,"do":"show-frames","channel":-1}"#, Err((Code::Request, "-1"))),
            (r#"[1]"#, Err((Code::Request, "towpath"))),
            ("{", Err((Code::Request, "not JSON"))),
        ];
        for (text, expected) in rows {
            let got = parse_request(&[&[JSON], text.as_bytes()].concat());
            match (got, expected) {
                (Ok(got), Ok(expected)) => assert_eq!(got, *expected, "{text}"),
                (Err((code, message)), Err((expected, words))) => {
                    assert_eq!(code, *expected, "{text}");
                    assert!(message.contains(words), "{text}: {message}");
                }
                (got, _) => panic!("{text}: {got:?}"),
            }
        }
        assert_eq!(parse_request(b"").unwrap_err().0, Code::Request);
        assert_eq!(parse_request(b"GET / HTTP/1.0").unwrap_err().0, Code::Request);
    }

    #[test]
    fn what_is_emitted_is_parsed() {
        for request in [Request::ShowRings, Request::Trace { channel: 1, count: Some(2) }] {
            assert_eq!(parse_request(&emit(&request)[4..]), Ok(request));
        }
        let answer = Answer::Rings { rings: vec![Ring { channel: 7, ..Ring::default() }] };
        let message = emit(&answer);
        assert_eq!(message[..4], (message.len() as u32 - 4).to_le_bytes());
        assert_eq!(parse_answer(&message[5..]), Ok(answer));
        assert!(
            parse_answer(br#"{"towpath":9,"answer":"rings","rings":[]}"#).unwrap_err().contains("version 9")
        );
    }
}
