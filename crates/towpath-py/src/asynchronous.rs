//! Coroutines for asyncio, written in Python (`asynchronous.py`): they wait for a descriptor by the running event loop.

use std::ffi::CString;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyModule, PyTuple};

/// Calls a coroutine function of `asynchronous.py`.
pub(crate) fn coroutine<'py>(
    py: Python<'py>,
    name: &str,
    args: impl IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>, Error = PyErr>,
) -> PyResult<Bound<'py, PyAny>> {
    static MODULE: PyOnceLock<Py<PyModule>> = PyOnceLock::new();
    let module = MODULE.get_or_try_init(py, || {
        let code = CString::new(include_str!("asynchronous.py")).expect("no NUL byte");
        PyModule::from_code(py, &code, c"towpath/asynchronous.py", c"towpath.asynchronous").map(Bound::unbind)
    })?;
    module.bind(py).getattr(name)?.call1(args.into_pyobject(py)?)
}
