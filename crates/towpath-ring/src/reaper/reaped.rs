use std::ops::{Deref, DerefMut};
use std::sync::Arc;

use super::{PeerKey, Reaper, Teardown};

/// A value that is dropped on a helper thread, with the other parts of its [`Teardown`].
#[derive(Debug)]
pub struct Reaped<T: Send + 'static> {
    teardown: Arc<Teardown>,
    /// None only during the drop.
    value: Option<T>,
}

impl<T: Send + 'static> Reaped<T> {
    pub(super) fn new(teardown: Arc<Teardown>, value: T) -> Self {
        Self { teardown, value: Some(value) }
    }

    /// The peer whose values are dropped one after another.
    #[must_use]
    pub fn peer(&self) -> PeerKey {
        self.teardown.peer()
    }

    /// The reaper.
    #[must_use]
    pub fn reaper(&self) -> &Reaper {
        self.teardown.reaper()
    }

    /// The teardown that the value belongs to.
    #[must_use]
    pub fn teardown(&self) -> &Arc<Teardown> {
        &self.teardown
    }
}

impl<T: Send + 'static> Deref for Reaped<T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("only the drop takes the value")
    }
}

impl<T: Send + 'static> DerefMut for Reaped<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("only the drop takes the value")
    }
}

impl<T: Send + 'static> Drop for Reaped<T> {
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            self.teardown.add(value);
        }
    }
}
