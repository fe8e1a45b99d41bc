//! `nfq_snprintf_xml`: a packet's attributes as XML.

use std::ffi::c_int;
use std::fmt::Write;

use crate::data::{Attributes, nfqa};
use crate::memory::Text;

/// NFQ_XML_* of libnetfilter_queue.h.
const HW: c_int = 1;
const MARK: c_int = 1 << 1;
const DEV: c_int = 1 << 2;
const PHYSDEV: c_int = 1 << 3;
const PAYLOAD: c_int = 1 << 4;
const TIME: c_int = 1 << 5;
const UID: c_int = 1 << 6;
const GID: c_int = 1 << 7;

/// Largest hardware address of `struct nfqnl_msg_packet_hw`.
const ADDRESS: usize = 8;

/// Prints a packet's attributes as XML. Returns the length of the text, also if the buffer is shorter; -1 for NULL.
///
/// The time is the current local time, as in version 1.0.5. NFQ_XML_SECCTX prints nothing there, and nothing here.
#[unsafe(no_mangle)]
pub extern "C" fn nfq_snprintf_xml(
    mut buf: Text,
    len: usize,
    tb: Option<&Attributes<'_>>,
    flags: c_int,
) -> c_int {
    let Some(attributes) = tb else { return -1 };
    let text = xml(attributes, flags, (flags & TIME != 0).then(local_time));
    buf.print(len, &text);
    c_int::try_from(text.len()).unwrap_or(c_int::MAX)
}

/// The local time now.
fn local_time() -> libc::tm {
    // SAFETY: with a null pointer, time(2) writes nothing.
    let now = unsafe { libc::time(std::ptr::null_mut()) };
    calendar(now)
}

/// The local time of a number of seconds since the epoch.
fn calendar(time: libc::time_t) -> libc::tm {
    // SAFETY: a struct of integers and a pointer that may be null.
    let mut calendar: libc::tm = unsafe { std::mem::zeroed() };
    // SAFETY: both pointers are valid.
    unsafe { libc::localtime_r(&raw const time, &raw mut calendar) };
    calendar
}

fn number(attributes: &Attributes<'_>, kind: u16) -> Option<u32> {
    attributes.get(kind)?.first_chunk().map(|bytes| u32::from_be_bytes(*bytes))
}

fn hex(text: &mut String, bytes: &[u8]) {
    for byte in bytes {
        // Writing to a String does not fail.
        let _ = write!(text, "{byte:02x}");
    }
}

