//! `towpath run` with muxes: rules admit connections, and a connection ends when the rules no longer admit it.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::ops::Deref;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::example::example;
use crate::openssl;
use crate::support::{Control, Log, until};

const RULES: &str = "\
table blocked create type addr
add 50 deny tcp from table(blocked) to any via web
add 100 allow tcp from any to any setup in via web limit src-addr 2
add 200 reset log tcp from any to any setup recv shut
";

struct Engine {
    control: Control,
    child: Child,
    log: Log,
}

impl Deref for Engine {
    type Target = Control;

    fn deref(&self) -> &Control {
        &self.control
    }
}

impl Engine {
    /// Starts an engine with the muxes `web` and `shut`. Returns their addresses.
    fn start(directory: &Path) -> (Self, [String; 2]) {
        Self::with(directory, "")
    }

    /// Starts an engine with `more` keys for each of these muxes.
    fn with(directory: &Path, more: &str) -> (Self, [String; 2]) {
        let bin = Path::new(env!("CARGO_BIN_EXE_towpath"));
        let worker = example("mux_worker");
        let mux = |name| {
            format!(
                "[mux.{name}]\nlisten = \"127.0.0.1:0\"\nframing = \"offset=0 length=4 be adjust=4\"\n\
                 worker = \"{}\"\nworkers = 2\n{more}",
                worker
            )
        };
        let text = format!("rules = \"r\"\n{}{}[control]\nsocket = \"ctl.sock\"\n", mux("web"), mux("shut"));
        std::fs::write(directory.join("t.toml"), text).unwrap();
        std::fs::write(directory.join("r"), RULES).unwrap();
        let mut child = Command::new(bin)
            .args(["run", directory.join("t.toml").to_str().unwrap()])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let log = Log::of(&mut child);
        let engine = Self { control: Control::of(directory), child, log };
        let listens = |name: &str| {
            let line = engine.log.line(&format!("mux {name}: listens on "));
            line.rsplit(' ').next().unwrap().trim().to_owned()
        };
        let addresses = [listens("web"), listens("shut")];
        until(|| engine.ctl("show mux").status.success());
        (engine, addresses)
    }

