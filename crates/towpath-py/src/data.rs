//! Byte arguments from Python.

use std::borrow::Cow;

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

/// A `bytes` object, read in place, or another object with the buffer protocol, copied because it is mutable.
#[derive(FromPyObject)]
pub(crate) enum Data {
    #[pyo3(transparent)]
    Bytes(PyBackedBytes),
    #[pyo3(transparent)]
    Buffer(PyBuffer<u8>),
}

impl Data {
    pub(crate) fn get(&self, py: Python<'_>) -> PyResult<Cow<'_, [u8]>> {
        match self {
            Self::Bytes(bytes) => Ok(Cow::Borrowed(bytes)),
            Self::Buffer(buffer) => Ok(Cow::Owned(buffer.to_vec(py)?)),
        }
    }
}
