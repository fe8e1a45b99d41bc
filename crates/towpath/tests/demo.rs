//! `towpath demo` as a user runs it: it passes, and leaves no process, file or namespace, however it ends.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use towpath::config::Config;
use towpath_demo::{Driver, FLOOD_MAX, REPORTED_RULES, RULES, configuration};

/// Held by a test that needs all processors of the machine.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// A demo whose temporary files are in `directory`.
fn demo(program: &str, words: &[&str], directory: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(words).args(["demo", "--seconds", "5", "--json"]).env("TMPDIR", directory);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// A copy of the program. Another process makes it: a child that another test forks meanwhile would keep this process's descriptor
/// open for writing.
fn copy(to: &Path) {
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_towpath")).arg(to).status().unwrap().success());
}

/// Processes whose working directory is `directory`, even if it was removed: process and command line.
fn processes(directory: &Path) -> Vec<(i32, String)> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter_map(|entry| {
            let pid = entry.file_name().to_str()?.parse().ok()?;
            let there = fs::read_link(entry.path().join("cwd")).ok()?.starts_with(directory);
            there.then(|| {
                let words = fs::read(entry.path().join("cmdline")).unwrap_or_default();
                (pid, String::from_utf8_lossy(&words).replace('\0', " "))
            })
        })
        .collect()
}

/// Waits until no process of the demo runs.
fn gone(directory: &Path) {
    let begun = Instant::now();
    while !processes(directory).is_empty() {
        assert!(begun.elapsed() < Duration::from_secs(60), "left behind: {:?}", processes(directory));
        std::thread::yield_now();
    }
}

fn empty(directory: &Path) -> bool {
    fs::read_dir(directory).unwrap().next().is_none()
}

/// Starts a demo, and reads its output until a line contains `word`.
fn until(word: &str, directory: &Path) -> (Child, BufReader<std::process::ChildStderr>) {
    let mut child = demo(env!("CARGO_BIN_EXE_towpath"), &[], directory).spawn().unwrap();
    let mut said = BufReader::new(child.stderr.take().unwrap());
    let (mut all, mut line) = (String::new(), String::new());
    while !line.contains(word) {
        all.push_str(&line);
        line.clear();
        assert!(said.read_line(&mut line).unwrap() > 0, "it ended without a word of {word}: {all}");
    }
    (child, said)
}

fn end((mut child, mut said): (Child, BufReader<std::process::ChildStderr>)) -> (ExitStatus, String) {
    let mut rest = String::new();
    said.read_to_string(&mut rest).unwrap();
    (child.wait().unwrap(), rest)
}

fn results(output: &std::process::Output) -> Value {
    let said = String::from_utf8_lossy(&output.stderr);
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {said}"))
}

