//! One client of the control socket: bytes and replies in, requests and bytes out. No IO.
//!
//! Requests are served one at a time: the next one is read when the client has taken the answer to the last one. The memory for a
//! client is bounded: one request ([`REQUEST_MAX`]; memory grows with the bytes that arrive and is freed afterwards), [`PENDING`] bytes of answers, and the bounds of its [`Stream`].
//!
//! A client that makes no request for [`IDLE`], needs longer than [`SLOW`] for one request, or takes less than [`SLOW_BYTES`] of the
//! waiting answers in [`SLOW`] is disconnected. Single bytes do not extend these times.

use std::sync::Arc;

use serde_json::Value;

use super::command::{Progress, Reply, Request, Stream};
use super::commands;
use super::commands::show_states::Event;
use super::protocol::{Code, REQUEST_MAX, Refusal, answer, error, parse_request};
use super::request_pace::RequestPace;

/// Number of pending bytes of answers above which no further message is created.
pub(super) const PENDING: usize = 256 << 10;

/// Bytes of memory for requests that a session keeps.
const INPUT: usize = 64 << 10;

/// Maximum time between two requests in nanoseconds.
const IDLE: u64 = 60_000_000_000;

/// Maximum time in nanoseconds from the first to the last byte of a request, and for taking [`SLOW_BYTES`].
const SLOW: u64 = 10_000_000_000;

/// Bytes of answers that a client takes in [`SLOW`], or all that wait if these are fewer: 6.4 KiB/s.
const SLOW_BYTES: usize = 64 << 10;

/// Maximum time in nanoseconds for a reply of the engine.
const ENGINE_TIMEOUT: u64 = 5_000_000_000;

/// Why a client is disconnected.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Late {
    /// It made no request.
    Idle,
    /// It did not send or take messages fast enough.
    Slow,
}

/// See the module's documentation.
#[derive(Debug)]
pub struct Session {
    input: Vec<u8>,
    /// Maximum size of a request.
    request_max: usize,
    output: Vec<u8>,
    /// Bytes of `output` that the client has taken.
    taken: usize,
    state: State,
    /// Time of the last request or answer.
    active: u64,
    /// Arrival of the first byte of an incomplete request.
    begun: Option<u64>,
    /// While output waits: since when, and the bytes to be taken in [`SLOW`] from then on.
    output_due: Option<(u64, usize)>,
    /// The client has closed its side.
    ended: bool,
    /// The rate of a reader's requests.
    pace: Option<RequestPace>,
}

#[derive(Debug)]
enum State {
    /// The next request may be read.
    Idle,
    /// A request waits for its reply.
    Asked,
    /// An answer of several messages.
    Streaming(Box<dyn Stream>),
    /// No messages follow the pending ones.
    Closing,
}

impl Session {
    /// Creates the session of a client that connects at `now`, in nanoseconds of a monotonic clock.
    pub fn new(now: u64) -> Self {
        let (input, output) = (Vec::new(), Vec::new());
        let state = State::Idle;
        let request_max = REQUEST_MAX;
        let (active, begun, output_due, ended) = (now, None, None, false);
        Self { input, request_max, output, taken: 0, state, active, begun, output_due, ended, pace: None }
    }

    /// Sets the maximum size of a request, and limits the rate of requests (`request_pace.rs`): the limits of readers. By default, the
    /// size is [`REQUEST_MAX`], and the rate has no limit.
    pub fn limit_requests(&mut self, bytes: usize) {
        self.request_max = bytes;
        self.pace = Some(RequestPace::default());
    }

    /// Takes bytes from the client. Bytes beyond [`wants`](Self::wants) are ignored.
    pub fn handle_bytes(&mut self, bytes: &[u8], now: u64) {
        let room = self.wants_at_most();
        self.input.extend(&bytes[..bytes.len().min(room)]);
        if !self.input.is_empty() {
            self.begun.get_or_insert(now);
        }
    }

