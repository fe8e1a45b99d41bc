//! The connected socket of a sender: the driver's backend.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use rustix::net::{AddressFamily, Shutdown, SocketType, sockopt};
use towpath_wire::Time;

use crate::driver::Backend;
use crate::engine::{Config, CopyMode, Engine, Kind};
use crate::error::{SendError, Unarmed};
use crate::limits::Limits;
use crate::locked::LockedMemory;
use crate::notification::{Event, Range, parse};
use crate::sender::{BackEnd, Options};
use crate::sys::uring::{self, Uring};
use crate::sys::{self, Control, Part};

/// A connected socket as the driver's backend.
#[derive(Debug)]
pub(crate) struct Socket {
    pub(crate) fd: OwnedFd,
    /// True for a stream socket (TCP), whose completions end with the connection.
    stream: bool,
    /// True if the socket answers TCP's socket options.
    tcp: bool,
    /// UDP_SEGMENT, if this sender has set it.
    segment: Option<u16>,
    /// The error (errno(3)) that ended the connection, once known.
    broken: Option<i32>,
    pub(crate) unarmed: Option<Unarmed>,
    /// The ring of [`BackEnd::IoUring`].
    pub(crate) uring: Option<Uring>,
    /// Buffer for the control messages of the error queue.
    control: Control,
}

impl Socket {
    /// Examines `fd`, enables SO_ZEROCOPY, and creates the engine.
    pub(crate) fn open(
        fd: OwnedFd,
        options: &Options,
        now: Time,
    ) -> Result<(Self, Engine<crate::driver::Item>), SendError> {
        let unknown = |error: rustix::io::Errno| SendError::NotASocket(error.into());
        let family = sockopt::socket_domain(&fd).map_err(unknown)?;
        let stream = match sockopt::socket_type(&fd).map_err(unknown)? {
            SocketType::STREAM => true,
            SocketType::DGRAM | SocketType::SEQPACKET => false,
            _ => return Err(SendError::NotASocket(io::ErrorKind::Unsupported.into())),
        };
        let protocol = sockopt::socket_protocol(&fd).map_err(unknown)?;
        if options.segment == Some(0) {
            // The kernel interprets 0 as "off".
            return Err(SendError::Segmentation(io::ErrorKind::InvalidInput.into()));
        }
        // The option belongs to the socket, and an earlier sender on a duplicate may have set it.
        let inherited = || !stream && sys::segment_size(fd.as_fd()).is_some_and(|bytes| bytes != 0);
        if options.segment.is_some() || inherited() {
            sys::segment(fd.as_fd(), options.segment.unwrap_or(0)).map_err(SendError::Segmentation)?;
        }
        let inet = matches!(family, AddressFamily::INET | AddressFamily::INET6);
        let unarmed = if options.choice == CopyMode::Plain {
            Some(Unarmed::Requested)
        } else if protocol == Some(rustix::net::ipproto::MPTCP) {
            Some(Unarmed::Mptcp)
        } else if stream && inet && sys::has_ulp(fd.as_fd()) {
            Some(Unarmed::KernelTls)
        } else if sys::arm(fd.as_fd()).is_err() {
            Some(Unarmed::Refused)
        } else {
            None
        };
        if let Some(why) = unarmed.filter(|_| options.choice == CopyMode::Zerocopy) {
            return Err(SendError::NotSupported { why });
        }
        let wanted = options.back_end == BackEnd::IoUring && unarmed.is_none();
        let uring = if wanted { Uring::open() } else { None };
        let limits = Limits::read();
        let locked =
            options.locked.clone().unwrap_or_else(|| Arc::new(LockedMemory::of_rlimit(limits.locked)));
        let config = Config {
            kind: if stream { Kind::Stream } else { Kind::Datagram { segmented: options.segment.is_some() } },
            armed: unarmed.is_none(),
            choice: options.choice,
            local: sys::is_local(fd.as_fd()),
            min_zerocopy: options.min_zerocopy,
            gather: options.gather,
            read_every: options.read_every,
            max_frames: options.max_frames,
            max_pinned: options.max_pinned,
            locked,
            optmem: limits.optmem,
            max_numbers: if uring.is_some() { uring::MAX_NUMBERS } else { Config::default().max_numbers },
            ..Config::default()
        };
        let tcp = stream && inet && protocol != Some(rustix::net::ipproto::MPTCP);
        Ok((
            Self {
                fd,
                stream,
                tcp,
                segment: options.segment,
                broken: None,
                unarmed,
                uring,
                control: Control::new(),
            },
            Engine::new(config, now),
        ))
    }