fn xml(attributes: &Attributes<'_>, flags: c_int, time: Option<libc::tm>) -> String {
    let mut text = "<pkt>".to_owned();
    if let Some(time) = time {
        text += &format!(
            "<when><hour>{}</hour><min>{:02}</min><sec>{:02}</sec><wday>{}</wday><day>{}</day><month>{}</month><year>{}</year></when>",
            time.tm_hour,
            time.tm_min,
            time.tm_sec,
            time.tm_wday + 1,
            time.tm_mday,
            time.tm_mon + 1,
            time.tm_year + 1900,
        );
    }
    if let Some(&[a, b, c, d, e, f, hook]) = attributes.get(nfqa::PACKET_HDR).and_then(<[u8]>::first_chunk) {
        let id = u32::from_be_bytes([a, b, c, d]);
        text += &format!("<hook>{hook}</hook><id>{id}</id>");
        if flags & HW != 0 {
            text += &format!("<hw><proto>{:04x}</proto>", u16::from_be_bytes([e, f]));
            if let Some(&[high, low, _, _, ref address @ ..]) =
                attributes.get(nfqa::HWADDR).and_then(<[u8]>::first_chunk::<{ 4 + ADDRESS }>)
            {
                let len = usize::from(u16::from_be_bytes([high, low])).min(ADDRESS);
                text += "<src>";
                hex(&mut text, &address[..len]);
                text += "</src>";
            }
            text += "</hw>";
        }
    }
    // A mark or an interface of 0 is not printed; a user or group of 0 is.
    for (flag, kind, name, zero) in [
        (MARK, nfqa::MARK, "mark", false),
        (DEV, nfqa::IFINDEX_INDEV, "indev", false),
        (DEV, nfqa::IFINDEX_OUTDEV, "outdev", false),
        (PHYSDEV, nfqa::IFINDEX_PHYSINDEV, "physindev", false),
        (PHYSDEV, nfqa::IFINDEX_PHYSOUTDEV, "physoutdev", false),
        (UID, nfqa::UID, "uid", true),
        (GID, nfqa::GID, "gid", true),
    ] {
        let value = (flags & flag != 0).then(|| number(attributes, kind)).flatten();
        if let Some(value) = value.filter(|&value| zero || value != 0) {
            text += &format!("<{name}>{value}</{name}>");
        }
    }
    if let Some(payload) = (flags & PAYLOAD != 0).then(|| attributes.get(nfqa::PAYLOAD)).flatten() {
        text += "<payload>";
        hex(&mut text, payload);
        text += "</payload>";
    }
    text + "</pkt>"
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    /// A generator of numbers below `n` (xorshift64*).
    fn below(state: &mut u64, n: u32) -> u32 {
        *state ^= *state >> 12;
        *state ^= *state << 25;
        *state ^= *state >> 27;
        ((state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % u64::from(n)) as u32
    }

    /// The attributes of a packet: some of them, with random values.
    fn packet(state: &mut u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        for (kind, len) in
            [(1, 7), (3, 4), (5, 4), (6, 4), (7, 4), (8, 4), (9, 12), (10, 0), (16, 4), (17, 4), (18, 9)]
        {
            let len = if kind == nfqa::PAYLOAD { below(state, 3000) } else { len };
            if below(state, 4) == 0 {
                continue;
            }
            let zero = below(state, 4) == 0;
            let mut value: Vec<u8> =
                (0..len).map(|_| if zero { 0 } else { below(state, 256) as u8 }).collect();
            if kind == nfqa::HWADDR {
                // Version 1.0.5 reads behind the address of a larger length.
                value[..2].copy_from_slice(&(below(state, 9) as u16).to_be_bytes());
            }
            bytes.extend_from_slice(&(len as u16 + 4).to_ne_bytes());
            bytes.extend_from_slice(&kind.to_ne_bytes());
            bytes.extend_from_slice(&value);
            bytes.resize(bytes.len().next_multiple_of(4), 0);
        }
        bytes
    }

    /// Prints packets with Debian's library (tests/xml.c), which reads them from a queue of the kernel.
    fn debian(records: &[u8]) -> Vec<u8> {
        let directory = tempfile::tempdir().expect("a directory");
        let program = directory.path().join("xml");
        let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/xml.c");
        let output = Command::new("cc")
            .arg("-o")
            .arg(&program)
            .args([source, "-lnetfilter_queue"])
            .output()
            .expect("cc starts");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let input = directory.path().join("input");
        std::fs::write(&input, records).expect("a file");
        let output = Command::new("unshare")
            .arg("-n")
            .arg(program)
            .stdin(std::fs::File::open(input).expect("a file"))
            .stderr(Stdio::inherit())
            .output()
            .expect("unshare starts");
        assert!(output.status.success(), "{}", output.status);
        output.stdout
    }

    #[towpath_testenv::needs(nfqueue, netns, netfilter_queue, "cc")]
    #[test]
    fn debians_library_prints_the_same() {
        let mut state = 7;
        let cases: Vec<(c_int, u32, Vec<u8>)> = (0..2000)
            .map(|_| {
                let flags = if below(&mut state, 2) == 0 { -1 } else { below(&mut state, 1 << 12) as c_int };
                let size = if below(&mut state, 2) == 0 { 1 << 14 } else { below(&mut state, 400) };
                (flags, size, packet(&mut state))
            })
            .collect();
        let mut records = Vec::new();
        for (flags, size, attributes) in &cases {
            // Length, NFNL_SUBSYS_QUEUE and NFQNL_MSG_PACKET, then zeros: the queue is 0.
            let len = attributes.len() as u32 + 20;
            for field in [*flags as u32, *size, len, len, 0x300, 0, 0, 0] {
                records.extend_from_slice(&field.to_ne_bytes());
            }
            records.extend_from_slice(attributes);
        }
        // SAFETY: a null pointer, as in `local_time`.
        let now = || unsafe { libc::time(std::ptr::null_mut()) };
        let start = now();
        let printed = debian(&records);
        let times = start..=now();
        let mut rest = &*printed;
        for (flags, size, attributes) in &cases {
            let (head, after) = rest.split_first_chunk::<8>().expect("a record");
            let result = c_int::from_ne_bytes(*head.first_chunk().expect("4 bytes"));
            let len = u32::from_ne_bytes(*head.last_chunk().expect("4 bytes")) as usize;
            let (theirs, after) = after.split_at(len);
            rest = after;
            let ours = |time| {
                let time = (flags & TIME != 0).then(|| calendar(time));
                let whole = xml(&Attributes::parse(attributes), *flags, time);
                let mut text = vec![b'#' as std::ffi::c_char; *size as usize + 1];
                // SAFETY: a pointer to the buffer, whose size is `size` or more.
                let mut buffer: Text = unsafe { std::mem::transmute(text.as_mut_ptr()) };
                buffer.print(*size as usize, &whole);
                let end = text.iter().position(|&byte| byte == 0).unwrap_or(0);
                (whole.len() as c_int, text[..end].iter().map(|&byte| byte as u8).collect::<Vec<_>>())
            };
            assert!(
                times.clone().any(|time| ours(time) == (result, theirs.to_vec())),
                "{flags:x} {size}: {result} {}\nhere: {} {}",
                String::from_utf8_lossy(theirs),
                ours(start).0,
                String::from_utf8_lossy(&ours(start).1)
            );
        }
        assert!(rest.is_empty());
    }

    #[test]
    fn truncated_attributes_are_not_printed() {
        let print = |attributes: &[u8]| xml(&Attributes::parse(attributes), -1, None);
        // A packet header of 6 bytes, a mark of 2 bytes.
        assert_eq!(print(&[10, 0, 1, 0, 0, 0, 0, 1, 8, 0, 0, 0, 6, 0, 3, 0, 0, 1, 0, 0]), "<pkt></pkt>");
        // An address of 65,535 bytes.
        let header = [11, 0, 1, 0, 0, 0, 0, 1, 8, 0, 3, 0];
        let address = [16, 0, 9, 0, 0xff, 0xff, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];
        assert_eq!(
            print(&[&header[..], &address].concat()),
            "<pkt><hook>3</hook><id>1</id><hw><proto>0800</proto><src>0102030405060708</src></hw></pkt>"
        );
    }
}
