//! `towpath.Framing`: finds where a message ends; also by a function in Python.
//!
//! Races: the thread of a mux calls the function while it holds the mux's lock, and takes the interpreter's lock for it. Code of this crate
//! therefore releases the interpreter's lock before it takes the lock of a mux.

use std::cell::Cell;

use pyo3::exceptions::{PyRuntimeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyType};
use towpath_mux::framing::{Cause, Custom, Framing as Inner, Message, State, Step};

use crate::data::Data;

/// Bytes of the first call of a function. A function that needs more is called again with at least twice as many: a copy of all bytes
/// that have arrived, for each of many short messages, would take quadratic time.
const FIRST_CALL: usize = 512;
/// "Not for the mux" (include/uapi/asm-generic/errno.h; net/strparser/strparser.c).
const ESTRPIPE: i64 = 86;

thread_local! {
    /// This thread is in a framing function, below the lock of a mux.
    static FRAMES: Cell<bool> = const { Cell::new(false) };
}

/// True in a framing function: a call on its mux would wait for itself.
pub(crate) fn frames() -> bool {
    FRAMES.get()
}

/// Raises RuntimeError in a framing function.
pub(crate) fn not_in_a_function() -> PyResult<()> {
    match frames() {
        true => Err(PyRuntimeError::new_err("a framing function must not use a mux")),
        false => Ok(()),
    }
}

/// A framing: finds where a message ends.
///
/// Framing(text)
///
/// text is a preset or clauses. A Mux, and attach(), accept a framing instead of a text.
#[pyclass(frozen)]
#[derive(Debug)]
pub(crate) struct Framing(Inner);

/// A framing argument.
#[derive(FromPyObject)]
pub(crate) enum Argument<'py> {
    #[pyo3(transparent)]
    Text(String),
    #[pyo3(transparent)]
    Framing(Bound<'py, Framing>),
}

impl Argument<'_> {
    pub(crate) fn get(&self) -> PyResult<Inner> {
        match self {
            Self::Text(text) => Inner::parse(text).map_err(|error| PyValueError::new_err(error.to_string())),
            Self::Framing(framing) => Ok(framing.get().0.clone()),
        }
    }
}

/// State of a framing function. All but messages and cb are 0 before a call.
#[pyclass]
#[derive(Debug)]
pub(crate) struct FramingState {
    /// Number of messages framed on the connection.
    #[pyo3(get)]
    messages: u64,
    /// With result 0: number of bytes, from the start of the message, needed to know more; 0 for one more.
    #[pyo3(get, set)]
    need: usize,
    /// Bytes at the start of the message that are not payload.
    #[pyo3(get, set)]
    skip: usize,
    /// Bytes at its end that are not payload.
    #[pyo3(get, set)]
    trim: usize,
    /// The message's mark.
    #[pyo3(get, set)]
    mark: u32,
    /// The message's hash, for order="key"; 0 for none.
    #[pyo3(get, set)]
    hash: u32,
    /// Five numbers of 32 bits: 0 at the start of the connection, kept from call to call.
    #[pyo3(get, set)]
    cb: (u32, u32, u32, u32, u32),
}

#[pymethods]
impl Framing {
    #[new]
    fn new(text: &str) -> PyResult<Self> {
        Ok(Self(Argument::Text(text.to_owned()).get()?))
    }

    /// A framing described by a TOML document.
    #[classmethod]
    fn from_toml(_class: &Bound<'_, PyType>, document: &str) -> PyResult<Self> {
        Inner::from_toml(document).map(Self).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// A BPF program made for KCM: the bytes of an object file, of raw eBPF instructions, or of the output of tcpdump -ddd. name selects one
    /// of several programs of an object.
    #[classmethod]
    #[pyo3(signature = (object, name=None))]
    fn program(
        _class: &Bound<'_, PyType>,
        py: Python<'_>,
        object: Data,
        name: Option<String>,
    ) -> PyResult<Self> {
        let program = Inner::load_program(&object.get(py)?, name);
        program.map(Self).map_err(|error| PyValueError::new_err(error.to_string()))
    }

    /// A framing by a Python function(data, state). data (bytes) begins with a message; others may follow it. state is a FramingState.
    ///
    /// The function returns the length of the message, of which more than data has may be still to come; 0 if it needs more bytes: it is
    /// called again with the same bytes and more; a negative errno(3) number to end the connection; or -errno.ESTRPIPE to give the
    /// connection back. An exception ends the connection, too; its text is in MuxEnded. More bytes after the same message must not change
    /// the result. The function runs while the mux is locked: all connections wait for it, and a call on a mux raises RuntimeError.
    #[classmethod]
    fn function(_class: &Bound<'_, PyType>, function: Py<PyAny>, py: Python<'_>) -> PyResult<Self> {
        if !function.bind(py).is_callable() {
            return Err(PyTypeError::new_err("the framing function is not callable"));
        }
        Ok(Self(Inner::custom("a function", Function(function))))
    }
}

/// A framing function in Python.
struct Function(Py<PyAny>);

impl Custom for Function {
    fn step(&self, bytes: &[u8], state: &mut State) -> Step {
        let step = Python::try_attach(|py| {
            FRAMES.set(true);
            let step = self.frame(py, bytes, state);
            FRAMES.set(false);
            step.unwrap_or_else(|error| {
                Step::Error(Cause::Malformed(format!("the framing function raised {error}").into()))
            })
        });
        step.unwrap_or(Step::Error(Cause::malformed("the interpreter has ended")))
    }
}

impl Function {
    fn frame(&self, py: Python<'_>, bytes: &[u8], state: &mut State) -> PyResult<Step> {
        let mut shown = bytes.len().min(FIRST_CALL);
        loop {
            match self.call(py, &bytes[..shown], state)? {
                Step::Need(need) if shown < bytes.len() => shown = need.max(2 * shown).min(bytes.len()),
                step => return Ok(step),
            }
        }
    }

    fn call(&self, py: Python<'_>, bytes: &[u8], state: &mut State) -> PyResult<Step> {
        let [a, b, c, d, e] = state.cb;
        let (messages, cb) = (state.messages, (a, b, c, d, e));
        let of_python = FramingState { messages, need: 0, skip: 0, trim: 0, mark: 0, hash: 0, cb };
        let of_python = Bound::new(py, of_python)?;
        let result = self.0.bind(py).call1((PyBytes::new(py, bytes), &of_python))?.extract::<i64>()?;
        let FramingState { need, skip, trim, mark, hash, cb: (a, b, c, d, e), .. } =
            *of_python.try_borrow()?;
        state.cb = [a, b, c, d, e];
        Ok(match result {
            0 => Step::Need(need),
            length @ 1.. => Step::Message(Message { length: length as usize, skip, trim, mark, hash }),
            errno if errno == -ESTRPIPE => Step::GiveBack,
            errno => Step::Error(Cause::Program(i32::try_from(errno.unsigned_abs()).unwrap_or(i32::MAX))),
        })
    }
}
