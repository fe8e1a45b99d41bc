//! Waiting, with the interpreter's lock given away and signals heard.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use towpath_mux::io::{Error, Flags};
use towpath_ring::{AttachError, Options, RecvError, ReserveError};

use crate::failure;

/// A signal that came just before a wait is heard after this.
const LOOK: Duration = Duration::from_secs(1);
/// The same where no signal ends a wait.
pub(crate) const PIECE: Duration = Duration::from_millis(100);
/// Nobody waits longer for an end.
const LONGEST: Duration = Duration::from_hours(24);

/// How long a call that sends waits for room before signals are heard.
pub(crate) const ROOM: Duration = LOOK;

/// A client that is waited on.
pub(crate) trait Queue: Send {
    type Item: Send;

    fn receive(&mut self, timeout: Duration) -> Result<Option<Self::Item>, RecvError>;
    fn is_ended(&mut self) -> bool;
}

/// What a look at a client brought.
pub(crate) enum Look<T> {
    Found(T),
    /// Nothing, in that time.
    Nothing,
    /// A signal came.
    Interrupted,
    Ended,
    Closed,
}

/// Looks for so long; makes something of what is there.
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

/// The next that `look` finds; waits for it. None at the end. Nothing is borrowed when signals are heard: their handlers may use what is
/// waited on, and may close it, which is an end too.
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
            Look::Nothing if left == Some(most) => return Err(failure::timed_out("nothing came in time")),
            Look::Nothing | Look::Interrupted => {}
        }
        py.check_signals()?;
        heard = true;
    }
}

/// Sends, when there is room. Nothing is borrowed when signals are heard, as in [`next`].
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

/// A call on a mux's handle that may wait as long as it is told, until it needs to wait no more. It gives none when the handle is closed;
/// so does this when a signal's handler has closed it.
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
                return Err(failure::timed_out("it would have to wait longer"));
            }
            Some(Err(Error::WouldBlock)) => {}
            done => return Ok(done),
        }
        py.check_signals()?;
        heard = true;
    }
}

/// What a sender does until it says that it has come to its end, in pieces.
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
        // It may have worked for less than it was given.
        if end.is_some_and(|end| Instant::now() >= end) {
            return Err(failure::timed_out("not everything was sent in time"));
        }
        py.check_signals()?;
    }
}

/// How long an end is waited for.
pub(crate) fn patience(seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(PyValueError::new_err("how long to wait is not negative"));
    }
    Ok(Duration::try_from_secs_f64(seconds).map_or(LONGEST, |patience| patience.min(LONGEST)))
}

/// When so many seconds have passed; none when that is beyond all time.
fn end_of(seconds: f64) -> PyResult<Option<Instant>> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(PyValueError::new_err("a timeout is not negative; None waits for ever"));
    }
    Ok(Duration::try_from_secs_f64(seconds).ok().and_then(|timeout| Instant::now().checked_add(timeout)))
}

/// The socket and the name that the arguments mean.
pub(crate) fn whereto(path: Option<PathBuf>, name: Option<&str>) -> PyResult<(PathBuf, Options)> {
    // What started Python is not what people know a program by.
    let options = Options::named(name.unwrap_or("python"));
    let path = path.or_else(|| std::env::var_os("TOWPATH_SOCKET").map(PathBuf::from));
    Ok((path.ok_or_else(|| failure::attach(&AttachError::NoSocket))?, options))
}
