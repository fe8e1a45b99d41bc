use std::ops::{Deref, DerefMut};
use std::os::fd::{AsFd, OwnedFd};

use tokio::io::unix::AsyncFd;

use crate::client::recv_error::RecvError;
use crate::client::{Consumer, Frame};
use crate::shm::sys;

/// A [`Consumer`] for tokio. [`next`](Self::next) awaits frames on the reactor; everything else is the consumer's,
/// through `Deref`. The consumer's `recv` blocks the thread.
///
/// ```no_run
/// # async fn run() -> Result<(), Box<dyn std::error::Error>> {
/// use towpath_ring::{AsyncConsumer, Consumer, Verdict};
/// let mut queue = AsyncConsumer::new(Consumer::attach_env()?)?;
/// while let Some(frame) = queue.next().await? {
///     println!("{} bytes", queue.payload(&frame).len());
///     queue.verdict(frame, Verdict::Pass);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct AsyncConsumer {
    consumer: Consumer,
    doorbell: AsyncFd<OwnedFd>,
}

impl AsyncConsumer {
    /// Registers the consumer's doorbell with the reactor of the current runtime.
    ///
    /// # Errors
    /// The descriptor cannot be duplicated or registered.
    ///
    /// # Panics
    /// The call is outside of a tokio runtime with IO enabled.
    pub fn new(consumer: Consumer) -> std::io::Result<Self> {
        let doorbell = consumer.as_fd().try_clone_to_owned()?;
        Ok(Self { doorbell: sys::reactor(doorbell)?, consumer })
    }

    /// Receives the next frame. None if the engine has ended the channel and all frames were received. Cancel-safe.
    ///
    /// # Errors
    /// As [`Consumer::recv`].
    pub async fn next(&mut self) -> Result<Option<Frame>, RecvError> {
        loop {
            if let Some(frame) = self.consumer.try_recv()? {
                return Ok(Some(frame));
            }
            if self.consumer.is_ended() {
                return Ok(None);
            }
            // A future dropped while armed costs one useless doorbell.
            if self.consumer.arm() {
                let mut ready = self.doorbell.readable().await?;
                // Cleared before the doorbells are read: a later doorbell makes the descriptor ready again.
                ready.clear_ready();
            }
            self.consumer.disarm()?;
        }
    }

    /// The consumer, for blocking use.
    #[must_use]
    pub fn into_inner(self) -> Consumer {
        self.consumer
    }
}

impl Deref for AsyncConsumer {
    type Target = Consumer;

    fn deref(&self) -> &Consumer {
        &self.consumer
    }
}

impl DerefMut for AsyncConsumer {
    fn deref_mut(&mut self) -> &mut Consumer {
        &mut self.consumer
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Config, Endpoint, Meta, ReserveError, Verdict};

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn frames_are_awaited_in_a_spawned_task() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let mut endpoint = Endpoint::bind(&path, Config { deadline: None, ..Config::default() }).unwrap();
        let attach = std::thread::spawn(move || Consumer::attach_as(path, "c").unwrap());
        let mut channel = loop {
            endpoint.wait(None).unwrap();
            if let Some(channel) = endpoint.accept().unwrap() {
                break channel;
            }
        };
        let consumer = attach.join().unwrap();
        let client = tokio::spawn(async move {
            let mut queue = AsyncConsumer::new(consumer).unwrap();
            let mut sum = 0;
            while let Some(frame) = queue.next().await.unwrap() {
                sum += u64::from(queue.payload(&frame)[0]);
                queue.verdict(frame, Verdict::Pass);
            }
            sum
        });
        let engine = tokio::task::spawn_blocking(move || {
            let mut decided = 0;
            for n in 0..20_000u32 {
                while channel.send(&[n as u8; 100], &Meta::default()) == Err(ReserveError::RingFull) {
                    let found = channel.poll_verdicts(0, |_, _| {});
                    decided += found;
                    if found == 0 {
                        channel.wait(Some(Duration::from_secs(20))).unwrap();
                    }
                }
            }
            while decided < 20_000 {
                let found = channel.poll_verdicts(0, |_, _| {});
                decided += found;
                if found == 0 {
                    channel.wait(Some(Duration::from_secs(20))).unwrap();
                }
            }
            channel.stats()
        });
        let stats = engine.await.unwrap();
        assert_eq!((stats.decided, stats.violations), (20_000, 0));
        assert_eq!(client.await.unwrap(), (0..20_000u32).map(|n| u64::from(n as u8)).sum::<u64>());
    }
}
