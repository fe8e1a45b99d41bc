//! `towpath frame` over hand-made captures.

use std::net::Ipv6Addr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const RAW_IP: u32 = 101;
const USB_LINUX: u32 = 189;

/// A capture of segments with these payloads from 192.0.2.1:4242 to 192.0.2.2:80, starting with a SYN.
fn capture(dir: &Path, link: u32, payloads: &[&[u8]]) -> PathBuf {
    let mut file = Vec::new();
    file.extend(0xa1b2_c3d4_u32.to_le_bytes());
    file.extend([2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0]);
    file.extend(link.to_le_bytes());
    let mut seq = 100u32;
    for (at, payload) in payloads.iter().enumerate() {
        let length = 40 + payload.len() as u32;
        let mut packet = vec![0x45, 0, 0, 0, 0, 0, 0, 0, 64, 6, 0, 0, 192, 0, 2, 1, 192, 0, 2, 2];
        packet[2..4].copy_from_slice(&(length as u16).to_be_bytes());
        packet.extend([0x10, 0x92, 0, 80]);
        packet.extend(seq.to_be_bytes());
        packet.extend([0, 0, 0, 0, 0x50, if at == 0 { 0x02 } else { 0x10 }, 0xff, 0xff, 0, 0, 0, 0]);
        packet.extend(*payload);
        file.extend([0; 8]);
        file.extend(length.to_le_bytes());
        file.extend(length.to_le_bytes());
        file.extend(packet);
        seq += payload.len() as u32 + u32::from(at == 0);
    }
    let path = dir.join("capture.pcap");
    std::fs::write(&path, file).expect("a file");
    path
}

fn frame(capture: &Path, options: &[&str]) -> Output {
    let towpath = env!("CARGO_BIN_EXE_towpath");
    Command::new(towpath).arg("frame").arg(capture).args(options).output().expect("towpath starts")
}

/// Exit code, standard output, standard error.
fn told(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn messages_as_json_lines() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = capture(dir.path(), RAW_IP, &[b"", b"\0\0\0\x02a", b"b\0\0\0\x01c\xff\xff\xff\xff"]);
    let (code, out, err) = told(&frame(&path, &["--framing", "thrift-framed", "--json"]));
    let line = |offset, length| {
        format!(
            "{{\"stream\":0,\"src\":\"192.0.2.1:4242\",\"dst\":\"192.0.2.2:80\",\"offset\":{offset},\"length\":{length}}}\n"
        )
    };
    assert_eq!(out, line(0, 6) + &line(6, 5));
    assert_eq!(code, Some(0));
    assert!(err.contains("at byte 11: EMSGSIZE") && err.contains("(ff ff ff ff)"), "{err}");
}

/// As tshark writes it: the port follows the last colon.
#[test]
fn an_ipv6_end_has_no_brackets_in_json() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut packet = vec![0x60, 0, 0, 0, 0, 23, 6, 64];
    packet.extend("2001:db8::1".parse::<Ipv6Addr>().expect("an address").octets());
    packet.extend(Ipv6Addr::LOCALHOST.octets());
    packet.extend([0x10, 0x92, 0, 53, 0, 0, 0, 1, 0, 0, 0, 0, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0, 0, 1, 7]);
    let mut file = Vec::new();
    file.extend(0xa1b2_c3d4_u32.to_le_bytes());
    file.extend([2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0]);
    file.extend(RAW_IP.to_le_bytes());
    file.extend([0; 8]);
    file.extend([packet.len() as u32; 2].map(u32::to_le_bytes).concat());
    file.extend(packet);
    let path = dir.path().join("six.pcap");
    std::fs::write(&path, file).expect("a file");
    let (code, out, err) = told(&frame(&path, &["--framing", "dns-tcp", "--json"]));
    assert_eq!(
        out, "{\"stream\":0,\"src\":\"2001:db8::1:4242\",\"dst\":\"::1:53\",\"offset\":0,\"length\":3}\n",
        "{err}"
    );
    assert_eq!(code, Some(0));
}

#[test]
fn three_forms_of_a_framing_are_equivalent() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = capture(dir.path(), RAW_IP, &[b"", b"\x01\x02\0\x06ab\x01\x02\0", b"\x04"]);
    let document = dir.path().join("framing.toml");
    std::fs::write(&document, "offset = 2\nlength = 2\n").expect("a file");
    let objects = Path::new(env!("CARGO_MANIFEST_DIR")).join("../towpath-bpf/tests/programs/direct.o");
    let program = format!("{}:length16", objects.display());
    let line = "offset=2 length=2";
    let netty = "lengthFieldLength=2 lengthAdjustment=-4 lengthFieldOffset=2";
    let tokio = "num_skip=0 length_field_length=2 length_field_offset=2";
    let expected = told(&frame(&path, &["--framing", line]));
    assert!(expected.1.contains("2 messages, 10 bytes; 0 directions stopped"), "{}", expected.1);
    for framing in [document.to_str().expect("a name"), &program, netty, tokio] {
        assert_eq!(told(&frame(&path, &["--framing", framing])), expected, "{framing}");
    }
}

#[test]
fn errors_are_reported() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = capture(dir.path(), RAW_IP, &[b"", b"x"]);
    let rows: &[(&str, &str)] = &[
        ("nothing/such.toml", "no such file, and not a framing"),
        ("kafak", "did you mean \"kafka\"?"),
        ("offset=0 lenght=4", "column 10: unknown key \"lenght\"; did you mean \"length\"?"),
        ("", "no key gives the end of a message"),
    ];
    for (framing, expected) in rows {
        let (code, out, err) = told(&frame(&path, &["--framing", framing]));
        assert_eq!((code, out.as_str()), (Some(64), ""), "{framing}");
        assert!(err.contains(expected), "{framing}: {err}");
    }
    let (code, _, err) = told(&frame(&path, &["--framing", "line", "--reply", "lien"]));
    assert_eq!(code, Some(64), "{err}");
    assert!(err.contains("--reply lien:") && err.contains("did you mean \"line\"?"), "{err}");
    let (code, _, err) = told(&frame(Path::new("/nothing/such.pcap"), &["--framing", "line"]));
    assert_eq!(code, Some(2), "{err}");
}

#[test]
fn packets_without_a_stream_are_counted() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = capture(dir.path(), USB_LINUX, &[b"", b"x\n"]);
    let (code, out, err) = told(&frame(&path, &["--framing", "line"]));
    assert_eq!((code, out.lines().count()), (Some(0), 1));
    assert!(
        err.contains("2 packets begin with a link header that is not supported, USB_LINUX (189): left out"),
        "{err}"
    );
}
