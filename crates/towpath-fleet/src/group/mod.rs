//! The configuration of a group: one version for all gates.
//!
//! What: the version is the value of the key `current` in a bucket of the bus; its number is the bucket's revision. A gate that is asked
//! for a change sends it to all gates of the group (*prepare*). Each one checks it and answers. If all gates that are in touch agree, the
//! asking gate writes the value on the condition that it has not changed meanwhile. The bucket then tells every gate, also those that
//! join later.
//!
//! Invariants: nothing is applied before the value is written, and nothing is written before every gate in touch has agreed. Of two
//! changes at the same time, one is written, because both have the same base. A gate that cannot apply the value continues with the
//! version that it has, and tells so.
//!
//! [`Group`] has no IO and no clock. Messages of other gates are untrusted; the sender's name comes from the subject.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use towpath_wire::Time;

pub use self::content::{CONTENT_MAX, Content, ContentError, Part};
use self::message::{Message, MessageError, printable};
pub use self::stats::{GroupStats, TableStats};
use crate::MAX_PEERS;
use crate::workers::is_name;

mod content;
mod message;
mod stats;
pub mod tables;
#[cfg(test)]
mod tests;

/// Interval of messages that tell the version of this gate.
const STATUS: Duration = Duration::from_secs(1);

/// A gate that was not heard for so long is not in touch, and is forgotten after the longer time.
const TOUCH: Duration = Duration::from_secs(3);
const FORGET: Duration = Duration::from_secs(600);

/// Time after the beginning of a session in which gates may be unknown.
const JOIN: Duration = Duration::from_millis(2500);

/// Longest time for the answers of all gates, and for applying a version that was written.
const ANSWERS: Duration = Duration::from_secs(10);
const APPLIED: Duration = Duration::from_secs(10);

/// Delay of a status after a new gate was heard: many new gates cause one message.
const GREETING: Duration = Duration::from_millis(50);

/// Questions that are repeated for gates that join during a check. A hostile gate could join without end.
const REPEATS: u32 = 16;

/// Messages that wait for the bus.
const OUTPUTS: usize = 256;

/// Checks for one gate in one second. A check parses a rule file.
const CHECKS: u32 = 4;

/// What a gate does with a version.
pub trait Local {
    /// Checks a version.
    ///
    /// # Errors
    /// Why this gate cannot apply it, with file and line.
    fn check(&mut self, content: &Content) -> Result<(), String>;

    /// Applies a version, all of it or nothing.
    ///
    /// # Errors
    /// Why it was not applied.
    fn apply(&mut self, version: u64, content: &Content) -> Result<(), String>;
}

/// What the group tells the bus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GroupOutput {
    /// A message for all gates.
    Publish(Vec<u8>),
    /// The value of `current`, if that still has this revision (0: no value).
    Write {
        /// The revision.
        base: u64,
        /// The value.
        content: Vec<u8>,
    },
    /// The messages of tables.
    Follow {
        /// In the stream that was made then. If there is another one, the bus tells.
        made: u64,
        /// Those after this one.
        after: u64,
        /// They come with this number: those of an earlier reading may still wait.
        epoch: u64,
    },
    /// Messages of a table.
    Entries(tables::Publication),
}

/// Why a value was not written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WriteError {
    /// The bucket has another revision.
    Changed,
    /// The server refused the value.
    Refused(String),
}

/// A gate of the group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GateVersion {
    /// Its name.
    pub gate: String,
    /// The version that it has; 0: none.
    pub version: u64,
    /// A version that it could not apply, and why.
    pub failed: Option<(u64, String)>,
    /// It was heard in the last seconds.
    pub in_touch: bool,
}

/// The result of a change: the version and what each gate has, or why nothing was applied.
pub type Outcome = Result<(u64, Vec<GateVersion>), String>;

#[derive(Debug)]
struct Member {
    incarnation: u64,
    heard: Time,
    version: u64,
    failed: Option<(u64, String)>,
    /// The second in which its last checks were, and their number.
    checks: (u64, u32),
}

/// A session with the bus.
#[derive(Debug)]
struct Session {
    since: Time,
    /// Bytes of the longest message.
    most: usize,
    /// The revision of the value (0: none), or why there is no bucket.
    bucket: Result<u64, String>,
}

/// A change that this gate was asked for.
#[derive(Debug)]
struct Apply {
    id: u64,
    base: u64,
    content: Vec<u8>,
    /// When the current step began.
    begun: Time,
    /// The gates that were in touch since it began: all of them must agree.
    asked: BTreeSet<String>,
    /// How often gates that joined made it ask again.
    repeats: u32,
    /// What the other gates answered.
    answers: BTreeMap<String, Option<String>>,
    step: Step,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Checking,
    Writing,
    Applying(u64),
}