    pub(crate) fn back_end(&self) -> BackEnd {
        if self.uring.is_some() { BackEnd::IoUring } else { BackEnd::MsgZerocopy }
    }

    /// Takes the socket's pending error. Returns `None` for an error that TCP survives (a soft ICMP error, ip(7)).
    pub(crate) fn error(&self) -> Option<io::Error> {
        if self.tcp && !sys::is_over(self.fd.as_fd()) {
            return None;
        }
        match sockopt::socket_error(&self.fd) {
            Ok(Err(error)) | Err(error) => Some(error.into()),
            Ok(Ok(())) => None,
        }
    }

    /// Returns the error that ended a stream, also on repeated calls. The kernel completes unacknowledged data even when the
    /// connection fails, so completions alone do not prove delivery. Another owner of the socket may have taken the error; then the
    /// TCP state and the length of the send queue decide. With `announced`, the FIN occupies one byte of that queue.
    pub(crate) fn lost(&mut self, announced: bool) -> Option<io::Error> {
        if self.stream && self.broken.is_none() {
            let left = || sys::queued(self.fd.as_fd()).is_some_and(|bytes| bytes > u64::from(announced));
            let error = self.error().map(|error| error.raw_os_error().unwrap_or(libc::EPIPE));
            let over = || self.tcp && sys::is_over(self.fd.as_fd());
            self.broken = error.or_else(|| (over() && left()).then_some(libc::EPIPE));
        }
        self.broken.map(io::Error::from_raw_os_error)
    }

    pub(crate) fn shutdown(&self) -> io::Result<()> {
        // A datagram socket has no end of stream.
        if !self.stream {
            return Ok(());
        }
        match rustix::net::shutdown(&self.fd, Shutdown::Write) {
            // The peer closed the connection first.
            Ok(()) | Err(rustix::io::Errno::NOTCONN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Resets the connection, which empties its send queue. Completions are still delivered afterwards.
    pub(crate) fn reset(&self) {
        if self.stream {
            // Both calls fail only if the connection no longer exists.
            let _ = sockopt::set_socket_linger(&self.fd, Some(Duration::ZERO));
            let _ = rustix::net::connect_unspec(&self.fd);
        }
    }
}

impl Drop for Socket {
    /// Other descriptors of the socket must not inherit this sender's segmentation.
    fn drop(&mut self) {
        if self.segment.is_some() && sys::segment_size(self.fd.as_fd()) == self.segment {
            // 0 is always accepted.
            let _ = sys::segment(self.fd.as_fd(), 0);
        }
    }
}

impl Backend for Socket {
    fn transmit(&mut self, parts: &[Part<'_>], zerocopy: bool) -> io::Result<usize> {
        match &mut self.uring {
            Some(uring) if zerocopy => uring.send(self.fd.as_fd(), parts),
            _ => sys::send(self.fd.as_fd(), parts, zerocopy),
        }
    }

    fn transmit_all(&mut self, parts: &[Part<'_>], calls: &mut [usize], zerocopy: bool) -> io::Result<usize> {
        let Some(uring) = self.uring.as_mut().filter(|_| zerocopy) else {
            return sys::send_all(self.fd.as_fd(), parts, calls, zerocopy);
        };
        let (mut rest, mut made) = (parts, 0);
        for call in calls {
            let (own, behind) = rest.split_at(*call);
            rest = behind;
            let bytes = own.iter().map(Part::len).sum();
            match uring.send(self.fd.as_fd(), own) {
                Ok(sent) => *call = sent,
                Err(error) if made == 0 => return Err(error),
                Err(_) => break,
            }
            made += 1;
            if *call < bytes {
                break;
            }
        }
        Ok(made)
    }

    fn event(&mut self) -> io::Result<Option<Event>> {
        if let Some(uring) = &mut self.uring {
            let range =
                uring.completed().map(|(number, copied)| Range { first: number, last: number, copied });
            if range.is_some() || self.stream {
                return Ok(range.map(Event::Zerocopy));
            }
        }
        // Skips entries without an extended error (for example a timestamp alone).
        while let Some(control) = sys::recv_error(self.fd.as_fd(), &mut self.control)? {
            if let Some(event) = parse(control) {
                return Ok(Some(event));
            }
        }
        Ok(None)
    }
}
