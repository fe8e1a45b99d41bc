//! Blocking calls, with the interpreter's lock released and signals handled.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use towpath_mux::io::{Error, Flags};
use towpath_ring::{AttachError, Options, RecvError, ReserveError};

use crate::failure;

/// Longest single wait. A signal that arrives just before a wait is handled after it.
const LOOK: Duration = Duration::from_secs(1);
/// Longest single wait where a signal does not interrupt the wait.
pub(crate) const PIECE: Duration = Duration::from_millis(100);
/// Longest time to wait for a close.
const LONGEST: Duration = Duration::from_hours(24);

/// How long a send waits for ring space before signals are handled.
pub(crate) const ROOM: Duration = LOOK;

/// A client with a receive call that waits.
pub(crate) trait Queue: Send {
    type Item: Send;

    fn receive(&mut self, timeout: Duration) -> Result<Option<Self::Item>, RecvError>;
    fn is_ended(&mut self) -> bool;
}

/// The outcome of one wait on a client.
pub(crate) enum Look<T> {
    Found(T),
    /// The timeout passed.
    Nothing,
    /// A signal interrupted the wait.
    Interrupted,
    Ended,
    Closed,
}

/// Waits at most `most` for an item and converts it with `make`.
pub(crate) fn look<Q: Queue, T>(
    py: Python<'_>,
    queue: &mut Option<Q>,
    most: Duration,
    make: impl FnOnce(&mut Q, Q::Item) -> T,
) -> PyResult<Look<T>> {
    let Some(queue) = queue else { return Ok(Look::Closed) };
    match py.detach(|| queue.receive(most)) {
        Ok(Some(found)) => Ok(Look::Found(make(queue, found))),
        Ok(None) if queue.is_ended() => Ok(Look::Ended),
        Ok(None) => Ok(Look::Nothing),
        Err(RecvError::System(error)) if error.kind() == ErrorKind::Interrupted => Ok(Look::Interrupted),
        Err(error) => Err(failure::recv(&error)),
    }
}

/// Waits for the next item that `look` finds. Returns `None` at the end. No borrow is held while signal handlers run: a handler may use
/// or close the client. A close by a handler also counts as the end.
pub(crate) fn next<T>(
    py: Python<'_>,
    what: &str,
    timeout: Option<f64>,
    mut look: impl FnMut(Duration) -> PyResult<Look<T>>,
) -> PyResult<Option<T>> {
    let end = timeout.map(end_of).transpose()?.flatten();
    let mut heard = false;
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let most = left.map_or(LOOK, |left| left.min(LOOK));
        match look(most)? {
            Look::Found(found) => return Ok(Some(found)),
            Look::Ended => return Ok(None),
            Look::Closed if heard => return Ok(None),
            Look::Closed => return Err(failure::closed(what)),
            Look::Nothing if left == Some(most) => return Err(failure::timed_out("timed out")),
            Look::Nothing | Look::Interrupted => {}
        }
        py.check_signals()?;
        heard = true;
    }
}

/// Sends, waiting for ring space. No borrow is held while signal handlers run, as in [`next`].
pub(crate) fn send(
    py: Python<'_>,
    mut send: impl FnMut() -> PyResult<Result<(), ReserveError>>,
) -> PyResult<()> {
    loop {
        match send()? {
            Err(ReserveError::RingFull | ReserveError::Interrupted) => py.check_signals()?,
            sent => return sent.map_err(failure::full),
        }
    }
}

/// Repeats a call on a mux handle, which waits for at most the duration it is passed, until it need not wait. `call` returns `None`
/// when the handle is closed; this function returns `None` when a signal handler closed it.
pub(crate) fn pieces<T>(
    py: Python<'_>,
    flags: Flags,
    timeout: Option<f64>,
    mut call: impl FnMut(Duration) -> PyResult<Option<Result<T, Error>>>,
) -> PyResult<Option<Result<T, Error>>> {
    let end = timeout.map(end_of).transpose()?.flatten();
    let mut heard = false;
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let most = left.map_or(PIECE, |left| left.min(PIECE));
        match call(most)? {
            None if heard => return Ok(None),
            None => return Err(failure::closed("mux")),
            Some(Err(Error::WouldBlock)) if flags.contains(Flags::DONTWAIT) => {
                return Ok(Some(Err(Error::WouldBlock)));
            }
            Some(Err(Error::WouldBlock)) if left == Some(most) => {
                return Err(failure::timed_out("timed out"));
            }
            Some(Err(Error::WouldBlock)) => {}
            done => return Ok(done),
        }
        py.check_signals()?;
        heard = true;
    }
}

/// Repeats `work`, in waits of at most [`PIECE`], until it returns true.
pub(crate) fn until(
    py: Python<'_>,
    timeout: Option<f64>,
    mut work: impl FnMut(Duration) -> PyResult<bool>,
) -> PyResult<()> {
    let end = timeout.map(end_of).transpose()?.flatten();
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let most = left.map_or(PIECE, |left| left.min(PIECE));
        if work(most)? {
            return Ok(());
        }
        // `work` may have returned before its time was over.
        if end.is_some_and(|end| Instant::now() >= end) {
            return Err(failure::timed_out("not everything was sent in time"));
        }
        py.check_signals()?;
    }
}

/// Converts the patience of a close to a duration, at most [`LONGEST`].
pub(crate) fn patience(seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(PyValueError::new_err("how long to wait is not negative"));
    }
    Ok(Duration::try_from_secs_f64(seconds).map_or(LONGEST, |patience| patience.min(LONGEST)))
}

/// Converts a timeout to a deadline; `None` if it is out of range.
fn end_of(seconds: f64) -> PyResult<Option<Instant>> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(PyValueError::new_err("a timeout is not negative; None waits for ever"));
    }
    Ok(Duration::try_from_secs_f64(seconds).ok().and_then(|timeout| Instant::now().checked_add(timeout)))
}

/// Returns the socket path and the client name that the arguments specify.
pub(crate) fn whereto(path: Option<PathBuf>, name: Option<&str>) -> PyResult<(PathBuf, Options)> {
    // The process name, which is Python's, would not identify the program.
    let options = Options::named(name.unwrap_or("python"));
    let path = path.or_else(|| std::env::var_os("TOWPATH_SOCKET").map(PathBuf::from));
    Ok((path.ok_or_else(|| failure::attach(&AttachError::NoSocket))?, options))
}
