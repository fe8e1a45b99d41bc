//! Connection events of a multiplexor's workers: the payloads of [`Kind::OPENED`] and [`Kind::ENDED`].
//!
//! [`Kind::OPENED`]: crate::Kind::OPENED
//! [`Kind::ENDED`]: crate::Kind::ENDED

use std::fmt;

/// Longest value in an opened event.
const VALUE_MAX: usize = 4096;
/// Most client names in an opened event.
const NAMES_MAX: usize = 32;
/// Mark of an opened event: anything was received or sent before.
const RESUMED: u32 = 1;
/// Mark of an opened event: the connection has TLS.
const TLS: u32 = 2;
/// Mark of an opened event: the client asked for TLS in plaintext.
const STARTTLS: u32 = 4;

/// What a worker learns about a connection ([`Event::Opened`](crate::Event::Opened)). An address is `IP:PORT`, `[IP]:PORT` or
/// `unix:PATH`; empty if unknown or unnamed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct OpenedInfo {
    /// Messages were received or sent before: another worker served the connection.
    pub resumed: bool,
    /// The connection has TLS.
    pub tls: bool,
    /// The client asked for TLS in plaintext, with STARTTLS or SSLRequest. An SMTP client was greeted then: do not greet it again.
    pub starttls: bool,
    /// Address of the peer.
    pub peer: String,
    /// Own address.
    pub local: String,
    /// Address of the listener that accepted the connection; empty for outbound connections.
    pub listener: String,
    /// Server name that the client asked for (SNI); empty without.
    pub server_name: String,
    /// Protocol that the two sides agreed on (ALPN); empty without.
    pub protocol: Vec<u8>,
    /// Names in the verified certificate of the client: the DNS names and URIs of its subject alternative name, or its common name if
    /// it has none of them. At most 32 names and 1,023 bytes; names beyond are left out.
    pub client_names: Vec<String>,
}

/// How a connection ended ([`Event::Ended`](crate::Event::Ended)).
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct EndedInfo {
    /// The cause.
    pub cause: EndCause,
    /// Error number (errno(3)); 0 for an end without an error.
    pub errno: i32,
    /// [`EndCause::Inside`]: bytes of the incomplete message that had arrived.
    pub bytes: u64,
    /// [`EndCause::Inside`]: length of this message, if it was known.
    pub length: Option<u64>,
    /// The cause as text, with details.
    pub text: String,
}

macro_rules! causes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        /// Cause of the end of a connection.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[repr(u32)]
        pub enum EndCause {
            $($(#[$doc])* $name = $code,)*
            /// A cause that this version of the library does not know.
            #[default]
            Other = u32::MAX,
        }

        impl EndCause {
            /// All causes but [`EndCause::Other`].
            pub const ALL: &[Self] = &[$(Self::$name),*];

            /// The cause with this number in the ring.
            #[must_use]
            pub const fn from_code(code: u32) -> Self {
                match code {
                    $($code => Self::$name,)*
                    _ => Self::Other,
                }
            }

            /// Number in the ring.
            #[must_use]
            pub const fn code(self) -> u32 {
                self as u32
            }

            /// The cause with this name.
            #[must_use]
            pub fn from_name(name: &str) -> Self {
                Self::ALL.iter().copied().find(|cause| cause.name() == name).unwrap_or_default()
            }

            /// Name: lower case, words joined by `_`.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                    Self::Other => "other",
                }
            }
        }
    };
}

causes! {
    /// The peer closed it after a whole message.
    Clean = 0, "clean";
    /// The peer closed it inside a message.
    Inside = 1, "inside";
    /// A read or write failed, or the peer reset it.
    Reset = 2, "reset";
    /// TLS failed.
    Tls = 3, "tls";
    /// The framing refused the bytes.
    Malformed = 4, "malformed";
    /// A message or its header was too big.
    TooBig = 5, "too_big";
    /// A message was not complete in time.
    Timeout = 6, "timeout";
    /// The framing gave it back.
    GivenBack = 7, "given_back";
    /// The application took it back.
    Unattached = 8, "unattached";
    /// It was drained.
    Drained = 9, "drained";
    /// It was not drained in time.
    DrainTimeout = 10, "drain_timeout";
    /// The peer passed descriptors.
    Descriptors = 11, "descriptors";
    /// It was idle for too long.
    Idle = 12, "idle";
    /// The peer accepted no data for too long.
    SendTimeout = 13, "send_timeout";
    /// More data was to be sent than may wait for a peer.
    SendFull = 14, "send_full";
    /// The multiplexor was full.
    Memory = 15, "memory";
    /// A worker closed it.
    Closed = 16, "closed";
    /// A worker reset it.
    ResetByWorker = 17, "reset_by_worker";
    /// Its worker ended.
    WorkerEnded = 18, "worker_ended";
}

impl fmt::Display for EndCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Tags of the values of an opened event.
const PEER: u16 = 1;
const LOCAL: u16 = 2;
const LISTENER: u16 = 3;
const SERVER_NAME: u16 = 4;
const PROTOCOL: u16 = 5;
const CLIENT_NAME: u16 = 6;

impl OpenedInfo {
    /// Mark of the frame.
    #[must_use]
    pub fn mark(&self) -> u32 {
        let bits = [(self.resumed, RESUMED), (self.tls, TLS), (self.starttls, STARTTLS)];
        bits.into_iter().map(|(set, bit)| if set { bit } else { 0 }).sum()
    }

