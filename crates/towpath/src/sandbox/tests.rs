//! A violation ends a process: the tests run the attempt in a child process, which is this test binary again.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};

use super::*;

const ALL: Needs = Needs { muxes: true, bpf: true, opens_ports: false, starts_programs: false };

/// What a child process does after it has entered a role.
#[test]
#[ignore = "the body of a child process of other tests"]
fn child() {
    let Ok(word) = std::env::var("TOWPATH_TEST_SANDBOX") else { return };
    let words: Vec<_> = word.split(' ').collect();
    let role = *Role::ALL.iter().find(|role| role.name() == words[0]).expect("a role");
    let mode = Mode::of_word(words[1]).expect("a mode");
    restrict_process(mode, &ALL).unwrap();
    std::thread::Builder::new()
        .name("victim".to_owned())
        .spawn(move || {
            restrict_thread(role, mode, &ALL).unwrap();
            attempt(&std::env::var("TOWPATH_TEST_CALL").unwrap());
        })
        .unwrap()
        .join()
        .unwrap();
    println!("survived");
}

fn attempt(what: &str) {
    match what {
        "nothing" => {}
        "write" => drop(std::fs::File::create("/tmp/towpath-sandbox-test")),
        "read" => drop(std::fs::read("/proc/self/status")),
        "socket" => drop(std::net::UdpSocket::bind("127.0.0.1:0")),
        "user" => drop(rustix::process::chroot("/")),
        other => panic!("{other}"),
    }
}

fn run(role: Role, mode: &str, call: &str) -> Output {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "sandbox::tests::child", "--ignored", "--nocapture"])
        .env("TOWPATH_TEST_SANDBOX", format!("{} {mode}", role.name()))
        .env("TOWPATH_TEST_CALL", call)
        .output()
        .unwrap()
}

#[test]
fn a_thread_that_makes_another_call_ends_the_process() {
    let kills = |role: Role, call: &str| {
        let output = run(role, "kill", call);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        if output.status.signal() == Some(libc::SIGSYS) {
            assert!(error.contains("sandbox: thread victim made system call "), "{role:?} {call}: {error}");
            return true;
        }
        assert!(output.status.success(), "{role:?} {call}: {:?} {error}", output.status);
        assert!(String::from_utf8_lossy(&output.stdout).contains("survived"), "{role:?} {call}");
        false
    };
    for &role in Role::ALL {
        let has = |name: &str| role.groups_with(&ALL).any(|group| group.name == name);
        assert!(!kills(role, "nothing"), "{role:?}");
        assert!(kills(role, "user"), "{role:?}");
        assert_eq!(kills(role, "socket"), !has("sockets"), "{role:?}");
        // A role without files gets an error, so that the allocator goes on.
        assert!(!kills(role, "read"), "{role:?}");
        let writes = has("files written") || has("socket files");
        assert_eq!(kills(role, "write"), has("files read") && !writes, "{role:?}");
    }
}

#[test]
fn in_mode_log_the_call_is_made() {
    let output = run(Role::Reaper, "log", "socket");
    assert!(output.status.success() && String::from_utf8_lossy(&output.stdout).contains("survived"));
}

#[test]
fn no_role_has_a_call_for_other_programs_users_and_modules() {
    let numbers = [
        libc::SYS_execve,
        libc::SYS_execveat,
        libc::SYS_ptrace,
        libc::SYS_process_vm_writev,
        libc::SYS_mount,
        libc::SYS_unshare,
        libc::SYS_setns,
        libc::SYS_setresuid,
        libc::SYS_capset,
        libc::SYS_init_module,
        libc::SYS_finit_module,
        libc::SYS_keyctl,
        libc::SYS_reboot,
        libc::SYS_perf_event_open,
        libc::SYS_userfaultfd,
    ];
    for role in Role::ALL {
        for (name, number) in role.calls(&ALL) {
            assert!(!numbers.contains(&number), "{role:?} has {name}");
        }
    }
}

#[test]
fn io_uring_is_for_threads_that_send() {
    for &role in Role::ALL {
        let calls =
            |needs: &Needs| role.calls(needs).iter().any(|(_, number)| *number == libc::SYS_io_uring_setup);
        assert!(!calls(&Needs::default()), "{role:?}");
        let sends = matches!(role, Role::Packet | Role::Mux);
        assert_eq!(calls(&ALL), sends, "{role:?}");
    }
}

#[test]
fn the_documentation_has_the_system_calls() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/book/src/reference/privileges.md");
    let text = std::fs::read_to_string(path).unwrap();
    let mut expected = text.clone();
    for (name, list) in [("system calls", markdown()), ("refused calls", refused_markdown())] {
        let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->"));
        let (before, rest) = expected.split_once(&begin).expect("the table begins with a comment");
        let (_, after) = rest.split_once(&end).expect("the table ends with a comment");
        expected = format!("{before}{begin}{list}{end}{after}");
    }
    if std::env::var_os("TOWPATH_WRITE_DOCS").is_some() {
        std::fs::write(path, &expected).unwrap();
    } else {
        assert!(text == expected, "{path} differs: run this test with TOWPATH_WRITE_DOCS=1");
    }
}
