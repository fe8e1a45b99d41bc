//! `towpath mux` with a Python worker of this directory, and its client.

use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, Command, Output, Stdio};
use std::thread::{self, JoinHandle};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

#[path = "../../../towpath-capi/tests/engine/mod.rs"]
mod engine;

/// The front; it is killed on drop.
pub(crate) struct Front {
    child: Child,
    /// The rest of its log.
    log: Option<JoinHandle<String>>,
    pub(crate) port: String,
    /// The module `towpath`, and the files of the workers.
    directory: TempDir,
}

impl Front {
    /// Starts workers `NAME_server.py`. The word DIRECTORY of their arguments is replaced by a directory for their files.
    pub(crate) fn start(name: &str, arguments: &str, options: &str) -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let built = std::env::current_exe().expect("this test").with_file_name("libtowpath_py.so");
        symlink(built, directory.path().join("towpath.abi3.so")).expect("a link");
        let arguments = arguments.replace("DIRECTORY", &directory.path().display().to_string());
        let worker = format!("python3 -B {} {arguments}", file(&format!("{name}_server.py")).display());
        let mut child = engine::towpath()
            .args(["mux", "127.0.0.1:0", "--json", "--drain", "120", "--worker", &worker, "--control"])
            .arg(directory.path().join("control"))
            .args(options.split_whitespace())
            .env("PYTHONPATH", directory.path())
            // `python3` is that of the virtual environment, if there is one.
            .env("PATH", path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("towpath starts");
        let mut stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut line = String::new();
        stderr.read_line(&mut line).expect("a line");
        let port = line.trim().rsplit_once(':').unwrap_or_else(|| panic!("{line}")).1.to_owned();
        Self { child, log: Some(thread::spawn(move || rest(stderr))), port, directory }
    }

    /// A command of a client; `PORT` is replaced. A client that gets no answer is killed, so that the test fails instead of hanging.
    pub(crate) fn client(&self, words: &[&str]) -> Command {
        let mut command = Command::new("timeout");
        command.arg("90").args(words.iter().map(|word| word.replace("PORT", &self.port)));
        command.env("PATH", path()).current_dir(self.directory.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    /// Runs a client and returns its output. The client succeeds, and writes nothing to standard error.
    pub(crate) fn run(&self, words: &[&str]) -> String {
        printed(words, self.client(words).output().expect("timeout starts"))
    }

    /// As [`Front::run`]; `input` is the client's standard input.
    pub(crate) fn run_with(&self, input: &[u8], words: &[&str]) -> String {
        printed(words, self.fed(input, words))
    }

    /// Output of a client whose standard input is `input`.
    pub(crate) fn fed(&self, input: &[u8], words: &[&str]) -> Output {
        let path = self.file("input", input);
        let mut client = self.client(words);
        client.stdin(std::fs::File::open(path).expect("a file")).output().expect("timeout starts")
    }

    fn show(&self) -> String {
        let mut ctl = engine::towpath();
        ctl.arg("ctl")
            .arg("--socket")
            .arg(self.directory.path().join("control"))
            .args(["show", "mux", "--json"]);
        printed(&["ctl"], ctl.output().expect("towpath starts"))
    }

    /// Writes a file in the directory in which clients run.
    pub(crate) fn file(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.directory.path().join(name);
        std::fs::write(&path, content).expect("a file");
        path
    }

    /// Runs `NAME_client.py`, which checks the answers and prints `ok`.
    pub(crate) fn python(&self, name: &str) {
        let script = file(&format!("{name}_client.py"));
        assert_eq!(self.run(&["python3", "-B", script.to_str().expect("UTF-8"), "PORT"]), "ok\n");
    }

    /// Drains the front, and checks that it has nothing to report: no message was lost, and no worker or connection failed. Returns the
    /// numbers of connections and messages.
    pub(crate) fn finish(mut self) -> (u64, u64) {
        // The last messages and the end of a client may follow its exit; draining at once would not read them.
        while !self.show().contains(r#""psocks":[]"#) {
            thread::yield_now();
        }
        let pid = Pid::from_child(&self.child);
        kill_process(pid, Signal::TERM).expect("a signal");
        let mut report = String::new();
        self.child.stdout.take().expect("a pipe").read_to_string(&mut report).expect("a report");
        let code = self.child.wait().expect("its end").code();
        let log = self.log.take().expect("its log").join().expect("it does not panic");
        let number = |name: &str| -> u64 {
            let (_, rest) = report.split_once(&format!("\"{name}\":")).unwrap_or_else(|| panic!("{report}"));
            let end = rest.find(|letter: char| !letter.is_ascii_digit()).expect("a value");
            rest[..end].parse().unwrap_or_else(|_| panic!("{name}: {report}"))
        };
        let all = format!("{report}\n{log}");
        assert_eq!(code, Some(0), "{all}");
        for name in ["given_up", "discarded", "not_begun", "given_again", "unsent", "restarts", "cut"] {
            assert_eq!(number(name), 0, "{name}: {all}");
        }
        assert_eq!(number("messages"), number("done"), "{all}");
        for line in log.lines() {
            let expected = ["attached", "draining", "closed by a worker", "messages: "];
            assert!(expected.iter().any(|text| line.contains(text)), "{line}\n{all}");
        }
        (number("connections"), number("messages"))
    }
}

impl Drop for Front {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn rest(mut stderr: BufReader<ChildStderr>) -> String {
    let mut text = String::new();
    stderr.read_to_string(&mut text).expect("text");
    text
}

fn printed(words: &[&str], output: Output) -> String {
    let (text, errors) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && errors.is_empty(), "{words:?}: {}\n{text}\n{errors}", output.status);
    text.into_owned()
}

/// `PATH` with the virtual environment of `.ci/run programs` first, where it exists.
fn path() -> String {
    let path = std::env::var("PATH").unwrap_or_default();
    format!("{}/bin:{path}", towpath_testenv::clients!())
}

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/clients").join(name)
}