    /// Returns the number of bytes that [`handle_bytes`](Self::handle_bytes) accepts.
    pub fn wants(&self) -> usize {
        match self.state {
            State::Closing => 0,
            _ if self.ended => 0,
            _ => self.wants_at_most(),
        }
    }

    fn wants_at_most(&self) -> usize {
        (self.request_max + 4).saturating_sub(self.input.len())
    }

    /// The client has closed its side. Requests that it has sent are still answered.
    pub fn handle_end(&mut self) {
        self.ended = true;
    }

    /// Returns the next request. [`handle_reply`](Self::handle_reply) or [`refuse`](Self::refuse) must follow.
    pub fn poll_request(&mut self, now: u64) -> Option<(&'static Request, Value)> {
        if !matches!(self.state, State::Idle) || !self.pending().is_empty() || self.paused(now).is_some() {
            return None;
        }
        let Some((length, rest)) = self.input.split_first_chunk::<4>() else {
            if self.ended {
                self.state = State::Closing;
            }
            return None;
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > self.request_max {
            // The beginning of the next request is unknown.
            let most = self.request_max;
            let message = format!(
                "a request has at most {most} bytes, this one has {length}; send fewer commands at a time, or write \
                 them to the rule file and reload it"
            );
            self.refuse(&Refusal::new(Code::TooLong, message));
            self.state = State::Closing;
            return None;
        }
        let Some(message) = rest.get(..length) else {
            if self.ended {
                self.state = State::Closing;
            }
            return None;
        };
        let request = parse_request(message);
        if let Some(pace) = &mut self.pace {
            pace.take(now);
        }
        self.input.drain(..4 + length);
        self.input.shrink_to(INPUT);
        self.active = now;
        self.begun = (!self.input.is_empty()).then_some(now);
        let request = request.and_then(|raw| Ok((commands::request(&raw.name)?, raw.body)));
        match request {
            Ok(request) => {
                self.state = State::Asked;
                Some(request)
            }
            Err(refusal) => {
                self.refuse(&refusal);
                None
            }
        }
    }

    /// Answers the request. [`Reply::Pending`] leaves it unanswered.
    pub fn handle_reply(&mut self, reply: Reply, now: u64) {
        self.active = now;
        match reply {
            Reply::Answer(name, body) => {
                self.state = State::Idle;
                self.output.extend(answer(name, body));
            }
            Reply::Stream(stream) => self.state = State::Streaming(stream),
            Reply::Pending(_) => {}
        }
    }

    /// Refuses the request.
    pub fn refuse(&mut self, refusal: &Refusal) {
        if !matches!(self.state, State::Closing) {
            self.state = State::Idle;
        }
        self.output.extend(error(refusal));
    }

    /// Ends the session after the pending messages, and the events that wait.
    pub fn close(&mut self) {
        if self.takes_events() {
            self.poll_output();
        }
        self.state = State::Closing;
    }

    /// Returns the bytes to send. [`handle_taken`](Self::handle_taken) must say how many were sent.
    pub fn poll_output(&mut self) -> &[u8] {
        while self.output.len() - self.taken < PENDING && self.produce() {}
        self.pending()
    }

    /// `bytes` bytes of the output were sent.
    pub fn handle_taken(&mut self, bytes: usize, now: u64) {
        self.taken += bytes;
        if let Some((_, left)) = &mut self.output_due {
            *left = left.saturating_sub(bytes);
            if *left == 0 {
                self.output_due = None;
            }
        }
        if self.taken == self.output.len() {
            self.output.clear();
            self.taken = 0;
            self.output_due = None;
            // The time for the next request begins.
            self.active = now;
            self.begun = self.begun.map(|_| now);
        } else if self.taken >= PENDING {
            self.output.drain(..self.taken);
            self.taken = 0;
        }
    }

    /// Returns true if [`poll_request`](Self::poll_request) has something to do.
    pub fn is_ready(&self, now: u64) -> bool {
        self.has_request() && self.paused(now).is_none()
    }

    /// Returns when the next request may be polled, if it has arrived and the limit of the rate delays it.
    pub fn poll_pace(&self, now: u64) -> Option<u64> {
        self.paused(now).filter(|_| self.has_request())
    }

    /// Returns the end of the pause between two requests, in a pause.
    fn paused(&self, now: u64) -> Option<u64> {
        self.pace.as_ref().map(RequestPace::due).filter(|due| *due > now)
    }

    fn has_request(&self) -> bool {
        let idle = matches!(self.state, State::Idle) && self.pending().is_empty();
        let whole = || {
            let (length, rest) = self.input.split_first_chunk::<4>()?;
            let length = u32::from_le_bytes(*length) as usize;
            Some(length > self.request_max || rest.len() >= length)
        };
        idle && (self.ended || whole().unwrap_or(false))
    }

    /// Returns true if the session has ended and everything was sent.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Closing) && self.pending().is_empty()
    }

