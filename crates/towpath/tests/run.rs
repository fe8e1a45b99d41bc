//! `towpath run`: its configuration, and what it says when it cannot be.

use std::path::Path;
use std::process::Command;

fn towpath(args: &[&str]) -> (i32, String, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_towpath")).args(args).output().unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn the_examples_are_right() {
    let examples = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/run");
    let mut seen = 0;
    for file in std::fs::read_dir(&examples).unwrap() {
        let file = file.unwrap().path();
        if file.extension().is_some_and(|extension| extension == "toml") {
            let (code, out, err) = towpath(&["run", "--check", file.to_str().unwrap()]);
            assert_eq!((code, err.as_str()), (0, ""), "{}", file.display());
            assert!(out.starts_with(&format!("{}: ", file.display())), "{out}");
            seen += 1;
        }
    }
    assert!(seen > 0);
}

#[test]
fn check_tells_every_error_with_its_place() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name).to_str().unwrap().to_owned();
    let config = path("t.toml");
    std::fs::write(&config, "rules = \"r\"\ntap = [\"a\"]\n[port.a]\ndriver = \"af_paket\"\n[engin]\n")
        .unwrap();
    let (code, out, err) = towpath(&["run", "--check", &config]);
    assert_eq!((code, out.as_str()), (6, ""));
    let lines: Vec<&str> = err.lines().collect();
    assert!(
        lines[1].ends_with("t.toml:4:10: there is no driver \"af_paket\"; did you mean `af_packet`?"),
        "{err}"
    );
    assert!(lines.last().unwrap().ends_with("unknown key `engin`; did you mean `engine`?"), "{err}");

    std::fs::write(&config, "rules = \"r\"\ntap = [\"a\"]\n[port.a]\ndriver = \"af_packet\"\n").unwrap();
    let (code, _, err) = towpath(&["run", "--check", &config]);
    assert_eq!(code, 3);
    assert!(err.contains("/r:1:1: cannot be read: No such file or directory"), "{err}");
    std::fs::write(path("r"), "add allow ip from any to any\nadd alow ip from any to any\n").unwrap();
    let (code, out, err) = towpath(&["run", "--check", "--json", &config]);
    assert_eq!((code, err.as_str()), (3, ""));
    let object: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&object["ok"], &object["errors"][0]["line"]), (&false.into(), &2.into()), "{out}");
}
