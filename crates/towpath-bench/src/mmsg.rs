#![allow(unsafe_code)]
//! sendmmsg(2) and recvmmsg(2): many messages in one system call.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;

/// Buffers and the headers that name them; both stay where they are.
pub(crate) struct Batch {
    buffers: Vec<Box<[u8]>>,
    // Behind the headers' pointers, never touched from here again.
    _slices: Box<[libc::iovec]>,
    headers: Box<[libc::mmsghdr]>,
}

impl Batch {
    /// One message for each buffer, which is also the room for a received one.
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

    /// The buffer of message `n`, to fill before sending.
    pub(crate) fn buffer(&mut self, n: usize) -> &mut [u8] {
        &mut self.buffers[n]
    }

    /// What message `n` of the last [`Batch::receive`] holds.
    pub(crate) fn received(&self, n: usize) -> &[u8] {
        &self.buffers[n][..self.headers[n].msg_len as usize]
    }

    /// Sends all, and returns how many the kernel took in this call.
    pub(crate) fn send(&mut self, socket: &impl AsFd, from: usize) -> io::Result<usize> {
        let headers = &mut self.headers[from..];
        let (fd, count) = (socket.as_fd().as_raw_fd(), headers.len() as libc::c_uint);
        // SAFETY: every header points to a slice in `_slices`, and that to a buffer of its length; self owns both.
        let sent = unsafe { libc::sendmmsg(fd, headers.as_mut_ptr(), count, 0) };
        usize::try_from(sent).map_err(|_| io::Error::last_os_error())
    }

    /// Receives up to `max` messages: waits for the first only. None at the end of the stream.
    pub(crate) fn receive(&mut self, socket: &impl AsFd, max: usize) -> io::Result<Option<usize>> {
        let (fd, count) = (socket.as_fd().as_raw_fd(), max.min(self.headers.len()) as libc::c_uint);
        let (headers, flags) = (self.headers.as_mut_ptr(), libc::MSG_WAITFORONE);
        // SAFETY: as in `send`; the kernel writes into the buffers, to which no reference lives across `&mut self`.
        let received = unsafe { libc::recvmmsg(fd, headers, count, flags, ptr::null_mut()) };
        let received = usize::try_from(received).map_err(|_| io::Error::last_os_error())?;
        // The end of a seqpacket stream arrives as empty messages.
        let whole = self.headers[..received].iter().take_while(|header| header.msg_len > 0).count();
        Ok((whole > 0).then_some(whole))
    }
}
