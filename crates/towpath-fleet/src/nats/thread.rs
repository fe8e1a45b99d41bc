//! A thread with a client of NATS, and the bounded channels between it and its caller.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;
use std::{io, thread};

use tokio::sync::mpsc;
use tokio::time::timeout;

use super::RETRY;

/// What may wait in the channels of a [`ClientThread`]: messages for the server, and messages and bytes for the caller.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rooms {
    pub(super) outbound: usize,
    pub(super) inbound: usize,
    pub(super) inbound_bytes: usize,
}

/// What waits for the caller.
#[derive(Debug)]
struct Waiting {
    bytes: AtomicUsize,
    most: usize,
    /// Messages that were dropped.
    dropped: AtomicU64,
}

/// A client of NATS on a thread of its own, with bounded channels.
#[derive(Debug)]
pub(super) struct ClientThread<O, I> {
    outbound: Option<mpsc::Sender<O>>,
    inbound: Option<Receiver<(I, usize)>>,
    waiting: Arc<Waiting>,
    thread: Option<JoinHandle<()>>,
}

impl<O: Send + 'static, I: Send + 'static> ClientThread<O, I> {
    /// `session` is one session; it returns what the caller is told at its end.
    pub(super) fn start(
        name: &str,
        rooms: Rooms,
        begin: impl FnOnce() + Send + 'static,
        session: impl AsyncFn(&mut mpsc::Receiver<O>, &Told<I>) -> I + Send + 'static,
    ) -> io::Result<Self> {
        let (outbound, mut outputs) = mpsc::channel(rooms.outbound);
        let (incoming, inbound) = sync_channel(rooms.inbound);
        let (bytes, dropped) = (AtomicUsize::new(0), AtomicU64::new(0));
        let waiting = Arc::new(Waiting { bytes, most: rooms.inbound_bytes, dropped });
        let told = Told { incoming, waiting: Arc::clone(&waiting) };
        let body = move || {
            begin();
            while !outputs.is_closed() {
                let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
                    return;
                };
                let caller = told.clone();
                let ended = runtime.block_on(async {
                    let away = session(&mut outputs, &caller).await;
                    // Before the caller knows, so that it loses nothing that comes after.
                    while outputs.try_recv().is_ok() {}
                    let ended = caller.tell(away).await.is_err();
                    ended || timeout(RETRY, outputs.recv()).await.is_ok_and(|output| output.is_none())
                });
                // Ends the tasks of the session.
                drop(runtime);
                if ended {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name(name.to_owned()).spawn(body)?;
        Ok(Self { outbound: Some(outbound), inbound: Some(inbound), waiting, thread: Some(thread) })
    }

    pub(super) fn send(&self, output: O) -> Result<(), O> {
        let Some(outbound) = &self.outbound else { return Err(output) };
        outbound.try_send(output).map_err(|error| match error {
            mpsc::error::TrySendError::Full(output) | mpsc::error::TrySendError::Closed(output) => output,
        })
    }

    /// Returns true if half of the room for the server is free.
    pub(super) fn has_room(&self) -> bool {
        self.outbound.as_ref().is_some_and(|outbound| outbound.capacity() >= outbound.max_capacity() / 2)
    }

    /// The number of messages that were dropped since the last call.
    pub(super) fn take_dropped(&self) -> u64 {
        // Relaxed: the counter guards no data.
        self.waiting.dropped.swap(0, Ordering::Relaxed)
    }

    pub(super) fn receive(&self, wait: Duration) -> Option<I> {
        match self.inbound.as_ref()?.recv_timeout(wait) {
            Ok((incoming, bytes)) => {
                // Relaxed: the counter guards no data.
                self.waiting.bytes.fetch_sub(bytes, Ordering::Relaxed);
                Some(incoming)
            }
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => {
                // The thread has ended: the caller must not spin.
                thread::sleep(wait);
                None
            }
        }
    }
}

impl<O, I> Drop for ClientThread<O, I> {
    fn drop(&mut self) {
        (self.outbound, self.inbound) = (None, None);
        if let Some(thread) = self.thread.take() {
            // A panic was already printed.
            let _ = thread.join();
        }
    }
}

/// The caller has gone.
pub(super) struct Gone;

pub(super) struct Told<T> {
    incoming: SyncSender<(T, usize)>,
    waiting: Arc<Waiting>,
}

impl<T> Clone for Told<T> {
    fn clone(&self) -> Self {
        Self { incoming: self.incoming.clone(), waiting: Arc::clone(&self.waiting) }
    }
}

impl<T> Told<T> {
    /// Waits for room.
    pub(super) async fn tell(&self, incoming: T) -> Result<(), Gone> {
        self.tell_bytes(incoming, 0).await
    }

    /// Waits for room for a message with these bytes.
    pub(super) async fn tell_bytes(&self, mut incoming: T, bytes: usize) -> Result<(), Gone> {
        while let Some(back) = self.give(incoming, bytes)? {
            incoming = back;
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    /// Drops a message, and counts it, if there is no room.
    pub(super) fn offer(&self, incoming: T, bytes: usize) -> Result<(), Gone> {
        if self.give(incoming, bytes)?.is_some() {
            self.dropped();
        }
        Ok(())
    }

    /// A message was dropped.
    pub(super) fn dropped(&self) {
        // Relaxed: the counter guards no data.
        self.waiting.dropped.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the message if there is no room. One that alone has more than the room is taken when nothing else waits.
    fn give(&self, incoming: T, bytes: usize) -> Result<Option<T>, Gone> {
        let Waiting { bytes: waiting, most, .. } = &*self.waiting;
        // Relaxed: the counter guards no data. Only this thread adds to it.
        let before = waiting.fetch_add(bytes, Ordering::Relaxed);
        let back = match before == 0 || before + bytes <= *most {
            true => match self.incoming.try_send((incoming, bytes)) {
                Ok(()) => return Ok(None),
                Err(TrySendError::Disconnected(_)) => return Err(Gone),
                Err(TrySendError::Full((back, _))) => back,
            },
            false => incoming,
        };
        waiting.fetch_sub(bytes, Ordering::Relaxed);
        Ok(Some(back))
    }
}
