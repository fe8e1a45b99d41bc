//! One client of the control socket: bytes and replies in, requests and bytes out. No IO.
//!
//! One request at a time: the next is read when the answer to the last has been taken. What is kept for a client is
//! bounded: a request ([`REQUEST_MAX`]), [`PENDING`] bytes of answer, what a trace holds ([`TraceBuffer`](super::TraceBuffer)), and [`EVENTS`]
//! events, of which all who watch share one copy.
//! Who says nothing for [`IDLE`], or takes nothing of what is there for it for [`SLOW`], is cut off.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::TryRecvError;

use towpath_port::pcap::{Blocks, Options};
use towpath_wire::LinkType;

use super::protocol::{Answer, Code, End, Frame, PCAPNG, REQUEST_MAX, Request, emit, frame, parse_request};
use super::query::Response;
use super::records::Event;
use super::trace::{TraceOutcome, TraceRecord, TraceSource};

/// Bytes of answer that wait before more is made.
const PENDING: usize = 256 << 10;

/// Frames of one answer.
const FRAMES: usize = 2048;

/// Events that wait until a client takes them; as many as wait at each thread for the look in which they come here.
const EVENTS: usize = crate::ruleset_manager::EVENTS;

/// Nanoseconds that a client may say nothing.
const IDLE: u64 = 60_000_000_000;

/// Nanoseconds that a client may take nothing of what is there for it.
const SLOW: u64 = 10_000_000_000;

/// Nanoseconds that the engine may take for a reply.
const PATIENCE: u64 = 5_000_000_000;

/// Inbound (`epb_flags`, bits 0 and 1).
const INBOUND: u32 = 1;

/// See the module's text.
#[derive(Debug)]
pub struct Session {
    input: Vec<u8>,
    output: Vec<u8>,
    /// Bytes of `output` that the client has taken.
    taken: usize,
    state: State,
    /// When it last did something, or something was done for it.
    active: u64,
    /// Its requests have ended.
    ended: bool,
}

#[derive(Debug)]
enum State {
    /// It may ask.
    Idle,
    /// The engine was asked.
    Asked,
    Listing {
        channel: u32,
        frames: Vec<Frame>,
        next: usize,
    },
    Tracing(Box<Trace>),
    Watching(Events),
    /// Nothing comes after what is pending.
    Closing,
}

/// What happened to states, and was not put into an answer yet.
#[derive(Debug, Default)]
struct Events {
    waiting: VecDeque<Arc<[Event]>>,
    /// How many events these are.
    count: usize,
    /// So many the client was too slow for.
    missed: u64,
    /// So many have found no room before they came here.
    lost: u64,
}

#[derive(Debug)]
struct Trace {
    source: TraceSource,
    blocks: Blocks,
    left: u64,
    packets: u64,
    /// Losses that were told.
    told: u64,
    /// Of the last packet.
    time: u64,
}

impl Session {
    /// A client that connects at `now` (nanoseconds of a clock that does not go back).
    pub fn new(now: u64) -> Self {
        let (input, output) = (Vec::new(), Vec::new());
        Self { input, output, taken: 0, state: State::Idle, active: now, ended: false }
    }

    /// Bytes have come.
    pub fn handle_bytes(&mut self, bytes: &[u8], now: u64) {
        // It waits for an answer, or listens: what it says meanwhile is not kept without bound.
        let room = (REQUEST_MAX + 4).saturating_sub(self.input.len());
        self.input.extend(&bytes[..bytes.len().min(room)]);
        if matches!(self.state, State::Idle) {
            self.active = now;
        }
    }

    /// Bytes that [`handle_bytes`](Self::handle_bytes) has room for.
    pub fn wants(&self) -> usize {
        match self.state {
            State::Closing => 0,
            _ if self.ended => 0,
            _ => (REQUEST_MAX + 4).saturating_sub(self.input.len()),
        }
    }

    /// No more bytes will come. What was asked is still answered.
    pub fn handle_end(&mut self) {
        self.ended = true;
    }

