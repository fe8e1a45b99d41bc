//! Outbound connections: established, and re-established with back-off and jitter.
//!
//! What: a thread per peer resolves the name, connects, attaches the connection (the leader does the TLS
//! handshake), and sleeps until the connection ends.

use std::io;
use std::net::{TcpStream, ToSocketAddrs};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use super::Server;
#[cfg(feature = "tls")]
use super::Tls;

/// Options of an outbound connection.
#[derive(Clone, Debug)]
pub struct Connect {
    /// Timeout of connect(2) per address. Default: 10 s.
    pub timeout: Duration,
    /// Delay before the second attempt in a row. Doubles with each attempt. Default: 100 ms.
    pub pause: Duration,
    /// Maximum delay. Default: 30 s.
    pub pause_most: Duration,
    /// TLS, for TCP only. Default: none.
    #[cfg(feature = "tls")]
    pub tls: Option<Tls>,
}

impl Default for Connect {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(10),
            pause: Duration::from_millis(100),
            pause_most: Duration::from_secs(30),
            #[cfg(feature = "tls")]
            tls: None,
        }
    }
}

/// Keeps a connection to one peer. Dropping it stops the attempts but not the connection.
#[derive(Debug)]
pub struct Connector {
    tell: Option<Sender<ConnectionEvent>>,
}

/// Message to the connector's thread.
#[derive(Debug)]
pub(super) enum ConnectionEvent {
    /// Its connection has ended or was not attached.
    Over,
    Stop,
}

impl Server {
    /// Keeps a connection to `peer` (`HOST:PORT` or `unix:PATH`): connects, attaches, and repeats this when
    /// the connection ends, until the server drains. The actual delay is random between half of that of
    /// [`Connect`] and all of it, so that many clients do not connect at the same time.
    ///
    /// # Errors
    ///
    /// Fails if the thread cannot be started.
    pub fn connect(&self, peer: &str, how: Connect) -> io::Result<Connector> {
        let (tell, news) = channel();
        let owner = Keeper { server: self.clone(), peer: peer.to_owned(), how, news, tell: tell.clone() };
        // The kernel keeps 15 bytes of a thread's name (prctl(2), PR_SET_NAME).
        std::thread::Builder::new().name("connector".to_owned()).spawn(|| owner.run())?;
        Ok(Connector { tell: Some(tell) })
    }
}

impl Connector {
    /// Drops the handle without stopping the attempts, which then go on until the server drains.
    pub fn detach(mut self) {
        self.tell = None;
    }
}

impl Drop for Connector {
    fn drop(&mut self) {
        // The thread may be connecting; it is not waited for. It may have ended.
        self.tell.iter().for_each(|tell| drop(tell.send(ConnectionEvent::Stop)));
    }
}

struct Keeper {
    server: Server,
    peer: String,
    how: Connect,
    news: Receiver<ConnectionEvent>,
    tell: Sender<ConnectionEvent>,
}

impl Keeper {
    fn run(self) {
        let mut failures = 0;
        let mut refused = 0u32;
        while !self.server.look(|mux| mux.is_draining()) {
            let begin = Instant::now();
            match self.attach() {
                Ok(()) => {
                    refused = 0;
                    log::debug!("connected to {}", self.peer);
                    let Ok(ConnectionEvent::Over) = self.news.recv() else { return };
                    log::debug!("the connection to {} has ended", self.peer);
                }
                Err(error) => {
                    // Warns at attempts 1, 2, 4, 8 and so on.
                    refused = refused.saturating_add(1);
                    let level = if refused.is_power_of_two() { log::Level::Warn } else { log::Level::Debug };
                    log::log!(level, "cannot connect to {}: {error} (try {refused})", self.peer);
                }
            }
            if begin.elapsed() > self.how.pause_most {
                failures = 0;
            }
            let pause = pause(&self.how, failures, chance());
            failures = failures.saturating_add(1);
            match self.news.recv_timeout(pause) {
                Err(RecvTimeoutError::Timeout) | Ok(ConnectionEvent::Over) => {}
                Ok(ConnectionEvent::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }

    fn attach(&self) -> io::Result<()> {
        if let Some(path) = self.peer.strip_prefix("unix:") {
            return self.server.attach_kept(UnixStream::connect(path)?, None, self.tell.clone());
        }
        let mut last = io::Error::new(io::ErrorKind::InvalidInput, "the name has no address");
        for address in self.peer.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, self.how.timeout) {
                Ok(socket) => {
                    socket.set_nodelay(true)?;
                    #[cfg(feature = "tls")]
                    let tls = self.how.tls.as_ref();
                    #[cfg(not(feature = "tls"))]
                    let tls = None;
                    return self.server.attach_kept(OwnedFd::from(socket), tls, self.tell.clone());
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }
}

/// Delay after `failures` failures in a row. `chance`: random, 0 to 255.
fn pause(how: &Connect, failures: u32, chance: u8) -> Duration {
    let most = how.pause.saturating_mul(2u32.saturating_pow(failures)).min(how.pause_most);
    most / 2 + most / 2 * u32::from(chance) / 255
}

/// A random byte.
fn chance() -> u8 {
    use std::hash::{BuildHasher, Hasher, RandomState};
    RandomState::new().build_hasher().finish() as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delays_double_up_to_the_maximum_with_jitter() {
        let how = Connect::default();
        let rows =
            [(0, 0, 50), (0, 255, 100), (3, 0, 400), (3, 255, 800), (20, 0, 15_000), (u32::MAX, 255, 30_000)];
        for (failures, chance, millis) in rows {
            assert_eq!(pause(&how, failures, chance), Duration::from_millis(millis), "{failures} {chance}");
        }
    }
}
