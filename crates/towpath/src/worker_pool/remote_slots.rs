//! Slots for workers on other machines: where the workers come from.

use std::num::NonZeroUsize;
use std::sync::Arc;

use super::process::Command;
use crate::process::{Place, Program, Remote, Starter};

/// Workers on other machines.
#[derive(Clone, Debug)]
pub struct RemoteSlots {
    /// Gives them to this pool.
    pub starter: Arc<dyn Remote>,
    /// The most of them at the same time.
    pub most: NonZeroUsize,
}

impl RemoteSlots {
    /// How one is started.
    pub(super) fn command(&self, place: &Place) -> Command {
        Command {
            program: Program::new(&["a worker on another machine".to_owned()]),
            place: place.clone(),
            starter: Starter::Remote(Arc::clone(&self.starter)),
            waits: true,
        }
    }
}