    /// What the client asks; a reply of the engine or [`refuse`](Self::refuse) ends it.
    pub fn poll_request(&mut self, now: u64) -> Option<Request> {
        if !matches!(self.state, State::Idle) || !self.pending().is_empty() {
            return None;
        }
        let Some((length, rest)) = self.input.split_first_chunk::<4>() else {
            if self.ended {
                self.state = State::Closing;
            }
            return None;
        };
        let length = u32::from_le_bytes(*length) as usize;
        if length > REQUEST_MAX {
            // Where the next request begins is not known any more.
            self.refuse(
                Code::TooLong,
                format!(
                    "a request has at most {REQUEST_MAX} bytes, this one {length}; ask for less at a time, or write it into \
                     the rule file and reload that"
                ),
            );
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
        self.input.drain(..4 + length);
        self.active = now;
        match request {
            Ok(request) => {
                self.state = State::Asked;
                Some(request)
            }
            Err((code, message)) => {
                self.refuse(code, message);
                None
            }
        }
    }

    /// The engine's reply to `request`; `source` is where a trace's packets come from.
    pub(super) fn handle_reply(
        &mut self,
        request: &Request,
        reply: Response,
        source: Option<TraceSource>,
        now: u64,
    ) {
        self.active = now;
        self.state = State::Idle;
        match (request, reply, source) {
            (Request::ShowRings, Response::Rings(rings), _) => self.answer(&Answer::Rings { rings }),
            (Request::ShowMux, Response::Mux(Some(mux)), _) => self.answer(&Answer::Mux { mux }),
            (Request::ShowMux, Response::Mux(None), _) => {
                self.refuse(Code::NoMux, "this engine has no multiplexor; `towpath mux` has one".to_owned());
            }
            (Request::ShowSend, Response::Send(Some(send)), _) => self.answer(&Answer::Send { send }),
            (Request::ShowSend, Response::Send(None), _) => {
                let why =
                    "this engine has no multiplexor, and sends no messages; `towpath mux` does".to_owned();
                self.refuse(Code::NotFound, why);
            }
            (Request::ShowQueues, Response::Queues(queues), _) => self.answer(&Answer::Queues { queues }),
            (Request::ShowStats, Response::Stats(stats), _) => self.answer(&Answer::Stats { stats }),
            (Request::ShowPorts, Response::Ports(Some(ports)), _) => self.answer(&Answer::Ports { ports }),
            (Request::ShowPorts, Response::Ports(None), _) => {
                self.refuse(Code::NotFound, "this engine has no live ports".to_owned());
            }
            (&Request::ShowFrames { channel }, Response::Frames(frames), _) => {
                self.state = State::Listing { channel, frames, next: 0 };
            }
            (
                &(Request::Trace { count, .. } | Request::Follow { count, .. }),
                Response::Tracing(ports),
                Some(source),
            ) => {
                let channel = if let Request::Trace { channel, .. } = request { *channel } else { 0 };
                self.answer(&Answer::Tracing { channel });
                let mut blocks = Blocks::new();
                let mut section = Vec::new();
                blocks.section(&mut section).expect("a Vec takes everything");
                for (number, name) in (0..).zip(ports) {
                    blocks.name(number, name);
                }
                self.output.extend(frame(PCAPNG, &section));
                let left = count.unwrap_or(u64::MAX);
                self.state =
                    State::Tracing(Box::new(Trace { source, blocks, left, packets: 0, told: 0, time: 0 }));
            }
            (Request::ShowFrames { channel } | Request::Trace { channel, .. }, Response::NoChannel, _) => {
                self.refuse(
                    Code::NoChannel,
                    format!(
                        "there is no channel {channel}, or it has ended; `towpath ctl show rings` lists them"
                    ),
                );
            }
            (Request::Follow { .. }, Response::NoChannel, _) => {
                self.refuse(
                    Code::Busy,
                    "packets are followed eight times already, or there are none".to_owned(),
                );
            }
            (request, ..) => self.refuse(Code::Busy, format!("no reply to {request:?}")),
        }
    }

    /// An answer that needed no engine.
    pub(super) fn handle_answer(&mut self, answer: &Answer, now: u64) {
        self.active = now;
        self.state = State::Idle;
        self.answer(answer);
    }

    /// The request is not granted.
    pub fn refuse(&mut self, code: Code, message: String) {
        if !matches!(self.state, State::Closing) {
            self.state = State::Idle;
        }
        self.answer(&Answer::Error { code, message });
    }

    /// Nothing more is said after what is pending, and what there is room for of the events that wait.
    pub fn close(&mut self) {
        if self.is_watching() {
            self.poll_output();
        }
        self.state = State::Closing;
    }

    /// What is there for the client to take: [`handle_taken`](Self::handle_taken) says how much it took.
    pub fn poll_output(&mut self) -> &[u8] {
        while self.output.len() - self.taken < PENDING && self.produce() {}
        self.pending()
    }

    /// The client took `bytes` bytes.
    pub fn handle_taken(&mut self, bytes: usize, now: u64) {
        self.taken += bytes;
        self.active = now;
        if self.taken == self.output.len() {
            self.output.clear();
            self.taken = 0;
        } else if self.taken >= PENDING {
            self.output.drain(..self.taken);
            self.taken = 0;
        }
    }

    /// Whether [`poll_request`](Self::poll_request) has something to do.
    pub fn is_ready(&self) -> bool {
        let idle = matches!(self.state, State::Idle) && self.pending().is_empty();
        let whole = || {
            let (length, rest) = self.input.split_first_chunk::<4>()?;
            let length = u32::from_le_bytes(*length) as usize;
            Some(length > REQUEST_MAX || rest.len() >= length)
        };
        idle && (self.ended || whole().unwrap_or(false))
    }

    /// The client is gone, or has got all that there is.
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Closing) && self.pending().is_empty()
    }

    /// Whether a trace is under way, which comes without being asked for.
    pub fn is_tracing(&self) -> bool {
        matches!(self.state, State::Tracing(_) | State::Watching(_))
    }

    /// Whether it gets events.
    pub fn is_watching(&self) -> bool {
        matches!(self.state, State::Watching(_))
    }

    /// It gets events from now on.
    pub(super) fn watch(&mut self, now: u64) {
        self.active = now;
        self.answer(&Answer::Watching {});
        self.state = State::Watching(Events::default());
    }

    /// Events have happened; `lost` others have found no room before they came here. Who is too slow misses some.
    pub(super) fn handle_events(&mut self, events: &Arc<[Event]>, lost: u64) {
        let State::Watching(watched) = &mut self.state else { return };
        watched.lost = lost;
        if watched.count + events.len() > EVENTS {
            watched.missed += events.len() as u64;
            return;
        }
        watched.count += events.len();
        watched.waiting.push_back(Arc::clone(events));
    }

    /// Whether the engine was asked.
    pub fn is_waiting(&self) -> bool {
        matches!(self.state, State::Asked)
    }

    /// When [`handle_timeout`](Self::handle_timeout) has something to do.
    pub fn poll_timeout(&self) -> Option<u64> {
        let period = match self.state {
            _ if !self.pending().is_empty() => SLOW,
            State::Asked => PATIENCE,
            State::Idle => IDLE,
            _ => return None,
        };
        Some(self.active + period)
    }

    /// It is `now`. True when the client is to be cut off because it takes too long.
    pub fn handle_timeout(&mut self, now: u64) -> bool {
        if self.poll_timeout().is_none_or(|due| now < due) {
            return false;
        }
        if matches!(self.state, State::Asked) && self.pending().is_empty() {
            self.active = now;
            self.refuse(
                Code::Busy,
                "the engine did not answer in time; it may be reading a slow capture".into(),
            );
            return false;
        }
        true
    }

    fn pending(&self) -> &[u8] {
        &self.output[self.taken..]
    }

    fn answer(&mut self, answer: &Answer) {
        self.output.extend(emit(answer));
    }

    /// Makes the next part of an answer, if there is one.
    fn produce(&mut self) -> bool {
        match &mut self.state {
            State::Idle | State::Asked | State::Closing => false,
            State::Watching(events) => {
                let Some(part) = events.waiting.pop_front() else { return false };
                events.count -= part.len();
                let lost = events.lost + events.missed;
                self.answer(&Answer::Events { events: part.to_vec(), lost });
                true
            }
            State::Listing { channel, frames, next } => {
                let end = frames.len().min(*next + FRAMES);
                let more = end < frames.len();
                let part = frames[*next..end].to_vec();
                let answer = Answer::Frames { channel: *channel, frames: part, more };
                *next = end;
                if !more {
                    self.state = State::Idle;
                }
                self.answer(&answer);
                more
            }
            State::Tracing(trace) => {
                let (more, end) = trace.produce(&mut self.output);
                if let Some(why) = end {
                    let dropped = trace.dropped();
                    let answer = Answer::Traced { packets: trace.packets, dropped, why };
                    self.state = State::Idle;
                    self.answer(&answer);
                }
                more
            }
        }
    }
}