    /// Payload of the frame. Long values are cut.
    #[must_use]
    pub fn emit(&self) -> Vec<u8> {
        let texts = [(PEER, &self.peer), (LOCAL, &self.local), (LISTENER, &self.listener)];
        let texts = texts.into_iter().chain([(SERVER_NAME, &self.server_name)]);
        let texts = texts.chain(self.client_names.iter().take(NAMES_MAX).map(|name| (CLIENT_NAME, name)));
        let values = texts.map(|(tag, text)| (tag, text.as_bytes())).chain([(PROTOCOL, &*self.protocol)]);
        let mut out = Vec::new();
        for (tag, value) in values.filter(|(_, value)| !value.is_empty()) {
            let value = &value[..value.len().min(VALUE_MAX)];
            out.extend_from_slice(&tag.to_ne_bytes());
            out.extend_from_slice(&(value.len() as u16).to_ne_bytes());
            out.extend_from_slice(value);
        }
        out
    }

    /// Parses a frame with this mark and payload. `None` if the values exceed the payload. Unknown values are skipped.
    #[must_use]
    pub fn parse(mark: u32, mut payload: &[u8]) -> Option<Self> {
        let (resumed, tls, starttls) = (mark & RESUMED != 0, mark & TLS != 0, mark & STARTTLS != 0);
        let mut info = Self { resumed, tls, starttls, ..Self::default() };
        while !payload.is_empty() {
            let (tag, rest) = payload.split_first_chunk::<2>()?;
            let (length, rest) = rest.split_first_chunk::<2>()?;
            let (value, rest) = rest.split_at_checked(u16::from_ne_bytes(*length).into())?;
            payload = rest;
            let text = || String::from_utf8_lossy(value).into_owned();
            match u16::from_ne_bytes(*tag) {
                PEER => info.peer = text(),
                LOCAL => info.local = text(),
                LISTENER => info.listener = text(),
                SERVER_NAME => info.server_name = text(),
                PROTOCOL => info.protocol = value.to_vec(),
                CLIENT_NAME if info.client_names.len() < NAMES_MAX => info.client_names.push(text()),
                _ => {}
            }
        }
        Some(info)
    }
}

impl EndedInfo {
    /// Payload of the frame. The mark is [`EndCause::code`], the hash the error number.
    #[must_use]
    pub fn emit(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(16 + self.text.len());
        out.extend_from_slice(&self.bytes.to_ne_bytes());
        out.extend_from_slice(&self.length.unwrap_or(0).to_ne_bytes());
        out.extend_from_slice(&self.text.as_bytes()[..self.text.len().min(VALUE_MAX)]);
        out
    }

    /// Parses a frame with this mark, hash and payload. `None` if the payload is too short.
    #[must_use]
    pub fn parse(mark: u32, hash: u32, payload: &[u8]) -> Option<Self> {
        let (bytes, rest) = payload.split_first_chunk()?;
        let (length, text) = rest.split_first_chunk()?;
        let length = u64::from_ne_bytes(*length);
        Some(Self {
            cause: EndCause::from_code(mark),
            errno: i32::try_from(hash).unwrap_or(i32::MAX),
            bytes: u64::from_ne_bytes(*bytes),
            length: (length > 0).then_some(length),
            text: String::from_utf8_lossy(text).into_owned(),
        })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn events_survive_emit_and_parse() {
        let info = OpenedInfo {
            resumed: true,
            tls: true,
            starttls: true,
            peer: "[2001:db8::1]:25".into(),
            local: "192.0.2.1:25".into(),
            listener: "0.0.0.0:25".into(),
            server_name: "mail.example".into(),
            protocol: b"smtp".to_vec(),
            client_names: vec!["a.example".into(), "b.example".into()],
        };
        assert_eq!(OpenedInfo::parse(info.mark(), &info.emit()), Some(info));
        assert_eq!(OpenedInfo::parse(0, &[]), Some(OpenedInfo::default()));
        assert_eq!(OpenedInfo::parse(0, &[1, 0, 9, 0, 1]), None, "longer than the payload");
        for cause in EndCause::ALL {
            assert_eq!(EndCause::from_code(cause.code()), *cause);
            let info = EndedInfo { cause: *cause, errno: 104, bytes: 3, length: Some(9), text: "ä".into() };
            assert_eq!(EndedInfo::parse(cause.code(), 104, &info.emit()), Some(info));
        }
        assert_eq!(EndCause::from_code(1000), EndCause::Other);
        assert_eq!(EndedInfo::parse(0, 0, &[0; 15]), None);
        let long = OpenedInfo { client_names: vec!["x".repeat(70_000); 70], ..OpenedInfo::default() };
        let parsed = OpenedInfo::parse(0, &long.emit()).unwrap();
        assert_eq!(parsed.client_names, vec!["x".repeat(VALUE_MAX); NAMES_MAX], "bounded");
    }

    proptest! {
        #[test]
        fn parsers_never_panic(mark: u32, payload: Vec<u8>) {
            let _ = OpenedInfo::parse(mark, &payload);
            let _ = EndedInfo::parse(mark, mark, &payload);
        }
    }
}
