//! Listeners with TLS and on Unix sockets, outbound connections and the admission policy of a mux.

use std::ffi::{CString, c_char, c_int, c_void};
use std::fmt;
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use towpath_mux::Time;
use towpath_mux::framing::Framing;
use towpath_mux::io::{self, Admission, Admit, Connect, Peer, ServerTls, Tls, TlsError};

use crate::error::{Failure, guard};
use crate::ffi::{Context, Release, Text};
use crate::mux::{Mux, of, text_of};

/// `struct towpath_tls_options`.
#[derive(Debug)]
#[repr(C)]
pub struct TlsOptions {
    /// Server: path of the certificate chain.
    pub certificate: Text,
    /// Server: path of the private key.
    pub key: Text,
    /// Server: path of the certificates of authorities of clients.
    pub client_ca: Text,
    /// Client: path of the trusted certificates.
    pub roots: Text,
    /// Client: name of the server.
    pub name: Text,
    /// Milliseconds for the handshake.
    pub handshake_time: u32,
    /// Server: 1 for clients without a certificate, too.
    pub client_optional: u32,
    /// Server: 1 for plaintext before TLS.
    pub starttls: u32,
    /// 0.
    pub reserved: u32,
}

/// `struct towpath_connect_options`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ConnectOptions<'a> {
    /// TLS; NULL for none.
    pub tls: Option<&'a TlsOptions>,
    /// Milliseconds for connect(2).
    pub timeout: u32,
    /// Milliseconds before the second attempt.
    pub pause: u32,
    /// Milliseconds between attempts, at most.
    pub pause_most: u32,
    /// 0.
    pub reserved: u32,
}

/// `towpath_connector`.
#[derive(Debug)]
pub struct Connector {
    _connector: io::Connector,
}

/// `towpath_admit`.
pub type AdmitFunction = extern "C" fn(*const c_char, *const c_char, *mut c_void) -> c_int;
/// `towpath_left`.
pub type LeftFunction = extern "C" fn(*const c_char, *const c_char, *mut c_void);