impl Trace {
    /// Writes the next packet, if there is one; whether there may be more, and whether this was the end.
    fn produce(&mut self, output: &mut Vec<u8>) -> (bool, Option<End>) {
        if self.left == 0 {
            self.statistics(output);
            return (false, Some(End::Count));
        }
        match self.source.ready.try_recv() {
            Ok(traced) => {
                self.packet(output, &traced);
                (true, None)
            }
            Err(TryRecvError::Empty) => {
                if self.dropped() > self.told {
                    self.statistics(output);
                }
                (false, None)
            }
            Err(TryRecvError::Disconnected) => {
                self.statistics(output);
                (false, Some(End::Channel))
            }
        }
    }

    fn packet(&mut self, output: &mut Vec<u8>, traced: &TraceRecord) {
        let dropped = self.dropped();
        let frame = towpath_port::Frame {
            bytes: &traced.bytes,
            wire_len: traced.wire_len,
            time_ns: traced.time,
            link: LinkType(traced.link),
            interface: traced.port,
            meta: Default::default(),
        };
        let options = Options {
            comment: Some(&comment(traced)),
            flags: Some(INBOUND),
            dropped: (dropped > self.told).then(|| dropped - self.told),
        };
        let mut block = Vec::with_capacity(traced.bytes.len() + 256);
        self.blocks.packet(&mut block, frame, &options).expect("a Vec takes everything");
        output.extend(super::protocol::frame(PCAPNG, &block));
        self.told = dropped;
        self.time = traced.time;
        self.packets += 1;
        self.left -= 1;
    }

