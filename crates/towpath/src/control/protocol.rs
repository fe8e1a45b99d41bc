//! Messages on the control socket. The page *ctl* of the book's reference documents them for clients in other languages.
//!
//! A message is a little-endian `u32`, which counts the bytes that follow it, one byte for the kind, and the body:
//! [`JSON`] is one object, [`PCAPNG`] is blocks of a capture. Every object has the member `towpath`, the protocol's
//! [`VERSION`]. A request has `do`, its name; an answer has `answer`.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// The version of the protocol.
pub const VERSION: u16 = 1;

/// Maximum size of a request of an owner in bytes, without the length field: a million table entries.
pub const REQUEST_MAX: usize = 64 << 20;

/// Maximum size of a request of a reader in bytes, without the length field. Readers only make queries.
pub const READER_REQUEST_MAX: usize = 4096;

/// Maximum size of an answer in bytes, without the length field.
pub const ANSWER_MAX: usize = 1 << 20;

/// Kind of a message whose body is one JSON object.
pub const JSON: u8 = 1;

/// Kind of a message whose body is whole pcapng blocks.
pub const PCAPNG: u8 = 2;

/// Why a request is refused, for programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Code {
    /// The request has another protocol version. The message names both.
    Version,
    /// The message is not a request.
    Request,
    /// The request is longer than [`REQUEST_MAX`] or [`READER_REQUEST_MAX`].
    TooLong,
    /// The client has no access to this request.
    NotPermitted,
    /// The server has its maximum number of clients, or the engine does not answer.
    Busy,
    /// The channel does not exist.
    NoChannel,
    /// The engine has no multiplexor.
    NoMux,
    /// The table or entry does not exist, or the engine does not have objects of this kind.
    NotFound,
    /// The listing, of which a further page was requested, was discarded. The client lists again.
    Gone,
    /// The commands or the setting have errors. The message has one line per error.
    Invalid,
    /// The engine has ended.
    Ended,
}

/// An answer that refuses a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refusal {
    /// For programs.
    pub code: Code,
    /// For people.
    pub message: String,
}

impl Refusal {
    /// Creates a refusal.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// A request that has been read and not been interpreted.
#[derive(Clone, Debug, PartialEq)]
pub struct RawRequest {
    /// Its name, the value of `do`.
    pub name: String,
    /// All other members.
    pub body: Value,
}

/// An answer that has been read.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// Its name, the value of `answer`.
    pub name: String,
    /// All other members.
    pub body: Value,
}

/// Serializes a request.
///
/// # Panics
///
/// Panics if `body` does not serialize to an object.
pub fn request(name: &str, body: impl Serialize) -> Vec<u8> {
    object("do", name, serde_json::to_value(body).expect("strings and numbers serialize"))
}

/// Serializes an answer.
///
/// # Panics
///
/// Panics if `body` is not an object.
pub fn answer(name: &str, body: Value) -> Vec<u8> {
    object("answer", name, body)
}

/// Serializes the answer that refuses a request.
pub fn error(refusal: &Refusal) -> Vec<u8> {
    answer("error", json!(refusal))
}

fn object(key: &str, name: &str, mut body: Value) -> Vec<u8> {
    let members = body.as_object_mut().expect("a message is an object");
    members.insert("towpath".to_owned(), VERSION.into());
    members.insert(key.to_owned(), name.into());
    frame(JSON, body.to_string().as_bytes())
}

/// Adds the length and the kind.
pub fn frame(kind: u8, bytes: &[u8]) -> Vec<u8> {
    let mut message = Vec::with_capacity(5 + bytes.len());
    message.extend((bytes.len() as u32 + 1).to_le_bytes());
    message.push(kind);
    message.extend(bytes);
    message
}

