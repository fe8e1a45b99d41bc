//! `towpath config`: the schema of the configuration file, and a new configuration.

use std::fs::{self, OpenOptions};
use std::io::{self, BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};

use clap::builder::ValueHint;
use clap::{Args, Parser, Subcommand, ValueEnum};
use towpath::config::Config;
use towpath::config::init::{self, Files, Kind, Question};
use towpath::config::schema;

use crate::args::exit;
use crate::cli::{answer, fail, say};

/// Write a new configuration of `towpath run`, or the schema of its file
#[derive(Debug, Parser)]
pub(crate) struct ConfigArgs {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Print the JSON schema of the configuration file
    ///
    /// Editors with a TOML language server complete and check a file with it: `#:schema ./towpath.schema.json` in its first line.
    /// `towpath run --check` finds more errors.
    Schema,
    Init(Box<Init>),
}

/// Write a new configuration with comments, and its rules
///
/// On a terminal, asks for each value that no option gives, and proposes one. Without a terminal, or with --yes, takes the proposed
/// values. Writes DIR/towpath.toml and DIR/towpath.ipfw, which `towpath run --check` accepts.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  towpath config init bridge --wan eth0 --lan eth1
  towpath config init router --dir /etc/towpath
  towpath config init nfqueue --queue 5 --yes")]
struct Init {
    /// What the configuration is for
    kind: KindArg,

    /// The directory of both files
    #[arg(long, value_name = "DIR", default_value = ".", value_hint = ValueHint::DirPath)]
    dir: PathBuf,

    /// The control socket of the engine
    #[arg(long, value_name = "PATH", default_value = "/run/towpath/control.sock")]
    control: String,

    /// Ask nothing
    #[arg(long, short = 'y')]
    yes: bool,

    /// Replace existing files
    #[arg(long)]
    force: bool,

    /// Interface of the uplink
    #[arg(long, value_name = "INTERFACE")]
    wan: Option<String>,

    /// Interface of the local network
    #[arg(long, value_name = "INTERFACE")]
    lan: Option<String>,

    /// Driver of the interfaces: af_packet or af_xdp
    #[arg(long, value_name = "DRIVER")]
    driver: Option<String>,

    /// Address of the router on the uplink
    #[arg(long, value_name = "ADDRESS")]
    wan_address: Option<String>,

    /// Router of the provider on the uplink
    #[arg(long, value_name = "ADDRESS")]
    gateway: Option<String>,

    /// Address of the router in the local network
    #[arg(long, value_name = "ADDRESS")]
    lan_address: Option<String>,

    /// Prefix of the local network
    #[arg(long, value_name = "PREFIX")]
    network: Option<String>,

    /// Name of the TUN device
    #[arg(long, value_name = "NAME")]
    tun: Option<String>,

    /// Queue number of the rule in iptables or nftables
    #[arg(long, value_name = "N")]
    queue: Option<String>,

    /// Address of the message server: HOST:PORT or unix:PATH
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,

    /// Framing of the messages
    #[arg(long, value_name = "FRAMING")]
    framing: Option<String>,