/// See the module documentation.
#[derive(Debug)]
pub struct Group {
    gate: String,
    incarnation: u64,
    /// The version that this gate has, and its bytes.
    applied: Option<(u64, Vec<u8>)>,
    failed: Option<(u64, String)>,
    session: Option<Session>,
    members: BTreeMap<String, Member>,
    apply: Option<Apply>,
    applies: u64,
    outputs: VecDeque<GroupOutput>,
    outcome: Option<Outcome>,
    status: Time,
    stats: GroupStats,
}

impl Group {
    /// The gate with this name, which has this version. Another process of the gate has another `incarnation`.
    pub fn new(gate: &str, incarnation: u64, applied: Option<(u64, Vec<u8>)>) -> Self {
        Self {
            gate: gate.to_owned(),
            incarnation,
            applied,
            failed: None,
            session: None,
            members: BTreeMap::new(),
            apply: None,
            applies: 0,
            outputs: VecDeque::new(),
            outcome: None,
            status: Time::default(),
            stats: GroupStats::default(),
        }
    }

    /// A session has begun. Its longest message has `most` bytes. The bucket is not known yet.
    pub fn connect(&mut self, most: usize, now: Time) {
        let bucket = Err("the bucket is not open yet; try again".to_owned());
        self.session = Some(Session { since: now, most, bucket });
        self.status = now;
    }

    /// The session has ended.
    pub fn disconnect(&mut self) {
        self.session = None;
        self.outputs.clear();
        let reason = match self.apply.as_ref().map(|apply| apply.step) {
            None => return,
            Some(Step::Checking) => "the connection to the server ended; nothing was applied",
            Some(Step::Writing) => {
                "the connection to the server ended while the version was written; `towpath ctl show fleet` shows whether \
                 it was applied"
            }
            Some(Step::Applying(_)) => {
                "the connection to the server ended after the version was written; the gates apply it when they are in \
                 touch"
            }
        };
        self.finish(Err(reason.to_owned()));
    }

    /// There is no bucket.
    pub fn no_bucket(&mut self, reason: &str) {
        if let Some(session) = &mut self.session {
            session.bucket = Err(reason.to_owned());
        }
    }

    /// The bucket has no value.
    pub fn absent(&mut self) {
        if let Some(session) = &mut self.session {
            session.bucket = Ok(0);
        }
    }

    /// The bucket has a value of this revision that no gate has written. The next version replaces it.
    pub fn foreign(&mut self, version: u64) {
        self.stats.messages_republished += 1;
        if let Some(session) = &mut self.session {
            session.bucket = Ok(version);
        }
    }

    /// The bucket has this value.
    pub fn current(&mut self, version: u64, bytes: &[u8], local: &mut dyn Local, now: Time) {
        if let Some(session) = &mut self.session {
            session.bucket = Ok(version);
        }
        if self.applied.as_ref().is_some_and(|(own, held)| *own == version && held == bytes) {
            return;
        }
        let content = Content::decode(bytes).map_err(|error| error.to_string());
        self.failed = match content.and_then(|content| local.apply(version, &content)) {
            Ok(()) => {
                self.applied = Some((version, bytes.to_owned()));
                self.stats.applied += 1;
                None
            }
            Err(reason) => {
                self.stats.not_applied += 1;
                Some((version, printable(&reason)))
            }
        };
        self.status = now;
    }

    /// Begins a change. [`take_outcome`](Self::take_outcome) returns its result.
    ///
    /// # Errors
    /// Why nothing is applied.
    pub fn propose(&mut self, content: &Content, local: &mut dyn Local, now: Time) -> Result<(), String> {
        if self.apply.is_some() {
            return Err("this gate is applying another version; try again".to_owned());
        }
        let away = "no connection to a server of the group; nothing was applied, and the gates continue with what they have";
        let session = self.session.as_ref().ok_or(away)?;
        let base = session.bucket.clone()?;
        let bytes = content.encode().map_err(|error| error.to_string())?;
        // Headers and the head of the message.
        let most = session.most.saturating_sub(1024);
        if bytes.len() > most {
            let bytes = bytes.len();
            return Err(format!(
                "the version has {bytes} bytes, and the server takes {most}; increase `max_payload` of the server"
            ));
        }
        local.check(content).map_err(|reason| format!("gate {}: {reason}", self.gate))?;
        self.applies += 1;
        let id = self.incarnation.wrapping_add(self.applies);
        self.publish(&Message::Prepare { apply: id, content: &bytes });
        let asked = self.in_touch(now).map(str::to_owned).collect();
        let (begun, answers) = (now, BTreeMap::new());
        self.apply =
            Some(Apply { id, base, content: bytes, begun, asked, answers, repeats: 0, step: Step::Checking });
        Ok(())
    }

