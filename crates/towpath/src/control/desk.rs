//! Where the engine answers those who look at it: a mailbox that it empties between two bursts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::OwnedFd;

use super::protocol::{Frame, Ring};
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

    /// Copies of what a channel gets go to `tap` from now on. The tap back when there is no such channel, or it has
    /// ended.
    ///
    /// # Errors
    /// The tap back.
    fn trace(&mut self, channel: u32, tap: Tap) -> Result<(), Tap>;

    /// The multiplexor; `None` when there is none.
    fn mux(&mut self) -> Option<Box<super::mux::Mux>> {
        None
    }

    /// The names of the ports, by number.
    fn ports(&self) -> Vec<String>;
}

/// A question to the engine.
#[derive(Debug)]
pub enum Ask {
    /// [`Observed::rings`].
    Rings,
    /// [`Observed::mux`].
    Mux,
    /// [`Observed::frames`].
    Frames(u32),
    /// [`Observed::trace`].
    Trace(u32, Tap),
}

/// The engine's reply.
#[derive(Debug, PartialEq, Eq)]
pub enum Reply {
    /// To [`Ask::Rings`].
    Rings(Vec<Ring>),
    /// To [`Ask::Mux`].
    Mux(Option<Box<super::mux::Mux>>),
    /// To [`Ask::Frames`].
    Frames(Vec<Frame>),
    /// To [`Ask::Trace`]: the names of the ports.
    Tracing(Vec<String>),
    /// There is no such channel.
    NoChannel,
}

/// The engine's end of the mailbox.
#[derive(Debug)]
pub struct Desk {
    asks: Receiver<(Ask, SyncSender<Reply>)>,
    bell: Bell,
    over: Arc<AtomicBool>,
}

/// The other end.
#[derive(Debug)]
pub struct Mailbox {
    asks: SyncSender<(Ask, SyncSender<Reply>)>,
    bell: Bell,
    over: Arc<AtomicBool>,
}

/// Wakes the thread that has the mailbox. Both ends are ours, and it does not block.
#[derive(Clone, Debug)]
pub(super) struct Bell(Arc<OwnedFd>);

impl Desk {
    /// A desk and its mailbox.
    ///
    /// # Errors
    /// When eventfd(2) fails.
    pub fn new() -> std::io::Result<(Self, Mailbox)> {
        let bell = Bell(Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?));
        let (tx, rx) = sync_channel(WAITING);
        let over = Arc::new(AtomicBool::new(false));
        let mailbox = Mailbox { asks: tx, bell: bell.clone(), over: Arc::clone(&over) };
        Ok((Self { asks: rx, bell, over }, mailbox))
    }

    /// Answers what was asked meanwhile. Returns for how many nanoseconds at most the engine may sleep before it
    /// calls this again.
    pub fn attend(&mut self, engine: &mut dyn Observed) -> u64 {
        for _ in 0..AT_A_TIME {
            let Ok((ask, reply)) = self.asks.try_recv() else { break };
            let answer = match ask {
                Ask::Rings => Reply::Rings(engine.rings()),
                Ask::Mux => Reply::Mux(engine.mux()),
                Ask::Frames(channel) => engine.frames(channel).map_or(Reply::NoChannel, Reply::Frames),
                Ask::Trace(channel, tap) => match engine.trace(channel, tap) {
                    Ok(()) => Reply::Tracing(engine.ports()),
                    Err(_) => Reply::NoChannel,
                },
            };
            // Who asked may have given up.
            let _ = reply.try_send(answer);
            self.bell.ring();
        }
        PATIENCE
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
            Ok(()) => Ok(Some(rx)),
            Err(TrySendError::Full(_)) => Ok(None),
            Err(TrySendError::Disconnected(_)) => Err(Ended),
        }
    }

    /// Whether the engine has ended.
    pub fn is_over(&self) -> bool {
        // Acquire: pairs with the release store in Desk::drop.
        self.over.load(Ordering::Acquire)
    }

    pub(super) fn bell(&self) -> &Bell {
        &self.bell
    }
}

/// The engine has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended;

impl Bell {
    fn ring(&self) {
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
