//! Lanes: messages that keep their order by going one at a time.

use std::collections::VecDeque;

use super::message::Message;

/// One message is ready or with a worker; these wait for it to be done. Gone when none waits behind it.
#[derive(Debug, Default)]
pub(super) struct KeyQueue {
    pub(super) pending: VecDeque<Message>,
}
