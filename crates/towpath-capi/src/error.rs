//! Results of C functions: a number, or an error with an errno(3) number and a message kept for the calling thread.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int};
use std::io::ErrorKind;
use std::panic::{AssertUnwindSafe, catch_unwind};

use rustix::io::Errno;
use towpath_ring::{AttachError, InjectError, RecvError, ReserveError, ServeError};
use towpath_send::SendError;

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// The error of a call.
#[derive(Debug)]
pub(crate) struct Failure {
    errno: i32,
    text: Cow<'static, str>,
}

impl Failure {
    pub(crate) fn new(errno: Errno, text: impl Into<Cow<'static, str>>) -> Self {
        Self { errno: errno.raw_os_error(), text: text.into() }
    }

    pub(crate) fn of_errno(errno: i32, text: String) -> Self {
        Self { errno, text: text.into() }
    }

    pub(crate) const NULL_HANDLE: Self = Self::null("the handle is NULL");
    pub(crate) const NULL_FRAME: Self = Self::null("the frame or message is NULL");

    pub(crate) const fn null(what: &'static str) -> Self {
        Self { errno: Errno::INVAL.raw_os_error(), text: Cow::Borrowed(what) }
    }

    /// Stores the message for [`towpath_error`]; returns the negative number.
    fn report(self) -> c_int {
        let text = self.text.replace('\0', " ");
        // While a thread exits and runs the destructors of its keys, its thread-local storage may be gone.
        let _ = LAST.try_with(|last| last.replace(CString::new(text).unwrap_or_default()));
        -self.errno
    }
}

/// Runs the body of a C function. `work` returns no negative number; a panic becomes -ENOTRECOVERABLE and does not unwind into C.
pub(crate) fn guard(work: impl FnOnce() -> Result<c_int, Failure>) -> c_int {
    // After a panic the handle may be inconsistent; its methods may panic again, which is caught again.
    let ended = catch_unwind(AssertUnwindSafe(work));
    let defect =
        |_| Err(Failure::new(Errno::NOTRECOVERABLE, "internal error of libtowpath; close the handle"));
    ended.unwrap_or_else(defect).unwrap_or_else(Failure::report)
}

/// Message of the last failed call of this thread. See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

impl From<AttachError> for Failure {
    fn from(error: AttachError) -> Self {
        Self { errno: error.errno(), text: error.to_string().into() }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        let errno = error.raw_os_error().unwrap_or_else(|| of_kind(error.kind()).raw_os_error());
        Self { errno, text: error.to_string().into() }
    }
}

/// The errno number for an error without an OS error number.
fn of_kind(kind: ErrorKind) -> Errno {
    match kind {
        ErrorKind::ConnectionReset => Errno::CONNRESET,
        ErrorKind::Unsupported => Errno::OPNOTSUPP,
        ErrorKind::InvalidInput => Errno::INVAL,
        ErrorKind::NotConnected => Errno::NOTCONN,
        ErrorKind::AlreadyExists => Errno::EXIST,
        _ => Errno::IO,
    }
}

impl From<RecvError> for Failure {
    fn from(error: RecvError) -> Self {
        let text = error.to_string().into();
        match error {
            RecvError::Damaged(_) => Self { errno: Errno::PROTO.raw_os_error(), text },
            RecvError::System(source) => Self { text, ..source.into() },
        }
    }
}

impl From<ReserveError> for Failure {
    fn from(why: ReserveError) -> Self {
        match why {
            ReserveError::TooLarge => Self::new(Errno::MSGSIZE, "larger than the peer accepts"),
            ReserveError::Disconnected => Self::new(Errno::PIPE, "the peer has disconnected"),
            ReserveError::RingFull | ReserveError::NoContiguousSpace => {
                Self::new(Errno::AGAIN, "the ring is full")
            }
            ReserveError::Interrupted => Self::new(Errno::INTR, why.to_string()),
        }
    }
}

impl From<InjectError> for Failure {
    fn from(why: InjectError) -> Self {
        match why {
            InjectError::NotPermitted => Self::new(Errno::PERM, why.to_string()),
            InjectError::NotSent(why) => why.into(),
        }
    }
}

impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Self {
        let text = error.to_string().into();
        match error {
            ServeError::Recv(why) => why.into(),
            ServeError::Reply { why, .. } => Self { text, ..why.into() },
        }
    }
}

impl From<SendError> for Failure {
    fn from(error: SendError) -> Self {
        let text = error.to_string().into();
        match error {
            SendError::NotSupported { .. } => Self::new(Errno::OPNOTSUPP, text),
            SendError::TooLong { .. } => Self::new(Errno::MSGSIZE, text),
            SendError::Stalled(_) => Self::new(Errno::TIMEDOUT, text),
            SendError::NotASocket(why) | SendError::Segmentation(why) => Self { text, ..why.into() },
            SendError::Gone(why) => Self { text, ..why.into() },
            SendError::Queue(why) | SendError::Io(why) => Self { text, ..why.into() },
            _ => Self::new(Errno::IO, text),
        }
    }
}