    /// Returns true if messages come from other threads.
    pub fn is_live(&self) -> bool {
        matches!(&self.state, State::Streaming(stream) if stream.is_live())
    }

    /// Returns true if the client takes the events of states.
    pub fn takes_events(&self) -> bool {
        matches!(&self.state, State::Streaming(stream) if stream.takes_events())
    }

    /// Takes events of states. `lost` is the total number of events that were lost before they came here.
    pub fn handle_events(&mut self, events: &Arc<[Event]>, lost: u64) {
        if let State::Streaming(stream) = &mut self.state {
            stream.events(events, lost);
        }
    }

    /// Returns true if a request waits for its reply.
    pub fn is_waiting(&self) -> bool {
        matches!(self.state, State::Asked)
    }

    /// Returns the time of the next [`handle_timeout`](Self::handle_timeout).
    pub fn poll_timeout(&self) -> Option<u64> {
        match self.state {
            // Without a due time, `handle_timeout` sets one: at once.
            _ if !self.pending().is_empty() => Some(self.output_due.map_or(0, |(since, _)| since + SLOW)),
            State::Asked => Some(self.active + ENGINE_TIMEOUT),
            State::Idle => Some((self.active + IDLE).min(self.begun.map_or(u64::MAX, |begun| begun + SLOW))),
            _ => None,
        }
    }

    /// It is `now`. Returns why the client must be disconnected, if it must. Call it whenever output may have been made, too.
    pub fn handle_timeout(&mut self, now: u64) -> Option<Late> {
        let pending = self.pending().len();
        if pending == 0 {
            self.output_due = None;
        } else if self.output_due.is_none() {
            self.output_due = Some((now, pending.min(SLOW_BYTES)));
        }
        if self.poll_timeout().is_none_or(|due| now < due) {
            return None;
        }
        if pending > 0 {
            return Some(Late::Slow);
        }
        if matches!(self.state, State::Asked) {
            self.active = now;
            let message = "the engine did not answer within 5 s; it may be reading a slow capture";
            self.refuse(&Refusal::new(Code::Busy, message));
            self.output_due = Some((now, self.pending().len().min(SLOW_BYTES)));
            return None;
        }
        Some(if self.begun.is_some() { Late::Slow } else { Late::Idle })
    }

    fn pending(&self) -> &[u8] {
        &self.output[self.taken..]
    }

