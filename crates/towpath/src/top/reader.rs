//! Reads samples from the control socket.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::{Value, json};

use super::model::Wanted;
use super::sample::{FlowPart, Part, Sample};
use crate::control::client::{Connection, Engine, Failure};
use crate::control::protocol::{Code, Refusal};

/// Pages of states of one sample. A page has at most 1,000 states.
const PAGES: usize = 4;
/// The busiest states by packets and by bytes, which are read with every sample: the most that `show top` lists.
const BUSIEST: u64 = 100;
/// Pages of rules of one sample.
const RULE_PAGES: usize = 10;

/// Reads samples. See the module's documentation.
pub(super) struct Reader {
    engine: Engine,
    start: Instant,
    /// Where the sweep of the states continues.
    cursor: u64,
    /// The filter of the sweep.
    filter: Option<Value>,
}

/// `requests` of the control protocol with their answers.
const REQUESTS: [(Part, &str, &str); 5] = [
    (Part::Stats, "show-stats", "stats"),
    (Part::Ports, "show-ports", "ports"),
    (Part::Queues, "show-queues", "queues"),
    (Part::Rings, "show-rings", "rings"),
    (Part::Mux, "show-mux", "mux"),
];

impl Reader {
    pub(super) fn new(engine: Engine) -> Self {
        Self { engine, start: Instant::now(), cursor: 0, filter: None }
    }

    /// Reads a sample over one connection.
    ///
    /// # Errors
    ///
    /// Fails if there is no engine, or it does not answer.
    pub(super) fn read(&mut self, wanted: &Wanted) -> Result<Sample, Failure> {
        let mut connection = self.engine.connect()?;
        let mut sample = Sample { at: self.start.elapsed().as_nanos() as u64, ..Sample::default() };
        for &(part, request, answer) in REQUESTS.iter().filter(|(part, ..)| wanted.parts.contains(part)) {
            let answer = asked(&mut connection, request, json!({}), answer)?;
            let answer = answer.map(|mut value| match part {
                // The counters alone.
                Part::Stats => value["stats"].take(),
                _ => value,
            });
            sample.parts.insert(part, answer);
        }
        if wanted.parts.contains(&Part::Rules) {
            let rules = rules(&mut connection)?;
            sample.parts.insert(Part::Rules, rules);
        }
        if wanted.flows {
            sample.flows = Some(self.flows(&mut connection, wanted.filter.as_ref())?);
        }
        Ok(sample)
    }

    /// Reads the busiest states, and the next part of all.
    fn flows(
        &mut self,
        connection: &mut Connection,
        filter: Option<&Value>,
    ) -> Result<Result<FlowPart, String>, Failure> {
        if self.filter.as_ref() != filter {
            (self.cursor, self.filter) = (0, filter.cloned());
        }
        let mut part = FlowPart::default();
        let mut take = |answer: &mut Value| {
            if let Value::Array(states) = answer["states"].take() {
                part.states.extend(states);
            }
        };
        if filter.is_none() {
            for bytes in [true, false] {
                match asked(connection, "show-top", json!({ "count": BUSIEST, "bytes": bytes }), "top")? {
                    Ok(mut answer) => take(&mut answer),
                    Err(refusal) => return Ok(Err(refusal)),
                }
            }
        }
        let mut swept = false;
        for _ in 0..PAGES {
            let mut body = json!({ "from": self.cursor });
            if let Some(filter) = filter {
                body["filter"] = filter.clone();
            }
            match asked(connection, "show-states", body, "states")? {
                Ok(mut answer) => {
                    take(&mut answer);
                    self.cursor = answer["next"].as_u64().unwrap_or(0);
                    swept = self.cursor == 0;
                }
                Err(refusal) => return Ok(Err(refusal)),
            }
            if swept {
                break;
            }
        }
        part.swept = swept;
        Ok(Ok(part))
    }

    /// Ends the state of one flow. Returns what was done.
    pub(super) fn end(&self, flow: &str) -> String {
        let end = || -> Result<String, Failure> {
            let mut connection = self.engine.connect()?;
            let (mut from, mut ended) = (0, 0);
            loop {
                let body = json!({ "flow": flow, "from": from });
                match asked(&mut connection, "delete-state", body, "deleted")? {
                    Ok(answer) => {
                        ended += answer["states"].as_array().map_or(0, Vec::len);
                        match answer["next"].as_u64() {
                            Some(next) => from = next,
                            None if ended == 0 => return Ok("the state has ended before".to_owned()),
                            None => {
                                return Ok(
                                    "the state has ended; the rules evaluate its next packet".to_owned()
                                );
                            }
                        }
                    }
                    Err(refusal) => return Ok(refusal),
                }
            }
        };
        end().unwrap_or_else(|failure| failure.message)
    }

    /// Begins a trace.
    pub(super) fn trace(&self, request: &Value) -> Result<Connection, Failure> {
        let mut connection = self.engine.open("follow", request)?;
        connection.answer("tracing")?;
        connection.wait_forever()?;
        Ok(connection)
    }
}

/// Makes a request. The inner error is why the engine has no answer to it.
fn asked(
    connection: &mut Connection,
    request: &str,
    body: impl Serialize,
    answer: &str,
) -> Result<Result<Value, String>, Failure> {
    match connection.ask(request, body, answer)? {
        Ok(value) => Ok(Ok(value)),
        // These are about the client or the engine, not about the part.
        Err(Refusal { code: Code::Ended | Code::Version | Code::TooLong, message }) => {
            Err(Failure::new(crate::exit::NO_ENGINE, message))
        }
        Err(Refusal { message, .. }) => Ok(Err(message)),
    }
}

/// Rules in pages, all of one version.
fn rules(connection: &mut Connection) -> Result<Result<Value, String>, Failure> {
    let (mut rules, mut from, mut version) = (Vec::new(), Some(0), None);
    for _ in 0..RULE_PAGES {
        let Some(page) = from else { break };
        let mut answer = match asked(connection, "show-rules", json!({ "from": page }), "rules")? {
            Ok(answer) => answer,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let current = answer["version"].take();
        if version.get_or_insert_with(|| current.clone()) != &current {
            // The ruleset has changed since the first page.
            (rules, from, version) = (Vec::new(), Some(0), None);
            continue;
        }
        from = answer["next"].as_u64();
        if let Value::Array(page) = answer["rules"].take() {
            rules.extend(page);
        }
    }
    Ok(Ok(json!({ "rules": rules, "more": from.is_some() })))
}

/// A clock that says when the next sample is due. A late sample does not make the next ones earlier.
#[derive(Debug)]
pub(super) struct Pace {
    interval: Duration,
    due: Instant,
}

impl Pace {
    pub(super) fn new(interval: Duration) -> Self {
        Self { interval, due: Instant::now() }
    }

    /// The time until the next sample.
    pub(super) fn left(&self) -> Duration {
        self.due.saturating_duration_since(Instant::now())
    }

    /// A sample was read.
    pub(super) fn taken(&mut self) {
        self.due = (self.due + self.interval).max(Instant::now());
    }

    /// The next sample is due now.
    pub(super) fn hurry(&mut self) {
        self.due = Instant::now();
    }
}
