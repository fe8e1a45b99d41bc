//! Conversion of errors to Python exceptions.

use std::io::{self, ErrorKind};

use pyo3::PyErr;
use pyo3::exceptions::{PyOSError, PyTimeoutError, PyValueError};
use rustix::io::Errno;
use towpath_mux::io::Error;
use towpath_ring::{AttachError, RecvError, ReserveError};
use towpath_send::SendError;

/// Returns an OSError. Python selects the subclass by `errno`: PermissionError for EPERM.
pub(crate) fn with_errno(errno: i32, text: String) -> PyErr {
    PyOSError::new_err((errno, text))
}

pub(crate) fn attach(error: &AttachError) -> PyErr {
    with_errno(error.errno(), error.to_string())
}

pub(crate) fn recv(error: &RecvError) -> PyErr {
    let errno = match error {
        RecvError::Damaged(_) => Errno::PROTO.raw_os_error(),
        RecvError::System(source) => source.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
    };
    with_errno(errno, error.to_string())
}

pub(crate) fn full(why: ReserveError) -> PyErr {
    let (errno, text) = match why {
        ReserveError::TooLarge => {
            (Errno::MSGSIZE, "the message is larger than the other side accepts".to_owned())
        }
        ReserveError::Disconnected => (Errno::PIPE, "the peer has disconnected".to_owned()),
        ReserveError::RingFull | ReserveError::NoContiguousSpace => (Errno::NOBUFS, why.to_string()),
        ReserveError::Interrupted => (Errno::INTR, why.to_string()),
    };
    with_errno(errno.raw_os_error(), text)
}

pub(crate) fn mux(error: &Error) -> PyErr {
    with_errno(error.errno(), error.to_string())
}

pub(crate) fn send(error: &SendError) -> PyErr {
    let (errno, text) = match error {
        SendError::NotSupported { why } => (
            Errno::OPNOTSUPP,
            format!(
                r#"this socket does not support zero copy ({why}): use choice="adaptive" to send with a copy instead"#
            ),
        ),
        SendError::TooLong { .. } => (Errno::MSGSIZE, error.to_string()),
        SendError::Stalled(_) => (Errno::TIMEDOUT, error.to_string()),
        SendError::NotASocket(source)
        | SendError::Segmentation(source)
        | SendError::Gone(source)
        | SendError::Queue(source)
        | SendError::Io(source) => {
            let of_kind = match source.kind() {
                ErrorKind::ConnectionReset => Errno::CONNRESET,
                ErrorKind::Unsupported => Errno::OPNOTSUPP,
                _ => Errno::IO,
            };
            let errno = source.raw_os_error().map_or(of_kind, Errno::from_raw_os_error);
            (errno, error.to_string())
        }
        _ => (Errno::IO, error.to_string()),
    };
    with_errno(errno.raw_os_error(), text)
}

/// Converts an I/O error. For an error without an errno, the error's kind selects it.
pub(crate) fn system(error: &io::Error) -> PyErr {
    let errno = error.raw_os_error().unwrap_or_else(|| {
        let errno = match error.kind() {
            ErrorKind::InvalidInput => Errno::INVAL,
            ErrorKind::NotConnected => Errno::SHUTDOWN,
            _ => Errno::IO,
        };
        errno.raw_os_error()
    });
    with_errno(errno, error.to_string())
}

pub(crate) fn timed_out(text: &'static str) -> PyErr {
    PyTimeoutError::new_err((Errno::TIMEDOUT.raw_os_error(), text))
}

pub(crate) fn closed(what: &str) -> PyErr {
    PyValueError::new_err(format!("the {what} is closed"))
}
