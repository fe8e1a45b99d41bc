//! `towpath mux --tls` with clients of OpenSSL: protocols, client certificates, SIGHUP, STARTTLS.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command};

use rustix::process::Signal;
use tempfile::TempDir;

use crate::openssl;

use super::daemon::{Mux, example, towpath};

/// A CA, and certificates that it signed, made by openssl.
struct Files(TempDir);

impl Files {
    fn new() -> Self {
        let files = Self(tempfile::tempdir().expect("a directory"));
        let directory = files.0.path();
        openssl::certificate(directory, "ca", "/CN=ca", &[]);
        let rows = [
            ("one", "/O=one/CN=localhost", "DNS:localhost,IP:127.0.0.1"),
            ("two", "/O=two/CN=localhost", "DNS:localhost,IP:127.0.0.1"),
            ("device", "/CN=common", "DNS:device.example,URI:urn:device:7"),
            ("named", "/CN=common name", "IP:192.0.2.1"),
        ];
        for (name, subject, alternative) in rows {
            let alternative = format!("subjectAltName={alternative}");
            let signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE"];
            openssl::certificate(
                directory,
                name,
                subject,
                &[&signed[..], &["-addext", &alternative]].concat(),
            );
        }
        files
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn text(&self, name: &str) -> String {
        self.path(name).to_str().expect("UTF-8").to_owned()
    }

    /// Makes `used.pem` and `used.key` those of `name`.
    fn use_of(&self, name: &str) {
        std::fs::copy(self.path(&format!("{name}.key")), self.path("used.key")).expect("a file");
        std::fs::copy(self.path(&format!("{name}.pem")), self.path("used.pem")).expect("a file");
    }

    /// The value of --tls with `used.pem`.
    fn pair(&self) -> String {
        format!("{},{}", self.text("used.pem"), self.text("used.key"))
    }

    fn mux(&self, worker: &str, more: &[&str]) -> Mux {
        self.use_of("one");
        Mux::start(worker, &[&["--workers", "1", "--tls", &self.pair()], more].concat())
    }

    /// `openssl s_client`, which verifies the server.
    fn client(&self, mux: &Mux, more: &[&str]) -> Client {
        let verify = ["-verify_return_error", "-servername", "localhost", "-CAfile", "ca.pem"];
        let mut child = openssl::client(&mux.address, self.0.path(), &[&verify[..], more].concat());
        let lines = BufReader::new(child.stdout.take().expect("a pipe"));
        Client { child, lines }
    }
}

struct Client {
    child: openssl::Client,
    lines: BufReader<ChildStdout>,
}

impl Client {
    /// The next line; empty at the end.
    fn line(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("text");
        line.trim_end().to_owned()
    }

    fn ask(&mut self, line: &str) -> String {
        let line = format!("{line}\r\n");
        self.child.stdin.as_mut().expect("a pipe").write_all(line.as_bytes()).expect("it reads");
        self.line()
    }

    /// Its output on standard error, after its end.
    fn errors(mut self) -> String {
        drop(self.child.stdin.take());
        let mut said = String::new();
        self.child.stderr.as_mut().expect("a pipe").read_to_string(&mut said).expect("text");
        said
    }
}

fn worker(mode: &str) -> String {
    format!("{} {mode}", example("event_worker"))
}

/// ALPN of the preset, and the names of the client, reach the worker.
#[towpath_testenv::needs("openssl")]
#[test]
fn workers_learn_the_protocol_and_the_names_of_a_client() {
    let files = Files::new();
    let ca = files.text("ca.pem");
    let mut mux =
        files.mux(&worker("tls"), &["--framing", "mqtt", "--tls-client-ca", &ca, "--tls-client-optional"]);
    let rows: [(&[&str], &str); 4] = [
        (&[], "false localhost//"),
        (&["-alpn", "x,mqtt"], "false localhost/mqtt/"),
        (
            &["-cert", "device.pem", "-key", "device.key", "-tls1_2"],
            "false localhost//device.example,urn:device:7",
        ),
        (&["-cert", "named.pem", "-key", "named.key", "-alpn", "mqtt"], "false localhost/mqtt/common name"),
    ];
    for (more, expected) in rows {
        assert_eq!(files.client(&mux, more).line(), expected, "{more:?}");
    }
    let refused = files.client(&mux, &["-alpn", "h2,http/1.1"]).errors();
    assert!(refused.contains("no application protocol"), "{refused}");
    mux.until("peer doesn't support any known protocol");
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");

    // Required: the client without a certificate gets an alert.
    let mut mux = files.mux(&worker("tls"), &["--framing", "line", "--tls-client-ca", &ca]);
    let mut client = files.client(&mux, &["-cert", "device.pem", "-key", "device.key"]);
    assert_eq!(client.line(), "false localhost//device.example,urn:device:7");
    let refused = files.client(&mux, &[]).errors();
    assert!(refused.contains("certificate required"), "{refused}");
    mux.until("peer sent no certificates");
    drop(client);
    assert_eq!(mux.finish().0, Some(0));
}

#[towpath_testenv::needs("curl", "openssl")]
#[test]
fn curl_agrees_on_http_1() {
    let files = Files::new();
    let mux = files.mux(&worker("http"), &["--framing", "http1"]);
    let output = Command::new("curl")
        .args(["--silent", "--show-error", "--verbose", "--cacert", &files.text("ca.pem")])
        .arg(format!("https://{}/", mux.address))
        .output()
        .expect("curl starts");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "hello\n", "{said}");
    assert!(said.contains("server accepted http/1.1"), "{said}");
    assert_eq!(mux.finish().0, Some(0));
}