    fn statistics(&mut self, output: &mut Vec<u8>) {
        let dropped = self.dropped();
        let mut blocks = Vec::new();
        let received = self.packets + dropped;
        self.blocks.statistics(&mut blocks, self.time, received, dropped).expect("a Vec takes everything");
        if !blocks.is_empty() {
            output.extend(frame(PCAPNG, &blocks));
        }
        self.told = dropped;
    }

    fn dropped(&self) -> u64 {
        // Relaxed: a statistic, which orders nothing.
        self.source.dropped.load(Ordering::Relaxed)
    }
}

/// What Wireshark shows beside the packet.
fn comment(traced: &TraceRecord) -> String {
    let TraceRecord { seq, queue, after, note, .. } = traced;
    let mut text = match note {
        TraceOutcome::Decided { rule: Some(rule), what } => return format!("rule {rule}: {what}"),
        TraceOutcome::Decided { rule: None, what } => return what.clone(),
        TraceOutcome::Verdict { verdict, .. } => format!("queue {queue}, seq {seq}: {verdict}"),
        TraceOutcome::Lost(reason) => format!("queue {queue}, seq {seq}: no verdict, {reason}"),
    };
    if let TraceOutcome::Verdict { mark: (mark, mask), flow, .. } = note {
        if *mask != 0 {
            text += &format!(", mark {mark:#x}/{mask:#x}");
        }
        if *flow {
            text += ", for the flow from now on";
        }
    }
    text += &format!(", after {}.{:03} us", after / 1000, after % 1000);
    text
}

