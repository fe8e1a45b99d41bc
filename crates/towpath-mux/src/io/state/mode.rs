//! Which API has the sockets of a server.

/// The API that drives a server. [`Mode::Driver`] and [`Mode::Sockets`] are final.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(in crate::io) enum Mode {
    /// [`Worker`](crate::io::Worker)s poll in turn (leader and followers), or no API is in use yet.
    #[default]
    Workers,
    /// One [`Driver`](crate::io::Driver).
    Driver,
    /// A thread on behalf of open [`Socket`](crate::io::Socket)s, and their number.
    Sockets(usize),
}

impl Mode {
    pub(in crate::io) fn is_driver(self) -> bool {
        self == Self::Driver
    }

    /// Returns true when all sockets were closed.
    pub(in crate::io) fn is_unused(self) -> bool {
        self == Self::Sockets(0)
    }

    /// A socket was opened. Returns true if it is the first.
    pub(in crate::io) const fn open_socket(&mut self) -> bool {
        match self {
            Self::Sockets(open) => {
                *open += 1;
                false
            }
            _ => {
                *self = Self::Sockets(1);
                true
            }
        }
    }

    /// A socket was closed. Returns true if it was the last.
    pub(in crate::io) const fn close_socket(&mut self) -> bool {
        match self {
            Self::Sockets(open) => {
                *open -= 1;
                *open == 0
            }
            _ => false,
        }
    }
}
