//! Groups whose gates have certificates, nkeys and files of credentials.

use std::path::Path;

use data_encoding::BASE64URL_NOPAD;
use nkeys::KeyPair;
use serde_json::json;
use towpath_port::netns::within;

use super::{Server, fleet, in_step, permissions, stat};
use crate::live::machines::*;
use crate::openssl;
use crate::support::until;

/// The server's part of the guide for TLS. `DIRECTORY` stands for /etc/nats.
const TLS: &str = r#"tls { cert_file: "DIRECTORY/server.pem", key_file: "DIRECTORY/server.key", ca_file: "DIRECTORY/ca.pem", verify: true }"#;

fn certificates(directory: &Path) {
    openssl::certificate(directory, "ca", "/CN=ca", &[]);
    for name in ["server", "a", "b"] {
        let signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "basicConstraints=CA:FALSE"];
        let address = ["-addext", "subjectAltName=IP:127.0.0.1"];
        openssl::certificate(directory, name, &format!("/CN={name}"), &[&signed[..], &address].concat());
    }
}

/// The configuration of a gate with more keys of `[fleet]`. `{dir}` stands for the directory of the certificates.
fn gate(name: &str, number: u8, directory: &Path, more: &str) -> String {
    let text = super::gate(name, "", number).replace(&format!("nats://{name}:@127.0.0.1"), "tls://127.0.0.1");
    text + &more.replace("{dir}", directory.to_str().unwrap()).replace("{name}", name)
}

const IDENTITY: &str = "tls = true\ntls-ca = \"{dir}/ca.pem\"\ntls-certificate = \"{dir}/{name}.pem\"\n\
                        tls-key = \"{dir}/{name}.key\"\ncredentials = \"{dir}/{name}.nk\"\n";

#[towpath_testenv::needs(netns, "nats-server", "openssl")]
#[test]
fn gates_with_certificates_and_nkeys_are_a_group() {
    within(|| {
        let _paths = super::two_paths();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        certificates(path);
        let mut users = String::new();
        for name in ["a", "b"] {
            let pair = KeyPair::new_user();
            std::fs::write(path.join(format!("{name}.nk")), pair.seed().unwrap() + "\n").unwrap();
            users += &format!("{{ nkey: {}, permissions: {} }}\n", pair.public_key(), permissions(name));
        }
        let tls = TLS.replace("DIRECTORY", path.to_str().unwrap());
        let store = format!("jetstream {{ store_dir: \"{}\" }}", path.display());
        let config =
            format!("listen: \"127.0.0.1:4222\"\n{store}\n{tls}\nauthorization {{ users = [\n{users}] }}");
        let _server = Server::with(path, &config);
        let first = files(&gate("a", 1, path, IDENTITY), super::RULES);
        let second = files(&gate("b", 2, path, IDENTITY), super::RULES);
        let (one, two) = (Engine::start(first.path()), Engine::start(second.path()));
        in_step(&one, 1);
        in_step(&two, 1);
        assert!(fleet(&one)["warning"].is_null(), "{}", fleet(&one));
        // Without the authority, the server is not trusted.
        one.stop();
        let files = files(&gate("a", 1, path, &IDENTITY.replace("tls-ca", "#")), super::RULES);
        let engine = Engine::start(files.path());
        until(|| fleet(&engine)["error"].as_str().is_some_and(|error| error.contains("check `tls-ca`")));
        engine.stop();
        two.stop();
    });
}

/// A JSON web token as NATS has them (nats-io/jwt), signed by `issuer`.
fn token(issuer: &KeyPair, subject: &str, nats: &serde_json::Value) -> String {
    let part = |value: &serde_json::Value| BASE64URL_NOPAD.encode(value.to_string().as_bytes());
    let header = part(&json!({ "typ": "JWT", "alg": "ed25519-nkey" }));
    let claims = json!({
        "jti": "test", "iat": 1_700_000_000, "iss": issuer.public_key(), "name": "test", "sub": subject, "nats": nats,
    });
    let signed = format!("{header}.{}", part(&claims));
    let signature = BASE64URL_NOPAD.encode(&issuer.sign(signed.as_bytes()).unwrap());
    format!("{signed}.{signature}")
}

/// What a server needs to know of an operator with one account, and the user `a` of that account.
fn operator(directory: &Path) -> String {
    let (operator, account, user) = (KeyPair::new_operator(), KeyPair::new_account(), KeyPair::new_user());
    let own = token(&operator, &operator.public_key(), &json!({ "type": "operator", "version": 2 }));
    let limits = json!({
        "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": true, "conn": -1, "leaf": -1,
    });
    let accounts = json!({ "type": "account", "version": 2, "limits": limits });
    let accounts = token(&operator, &account.public_key(), &accounts);
    let rights = json!({
        "type": "user", "version": 2, "subs": -1, "data": -1, "payload": -1,
        "pub": { "allow": ["towpath.edge.states.a", "towpath.edge.sync.*.a", "towpath.edge.bulk.*.a", "$JS.API.>"] },
        "sub": { "allow": ["towpath.edge.states.*", "towpath.edge.sync.a.*", "towpath.edge.bulk.a.*", "_INBOX.>"] },
    });
    let creds = format!(
        "-----BEGIN NATS USER JWT-----\n{}\n------END NATS USER JWT------\n\n\
         -----BEGIN USER NKEY SEED-----\n{}\n------END USER NKEY SEED------\n",
        token(&account, &user.public_key(), &rights),
        user.seed().unwrap(),
    );
    std::fs::write(directory.join("a.creds"), creds).unwrap();
    let key = account.public_key();
    format!("operator: \"{own}\"\nresolver: MEMORY\nresolver_preload: {{ {key}: \"{accounts}\" }}\n")
}

#[towpath_testenv::needs(netns, "nats-server", "openssl")]
#[test]
fn a_gate_with_a_file_of_credentials_joins() {
    within(|| {
        let _paths = super::two_paths();
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let config = format!("listen: \"127.0.0.1:4222\"\n{}", operator(path));
        let _server = Server::with(path, &config);
        let credentials = "credentials = \"{dir}/a.creds\"\n";
        let files = files(&gate("a", 1, path, credentials).replace("tls://", "nats://"), super::RULES);
        let engine = Engine::start(files.path());
        in_step(&engine, 0);
        // The account has no JetStream.
        let warning = fleet(&engine)["warning"].as_str().unwrap_or_default().to_owned();
        assert!(warning.starts_with("no stream, so that snapshots fill gaps"), "{warning}");
        assert_eq!(stat(&engine, "connected"), 1);
        engine.stop();
    });
}

/// The guide has the line that the tests use.
#[test]
fn the_guide_has_this_tls() {
    let guide = include_str!("../../../../../docs/book/src/guides/fleet.md");
    assert!(guide.contains(&TLS.replace("DIRECTORY", "/etc/nats")), "the guide has other lines for TLS");
}
