//! Log lines about connections that ended and messages that were not sent.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use towpath_mux::io::Ended;
use towpath_mux::mux::Cause;
use tracing::Level;
use tracing::field::display;

use super::WorkerPool;
use crate::logging::CONNECTIONS;
use crate::metrics;

/// Ends of connections that are logged per second. Further ones are counted.
const ENDS_LOGGED: u32 = 10;
/// Ended connections that the server keeps for [`towpath_mux::io::Server::poll_ended`].
const ENDED_KEPT: usize = 1024;

impl WorkerPool {
    /// Logs unsent messages of workers, at most once per second.
    pub(super) fn report_lost(&mut self) {
        let (before, since) = &mut self.lost;
        let lost = self.completions.lost;
        if lost == *before || since.is_some_and(|since| since.elapsed() < Duration::from_secs(1)) {
            return;
        }
        let more = lost.since(before);
        (*before, *since) = (lost, Some(Instant::now()));
        tracing::warn!("messages of workers were not sent: {}", metrics::nonzero(&more, |_| true));
    }

    /// Logs connections that ended by an error.
    pub(super) fn report_ends(&mut self) {
        let mut count = 0_u64;
        let server = self.driver.server();
        while let Some(ended) = server.poll_ended() {
            count += 1;
            self.slots.iter_mut().for_each(|slot| slot.revoke(ended.psock));
            let Some(Ended { psock, peer, cause, unsent, .. }) = self.upgrades.take(&server, ended) else {
                continue;
            };
            // The peer closed it or has it back.
            if matches!(cause, Cause::Clean | Cause::GivenBack | Cause::Unattached) && unsent == 0 {
                continue;
            }
            let unsent = if unsent > 0 { format!("; {unsent} answers were not sent") } else { String::new() };
            let name = peer.map_or_else(String::new, |peer| format!(" ({peer})"));
            let level = if cause.is_clean() && unsent.is_empty() { Level::INFO } else { Level::WARN };
            self.log(level, peer, || format!("{psock}{name} ended: {cause}{unsent}"));
        }
        // The driver keeps the last ones.
        let ended = self.driver.server().look(|mux| mux.totals().unattach);
        self.reported.1 += ended.saturating_sub(self.ended + count);
        self.ended = ended;
        // There may have been more, whose notices were dropped.
        if count >= ENDED_KEPT as u64 {
            let Self { slots, driver, .. } = self;
            driver.server().look(|mux| {
                slots.iter_mut().for_each(|slot| slot.retain(|psock| mux.status(psock).is_some()));
            });
        }
    }

    /// Logs the number of connections whose lines were left out, after `interval`.
    pub(super) fn report_left_out(&mut self, interval: Duration) {
        let (_, left_out, since) = &mut self.reported;
        if *left_out == 0 || since.elapsed() < interval {
            return;
        }
        tracing::warn!(target: CONNECTIONS, "{left_out} more connections ended or were not attached");
        self.reported = (0, 0, Instant::now());
    }

    pub(super) fn warn(&mut self, peer: Option<SocketAddr>, line: impl FnOnce() -> String) {
        self.log(Level::WARN, peer, line);
    }

    /// Logs a line about a connection, up to [`ENDS_LOGGED`] per second; counts the others.
    fn log(&mut self, level: Level, peer: Option<SocketAddr>, line: impl FnOnce() -> String) {
        self.report_left_out(Duration::from_secs(1));
        let (count, left_out, since) = &mut self.reported;
        if since.elapsed() >= Duration::from_secs(1) {
            (*count, *left_out, *since) = (0, 0, Instant::now());
        }
        if *count >= ENDS_LOGGED {
            *left_out += 1;
            return;
        }
        *count += 1;
        // A peer has many ports.
        let (port, peer) = (peer.map(|peer| peer.port()), peer.map(|peer| display(peer.ip())));
        let mux = Some(&*self.config.name).filter(|name| !name.is_empty());
        match level {
            Level::INFO => tracing::info!(target: CONNECTIONS, mux, peer, port, "{}", line()),
            _ => tracing::warn!(target: CONNECTIONS, mux, peer, port, "{}", line()),
        }
    }
}
