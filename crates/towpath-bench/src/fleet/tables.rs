//! Two gates in this process whose table comes from their group.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use tempfile::TempDir;
use towpath::config::Config;
use towpath::control::EndpointCounters;
use towpath::fleet::group::{GroupCommand, GroupRules, GroupThread};
use towpath::ruleset_manager::RulesetManager;
use towpath_gate::rules::Ruleset;
use towpath_gate::{Gate, Ports, state};

use super::server::Server;

const RULES: &str = "table blocked create type addr\nadd deny ip from table(blocked) to any\n";

/// Maximum time to join, and for entries to arrive.
const MOST: Duration = Duration::from_secs(120);

/// Entries whose way to the other gate is measured one by one.
const PROBES: u32 = 300;

struct Member {
    manager: Arc<RulesetManager>,
    shown: EndpointCounters,
    _thread: GroupThread,
    _files: TempDir,
}

impl Member {
    fn start(server: &Server, gate: &str) -> Result<Self> {
        let files = TempDir::new().context("making a directory")?;
        let text = format!(
            "rules = \"r\"\nmonitor = \"p\"\n[port.p]\ndriver = \"tun\"\n[fleet]\nservers = \"nats://127.0.0.1:{}\"\n\
             group = \"bench\"\ngate = \"{gate}\"\nconfiguration = \"group\"\n",
            server.port
        );
        let file = files.path().join("t.toml").display().to_string();
        let config = Config::parse(&file, &text).map_err(|errors| anyhow!("{}", errors[0]))?;
        let ruleset = Ruleset::parse("bench", RULES).ruleset.map_err(|errors| anyhow!("{}", errors[0]))?;
        let gate = Gate::new(ruleset.clone(), Ports::new(), state::Settings::default(), 1);
        let manager = Arc::new(RulesetManager::new(gate, ruleset, false));
        let rules = GroupRules::open(&config, &manager).context("no configuration of a group")?;
        let fleet = config.fleet.as_ref().context("no group")?;
        let shown = EndpointCounters::default();
        let thread = GroupThread::start(fleet, rules, shown.clone())?;
        Ok(Self { manager, shown, _thread: thread, _files: files })
    }

    fn until(&self, what: &str, holds: impl Fn(&Self) -> bool) -> Result<()> {
        let begun = Instant::now();
        while !holds(self) {
            ensure!(begun.elapsed() < MOST, "{what}: {:?}", self.shown.group());
            thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    fn entries(&self) -> usize {
        self.manager.tables().iter().map(|(_, _, entries)| entries).sum()
    }

    fn has(&self, key: &str) -> bool {
        matches!(self.manager.lookup("blocked", key), Some(Ok(Some(_))))
    }

    fn ask(&self, command: GroupCommand) -> Result<u64> {
        let desk = self.shown.group_desk().context("no group")?;
        desk.ask(command).context("too many changes")
    }

    fn finish(&self, number: u64) -> Result<()> {
        let desk = self.shown.group_desk().context("no group")?;
        self.until("a change does not end", |_| !matches!(desk.outcome(number), Ok(None)))?;
        match desk.outcome(number) {
            Ok(Some(Ok(_))) => Ok(()),
            other => bail!("{other:?}"),
        }
    }
}

fn pair() -> Result<(Member, Member, Server)> {
    let server = Server::start()?;
    let (one, two) = (Member::start(&server, "a")?, Member::start(&server, "b")?);
    for gate in [&one, &two] {
        gate.until("the tables are not open", |gate| {
            gate.shown.group().is_some_and(|view| view.tables.caught_up == 1 && view.stats.gates == 2)
        })?;
    }
    Ok((one, two, server))
}

/// Measures the time in seconds in which both gates have a list of `entries` entries.
pub(crate) fn load(entries: u32) -> Result<f64> {
    let (one, two, _server) = pair()?;
    let address = |at: u32| std::net::Ipv4Addr::from(0x0a00_0000 + at);
    let lines: String = (0..entries).map(|at| format!("{}\n", address(at))).collect();
    let begun = Instant::now();
    let number = one.ask(GroupCommand::Load { table: "blocked".to_owned(), lines })?;
    for gate in [&one, &two] {
        gate.until("entries are missing", |gate| gate.entries() == entries as usize)?;
    }
    let time = begun.elapsed().as_secs_f64();
    one.finish(number)?;
    Ok(time)
}

/// Measures the time in ms in which the other gate has one entry more. Returns the 99% quantile.
pub(crate) fn entry() -> Result<f64> {
    let (one, two, _server) = pair()?;
    let mut times = Vec::new();
    for at in 0..PROBES {
        let key = std::net::Ipv4Addr::from(0x0a00_0000 + at).to_string();
        let begun = Instant::now();
        let lines = format!("add {key}\n");
        let number = one.ask(GroupCommand::Change { table: "blocked".to_owned(), lines })?;
        two.until("an entry is missing", |gate| gate.has(&key))?;
        times.push(begun.elapsed().as_secs_f64() * 1e3);
        one.finish(number)?;
    }
    times.sort_by(f64::total_cmp);
    Ok(times[((times.len() - 1) as f64 * 0.99) as usize])
}
