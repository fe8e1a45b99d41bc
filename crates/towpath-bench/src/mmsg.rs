#![allow(unsafe_code)]
//! sendmmsg(2) and recvmmsg(2): several messages per system call.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

/// Message buffers and their headers. Both have stable addresses.
pub(crate) struct Batch {
    buffers: Vec<Box<[u8]>>,
    // Referenced by the headers' pointers only.
    _slices: Box<[libc::iovec]>,
    headers: Box<[libc::mmsghdr]>,
}

impl Batch {
    /// Creates a batch with one message per buffer; the buffers also receive messages.
    pub(crate) fn new(buffers: Vec<Box<[u8]>>) -> Self {
        let mut buffers = buffers;
        let mut slices: Box<[libc::iovec]> = buffers
            .iter_mut()
            .map(|buffer| libc::iovec { iov_base: buffer.as_mut_ptr().cast(), iov_len: buffer.len() })
            .collect();
        let headers = slices
            .iter_mut()
            .map(|slice| libc::mmsghdr {
                msg_hdr: libc::msghdr {
                    msg_name: ptr::null_mut(),
                    msg_namelen: 0,
                    msg_iov: slice,
                    msg_iovlen: 1,
                    msg_control: ptr::null_mut(),
                    msg_controllen: 0,
                    msg_flags: 0,
                },
                msg_len: 0,
            })
            .collect();
        Self { buffers, _slices: slices, headers }
    }

    /// The buffer of message `n`, to fill before a send.
    pub(crate) fn buffer(&mut self, n: usize) -> &mut [u8] {
        &mut self.buffers[n]
    }

    /// The contents of message `n` of the last [`Batch::receive`].
    pub(crate) fn received(&self, n: usize) -> &[u8] {
        &self.buffers[n][..self.headers[n].msg_len as usize]
    }

    /// Sends the messages from `from` on. Returns the number that the kernel accepted.
    pub(crate) fn send(&mut self, socket: &impl AsFd, from: usize) -> io::Result<usize> {
        let headers = &mut self.headers[from..];
        let (fd, count) = (socket.as_fd().as_raw_fd(), headers.len() as libc::c_uint);
        // SAFETY: every header points to a slice in `_slices`, which points to a buffer of its length; self owns both.
        let sent = unsafe { libc::sendmmsg(fd, headers.as_mut_ptr(), count, 0) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Receives up to `max` messages; waits only for the first. Returns `None` at the end of the stream.
    pub(crate) fn receive(&mut self, socket: &impl AsFd, max: usize) -> io::Result<Option<usize>> {
        let (fd, count) = (socket.as_fd().as_raw_fd(), max.min(self.headers.len()) as libc::c_uint);
        let (headers, flags) = (self.headers.as_mut_ptr(), libc::MSG_WAITFORONE);
        // SAFETY: as in `send`; the kernel writes to the buffers, which are not referenced across `&mut self`.
        let received = unsafe { libc::recvmmsg(fd, headers, count, flags, ptr::null_mut()) };
        let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
        // The end of a seqpacket stream appears as empty messages.
        let whole = self.headers[..received].iter().take_while(|header| header.msg_len > 0).count();
        Ok((whole > 0).then_some(whole))
    }
}
