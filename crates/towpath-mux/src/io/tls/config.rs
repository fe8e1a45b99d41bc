//! Configuration of one side of TLS, from files that can be read again.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, ClientConnection, Connection, RootCertStore, ServerConfig, ServerConnection};

use super::starttls::Prelude;
use super::{Session, kernel};
use crate::framing::{Framing, StartTls};

/// Default handshake timeout.
const HANDSHAKE: Duration = Duration::from_secs(10);

/// TLS configuration of one side. Clones share it.
#[derive(Clone)]
pub struct Tls {
    side: Side,
    time: Duration,
}

#[derive(Clone)]
enum Side {
    Server(Arc<Server>),
    Client(Arc<ClientConfig>, ServerName<'static>),
}

struct Server {
    /// What it was made from; `None`: from a configuration of rustls.
    from: Option<ServerTls>,
    starttls: Option<StartTls>,
    /// Locked for each handshake and reload, never for data.
    config: Mutex<Arc<ServerConfig>>,
}

/// The server side of TLS: its files and options ([`Tls::from_files`]).
///
/// # Examples
///
/// ```no_run
/// use towpath_mux::io::{Server, ServerTls, Tls};
/// use towpath_mux::framing::Framing;
/// use towpath_mux::mux::Config;
///
/// let framing = Framing::preset("mqtt")?;
/// let files = ServerTls {
///     client_ca: Some("devices.pem".into()),
///     ..ServerTls::new("cert.pem", "key.pem").for_framing(&framing)
/// };
/// let tls = Tls::from_files(files)?;
/// let config = Config::for_framing(&framing);
/// let server = Server::new(framing, config)?;
/// server.listen_tls("0.0.0.0:8883", tls.clone())?;
/// // After the certificate was renewed:
/// tls.reload()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerTls {
    /// Certificate chain, own certificate first (PEM).
    pub chain: PathBuf,
    /// Private key of the own certificate (PEM).
    pub key: PathBuf,
    /// CA certificates for client certificates (PEM). A client must then have a certificate that one of them signed. Default: clients
    /// are not asked for a certificate.
    pub client_ca: Option<PathBuf>,
    /// Serve clients without a certificate too. A certificate that a client sends is verified. Default: false.
    pub client_optional: bool,
    /// Protocols that clients may ask for (ALPN, RFC 7301), most preferred first. A client that offers only other ones is refused with
    /// the alert no_application_protocol. A client that offers none is served. Default: none; then offers are ignored.
    pub alpn: Vec<Vec<u8>>,
    /// Plaintext that precedes TLS. Default: none, a connection starts with TLS.
    pub starttls: Option<StartTls>,
    /// After the handshake, the kernel encrypts and decrypts (Documentation/networking/tls.rst). Default: false. Sockets or ciphers for
    /// which the kernel does not do that keep TLS in this process. Keys then do not change: a peer that asks for other keys (KeyUpdate) is
    /// disconnected, and so is one that was sent 2^24 records with AES-GCM.
    pub kernel: bool,
}

impl ServerTls {
    /// This certificate chain and key, with defaults for the rest.
    pub fn new(chain: impl Into<PathBuf>, key: impl Into<PathBuf>) -> Self {
        Self {
            chain: chain.into(),
            key: key.into(),
            client_ca: None,
            client_optional: false,
            alpn: Vec::new(),
            starttls: None,
            kernel: false,
        }
    }

    /// Sets the protocols of ALPN to those of the framing's preset.
    #[must_use]
    pub fn for_framing(self, framing: &Framing) -> Self {
        Self { alpn: framing.alpn().iter().map(|id| id.as_bytes().to_vec()).collect(), ..self }
    }

    fn config(&self) -> Result<ServerConfig, TlsError> {
        let (chain, key) = (&self.chain, &self.key);
        let certificates = certificates(chain)?;
        let private =
            PrivateKeyDer::from_pem_file(key).map_err(|error| not_pem(key, "private key", &error))?;
        let builder = ServerConfig::builder_with_provider(provider());
        let builder = builder.with_safe_default_protocol_versions().map_err(wrong)?;
        let builder = match &self.client_ca {
            None => builder.with_no_client_auth(),
            Some(path) => {
                let clients = WebPkiClientVerifier::builder_with_provider(Arc::new(roots(path)?), provider());
                let clients =
                    if self.client_optional { clients.allow_unauthenticated() } else { clients }.build();
                let clients =
                    clients.map_err(|error| TlsError(format!("{}: not usable: {error}", path.display())))?;
                builder.with_client_cert_verifier(clients)
            }
        };
        let mut config = builder.with_single_cert(certificates, private).map_err(|error| {
            TlsError(format!(
                "the certificate {} and the key {} do not match: {error}",
                chain.display(),
                key.display()
            ))
        })?;
        config.alpn_protocols.clone_from(&self.alpn);
        config.enable_secret_extraction = self.kernel;
        Ok(config)
    }
}

/// Why TLS cannot be configured.
#[derive(Debug)]
pub struct TlsError(String);

impl fmt::Display for TlsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for TlsError {}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.side {
            Side::Server(_) => "Tls(server)",
            Side::Client(..) => "Tls(client)",
        })
    }
}

