//! Dumps of states, changes of states and logged packets through a ring, without stopping the packet path and without copying through a
//! socket.
//!
//! A dedicated thread serves a ring listener next to the control socket. A client attaches and sends [`Kind::REQUEST`] with group
//! [`STATES`]. The reply is frames of [`Kind::DUMP`], each with one line of JSON, `{"next":CURSOR,"states":[STATE...]}`, followed by a
//! frame of [`Kind::DONE`]. The request's payload is empty, or the CURSOR to continue at (8 bytes, little-endian), so that an
//! interrupted client can resume; a filter as JSON (the members of `filter` of `show-states`) may follow it. No state is sent twice. A state that exists during the whole dump is not missed.
//!
//! With group [`group::EVENTS`] or [`group::PACKETS`], the reply is a frame of [`Kind::DONE`]; then each change, or each logged packet, is a
//! frame. All clients share one reader of the journal ([`StateFeed`]). A frame for which a client's ring has no room, and a change that the
//! thread has missed, is a loss record in the ring. `subscription.rs` has the requests.
//!
//! The gate is locked for one page (64 states) at a time. A client that does not read blocks half of its own ring and nothing else. A
//! client that requests nothing, or reads nothing of its frames, is detached after 60 s.

use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde_json::json;
use towpath_gate::state::EventKind;
use towpath_gate::state::{Cursor, Listed};
use towpath_ring::{
    Allow, Channel, Config, Endpoint, Kind, Loss, Meta, Progress, Quota, SocketFile, Source, group,
};
use towpath_wire::Time;

use super::accept_backoff::AcceptBackoff;
use super::accept_pace::AcceptPace;
use super::commands::show_rings::Ring;
use super::commands::show_states::State;
use super::endpoints::EndpointCounters;
use super::logged_packets::LoggedPackets;
use super::state_filter::{StateFilter, StateMatch};
use super::subscription::{EventFilter, PacketFilter, send_event};
use crate::config::Control;
use crate::eventfd::EventFd;
use crate::events::line;
use crate::process::Identity;
use crate::ruleset_manager::RulesetManager;
use crate::state_feed::{Change, StateFeed, TICK};

/// The group of a request for states.
pub const STATES: u32 = group::STATES;

/// Changes and packets in one turn.
const TURN: usize = 4096;

/// States per frame.
const PAGE: usize = 64;

/// Maximum number of clients. Further ones are refused.
const CLIENTS: usize = 16;
/// Maximum number of clients of one user.
const CLIENTS_OF_USER: usize = 8;

/// Nanoseconds after which a client that has requested no dump, or reads nothing of it, is detached.
const IDLE: u64 = 60_000_000_000;

/// Maximum number of clients to accept before the attached ones are served again.
const WELCOMES: usize = 8;

/// Maximum sleep of the thread.
const LOOK: Duration = Duration::from_secs(1);

/// errno(3) values in error frames: ENOENT: unknown group; EINVAL: the payload is not a cursor and a filter; ERANGE: the cursor is beyond
/// the end.
const ENOENT: u32 = 2;
const EINVAL: u32 = 22;
pub(super) const ERANGE: u32 = 34;

/// The listener and its thread. Dropping it stops the thread.
pub struct Dumps {
    /// Dropped before the listener, by which the file is identified.
    file: SocketFile,
    listener: OwnedFd,
    over: Arc<AtomicBool>,
    bell: EventFd,
    thread: Option<JoinHandle<()>>,
}

/// The ring before its thread starts. Clients wait.
pub struct Listening {
    endpoint: Endpoint,
    path: PathBuf,
}

/// Returns the path of the ring next to a control socket.
pub fn path(control: &Path) -> PathBuf {
    let mut path = control.as_os_str().to_owned();
    path.push(".ring");
    path.into()
}

