//! `[mux.NAME]`: message servers with worker processes.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Duration;

use towpath_fleet::workers::is_subject;
use towpath_mux::framing::Framing;
use towpath_mux::io::{ServerTls, Tls};
use towpath_mux::mux::Order;
use towpath_send::CopyMode;

use super::command;
use super::port::Port;
use super::process;
use super::reader::{At, Table};
use crate::framing::Named;
use crate::mux_bounds::MuxBounds;
use crate::process::{Program, Settings};
use crate::worker_pool::WorkerEnd;

/// The thread that serves a mux.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Thread {
    /// With ports: an engine thread, assigned in turn. Without ports: a separate thread.
    #[default]
    Shared,
    /// This engine thread.
    Engine(usize),
    /// A separate thread.
    Own,
}

/// A message server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mux {
    /// Name in rules: `recv NAME` matches its connections.
    pub name: String,
    /// Listening addresses: HOST:PORT, or unix:PATH.
    pub listen: Vec<String>,
    /// The framing.
    pub framing: Named,
    /// Command of a worker process, split into words. Empty: all workers are on other machines.
    pub worker: Vec<String>,
    /// How the worker processes run.
    pub process: Settings,
    /// Number of worker processes; 0 without a command.
    pub workers: usize,
    /// Workers on other machines.
    pub remote: Option<RemoteWorkers>,
    /// Thread that serves its sockets and rings.
    pub thread: Thread,
    /// Ordering of messages and replies.
    pub order: Order,
    /// Maximum number of messages of a connection that workers hold.
    pub in_flight: Option<usize>,
    /// [`Order::Sticky`]: see [`towpath_mux::mux::Config::rebalance`].
    pub rebalance: Option<usize>,
    /// Time for connections to finish when the engine stops.
    pub drain: Duration,
    /// Time for one message, after which its worker is killed.
    pub timeout: Option<Duration>,
    /// Time without traffic and work, after which a connection is closed.
    pub idle: Option<Duration>,
    /// Time for a message to arrive, after which its connection is closed.
    pub message_time: Option<Duration>,
    /// Maximum length of a message in bytes.
    pub message_max: usize,
    /// Further bounds.
    pub bounds: MuxBounds,
    /// Attempts with other workers after a worker died.
    pub redeliver: u8,
    /// What happens to the connections of a worker that ends.
    pub on_worker_end: WorkerEnd,
    /// Keep the connection of a message that was given up.
    pub keep_undone: bool,
    /// Workers may send messages to all connections, and answer a message several times.
    pub may_push: bool,
    /// The mode in which replies of 16 KiB and more are sent.
    pub send: CopyMode,
    /// Compare checksums of replies at completion.
    pub send_check: bool,
    /// TLS over TCP.
    pub tls: Option<ServerTls>,
}

/// Workers of a mux on other machines. The servers are those of [`Fleet`](super::Fleet).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteWorkers {
    /// The subject.
    pub subject: String,
    /// The most of them at the same time.
    pub most: NonZeroUsize,
}

impl RemoteWorkers {
    /// The name of a mux of this gate as a front, a word of subjects.
    pub fn front(gate: &str, mux: &str) -> String {
        format!("{gate}-{mux}")
    }
}

impl Mux {
    /// The program of a worker process.
    pub fn program(&self) -> Program {
        Program { words: self.worker.clone(), settings: self.process.clone() }
    }
}

/// Longest name, as for interfaces.
const NAME_MAX: usize = 15;

/// The engine thread of each mux, by position; `None`: a separate thread.
pub(super) fn threads(muxes: &[Mux], ports: bool, threads: usize) -> Vec<Option<usize>> {
    let mut next = (0..threads).cycle();
    let thread = |mux: &Mux| match mux.thread {
        Thread::Engine(thread) => Some(thread),
        Thread::Shared if ports => next.next(),
        Thread::Shared | Thread::Own => None,
    };
    muxes.iter().map(thread).collect()
}

/// Reads the muxes of an engine with `threads` threads.
pub(super) fn take(
    top: &Table<'_, '_>,
    directory: &Path,
    ports: &[(At<&str>, Port)],
    threads: usize,
) -> Vec<Mux> {
    let mut muxes: Vec<Mux> = Vec::new();
    for (name, table) in top.named("mux") {
        let taken =
            |port: &Port| port.name == name.value || port.vlans.iter().any(|vlan| vlan.name == name.value);
        if ports.iter().any(|(_, port)| taken(port)) {
            let message = format!("a port is already called `{}`", name.value);
            table.wrong(&name.span, message, "rules cannot distinguish them: choose another name");
        }
        if name.value.is_empty() || name.value.len() > NAME_MAX || name.value.contains([' ', '/']) {
            let hint = format!("a name has 1 to {NAME_MAX} bytes, without `/` and spaces");
            table.wrong(&name.span, format!("`{}` cannot be the name of a mux", name.value), hint);
        }
        muxes.extend(mux(&name, &table, directory, threads));
        table.finish();
    }
    muxes
}

