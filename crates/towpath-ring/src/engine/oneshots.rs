//! One-shot messages to a client: each is in a separate sealed memfd.

use std::os::fd::AsFd;

use crate::engine::peer_liveness::{Death, PeerLiveness};
use crate::handshake::messages::Notice;
use crate::lane::frames::Frames;
use crate::lane::reserve_error::ReserveError;
use crate::shm::seq::Seq;
use crate::shm::sys::{self, Sent};

/// The one-shot messages that the client has not released, and the limit of their bytes.
#[derive(Debug)]
pub(crate) struct OneShots {
    /// Sequence number and length of each.
    outstanding: Vec<(Seq, u64)>,
    max: u64,
}

impl OneShots {
    /// At most `max` bytes at a time, in one message or several.
    pub(crate) fn new(max: u64) -> Self {
        Self { outstanding: Vec::new(), max }
    }

    /// Sends the memory of message `seq` over the socket of lane `lane`. The caller publishes the frame afterwards: when the
    /// client sees the header, it has the descriptor.
    pub(crate) fn send(
        &mut self,
        peer: &PeerLiveness,
        lane: u32,
        seq: Seq,
        bytes: &[u8],
    ) -> Result<(), ReserveError> {
        let len = bytes.len() as u64;
        if !self.fits(len) {
            return Err(ReserveError::TooLarge);
        }
        let outstanding: u64 = self.outstanding.iter().map(|(_, len)| len).sum();
        if outstanding + len > self.max {
            return Err(ReserveError::RingFull);
        }
        let failed = |e| {
            log::warn!("cannot send a message of {len} bytes in a memfd: {e}");
            ReserveError::TooLarge
        };
        let fd = sys::frozen(bytes).map_err(failed)?;
        match sys::send(peer.socket(lane), &Notice::OneShot { seq, len }.emit(), &[fd.as_fd()]) {
            Ok(Sent::Yes) => {}
            Ok(Sent::Full) => return Err(ReserveError::RingFull),
            Ok(Sent::Gone) => {
                peer.end(Death::Closed);
                return Err(ReserveError::Disconnected);
            }
            Err(e) => return Err(failed(e)),
        }
        self.outstanding.push((seq, len));
        Ok(())
    }

    /// Whether a message of `len` bytes may ever be sent.
    fn fits(&self, len: u64) -> bool {
        len > 0 && len <= self.max.min(u32::MAX.into())
    }

    /// Forgets the messages that the client has released. An overdue message stays until its client releases it, because
    /// the client may still have it mapped.
    #[inline]
    pub(crate) fn forget_released(&mut self, frames: &Frames) {
        if !self.outstanding.is_empty() {
            self.outstanding.retain(|(seq, _)| {
                frames.find(*seq).is_some() || frames.skipped().iter().any(|at| frames.seq_at(*at) == *seq)
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_is_for_one_message_and_for_all() {
        let (lanes, clients) = crate::mock::channel(&crate::mock::config());
        let (peer, mut frames) = (&lanes[0].liveness, Frames::new(4, Seq::FIRST));
        let mut oneshots = OneShots::new(100);
        for (len, result) in [
            (0, Err(ReserveError::TooLarge)),
            (101, Err(ReserveError::TooLarge)),
            (60, Ok(())),
            (41, Err(ReserveError::RingFull)),
            (40, Ok(())),
        ] {
            let seq = frames.next_seq();
            assert_eq!(oneshots.send(peer, 0, seq, &vec![1; len]), result, "{len} bytes");
            if result.is_ok() {
                frames.publish(frames.room(1).unwrap(), 1);
            }
        }
        oneshots.forget_released(&frames);
        assert_eq!(oneshots.outstanding, [(Seq(1), 60), (Seq(2), 40)]);
        // A held message counts until it is released.
        let at = frames.find(Seq(1)).unwrap();
        frames.hold(at);
        oneshots.forget_released(&frames);
        assert_eq!(oneshots.outstanding.len(), 2);
        frames.release(at);
        oneshots.forget_released(&frames);
        assert_eq!(oneshots.outstanding, [(Seq(2), 40)]);
        drop(clients);
    }
}
