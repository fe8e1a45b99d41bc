//! `[metrics]`: the endpoint for scrapers.

use std::path::{Path, PathBuf};

use super::reader::Table;
use super::users;

/// The metrics endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metrics {
    /// `HOST:PORT`, or `unix:PATH` as in the file.
    pub listen: String,
    /// Path of the Unix socket.
    path: Option<PathBuf>,
    /// Group that may connect to the Unix socket.
    pub group: Option<u32>,
    /// File mode of the Unix socket.
    pub mode: u32,
}

pub(super) fn take(top: &Table<'_, '_>, directory: &Path) -> Option<Metrics> {
    let table = top.table("metrics")?;
    let hint = "write listen = \"127.0.0.1:9464\" or listen = \"unix:/run/towpath/metrics.sock\"";
    table.need("listen", hint);
    let listen = table.text("listen");
    let group = table.text("group").and_then(|name| users::group(&table, &name)).map(|group| group.id);
    let mode = users::mode(&table);
    let Some(listen) = listen else {
        table.finish();
        return None;
    };
    let path = listen.value.strip_prefix("unix:").map(|path| directory.join(path));
    if path.is_none() {
        let port = listen.value.rsplit_once(':').filter(|(host, _)| !host.is_empty());
        if port.and_then(|(_, port)| port.parse::<u16>().ok()).is_none() {
            table.wrong(&listen.span, "neither `HOST:PORT` nor `unix:PATH`", hint);
        }
        if group.is_some() || mode.is_some() {
            let message = "`group` and `mode` are for a Unix socket; a TCP port has no permissions";
            table.wrong(&table.span, message, "write listen = \"unix:PATH\"");
        }
    }
    table.finish();
    let mode = mode.unwrap_or(if group.is_some() { 0o660 } else { 0o600 });
    Some(Metrics { listen: listen.value.to_owned(), path, group, mode })
}

impl Metrics {
    /// `HOST:PORT`, or `unix:PATH` with the path that is bound.
    pub fn address(&self) -> String {
        self.path.as_ref().map_or_else(|| self.listen.clone(), |path| format!("unix:{}", path.display()))
    }

    /// The path of the Unix socket. `None`: TCP.
    pub fn unix(&self) -> Option<&Path> {
        self.path.as_deref()
    }
}
