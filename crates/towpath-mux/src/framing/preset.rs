//! Presets: framings by the name of a protocol. Most are a line of the declarative form and serve as
//! examples.

use super::ParseError;
use super::coded::Protocol;
use crate::order::Order;

/// How a client asks for TLS in plaintext.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StartTls {
    /// The command STARTTLS of SMTP and LMTP (RFC 3207).
    Smtp,
    /// SSLRequest of PostgreSQL (PostgreSQL documentation, "Message Flow").
    Postgres,
}

/// A preset.
#[derive(Debug)]
pub struct Preset {
    /// Name for [`super::Framing::preset`].
    pub name: &'static str,
    /// Alias, or empty.
    pub alias: &'static str,
    /// The messages that it frames, and the specification.
    pub about: &'static str,
    /// The order that the protocol needs.
    pub order: Order,
    /// Protocol ids of ALPN in IANA's registry ("TLS Application-Layer Protocol Negotiation (ALPN) Protocol IDs"), most preferred first.
    pub alpn: &'static [&'static str],
    /// How a client asks for TLS in plaintext, if the protocol has this and the server can answer for its workers.
    pub starttls: Option<StartTls>,
    pub(super) form: Form,
}

impl Preset {
    /// The declarative form, if the preset uses it.
    pub const fn text(&self) -> Option<&'static str> {
        match self.form {
            Form::Text(text) => Some(text),
            Form::Coded(_) => None,
        }
    }

    const fn alpn(self, alpn: &'static [&'static str]) -> Self {
        Self { alpn, ..self }
    }

    const fn starttls(self, starttls: StartTls) -> Self {
        Self { starttls: Some(starttls), ..self }
    }
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Form {
    Text(&'static str),
    Coded(Protocol),
}

/// The preset with this name or alias.
pub(super) fn known(name: &str) -> Result<&'static Preset, ParseError> {
    PRESETS
        .iter()
        .find(|preset| preset.name == name || (!name.is_empty() && preset.alias == name))
        .ok_or_else(|| ParseError::unknown_preset(name, PRESETS.iter().map(|preset| preset.name)))
}

const fn text(name: &'static str, alias: &'static str, about: &'static str, text: &'static str) -> Preset {
    Preset { name, alias, about, order: Order::Replies, alpn: &[], starttls: None, form: Form::Text(text) }
}

const fn coded(name: &'static str, alias: &'static str, about: &'static str, protocol: Protocol) -> Preset {
    Preset {
        name,
        alias,
        about,
        order: Order::Replies,
        alpn: &[],
        starttls: None,
        form: Form::Coded(protocol),
    }
}

/// A preset whose protocol needs another order than [`Order::Replies`].
const fn ordered(order: Order, preset: Preset) -> Preset {
    Preset { order, ..preset }
}

