//! Where the engine answers those who look at it: a sender that it empties between two bursts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use towpath_wire::Time;

use super::flow_filter::FlowFilter;
use super::protocol::{Frame, Ring};
use super::records::{Port, Queue, Stats};
use super::trace::TraceBuffer;
use crate::eventfd::EventFd;

/// How long an engine with a inbox may sleep before it looks into the sender, in nanoseconds.
const PATIENCE: u64 = 5_000_000;

/// Questions answered at a time.
const AT_A_TIME: usize = 4;

/// Questions that may wait.
const WAITING: usize = 16;

/// What an engine lets others see. Every answer is a copy, made at once.
pub trait QueryHandler {
    /// Every channel, by number.
    fn rings(&mut self) -> Vec<Ring>;

    /// The frames of a channel that are not free; `None` when there is no such channel.
    fn frames(&mut self, channel: u32) -> Option<Vec<Frame>>;

    /// Copies what a channel gets to `tap`. Returns false if the channel does not exist, has ended, or is traced too often.
    fn trace(&mut self, channel: u32, tap: TraceBuffer) -> bool {
        let _ = (channel, tap);
        false
    }

    /// Copies the decided packets that `filter` takes to `tap`. Returns false if the engine has no packets, or too many traces.
    fn follow(&mut self, filter: FlowFilter, tap: TraceBuffer) -> bool {
        let _ = (filter, tap);
        false
    }

    /// The multiplexor; `None` when there is none.
    fn mux(&mut self) -> Option<Box<super::mux::Mux>> {
        None
    }

    /// Sends without a copy; `None` when there are none.
    fn send(&mut self) -> Option<Box<super::send::Send>> {
        None
    }

    /// The names of the ports, by number.
    fn ports(&self) -> Vec<String>;

    /// Every queue, by number.
    fn queues(&mut self) -> Vec<Queue> {
        Vec::new()
    }

    /// What became of the packets.
    fn stats(&self) -> Stats {
        Stats::default()
    }

    /// The time that its states live by.
    fn clock(&self) -> Time {
        Time::default()
    }
}

/// A question to the engine.
#[derive(Debug)]
pub enum Query {
    /// [`QueryHandler::rings`].
    Rings,
    /// [`QueryHandler::mux`].
    Mux,
    /// [`QueryHandler::send`].
    Send,
    /// [`QueryHandler::frames`].
    Frames(u32),
    /// [`QueryHandler::trace`].
    Trace(u32, TraceBuffer),
    /// [`QueryHandler::follow`].
    Follow(FlowFilter, TraceBuffer),
    /// [`QueryHandler::queues`].
    Queues,
    /// What was told with [`QueryInbox::set_ports`].
    Ports,
    /// [`QueryHandler::stats`].
    Stats,
}

/// The engine's reply.
#[derive(Debug, PartialEq, Eq)]
pub enum Response {
    /// To [`Query::Rings`].
    Rings(Vec<Ring>),
    /// To [`Query::Mux`].
    Mux(Option<Box<super::mux::Mux>>),
    /// To [`Query::Send`].
    Send(Option<Box<super::send::Send>>),
    /// To [`Query::Frames`].
    Frames(Vec<Frame>),
    /// To [`Query::Trace`] and [`Query::Follow`]: the names of the ports.
    Tracing(Vec<String>),
    /// To [`Query::Queues`].
    Queues(Vec<Queue>),
    /// To [`Query::Ports`]: none when the engine has no live ports.
    Ports(Option<Vec<Port>>),
    /// To [`Query::Stats`].
    Stats(Box<Stats>),
    /// There is no such channel.
    NoChannel,
}

impl Response {
    /// What two threads of one engine replied, in one.
    pub(super) fn merge(self, other: Self) -> Self {
        match (self, other) {
            (Self::Rings(mut all), Self::Rings(more)) => {
                all.extend(more);
                all.sort_by_key(|ring| ring.channel);
                Self::Rings(all)
            }
            (Self::Frames(mut all), Self::Frames(more)) => {
                all.extend(more);
                Self::Frames(all)
            }
            (Self::Queues(mut all), Self::Queues(more)) => {
                for queue in more {
                    match all.iter_mut().find(|own| own.counters.number == queue.counters.number) {
                        Some(own) => own.add(queue),
                        None => all.push(queue),
                    }
                }
                Self::Queues(all)
            }
            (Self::Ports(Some(mut all)), Self::Ports(Some(more))) => {
                all.iter_mut().zip(more).for_each(|(own, port)| own.add(port));
                Self::Ports(Some(all))
            }
            (Self::Ports(None), Self::Ports(more)) => Self::Ports(more),
            (Self::Mux(None), Self::Mux(more)) => Self::Mux(more),
            (Self::Mux(Some(all)), Self::Mux(Some(more))) => Self::Mux(Some(Box::new(all.and(*more)))),
            (Self::Send(None), Self::Send(more)) => Self::Send(more),
            (Self::Send(Some(mut all)), Self::Send(Some(more))) => {
                all.others.push(*more);
                Self::Send(Some(all))
            }
            (Self::Stats(all), Self::Stats(more)) => Self::Stats(Box::new(all.plus(*more))),
            (Self::NoChannel, other) => other,
            (own, _) => own,
        }
    }
}