#[cfg(test)]
mod tests {
    use towpath_engine::DropReason;
    use towpath_ring::{Meta, Seq};

    use super::super::protocol::{Kind, State as FrameState, parse_answer};
    use super::super::trace::TraceBuffer;
    use super::*;

    fn ask(session: &mut Session, request: Request) {
        session.handle_bytes(&emit(&request), 0);
        assert_eq!(session.poll_request(0), Some(request));
    }

    /// Takes everything; the JSON answers, and the blocks of captures in one.
    fn take(session: &mut Session) -> (Vec<Answer>, Vec<u8>) {
        let mut stream = Vec::new();
        loop {
            let bytes = session.poll_output().to_vec();
            if bytes.is_empty() {
                break;
            }
            // A byte at a time would be slow; an odd number is as good.
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

    #[test]
    fn events_wait_until_they_are_taken() {
        let mut session = Session::new(0);
        ask(&mut session, Request::Events);
        session.watch(0);
        let event = Event { at: 1, what: "expired".to_owned(), state: None };
        let part: Arc<[Event]> = vec![event; 500].into();
        // 131 of them fit.
        (0..140).for_each(|_| session.handle_events(&part, 3));
        let (answers, _) = take(&mut session);
        let told = |answer: &Answer| match answer {
            Answer::Events { events, lost } => (events.len(), *lost),
            _ => (0, 0),
        };
        assert_eq!(answers.iter().map(|answer| told(answer).0).sum::<usize>(), 131 * 500);
        assert_eq!(answers.last().map(told), Some((500, 9 * 500 + 3)));
        session.handle_events(&part, 3);
        assert_eq!(take(&mut session).0.iter().map(told).collect::<Vec<_>>(), [(500, 9 * 500 + 3)]);
    }

    #[test]
    fn a_request_may_come_in_pieces_and_several_at_once() {
        let mut session = Session::new(0);
        let message = emit(&Request::ShowRings);
        for &byte in &message[..message.len() - 1] {
            session.handle_bytes(&[byte], 0);
            assert_eq!(session.poll_request(0), None);
        }
        session.handle_bytes(&message[message.len() - 1..], 0);
        session.handle_bytes(&message, 0);
        assert!(session.is_ready());
        assert_eq!(session.poll_request(0), Some(Request::ShowRings));
        assert!(!session.is_ready());
        assert_eq!(session.poll_request(0), None, "one at a time");
        session.handle_reply(&Request::ShowRings, Response::Rings(Vec::new()), None, 0);
        assert_eq!(session.poll_request(0), None, "the answer was not taken");
        assert_eq!(take(&mut session).0, [Answer::Rings { rings: Vec::new() }]);
        assert_eq!(session.poll_request(0), Some(Request::ShowRings));
        session.handle_end();
        session.handle_reply(&Request::ShowRings, Response::Rings(Vec::new()), None, 0);
        assert_eq!(take(&mut session).0.len(), 1);
        assert_eq!(session.poll_request(0), None);
        assert!(session.is_over());
    }

    #[test]
    fn garbage_is_answered_and_a_length_that_is_too_long_ends_it() {
        let mut session = Session::new(0);
        session.handle_bytes(&frame(1, b"{]"), 0);
        assert_eq!(session.poll_request(0), None);
        assert!(matches!(&take(&mut session).0[..], [Answer::Error { code: Code::Request, .. }]));
        session.handle_bytes(b"GET / HTTP/1.0\r\n\r\n", 0);
        assert_eq!(session.poll_request(0), None);
        assert!(matches!(&take(&mut session).0[..], [Answer::Error { code: Code::TooLong, .. }]));
        assert!(session.is_over());
        // However much is said, not more than a request is kept.
        let mut session = Session::new(0);
        session.handle_bytes(&vec![0; 1 << 20], 0);
        assert!(session.input.len() <= REQUEST_MAX + 4);
    }

    #[test]
    fn many_frames_come_in_several_answers() {
        let mut session = Session::new(0);
        ask(&mut session, Request::ShowFrames { channel: 2 });
        let row = |seq| Frame {
            seq,
            first: seq,
            frames: 1,
            state: FrameState::Valid,
            len: Some(60),
            kind: Kind::Packet,
            age: Some(5),
        };
        let frames: Vec<_> = (0..5000).map(row).collect();
        session.handle_reply(&Request::ShowFrames { channel: 2 }, Response::Frames(frames.clone()), None, 0);
        assert!(session.poll_output().len() < 2 * PENDING);
        let (answers, _) = take(&mut session);
        let mut got: Vec<Frame> = Vec::new();
        for (index, answer) in answers.iter().enumerate() {
            let Answer::Frames { channel: 2, frames, more } = answer else { panic!("{answer:?}") };
            assert_eq!(*more, index + 1 < answers.len());
            got.extend(frames);
        }
        assert_eq!(got, frames);
    }

    #[test]
    fn a_trace_is_a_capture_and_says_what_it_lost() {
        let (mut tap, source) = TraceBuffer::new();
        let mut session = Session::new(0);
        let request = Request::Trace { channel: 1, count: Some(2) };
        ask(&mut session, request.clone());
        session.handle_reply(&request, Response::Tracing(vec!["cap0".into()]), Some(source), 0);
        assert!(session.is_tracing());
        let meta = Meta {
            wire_len: 100,
            time: 77,
            group: 3,
            layers: towpath_ring::Layers { link: 1, ..Default::default() },
            ..Meta::default()
        };
        for seq in 1..=3 {
            tap.given(Seq(seq), &[seq as u8; 60], &meta);
        }
        tap.decided(Seq(2), 2500, || TraceOutcome::Verdict {
            verdict: "drop".into(),
            mark: (1, 3),
            flow: true,
        });
        tap.decided(Seq(1), 3000, || TraceOutcome::Lost(DropReason::Overdue));
        tap.decided(Seq(3), 3000, || TraceOutcome::Lost(DropReason::InvalidVerdict));
        let (answers, capture) = take(&mut session);
        assert_eq!(
            answers,
            [Answer::Tracing { channel: 1 }, Answer::Traced { packets: 2, dropped: 0, why: End::Count }]
        );
        let text = String::from_utf8_lossy(&capture);
        assert!(
            text.contains("queue 3, seq 2: drop, mark 0x1/0x3, for the flow from now on, after 2.500 us")
        );
        assert!(text.contains("queue 3, seq 1: no verdict, overdue, after 3.000 us"));
        assert!(text.contains("cap0"));
        assert!(!session.is_tracing());
        tap.decided(Seq(3), 0, || TraceOutcome::Lost(DropReason::InspectorDied));
    }

    #[test]
    fn a_trace_ends_with_its_channel() {
        let (tap, source) = TraceBuffer::new();
        let mut session = Session::new(0);
        let request = Request::Trace { channel: 1, count: None };
        ask(&mut session, request.clone());
        session.handle_reply(&request, Response::Tracing(Vec::new()), Some(source), 0);
        drop(tap);
        let (answers, _) = take(&mut session);
        assert_eq!(answers[1], Answer::Traced { packets: 0, dropped: 0, why: End::Channel });
    }

    #[test]
    fn who_takes_nothing_or_says_nothing_is_cut_off() {
        let mut session = Session::new(0);
        assert_eq!(session.poll_timeout(), Some(IDLE));
        ask(&mut session, Request::ShowRings);
        assert_eq!(session.poll_timeout(), Some(PATIENCE));
        assert!(!session.handle_timeout(PATIENCE), "it is the engine that is slow");
        assert_eq!(session.poll_timeout(), Some(PATIENCE + SLOW));
        assert!(!session.handle_timeout(PATIENCE + SLOW - 1));
        assert!(session.handle_timeout(PATIENCE + SLOW));
        assert!(matches!(&take(&mut session).0[..], [Answer::Error { code: Code::Busy, .. }]));
    }
}
