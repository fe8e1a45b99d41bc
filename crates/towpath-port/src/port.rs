use std::os::fd::BorrowedFd;

use crate::{Burst, Error, Frame, HandOver, LinkType, Segmentation, Stats, TxDrop};

/// A source and sink of frames.
///
/// A driver may support one direction only (see [`Port::caps`]). The other returns [`Error::Direction`].
///
/// A port is used by one thread at a time. Several threads need several ports on the interface (fanout, queues). A thread's
/// loop:
/// 1. call [`Port::receive`] until it returns [`Received::Nothing`]; process the burst; call [`Port::send`] and
///    [`Port::verdict`], then [`Port::flush`];
/// 2. if nothing was received, poll [`Port::poll_fd`] for reading, or spin;
/// 3. call [`Port::state`] about once a second, and when poll reports an error. While it returns [`State::Gone`], call
///    [`Port::reopen`] about once a second.
pub trait Port: Send {
    /// The port's name in rules, reports and errors.
    fn name(&self) -> &str;

    /// The capabilities of this port. [`Port::reopen`] and [`Port::state`] may change them (for example the MTU).
    fn caps(&self) -> Caps;

    /// Clears `burst` and receives the available frames, as many as fit.
    ///
    /// Frames that do not fit stay in the port for the next call. A live port does not block; it returns
    /// [`Received::Nothing`], and [`Port::poll_fd`] becomes readable with the next frame. A file or a pipe may block while
    /// the burst is empty.
    ///
    /// The frames may be in memory that the port shares with the kernel. They can be read, changed in place and sent from
    /// there. This memory is unavailable for receiving until the burst is cleared, received into or dropped. Copy frames that
    /// must be kept longer.
    ///
    /// # Errors
    /// [`Error::Io`] if the medium fails; `burst` holds the frames received before. [`Error::Direction`] if this port only
    /// sends. An interface that is down or gone is not an error; see [`Port::state`].
    fn receive(&mut self, burst: &mut Burst) -> Result<Received, Error>;

    /// Sends frames in order. Returns the number of frames accepted.
    ///
    /// The port takes a frame from the iterator only if it has room for it. The caller may send the remaining frames again, or
    /// drop and count them. Frames that were accepted and then refused by the medium count in [`Stats::dropped`]. Each call is at
    /// least one system call; pass whole bursts.
    ///
    /// If the medium cannot, the port completes partial checksums and segments frames ([`Offload`](crate::Offload)). It removes
    /// an Ethernet header if the medium carries IP only; it never adds one. The bytes are not used after the call.
    ///
    /// # Errors
    /// [`Error::Io`] if the medium fails: the accepted frames were sent, or count in [`Stats::dropped`]. Other variants if this
    /// port cannot send the frame that it took last: that frame is not sent and the caller counts it; the frames before it
    /// were accepted. The caller may continue with the next frame.
    fn send<'a>(&mut self, frames: &mut dyn Iterator<Item = Frame<'a>>) -> Result<usize, Error>;

    /// Returns the verdict on a frame that the kernel holds ([`Caps::verdicts`]): exactly once per frame, in any order.
    ///
    /// `frame` is the received frame, possibly changed. `queued` of its [`Meta`](crate::Meta) identifies it; `mark` becomes the
    /// packet's mark. The port may batch verdicts until [`Port::flush`].
    ///
    /// # Errors
    /// [`Error::Direction`] if this port needs no verdicts, or the frame is not waiting for one. [`Error::TooLong`] and
    /// [`Error::Cut`] if the frame cannot replace the kernel's packet, which is then dropped; the caller counts it. [`Error::Io`].
    fn verdict(&mut self, frame: Frame<'_>, verdict: QueueVerdict) -> Result<(), Error> {
        let _ = (frame, verdict);
        Err(Error::Direction { name: self.name().into(), verb: "give a verdict" })
    }

    /// Passes buffered frames and verdicts to the medium.
    ///
    /// # Errors
    /// [`Error::Io`] if the medium fails.
    fn flush(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// The descriptor to poll before the next [`Port::receive`]; `None` if the port needs no waiting. [`Port::reopen`] may
    /// change it.
    fn poll_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    /// The state of the interface. Makes system calls.
    ///
    /// # Errors
    /// [`Error::Io`] if the query fails.
    fn state(&mut self) -> Result<State, Error> {
        Ok(State::Up)
    }

    /// Opens the port again after [`State::Gone`], with the same configuration and counters. Bursts with frames of the port
    /// stay valid. Does nothing in other states.
    ///
    /// # Errors
    /// The errors of opening the port. Try again later after [`Error::NoInterface`].
    fn reopen(&mut self) -> Result<(), Error> {
        Ok(())
    }

    /// Returns true while the port has received a part of the kernel's frames that it has not returned by
    /// [`receive`](Self::receive): it is not handed over then.
    fn is_midway(&self) -> bool {
        false
    }

    /// Returns true while received frames are in use in the kernel's memory: the port is not handed over then.
    fn has_lent(&self) -> bool {
        false
    }

    /// Copies of the descriptors of this port, and the data with which [`Config::adopt`](crate::driver::Config::adopt) continues it in
    /// another process. `None`: ports of this driver cannot be handed over.
    ///
    /// # Errors
    /// There is no free descriptor, or frames are in use.
    fn hand_over(&mut self) -> std::io::Result<Option<HandOver>> {
        Ok(None)
    }

    /// Reads the positions of the rings: this process receives from here on, and another one did before.
    fn resume(&mut self) {}

    /// The counters with which [`continue_stats`](Self::continue_stats) continues in another process, without those that the kernel
    /// keeps for the descriptors. The other process reads the kernel's counters from then on; this one does not.
    fn own_stats(&mut self) -> Stats {
        self.stats()
    }

    /// Continues the counters of the process that has handed over the port.
    fn continue_stats(&mut self, _before: Stats) {}

    /// Passes the first frames that the port accepted and dropped since the last call to `each`, with the reason. Their number and bytes
    /// are bounded; [`stats`](Self::stats) counts all of them. A wrapper calls that of the port inside: traces and the log get the frames of
    /// this method only.
    fn take_refused(&mut self, each: &mut dyn FnMut(TxDrop, &[u8]));

    /// Counters. May make a system call.
    fn stats(&mut self) -> Stats;
}

