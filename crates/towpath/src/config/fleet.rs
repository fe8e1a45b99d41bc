//! `[fleet]`: servers of NATS, states in a group of gates, and workers on other machines.

use std::path::{Path, PathBuf};
use std::time::Duration;

use towpath_fleet::workers::is_name;

use super::mux::{Mux, RemoteWorkers};
use super::reader::Table;

/// The servers, and the group of this gate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fleet {
    /// Servers of the bus.
    pub servers: Vec<String>,
    /// The group. Without one, only muxes use the servers, for workers on other machines.
    pub group: Option<String>,
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
    table.need("gate", "name this gate, unlike all others: gate = \"a\"");
    let servers = table.texts("servers");
    for server in &servers {
        let scheme = server.value.split_once("://").map(|(scheme, _)| scheme);
        if scheme.is_none_or(|scheme| !matches!(scheme, "nats" | "tls")) {
            table.wrong(&server.span, "no address of a server", "write nats://HOST:PORT or tls://HOST:PORT");
        }
    }
    let word = |key| {
        let text = table.text(key)?;
        if !is_name(text.value) {
            let hint = "use at most 64 letters, digits, `-` and `_`: the name is a word of subjects";
            table.wrong(&text.span, format!("`{key}` is not a name"), hint);
        }
        Some(text.value.to_owned())
    };
    let (group, gate) = (word("group"), word("gate").unwrap_or_default());
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
    if fleet.group.is_none() {
        for key in ["replicate", "configuration", "window"].into_iter().filter(|key| table.has(key)) {
            let hint = "name the group: group = \"edge\"";
            table.wrong(&table.span_of(key), format!("`{key}` needs `group`"), hint);
        }
    }
    table.finish();
    Some(fleet)
}

/// Checks that `[fleet]` serves a purpose, and that muxes with workers on other machines have a server and names for subjects.
pub(super) fn check(top: &Table<'_, '_>, fleet: Option<&Fleet>, muxes: &[Mux]) {
    let remote = |mux: &Mux| mux.remote.is_some();
    if let Some(table) = top.table("fleet")
        && fleet.is_some_and(|fleet| fleet.group.is_none())
        && !muxes.iter().any(remote)
    {
        let hint =
            "name the group of this gate: group = \"edge\"; or write remote = \"SUBJECT\" in a [mux.NAME]";
        table.wrong(&table.span, "[fleet] has no effect", hint);
    }
    for (name, table) in top.named("mux") {
        let mux = muxes.iter().find(|mux| mux.name == name.value && remote(mux));
        if mux.is_none() {
            continue;
        }
        match fleet {
            None => {
                let hint = "name it: [fleet] with servers = \"nats://127.0.0.1:4222\" and gate = \"a\"";
                table.wrong(&table.span_of("remote"), "`remote` has no server", hint);
            }
            Some(fleet) if !is_name(&RemoteWorkers::front(&fleet.gate, name.value)) => {
                let hint = "together, `gate` and the mux's name may have at most 63 letters, digits, `-` and `_`: \
                            they are a word of subjects";
                let front = format!("`{}-{}` cannot be the name of a front", fleet.gate, name.value);
                table.wrong(&table.span_of("remote"), front, hint);
            }
            Some(_) => {}
        }
    }
}