    fn states(&self) -> usize {
        let states = self.json("show states --json");
        let states = states["states"].as_array().unwrap();
        states.iter().filter(|state| !state["text"].as_str().unwrap_or_default().contains("PARENT")).count()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An answer of the worker, or how the connection ended.
fn ask(stream: &mut TcpStream, body: &[u8]) -> Result<Vec<u8>, ErrorKind> {
    let mut exchange = || {
        stream.write_all(&[&(body.len() as u32).to_be_bytes()[..], body].concat())?;
        let mut length = [0; 4];
        stream.read_exact(&mut length)?;
        let mut answer = vec![0; u32::from_be_bytes(length) as usize];
        stream.read_exact(&mut answer)?;
        std::io::Result::Ok(answer)
    };
    exchange().map_err(|error| error.kind())
}

fn connect(address: &str) -> TcpStream {
    let stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
    stream
}

#[test]
fn rules_decide_which_connections_are_served() {
    let directory = tempfile::tempdir().unwrap();
    let (mut engine, [web, shut]) = Engine::start(directory.path());
    let answered =
        |stream: &mut TcpStream| ask(stream, b"hello").is_ok_and(|answer| answer.ends_with(b" hello"));

    // Two connections of one address; a further one only after one of them has ended.
    let (mut first, mut second) = (connect(&web), connect(&web));
    assert!(answered(&mut first) && answered(&mut second));
    assert!(ask(&mut connect(&web), b"hello").is_err(), "a third was served");
    assert_eq!(engine.states(), 2, "{}", engine.json("show states --json"));
    drop(first);
    until(|| engine.states() == 1);
    let mut third = connect(&web);
    assert!(answered(&mut third) && answered(&mut second));

    // A connection to `shut` is reset, and this is logged.
    let mut stream = connect(&shut);
    engine.log.line("200 Reset");
    assert_eq!(ask(&mut stream, b"hello"), Err(ErrorKind::ConnectionReset));

    let mux = engine.json("show mux --json");
    assert_eq!(
        (&mux["mux"]["name"], &mux["mux"]["others"][0]["name"]),
        (&"shut".into(), &"web".into()),
        "{mux}"
    );
    assert_eq!(mux["mux"]["workers"].as_array().map(Vec::len), Some(2), "{mux}");
    assert_eq!(engine.json("show rings --json")["rings"].as_array().map(Vec::len), Some(4));

    // A table blocks new connections. Established ones stay, as with any state.
    assert!(engine.ctl("table blocked add 127.0.0.0/8").status.success());
    assert!(ask(&mut connect(&web), b"hello").is_err(), "a blocked peer was served");
    assert!(answered(&mut second));

    // Without their rule the connections end.
    assert!(engine.ctl("delete 100").status.success());
    engine.log.line("the rules no longer admit this peer");
    for stream in [&mut second, &mut third] {
        let mut end = [0];
        assert!(stream.read(&mut end).map_or(true, |read| read == 0), "it goes on without its rule");
    }
    until(|| engine.states() == 0);

    kill_process(Pid::from_child(&engine.child), Signal::TERM).unwrap();
    engine.log.line("mux shut: ");
    assert!(engine.child.wait().unwrap().success());
}

#[towpath_testenv::needs("openssl")]
#[test]
fn a_mux_speaks_tls() {
    let directory = tempfile::tempdir().unwrap();
    openssl::certificate(directory.path(), "web", "/CN=localhost", &[]);
    // Names of files are relative to the configuration's directory.
    let (engine, [web, _]) =
        Engine::with(directory.path(), "tls-cert = \"web.pem\"\ntls-key = \"web.key\"\n");
    let verify = ["-verify_return_error", "-CAfile", "web.pem"];
    let mut client = openssl::client(&web, directory.path(), &verify);
    client.stdin.as_mut().unwrap().write_all(b"\0\0\0\x05hello").unwrap();
    let (mut length, output) = ([0; 4], client.stdout.as_mut().unwrap());
    output.read_exact(&mut length).unwrap();
    let mut answer = vec![0; u32::from_be_bytes(length) as usize];
    output.read_exact(&mut answer).unwrap();
    assert!(answer.ends_with(b" hello"), "{answer:?}");
    // The rules decide before the TLS handshake, with and without TLS.
    assert_eq!(engine.states(), 1);
    drop(client);
    until(|| engine.states() == 0);
    connect(&web).write_all(b"hello, this is no handshake").unwrap();
    assert!(engine.log.line("was not attached").contains("TLS: "));
}

/// A reload reads the certificates again. Files that are not usable do not prevent it, and change nothing.
#[towpath_testenv::needs("openssl")]
#[test]
fn a_reload_reads_certificates_again() {
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let make = |name: &str| openssl::certificate(directory.path(), "web", &format!("/CN={name}"), &[]);
    make("one");
    std::fs::copy(file("web.pem"), file("ca.pem")).unwrap();
    let keys = "tls-cert = \"web.pem\"\ntls-key = \"web.key\"\ntls-client-ca = \"ca.pem\"\n\
                tls-client-optional = true\n";
    let (engine, [web, _]) = Engine::with(directory.path(), keys);
    let subject = || {
        let output =
            Command::new("openssl").args(["s_client", "-connect", &web]).stdin(Stdio::null()).output();
        let said = String::from_utf8(output.unwrap().stdout).unwrap();
        said.lines().find(|line| line.starts_with("subject=")).unwrap_or_default().to_owned()
    };
    let reload = |engine: &Engine| kill_process(Pid::from_child(&engine.child), Signal::HUP).unwrap();
    assert_eq!(subject(), "subject=CN = one");
    make("two");
    std::fs::write(file("ca.pem"), "nothing").unwrap();
    reload(&engine);
    let line = engine.log.line("mux web: the certificates that were read before stay in use");
    assert!(line.contains("ca.pem: no certificate in PEM"), "{line}");
    engine.log.line("reloaded: 0 rules added");
    assert_eq!(subject(), "subject=CN = one");
    std::fs::copy(file("web.pem"), file("ca.pem")).unwrap();
    reload(&engine);
    engine.log.line("mux web: new connections get the certificate that was just read");
    engine.log.line("reloaded: 0 rules added");
    assert_eq!(subject(), "subject=CN = two");
}

#[test]
fn errors_of_a_mux_are_reported() {
    let directory = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap();
    std::fs::write(directory.path().join("r"), "add allow ip from any to any\n").unwrap();
    let config = directory.path().join("t.toml");
    let listen = format!("listen = \"{taken}\"");
    #[rustfmt::skip]
    let rows: [(&str, i32, &str); 10] = [
        ("framing = \"line\"\nworker = \"w\"",                                     6, "`listen` is missing"),
        ("listen = \"7007\"\nframing = \"lime\"\nworker = \"w\"",                  6, "`7007` is not an address to listen on"),
        ("listen = \"[::1]:0\"\nframing = \"lime\"\nworker = \"w\"",               6, "`lime` is not a framing"),
        ("listen = \"[::1]:0\"\nframing = \"line\"\nworker = \"w\"\ntls-key = \"k\"", 6, "`tls-cert` is missing"),
        ("listen = \"[::1]:0\"\nframing = \"smtp\"\nworker = \"w\"\nstarttls = true", 6, "`tls-cert` is missing"),
        ("listen = \"[::1]:0\"\nframing = \"smtp\"\nworker = \"w\"\ntls-client-ca = \"f\"", 6, "`tls-cert` is missing"),
        ("listen = \"[::1]:0\"\nframing = \"smtp\"\nworker = \"w\"\ntls-client-optional = true", 6, "`tls-client-ca` is missing"),
        ("listen = \"[::1]:0\"\nframing = \"mqtt\"\nworker = \"w\"\nstarttls = true\ntls-cert = \"c\"\ntls-key = \"k\"", 6, "the protocol of `framing` has no STARTTLS"),
        (&format!("{listen}\nframing = \"line\"\nworker = \"w\""),                  7, "another program listens there"),
        ("listen = \"127.0.0.1:0\"\nframing = \"line\"\nworker = \"/no/such\"",    4, "mux web: worker 0: "),
    ];
    for (keys, code, words) in rows {
        std::fs::write(&config, format!("rules = \"r\"\n[mux.web]\n{keys}\n")).unwrap();
        let output = Command::new(env!("CARGO_BIN_EXE_towpath")).arg("run").arg(&config).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{keys}: {said}");
        assert!(said.contains(words), "{keys}: {said}");
    }
}

#[test]
fn the_signal_for_an_upgrade_is_ignored() {
    let directory = tempfile::tempdir().unwrap();
    let (mut engine, _) = Engine::start(directory.path());
    kill_process(Pid::from_child(&engine.child), Signal::USR2).unwrap();
    engine.log.line("SIGUSR2 ignored: ");
    assert!(engine.child.try_wait().unwrap().is_none());
}

/// A reload opens all that it needs before anything changes.
#[test]
fn a_reload_is_taken_as_a_whole_or_not_at_all() {
    let directory = tempfile::tempdir().unwrap();
    let (engine, _) = Engine::start(directory.path());
    let path = |name: &str| directory.path().join(name);
    let before = std::fs::read_to_string(path("t.toml")).unwrap();
    let reload = |engine: &Engine, socket: &str| {
        std::fs::write(path("t.toml"), format!("{before}[queue.2]\nsocket = \"{socket}\"\n")).unwrap();
        kill_process(Pid::from_child(&engine.child), Signal::HUP).unwrap();
    };
    std::fs::write(path("r"), format!("{RULES}add 300 deny ip from any to any\n")).unwrap();
    let has_rule =
        |engine: &Engine| String::from_utf8(engine.ctl("show rules").stdout).unwrap().contains("00300");
    // `r` is a file.
    reload(&engine, "r/queue");
    engine.log.line("not reloaded: queue 2: ");
    assert!(!has_rule(&engine));
    reload(&engine, "queue");
    engine.log.line("reloaded: 1 rule added");
    assert!(has_rule(&engine) && path("queue").exists());
}