/// The result of [`Port::receive`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum Received {
    /// The burst holds at least one frame.
    Frames,
    /// No frame is available now.
    Nothing,
    /// No frame is available, and none will arrive.
    End,
}

/// A verdict on a packet in a kernel queue (NFQUEUE).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueueVerdict {
    /// Accept the packet unchanged (`NF_ACCEPT`).
    Accept,
    /// Drop the packet (`NF_DROP`).
    Drop,
    /// Replace the packet's bytes by those of the frame and accept it (`NF_ACCEPT`). A partial checksum is completed.
    Replace,
    /// Restart the packet's netfilter hook (`NF_REPEAT`). Without a changed mark it is queued again.
    Repeat,
}

/// The state of a port's interface.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Up: frames can be sent and received.
    Up,
    /// Down or without carrier. No action is needed.
    Down,
    /// Deleted. Call [`Port::reopen`] until it succeeds.
    Gone,
}

/// Capabilities of a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Caps {
    /// Receives frames.
    pub receive: bool,
    /// Sends frames.
    pub send: bool,
    /// May return [`Received::End`] (a file).
    pub ends: bool,
    /// Frames have arrival timestamps. Otherwise `time_ns` is the time of [`Port::receive`].
    pub timestamps: bool,
    /// The kernel holds each frame until [`Port::verdict`] (NFQUEUE).
    pub verdicts: bool,
    /// Link type of all frames; `None` if it varies.
    pub link: Option<LinkType>,
    /// MTU of the interface in bytes; `None` without an interface.
    pub mtu: Option<u32>,
    /// Length of the longest frame that it sends, in bytes, link header included. Frames to be segmented may be longer. `None`
    /// means [`MAX_FRAME`](crate::MAX_FRAME).
    pub max_frame: Option<u32>,
    /// Link-layer address of the interface.
    pub address: Option<[u8; 6]>,
    /// The medium completes partial checksums.
    pub checksum: bool,
    /// The kinds of frames that the medium segments.
    pub segmentation: Segmentation,
}
