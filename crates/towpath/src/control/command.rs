//! The parts of a `towpath ctl` subcommand. A subcommand is one file in [`commands`](super::commands) and one line in its table.

use std::fmt;
use std::sync::Arc;

use clap::{ArgMatches, Args, FromArgMatches};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::client::{Engine, Failure};
use super::commands::show_states::Event;
use super::endpoints::EndpointCounters;
use super::protocol::{Code, Refusal};
use super::query::{Answer, QuerySender, SendError, Target};
use super::slots::ControlStats;
use crate::ruleset_manager::RulesetManager;

/// The access right that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Every client may make the request.
    Read,
    /// The answer contains packets or the memory of a channel. Only an owner may make the request.
    Packets,
    /// The request changes something. Only an owner may make it.
    Change,
    /// Root only.
    Root,
}

/// A subcommand of `towpath ctl`.
pub struct Command {
    /// Its words after `towpath ctl`, such as `show rings`.
    pub words: &'static str,
    /// The requests that the server serves for it.
    pub requests: &'static [Request],
    pub(super) grammar: fn(clap::Command) -> clap::Command,
    pub(super) run: fn(&Engine, &ArgMatches) -> Result<String, Failure>,
}

/// A request of the control protocol.
pub struct Request {
    /// The value of `do`. `-` may be a space here: `show rings` is the request `show-rings`.
    pub name: &'static str,
    /// The access right that it needs.
    pub access: Access,
    pub(super) handle: fn(Value, &Context<'_>) -> Handled,
}

/// The result of a handler.
pub type Handled = Result<Reply, Refusal>;

/// The server's answer to a request.
#[derive(Debug)]
pub enum Reply {
    /// One answer: its name and its members.
    Answer(&'static str, Value),
    /// Several messages.
    Stream(Box<dyn Stream>),
    /// The answer depends on the engine's threads.
    Pending(Box<dyn Pending>),
}

/// The arguments of a subcommand that makes one kind of request and prints one object.
///
/// The type is the command line's arguments, with their help, and the members of the request. The flag `--json` is added to
/// the arguments: it prints the answer's members as one object.
pub trait Query: Args + Serialize + DeserializeOwned {
    /// The words after `towpath ctl`; with `-` in place of spaces the name of the request.
    const WORDS: &'static str;

    /// The name of the answer.
    const ANSWER: &'static str;

    /// The access right that the request needs.
    const ACCESS: Access = Access::Read;

    /// Serves the request. Runs on the server's thread.
    ///
    /// # Errors
    ///
    /// Returns why the request is refused.
    fn handle(self, context: &Context<'_>) -> Handled;

    /// Asks the engine. Runs in the client. By default: one request, one answer.
    ///
    /// # Errors
    ///
    /// Fails if the engine refuses the request or does not answer.
    fn ask(&self, engine: &Engine) -> Result<Value, Failure> {
        engine.ask(&name(Self::WORDS), self, Self::ANSWER)
    }

    /// Asks the engine and prints the answer in parts, if it may be long. `None` by default: `ask` and `text` are used.
    fn print(&self, engine: &Engine, json: bool) -> Option<Result<(), Failure>> {
        let _ = (engine, json);
        None
    }

    /// Renders the answer's members for people.
    fn text(&self, answer: &Value) -> String;
}

impl Command {
    /// The subcommand of a [`Query`].
    pub const fn query<Q: Query>() -> Self {
        Self { words: Q::WORDS, requests: RequestOf::<Q>::REQUESTS, grammar: grammar::<Q>, run: run::<Q> }
    }

    /// A subcommand that does not fit [`Query`]. `T` is its arguments.
    pub(super) const fn other<T: Args>(
        words: &'static str,
        requests: &'static [Request],
        run: fn(&Engine, &ArgMatches) -> Result<String, Failure>,
    ) -> Self {
        Self { words, requests, grammar: T::augment_args, run }
    }
}

/// The requests of a [`Query`].
struct RequestOf<Q>(Q);

impl<Q: Query> RequestOf<Q> {
    const REQUESTS: &'static [Request] = &[Request {
        name: Q::WORDS,
        access: Q::ACCESS,
        handle: |body, context| parse::<Q>(body)?.handle(context),
    }];
}

fn grammar<Q: Query>(command: clap::Command) -> clap::Command {
    let json = clap::Arg::new("json").long("json").action(clap::ArgAction::SetTrue).help("Print JSON");
    Q::augment_args(command).arg(json)
}

fn run<Q: Query>(engine: &Engine, matches: &ArgMatches) -> Result<String, Failure> {
    let query: Q = arguments(matches);
    if let Some(printed) = query.print(engine, matches.get_flag("json")) {
        return printed.map(|()| String::new());
    }
    let answer = query.ask(engine)?;
    Ok(match matches.get_flag("json") {
        true => format!("{answer}\n"),
        false => query.text(&answer),
    })
}

/// The arguments of a subcommand.
pub(super) fn arguments<T: FromArgMatches>(matches: &ArgMatches) -> T {
    T::from_arg_matches(matches).expect("clap has checked the arguments against this type")
}

/// The members of a request that has none.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NoMembers {}

/// The members of a request. `T` refuses unknown members (`deny_unknown_fields`).
pub(super) fn parse<T: DeserializeOwned>(body: Value) -> Result<T, Refusal> {
    serde_json::from_value(body)
        .map_err(|error| Refusal::new(Code::Request, format!("wrong request: {error}")))
}

impl Request {
    /// Returns true if `name` is the value of `do` for this request.
    pub fn is(&self, name: &str) -> bool {
        self.name.len() == name.len()
            && self
                .name
                .bytes()
                .zip(name.bytes())
                .all(|(own, other)| own == other || own == b' ' && other == b'-')
    }
}

/// The value of `do` for a subcommand.
pub(super) fn name(words: &str) -> String {
    words.replace(' ', "-")
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Request").field(&self.name).finish()
    }
}

