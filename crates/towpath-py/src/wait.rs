//! Waiting, with the interpreter's lock given away and signals heard.

use std::io::ErrorKind;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use towpath_mux::io::{Error, Flags};
use towpath_ring::{AttachError, Options, RecvError};

use crate::failure;

/// A signal that came just before a wait is heard after this.
const LOOK: Duration = Duration::from_secs(1);
/// The same where no signal ends a wait.
const PIECE: Duration = Duration::from_millis(100);
/// Nobody waits longer for an end.
const LONGEST: Duration = Duration::from_hours(24);

/// A client that is waited on.
pub(crate) trait Queue: Send {
    type Item: Send;

    fn receive(&mut self, timeout: Duration) -> Result<Option<Self::Item>, RecvError>;
    fn is_ended(&mut self) -> bool;
}

/// The next; waits for it. None at the end.
pub(crate) fn next<Q: Queue>(
    py: Python<'_>,
    queue: &mut Q,
    timeout: Option<f64>,
) -> PyResult<Option<Q::Item>> {
    let end = timeout.map(end_of).transpose()?.flatten();
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let most = left.map_or(LOOK, |left| left.min(LOOK));
        match py.detach(|| queue.receive(most)) {
            Ok(None) if queue.is_ended() => return Ok(None),
            Ok(None) if left == Some(most) => return Err(failure::timed_out("nothing came in time")),
            Ok(None) => py.check_signals()?,
            Ok(found) => return Ok(found),
            Err(RecvError::System(error)) if error.kind() == ErrorKind::Interrupted => py.check_signals()?,
            Err(error) => return Err(failure::recv(&error)),
        }
    }
}

/// A call on a mux's handle that may wait as long as it is told, until it needs to wait no more.
pub(crate) fn pieces<T: Send>(
    py: Python<'_>,
    flags: Flags,
    timeout: Option<f64>,
    mut call: impl FnMut(Duration) -> Result<T, Error> + Send,
) -> PyResult<Result<T, Error>> {
    let end = timeout.map(end_of).transpose()?.flatten();
    loop {
        let left = end.map(|end| end.saturating_duration_since(Instant::now()));
        let most = left.map_or(PIECE, |left| left.min(PIECE));
        match py.detach(|| call(most)) {
            Err(Error::WouldBlock) if flags.contains(Flags::DONTWAIT) => return Ok(Err(Error::WouldBlock)),
            Err(Error::WouldBlock) if left == Some(most) => {
                return Err(failure::timed_out("it would have to wait longer"));
            }
            Err(Error::WouldBlock) => py.check_signals()?,
            done => return Ok(done),
        }
    }
}

/// How long an end is waited for.
pub(crate) fn patience(seconds: f64) -> PyResult<Duration> {
    if seconds.is_nan() || seconds < 0.0 {
        return Err(PyValueError::new_err("patience is not negative"));
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
