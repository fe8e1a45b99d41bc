//! What Python gives as bytes.

use std::borrow::Cow;

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

/// `bytes`, which are read where they are, or anything with the buffer protocol, which is copied: it may change.
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