    /// Command of a worker process
    #[arg(long, value_name = "COMMAND")]
    worker: Option<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum KindArg {
    /// Two interfaces, one link
    Bridge,
    /// A router between two interfaces
    Router,
    /// A queue of the kernel's NFQUEUE
    Nfqueue,
    /// A router between a TUN device of this machine and an interface
    Tun,
    /// A message server with worker processes
    Mux,
}

impl From<KindArg> for Kind {
    fn from(kind: KindArg) -> Self {
        match kind {
            KindArg::Bridge => Self::Bridge,
            KindArg::Router => Self::Router,
            KindArg::Nfqueue => Self::Nfqueue,
            KindArg::Tun => Self::Tun,
            KindArg::Mux => Self::Mux,
        }
    }
}

impl Init {
    /// The options that answer questions.
    fn options(&self) -> [(&'static str, Option<&String>); 12] {
        [
            ("wan", self.wan.as_ref()),
            ("lan", self.lan.as_ref()),
            ("driver", self.driver.as_ref()),
            ("wan-address", self.wan_address.as_ref()),
            ("gateway", self.gateway.as_ref()),
            ("lan-address", self.lan_address.as_ref()),
            ("network", self.network.as_ref()),
            ("tun", self.tun.as_ref()),
            ("queue", self.queue.as_ref()),
            ("listen", self.listen.as_ref()),
            ("framing", self.framing.as_ref()),
            ("worker", self.worker.as_ref()),
        ]
    }
}

pub(crate) fn run(args: &ConfigArgs) -> u8 {
    match &args.command {
        Command::Schema => answer(exit::OK, &format!("{:#}\n", schema::schema())),
        Command::Init(init) => match write(init) {
            Ok(text) => answer(exit::OK, &text),
            Err((code, message)) => fail(code, message),
        },
    }
}

type Failure = (u8, String);

fn write(args: &Init) -> Result<String, Failure> {
    let kind = Kind::from(args.kind);
    let answers = answers(args, kind)?;
    let (config, rules) = (args.dir.join("towpath.toml"), args.dir.join("towpath.ipfw"));
    let find = |name: &str| {
        let found = answers.iter().find(|(own, _)| *own == name);
        found.map(|(_, answer)| answer.clone()).unwrap_or_default()
    };
    let files = init::files(kind, find, "towpath.ipfw", &args.control);
    check(&config, &files)?;
    fs::create_dir_all(&args.dir).map_err(|error| failed(&args.dir, &error))?;
    if !args.force
        && let Some(path) = [&config, &rules].into_iter().find(|path| path.exists())
    {
        return Err((exit::FAILED, format!("{} exists; --force replaces it", path.display())));
    }
    for (path, text) in [(&rules, &files.rules), (&config, &files.config)] {
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true);
        if !args.force {
            options.create_new(true);
        }
        let written = options.open(path).and_then(|mut file| file.write_all(text.as_bytes()));
        written.map_err(|error| failed(path, &error))?;
    }
    let (config, rules) = (config.display(), rules.display());
    Ok(format!("wrote {config} and {rules}\ncheck: towpath run --check {config}\n"))
}

fn failed(path: &Path, error: &io::Error) -> Failure {
    (exit::FAILED, format!("{}: {error}", path.display()))
}

/// Checks the files before they are written.
fn check(path: &Path, files: &Files) -> Result<(), Failure> {
    let config = Config::parse(&path.display().to_string(), &files.config);
    let errors = match config {
        Ok(config) => config.parse_rules("towpath.ipfw", &files.rules).err(),
        Err(errors) => Some(errors),
    };
    match errors.as_ref().and_then(|errors| errors.first()) {
        Some(error) => Err((exit::USAGE, format!("nothing is written: {error}"))),
        None => Ok(()),
    }
}

/// The answers to the questions: of the options, of the terminal, or as proposed.
fn answers(args: &Init, kind: Kind) -> Result<Vec<(&'static str, String)>, Failure> {
    let questions = kind.questions();
    for (name, value) in args.options() {
        if value.is_some() && !questions.iter().any(|question| question.name == name) {
            return Err((exit::USAGE, format!("--{name} is for other configurations than this one")));
        }
    }
    let asks = !args.yes && io::stdin().is_terminal() && io::stderr().is_terminal();
    let answer = |question: &Question| {
        let option =
            args.options().into_iter().find(|(name, _)| *name == question.name).and_then(|(_, value)| value);
        let answer = match option {
            Some(answer) => {
                question
                    .check(answer)
                    .map_err(|error| (exit::USAGE, format!("--{}: {error}", question.name)))?;
                answer.clone()
            }
            None if asks => ask(question)?,
            None => question.default.to_owned(),
        };
        Ok((question.name, answer))
    };
    questions.iter().map(answer).collect()
}

/// Asks until the answer is one.
fn ask(question: &Question) -> Result<String, Failure> {
    loop {
        // Not through the log: the cursor stays behind the question.
        let mut terminal = io::stderr().lock();
        let asked =
            write!(terminal, "{} [{}]: ", question.text, question.default).and_then(|()| terminal.flush());
        asked.map_err(|error| (exit::FAILED, format!("the terminal: {error}")))?;
        drop(terminal);
        let mut line = String::new();
        match io::stdin().lock().read_line(&mut line) {
            Ok(0) => return Err((exit::USAGE, "no answer; nothing is written".to_owned())),
            Ok(_) => {}
            Err(error) => return Err((exit::FAILED, format!("the terminal: {error}"))),
        }
        let answer = match line.trim() {
            "" => question.default,
            answer => answer,
        };
        match question.check(answer) {
            Ok(()) => return Ok(answer.to_owned()),
            Err(error) => say(error),
        }
    }
}