    /// The value was written, or not.
    pub fn written(&mut self, written: Result<u64, WriteError>, now: Time) {
        let Some(apply) = self.apply.as_mut().filter(|apply| apply.step == Step::Writing) else { return };
        match written {
            Ok(version) => (apply.step, apply.begun) = (Step::Applying(version), now),
            Err(WriteError::Changed) => self.finish(Err(
                "another version was applied at the same time; nothing of this one was applied: see `towpath ctl show \
                 fleet`, and apply it again if it is still right"
                    .to_owned(),
            )),
            Err(WriteError::Refused(reason)) => self.finish(Err(format!("{reason}; nothing was applied"))),
        }
    }

    /// A message of the gate `from`.
    pub fn message(&mut self, from: &str, bytes: &[u8], local: &mut dyn Local, now: Time) {
        // A name is shown to users.
        if !is_name(from) {
            return self.stats.messages_malformed += 1;
        }
        let (message, incarnation) = match Message::decode(bytes) {
            Ok(read) => read,
            Err(MessageError::Malformed) => return self.stats.messages_malformed += 1,
            Err(MessageError::Version) => return self.stats.messages_version += 1,
        };
        if from == self.gate {
            self.stats.messages_own_name += u64::from(incarnation != self.incarnation);
            return;
        }
        let Some(new) = self.hear(from, incarnation, now) else { return self.stats.messages_peers += 1 };
        if new {
            self.status = self.status.min(now + GREETING);
            self.ask_again();
        }
        match message {
            Message::Status { version, failed, reason } => {
                let failed = (failed != 0).then_some((failed, reason));
                if let Some(member) = self.members.get_mut(from) {
                    (member.version, member.failed) = (version, failed);
                }
            }
            Message::Prepare { apply, content } => {
                let refused = match self.may_check(from, now) {
                    true => {
                        self.stats.checks += 1;
                        let content = Content::decode(content).map_err(|error| error.to_string());
                        content.and_then(|content| local.check(&content)).err()
                    }
                    false => Some("too many versions in one second; try again".to_owned()),
                };
                self.stats.checks_refused += u64::from(refused.is_some());
                let refused = refused.map(|reason| printable(&reason));
                self.publish(&Message::Answer { apply, refused });
            }
            Message::Answer { apply, refused } => {
                if let Some(own) = self.apply.as_mut().filter(|own| own.id == apply) {
                    // The first one counts: a gate that joins makes this one ask again.
                    own.answers.entry(from.to_owned()).or_insert(refused);
                }
            }
        }
    }

    /// The bus dropped messages, because it was faster than the caller. A status is sent again, and a question without an answer is refused.
    pub fn dropped(&mut self, messages: u64) {
        self.stats.messages_busy += messages;
    }

    /// The server sent a message of another gate once more.
    pub fn republished(&mut self) {
        self.stats.messages_republished += 1;
    }

    /// Returns what the bus must do next.
    pub fn poll(&mut self, now: Time) -> Option<GroupOutput> {
        self.session.as_ref()?;
        self.step(now);
        if now >= self.status {
            self.status = now + STATUS;
            let (failed, reason) = self.failed.clone().unwrap_or_default();
            let status = Message::Status { version: self.version(), failed, reason };
            self.publish(&status);
        }
        self.outputs.pop_front()
    }

    /// The result of the change that [`propose`](Self::propose) began, once.
    pub fn take_outcome(&mut self) -> Option<Outcome> {
        self.outcome.take()
    }

    /// Returns true if a change is in progress.
    pub fn is_applying(&self) -> bool {
        self.apply.is_some()
    }

    /// The version that this gate has; 0: none.
    pub fn version(&self) -> u64 {
        self.applied.as_ref().map_or(0, |(version, _)| *version)
    }

    /// The gates, this one first.
    pub fn gates(&self, now: Time) -> Vec<GateVersion> {
        let own = GateVersion {
            gate: self.gate.clone(),
            version: self.version(),
            failed: self.failed.clone(),
            in_touch: self.session.is_some(),
        };
        let others = self.members.iter().map(|(name, member)| GateVersion {
            gate: name.clone(),
            version: member.version,
            failed: member.failed.clone(),
            in_touch: self.session.is_some() && member.in_touch(now),
        });
        std::iter::once(own).chain(others).collect()
    }

    /// The counters.
    pub fn stats(&self, now: Time) -> GroupStats {
        GroupStats {
            version: self.version(),
            failed: self.failed.as_ref().map_or(0, |(version, _)| *version),
            gates: self.gates(now).iter().filter(|gate| gate.in_touch).count() as u64,
            ..self.stats
        }
    }

