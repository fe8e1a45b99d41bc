//! The examples, with real clients: bash, dig, and Thrift's Python library.
#![cfg(feature = "io")]

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};

/// An example process and its address. The examples are built with this test.
struct Example {
    child: Child,
    address: String,
}

impl Example {
    fn start(name: &str) -> Self {
        let test = std::env::current_exe().expect("a path");
        let target = test.parent().and_then(|deps| deps.parent()).expect("target/PROFILE/deps");
        let program = target.join("examples").join(name);
        assert!(program.exists(), "{} is built by `cargo build --examples --features io`", program.display());
        let mut child = Command::new(program)
            .arg("127.0.0.1:0")
            .stdout(Stdio::piped())
            .spawn()
            .expect("the example starts");
        let mut line = String::new();
        BufReader::new(child.stdout.take().expect("a pipe")).read_line(&mut line).expect("a line");
        let address =
            line.strip_prefix("listening on ").unwrap_or_else(|| panic!("{line}")).trim().to_owned();
        Self { child, address }
    }

    fn port(&self) -> &str {
        self.address.rsplit(':').next().expect("a port")
    }

    /// Runs a bash script with the port and returns its output.
    fn bash(&self, script: &str) -> String {
        let output = Command::new("bash").args(["-c", script, "bash", self.port()]).output();
        let output = output.expect("bash starts");
        assert!(output.status.success());
        String::from_utf8(output.stdout).expect("text")
    }
}

impl Drop for Example {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[towpath_testenv::needs("bash")]
#[test]
fn bash_receives_its_echo() {
    let server = Example::start("echo");
    // Two lines in one write, answered in any order, and one line in two writes.
    let script = "exec 3<>/dev/tcp/127.0.0.1/$1; printf 'hello\nworld\nwho is' >&3; head -2 <&3 | sort; echo ' there' >&3; head -1 <&3";
    assert_eq!(server.bash(script), "hello\nworld\nwho is there\n");
}

/// Lines in capitals, one of them longer than the read buffer.
#[towpath_testenv::needs("bash")]
#[test]
fn bash_is_answered_by_sockets() {
    let server = Example::start("socket");
    let script = "exec 3<>/dev/tcp/127.0.0.1/$1; echo hello >&3; head -1 <&3; printf '%2000sx\n' >&3; head -1 <&3 | wc -c";
    assert_eq!(server.bash(script), "HELLO\n2002\n");
}

#[towpath_testenv::needs("dig")]
#[test]
fn dig_is_answered_over_tcp() {
    let server = Example::start("dns");
    let rows = [
        (&["example.org", "A", "+short"][..], "192.0.2.1\n"),
        // Several questions on one connection.
        (&["one.example", "+keepopen", "two.example", "+keepopen", "+short"], "192.0.2.1\n192.0.2.1\n"),
        (&["example.org", "AAAA", "+short"], ""),
    ];
    for (args, expected) in rows {
        let output = Command::new("dig")
            .args(["+tcp", "+time=30", "@127.0.0.1", "-p", server.port()])
            .args(args)
            .output();
        let output = output.expect("dig starts");
        assert_eq!(String::from_utf8_lossy(&output.stdout), expected, "{args:?}");
        assert!(output.status.success(), "{args:?}");
    }
}

/// Hand-written equivalent of the Thrift compiler's output for the calculator.
const CALCULATOR: &str = r"
import sys
from thrift.Thrift import TMessageType, TType, TApplicationException
from thrift.protocol.TBinaryProtocol import TBinaryProtocol
from thrift.transport.TSocket import TSocket
from thrift.transport.TTransport import TFramedTransport

transport = TFramedTransport(TSocket('127.0.0.1', int(sys.argv[1])))
protocol = TBinaryProtocol(transport)
transport.open()

def call(name, a, b, number):
    protocol.writeMessageBegin(name, TMessageType.CALL, number)
    for field, value in ((1, a), (2, b)):
        protocol.writeFieldBegin('', TType.I32, field)
        protocol.writeI32(value)
    protocol.writeFieldStop()
    protocol.writeMessageEnd()
    transport.flush()
    got, kind, seen = protocol.readMessageBegin()
    assert (got, seen) == (name, number), (got, seen)
    if kind == TMessageType.EXCEPTION:
        error = TApplicationException()
        error.read(protocol)
        return 'error %d' % error.type
    _, kind, field = protocol.readFieldBegin()
    assert (kind, field) == (TType.I32, 0)
    value = protocol.readI32()
    assert protocol.readFieldBegin()[1] == TType.STOP
    return value

print(call('add', 2, 40, 1), call('subtract', 2, 40, 2), call('multiply', 6, 7, 3), call('divide', 1, 0, 4))
assert all(call('add', n, n, n) == 2 * n for n in range(5, 500))
";

#[towpath_testenv::needs(thrift)]
#[test]
fn thrifts_python_client_calculates() {
    // /usr/bin/python3 has the distribution's packages.
    let server = Example::start("calculator");
    let mut client = Command::new("/usr/bin/python3")
        .args(["-", server.port()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("Python starts");
    client.stdin.take().expect("a pipe").write_all(CALCULATOR.as_bytes()).expect("it reads");
    let output = client.wait_with_output().expect("its end");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "42 -38 42 error 1\n");
    assert!(output.status.success());
}
