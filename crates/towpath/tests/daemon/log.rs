//! The log of a running engine: formats, fields, and levels that change at run time.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Write;
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use crate::example::example;
use crate::support::{Control, LogFile, free, until};

/// An engine with a mux, whose log is a file.
struct Engine {
    directory: TempDir,
    at: SocketAddr,
    child: Child,
    _watched: Option<Arc<LogFile>>,
}

impl Engine {
    /// Starts the engine with these lines below `[log]`. `wrap` makes the command of the program and its arguments.
    fn start(log: &str, arguments: &[&str], wrap: impl FnOnce(&Path, &File) -> Command) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let at = free();
        let child = Command::new("true").spawn().unwrap();
        let mut engine = Self { directory, at, child, _watched: None };
        engine.write(log);
        std::fs::write(engine.path("r"), "add 100 allow log tcp from any to any keep-state\n").unwrap();
        let file = File::create(engine.path("log")).unwrap();
        let mut command = wrap(engine.directory.path(), &file);
        command.arg("run").args(arguments).arg(engine.path("t.toml")).stdout(Stdio::null()).stderr(file);
        engine.child.wait().unwrap();
        engine.child = command.spawn().unwrap();
        engine._watched = Some(LogFile::of(&engine.child, engine.path("log")));
        until(|| engine.control().ctl("show mux").status.success());
        engine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Writes the configuration.
    fn write(&self, log: &str) {
        let worker = example("mux_worker");
        let text = format!(
            "rules = \"r\"\n[mux.web]\nlisten = \"{}\"\nframing = \"line\"\nworkers = 1\nworker = \"{}\"\n\
             [control]\nsocket = \"ctl.sock\"\n[log]\n{log}\n",
            self.at, worker
        );
        std::fs::write(self.path("t.toml"), text).unwrap();
    }

    fn control(&self) -> Control {
        Control::of(self.directory.path())
    }

    /// Opens a connection that ends by an error: a line is longer than the framing permits.
    fn connect(&self) {
        let mut stream = TcpStream::connect(self.at).unwrap();
        let _ = stream.write_all(&[b'x'; 1 << 18]);
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap()
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn stop(mut self) -> String {
        self.signal(Signal::TERM);
        assert_eq!(self.child.wait().unwrap().code(), Some(0), "{}", self.log());
        self.log()
    }
}

impl Drop for Engine {
    /// The engine of a test that failed.
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn plain(_: &Path, _: &File) -> Command {
    Command::new(env!("CARGO_BIN_EXE_towpath"))
}

#[test]
fn text_has_times_and_levels() {
    let engine = Engine::start("", &[], plain);
    engine.connect();
    until(|| engine.log().contains("ipfw: 100 Accept TCP"));
    let log = engine.stop();
    let line = log.lines().find(|line| line.contains("ipfw: 100 Accept TCP 127.0.0.1:")).unwrap();
    let (time, rest) = line.split_once(' ').unwrap();
    assert!(time.len() == "2026-11-28T02:15:01.123456Z".len() && time.ends_with('Z'), "{line}");
    assert!(rest.starts_with("towpath: info: ipfw: 100 Accept TCP "), "{line}");
}

#[test]
fn json_has_one_object_per_line_with_fields() {
    // The option has precedence over the configuration.
    let engine = Engine::start("format = \"text\"", &["--log-format", "json"], plain);
    let lines = || -> Vec<Value> {
        let log = engine.log();
        let whole = log.rfind('\n').map_or("", |end| &log[..end]);
        whole.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|_| panic!("{line}"))).collect()
    };
    let of = |target: &str| lines().into_iter().filter(|line| line["target"] == target).collect::<Vec<_>>();
    engine.connect();
    until(|| !of("packets").is_empty() && !of("connections").is_empty());
    // States are not logged by default. The level changes at run time.
    assert_eq!(of("states").len(), 0);
    let changed = engine.control().json("log states=info --json");
    assert_eq!(changed["targets"]["states"], "info");
    until(|| {
        engine.connect();
        of("states").iter().any(|line| line["fields"]["event"] == "created")
    });
    for line in lines() {
        let words = ["time", "level", "target", "message"].map(|name| line[name].is_string());
        assert_eq!(words, [true; 4], "{line}");
    }
    let packet = &of("packets")[0];
    let fields = &packet["fields"];
    assert_eq!(
        (&packet["level"], &fields["rule"], &fields["action"]),
        (&"info".into(), &100.into(), &"Accept".into())
    );
    let to = engine.at;
    assert_eq!((&fields["dst"], &fields["dst_port"]), (&to.ip().to_string().into(), &to.port().into()));
    let end = &of("connections")[0];
    assert_eq!(
        (&end["fields"]["mux"], &end["fields"]["peer"]),
        (&"web".into(), &"127.0.0.1".into()),
        "{end}"
    );
    let created = of("states").into_iter().find(|line| line["fields"]["event"] == "created").unwrap();
    assert_eq!(created["fields"]["rule"], 100);
    assert_eq!(of("operator")[0]["message"], "levels of the log: info, states=info, towpath_=warning");
    engine.stop();
}

