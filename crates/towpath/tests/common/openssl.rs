//! Certificates and TLS clients of the program `openssl`.

use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::process::{Child, Command, Stdio};

/// Makes a key and its certificate, `NAME.key` and `NAME.pem` in `directory`. It is self-signed unless `more` names a CA.
pub(crate) fn certificate(directory: &Path, name: &str, subject: &str, more: &[&str]) {
    let made = Command::new("openssl")
        .args(["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"])
        .args(["-subj", subject, "-keyout", &format!("{name}.key"), "-out", &format!("{name}.pem")])
        .args(more)
        .current_dir(directory)
        .output()
        .expect("openssl starts");
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
}

/// `openssl s_client -quiet`, which copies its input to the connection and the connection to its output. It ends when it is
/// dropped: with `-quiet` it does not end with its input.
pub(crate) struct Client(Child);

/// Starts a client. Files that `more` names are in `directory`.
pub(crate) fn client(address: &str, directory: &Path, more: &[&str]) -> Client {
    let client = Command::new("openssl")
        .args(["s_client", "-quiet", "-connect", address])
        .args(more)
        .current_dir(directory)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    Client(client.expect("openssl starts"))
}

impl Deref for Client {
    type Target = Child;

    fn deref(&self) -> &Child {
        &self.0
    }
}

impl DerefMut for Client {
    fn deref_mut(&mut self) -> &mut Child {
        &mut self.0
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