#[towpath_testenv::needs(netns, "nats-server")]
#[test]
fn connections_continue_when_a_gate_of_two_is_killed() {
    let (_alone, directory) = (alone(), tempfile::tempdir().unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_towpath"));
    command.args(["demo", "fleet", "--connections", "60", "--json"]).env("TMPDIR", directory.path());
    let output = command.stdin(Stdio::null()).output().unwrap();
    let results = results(&output);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{results:#}: {said}");
    assert_eq!([&results["continued"], &results["lost"]], [60, 0], "{results:#}");
    let through = results["through"].as_array().unwrap();
    assert!(through.iter().all(|count| count.as_u64() > Some(0)), "{results:#}");
    assert!(results["longest_ms"].as_f64() > Some(0.0), "{results:#}");
    assert!(said.contains("gate a: SIGKILL\n") && !said.contains('\r'), "{said}");
    gone(directory.path());
    assert!(empty(directory.path()));
}

#[towpath_testenv::needs(netns)]
#[test]
fn expectations_are_met_and_nothing_is_left() {
    let (_alone, directory) = (alone(), tempfile::tempdir().unwrap());
    let output = demo(env!("CARGO_BIN_EXE_towpath"), &[], directory.path()).output().unwrap();
    let results = results(&output);
    assert!(output.status.success() && results["ok"] == true, "{results:#}");
    assert!(results["expected"].as_array().unwrap().len() >= 10, "{results:#}");
    let engine = |name: &str| results["engine"][name].as_u64().unwrap();
    let ends = ["passed", "dropped", "rejected", "waiting"];
    assert_eq!(engine("packets"), ends.into_iter().map(engine).sum::<u64>());
    let stopped = results["stopped"].as_array().unwrap().iter().map(|row| row["stopped"].as_u64().unwrap());
    assert_eq!(stopped.sum::<u64>(), engine("dropped"), "{results:#}");
    assert!(results["messages"]["redelivered"].as_u64() > Some(0), "{results:#}");
    assert!(results["reloads"].as_u64() > Some(0), "{results:#}");
    assert!(results["inspector"]["outage_ms"].as_f64() > Some(0.0), "{results:#}");
    assert!(results["trace"]["dropped"].as_u64() > Some(0), "{results:#}");
    let compared = results["vs_kernel"].as_array().unwrap();
    if let Some(row) = compared.first() {
        assert!(["cubic", "reno"].iter().any(|name| results["congestion"] == *name), "{results:#}");
        // Each engine accounts for its packets, and ends by itself.
        let expected = |word: &str| {
            let all = results["expected"].as_array().unwrap().iter();
            all.filter(|one| one["name"].as_str().unwrap().contains(word)).count()
        };
        let engines = row["ours"].as_array().unwrap().len();
        assert_eq!((expected("every packet"), expected("drains")), (engines, engines), "{results:#}");
    }
    gone(directory.path());
    assert!(empty(directory.path()));
}

#[towpath_testenv::needs(netns)]
#[test]
fn interrupted_it_leaves_nothing() {
    let (_alone, directory) = (alone(), tempfile::tempdir().unwrap());
    let running = until("inspector killed ...", directory.path());
    assert!(processes(directory.path()).len() >= 2, "the engine and its inspector run there");
    kill_process(Pid::from_child(&running.0), Signal::INT).unwrap();
    let (status, said) = end(running);
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("interrupted"), "{said}");
    gone(directory.path());
    assert!(empty(directory.path()));
}

#[towpath_testenv::needs(netns)]
#[test]
fn without_its_engine_it_says_so_and_leaves_nothing() {
    let (_alone, directory) = (alone(), tempfile::tempdir().unwrap());
    let running = until("clients ...", directory.path());
    let all = processes(directory.path());
    let engine =
        all.iter().find(|(_, words)| words.contains(" run demo.toml")).unwrap_or_else(|| panic!("{all:?}"));
    kill_process(Pid::from_raw(engine.0).unwrap(), Signal::KILL).unwrap();
    let (status, said) = end(running);
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(said.contains("the engine does not answer ctl show"), "{said}");
    gone(directory.path());
    assert!(empty(directory.path()));
}

#[towpath_testenv::needs(netns)]
#[test]
fn killed_it_takes_its_processes_with_it() {
    let (_alone, directory) = (alone(), tempfile::tempdir().unwrap());
    let running = until("worker killed ...", directory.path());
    kill_process(Pid::from_child(&running.0), Signal::KILL).unwrap();
    end(running);
    gone(directory.path());
    let begun = Instant::now();
    while !empty(directory.path()) {
        assert!(begun.elapsed() < Duration::from_secs(60), "its files are still there");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[towpath_testenv::needs(netns, userns, "setpriv")]
#[test]
fn an_ordinary_user_sees_the_same_in_a_user_namespace() {
    let (_alone, directory) = (alone(), tempfile::tempdir().unwrap());
    // The user `nobody` has no access to the build directory.
    let program = directory.path().join("towpath");
    copy(&program);
    let files = directory.path().join("files");
    fs::create_dir(&files).unwrap();
    let open =
        |path: &Path| fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    open(directory.path());
    open(&files);
    let words = ["--reuid", "65534", "--regid", "65534", "--clear-groups", program.to_str().unwrap()];
    let output = demo("setpriv", &words, &files).output();
    let output = output.unwrap();
    let results = results(&output);
    assert!(output.status.success() && results["ok"] == true, "{results:#}");
    assert!(results["place"].as_str().unwrap().starts_with("without root"), "{results:#}");
    gone(&files);
    assert!(empty(&files));
}

/// A demo in a user namespace in which `most` more network namespaces can be made (namespaces(7)). Returns its output.
fn with_namespaces(most: u32, words: &[&str], directory: &Path) -> std::process::Output {
    let limits = match most {
        0 => "echo 0 > max_user_namespaces && echo 0 > max_net_namespaces".to_owned(),
        most => format!("echo {most} > max_net_namespaces"),
    };
    let script = format!("cd /proc/sys/user && {limits} && exec \"$0\" \"$@\"");
    let mut command =
        demo("unshare", &["-Ur", "sh", "-c", &script, env!("CARGO_BIN_EXE_towpath")], directory);
    command.args(words).output().unwrap()
}

#[towpath_testenv::needs(netns, userns)]
#[test]
fn without_namespaces_it_shows_what_it_can() {
    let (_alone, directory) = (alone(), tempfile::tempdir().unwrap());
    let elsewhere = tempfile::tempdir().unwrap();
    let cast = elsewhere.path().join("demo.cast");
    let record = ["--record", cast.to_str().unwrap()];
    let output = with_namespaces(0, &record, directory.path());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(7), "{said}");
    assert!(said.contains("cannot create namespaces"), "{said}");
    let results = results(&output);
    assert!(results["ok"] == true && results["messages"]["lost"] == 0, "{results:#}");
    let cast = fs::read_to_string(cast).unwrap();
    assert!(cast.lines().count() > 2 && cast.contains("inspected capture"), "{cast}");
    gone(directory.path());
    assert!(empty(directory.path()));
}

#[towpath_testenv::needs(netns, userns)]
#[test]
fn with_too_few_namespaces_it_shows_what_it_can_and_a_recording_that_fails_costs_no_results() {
    let (_alone, directory) = (alone(), tempfile::tempdir().unwrap());
    let output = with_namespaces(3, &["--record", "/dev/full"], directory.path());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("a new network namespace") && said.contains("What needs no privilege"), "{said}");
    let results = results(&output);
    let failed: Vec<&Value> =
        results["expected"].as_array().unwrap().iter().filter(|one| one["met"] == false).collect();
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(failed.len() == 1 && failed[0]["name"] == "the screen is recorded", "{results:#}");
    assert!(results["messages"]["lost"] == 0 && results["file"]["whole"] == true, "{results:#}");
    gone(directory.path());
    assert!(empty(directory.path()));
}

#[test]
fn a_recording_that_cannot_begin_fails_before_the_first_scene() {
    let directory = tempfile::tempdir().unwrap();
    let nowhere = directory.path().join("nowhere/demo.cast");
    let mut command = demo(env!("CARGO_BIN_EXE_towpath"), &[], directory.path());
    let output = command.arg("--record").arg(&nowhere).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("nowhere/demo.cast") && !said.contains("..."), "{said}");
    assert!(output.stdout.is_empty() && empty(directory.path()));
}

#[test]
fn configuration_and_rules_have_no_errors() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("demo.toml");
    fs::write(directory.path().join("demo.ipfw"), RULES).unwrap();
    fs::write(&file, configuration(Driver::AfXdp)).unwrap();
    Config::read(&file).unwrap();
    fs::write(&file, configuration(Driver::AfPacket)).unwrap();
    let config = Config::read(&file).unwrap();
    let lifetime = config.settings.iter().find(|(name, _)| name == "dyn_syn_lifetime").unwrap().1;
    assert!(FLOOD_MAX < Duration::from_secs(lifetime), "a flood of {FLOOD_MAX:?} outlives its first states");
    let rules = config.read_rules().unwrap();
    assert!(rules.warnings.is_empty(), "{:?}", rules.warnings);
    let numbers: Vec<u64> = rules.ruleset.rules().iter().map(|rule| u64::from(rule.number)).collect();
    for number in REPORTED_RULES {
        assert!(numbers.contains(&number), "rule {number} is missing from {numbers:?}");
    }
}