impl fmt::Debug for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Command").field(&self.words).finish()
    }
}

/// The objects that a handler may use.
pub struct Context<'a> {
    /// The engine's rules, tables, states and settings. `None` if the engine has no rules.
    pub(crate) ruleset: Option<&'a Arc<RulesetManager>>,
    /// One for each engine thread.
    pub(crate) engines: &'a [QuerySender],
    /// The counters of the control socket.
    pub(crate) control: ControlStats,
    /// The counters that other threads publish.
    pub(crate) endpoints: &'a EndpointCounters,
}

impl Context<'_> {
    /// The rules, tables, states and settings.
    pub(super) fn ruleset(&self) -> Result<&Arc<RulesetManager>, Refusal> {
        self.ruleset.ok_or_else(|| Refusal::new(Code::NotFound, "this engine has no rules"))
    }

    /// Runs `query` on every engine thread and combines the results of the threads that have not ended with `done`.
    pub(super) fn query<T: Send + 'static>(
        &self,
        query: impl FnOnce(&mut Target<'_>) -> T + Clone + Send + 'static,
        done: impl FnOnce(Vec<T>) -> Handled + Send + 'static,
    ) -> Handled {
        self.query_each(|| query.clone(), done)
    }

    /// As [`query`](Self::query), with a query made for each thread.
    pub(super) fn query_each<T: Send + 'static, Q: FnOnce(&mut Target<'_>) -> T + Send + 'static>(
        &self,
        query: impl FnMut() -> Q,
        done: impl FnOnce(Vec<T>) -> Handled + Send + 'static,
    ) -> Handled {
        Ok(Reply::Pending(self.gather(query, done)?))
    }

    /// As [`query_each`](Self::query_each), with a result of any type.
    pub(crate) fn gather<T: Send + 'static, R: 'static, Q: FnOnce(&mut Target<'_>) -> T + Send + 'static>(
        &self,
        mut query: impl FnMut() -> Q,
        done: impl FnOnce(Vec<T>) -> Result<R, Refusal> + Send + 'static,
    ) -> Result<Box<dyn Pending<R>>, Refusal> {
        let mut answers = Vec::new();
        for engine in self.engines {
            match engine.send(query()) {
                Ok(answer) => answers.push(answer),
                Err(SendError::Full) => {
                    return Err(Refusal::new(Code::Busy, "the engine's query queue is full; try again"));
                }
                // One of several threads: the others answer.
                Err(SendError::Ended) => {}
            }
        }
        if answers.is_empty() {
            return Err(ended());
        }
        Ok(Box::new(Waiting { answers, parts: Vec::new(), done: Some(done) }))
    }
}

fn ended() -> Refusal {
    Refusal::new(Code::Ended, "the engine has ended")
}

/// An answer that depends on the engine's threads.
pub trait Pending<R = Reply>: fmt::Debug + Send {
    /// Returns the reply if every thread has answered. `over`: threads that have not answered have ended.
    fn poll(&mut self, over: bool) -> Option<Result<R, Refusal>>;
}

struct Waiting<T, D> {
    answers: Vec<Answer<T>>,
    parts: Vec<T>,
    done: Option<D>,
}

impl<T, D> fmt::Debug for Waiting<T, D> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiting").field("answers", &self.answers.len()).finish_non_exhaustive()
    }
}

impl<T: Send, R, D: FnOnce(Vec<T>) -> Result<R, Refusal> + Send> Pending<R> for Waiting<T, D> {
    fn poll(&mut self, over: bool) -> Option<Result<R, Refusal>> {
        let parts = &mut self.parts;
        self.answers.retain_mut(|answer| match answer.poll() {
            Some(part) => {
                parts.extend(part);
                false
            }
            None => !over,
        });
        if !self.answers.is_empty() {
            return None;
        }
        let parts = std::mem::take(&mut self.parts);
        let done = self.done.take()?;
        Some(if parts.is_empty() { Err(ended()) } else { done(parts) })
    }
}

/// An answer of several messages.
pub trait Stream: fmt::Debug + Send {
    /// Appends the next message to `output`, if there is one.
    fn produce(&mut self, output: &mut Vec<u8>) -> Progress;

    /// Returns true if messages come from other threads: the server looks for them every 10 ms.
    fn is_live(&self) -> bool {
        false
    }

    /// Returns true if the stream takes the events of states.
    fn takes_events(&self) -> bool {
        false
    }

    /// Takes events. `lost` is the total number of events that were lost before they came here.
    fn events(&mut self, events: &Arc<[Event]>, lost: u64) {
        let _ = (events, lost);
    }
}

/// The result of [`Stream::produce`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It appended a message. There may be more.
    More,
    /// There is no message now.
    Idle,
    /// The stream has ended.
    Done,
}

/// The words without a trailing `--json`, which is not a word of any command.
pub(super) fn json_behind(words: &[String], json: bool) -> (&[String], bool) {
    match words.split_last() {
        Some((last, rest)) if last == "--json" => (rest, true),
        _ => (words, json),
    }
}
