//! How a client waits: it looks for some time, and then sleeps until a doorbell rings.

use std::hint;
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use super::Consumer;
use crate::client::recv_error::RecvError;
use crate::shm::cpu;
use crate::shm::sys;

/// Looks at the lanes before going to sleep: some 10 us.
pub(super) const SPINS: u32 = 400;
/// Sleeps after which one who learns from them looks for as long again, to see whether that is worth it now.
const AGAIN: u64 = 16;
/// Looks before it is asked where the engine runs: an answer that comes at once does not wait for that.
const LOOKS: u32 = 8;
/// Looks where the engine runs on the same CPU, each after the engine had its turn: two are cheaper than a sleep and a doorbell.
const YIELDS: u32 = 2;
/// How long is slept at a time while doorbells are not heard.
const NAP: Duration = Duration::from_millis(1);

impl Consumer {
    /// What `take` finds; waits for it, at most until `end`.
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

    /// From now on it looks less long for what does not come: for clients that have a CPU to charge.
    pub(crate) fn learn(&mut self) {
        self.learns = true;
    }

    /// Whether every engine thread was last seen on the CPU of this one: nothing comes while this thread looks for it.
    pub(super) fn shares_cpu(&self) -> bool {
        self.lanes.iter().all(|lane| cpu::is_shared(&lane.rings.memory.theirs))
    }

    /// Waits for a doorbell, at most until `end`; false when there is nothing to be waited for any more.
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

    /// Sleeps until something comes, at most so long; fails with EINTR when a signal came.
    pub(super) fn nap(&self, left: Option<Duration>) -> io::Result<()> {
        if self.lanes[0].is_deaf() {
            // What is not read from the socket keeps it readable: to wait for that would be to spin. A doorbell is behind it, so what
            // it would tell is looked for.
            return sys::hung_up(&self.lanes[0].socket, left.map_or(NAP, |left| left.min(NAP))).map(drop);
        }
        sys::wait_interruptibly(&[self.as_fd()], left).map(drop)
    }
}
