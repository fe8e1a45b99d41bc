//! HTTP/1.1 for one client of the metrics endpoint: bytes and answers in, requests and bytes out. No IO.
//!
//! `GET` and `HEAD` of `/metrics` are served; requests with a body are refused. `httparse` reads the head of a request. Requests are served
//! one at a time, and at most one each [`PAUSE`]. A client whose head is incomplete after [`SLOW`], or whose answer is not taken after
//! [`SLOW`], is disconnected.
//!
//! References: RFC 9110 (12.5.1, Accept), RFC 9112.

use std::sync::Arc;

use super::text::Format;

/// Bytes of the head of a request, and its header fields. Prometheus sends about 400 bytes and 7 fields.
const HEAD_MAX: usize = 8 << 10;
const FIELDS: usize = 32;

/// Maximum time in nanoseconds from the first to the last byte of a head, and for taking an answer.
const SLOW: u64 = 10_000_000_000;

/// Maximum time in nanoseconds without a request.
const IDLE: u64 = 300_000_000_000;

/// Minimum time in nanoseconds between two requests of a client.
const PAUSE: u64 = 20_000_000;

/// Time in nanoseconds without progress after which a client that takes an answer gives way to a new one.
pub(super) const STALL: u64 = 1_000_000_000;

/// Why a client is disconnected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Late {
    /// It made no request.
    Idle,
    /// It did not send or take its messages in time.
    Slow,
}

/// The result of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Request {
    /// The metrics in this format. [`Connection::answer`] must follow.
    Metrics(Format),
    /// The request was refused, and the refusal is in the output.
    Refused,
}

#[derive(Debug)]
enum State {
    /// The next request may be read.
    Idle,
    /// A request waits for its answer.
    Asked { head_only: bool },
    /// The output is the last message.
    Closing,
}

/// See the module documentation.
#[derive(Debug)]
pub(super) struct Connection {
    input: Vec<u8>,
    head: Vec<u8>,
    body: Option<Arc<str>>,
    /// Bytes of head and body that the client has taken.
    taken: usize,
    state: State,
    keep: bool,
    /// The client has closed its side.
    ended: bool,
    /// The time since which the head is incomplete or the answer is not completely sent.
    begun: Option<u64>,
    /// Time of the last progress.
    active: u64,
    /// Time of the last request.
    asked: Option<u64>,
}

impl Connection {
    pub(super) fn new(now: u64) -> Self {
        Self {
            input: Vec::new(),
            head: Vec::new(),
            body: None,
            taken: 0,
            state: State::Idle,
            keep: true,
            ended: false,
            begun: None,
            active: now,
            asked: None,
        }
    }

    /// The number of bytes that [`handle_bytes`](Self::handle_bytes) accepts.
    pub(super) fn wants(&self) -> usize {
        match self.state {
            State::Closing => 0,
            _ if self.ended => 0,
            _ => HEAD_MAX - self.input.len(),
        }
    }

    /// Takes bytes from the client, at most [`wants`](Self::wants).
    pub(super) fn handle_bytes(&mut self, bytes: &[u8], now: u64) {
        self.input.extend_from_slice(bytes);
        self.active = now;
        if matches!(self.state, State::Idle) && self.pending() == 0 {
            self.begun.get_or_insert(now);
        }
    }

    /// The client has closed its side. Requests that it has sent are still answered.
    pub(super) fn handle_end(&mut self) {
        self.ended = true;
    }

