use std::ops::{Deref, DerefMut};

use super::{PeerKey, Reaper};

/// A value that is dropped on a helper thread ([`Reaper::drop_for`]).
#[derive(Debug)]
pub struct Reaped<T: Send + 'static> {
    reaper: Reaper,
    peer: PeerKey,
    /// None only during the drop.
    value: Option<T>,
}

impl<T: Send + 'static> Reaped<T> {
    pub(super) fn new(reaper: Reaper, peer: PeerKey, value: T) -> Self {
        Self { reaper, peer, value: Some(value) }
    }

    /// The peer whose values are dropped one after another.
    #[must_use]
    pub fn peer(&self) -> PeerKey {
        self.peer
    }

    /// The reaper.
    #[must_use]
    pub fn reaper(&self) -> &Reaper {
        &self.reaper
    }
}

impl<T: Send + 'static> Deref for Reaped<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("the value leaves in the drop only")
    }
}

impl<T: Send + 'static> DerefMut for Reaped<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("the value leaves in the drop only")
    }
}

impl<T: Send + 'static> Drop for Reaped<T> {
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            self.reaper.drop_for(self.peer, value);
        }
    }
}
