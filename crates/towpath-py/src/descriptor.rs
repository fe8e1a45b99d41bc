//! Conversion between Python's sockets and descriptor numbers and owned descriptors.
//!
//! A number is converted to an owned descriptor without unsafe code: it is sent over a socket pair (SCM_RIGHTS), and the kernel
//! duplicates it. The kernel returns EBADF if the number is not an open descriptor.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixDatagram;

use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyBytes};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};

use crate::failure;

/// Duplicates the descriptor of `socket`, a socket object or a descriptor number.
pub(crate) fn duplicate(socket: &Bound<'_, PyAny>) -> PyResult<OwnedFd> {
    let py = socket.py();
    let fd = match socket.extract::<RawFd>() {
        Ok(fd) => fd,
        Err(_) => socket.call_method0("fileno")?.extract()?,
    };
    let (here, there) = UnixDatagram::pair().map_err(|error| failure::system(&error))?;
    let there = give(py, there.into())?;
    let sent = py.import("socket")?.call_method1("send_fds", (&there, [PyBytes::new(py, b"f")], [fd]));
    there.call_method0("close")?;
    sent?;
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    recvmsg(&here, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
        .map_err(|error| failure::system(&error.into()))?;
    let found = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    // The kernel drops the descriptor when this process has reached its limit of descriptors.
    found.ok_or_else(|| failure::system(&Errno::MFILE.into()))
}

/// Converts `fd` to a Python socket, which then owns the descriptor.
pub(crate) fn give(py: Python<'_>, fd: OwnedFd) -> PyResult<Bound<'_, PyAny>> {
    let arguments = [("fileno", fd.as_raw_fd())].into_py_dict(py)?;
    let socket = py.import("socket")?.getattr("socket")?.call((), Some(&arguments))?;
    let _: RawFd = fd.into_raw_fd();
    Ok(socket)
}
