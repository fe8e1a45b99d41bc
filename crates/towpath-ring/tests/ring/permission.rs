//! A client of another user: EPERM, and a line in the log of the engine.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::time::Duration;

use crate::world::World;
use towpath_ring::{AttachError, Config, Consumer};

/// The user "nobody" of every Linux (linux/highuid.h, overflowuid).
const NOBODY: u32 = 65534;

/// The lines that the engine logged.
static LINES: Mutex<Vec<String>> = Mutex::new(Vec::new());

struct Log;

impl log::Log for Log {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        LINES.lock().expect("lines").push(format!("{} {}", record.level(), record.args()));
    }

    fn flush(&self) {}
}

#[towpath_testenv::needs(root)]
#[test]
fn a_client_of_another_user_is_refused_and_it_is_logged() {
    log::set_logger(&Log).expect("the first logger");
    log::set_max_level(log::LevelFilter::Trace);
    let mut world = World::new(Config::default());
    // The file permissions admit every user; the list of users refuses the client.
    let socket = world.socket();
    let directory = socket.parent().expect("a directory");
    let program = directory.join("client");
    // Copied by another process: a child that another test forks meanwhile would keep this process's descriptor open for writing.
    let own = std::env::current_exe().expect("our own path");
    assert!(Command::new("cp").arg(own).arg(&program).status().expect("cp").success());
    for (path, mode) in [(directory, 0o755), (&program, 0o755), (&socket, 0o777)] {
        fs::set_permissions(path, Permissions::from_mode(mode)).expect("permissions");
    }
    let mut child = Command::new(&program)
        .args(["--exact", "permission::client_is_refused", "--ignored", "--test-threads=1"])
        .env("TOWPATH_SOCKET", &socket)
        .stdout(Stdio::null())
        .uid(NOBODY)
        .gid(NOBODY)
        .spawn()
        .expect("another user may run programs in TMPDIR");
    let status = loop {
        assert!(world.endpoint.accept().expect("accept").is_none());
        if let Some(status) = child.try_wait().expect("wait") {
            break status;
        }
        world.endpoint.wait(Some(Duration::from_millis(5))).expect("wait");
    };
    assert!(status.success(), "the client was not refused: {status}");
    assert_eq!(world.endpoint.stats().not_permitted, 1);
    let line = format!(
        "WARN {}: refused process {} of user {NOBODY}: not in the allow list (1 so far)",
        socket.display(),
        child.id()
    );
    let lines = LINES.lock().expect("lines");
    assert!(lines.contains(&line), "{lines:?}");
}

#[test]
#[ignore = "the client of a_client_of_another_user_is_refused_and_it_is_logged"]
fn client_is_refused() {
    let e = Consumer::attach_env().expect_err("refused");
    assert_eq!(e.errno(), rustix::io::Errno::PERM.raw_os_error());
    assert!(matches!(&e, AttachError::NotPermitted(why) if why.starts_with("user 65534 may not attach to ")));
}