impl Dumps {
    /// Listens next to the control socket, with its owner, group and mode. Root, the engine's user (`identity`, or that of this process)
    /// and `owner` may attach.
    ///
    /// # Errors
    /// The ring cannot be created.
    pub fn bind(control: &Control, identity: Option<Identity>) -> io::Result<Listening> {
        let path = path(&control.socket);
        let endpoint = Endpoint::bind(&path, config(control, identity)).map_err(io::Error::other)?;
        let owner = control.owner.or(identity.map(|identity| identity.user));
        let group = control.group.or(identity.map(|identity| identity.group));
        endpoint.set_access(owner, group, Some(control.mode))?;
        Ok(Listening { endpoint, path })
    }

    /// The socket of the process that this one replaces, which has passed its listener. The file belongs to that process until
    /// [`own_file`](Self::own_file).
    ///
    /// # Errors
    ///
    /// It is not a socket.
    pub fn adopt(control: &Control, identity: Option<Identity>, listener: OwnedFd) -> io::Result<Listening> {
        let path = path(&control.socket);
        let endpoint = Endpoint::on(listener, &path, config(control, identity)).map_err(io::Error::other)?;
        Ok(Listening { endpoint, path })
    }

    /// The listening socket for another process, and the identity of its file.
    ///
    /// # Errors
    ///
    /// The process has no free descriptor.
    pub fn listener(&self) -> io::Result<(OwnedFd, Option<(u64, u64)>)> {
        Ok((self.listener.try_clone()?, self.file.identity()))
    }

    /// The file belongs to another process from here on.
    pub fn give_up_file(&mut self) {
        self.file.give_up();
    }

    /// The file belongs to this process from here on.
    pub fn own_file(&mut self, identity: Option<(u64, u64)>) {
        self.file.own(identity);
    }
}

fn config(control: &Control, identity: Option<Identity>) -> Config {
    let mut users = vec![Identity::engine_user(identity), 0];
    users.extend(control.owner);
    users.sort_unstable();
    users.dedup();
    Config {
        allow: Allow::Users(users),
        deadline: None,
        messages: true,
        huge_pages: false,
        violations_max: 0,
        quota: Quota { channels: CLIENTS, channels_per_user: CLIENTS_OF_USER, ..Quota::default() },
        ..Config::default()
    }
}

impl Listening {
    /// Starts the thread, which puts its rings into `shown`.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn start(
        self,
        book: Arc<RulesetManager>,
        shown: EndpointCounters,
        packets: LoggedPackets,
    ) -> io::Result<Dumps> {
        let Self { mut endpoint, path } = self;
        let (listener, identity) = endpoint.listener()?;
        endpoint.give_up_file();
        let file = SocketFile::adopt(&path, identity);
        let (over, bell) = (Arc::new(AtomicBool::new(false)), EventFd::new()?);
        let (clients, pause) = (Vec::new(), AcceptBackoff::of(path.display()));
        let pace = AcceptPace::default();
        let (start, connecting) = (Instant::now(), true);
        let mut house = ServerState {
            endpoint,
            pause,
            pace,
            connecting,
            clients,
            book,
            start,
            shown,
            feed: None,
            packets,
            line: Vec::new(),
        };
        let (ended, rung) = (Arc::clone(&over), bell.clone());
        let run = move || {
            crate::background::begin_as(crate::sandbox::Role::Dumps);
            // Acquire: pairs with the release in `drop`.
            while !ended.load(Ordering::Acquire) {
                house.turn(&rung);
            }
        };
        let thread = std::thread::Builder::new().name("dumps".into()).spawn(run)?;
        Ok(Dumps { file, listener, over, bell, thread: Some(thread) })
    }
}