/// All presets, sorted by name.
pub const PRESETS: &[Preset] = &[
    ordered(
        Order::Sticky,
        text(
            "amqp091",
            "amqp",
            "AMQP 0-9-1 frames and the protocol header (section 4.2)",
            r#"start (when "AMQP" (fixed=8) else (offset=3 length=4 be adjust=8 tail=0xce))
           offset=3 length=4 be adjust=8 tail=0xce"#,
        ),
    ),
    ordered(
        Order::Sticky,
        text("bgp", "", "BGP messages (RFC 4271, section 4.1)", "when ff*16 (offset=16 length=2 be min=19)"),
    ),
    ordered(
        Order::Sticky,
        coded(
            "cassandra4",
            "cassandra",
            "CQL binary protocol, versions 1 to 4 and the handshake of 5 (native_protocol_v4.spec, section 2)",
            Protocol::Cassandra,
        ),
    ),
    ordered(
        Order::None,
        text(
            "diameter",
            "",
            "Diameter messages (RFC 6733, section 3)",
            "when 01 (offset=1 length=3 be min=20)",
        ),
    ),
    ordered(Order::Sticky, coded("dnp3", "", "DNP3 link frames (IEEE 1815, 9.2)", Protocol::Dnp3)),
    ordered(
        Order::None,
        text("dns-tcp", "dns", "DNS over TCP (RFC 1035, section 4.2.2)", "length=2 be adjust=2"),
    ).alpn(&["dot"]),
    ordered(
        Order::Sticky,
        text("doip", "", "Diagnostics over IP (ISO 13400-2, 9.2)", "offset=4 length=4 be adjust=8"),
    ),
    coded(
        "http1",
        "",
        "HTTP/1.0 and HTTP/1.1 requests and responses (RFC 9112), until the connection leaves HTTP",
        Protocol::Http1,
    ).alpn(&["http/1.1", "http/1.0"]),
    ordered(
        Order::Sticky,
        text(
            "http2-frame",
            "http2",
            "HTTP/2 frames and the client's preface, also after an upgrade from HTTP/1.1 (RFC 9113, 3.4 and 4.1)",
            r#"when "PRI * HTTP/2.0\r\n" (fixed=24 tail="\r\nSM\r\n\r\n")
           when "HTTP/1.1 101 " (delimiter="\r\n\r\n" max=64K)
           when "GET /" (delimiter="\r\n\r\n" max=64K)
           else (length=3 be adjust=9 max=0x1000008)"#,
        ),
    ).alpn(&["h2"]),
    ordered(
        Order::Sticky,
        text("iec104", "", "IEC 60870-5-104 APDUs (section 5)", "when 68 (offset=1 length=1 adjust=2 min=6)"),
    ),
    text(
        "kafka",
        "",
        "Kafka requests and responses (protocol guide, \"Common request and response structure\")",
        "length=4 be adjust=4 max=101M",
    ),
    text("kerberos-tcp", "kerberos", "Kerberos over TCP (RFC 4120, section 7.2.2)", "length=4 be adjust=4"),
    ordered(
        Order::Sticky,
        text(
            "ldap",
            "",
            "LDAP messages (RFC 4511, section 5.1), also in SASL buffers (RFC 4422, section 3.7)",
            "when 30 (offset=1 ber) when 00 (length=4 be adjust=4) when 16 03 (giveback)",
        ),
    ),
    text(
        "line",
        "",
        "Lines that end with LF or CR LF",
        r#"delimiter="\r\n" delimiter="\n" strip=delimiter max=64K"#,
    ),
    text(
        "memcached-binary",
        "",
        "memcached's binary protocol (BinaryProtocolRevamped)",
        "when 80-81 (offset=8 length=4 be adjust=24)",
    ),
    text(
        "memcached-text",
        "memcached",
        "memcached's text protocol, with meta commands (protocol.txt)",
        r#"when "set " (delimiter="\r\n" delimiter="\n" count=4 adjust=2 tail="\r\n" head=64K)
           when "add " (delimiter="\r\n" delimiter="\n" count=4 adjust=2 tail="\r\n" head=64K)
           when "cas " (delimiter="\r\n" delimiter="\n" count=4 adjust=2 tail="\r\n" head=64K)
           when "replace " (delimiter="\r\n" delimiter="\n" count=4 adjust=2 tail="\r\n" head=64K)
           when "append " (delimiter="\r\n" delimiter="\n" count=4 adjust=2 tail="\r\n" head=64K)
           when "prepend " (delimiter="\r\n" delimiter="\n" count=4 adjust=2 tail="\r\n" head=64K)
           when "ms " (delimiter="\r\n" delimiter="\n" count=2 adjust=2 tail="\r\n" head=64K)
           when "VALUE " (delimiter="\r\n" delimiter="\n" count=3 adjust=2 tail="\r\n" head=64K)
           when "VA " (delimiter="\r\n" delimiter="\n" count=1 adjust=2 tail="\r\n" head=64K)
           when 21-7e (delimiter="\r\n" delimiter="\n" max=64K)"#,
    ),
    ordered(
        Order::None,
        text(
            "modbus-tcp",
            "modbus",
            "Modbus over TCP (Messaging Implementation Guide, 3.1.3)",
            "when .. .. 00 00 (offset=4 length=2 be adjust=6 min=8)",
        ),
    ),
    ordered(
        Order::Sticky,
        text(
            "mongodb",
            "mongo",
            "MongoDB wire protocol (\"Standard Message Header\")",
            "length=4 le min=16 max=48_100_000",
        ),
    ),
    ordered(
        Order::Sticky,
        text(
            "mqtt",
            "",
            "MQTT control packets, 3.1 to 5.0 (section 2.1)",
            "when 10-ff (offset=1 varint=4 max=257M)",
        ),
    ).alpn(&["mqtt"]),
    ordered(
        Order::Sticky,
        coded(
            "mysql-packet",
            "mysql",
            "MySQL packets, chains joined, until TLS or compression begins",
            Protocol::Mysql,
        ),
    ),
    ordered(
        Order::Sticky,
        text(
            "nats",
            "",
            "NATS client protocol, with headers",
            r#"when ~"PUB" 09-20 (delimiter="\r\n" delimiter="\n" blanks=" \t" count=last adjust=2 tail="\r\n" max=65M)
           when ~"HPUB" 09-20 (delimiter="\r\n" delimiter="\n" blanks=" \t" count=last adjust=2 tail="\r\n" max=65M)
           when ~"MSG" 09-20 (delimiter="\r\n" delimiter="\n" blanks=" \t" count=last adjust=2 tail="\r\n" max=65M)
           when ~"HMSG" 09-20 (delimiter="\r\n" delimiter="\n" blanks=" \t" count=last adjust=2 tail="\r\n" max=65M)
           when ~"SUB" 09-20 (delimiter="\r\n" delimiter="\n" max=64K)
           when ~"UNSUB" 09-20 (delimiter="\r\n" delimiter="\n" max=64K)
           when ~"CONNECT" 09-20 (delimiter="\r\n" delimiter="\n" max=64K)
           when ~"INFO" 09-20 (delimiter="\r\n" delimiter="\n" max=64K)
           when ~"PING" (delimiter="\r\n" delimiter="\n" max=64K)
           when ~"PONG" (delimiter="\r\n" delimiter="\n" max=64K)
           when ~"+OK" (delimiter="\r\n" delimiter="\n" max=64K)
           when ~"-ERR" (delimiter="\r\n" delimiter="\n" max=64K)
           when 16 03 (giveback)"#,
        ),
    ),
    ordered(
        Order::Sticky,
        text(
            "nbss",
            "smb",
            "SMB on NetBIOS sessions or TCP (RFC 1002, section 4.3; MS-SMB2, 2.1)",
            "when 00 (offset=1 length=3 be adjust=4 max=17M) when 81-85 (offset=1 length=3 be adjust=4)",
        ),
    ).alpn(&["smb"]),
    text(
        "netstring",
        "",
        "Netstrings: decimal length, colon, bytes, comma",
        r#"digits=":" adjust=1 tail="," strip=head trim=1"#,
    ),
    ordered(
        Order::None,
        text(
            "onc-rpc",
            "rpc",
            "ONC RPC records, fragments joined (RFC 5531, section 11)",
            "length=4 be mask=0x7fffffff last=0x80000000 adjust=4",
        ),
    ).alpn(&["sunrpc"]),
    ordered(
        Order::Sticky,
        text(
            "opcua",
            "",
            "OPC UA connection protocol (part 6, 7.1.2.2)",
            "when 41-5a 41-5a 41-5a 41-46 (offset=4 length=4 le min=8)",
        ),
    ),
    ordered(
        Order::Sticky,
        text(
            "openflow",
            "",
            "OpenFlow messages (header of every version)",
            "when 01-06 (offset=2 length=2 be min=8)",
        ),
    ),
    ordered(
        Order::Sticky,
        text("openwire", "", "ActiveMQ OpenWire commands", "length=4 be adjust=4 max=101M"),
    ),
    ordered(
        Order::Sticky,
        coded(
            "postgres-backend",
            "",
            "PostgreSQL, server to client, until encryption begins",
            Protocol::PostgresBackend,
        ),
    ).alpn(&["postgresql"]),
    ordered(
        Order::Sticky,
        coded(
            "postgres-frontend",
            "",
            "PostgreSQL, client to server, until encryption begins",
            Protocol::PostgresFrontend,
        ),
    ).alpn(&["postgresql"]).starttls(StartTls::Postgres),
    ordered(
        Order::Sticky,
        text(
            "rdp",
            "",
            "RDP: TPKT and fast-path units, until TLS begins (MS-RDPBCGR, 2.2.9.1.2)",
            "when 03 00 (offset=2 length=2 be min=7) when 16 03 (giveback)
         when 00/03 80/80 (offset=1 length=2 be mask=0x7fff) when 00/03 (offset=1 length=1)",
        ),
    ),
    coded("resp", "redis", "RESP2 and RESP3, and inline commands (Redis)", Protocol::Resp),
    ordered(
        Order::Sticky,
        text("rtp-over-tcp", "rfc4571", "RTP and RTCP packets over TCP (RFC 4571)", "length=2 be adjust=2"),
    ),
    ordered(
        Order::Sticky,
        text(
            "rtsp",
            "",
            "RTSP messages and interleaved packets (RFC 2326; RFC 7826, sections 5 and 14)",
            r#"when "$" (offset=2 length=2 be adjust=4)
           when 41-7a (delimiter="\r\n\r\n" header="Content-Length")"#,
        ),
    ),
    ordered(Order::Sticky, text("smpp", "", "SMPP PDUs (version 3.4, section 3.2)", "length=4 be min=16")),
    ordered(
        Order::Sticky,
        coded(
            "smtp",
            "lmtp",
            "SMTP and LMTP commands, mails and replies (RFC 5321, RFC 3030), until TLS begins",
            Protocol::Smtp,
        ),
    ).starttls(StartTls::Smtp),
    ordered(
        Order::Sticky,
        text(
            "synphasor",
            "",
            "Synchrophasor frames (IEEE C37.118.2, 6.2)",
            "when aa (offset=2 length=2 be min=14)",
        ),
    ),
    text(
        "syslog",
        "",
        "Syslog, octet counting or lines (RFC 6587, section 3.4)",
        r#"when 31-39 (digits=" " max=64K) when "<" (delimiter="\n" max=64K)"#,
    ),
    text(
        "thrift-framed",
        "thrift",
        "Thrift's framed transport",
        r#"when 80 01 (refuse="Thrift's binary protocol without the framed transport")
           else (length=4 be adjust=4 max=16_384_000)"#,
    ),
    ordered(
        Order::Sticky,
        text(
            "tls-record",
            "tls",
            "TLS records and SSL 2.0's hello (RFC 8446, 5.1; RFC 5246, E.2)",
            "when 14-18 03 00-04 (offset=3 length=2 be adjust=5 max=18_437)
         when 80/80 .. 01 (length=2 be mask=0x7fff adjust=2)",
        ),
    ),
    ordered(
        Order::Sticky,
        text(
            "tpkt",
            "",
            "TPKT, under COTP, S7 and H.225, until TLS begins (RFC 1006, section 6)",
            "when 03 (offset=2 length=2 be min=7) when 16 03 (giveback)",
        ),
    ),
    ordered(
        Order::Sticky,
        text(
            "websocket",
            "",
            "WebSocket frames and the handshake before them (RFC 6455, 4 and 5.2)",
            r#"start (
             when "GET " (delimiter="\r\n\r\n" max=64K)
             when "HTTP/1.1 101" (delimiter="\r\n\r\n" max=64K)
             when "HTTP/" (refuse="the server did not switch to WebSocket")
             else (
               when 20/20 (refuse="a reserved bit of a WebSocket frame") when 10/10 (refuse="a reserved bit of a WebSocket frame")
               when 04/04 (refuse="a reserved opcode of WebSocket") when 03/07 (refuse="a reserved opcode of WebSocket")
               when .. fe/ff (offset=2 length=2 be adjust=8) when .. 7e/ff (offset=2 length=2 be adjust=4)
               when .. ff/ff (offset=2 length=8 be adjust=14) when .. 7f/ff (offset=2 length=8 be adjust=10)
               when .. 80/80 (offset=1 length=1 mask=0x7f adjust=6)
               else (offset=1 length=1 adjust=2)))
           when 20/20 (refuse="a reserved bit of a WebSocket frame") when 10/10 (refuse="a reserved bit of a WebSocket frame")
           when 04/04 (refuse="a reserved opcode of WebSocket") when 03/07 (refuse="a reserved opcode of WebSocket")
           when .. fe/ff (offset=2 length=2 be adjust=8) when .. 7e/ff (offset=2 length=2 be adjust=4)
           when .. ff/ff (offset=2 length=8 be adjust=14) when .. 7f/ff (offset=2 length=8 be adjust=10)
           when .. 80/80 (offset=1 length=1 mask=0x7f adjust=6)
           else (offset=1 length=1 adjust=2)"#,
        ),
    ).alpn(&["http/1.1"]),
];