/// Reads a request from a message without its length field.
///
/// # Errors
///
/// Returns the refusal to answer with.
pub fn parse_request(bytes: &[u8]) -> Result<RawRequest, Refusal> {
    let wrong = |message: String| Refusal::new(Code::Request, message);
    let Some((&JSON, object)) = bytes.split_first() else {
        return Err(wrong(format!("a request is the byte {JSON} followed by a JSON object")));
    };
    let body: Value =
        serde_json::from_slice(object).map_err(|error| wrong(format!("the request is not JSON: {error}")))?;
    let (version, name, body) = take(body, "do");
    match version {
        Some(version) if version == u64::from(VERSION) => {}
        Some(version) => {
            let message =
                format!("the engine speaks control protocol version {VERSION}, the client {version}");
            return Err(Refusal::new(Code::Version, message));
        }
        None => return Err(wrong("the request has no \"towpath\": VERSION".to_owned())),
    }
    let name = name.ok_or_else(|| wrong("the request has no \"do\": NAME".to_owned()))?;
    Ok(RawRequest { name, body })
}

/// Reads an answer from the body of a message of the kind [`JSON`].
///
/// # Errors
///
/// Returns the reason, for people.
pub fn parse_answer(object: &[u8]) -> Result<Answer, String> {
    let body: Value =
        serde_json::from_slice(object).map_err(|error| format!("not an answer of an engine: {error}"))?;
    match take(body, "answer") {
        (Some(version), Some(name), body) if version == u64::from(VERSION) => Ok(Answer { name, body }),
        (Some(version), ..) if version != u64::from(VERSION) => Err(format!(
            "the engine speaks control protocol version {version}, this program {VERSION}; use the same release for both"
        )),
        _ => Err("not an answer of an engine: \"towpath\" or \"answer\" is missing".to_owned()),
    }
}

/// Separates the version and the name from the other members.
fn take(mut body: Value, key: &str) -> (Option<u64>, Option<String>, Value) {
    let members = body.as_object_mut();
    let Some(members) = members else { return (None, None, Value::Object(Map::new())) };
    let version = members.remove("towpath").as_ref().and_then(Value::as_u64);
    let name = members.remove(key).as_ref().and_then(Value::as_str).map(str::to_owned);
    (version, name, body)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_what_the_documentation_says() {
        type Row = (&'static str, Result<(&'static str, Value), (Code, &'static str)>);
        let rows: &[Row] = &[
            (r#"{"towpath":1,"do":"show-rings"}"#, Ok(("show-rings", json!({})))),
            (r#"{"do":"show-frames","channel":3,"towpath":1}"#, Ok(("show-frames", json!({ "channel": 3 })))),
            (r#"{"towpath":2,"do":"fly"}"#, Err((Code::Version, "version 1, the client 2"))),
            (r#"{"do":"show-rings"}"#, Err((Code::Request, "no \"towpath\""))),
            (r#"{"towpath":1}"#, Err((Code::Request, "no \"do\""))),
            (r#"[1]"#, Err((Code::Request, "towpath"))),
            ("{", Err((Code::Request, "not JSON"))),
        ];
        for (text, expected) in rows {
            let got = parse_request(&[&[JSON], text.as_bytes()].concat());
            match (got, expected) {
                (Ok(got), Ok((name, body))) => assert_eq!((&*got.name, &got.body), (*name, body), "{text}"),
                (Err(Refusal { code, message }), Err((expected, words))) => {
                    assert_eq!(code, *expected, "{text}");
                    assert!(message.contains(words), "{text}: {message}");
                }
                (got, _) => panic!("{text}: {got:?}"),
            }
        }
        assert_eq!(parse_request(b"").unwrap_err().code, Code::Request);
        assert_eq!(parse_request(b"GET / HTTP/1.0").unwrap_err().code, Code::Request);
    }

    #[test]
    fn messages_are_parsed_as_they_were_serialized() {
        let message = request("trace", json!({ "channel": 1, "count": 2 }));
        let parsed = parse_request(&message[4..]).unwrap();
        assert_eq!((&*parsed.name, parsed.body), ("trace", json!({ "channel": 1, "count": 2 })));
        let message = answer("rings", json!({ "rings": [7] }));
        assert_eq!(message[..4], (message.len() as u32 - 4).to_le_bytes());
        let parsed = parse_answer(&message[5..]).unwrap();
        assert_eq!((&*parsed.name, parsed.body), ("rings", json!({ "rings": [7] })));
        let error = parse_answer(br#"{"towpath":9,"answer":"rings","rings":[]}"#).unwrap_err();
        assert!(error.contains("version 9"), "{error}");
    }
}
