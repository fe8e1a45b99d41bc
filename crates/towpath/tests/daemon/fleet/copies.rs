//! A gate that makes the server send its messages under the name of another one.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::time::Duration;

use super::{client, with_server};
use crate::support::until;
use towpath_fleet::nats::Incoming;

/// A plain client of NATS.
pub(super) struct Plain(BufReader<TcpStream>);

impl Plain {
    pub(super) fn connect(user: &str, password: &str) -> Self {
        let mut plain = Self(BufReader::new(TcpStream::connect("127.0.0.1:4222").unwrap()));
        assert!(plain.line().starts_with("INFO"));
        let connect = format!(
            "CONNECT {{\"verbose\":false,\"user\":\"{user}\",\"pass\":\"{password}\",\"headers\":true}}"
        );
        plain.say(&format!("{connect}\r\nSUB _INBOX.plain 1"));
        plain
    }

    pub(super) fn say(&mut self, text: &str) {
        self.0.get_mut().write_all(format!("{text}\r\n").as_bytes()).unwrap();
    }

    pub(super) fn publish(&mut self, subject: &str, reply: &str, text: &str) {
        self.say(&format!("PUB {subject} {reply} {}\r\n{text}", text.len()));
    }

    /// Publishes with the header that names the stream.
    pub(super) fn publish_to(&mut self, stream: &str, subject: &str, text: &str) {
        let head = format!("NATS/1.0\r\nNats-Expected-Stream: {stream}\r\n\r\n");
        self.say(&format!("HPUB {subject} {} {}\r\n{head}{text}", head.len(), head.len() + text.len()));
    }

    /// A request of JetStream. Returns the answer.
    pub(super) fn request(&mut self, subject: &str, text: &str) -> String {
        self.publish(subject, "_INBOX.plain", text);
        loop {
            let line = self.line();
            assert!(!line.starts_with("-ERR"), "{line}");
            if line.starts_with("MSG") {
                return self.line();
            }
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.0.read_line(&mut line).unwrap();
        line
    }
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn copies_of_messages_under_other_names_are_refused() {
    with_server(|_, _, _server| {
        let mut thief = Plain::connect("b", "two");
        // What `b` publishes comes once more under the name of `a`.
        let stream = r#"{"name":"towpath-edge","subjects":["towpath.edge.states.b"],"storage":"memory",
            "republish":{"src":"towpath.edge.states.b","dest":"towpath.edge.bulk.a.c"}}"#;
        let answer = thief.request("$JS.API.STREAM.CREATE.towpath-edge", stream);
        assert!(!answer.contains("\"error\""), "{answer}");
        let (bus, warning) = client("a", "one");
        // The stream is not used.
        assert!(warning.is_some_and(|warning| warning.contains("was not made by a gate")));
        thief.say("PUB towpath.edge.states.b 5\r\nhello");
        let (mut own, mut copies) = (0, Vec::new());
        until(|| {
            match bus.receive(Duration::from_millis(10)) {
                Some(Incoming::Message { from, bytes, .. }) => {
                    assert_eq!((&*from, &bytes[..]), ("b", &b"hello"[..]));
                    own += 1;
                }
                Some(Incoming::Republished { from }) => copies.push(from),
                _ => {}
            }
            own == 1 && !copies.is_empty()
        });
        assert_eq!(copies, ["c"]);
        // A message with a subject for replies, as consumers of a stream send them.
        thief.publish("towpath.edge.states.b", "_INBOX.plain", "once more");
        until(
            || matches!(bus.receive(Duration::from_millis(10)), Some(Incoming::Republished { from }) if from == "b"),
        );
    });
}