    /// Makes the next message of a stream, if there is one.
    fn produce(&mut self) -> bool {
        let State::Streaming(stream) = &mut self.state else { return false };
        match stream.produce(&mut self.output) {
            Progress::More => true,
            Progress::Idle => false,
            Progress::Done => {
                self.state = State::Idle;
                false
            }
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use serde_json::json;

    use super::super::protocol::{Answer, PCAPNG, READER_REQUEST_MAX, frame, parse_answer, request};
    use super::*;

    /// A session that has made this request.
    pub(in super::super) fn ask(session: &mut Session, name: &str, body: Value) {
        session.handle_bytes(&request(name, body), 0);
        let (request, _) = session.poll_request(0).expect("a request");
        assert!(request.is(name));
    }

    fn rings() -> Reply {
        Reply::Answer("rings", json!({ "rings": [] }))
    }

    /// Takes all output: the answers, and the capture blocks in one piece.
    pub(in super::super) fn take(session: &mut Session) -> (Vec<Answer>, Vec<u8>) {
        let mut stream = Vec::new();
        loop {
            let bytes = session.poll_output().to_vec();
            if bytes.is_empty() {
                break;
            }
            let part = bytes.len().min(777);
            stream.extend(&bytes[..part]);
            session.handle_taken(part, 0);
        }
        let (mut answers, mut capture) = (Vec::new(), Vec::new());
        let mut rest = &stream[..];
        while let Some((length, after)) = rest.split_first_chunk::<4>() {
            let (message, after) = after.split_at(u32::from_le_bytes(*length) as usize);
            match message[0] {
                PCAPNG => capture.extend(&message[1..]),
                _ => answers.push(parse_answer(&message[1..]).unwrap()),
            }
            rest = after;
        }
        (answers, capture)
    }

    fn codes(session: &mut Session) -> Vec<Value> {
        take(session).0.into_iter().map(|answer| answer.body["code"].clone()).collect()
    }

    #[test]
    fn requests_may_arrive_in_pieces_or_together() {
        let mut session = Session::new(0);
        let message = request("show-rings", json!({}));
        for &byte in &message[..message.len() - 1] {
            session.handle_bytes(&[byte], 0);
            assert!(session.poll_request(0).is_none());
        }
        session.handle_bytes(&message[message.len() - 1..], 0);
        session.handle_bytes(&message, 0);
        assert!(session.is_ready(0));
        assert!(session.poll_request(0).is_some());
        assert!(!session.is_ready(0));
        assert!(session.poll_request(0).is_none(), "one at a time");
        session.handle_reply(rings(), 0);
        assert!(session.poll_request(0).is_none(), "the answer was not taken");
        assert_eq!(take(&mut session).0.len(), 1);
        assert!(session.poll_request(0).is_some());
        session.handle_end();
        session.handle_reply(rings(), 0);
        assert_eq!(take(&mut session).0.len(), 1);
        assert!(session.poll_request(0).is_none());
        assert!(session.is_over());
    }

    #[test]
    fn garbage_is_refused_and_an_excessive_length_ends_the_session() {
        let mut session = Session::new(0);
        session.handle_bytes(&frame(1, b"{]"), 0);
        assert!(session.poll_request(0).is_none());
        assert_eq!(codes(&mut session), ["request"]);
        session.handle_bytes(&request("fly", json!({})), 0);
        assert!(session.poll_request(0).is_none());
        let (answers, _) = take(&mut session);
        assert!(answers[0].body["message"].as_str().unwrap().contains("fly"), "{answers:?}");
        session.handle_bytes(b"GET / HTTP/1.0\r\n\r\n", 0);
        assert!(session.poll_request(0).is_none());
        assert_eq!(codes(&mut session), ["too-long"]);
        assert!(session.is_over());
        // At most one request is kept.
        let mut session = Session::new(0);
        session.limit_requests(READER_REQUEST_MAX);
        session.handle_bytes(&vec![0; 1 << 20], 0);
        assert!(session.input.len() <= READER_REQUEST_MAX + 4);
    }

    #[test]
    fn owners_make_long_requests_and_readers_do_not() {
        let long = request("command", json!({ "text": "x".repeat(1 << 20) }));
        let mut session = Session::new(0);
        session.handle_bytes(&long, 0);
        let (request, body) = session.poll_request(0).unwrap();
        assert!(request.is("command") && body["text"].as_str().unwrap().len() == 1 << 20);
        assert!(session.input.capacity() <= INPUT, "{}", session.input.capacity());
        let mut session = Session::new(0);
        session.limit_requests(READER_REQUEST_MAX);
        session.handle_bytes(&long, 0);
        assert!(session.poll_request(0).is_none());
        assert_eq!(codes(&mut session), ["too-long"]);
    }

    #[test]
    fn requests_of_readers_have_a_rate() {
        /// Requests served at `now`, all of them with an answer.
        fn served(session: &mut Session, now: u64) -> usize {
            let one = request("show-rings", json!({}));
            let mut count = 0;
            loop {
                session.handle_bytes(&one, now);
                if session.poll_request(now).is_none() {
                    return count;
                }
                session.handle_reply(rings(), now);
                take(session);
                count += 1;
                if count == 1000 {
                    return count;
                }
            }
        }
        let mut owner = Session::new(0);
        assert_eq!(served(&mut owner, 0), 1000);
        let mut reader = Session::new(0);
        reader.limit_requests(READER_REQUEST_MAX);
        assert_eq!(served(&mut reader, 0), 64);
        // A request waits, and the server sleeps until its time.
        assert_eq!((reader.is_ready(0), reader.poll_pace(0)), (false, Some(20_000_000)));
        assert!(reader.is_ready(20_000_000) && reader.poll_pace(20_000_000).is_none());
        assert_eq!(served(&mut reader, 19_999_999), 0);
        assert_eq!(served(&mut reader, 100_000_000), 5);
    }

    #[test]
    fn silent_and_slow_clients_are_disconnected() {
        let mut session = Session::new(0);
        assert_eq!(session.poll_timeout(), Some(IDLE));
        ask(&mut session, "show-rings", json!({}));
        assert_eq!(session.poll_timeout(), Some(ENGINE_TIMEOUT));
        assert_eq!(session.handle_timeout(ENGINE_TIMEOUT), None, "the engine is slow, not the client");
        assert_eq!(session.poll_timeout(), Some(ENGINE_TIMEOUT + SLOW));
        assert_eq!(session.handle_timeout(ENGINE_TIMEOUT + SLOW - 1), None);
        assert_eq!(session.handle_timeout(ENGINE_TIMEOUT + SLOW), Some(Late::Slow));
        assert_eq!(codes(&mut session), ["busy"]);
        let mut session = Session::new(0);
        assert_eq!(session.handle_timeout(IDLE - 1), None);
        assert_eq!(session.handle_timeout(IDLE), Some(Late::Idle));
    }

    const S: u64 = 1_000_000_000;

    #[test]
    fn single_bytes_of_a_request_do_not_keep_a_place() {
        let mut session = Session::new(0);
        let message = request("show-rings", json!({}));
        for (second, byte) in message.iter().enumerate().take(10) {
            let now = 5 * S + second as u64 * S;
            session.handle_bytes(&[*byte], now);
            assert!(session.poll_request(now).is_none());
            assert_eq!(session.handle_timeout(now), None);
        }
        assert_eq!(session.poll_timeout(), Some(5 * S + SLOW));
        assert_eq!(session.handle_timeout(5 * S + SLOW), Some(Late::Slow));
        // A whole request is in time, and the next one has its own time.
        let mut session = Session::new(0);
        session.handle_bytes(&message, 0);
        session.handle_bytes(&message[..1], 0);
        assert!(session.poll_request(9 * S).is_some());
        session.handle_reply(rings(), 12 * S);
        assert_eq!(session.handle_timeout(12 * S), None);
        let len = session.poll_output().len();
        session.handle_taken(len, 15 * S);
        assert_eq!(session.poll_timeout(), Some(15 * S + SLOW));
    }

    #[test]
    fn a_client_that_takes_single_bytes_is_slow_and_one_that_takes_enough_is_not() {
        let long = || Reply::Answer("rings", json!({ "rings": "x".repeat(1 << 20) }));
        for (bytes, late) in [(1, true), (SLOW_BYTES / 5, true), (SLOW_BYTES / 4, false)] {
            let mut session = Session::new(0);
            ask(&mut session, "show-rings", json!({}));
            session.handle_reply(long(), 0);
            let (mut found, mut now) = (session.handle_timeout(0), 0);
            while !session.poll_output().is_empty() && found.is_none() {
                now += SLOW / 4 - 1;
                found = session.handle_timeout(now);
                session.handle_taken(bytes.min(session.pending().len()), now);
            }
            assert_eq!(found.is_some(), late, "{bytes}");
        }
    }
}
