//! What a killed engine leaves: the next start and `towpath ctl clean` remove it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use towpath_port::netns::{ip, veth, within};

use crate::bridged::BRIDGE;
use crate::support::until;

fn engine(directory: &Path) -> Child {
    let mut child = Command::new(env!("CARGO_BIN_EXE_towpath"))
        .arg("run")
        .arg(directory.join("t.toml"))
        .env("TMPDIR", directory.join("tmp"))
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    until(|| {
        assert!(
            child.try_wait().unwrap().is_none(),
            "{:?}",
            std::io::read_to_string(child.stderr.take().unwrap())
        );
        ctl(directory, "show queues").status.success()
    });
    child
}

fn ctl(directory: &Path, words: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_towpath"))
        .arg("ctl")
        .args(words.split(' '))
        .arg("--socket")
        .arg(directory.join("ctl.sock"))
        .env("TMPDIR", directory.join("tmp"))
        .output()
        .unwrap()
}

/// The lines of `ctl clean`.
fn listed(directory: &Path, words: &str) -> Vec<String> {
    let output = ctl(directory, words);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8_lossy(&output.stdout);
    // Programs of other tests, whose interfaces are gone, are listed in every namespace.
    let own = directory.display().to_string();
    let is_own = |line: &&str| line.contains(&own) || line.contains("closed port");
    text.lines().filter(is_own).map(str::to_owned).collect()
}

fn directories(directory: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(directory.join("tmp")).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn files(more: &str) -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    std::fs::create_dir(directory.path().join("tmp")).unwrap();
    let queue = "[queue.1]\ncommand = \"towpath inspect --queue 1 --match x --verdict drop\"\n";
    let config = format!(
        "{}{queue}",
        BRIDGE.replacen("driver = \"af_packet\"", &format!("driver = \"af_packet\"{more}"), 1)
    );
    std::fs::write(directory.path().join("t.toml"), config).unwrap();
    std::fs::write(directory.path().join("r.ipfw"), "add allow ip from any to any\n").unwrap();
    directory
}

#[towpath_testenv::needs(netns)]
#[test]
fn the_next_engine_removes_what_a_killed_one_left() {
    within(|| {
        veth("wan", "l0");
        veth("lan", "r0");
        let files = files("");
        let path = files.path();
        let mut first = engine(path);
        assert_eq!(listed(path, "clean"), [""; 0], "a running engine has left nothing");
        first.kill().unwrap();
        first.wait().unwrap();
        let left = directories(path);
        assert_eq!(left.len(), 1);
        let lines = listed(path, "clean");
        assert_eq!(lines.len(), 2, "{lines:?}");
        assert!(lines[0].ends_with("sockets of an engine that was killed"), "{lines:?}");
        assert!(lines[1].ends_with("ctl.sock: a socket at which no process listens"), "{lines:?}");
        assert_eq!(directories(path), left, "it lists only");
        let mut second = engine(path);
        let now = directories(path);
        assert!(now.len() == 1 && now != left, "{now:?}");
        second.kill().unwrap();
        second.wait().unwrap();
        assert_eq!(listed(path, "clean --remove").len(), 2);
        assert!(directories(path).is_empty() && !path.join("ctl.sock").exists());
        assert_eq!(listed(path, "clean"), [""; 0]);
    });
}

/// The program of a closed port has an effect: only `clean --remove` and an engine on this port remove it.
#[towpath_testenv::needs(netns, tcx, bpffs)]
#[test]
fn the_program_of_a_closed_port_is_listed() {
    within(|| {
        veth("wan", "l0");
        veth("lan", "r0");
        let files = files("\nfail = \"closed\"");
        let path = files.path();
        // Other tests have programs on interfaces of this name, in other namespaces.
        let own = towpath_port::pins::path("wan").display().to_string();
        let programs = |lines: Vec<String>| -> Vec<String> {
            lines.into_iter().filter(|line| line.contains("closed port") && line.contains(&own)).collect()
        };
        let mut first = engine(path);
        assert!(programs(listed(path, "clean")).is_empty());
        first.kill().unwrap();
        first.wait().unwrap();
        let lines = programs(listed(path, "clean"));
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(
            lines[0].contains("the program of a closed port, which drops the packets of interface"),
            "{lines:?}"
        );
        assert_eq!(programs(listed(path, "clean --remove")).len(), 1);
        assert!(programs(listed(path, "clean")).is_empty());
        // The interface of a program is gone: the next engine removes the file.
        let mut second = engine(path);
        second.kill().unwrap();
        second.wait().unwrap();
        let pin = programs(listed(path, "clean"))[0].split(": ").next().unwrap().to_owned();
        ip("link del wan");
        veth("wan", "l0");
        std::fs::write(
            path.join("t.toml"),
            std::fs::read_to_string(path.join("t.toml")).unwrap().replace("\nfail = \"closed\"", ""),
        )
        .unwrap();
        let mut third = engine(path);
        assert!(!Path::new(&pin).exists());
        third.kill().unwrap();
        third.wait().unwrap();
    });
}
