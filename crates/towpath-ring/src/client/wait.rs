//! Waiting in a client: spin for some time, then sleep until a doorbell rings.

use std::hint;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::Consumer;
use crate::client::recv_error::RecvError;
use crate::shm::cpu;
use crate::shm::sys;

/// Checks of the lanes before a sleep: about 10 us.
pub(super) const SPINS: u32 = 400;
/// Sleeps after which an adapting client spins for the full time again, to measure whether it helps.
const AGAIN: u64 = 16;
/// Checks before the client compares CPUs. An answer that comes at once avoids the cost of the comparison.
const LOOKS: u32 = 8;
/// Checks on a shared CPU, each after a yield: two are cheaper than a sleep and a doorbell.
const YIELDS: u32 = 2;
/// Length of a sleep while doorbells stay unread.
const NAP: Duration = Duration::from_millis(1);

impl Consumer {
    /// Waits for a result of `take`, at most until `end`.
    #[inline]
    pub(super) fn wait_for<T>(
        &mut self,
        end: Option<Instant>,
        mut take: impl FnMut(&mut Self) -> Result<Option<T>, RecvError>,
    ) -> Result<Option<T>, RecvError> {
        loop {
            self.flush();
            let mut shared = None;
            for look in 0..self.spins {
                if let Some(found) = take(self)? {
                    if look > LOOKS {
                        self.spins = SPINS;
                    }
                    return Ok(Some(found));
                }
                if look < LOOKS {
                    hint::spin_loop();
                    continue;
                }
                match *shared.get_or_insert_with(|| self.shares_cpu()) {
                    false => hint::spin_loop(),
                    true if look < LOOKS + YIELDS => sys::give_way(),
                    true => break,
                }
            }
            if self.learns {
                let again = self.sleeps.is_multiple_of(AGAIN);
                self.spins = if again { SPINS } else { (self.spins / 2).max(LOOKS) };
            }
            if !self.sleep(end)? {
                return Ok(None);
            }
        }
    }

    /// Adapts the spinning time from now on. For clients that share their CPU with other work.
    pub(crate) fn learn(&mut self) {
        self.learns = true;
    }

    /// Returns true if every engine thread last reported this thread's CPU: spinning is useless then.
    pub(super) fn shares_cpu(&self) -> bool {
        self.lanes.iter().all(|lane| cpu::is_shared(&lane.rings.memory.theirs))
    }

    /// Waits for a doorbell, at most until `end`. Returns false at the end of the channel or of the time.
    #[cold]
    fn sleep(&mut self, end: Option<Instant>) -> Result<bool, RecvError> {
        if self.is_ended() {
            return Ok(false);
        }
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        if left.is_some_and(|left| left.is_zero()) {
            return Ok(false);
        }
        if self.arm() {
            self.sleeps += 1;
            match self.nap(left) {
                Err(error) if self.interruptible || error.kind() != ErrorKind::Interrupted => {
                    self.disarm()?;
                    return Err(error.into());
                }
                _ => {}
            }
        }
        self.disarm()?;
        Ok(true)
    }

    /// Sleeps until a message arrives, at most `left`. Fails with EINTR after a signal.
    pub(super) fn nap(&self, left: Option<Duration>) -> io::Result<()> {
        if self.lanes[0].is_deaf() {
            // The unread messages keep the socket readable, so poll(2) would return at once. A doorbell may wait behind them. The
            // caller therefore checks the lanes after a short sleep.
            return sys::hung_up(&self.lanes[0].socket, left.map_or(NAP, |left| left.min(NAP))).map(drop);
        }
        sys::wait_interruptibly(&[self.as_fd()], left).map(drop)
    }
}
