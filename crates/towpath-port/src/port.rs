use std::os::fd::BorrowedFd;

use crate::{Burst, Error, Frame, LinkType, Segmentation, Stats};

/// Where packets come from and go to, a burst at a time.
///
/// A driver may do one direction only ([`Port::caps`] says so); the other answers [`Error::Direction`].
///
/// One thread uses a port at a time; for several threads open several ports on one interface (fan-out, queues). Its loop:
/// 1. [`Port::receive`] until it answers [`Received::Nothing`] (or the burst's turn is over), decide, [`Port::send`] and
///    [`Port::verdict`], [`Port::flush`];
/// 2. when nothing came: poll [`Port::poll_fd`] for reading, or spin;
/// 3. about once a second, and when poll reports an error: [`Port::state`]. While it is [`State::Gone`], [`Port::reopen`] about
///    once a second.
pub trait Port: Send {
    /// The name that rules, reports and errors use for this port.
    fn name(&self) -> &str;

    /// What this port can do. May change with [`Port::reopen`] and [`Port::state`] (an MTU does).
    fn caps(&self) -> Caps;

    /// Clears `burst` and receives as many frames as are there and fit into it.
    ///
    /// Frames that do not fit stay in the port for the next call. A live port does not block: it answers
    /// [`Received::Nothing`], and [`Port::poll_fd`] tells when to come again. A file or a pipe may block while
    /// the burst is empty, never once it holds a frame.
    ///
    /// The frames may lie in memory that the port shares with the kernel: they can be read, changed in place and sent from
    /// there, and until the burst is cleared, received into again or dropped, the port has that much less room for what
    /// arrives. Copy what is to be kept.
    ///
    /// # Errors
    /// [`Error::Io`] when the medium fails, [`Error::Direction`] when this port only sends. `burst` holds what was
    /// received before the failure. An interface that is down or gone is no error: nothing comes, and [`Port::state`]
    /// tells.
    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error>;

    /// Sends frames in order, and returns how many it took.
    ///
    /// The port pulls a frame from the iterator only when it has room for it: what it did not pull is still the
    /// caller's, to send again or to drop and count. What it took and the medium then refused is counted in
    /// [`Stats::dropped`]. Give it whole bursts: a call is at least one system call.
    ///
    /// An unfinished checksum and a frame that stands for several are put right when this port's medium cannot
    /// ([`Offload`](crate::Offload)); an Ethernet header is taken off where only IP goes out, but none is made up. The bytes are not
    /// needed after the call.
    ///
    /// # Errors
    /// [`Error::Io`] when the medium fails: the frames that it pulled were sent, or are counted in [`Stats::dropped`]. Other variants when
    /// a frame cannot be sent by this port at all: the frame pulled last is then not sent and the caller's to count, those before
    /// it are. The caller may go on with the next.
    fn send<'a>(&mut self, frames: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error>;

    /// Decides about a frame that the kernel holds ([`Caps::verdicts`]): exactly once for each, in any order.
    ///
    /// `frame` is the one that was received, or what became of it; of its [`Meta`](crate::Meta), `queued` says which it is, and `mark` is
    /// what it shall have. Verdicts may be held back and given together: [`Port::flush`] at the end of a burst.
    ///
    /// # Errors
    /// [`Error::Direction`] when this port asks for no verdicts, or the frame waits for none; [`Error::TooLong`] and [`Error::Cut`] when
    /// the frame cannot replace what the kernel holds: that is dropped then, and the caller's to count; [`Error::Io`].
    fn verdict(&mut self, frame: Frame<'_>, verdict: QueueVerdict) -> Result<(), Error> {
        let _ = (frame, verdict);
        Err(Error::Direction { name: self.name().into(), verb: "give a verdict" })
    }

    /// Hands what the port still buffers to the medium.
    ///
    /// # Errors
    /// [`Error::Io`] when the medium fails.
    fn flush(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// The descriptor to poll before the next [`Port::receive`]; `None` when there is nothing to wait for. It may be another after
    /// [`Port::reopen`].
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// Whether the interface is there and up. Makes system calls.
    ///
    /// # Errors
    /// [`Error::Io`] when the system does not say.
    fn state(&mut self) -> Result<State, Error> {
        Ok(State::Up)
    }

    /// Opens the port again after [`State::Gone`], with the same configuration and counters. Bursts that still hold its frames stay
    /// valid. A port that is not gone is left as it is.
    ///
    /// # Errors
    /// As opening did, [`Error::NoInterface`] above all: try again later.
    fn reopen(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// What went through, and what was lost. May make a system call.
    fn stats(&mut self) -> Stats;
}

/// What a call of [`Port::receive`] brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Received {
    /// The burst holds at least one frame.
    Frames,
    /// Nothing is there now; more may come.
    Nothing,
    /// Nothing is there and nothing will come.
    End,
}

/// What is to become of a frame that the kernel holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueVerdict {
    /// It goes on as it is (`NF_ACCEPT`).
    Accept,
    /// It ends here (`NF_DROP`).
    Drop,
    /// It goes on with the bytes of the frame in place of its own (`NF_ACCEPT`); an unfinished checksum is finished.
    Replace,
    /// It begins its hook again (`NF_REPEAT`): mark it, or it comes back.
    Repeat,
}

/// The state of a port's interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Frames can come and go.
    Up,
    /// It is there, and down or without carrier. It comes back by itself.
    Down,
    /// It is not there any more: [`Port::reopen`] when it has come back.
    Gone,
}

/// What a port can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Caps {
    /// Frames come out of it.
    pub receive: bool,
    /// Frames go into it.
    pub send: bool,
    /// [`Received::End`] can come: a file ends, a link does not.
    pub ends: bool,
    /// Frames bring the time of their arrival with them; otherwise `time_ns` is the moment of [`Port::receive`].
    pub timestamps: bool,
    /// The kernel holds each frame until [`Port::verdict`].
    pub verdicts: bool,
    /// How its frames begin, when all begin alike.
    pub link: Option<LinkType>,
    /// Longest IP packet of its interface in bytes; `None` without an interface.
    pub mtu: Option<u32>,
    /// Longest frame that it sends in bytes, link header included, segments to be cut apart; `None` is
    /// [`MAX_FRAME`](crate::MAX_FRAME).
    pub max_frame: Option<u32>,
    /// The link-layer address of its interface.
    pub address: Option<[u8; 6]>,
    /// Unfinished checksums go out as they are. (Whether they come in, each frame says.)
    pub checksum: bool,
    /// Frames that stand for several go out as they are.
    pub segmentation: Segmentation,
}