    /// The next request, if one has arrived.
    pub(super) fn poll_request(&mut self, now: u64) -> Option<Request> {
        if !matches!(self.state, State::Idle) || self.pending() > 0 || self.pause(now).is_some() {
            return None;
        }
        let mut fields = [httparse::EMPTY_HEADER; FIELDS];
        let mut parsed = httparse::Request::new(&mut fields);
        let length = match parsed.parse(&self.input) {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) if self.input.len() < HEAD_MAX => {
                if self.ended {
                    self.state = State::Closing;
                }
                return None;
            }
            Ok(httparse::Status::Partial) | Err(httparse::Error::TooManyHeaders) => {
                return Some(self.refuse(
                    "431 Request Header Fields Too Large",
                    "",
                    "the head of the request is too long\n",
                ));
            }
            Err(error) => {
                return Some(self.refuse(
                    "400 Bad Request",
                    "",
                    &format!("not an HTTP/1.1 request: {error}\n"),
                ));
            }
        };
        let field = |name: &str| {
            let mut found = parsed.headers.iter().filter(move |field| field.name.eq_ignore_ascii_case(name));
            found.next().map(|field| std::str::from_utf8(field.value).unwrap_or_default().trim())
        };
        let has_body = field("content-length").is_some_and(|length| length != "0")
            || field("transfer-encoding").is_some();
        let close = field("connection")
            .is_some_and(|value| value.split(',').any(|word| word.trim().eq_ignore_ascii_case("close")));
        let keep = parsed.version == Some(1) && !close;
        let format = Format::accepted(
            parsed
                .headers
                .iter()
                .filter(|field| field.name.eq_ignore_ascii_case("accept"))
                .map(|field| field.value),
        );
        let method = parsed.method.unwrap_or_default();
        let head_only = method == "HEAD";
        let is_read = head_only || method == "GET";
        let path = parsed.path.unwrap_or_default().split('?').next().unwrap_or_default();
        let is_metrics = path == "/metrics";
        self.input.drain(..length);
        (self.asked, self.begun, self.keep) = (Some(now), None, keep);
        self.state = State::Asked { head_only };
        Some(if has_body {
            self.refuse("413 Content Too Large", "", "a request to the metrics endpoint has no body\n")
        } else if !is_metrics {
            self.refuse("404 Not Found", "", "not found; the metrics are at /metrics\n")
        } else if !is_read {
            self.refuse("405 Method Not Allowed", "Allow: GET, HEAD\r\n", "use GET or HEAD\n")
        } else {
            Request::Metrics(format)
        })
    }

    /// Answers the request of [`poll_request`](Self::poll_request). `None`: the engine did not answer.
    pub(super) fn answer(&mut self, body: Option<(Format, Arc<str>)>, now: u64) {
        let State::Asked { head_only } = self.state else { return };
        let Some((format, body)) = body else {
            self.refuse(
                "503 Service Unavailable",
                "Retry-After: 1\r\n",
                "the engine did not answer in time\n",
            );
            return;
        };
        self.put_head("200 OK", format.content_type(), "Vary: Accept\r\n", body.len());
        self.body = (!head_only).then_some(body);
        self.state = if self.keep { State::Idle } else { State::Closing };
        (self.begun, self.active) = (Some(now), now);
    }

    /// Refuses the request. The connection ends, because what follows may be a part of the request.
    fn refuse(&mut self, status: &str, fields: &str, text: &str) -> Request {
        let head_only = matches!(self.state, State::Asked { head_only: true });
        (self.keep, self.state) = (false, State::Closing);
        self.input = Vec::new();
        self.begun = Some(self.active);
        self.put_head(status, "text/plain; charset=utf-8", fields, text.len());
        if !head_only {
            self.head.extend(text.as_bytes());
        }
        Request::Refused
    }

    fn put_head(&mut self, status: &str, content_type: &str, fields: &str, length: usize) {
        let connection = if self.keep { "keep-alive" } else { "close" };
        let head = format!(
            "HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n{fields}\
             Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nConnection: {connection}\r\n\r\n"
        );
        (self.head, self.taken) = (head.into_bytes(), 0);
    }

    /// The bytes to send. [`handle_taken`](Self::handle_taken) must say how many were sent.
    pub(super) fn poll_output(&self) -> &[u8] {
        match self.head.get(self.taken..).filter(|rest| !rest.is_empty()) {
            Some(rest) => rest,
            None => self.body.as_ref().map_or(&[], |body| &body.as_bytes()[self.taken - self.head.len()..]),
        }
    }

    /// `bytes` bytes of the output were sent.
    pub(super) fn handle_taken(&mut self, bytes: usize, now: u64) {
        self.taken += bytes;
        self.active = now;
        if self.pending() == 0 {
            (self.head, self.body, self.taken) = (Vec::new(), None, 0);
            self.begun = (!self.input.is_empty()).then_some(now);
        }
    }

    fn pending(&self) -> usize {
        self.head.len() + self.body.as_ref().map_or(0, |body| body.len()) - self.taken
    }

    /// The end of the pause between two requests, in a pause.
    fn pause(&self, now: u64) -> Option<u64> {
        self.asked.map(|asked| asked + PAUSE).filter(|due| *due > now)
    }

    /// A request waits for its answer.
    pub(super) fn is_waiting(&self) -> bool {
        matches!(self.state, State::Asked { .. })
    }

    /// Everything was sent, and no request follows.
    pub(super) fn is_over(&self) -> bool {
        let quiet = matches!(self.state, State::Idle) && self.ended && self.input.is_empty();
        (matches!(self.state, State::Closing) || quiet) && self.pending() == 0
    }

    /// The time since which a new client may take the place of this one. `None`: it is being served.
    pub(super) fn idle_since(&self, now: u64) -> Option<u64> {
        let served = self.is_waiting() || self.pending() > 0 && now < self.active + STALL;
        (!served).then_some(self.active)
    }

    /// The time of the next [`handle_timeout`](Self::handle_timeout) or [`poll_request`](Self::poll_request). `None` while a request waits.
    pub(super) fn poll_timeout(&self, now: u64) -> Option<u64> {
        if self.is_waiting() {
            return None;
        }
        let due = self.begun.map_or(self.active + IDLE, |begun| begun + SLOW);
        Some(
            self.pause(now).filter(|_| !self.input.is_empty() && self.pending() == 0).unwrap_or(due).min(due),
        )
    }

    /// Handles the time `now`. Returns the reason if the client must be disconnected.
    pub(super) fn handle_timeout(&self, now: u64) -> Option<Late> {
        match self.begun {
            _ if self.is_waiting() => None,
            Some(begun) => (now >= begun + SLOW).then_some(Late::Slow),
            None => (now >= self.active + IDLE).then_some(Late::Idle),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(text: &str) -> (Connection, Option<Request>) {
        let mut connection = Connection::new(0);
        connection.handle_bytes(text.as_bytes(), 0);
        let request = connection.poll_request(0);
        (connection, request)
    }

    /// Takes all output.
    fn taken(connection: &mut Connection, now: u64) -> String {
        let mut all = Vec::new();
        while !connection.poll_output().is_empty() {
            let part = connection.poll_output().len().min(7);
            all.extend_from_slice(&connection.poll_output()[..part]);
            connection.handle_taken(part, now);
        }
        String::from_utf8(all).unwrap()
    }

    #[test]
    fn requests_have_answers() {
        let metrics = Some(Request::Metrics(Format::Text));
        let refused = Some(Request::Refused);
        let rows = [
            ("GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n", metrics, "HTTP/1.1 200 OK\r\n", true, true),
            ("GET /metrics?x=1 HTTP/1.1\r\n\r\n", metrics, "HTTP/1.1 200 OK\r\n", true, true),
            ("GET /metrics HTTP/1.0\r\n\r\n", metrics, "HTTP/1.1 200 OK\r\n", true, false),
            (
                "GET /metrics HTTP/1.1\r\nconnection: x, Close\r\n\r\n",
                metrics,
                "HTTP/1.1 200 OK\r\n",
                true,
                false,
            ),
            ("HEAD /metrics HTTP/1.1\r\n\r\n", metrics, "HTTP/1.1 200 OK\r\n", false, true),
            ("POST /metrics HTTP/1.1\r\n\r\n", refused, "HTTP/1.1 405 ", true, false),
            ("POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", refused, "HTTP/1.1 413 ", true, false),
            (
                "GET /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n",
                refused,
                "HTTP/1.1 413 ",
                true,
                false,
            ),
            ("GET / HTTP/1.1\r\n\r\n", refused, "HTTP/1.1 404 ", true, false),
            ("HEAD / HTTP/1.1\r\n\r\n", refused, "HTTP/1.1 404 ", false, false),
            ("GET /metrics\r\n\r\n", refused, "HTTP/1.1 400 ", true, false),
            ("\u{1}\u{2}\r\n\r\n", refused, "HTTP/1.1 400 ", true, false),
        ];
        for (text, request, status, has_body, keeps) in rows {
            let (mut connection, found) = asked(text);
            assert_eq!(found, request, "{text}");
            if found == metrics {
                connection.answer(Some((Format::Text, "body\n".into())), 0);
            }
            let answer = taken(&mut connection, 0);
            assert!(answer.starts_with(status), "{text}: {answer}");
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            assert_eq!(!body.is_empty(), has_body, "{text}: {answer}");
            let connection_field = if keeps { "\r\nConnection: keep-alive" } else { "\r\nConnection: close" };
            assert!(head.contains(connection_field), "{text}: {answer}");
            let length: usize =
                head.split("Content-Length: ").nth(1).unwrap().split("\r\n").next().unwrap().parse().unwrap();
            assert!(!has_body || length == body.len(), "{text}: {answer}");
            assert_eq!(connection.is_over(), !keeps, "{text}");
        }
    }

    #[test]
    fn one_request_at_a_time_and_not_too_often() {
        let (mut connection, _) = asked("GET /metrics HTTP/1.1\r\n\r\nGET /metrics HTTP/1.1\r\n\r\nGET /me");
        assert_eq!(connection.poll_request(0), None);
        connection.answer(Some((Format::Text, "x".into())), 0);
        assert_eq!(connection.poll_request(PAUSE), None);
        taken(&mut connection, 1);
        assert_eq!((connection.poll_request(PAUSE - 1), connection.poll_timeout(1)), (None, Some(PAUSE)));
        assert_eq!(connection.poll_request(PAUSE), Some(Request::Metrics(Format::Text)));
        connection.answer(None, PAUSE);
        assert!(taken(&mut connection, PAUSE).starts_with("HTTP/1.1 503 "));
        assert!(connection.is_over());
    }

    #[test]
    fn heads_are_bounded() {
        let mut connection = Connection::new(0);
        let mut sent = "GET /metrics HTTP/1.1\r\nX: ".to_owned() + &"a".repeat(2 * HEAD_MAX);
        sent.truncate(connection.wants());
        connection.handle_bytes(sent.as_bytes(), 0);
        assert_eq!((connection.wants(), connection.poll_request(0)), (0, Some(Request::Refused)));
        assert!(taken(&mut connection, 0).starts_with("HTTP/1.1 431 "));
        let (mut connection, request) =
            asked(&("GET /metrics HTTP/1.1\r\n".to_owned() + &"X: a\r\n".repeat(FIELDS + 1) + "\r\n"));
        assert_eq!(request, Some(Request::Refused));
        assert!(taken(&mut connection, 0).starts_with("HTTP/1.1 431 "));
    }

    #[test]
    fn slow_and_idle_clients_are_disconnected() {
        let silent = Connection::new(0);
        assert_eq!((silent.handle_timeout(IDLE - 1), silent.handle_timeout(IDLE)), (None, Some(Late::Idle)));
        assert_eq!(silent.idle_since(5), Some(0));
        // Single bytes do not extend the time.
        let mut slow = Connection::new(0);
        slow.handle_bytes(b"G", 1);
        slow.handle_bytes(b"E", SLOW);
        assert_eq!((slow.handle_timeout(SLOW), slow.handle_timeout(SLOW + 1)), (None, Some(Late::Slow)));
        // A request that waits for the engine has no limit here.
        let (mut reader, _) = asked("GET /metrics HTTP/1.1\r\n\r\n");
        assert_eq!((reader.handle_timeout(2 * IDLE), reader.idle_since(2 * IDLE)), (None, None));
        reader.answer(Some((Format::Text, "x".repeat(100).into())), 0);
        reader.handle_taken(10, SLOW - 1);
        assert_eq!((reader.handle_timeout(SLOW - 1), reader.handle_timeout(SLOW)), (None, Some(Late::Slow)));
        assert_eq!(reader.idle_since(SLOW - 1 + STALL - 1), None);
        assert_eq!(reader.idle_since(SLOW - 1 + STALL), Some(SLOW - 1));
    }
}