impl Drop for Dumps {
    fn drop(&mut self) {
        // Release: pairs with the acquire in the thread.
        self.over.store(true, Ordering::Release);
        self.bell.signal();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct ServerState {
    endpoint: Endpoint,
    pause: AcceptBackoff,
    pace: AcceptPace,
    /// The endpoint may be readable.
    connecting: bool,
    clients: Vec<Client>,
    book: Arc<RulesetManager>,
    start: Instant,
    shown: EndpointCounters,
    /// Reads the changes of states while a client follows them.
    feed: Option<StateFeed>,
    packets: LoggedPackets,
    line: Vec<u8>,
}

struct Client {
    channel: Channel,
    states: Option<States>,
    events: Option<EventFilter>,
    packets: Option<PacketFilter>,
    activity: Activity,
}

/// The last progress of a client.
#[derive(Clone, Copy, Debug)]
struct Activity {
    /// Frames published to it and decided by it.
    frames: (u64, u64),
    at: u64,
}

impl Activity {
    /// Takes the counters at `now`. Returns true if the client has made no progress for [`IDLE`].
    fn is_over(&mut self, frames: (u64, u64), now: u64) -> bool {
        if frames != self.frames {
            *self = Self { frames, at: now };
        }
        now >= self.at + IDLE
    }
}

impl ServerState {
    fn now(&self) -> u64 {
        u64::try_from(self.start.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Accepts clients.
    fn accept(&mut self) {
        if !std::mem::take(&mut self.connecting) {
            return;
        }
        let begun = Instant::now();
        for _ in 0..WELCOMES {
            if self.pause.is_on() || AcceptPace::is_over(begun, Instant::now()) {
                break;
            }
            match self.endpoint.accept() {
                Ok(Some(channel)) => {
                    let activity = Activity { frames: (0, 0), at: self.now() };
                    self.clients.push(Client {
                        channel,
                        states: None,
                        events: None,
                        packets: None,
                        activity,
                    });
                }
                Ok(None) => break,
                Err(error) => self.pause.begin(&error),
            }
        }
        self.pace.pause(begun, Instant::now());
    }

    /// Sends changes and packets to the clients that follow them. Returns true if there are more.
    fn publish(&mut self) -> bool {
        let Self { clients, feed, packets, line, book, .. } = self;
        let clock = book.clock();
        let each = |clients: &mut Vec<Client>, line: &[u8], at: Time, kind: EventKind| {
            let takes = |client: &&mut Client| client.events.is_some_and(|filter| filter.takes(kind));
            clients.iter_mut().filter(takes).for_each(|client| send_event(line, at, &mut client.channel));
        };
        let mut more = false;
        if let Some(feed) = feed {
            more |= feed.read(TURN, |change| {
                line.clear();
                match change {
                    Change::State(record) => {
                        let wanted =
                            |client: &Client| client.events.is_some_and(|filter| filter.takes_record(record));
                        if let Some(kind) = record.kind.filter(|_| clients.iter().any(wanted)) {
                            let at = clock.wall(record.at);
                            line::state(record, at, line);
                            each(clients, line, at, kind);
                        }
                    }
                    Change::Table(kind, at) => {
                        let at = clock.wall(at);
                        line::table(kind, at, line);
                        each(clients, line, at, kind);
                    }
                    Change::Gap(changes) => {
                        let following = clients.iter_mut().filter(|client| client.events.is_some());
                        following.for_each(|client| client.channel.lose_many(Loss::Overwritten, changes));
                    }
                }
            });
        }
        let following = |client: &&mut Client| client.packets.is_some();
        for taken in 1.. {
            let Some(packet) = packets.take() else { break };
            let wall = clock.wall(packet.time);
            for client in clients.iter_mut() {
                if let Some(filter) = &mut client.packets {
                    filter.send(&packet, wall, &mut client.channel);
                }
            }
            if taken == TURN {
                more = true;
                break;
            }
        }
        let lost = packets.take_lost();
        if lost > 0 {
            let following = clients.iter_mut().filter(following);
            following.for_each(|client| client.channel.lose_many(Loss::Limited, lost));
        }
        clients.iter_mut().filter(|client| client.follows()).for_each(|client| client.channel.kick());
        more
    }

    /// Stops reading what no client follows.
    fn end_unfollowed(&mut self) {
        if self.clients.iter().all(|client| client.events.is_none()) {
            self.feed = None;
        }
        let ranges = self.clients.iter().filter_map(|client| client.packets.as_ref());
        self.packets.want(ranges.map(|filter| filter.copy_range).max().unwrap_or(0));
    }

    fn turn(&mut self, bell: &EventFd) {
        self.accept();
        let now = self.now();
        for client in &mut self.clients {
            client.turn(&self.book, &mut self.feed, now);
        }
        let more = self.publish();
        self.clients.retain_mut(|client| {
            let stats = client.channel.stats();
            // A client that follows something waits for the engine.
            let waits = client.follows() && stats.published == stats.decided;
            if waits {
                client.activity.at = now;
            }
            let idle = client.activity.is_over((stats.published, stats.decided), now);
            if idle {
                let towpath_ring::Credentials { pid, uid, .. } = client.channel.peer();
                tracing::warn!(peer = uid, "dumps: detached process {pid} of user {uid}: idle for 60 s");
            }
            !idle && client.channel.check_peer() && !client.channel.is_dead()
        });
        self.shown.set_dumps(self.clients.iter().map(|client| Ring::of_dump(&client.channel)).collect());
        // `count` arms all channels; `any` would stop at the first busy one.
        let busy =
            self.clients.iter_mut().filter_map(|client| (!client.channel.arm()).then_some(())).count() > 0;
        self.end_unfollowed();
        let left = self.pace.left(Instant::now());
        let open = !self.pause.is_on() && left.is_zero();
        self.connecting = open;
        if !busy && !more {
            let mut fds = vec![PollFd::new(bell, PollFlags::IN)];
            if open {
                fds.push(PollFd::new(&self.endpoint, PollFlags::IN));
            }
            fds.extend(self.clients.iter().map(|client| PollFd::new(&client.channel, PollFlags::IN)));
            let look = if self.clients.iter().any(Client::follows) { TICK } else { LOOK };
            let sleep = if left.is_zero() { look } else { left.min(look) };
            let timeout = Timespec { tv_sec: sleep.as_secs() as i64, tv_nsec: sleep.subsec_nanos().into() };
            // The next turn checks all other sources.
            let _ = poll(&mut fds, Some(&timeout));
            self.connecting = open && !fds[1].revents().is_empty();
        }
        self.clients.iter_mut().for_each(|client| client.channel.disarm());
        bell.clear();
    }
}

/// A request, as far as it is valid.
enum Request {
    States(Cursor, StateMatch),
    Events(EventFilter),
    Packets(PacketFilter),
}

impl Request {
    /// # Errors
    /// The errno for the client.
    fn read(group: u32, payload: &[u8]) -> Result<Self, u32> {
        let request = match group {
            group::STATES => read_request(payload).map(|(from, filter)| Self::States(from, filter)),
            group::EVENTS => EventFilter::read(payload).map(Self::Events),
            group::PACKETS => PacketFilter::read(payload).map(Self::Packets),
            _ => return Err(ENOENT),
        };
        request.ok_or(EINVAL)
    }
}

impl Client {
    /// Returns true if it follows events or packets.
    fn follows(&self) -> bool {
        self.events.is_some() || self.packets.is_some()
    }

    fn turn(&mut self, book: &Arc<RulesetManager>, feed: &mut Option<StateFeed>, now: u64) {
        let Self { channel, states, events, packets, .. } = self;
        let mut asked = Vec::new();
        channel.poll_messages(|header, payload| {
            if header.kind == Kind::REQUEST {
                asked.push((header.group, Request::read(header.group, payload)));
            }
        });
        for (group, request) in asked {
            let error = match request {
                Ok(Request::States(from, _)) if !book.has_position(from) => ERANGE,
                Ok(Request::States(from, filter)) => match channel.begin_dump(group) {
                    Ok(()) => {
                        *states = Some(States { book: Arc::clone(book), next: Some(from), filter });
                        continue;
                    }
                    // `begin_dump` has sent EBUSY to the client.
                    Err(_) => continue,
                },
                Ok(Request::Events(filter)) => {
                    // Before the answer: the client gets every change from then on.
                    feed.get_or_insert_with(|| StateFeed::new(book));
                    *events = Some(filter);
                    0
                }
                Ok(Request::Packets(filter)) => {
                    *packets = Some(filter);
                    0
                }
                Err(error) => error,
            };
            if error == 0 {
                let meta = Meta { kind: Kind::DONE, group, ..Meta::default() };
                if channel.send(&[], &meta).is_err() {
                    channel.lose(Loss::NoRoom);
                }
                continue;
            }
            let meta = Meta { kind: Kind::ERROR, group, mark: error, ..Meta::default() };
            // An error frame is lost if the client's ring is full.
            let _ = channel.send(&[], &meta);
        }
        channel.poll_verdicts(now, |_, _| {});
        if let Some(source) = states
            && channel.dump(source) != Progress::Running
        {
            *states = None;
        }
        channel.kick();
    }
}

/// Reads a request: nothing, or a cursor, or a cursor and a filter.
fn read_request(payload: &[u8]) -> Option<(Cursor, StateMatch)> {
    let (cursor, filter) = match payload.split_first_chunk() {
        Some((cursor, filter)) => (u64::from_le_bytes(*cursor), filter),
        None if payload.is_empty() => (0, payload),
        None => return None,
    };
    let filter: StateFilter = match filter {
        [] => StateFilter::default(),
        filter => serde_json::from_slice(filter).ok()?,
    };
    Some((Cursor::from_bits(cursor), filter.compile().ok()?))
}

/// The payload of a request for the states from `cursor` on that match the filter.
pub fn request(cursor: u64, filter: &StateFilter) -> Vec<u8> {
    let mut payload =
        if cursor == 0 && filter.is_empty() { Vec::new() } else { cursor.to_le_bytes().to_vec() };
    if !filter.is_empty() {
        payload.extend(serde_json::to_vec(filter).expect("strings and numbers serialise"));
    }
    payload
}

/// The states from a cursor on.
struct States {
    book: Arc<RulesetManager>,
    next: Option<Cursor>,
    filter: StateMatch,
}

impl Source for States {
    fn next(&mut self, into: &mut Vec<u8>) -> bool {
        let Some(from) = self.next.take() else { return false };
        let wanted = |state: &Listed, rule, name: &str| self.filter.takes(state, rule, name);
        let (lines, next) = self.book.states_where(from, PAGE, false, wanted);
        self.next = next;
        let states: Vec<State> = lines.into_iter().map(State::from).collect();
        let page = json!({ "next": next.map(Cursor::to_bits), "states": states });
        writeln!(into, "{page}").expect("a Vec takes everything");
        true
    }

    /// The version of the rules, whose numbers appear in the dump. Changes of states do not count.
    fn generation(&self) -> u64 {
        self.book.version()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_a_cursor_and_a_filter() {
        let filter: StateFilter = serde_json::from_value(json!({ "port": 22 })).unwrap();
        for (cursor, filter) in
            [(0, StateFilter::default()), (7, StateFilter::default()), (7, filter.clone()), (0, filter)]
        {
            let payload = request(cursor, &filter);
            let (read, _) = read_request(&payload).unwrap();
            assert_eq!((read.to_bits(), payload.len() > 8), (cursor, !filter.is_empty()));
        }
        for payload in
            [&b"1234567"[..], b"12345678{", b"12345678{\"prot\":1}", b"12345678{\"address\":\"x\"}"]
        {
            assert!(read_request(payload).is_none(), "{payload:?}");
        }
    }

    #[test]
    fn a_client_without_progress_is_detached() {
        let mut activity = Activity { frames: (0, 0), at: 5 };
        assert!(!activity.is_over((0, 0), 5 + IDLE - 1));
        // A frame was published, and later decided.
        assert!(!activity.is_over((1, 0), IDLE));
        assert!(!activity.is_over((1, 1), 2 * IDLE - 1));
        assert!(!activity.is_over((1, 1), 3 * IDLE - 2));
        assert!(activity.is_over((1, 1), 3 * IDLE - 1));
    }
}