/// The engine's end of the sender.
#[derive(Debug)]
pub struct QueryInbox {
    asks: Receiver<(Query, SyncSender<Response>)>,
    bell: EventFd,
    over: Arc<AtomicBool>,
    ports: Option<Vec<Port>>,
    /// How long the engine may sleep when nobody asks: an engine that is woken, as long as it likes.
    patience: u64,
}

/// The other end.
#[derive(Debug)]
pub struct QuerySender {
    asks: SyncSender<(Query, SyncSender<Response>)>,
    over: Arc<AtomicBool>,
    wake: Option<EventFd>,
}

impl QueryInbox {
    /// A inbox and its sender. `bell` is rung with every reply. `wake` is rung when there is a question, for an engine that
    /// sleeps longer than it is told.
    pub(super) fn new(bell: EventFd, wake: Option<EventFd>) -> (Self, QuerySender) {
        let (tx, rx) = sync_channel(WAITING);
        let over = Arc::new(AtomicBool::new(false));
        let patience = if wake.is_some() { u64::MAX } else { PATIENCE };
        let sender = QuerySender { asks: tx, over: Arc::clone(&over), wake };
        (Self { asks: rx, bell, over, ports: None, patience }, sender)
    }

    /// What is told about the ports from now on.
    pub fn set_ports(&mut self, ports: Vec<Port>) {
        self.ports = Some(ports);
    }

    /// Answers what was asked meanwhile. Returns for how many nanoseconds at most the engine may sleep before it
    /// calls this again.
    pub fn attend(&mut self, engine: &mut dyn QueryHandler) -> u64 {
        for _ in 0..AT_A_TIME {
            let Ok((ask, reply)) = self.asks.try_recv() else { break };
            let answer = match ask {
                Query::Queues => Response::Queues(engine.queues()),
                Query::Ports => Response::Ports(self.ports.clone()),
                Query::Stats => Response::Stats(Box::new(engine.stats())),
                Query::Rings => Response::Rings(engine.rings()),
                Query::Mux => Response::Mux(engine.mux()),
                Query::Send => Response::Send(engine.send()),
                Query::Frames(channel) => {
                    engine.frames(channel).map_or(Response::NoChannel, Response::Frames)
                }
                Query::Trace(channel, tap) => match engine.trace(channel, tap) {
                    true => Response::Tracing(engine.ports()),
                    false => Response::NoChannel,
                },
                Query::Follow(filter, tap) => match engine.follow(filter, tap) {
                    true => Response::Tracing(engine.ports()),
                    false => Response::NoChannel,
                },
            };
            // Who asked may have given up.
            let _ = reply.try_send(answer);
            self.bell.signal();
        }
        self.patience
    }
}

impl Drop for QueryInbox {
    fn drop(&mut self) {
        // Release: pairs with the acquire load in QuerySender::is_over; every reply was sent before.
        self.over.store(true, Ordering::Release);
        self.bell.signal();
    }
}

impl QuerySender {
    /// Asks; the reply comes there, with a ring of the bell. `Ok(None)` when too much waits already.
    ///
    /// # Errors
    /// The engine has ended.
    pub fn ask(&self, ask: Query) -> Result<Option<Receiver<Response>>, Ended> {
        let (tx, rx) = sync_channel(1);
        match self.asks.try_send((ask, tx)) {
            Ok(()) => {
                if let Some(wake) = &self.wake {
                    wake.signal();
                }
                Ok(Some(rx))
            }
            Err(TrySendError::Full(_)) => Ok(None),
            Err(TrySendError::Disconnected(_)) => Err(Ended),
        }
    }

    /// Whether the engine has ended.
    pub fn is_over(&self) -> bool {
        // Acquire: pairs with the release store in QueryInbox::drop.
        self.over.load(Ordering::Acquire)
    }
}

/// The engine has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended;