/// A connection goes on while the certificate changes, also while the files are not usable.
#[towpath_testenv::needs("openssl", "python3")]
#[test]
fn sighup_reads_the_certificate_again() {
    let files = Files::new();
    let mut mux = files.mux(&worker("tls"), &["--framing", "line", "--on-worker-end", "move"]);
    let mut old = files.client(&mux, &[]);
    assert_eq!(old.line(), "false localhost//");
    assert_eq!(organization(&files, &mux), "one");

    std::fs::write(files.path("used.pem"), "nothing").expect("a file");
    mux.signal(Signal::HUP);
    let line = mux.until("stay in use");
    assert!(line.contains("used.pem: no certificate in PEM"), "{line}");
    mux.until("all workers were replaced");
    assert_eq!(organization(&files, &mux), "one");

    files.use_of("two");
    mux.signal(Signal::HUP);
    mux.until("new connections get the certificate that was just read");
    mux.until("all workers were replaced");
    assert_eq!(organization(&files, &mux), "two");
    // The workers that continue the connection answer *opened* too.
    let answer = old.ask("hello");
    let rest = std::iter::from_fn(|| Some(old.line()));
    let answer = std::iter::once(answer).chain(rest).find(|line| !line.starts_with("false "));
    assert!(answer.is_some_and(|line| line.ends_with(" hello")));
    drop(old);
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
}

/// The organization of the certificate that Python's ssl gets and verifies.
fn organization(files: &Files, mux: &Mux) -> String {
    let (host, port) = mux.address.rsplit_once(':').expect("a port");
    let script = format!(
        "import socket, ssl\n\
         context = ssl.create_default_context(cafile={:?})\n\
         with context.wrap_socket(socket.create_connection(({host:?}, {port})), server_hostname='localhost') as client:\n\
        \x20   print(dict(pair[0] for pair in client.getpeercert()['subject'])['organizationName'])\n",
        files.text("ca.pem")
    );
    let output = Command::new("python3").args(["-c", &script]).output().expect("python3 starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[towpath_testenv::needs("openssl", "python3")]
#[test]
fn smtp_clients_begin_with_starttls() {
    let files = Files::new();
    let mut mux = files.mux(&example("smtp"), &["--framing", "smtp", "--starttls"]);
    // s_client begins with EHLO and STARTTLS. The session begins anew, without a greeting.
    let mut client = files.client(&mux, &["-starttls", "smtp"]);
    assert_eq!(client.ask("EHLO a"), "250 hello");
    assert_eq!(client.ask("STARTTLS"), "502 unknown command");
    assert_eq!(client.ask("QUIT"), "221 bye");
    assert_eq!(client.line(), "");
    let (host, port) = mux.address.rsplit_once(':').expect("a port");
    let script = format!(
        "import smtplib, ssl\n\
         with smtplib.SMTP({host:?}, {port}, timeout=60) as smtp:\n\
        \x20   assert smtp.docmd('MAIL FROM:<a@example>')[0] == 530\n\
        \x20   assert smtp.starttls(context=ssl.create_default_context(cafile={:?}))[0] == 220\n\
        \x20   assert smtp.sendmail('a@example', ['b@example'], 'Subject: hello\\n\\nworld\\n') == {{}}\n",
        files.text("ca.pem")
    );
    let output = Command::new("python3").args(["-c", &script]).output().expect("python3 starts");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut plain = mux.connect();
    plain.write_all(b"STARTTLS\r\nEHLO a\r\n").expect("it reads");
    let mut said = String::new();
    plain.read_to_string(&mut said).expect("text");
    assert!(said.ends_with("554 5.5.1 Data after STARTTLS\r\n"), "{said}");
    mux.until("plaintext after STARTTLS");
    let (code, errors) = mux.finish();
    assert_eq!(code, Some(0), "{errors}");
}

#[test]
fn options_of_tls_need_each_other() {
    let none = Path::new("/nonexistent");
    assert!(!none.exists());
    #[rustfmt::skip]
    let rows: [(&[&str], &str); 5] = [
        (&["--framing", "line", "--tls", "/nonexistent/c,/nonexistent/k", "--starttls"], "--starttls, --framing line: its protocol has none"),
        (&["--framing", "smtp", "--starttls"], "--tls <CERT,KEY>"),
        (&["--framing", "smtp", "--tls-client-ca", "f"], "--tls <CERT,KEY>"),
        (&["--framing", "smtp", "--tls", "c,k", "--tls-client-optional"], "--tls-client-ca <FILE>"),
        (&["--framing", "smtp", "--tls", "/nonexistent/c,/nonexistent/k"], "--tls: /nonexistent/c: cannot be read: No such file"),
    ];
    for (more, expected) in rows {
        let output = towpath().args(["mux", "127.0.0.1:0", "--worker", "w"]).args(more).output();
        let output = output.expect("towpath starts");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(64), "{said}");
        assert!(said.contains(expected), "{more:?}: {said}");
    }
}
