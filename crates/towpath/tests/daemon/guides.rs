//! The guides of the book (docs/book/src/guides) and its first pages: each command that they show prints what they show.
//!
//! A block that begins with ```` ```console ```` is run: each line that begins with `$ ` is a command for bash in the root of the
//! repository, and the lines after it are its output (standard output and standard error). A line `...` stands for any lines, and `…` within a
//! line for any text. A block ```` ```console,root ```` needs network namespaces. Other blocks are not run. The programs of the guides
//! in C and Python are run by the tests of towpath-capi and towpath-py.

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A page's commands with the output that it shows.
fn commands(page: &str, info: &str) -> Vec<(String, String)> {
    let path = root().join("docs/book/src").join(page);
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut commands: Vec<(String, String)> = Vec::new();
    let mut within = false;
    for line in text.lines() {
        if let Some(begins) = line.strip_prefix("```") {
            within = !within && begins == info;
        } else if within {
            match (line.strip_prefix("$ "), commands.last_mut()) {
                (Some(command), _) => commands.push((command.to_owned(), String::new())),
                (None, Some((command, _))) if command.ends_with('\\') => {
                    command.push('\n');
                    command.push_str(line);
                }
                (None, Some((_, shown))) => {
                    shown.push_str(line);
                    shown.push('\n');
                }
                (None, None) => panic!("{page}: a block begins with a command"),
            }
        }
    }
    assert!(!commands.is_empty(), "{page} has no block ```{info}");
    commands
}

/// Whether `shown`, with its ellipses, is `printed`.
fn fits(shown: &str, printed: &str) -> bool {
    let splits = [shown.split_once("...\n"), shown.split_once('…')];
    let Some((before, after)) = splits.into_iter().flatten().min_by_key(|(before, _)| before.len()) else {
        return shown == printed;
    };
    let Some(rest) = printed.strip_prefix(before) else { return false };
    (0..=rest.len()).filter(|at| rest.is_char_boundary(*at)).any(|at| fits(after, &rest[at..]))
}

/// Runs a page's commands in the root of the repository, with `towpath` and the examples in PATH.
fn run(page: &str, info: &str) {
    let built = Path::new(env!("CARGO_BIN_EXE_towpath")).parent().unwrap().to_owned();
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{}:{path}", built.display(), built.join("examples").display());
    for (command, shown) in commands(page, info) {
        let output = Command::new("bash")
            .args(["-c", &format!("exec 2>&1; {command}")])
            .current_dir(root())
            .env("PATH", &path)
            .env_remove("TOWPATH_CONTROL")
            .output()
            .expect("bash");
        let printed = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{page}: {command}\n{printed}");
        assert!(fits(&shown, &printed), "{page}: $ {command}\n-- shown:\n{shown}-- printed:\n{printed}");
    }
}

/// Builds an example of another crate. `cargo test` of the default members has built its crate already, with the same features
/// because no package is selected here; then this only links.
fn example(name: &str) {
    let built = Path::new(env!("CARGO_BIN_EXE_towpath")).parent().unwrap();
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--example", name, "--target-dir"]).arg(built.parent().unwrap());
    if built.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.current_dir(root()).status().expect("cargo").success());
}

#[test]
fn start() {
    run("start/first.md", "console");
}

#[test]
fn analyse_a_capture() {
    run("guides/captures.md", "console");
}

#[test]
fn an_inspector_in_rust() {
    example("inspector");
    run("guides/inspector-rust.md", "console");
}

#[test]
fn a_message_server() {
    example("worker");
    run("guides/message-server.md", "console");
}

#[test]
fn sends_without_a_copy() {
    run("guides/zerocopy.md", "console");
}

#[towpath_testenv::needs(netns, "python3")]
#[test]
fn a_bridge() {
    run("guides/bridge.md", "console,root");
}

#[towpath_testenv::needs(netns, "python3")]
#[test]
fn a_router() {
    run("guides/router.md", "console,root");
}

#[towpath_testenv::needs(netns, nfqueue, "python3")]
#[test]
fn an_nfqueue_program() {
    example("inspector");
    run("guides/nfqueue.md", "console,root");
}

#[test]
fn ellipses_stand_for_anything() {
    assert!(fits("a\n...\nd\n", "a\nb\nc\nd\n"));
    assert!(fits("took … s\n", "took 1.5 s\n"));
    assert!(fits("a … c\n...\nd\n", "a b c\nx\nd\n"));
    assert!(!fits("a\n...\nd\n", "a\nb\n"));
    assert!(!fits("a\n", "b\n"));
}
