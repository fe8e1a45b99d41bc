//! Quarantine for frames that the kernel may still read but whose completions can no longer arrive.

use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::time::Duration;

use towpath_wire::Time;

/// Time for which a frame is held after its connection was reset. The reset empties the socket's queue, but copies of packets may
/// still be in a queueing discipline or a device.
pub const HOLD: Duration = Duration::from_secs(60);

/// Frames of connections that ended before their completions arrived. Each is held for [`HOLD`].
///
/// Dropping a quarantine leaks the frames in it on purpose: reusing their memory could transmit another owner's data.
#[derive(Debug)]
pub struct Quarantine<T> {
    held: VecDeque<(Time, ManuallyDrop<T>)>,
}

impl<T> Quarantine<T> {
    /// An empty quarantine.
    pub const fn new() -> Self {
        Self { held: VecDeque::new() }
    }

    /// Holds `frames` until [`HOLD`] after `now`.
    pub fn hold(&mut self, frames: impl IntoIterator<Item = T>, now: Time) {
        let until = now + HOLD;
        self.held.extend(frames.into_iter().map(|frame| (until, ManuallyDrop::new(frame))));
    }

    /// Returns a frame whose hold time has passed.
    pub fn poll(&mut self, now: Time) -> Option<T> {
        let (until, _) = self.held.front()?;
        if *until > now {
            return None;
        }
        self.held.pop_front().map(|(_, frame)| ManuallyDrop::into_inner(frame))
    }

    /// Adds the frames of another quarantine, with their hold times.
    pub fn append(&mut self, mut other: Self) {
        self.held.append(&mut other.held);
        self.held.make_contiguous().sort_by_key(|(until, _)| *until);
    }

    /// The time at which the next frame is released.
    pub fn poll_timeout(&self) -> Option<Time> {
        self.held.front().map(|(until, _)| *until)
    }

    /// Number of frames held.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Returns true if no frame is held.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }
}

impl<T> Default for Quarantine<T> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use super::*;

    #[test]
    fn frames_are_released_after_the_hold_time() {
        let (early, late) = (Time::from_nanos(5), Time::from_nanos(5) + Duration::from_secs(1));
        let mut quarantine = Quarantine::new();
        quarantine.hold(["late"], late);
        let mut other = Quarantine::new();
        other.hold(["early"], early);
        quarantine.append(other);
        assert_eq!(quarantine.poll(early), None);
        assert_eq!(quarantine.poll_timeout(), Some(early + HOLD));
        assert_eq!(quarantine.poll(early + HOLD), Some("early"));
        assert_eq!(quarantine.poll(early + HOLD), None);
        assert_eq!(quarantine.poll(late + HOLD), Some("late"));
        assert!(quarantine.is_empty());
    }

    #[test]
    fn held_frames_are_never_dropped() {
        let frame = Rc::new(());
        let mut quarantine = Quarantine::new();
        quarantine.hold([frame.clone()], Time::default());
        drop(quarantine);
        assert_eq!(Rc::strong_count(&frame), 2);
    }
}
