//! Closing of Unix sockets, and of descriptors that their peers pass.
//!
//! Why: a process may pass any descriptor over a Unix socket (unix(7), SCM_RIGHTS). Its close(2) may sleep: a TCP socket
//! lingers (SO_LINGER), a file of FUSE is flushed. read(2) closes passed descriptors in the calling thread, and so does
//! the close of a socket that has unread ones.
//!
//! What: Unix sockets refuse descriptors (SO_PASSRIGHTS, Linux 6.16). On older kernels, and for a connection that
//! passed descriptors before it was attached, they are received and closed elsewhere. The second message with
//! descriptors ends the connection ([`Cause::Descriptors`](crate::mux::Cause::Descriptors)). Its socket is closed elsewhere
//! too.
//!
//! TCP sockets need none of this: a peer cannot pass descriptors, accepted sockets do not linger, and the close of a
//! socket without SO_LINGER does not wait.
//!
//! Limit: if this process has no free descriptor, the kernel closes passed descriptors in the calling thread.

use std::os::fd::OwnedFd;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};

/// Closes descriptors without blocking the caller. The number is the peer's user id.
pub type Close = fn(u32, Vec<OwnedFd>);

static CLOSE: OnceLock<Close> = OnceLock::new();

/// Sets how Unix sockets and passed descriptors are closed in this process. Default: one thread closes them one after
/// another, so that a peer may delay the closing of other peers' sockets. A second call has no effect.
pub fn set_close(close: Close) {
    let _ = CLOSE.set(close);
}

/// Closes the descriptors of a peer elsewhere.
pub(super) fn close(user: u32, fds: Vec<OwnedFd>) {
    if !fds.is_empty() {
        CLOSE.get().unwrap_or(&(by_thread as Close))(user, fds);
    }
}

fn by_thread(_: u32, fds: Vec<OwnedFd>) {
    static THREAD: OnceLock<Sender<Vec<OwnedFd>>> = OnceLock::new();
    let thread = THREAD.get_or_init(|| {
        let (send, fds) = channel::<Vec<OwnedFd>>();
        let close = move || fds.into_iter().for_each(drop);
        if let Err(error) = std::thread::Builder::new().name("close".to_owned()).spawn(close) {
            log::warn!("sockets are closed by the threads that serve connections: {error}");
        }
        send
    });
    // Without the thread, the value in the error is dropped here.
    let _ = thread.send(fds);
}