fn mux(name: &At<&str>, table: &Table<'_, '_>, directory: &Path, threads: usize) -> Option<Mux> {
    table.need("listen", "write listen = [\"HOST:PORT\"], or \"unix:PATH\"");
    table.need("framing", "write framing = \"PRESET\": docs/book/src/reference/framing.md lists the presets");
    if !table.has("remote") {
        table.need("worker", "write worker = \"COMMAND\", the program of a worker process");
    }
    let listen = table.texts("listen").iter().filter_map(|text| address(table, text, directory)).collect();
    let framing = table.text("framing").map(|text| (Named::read(text.value, directory), text));
    let worker = table.text("worker").and_then(|text| command::words(table, &text, directory));
    let order = match table.word("order") {
        Some("replies") => Order::Replies,
        Some("serial") => Order::Serial,
        Some("sticky") => Order::Sticky,
        Some("key") => Order::Key,
        Some(_) => Order::None,
        None => match &framing {
            Some((Ok(named), _)) => named.framing().order(),
            _ => Order::default(),
        },
    };
    let bytes = |key| table.number(key).map(|bytes| bytes as usize);
    let bounds = MuxBounds {
        head: bytes("head-max"),
        connection_bytes: bytes("connection-bytes"),
        send_bytes: bytes("send-bytes"),
        send_most: bytes("send-most"),
        mux_bytes: bytes("mux-bytes"),
        send_time: table.seconds("send-time"),
    };
    if let Some((Ok(named), text)) = &framing
        && let Some(why) = bounds.unused_head(named.framing())
    {
        let message = format!("`head-max` has no effect with `{}`", text.value);
        table.wrong(&table.span_of("head-max"), message, why);
    }
    match &framing {
        Some((Err(error), text)) => {
            let message = format!("`{}` is not a framing: {}", text.value, error.why());
            table.wrong(&text.span, message, "docs/book/src/reference/framing.md describes framings");
        }
        Some((Ok(named), text)) if order == Order::Key && !named.framing().may_have_key() => {
            let message = format!("`{}` has no key, but `order` is \"key\"", text.value);
            table.wrong(
                &text.span,
                message,
                "write key=OFFSET:LENGTH or key=WORD after it: docs/book/src/reference/framing.md describes both",
            );
        }
        _ => {}
    }
    let send = match table.word("send") {
        Some("zerocopy") => CopyMode::Zerocopy,
        Some("plain") => CopyMode::Plain,
        _ => CopyMode::Adaptive,
    };
    let seconds = |key| table.seconds(key);
    Some(Mux {
        name: name.value.to_owned(),
        listen,
        workers: workers(table),
        remote: remote(table),
        process: process::take(table, directory),
        thread: thread(table, threads),
        order,
        in_flight: table.number("in-flight").map(|most| most as usize),
        rebalance: rebalance(table, order),
        drain: seconds("drain").unwrap_or(Duration::from_secs(10)),
        timeout: seconds("timeout"),
        idle: seconds("idle"),
        message_time: seconds("message-time"),
        message_max: table.number("message-max").unwrap_or(16 << 20) as usize,
        bounds,
        redeliver: table.number("redeliver").unwrap_or(2) as u8,
        on_worker_end: match table.word("on-worker-end") {
            Some("move") => WorkerEnd::Move,
            Some(_) => WorkerEnd::Close,
            None => WorkerEnd::of(order),
        },
        keep_undone: table.word("undone") == Some("keep"),
        may_push: table.word("worker-may") == Some("push"),
        send,
        send_check: table.switch("send-check").unwrap_or(false),
        tls: tls(
            table,
            directory,
            framing.as_ref().and_then(|(named, _)| Some(named.as_ref().ok()?.framing())),
        ),
        framing: framing?.0.ok()?,
        worker: if table.has("worker") { worker? } else { Vec::new() },
    })
}

/// The number of worker processes.
fn workers(table: &Table<'_, '_>) -> usize {
    let number = table.number("workers");
    if !table.has("worker") {
        for key in ["workers", "user", "group", "env", "limits", "cgroup", "sandbox"] {
            if table.has(key) {
                let hint = "write worker = \"COMMAND\", the program of a worker process";
                table.wrong(&table.span_of(key), format!("`{key}` needs `worker`"), hint);
            }
        }
        return 0;
    }
    let processors = || std::thread::available_parallelism().map_or(1, NonZeroUsize::get).min(64);
    number.map_or_else(processors, |count| count as usize)
}

/// Workers on other machines.
fn remote(table: &Table<'_, '_>) -> Option<RemoteWorkers> {
    let most = table.number("remote-workers").unwrap_or(16) as usize;
    let Some(subject) = table.text("remote") else {
        if table.has("remote-workers") && !table.has("remote") {
            let hint = "write remote = \"SUBJECT\", that of the worker hosts";
            table.wrong(&table.span_of("remote-workers"), "`remote-workers` needs `remote`", hint);
        }
        return None;
    };
    if !is_subject(subject.value) {
        let hint = "a subject has words of letters, digits, `-` and `_`, with dots between them, and at most 128 characters";
        table.wrong(&subject.span, format!("`{}` is not a subject", subject.value), hint);
    }
    Some(RemoteWorkers { subject: subject.value.to_owned(), most: NonZeroUsize::new(most)? })
}

