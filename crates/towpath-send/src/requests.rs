//! Numbers of the requests of io_uring, without the ring: results and notifications go in, completed numbers come out.
//!
//! Invariant: a number is completed once, after its request was accepted and the kernel has stopped reading its memory.

use std::collections::VecDeque;

/// The requests of one socket.
#[derive(Debug)]
pub(crate) struct Requests {
    /// The number of the next accepted request.
    next: u32,
    /// Count of submissions. The id of a request is this count and the request's number: the number alone is not unique, because the
    /// request after a failed one gets the same number.
    submitted: u32,
    /// Failed requests whose notification is still to come.
    failed: Vec<u64>,
    /// Completed requests, and whether the kernel copied.
    completed: VecDeque<(u64, bool)>,
}

impl Requests {
    /// The first accepted request gets the number `next`.
    pub(crate) fn new(next: u32) -> Self {
        Self { next, submitted: 0, failed: Vec::new(), completed: VecDeque::new() }
    }

    /// Returns the id of a new request. Its result follows before the next request begins.
    pub(crate) fn begin(&mut self) -> u64 {
        self.submitted = self.submitted.wrapping_add(1);
        u64::from(self.submitted) << 32 | u64::from(self.next)
    }

    /// Handles the result of the request that began last: the number of bytes that the kernel accepted, or a negative errno. `more`:
    /// a notification follows, or was handled already.
    ///
    /// # Errors
    /// The positive errno of a request that failed.
    pub(crate) fn handle_result(&mut self, id: u64, result: i32, more: bool) -> Result<usize, i32> {
        if result <= 0 {
            if more {
                // The notification may have arrived together with the result.
                match self.completed.iter().rposition(|(completed, _)| *completed == id) {
                    Some(at) => drop(self.completed.remove(at)),
                    None => self.failed.push(id),
                }
            }
            return if result == 0 { Ok(0) } else { Err(-result) };
        }
        if !more {
            self.completed.push_back((id, false));
        }
        self.next = self.next.wrapping_add(1);
        Ok(result as usize)
    }

    /// Handles a notification: the kernel no longer reads the memory of the request.
    pub(crate) fn handle_notification(&mut self, id: u64, copied: bool) {
        match self.failed.iter().position(|failed| *failed == id) {
            Some(at) => drop(self.failed.swap_remove(at)),
            None => self.completed.push_back((id, copied)),
        }
    }

    /// Returns a completed number, and whether the kernel copied.
    pub(crate) fn poll_completed(&mut self) -> Option<(u32, bool)> {
        // The lower half of the id is the number.
        self.completed.pop_front().map(|(id, copied)| (id as u32, copied))
    }
}
