//! Options of the bus between fronts and worker hosts.

use std::path::PathBuf;

use clap::builder::ValueHint;
use towpath::remote_workers::{BusSettings, default_name};
use towpath_fleet::nats::ServerConfig;
use towpath_fleet::workers::{is_name, is_subject};

/// The default server.
const SERVER: &str = "nats://127.0.0.1:4222";

/// The group of the option that names the subject. The others need it.
pub(crate) const SUBJECT: &str = "bus_subject";

// Not a doc comment: clap would make it the description of the command.
#[derive(Debug, clap::Args)]
pub(crate) struct BusArgs {
    /// Server of NATS, nats://[USER:PASSWORD@]HOST:PORT or tls://HOST:PORT; may be repeated, the first that answers is used
    /// (default: nats://127.0.0.1:4222)
    #[arg(long, requires = SUBJECT, value_name = "URL", value_parser = server)]
    nats: Vec<String>,

    /// Credentials for NATS, or a file with the seed of an nkey
    #[arg(long, requires = SUBJECT, value_name = "FILE", value_hint = ValueHint::FilePath)]
    nats_credentials: Option<PathBuf>,

    /// Require TLS of the server of NATS
    #[arg(long, requires = SUBJECT)]
    nats_tls: bool,

    /// Trust a server of NATS whose certificate a CA in FILE (PEM) has signed
    #[arg(long, requires = SUBJECT, value_name = "FILE", value_hint = ValueHint::FilePath)]
    nats_tls_ca: Option<PathBuf>,

    /// Certificate and key (PEM) of this client of NATS
    #[arg(long, requires = SUBJECT, value_name = "CERT,KEY", value_parser = pair, value_hint = ValueHint::FilePath)]
    nats_tls_identity: Option<(PathBuf, PathBuf)>,

    /// Name of this process in the subjects, for permissions of the server (default: the machine's name and a random part)
    #[arg(long, requires = SUBJECT, value_name = "NAME", value_parser = name)]
    nats_name: Option<String>,
}

impl BusArgs {
    pub(crate) fn settings(&self, subject: &str) -> BusSettings {
        let servers = if self.nats.is_empty() { vec![SERVER.to_owned()] } else { self.nats.clone() };
        let server = ServerConfig {
            servers,
            credentials: self.nats_credentials.clone(),
            tls: self.nats_tls,
            tls_ca: self.nats_tls_ca.clone(),
            tls_identity: self.nats_tls_identity.clone(),
        };
        let name = self.nats_name.clone().unwrap_or_else(default_name);
        BusSettings { server, subject: subject.to_owned(), name }
    }
}

/// A subject of NATS without wildcards.
pub(crate) fn subject(text: &str) -> Result<String, String> {
    match is_subject(text) {
        true => Ok(text.to_owned()),
        false => Err("a subject has words of letters, digits, `-` and `_`, with dots between them, and at most 128 characters".to_owned()),
    }
}

fn name(text: &str) -> Result<String, String> {
    match is_name(text) {
        true => Ok(text.to_owned()),
        false => Err("a name has at most 64 letters, digits, `-` and `_`".to_owned()),
    }
}

fn server(text: &str) -> Result<String, String> {
    match text.split_once("://") {
        Some(("nats" | "tls", rest)) if !rest.is_empty() => Ok(text.to_owned()),
        _ => Err("write nats://HOST:PORT or tls://HOST:PORT".to_owned()),
    }
}

fn pair(text: &str) -> Result<(PathBuf, PathBuf), String> {
    let (cert, key) = text.split_once(',').ok_or("it is two files, CERT,KEY")?;
    Ok((cert.into(), key.into()))
}