fn rebalance(table: &Table<'_, '_>, order: Order) -> Option<usize> {
    let limit = table.number("rebalance")?;
    if order != Order::Sticky {
        table.wrong(
            &table.span_of("rebalance"),
            "`rebalance` moves connections of order = \"sticky\"",
            "write order = \"sticky\", or remove it",
        );
    }
    Some(limit as usize)
}

fn thread(table: &Table<'_, '_>, threads: usize) -> Thread {
    match table.number_or("thread") {
        None => Thread::Shared,
        Some(None) => Thread::Own,
        Some(Some(at)) => {
            let thread = at.value as usize;
            if thread >= threads {
                let message = format!("the engine has no thread {thread}");
                let hint = format!("its threads are 0 to {}: see `threads` of [engine]", threads - 1);
                table.wrong(&at.span, message, hint);
            }
            Thread::Engine(thread)
        }
    }
}

fn address(table: &Table<'_, '_>, text: &At<&str>, directory: &Path) -> Option<String> {
    if let Some(path) = text.value.strip_prefix("unix:") {
        return Some(format!("unix:{}", directory.join(path).display()));
    }
    let port = text.value.rsplit_once(':').filter(|(host, _)| !host.is_empty()).map(|(_, port)| port);
    if port.and_then(|port| port.parse::<u16>().ok()).is_none() {
        let message = format!("`{}` is not an address to listen on", text.value);
        table.wrong(&text.span, message, "write \"HOST:PORT\", such as \"0.0.0.0:7007\", or \"unix:PATH\"");
        return None;
    }
    Some(text.value.to_owned())
}

fn tls(table: &Table<'_, '_>, directory: &Path, framing: Option<&Framing>) -> Option<ServerTls> {
    let path = |key| table.text(key).map(|text| directory.join(text.value));
    let (client_ca, client_optional) = (path("tls-client-ca"), table.switch("tls-client-optional"));
    let (starttls, kernel) = (table.switch("starttls"), table.switch("tls-kernel") == Some(true));
    let (cert, key) = (path("tls-cert"), path("tls-key"));
    let files = "TLS needs a certificate chain and its key, both PEM";
    let lacks = |has, lacks, hint| table.wrong(&table.span_of(has), format!("`{lacks}` is missing"), hint);
    match (&cert, &key) {
        (Some(_), None) => lacks("tls-cert", "tls-key", files),
        (None, Some(_)) => lacks("tls-key", "tls-cert", files),
        (None, None) if client_ca.is_some() => lacks("tls-client-ca", "tls-cert", files),
        (None, None) if starttls == Some(true) => lacks("starttls", "tls-cert", files),
        (None, None) if kernel => lacks("tls-kernel", "tls-cert", files),
        _ => {}
    }
    if client_optional == Some(true) && client_ca.is_none() {
        let hint = "write tls-client-ca = \"FILE\", or remove it";
        lacks("tls-client-optional", "tls-client-ca", hint);
    }
    let offered = framing.and_then(Framing::starttls).filter(|_| starttls == Some(true));
    if starttls == Some(true) && framing.is_some() && offered.is_none() {
        table.wrong(
            &table.span_of("starttls"),
            "the protocol of `framing` has no STARTTLS",
            "use smtp or postgres-frontend, or remove it",
        );
    }
    let files = ServerTls {
        client_ca,
        client_optional: client_optional == Some(true),
        starttls: offered,
        kernel,
        ..ServerTls::new(cert?, key?)
    };
    Some(framing.map_or(files.clone(), |framing| files.for_framing(framing)))
}

/// Checks that the certificates and keys of muxes are usable.
pub(super) fn look_at_files(top: &Table<'_, '_>, muxes: &[Mux]) {
    for (name, table) in top.named("mux") {
        let mux = muxes.iter().find(|mux| mux.name == name.value);
        let Some(tls) = mux.and_then(|mux| mux.tls.as_ref()) else { continue };
        let mut readable = true;
        let files = [
            ("tls-cert", Some(&tls.chain)),
            ("tls-key", Some(&tls.key)),
            ("tls-client-ca", tls.client_ca.as_ref()),
        ];
        for (word, path) in files {
            if let Some(path) = path
                && let Err(error) = File::open(path)
                && error.kind() == io::ErrorKind::PermissionDenied
            {
                let message = format!("{}: cannot be read: {error}", path.display());
                table.denied(
                    &table.span_of(word),
                    message,
                    "the user that starts the engine must be able to read it",
                );
                readable = false;
            }
        }
        if readable && let Err(error) = Tls::from_files(tls.clone()) {
            let text = error.to_string();
            let named = |path: &Path| text.starts_with(&format!("{}: ", path.display()));
            let key = files.iter().find(|(_, path)| path.is_some_and(|path| named(path)));
            table.wrong(
                &table.span_of(key.map_or("tls-cert", |(key, _)| key)),
                error.to_string(),
                "TLS needs PEM files: a certificate chain, its key, and the CA of clients if they need certificates",
            );
        }
    }
}