impl Tls {
    /// Server side, with a certificate chain (own certificate first) and its private key, both PEM files.
    ///
    /// # Errors
    ///
    /// A file cannot be read, has no certificate or key, or the two do not match. The error names the file.
    pub fn server(chain: impl AsRef<Path>, key: impl AsRef<Path>) -> Result<Self, TlsError> {
        Self::from_files(ServerTls::new(chain.as_ref(), key.as_ref()))
    }

    /// Server side, from files that [`Tls::reload`] reads again.
    ///
    /// # Errors
    ///
    /// As [`Tls::server`]; `client_ca` too must have a certificate. With `kernel`, the kernel must have TLS.
    pub fn from_files(from: ServerTls) -> Result<Self, TlsError> {
        if from.kernel {
            kernel::check().map_err(TlsError)?;
        }
        let config = Mutex::new(Arc::new(from.config()?));
        let server = Server { starttls: from.starttls, from: Some(from), config };
        Ok(Self { side: Side::Server(Arc::new(server)), time: HANDSHAKE })
    }

    /// Server side with a rustls configuration.
    pub fn server_with(config: Arc<ServerConfig>) -> Self {
        let server = Server { from: None, starttls: None, config: Mutex::new(config) };
        Self { side: Side::Server(Arc::new(server)), time: HANDSHAKE }
    }

    /// Client side. Trusts servers with this name whose certificate is signed by one in the PEM file.
    ///
    /// # Errors
    ///
    /// The file cannot be read or has no valid certificate, or `name` is neither a host name nor an address.
    pub fn client(roots_file: impl AsRef<Path>, name: &str) -> Result<Self, TlsError> {
        let config = ClientConfig::builder_with_provider(provider())
            .with_safe_default_protocol_versions()
            .map_err(wrong)?
            .with_root_certificates(roots(roots_file.as_ref())?)
            .with_no_client_auth();
        let name = ServerName::try_from(name.to_owned())
            .map_err(|_| TlsError(format!("`{name}` is neither a host name nor an address")))?;
        Ok(Self::client_with(Arc::new(config), name))
    }

    /// Client side with a rustls configuration.
    pub fn client_with(config: Arc<ClientConfig>, name: ServerName<'static>) -> Self {
        Self { side: Side::Client(config, name), time: HANDSHAKE }
    }

    /// Sets the timeout of a handshake, including the plaintext of STARTTLS before it. Default: 10 s.
    #[must_use]
    pub fn with_handshake_time(self, time: Duration) -> Self {
        Self { time, ..self }
    }

    /// Reads the files of [`Tls::from_files`] again, for all clones. Later handshakes use them and resume no session of before.
    /// Connections are not affected. Has no effect on other configurations.
    ///
    /// # Errors
    ///
    /// As [`Tls::from_files`]. The files that were read before stay in use.
    pub fn reload(&self) -> Result<(), TlsError> {
        Self::reload_all(std::slice::from_ref(self))
    }

    /// Reads the files of several configurations again. If one of them fails, all stay as they were.
    pub(in crate::io) fn reload_all(all: &[Self]) -> Result<(), TlsError> {
        let mut read = Vec::new();
        for tls in all {
            if let Side::Server(server) = &tls.side
                && let Some(from) = &server.from
            {
                // A new configuration has an empty session cache: a session of a client that the old CA signed cannot be resumed.
                read.push((server, Arc::new(from.config()?)));
            }
        }
        for (server, config) in read {
            *server.config.lock().unwrap_or_else(PoisonError::into_inner) = config;
        }
        Ok(())
    }

    /// Starts a session.
    pub(in crate::io) fn session(&self) -> io::Result<Session> {
        let (connection, starttls, kernel) = match &self.side {
            Side::Server(server) => {
                let kernel = server.from.as_ref().is_some_and(|from| from.kernel);
                let config = Arc::clone(&server.config.lock().unwrap_or_else(PoisonError::into_inner));
                (ServerConnection::new(config).map(Connection::from), server.starttls, kernel)
            }
            Side::Client(config, name) => {
                (ClientConnection::new(Arc::clone(config), name.clone()).map(Connection::from), None, false)
            }
        };
        Ok(Session::of(connection.map_err(io::Error::other)?, starttls.map(Prelude::new), kernel))
    }

    /// The handshake timeout.
    pub(in crate::io) fn time(&self) -> Duration {
        self.time
    }
}

fn roots(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut store = RootCertStore::empty();
    for certificate in certificates(path)? {
        let added = store.add(certificate);
        added.map_err(|error| TlsError(format!("{}: not a CA certificate: {error}", path.display())))?;
    }
    Ok(store)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let none = |error| not_pem(path, "certificate", &error);
    let all = CertificateDer::pem_file_iter(path).map_err(none)?;
    let all = all.collect::<Result<Vec<_>, _>>().map_err(none)?;
    match all.is_empty() {
        true => Err(TlsError(format!(
            "{}: no certificate in PEM: the file has no section CERTIFICATE",
            path.display()
        ))),
        false => Ok(all),
    }
}

/// Error for a PEM file without a valid section for `what`.
fn not_pem(path: &Path, what: &str, error: &pem::Error) -> TlsError {
    let path = path.display();
    TlsError(match error {
        pem::Error::Io(error) => format!("{path}: cannot be read: {error}"),
        error => format!("{path}: no {what} in PEM: {error}"),
    })
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(rustls::crypto::ring::default_provider())
}

fn wrong(error: rustls::Error) -> TlsError {
    TlsError(error.to_string())
}
