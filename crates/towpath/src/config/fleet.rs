//! `[fleet]`: states in a group of gates.

use std::path::{Path, PathBuf};
use std::time::Duration;

use super::reader::Table;

/// The group of this gate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fleet {
    /// Servers of the bus.
    pub servers: Vec<String>,
    /// The group, and the name of this gate in it.
    pub group: String,
    /// The name of this gate.
    pub gate: String,
    /// A file of credentials, or with the seed of an nkey.
    pub credentials: Option<PathBuf>,
    /// Certificates of authorities besides those of the system.
    pub tls_ca: Option<PathBuf>,
    /// The certificate and the key of this gate.
    pub tls_identity: Option<(PathBuf, PathBuf)>,
    /// TLS is required.
    pub tls: bool,
    /// All states are replicated, not only replied ones.
    pub all: bool,
    /// The suppression window.
    pub window: Duration,
    /// The file that keeps the group's configuration. With it, rules, tables and settings come from the group.
    pub configuration: Option<PathBuf>,
}

pub(super) fn take(top: &Table<'_, '_>, directory: &Path) -> Option<Fleet> {
    let table = top.table("fleet")?;
    table.need("servers", "name the servers: servers = \"nats://127.0.0.1:4222\"");
    table.need("group", "name the group: group = \"edge\"");
    table.need("gate", "name this gate, unlike all others of the group: gate = \"a\"");
    let servers = table.texts("servers");
    for server in &servers {
        let scheme = server.value.split_once("://").map(|(scheme, _)| scheme);
        if scheme.is_none_or(|scheme| !matches!(scheme, "nats" | "tls")) {
            table.wrong(&server.span, "no address of a server", "write nats://HOST:PORT or tls://HOST:PORT");
        }
    }
    let word = |key| {
        let text = table.text(key)?;
        let fits = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
        if text.value.is_empty() || text.value.len() > 64 || !text.value.chars().all(fits) {
            let hint = "use at most 64 letters, digits, `-` and `_`: the name is a word of subjects";
            table.wrong(&text.span, format!("`{key}` is not a name"), hint);
        }
        Some(text.value.to_owned())
    };
    let (group, gate) = (word("group").unwrap_or_default(), word("gate").unwrap_or_default());
    let file = |key| table.text(key).map(|text| directory.join(text.value));
    let identity = match (file("tls-certificate"), file("tls-key")) {
        (Some(certificate), Some(key)) => Some((certificate, key)),
        (None, None) => None,
        (one, _) => {
            let (has, lacks) =
                if one.is_some() { ("tls-certificate", "tls-key") } else { ("tls-key", "tls-certificate") };
            let hint = format!("name the file: {lacks} = \"FILE\"");
            table.wrong(&table.span_of(has), format!("`{has}` needs `{lacks}`"), hint);
            None
        }
    };
    let fleet = Fleet {
        tls: table.flag("tls").unwrap_or(false),
        servers: servers.into_iter().map(|server| server.value.to_owned()).collect(),
        group,
        gate,
        credentials: file("credentials"),
        tls_ca: file("tls-ca"),
        tls_identity: identity,
        all: table.word("replicate") == Some("all"),
        configuration: file("configuration"),
        window: table.seconds("window").unwrap_or(Duration::from_millis(10)),
    };
    table.finish();
    Some(fleet)
}