    /// The names of the gates that are in touch, without this one.
    pub fn in_touch(&self, now: Time) -> impl Iterator<Item = &str> {
        self.members.iter().filter(move |(_, member)| member.in_touch(now)).map(|(name, _)| &**name)
    }

    fn publish(&mut self, message: &Message<'_>) {
        if self.outputs.len() >= OUTPUTS {
            // The server is slow, or a gate asks too much: what is not answered is not applied.
            return self.stats.not_sent += 1;
        }
        self.outputs.push_back(GroupOutput::Publish(message.encode(self.incarnation)));
    }

    fn finish(&mut self, outcome: Outcome) {
        (self.apply, self.outcome) = (None, Some(outcome));
    }

    /// Notes that a gate was heard. Returns whether its process is new, or `None` if there are too many gates.
    fn hear(&mut self, from: &str, incarnation: u64, now: Time) -> Option<bool> {
        self.members.retain(|_, member| now.since(member.heard) < FORGET);
        if let Some(member) = self.members.get_mut(from) {
            member.heard = now;
            return Some(std::mem::replace(&mut member.incarnation, incarnation) != incarnation);
        }
        if self.members.len() >= MAX_PEERS {
            // Gates that are away make room.
            let away = self.members.iter().find(|(_, member)| !member.in_touch(now));
            let away = away.map(|(name, _)| name.clone())?;
            self.members.remove(&away);
        }
        let member = Member { incarnation, heard: now, version: 0, failed: None, checks: (0, 0) };
        self.members.insert(from.to_owned(), member);
        Some(true)
    }

    fn may_check(&mut self, from: &str, now: Time) -> bool {
        let Some(member) = self.members.get_mut(from) else { return false };
        let second = now.as_nanos() / 1_000_000_000;
        if member.checks.0 != second {
            member.checks = (second, 0);
        }
        member.checks.1 += 1;
        member.checks.1 <= CHECKS
    }

    /// Asks a gate that has joined during a check.
    fn ask_again(&mut self) {
        if let Some(apply) = &mut self.apply
            && apply.step == Step::Checking
            && apply.repeats < REPEATS
        {
            apply.repeats += 1;
            let (id, content) = (apply.id, apply.content.clone());
            self.publish(&Message::Prepare { apply: id, content: &content });
        }
    }

    /// Continues the change.
    fn step(&mut self, now: Time) {
        let (Some(apply), Some(session)) = (&mut self.apply, &self.session) else { return };
        let waited = now.since(apply.begun);
        let in_touch = self.members.iter().filter(|(_, member)| member.in_touch(now));
        match apply.step {
            Step::Checking => {
                apply.asked.extend(in_touch.map(|(name, _)| name.clone()));
                let silent: Vec<&String> =
                    apply.asked.iter().filter(|name| !apply.answers.contains_key(*name)).collect();
                let complete = silent.is_empty() && now.since(session.since) >= JOIN;
                if !complete && waited < ANSWERS {
                    return;
                }
                let refused = apply.answers.iter().filter_map(|(gate, reason)| {
                    let reason = reason.as_ref()?;
                    Some(format!("gate {gate}: {reason}"))
                });
                let silent = silent.iter().map(|gate| {
                    format!(
                        "gate {gate} did not answer within {} s; apply again, or stop that gate first",
                        ANSWERS.as_secs()
                    )
                });
                let reasons: Vec<String> = refused.chain(silent).collect();
                if reasons.is_empty() {
                    let (base, content) = (apply.base, apply.content.clone());
                    self.outputs.push_back(GroupOutput::Write { base, content });
                    let Some(apply) = &mut self.apply else { return };
                    (apply.step, apply.begun) = (Step::Writing, now);
                } else {
                    self.finish(Err(format!("{}\nnothing was applied", reasons.join("\n"))));
                }
            }
            // The bus answers, or the session ends.
            Step::Writing => {}
            Step::Applying(version) => {
                let done = |own: u64, failed: &Option<(u64, String)>| {
                    own >= version || failed.as_ref().is_some_and(|(failed, _)| *failed == version)
                };
                let others = in_touch.map(|(_, member)| (member.version, &member.failed));
                let all = std::iter::once((self.version(), &self.failed))
                    .chain(others)
                    .all(|(own, failed)| done(own, failed));
                if all || waited >= APPLIED {
                    let gates = self.gates(now);
                    self.finish(Ok((version, gates)));
                }
            }
        }
    }
}

impl Member {
    fn in_touch(&self, now: Time) -> bool {
        now.since(self.heard) < TOUCH
    }
}
