//! Where the engine answers those who look at it: a mailbox that it empties between two bursts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;
use towpath_wire::Time;

use super::protocol::{Frame, Ring};
use super::rows::{Port, Queue, Stats};
use super::sieve::Sieve;
use super::tap::Tap;

/// How long an engine with a desk may sleep before it looks into the mailbox, in nanoseconds.
const PATIENCE: u64 = 5_000_000;

/// Questions answered at a time.
const AT_A_TIME: usize = 4;

/// Questions that may wait.
const WAITING: usize = 16;

/// What an engine lets others see. Every answer is a copy, made at once.
pub trait Observed {
    /// Every channel, by number.
    fn rings(&mut self) -> Vec<Ring>;

    /// The frames of a channel that are not free; `None` when there is no such channel.
    fn frames(&mut self, channel: u32) -> Option<Vec<Frame>>;

    /// Copies what a channel gets to `tap`. Returns false if the channel does not exist, has ended, or is traced too often.
    fn trace(&mut self, channel: u32, tap: Tap) -> bool {
        let _ = (channel, tap);
        false
    }

    /// Copies the decided packets that `sieve` takes to `tap`. Returns false if the engine has no packets, or too many traces.
    fn follow(&mut self, sieve: Sieve, tap: Tap) -> bool {
        let _ = (sieve, tap);
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
pub enum Ask {
    /// [`Observed::rings`].
    Rings,
    /// [`Observed::mux`].
    Mux,
    /// [`Observed::send`].
    Send,
    /// [`Observed::frames`].
    Frames(u32),
    /// [`Observed::trace`].
    Trace(u32, Tap),
    /// [`Observed::follow`].
    Follow(Sieve, Tap),
    /// [`Observed::queues`].
    Queues,
    /// What was told with [`Desk::set_ports`].
    Ports,
    /// [`Observed::stats`].
    Stats,
}

/// The engine's reply.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    /// To [`Ask::Rings`].
    Rings(Vec<Ring>),
    /// To [`Ask::Mux`].
    Mux(Option<Box<super::mux::Mux>>),
    /// To [`Ask::Send`].
    Send(Option<Box<super::send::Send>>),
    /// To [`Ask::Frames`].
    Frames(Vec<Frame>),
    /// To [`Ask::Trace`] and [`Ask::Follow`]: the names of the ports.
    Tracing(Vec<String>),
    /// To [`Ask::Queues`].
    Queues(Vec<Queue>),
    /// To [`Ask::Ports`]: none when the engine has no live ports.
    Ports(Option<Vec<Port>>),
    /// To [`Ask::Stats`].
    Stats(Box<Stats>),
    /// There is no such channel.
    NoChannel,
}

impl Reply {
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

/// The engine's end of the mailbox.
#[derive(Debug)]
pub struct Desk {
    asks: Receiver<(Ask, SyncSender<Reply>)>,
    bell: Bell,
    over: Arc<AtomicBool>,
    ports: Option<Vec<Port>>,
    /// How long the engine may sleep when nobody asks: an engine that is woken, as long as it likes.
    patience: u64,
}

/// The other end.
#[derive(Debug)]
pub struct Mailbox {
    asks: SyncSender<(Ask, SyncSender<Reply>)>,
    over: Arc<AtomicBool>,
    wake: Option<Wake>,
}

/// Wakes the engine.
pub type Wake = crate::daemon::EventFd;

/// Wakes the thread that has the mailbox. Both ends are ours, and it does not block.
#[derive(Clone, Debug)]
pub(super) struct Bell(Arc<OwnedFd>);

impl Desk {
    /// A desk and its mailbox. `bell` is rung with every reply. `wake` is rung when there is a question, for an engine that
    /// sleeps longer than it is told.
    pub(super) fn new(bell: Bell, wake: Option<Wake>) -> (Self, Mailbox) {
        let (tx, rx) = sync_channel(WAITING);
        let over = Arc::new(AtomicBool::new(false));
        let patience = if wake.is_some() { u64::MAX } else { PATIENCE };
        let mailbox = Mailbox { asks: tx, over: Arc::clone(&over), wake };
        (Self { asks: rx, bell, over, ports: None, patience }, mailbox)
    }

    /// What is told about the ports from now on.
    pub fn set_ports(&mut self, ports: Vec<Port>) {
        self.ports = Some(ports);
    }

    /// Answers what was asked meanwhile. Returns for how many nanoseconds at most the engine may sleep before it
    /// calls this again.
    pub fn attend(&mut self, engine: &mut dyn Observed) -> u64 {
        for _ in 0..AT_A_TIME {
            let Ok((ask, reply)) = self.asks.try_recv() else { break };
            let answer = match ask {
                Ask::Queues => Reply::Queues(engine.queues()),
                Ask::Ports => Reply::Ports(self.ports.clone()),
                Ask::Stats => Reply::Stats(Box::new(engine.stats())),
                Ask::Rings => Reply::Rings(engine.rings()),
                Ask::Mux => Reply::Mux(engine.mux()),
                Ask::Send => Reply::Send(engine.send()),
                Ask::Frames(channel) => engine.frames(channel).map_or(Reply::NoChannel, Reply::Frames),
                Ask::Trace(channel, tap) => match engine.trace(channel, tap) {
                    true => Reply::Tracing(engine.ports()),
                    false => Reply::NoChannel,
                },
                Ask::Follow(sieve, tap) => match engine.follow(sieve, tap) {
                    true => Reply::Tracing(engine.ports()),
                    false => Reply::NoChannel,
                },
            };
            // Who asked may have given up.
            let _ = reply.try_send(answer);
            self.bell.ring();
        }
        self.patience
    }
}

impl Drop for Desk {
    fn drop(&mut self) {
        // Release: pairs with the acquire load in Mailbox::is_over; every reply was sent before.
        self.over.store(true, Ordering::Release);
        self.bell.ring();
    }
}

impl Mailbox {
    /// Asks; the reply comes there, with a ring of the bell. `Ok(None)` when too much waits already.
    ///
    /// # Errors
    /// The engine has ended.
    pub fn ask(&self, ask: Ask) -> Result<Option<Receiver<Reply>>, Ended> {
        let (tx, rx) = sync_channel(1);
        match self.asks.try_send((ask, tx)) {
            Ok(()) => {
                if let Some(wake) = &self.wake {
                    wake.ring();
                }
                Ok(Some(rx))
            }
            Err(TrySendError::Full(_)) => Ok(None),
            Err(TrySendError::Disconnected(_)) => Err(Ended),
        }
    }

    /// Whether the engine has ended.
    pub fn is_over(&self) -> bool {
        // Acquire: pairs with the release store in Desk::drop.
        self.over.load(Ordering::Acquire)
    }
}

/// The engine has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended;

impl Bell {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?)))
    }

    pub(super) fn ring(&self) {
        // Full: nobody has looked for 2^64 rings.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }

    /// Takes the rings so far.
    pub(super) fn hush(&self) {
        let _ = rustix::io::read(&*self.0, &mut [0u8; 8]);
    }

    pub(super) fn fd(&self) -> &OwnedFd {
        &self.0
    }
}