/// `TOWPATH_ADMIT_PASS`.
pub(crate) const PASS: c_int = 0;
/// `TOWPATH_ADMIT_DENY`.
#[cfg(test)]
pub(crate) const DENY: c_int = 1;
/// `TOWPATH_ADMIT_RESET`.
pub(crate) const RESET: c_int = 2;

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_listen(
    mux: Option<&Mux>,
    address: Text,
    port: Option<&mut MaybeUninit<u16>>,
) -> c_int {
    guard(|| {
        let bound = of(mux)?.server().listen(text_of(&address, "the address")?)?;
        write(port, bound.port());
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_listen_tls(
    mux: Option<&Mux>,
    address: Text,
    options: Option<&TlsOptions>,
    port: Option<&mut MaybeUninit<u16>>,
) -> c_int {
    guard(|| {
        of(mux)?;
        let Mux { socket, framing, .. } = mux.ok_or(Failure::NULL_HANDLE)?;
        let server = socket.server();
        let options = options.ok_or(Failure::null("the options of TLS are NULL"))?;
        let tls = options.server(framing)?;
        let bound = server.listen_tls(text_of(&address, "the address")?, tls)?;
        write(port, bound.port());
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_reload_tls(mux: Option<&Mux>) -> c_int {
    guard(|| {
        of(mux)?.server().reload_tls()?;
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_listen_unix(mux: Option<&Mux>, path: Text) -> c_int {
    guard(|| {
        let server = of(mux)?.server();
        server.listen_unix(path.get().ok_or(Failure::null("the path is NULL"))?)?;
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_connect(
    mux: Option<&Mux>,
    peer: Text,
    options: Option<&ConnectOptions<'_>>,
    connector: Option<&mut MaybeUninit<*mut Connector>>,
) -> c_int {
    guard(|| {
        let server = of(mux)?.server();
        let peer = text_of(&peer, "the peer")?;
        let mut how = Connect::default();
        if let Some(options) = options {
            let millis = |option: u32, default| match option {
                0 => default,
                millis => Duration::from_millis(millis.into()),
            };
            how.timeout = millis(options.timeout, how.timeout);
            how.pause = millis(options.pause, how.pause);
            how.pause_most = millis(options.pause_most, how.pause_most);
            how.tls = options.tls.map(|tls| tls.client(peer)).transpose()?;
        }
        let found = server.connect(peer, how)?;
        match connector {
            Some(into) => _ = into.write(Box::into_raw(Box::new(Connector { _connector: found }))),
            None => found.detach(),
        }
        Ok(0)
    })
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_connector_close(connector: Option<Box<Connector>>) {
    guard(|| {
        drop(connector);
        Ok(0)
    });
}

/// See `towpath.h`.
#[unsafe(no_mangle)]
pub extern "C" fn towpath_mux_set_admission(
    mux: Option<&Mux>,
    admit: Option<AdmitFunction>,
    left: Option<LeftFunction>,
    context: *mut c_void,
    release: Option<Release>,
) -> c_int {
    guard(|| {
        let server = of(mux)?.server();
        let admit = admit.ok_or(Failure::null("the function is NULL"))?;
        server.set_admission(Arc::new(Functions { admit, left, context: Context::new(context, release) }));
        Ok(0)
    })
}

fn write(port: Option<&mut MaybeUninit<u16>>, bound: u16) {
    if let Some(port) = port {
        port.write(bound);
    }
}

impl TlsOptions {
    fn server(&self, framing: &Framing) -> Result<Tls, Failure> {
        let (Some(certificate), Some(key)) = (self.certificate.get(), self.key.get()) else {
            return Err(Failure::null("certificate and key are paths of PEM files; one of them is NULL"));
        };
        let starttls = framing.starttls().filter(|_| self.starttls != 0);
        if self.starttls != 0 && starttls.is_none() {
            let why = "starttls: the protocol of the framing has none; use smtp or postgres-frontend";
            return Err(Failure::new(Errno::INVAL, why));
        }
        let files = ServerTls {
            starttls,
            client_ca: self.client_ca.get().map(PathBuf::from),
            client_optional: self.client_optional != 0,
            ..ServerTls::new(certificate, key).for_framing(framing)
        };
        Ok(self.timed(Tls::from_files(files)?))
    }

    fn client(&self, peer: &str) -> Result<Tls, Failure> {
        let roots = self.roots.get().ok_or(Failure::null("roots is the path of a PEM file; it is NULL"))?;
        let host = peer.rsplit_once(':').map_or(peer, |(host, _)| host.trim_matches(['[', ']']));
        let name = self.name.get().map(|_| text_of(&self.name, "the name")).transpose()?;
        Ok(self.timed(Tls::client(roots, name.unwrap_or(host))?))
    }

    fn timed(&self, tls: Tls) -> Tls {
        match self.handshake_time {
            0 => tls,
            time => tls.with_handshake_time(Duration::from_millis(time.into())),
        }
    }
}

impl From<TlsError> for Failure {
    fn from(error: TlsError) -> Self {
        Self::new(Errno::INVAL, error.to_string())
    }
}

/// An admission policy of C.
struct Functions {
    admit: AdmitFunction,
    left: Option<LeftFunction>,
    context: Context,
}

impl fmt::Debug for Functions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Functions")
    }
}

impl Admission for Functions {
    fn admit(&self, peer: &Peer, _: Time) -> Admit {
        let (remote, local) = addresses(peer);
        match (self.admit)(remote.as_ptr(), local.as_ptr(), self.context.pointer()) {
            PASS => Admit::Pass,
            RESET => Admit::Reset,
            // DENY, and values that are none.
            _ => Admit::Deny,
        }
    }

    fn closed(&self, peer: &Peer, _: Time) {
        if let Some(left) = self.left {
            let (remote, local) = addresses(peer);
            left(remote.as_ptr(), local.as_ptr(), self.context.pointer());
        }
    }
}

/// The addresses, peer first, as C strings.
fn addresses(peer: &Peer) -> (CString, CString) {
    let text = |address: std::net::SocketAddr| CString::new(address.to_string()).unwrap_or_default();
    (text(peer.remote), text(peer.local))
}