#[test]
fn levels_change_at_run_time_and_by_reload() {
    let engine =
        Engine::start("level = \"warning\"\ntargets = [\"packets=off\", \"operator=info\"]", &[], plain);
    let shown = || String::from_utf8(engine.control().ctl("log").stdout).unwrap();
    let levels = || {
        let text = shown();
        let rows = text.lines().filter_map(|line| line.rsplit_once(' '));
        rows.map(|(name, level)| (name.trim().to_owned(), level.to_owned())).collect::<BTreeMap<_, _>>()
    };
    let level = |target: &str| levels().get(target).cloned();
    assert_eq!(level("all other targets").as_deref(), Some("warning"), "{}", shown());
    assert_eq!(level("packets").as_deref(), Some("off"));
    assert!(!engine.log().contains("capabilities kept"), "a line of level info");
    engine.connect();
    until(|| engine.log().contains(" ended: "));
    assert!(!engine.log().contains("ipfw: "), "{}", engine.log());
    // All of a command, or nothing.
    let refused = engine.control().ctl("log packets=info debug states=loud");
    assert_eq!(refused.status.code(), Some(64));
    assert!(String::from_utf8_lossy(&refused.stderr).contains("`loud` is not a level"), "{refused:?}");
    assert_eq!(level("packets").as_deref(), Some("off"));
    assert!(engine.control().ctl("log packets=info").status.success());
    until(|| {
        engine.connect();
        engine.log().contains("ipfw: 100 Accept")
    });
    assert!(engine.control().ctl("log --reset towpath::control=trace").status.success());
    assert_eq!(
        (level("packets").as_deref(), level("towpath::control").as_deref()),
        (Some("off"), Some("trace"))
    );
    // A reload that does not change [log] leaves the levels; another one replaces them.
    engine.signal(Signal::HUP);
    until(|| engine.log().matches("reloaded: ").count() == 1);
    assert_eq!(level("towpath::control").as_deref(), Some("trace"));
    engine.write("level = \"error\"");
    engine.signal(Signal::HUP);
    until(|| level("all other targets").as_deref() == Some("error"));
    assert_eq!(level("towpath::control"), None);
    // The format is that of the start.
    engine.write("format = \"json\"");
    assert!(engine.control().ctl("log operator=info").status.success());
    engine.signal(Signal::HUP);
    until(|| engine.log().contains("not reloaded: `format` of [log] cannot change at run time"));
    engine.stop();
}

/// The fields of an entry in journald's native protocol.
fn fields(mut entry: &[u8]) -> BTreeMap<String, String> {
    let mut fields = BTreeMap::new();
    while let Some(end) = entry.iter().position(|byte| matches!(byte, b'=' | b'\n')) {
        let name = String::from_utf8(entry[..end].to_vec()).unwrap();
        let (from, length) = match entry[end] {
            b'=' => (end + 1, entry[end..].iter().position(|byte| *byte == b'\n').unwrap() - 1),
            _ => (end + 9, u64::from_le_bytes(entry[end + 1..end + 9].try_into().unwrap()) as usize),
        };
        fields.insert(name, String::from_utf8(entry[from..from + length].to_vec()).unwrap());
        entry = &entry[from + length + 1..];
    }
    fields
}

#[towpath_testenv::needs(root, "unshare")]
#[test]
fn under_systemd_lines_are_entries_of_journald() {
    let reader = std::cell::OnceCell::new();
    let engine = Engine::start("targets = \"packets=warning\"", &[], |directory, log| {
        // The socket of journald, as this test serves it, at its path in another mount namespace.
        let place = directory.join("journal");
        std::fs::create_dir(&place).unwrap();
        reader.set(UnixDatagram::bind(place.join("socket")).unwrap()).unwrap();
        let script = "mount -t tmpfs tmpfs /run && mkdir -p /run/systemd/journal && \
                      mount --bind \"$0\" /run/systemd/journal && exec \"$@\"";
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", script]).arg(place).arg(env!("CARGO_BIN_EXE_towpath"));
        let stat = rustix::fs::fstat(log).unwrap();
        command.env("JOURNAL_STREAM", format!("{}:{}", stat.st_dev, stat.st_ino));
        command
    });
    let reader = reader.get().unwrap();
    let entry = || {
        let mut bytes = vec![0; 1 << 16];
        let length = reader.recv(&mut bytes).unwrap();
        fields(&bytes[..length])
    };
    let listens =
        std::iter::repeat_with(entry).find(|entry| entry["MESSAGE"].contains("listens on")).unwrap();
    assert_eq!((&*listens["PRIORITY"], &*listens["SYSLOG_IDENTIFIER"]), ("6", "towpath"));
    assert_eq!(listens["TOWPATH_TARGET"], "towpath::daemon::mux_service");
    engine.connect();
    let end = std::iter::repeat_with(entry).find(|entry| entry["TOWPATH_TARGET"] == "connections").unwrap();
    assert_eq!((&*end["PRIORITY"], &*end["TOWPATH_PEER"]), ("4", "127.0.0.1"), "{end:?}");
    // Nothing of it is text on standard error.
    assert_eq!(engine.stop(), "");
}

#[test]
fn an_option_of_mux_sets_levels() {
    let wrong = Command::new(env!("CARGO_BIN_EXE_towpath"))
        .args(["mux", "127.0.0.1:0", "--framing", "line", "--worker", "true", "--log-level", "states=loud"])
        .output()
        .unwrap();
    assert_eq!(wrong.status.code(), Some(64));
    // The worker ends at once: the line is an error, and JSON.
    let failed = Command::new(env!("CARGO_BIN_EXE_towpath"))
        .args(["mux", "127.0.0.1:0", "--framing", "line", "--worker", "true", "--log-level", "off"])
        .args(["--log-format", "json"])
        .output()
        .unwrap();
    let said = String::from_utf8(failed.stderr).unwrap();
    let last: Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
    assert_eq!(last["level"], "error", "{said}");
    assert_eq!(failed.status.code(), Some(4), "{said}");
}
