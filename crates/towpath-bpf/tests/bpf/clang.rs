//! Loops as clang -O2 compiles them.

use std::io::Write;
use std::process::{Command, Stdio};

use towpath_bpf::{Context, LoadOptions, Program, RunError};

const COMMON: &str = r#"
struct __sk_buff { unsigned len, pkt_type, mark, queue_mapping, protocol, vlan_present, vlan_tci, vlan_proto, priority,
    ingress_ifindex, ifindex, tc_index, cb[5], hash, tc_classid, data, data_end; };
#define PROGRAM __attribute__((section("sk_skb/stream_parser"), used)) int program(struct __sk_buff *skb)
#define START unsigned char *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
"#;

/// Compiles a program for each instruction set of clang 14.
fn compile(source: &str) -> Vec<Program> {
    let compile = |cpu| {
        let mut clang = Command::new("clang-14")
            .args(["-O2", "-target", "bpf", &format!("-mcpu={cpu}"), "-c", "-x", "c", "-", "-o", "-"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("clang-14 starts");
        let mut stdin = clang.stdin.take().expect("a pipe");
        stdin.write_all(format!("{COMMON}{source}").as_bytes()).expect("clang reads");
        drop(stdin);
        let output = clang.wait_with_output().expect("its end");
        assert!(output.status.success(), "clang-14 refuses {source}");
        let program = Program::load(&output.stdout, &LoadOptions::default());
        program.unwrap_or_else(|error| panic!("-mcpu={cpu}: {error}\n{source}"))
    };
    ["v1", "v2", "v3"].map(compile).into()
}

fn run(program: &Program, message: &[u8]) -> Result<i32, RunError> {
    program.run(message, &mut Context::new(), &mut 1_000_000)
}

/// Runs each program on each message, and on every start of it, which must need more or have the same end.
fn frames(source: &str, rows: &[(&[u8], i32)]) {
    for program in compile(source) {
        for (message, expected) in rows {
            assert_eq!(run(&program, message), Ok(*expected), "{} of {source}", message.escape_ascii());
            for end in 0..message.len() {
                let result = run(&program, &message[..end]);
                assert!(result == Ok(0) || result == Ok(*expected), "{result:?} for {end} bytes of {source}");
            }
        }
    }
}

#[towpath_testenv::needs("clang-14")]
#[test]
fn a_scan_for_a_zero() {
    let rows: &[(&[u8], i32)] = &[(b"abc\0de", 4), (b"\0", 1), (b"abc", 0), (&[7; 4000], 0)];
    for source in [
        "PROGRAM { START unsigned char *p = data; while (p < end && *p) p++; return p < end ? p - data + 1 : 0; }",
        "PROGRAM { START for (int i = 0; data + i < end; i++) if (!data[i]) return i + 1; return 0; }",
        "PROGRAM { START unsigned n = end - data; for (unsigned i = 0; i < n; i++) if (!data[i]) return i + 1; return 0; }",
        "PROGRAM { START for (unsigned i = 0; i < skb->len; i++) if (!data[i]) return i + 1; return 0; }",
    ] {
        frames(source, rows);
    }
}

#[towpath_testenv::needs("clang-14")]
#[test]
fn a_search_for_cr_lf() {
    let rows: &[(&[u8], i32)] = &[(b"a\rb\r\nc", 5), (b"\r\n", 2), (b"\r", 0), (&[b'\r'; 3000], 0)];
    for source in [
        "PROGRAM { START for (unsigned char *p = data; p + 1 < end; p++) if (p[0] == '\\r' && p[1] == '\\n') return p - data + 2; return 0; }",
        "PROGRAM { START for (long i = 0; data + i + 2 <= end; i++) if (data[i] == '\\r' && data[i + 1] == '\\n') return i + 2; return 0; }",
    ] {
        frames(source, rows);
    }
}

#[towpath_testenv::needs("clang-14")]
#[test]
fn a_decimal_length() {
    let source = "PROGRAM { START unsigned n = 0; unsigned char *p = data;
        for (; p < end && *p >= '0' && *p <= '9'; p++) { if (n > 100000) return -74; n = n * 10 + (*p - '0'); }
        if (p >= end) return 0;
        if (p == data || *p != ' ') return -74;
        return p - data + 1 + n; }";
    frames(source, &[(b"12 hello", 15), (b"0 ", 2), (b"1234", 0), (b"x", -74), (b"99999999 ", -74)]);
}

#[towpath_testenv::needs("clang-14")]
#[test]
fn a_content_length_among_lines() {
    let source = r#"
        static inline __attribute__((always_inline)) int is(unsigned char c, char lower) { return (c | 0x20) == lower; }
        PROGRAM { START unsigned length = 0, line = 0;
        while (data + line < end) {
            unsigned p = line;
            while (data + p < end && data[p] != '\n') p++;
            if (data + p >= end) return 0;
            if (p - line <= 1) return p + 1 + length;
            unsigned char *at = data + line;
            if (at + 16 <= end && is(at[0], 'c') && is(at[1], 'o') && is(at[8], 'l') && at[14] == ':') {
                unsigned q = line + 15;
                while (q < p && data[q] == ' ') q++;
                length = 0;
                while (q < p && data[q] >= '0' && data[q] <= '9') {
                    if (length > 1000000) return -74;
                    length = length * 10 + (data[q] - '0');
                    q++;
                }
            }
            line = p + 1;
        }
        return 0; }"#;
    let message = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 120\r\nX: y\r\n\r\n";
    let end = message.len() as i32;
    frames(
        source,
        &[(message, end + 120), (b"GET / HTTP/1.1\r\n\r\n", 18), (b"content-length: 99999999\r\n\r\n", -74)],
    );
}

#[towpath_testenv::needs("clang-14")]
#[test]
fn a_comparison_of_two_ranges() {
    for source in [
        "PROGRAM { START if (data + 2 > end) return 0; unsigned n = data[0] & 15; if (data + 1 + 2 * n + 1 > end) return 0;
         for (unsigned i = 0; i < n; i++) if (data[1 + i] != data[1 + n + i]) return -74; return 2 + 2 * n; }",
        "static __attribute__((noinline)) int same(unsigned char *a, unsigned char *b, unsigned n, unsigned char *end) {
             while (n--) { if (a >= end || b >= end) return 0; if (*a++ != *b++) return 0; } return 1; }
         PROGRAM { START if (data + 2 > end) return 0; unsigned n = data[0] & 15; if (data + 1 + 2 * n + 1 > end) return 0;
         return same(data + 1, data + 1 + n, n, end) ? 2 + 2 * n : -74; }",
    ] {
        frames(source, &[(b"\x03abcabc.", 8), (b"\x03abcabd.", -74), (b"\x00..", 2), (b"\x0fab", 0)]);
    }
}

/// Loops that do not end, or leave the message, end the run with an error.
#[towpath_testenv::needs("clang-14")]
#[test]
fn hostile_loops_are_stopped() {
    for program in compile("PROGRAM { volatile int i = 1; while (i) { i |= 1; } return 1; }") {
        assert!(matches!(run(&program, b"abc"), Err(RunError::OutOfFuel { .. })));
    }
    // The pointer grows beyond the end that was compared once.
    let source = "PROGRAM { START if (data + 1 > end) return 0;
        unsigned char *p = data; int n = 0; while (*p != 255) { p += *p | 1; n++; } return n; }";
    for program in compile(source) {
        assert_eq!(run(&program, b"\x01\x01\xff"), Ok(2));
        assert!(matches!(run(&program, b"\x01\x02\x03\x01"), Err(RunError::OutsideMessage { .. })));
        assert!(program.stats().variable_loads > 0 && program.stats().back_edges > 0);
    }
}
