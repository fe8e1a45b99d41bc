//! The sequence of scenes and the expectations of each.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Resource, Rlimit, geteuid, getrlimit, setrlimit};
use serde_json::Value;
use towpath_port::namespace;

use super::attack::{Attack, WANTED};
use super::clients::Clients;
use super::digits::thousands;
use super::files::Files;
use super::network::{LIMIT, Network, STRANGERS, Way, rule};
use super::process::{PATIENCE, Process, ctl};
use super::results::{Engine, Results, Stopped};
use super::screen::Screen;
use super::status::Status;
use super::vs_kernel::{Comparison, Turns};
use super::{Driver, Failure, Options, Stop, file, inspect, messages, vs_kernel};

const PEOPLE: &str = "clients";
const SCAN: &str = "a port scan";
const FLOOD: &str = "a SYN flood";
const GREED: &str = "a source over its limit";
const INSPECTOR: &str = "an inspector reads lines";
const WORKERS: &str = "a worker is killed";
const FILE: &str = "a file is sent";
const KERNEL: &str = "compared with the kernel";
const SCENES: [&str; 8] = [PEOPLE, SCAN, FLOOD, GREED, INSPECTOR, WORKERS, FILE, KERNEL];

/// Duration of the demo with scenes of normal length, in seconds.
const USUAL: f64 = 20.0;

/// Shortest measurable turn.
const TURN: Duration = Duration::from_millis(75);

/// Descriptors that the demo needs, mostly for the scanner's sockets.
const DESCRIPTORS: u64 = 256;

/// Plays all scenes. Returns the results.
pub(super) fn play(options: &Options, screen: &Screen) -> Result<Results, Failure> {
    descriptors()?;
    let (root, place) = enter()?;
    let stop = Stop::on_signals()?;
    let status = screen.status(&SCENES);
    status.shown().place = place.to_owned();
    status.shown().hosts = true;
    screen.show(&status, || {
        let played = Stage::set(options, root, stop.clone(), status.clone()).and_then(Stage::play);
        played
            .map(|results| Results { place: place.to_owned(), ..results })
            .map_err(|failure| stop.explain(failure))
    })
}

/// Raises the descriptor limit if needed.
fn descriptors() -> Result<(), Failure> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let enough = |limit: Option<u64>| limit.is_none_or(|limit| limit >= DESCRIPTORS);
    if enough(current) {
        return Ok(());
    }
    // Root may raise the hard limit, too.
    let maximum = if enough(maximum) { maximum } else { Some(DESCRIPTORS) };
    setrlimit(Resource::Nofile, Rlimit { current: Some(DESCRIPTORS), maximum }).map_err(|_| {
        let limit = current.unwrap_or(DESCRIPTORS);
        Failure::Missing(format!(
            "the limit of open files is {limit}, but {DESCRIPTORS} are needed (ulimit -n)"
        ))
    })
}

/// Checks that namespaces are available. Returns whether the user is root, and a description of the place.
fn enter() -> Result<(bool, &'static str), Failure> {
    // On a separate thread, with which the namespace ends.
    let network = || std::thread::spawn(namespace::enter_network).join();
    if geteuid().is_root() && matches!(network(), Ok(Ok(()))) {
        return Ok((true, "as root, in network namespaces"));
    }
    let missing =
        |error| Failure::Missing(format!("cannot create namespaces: {error}; run the demo as root"));
    namespace::enter_user().map_err(missing)?;
    match network() {
        Ok(Ok(())) => Ok((false, "without root, in a user namespace and network namespaces")),
        Ok(Err(error)) => Err(missing(error)),
        Err(_) => Err(Failure::Broken("the namespace check panicked".into())),
    }
}

/// Starts the engine of all scenes. Returns its driver.
fn engine(
    network: &Network,
    asked: Option<Driver>,
    root: bool,
    stop: &Stop,
) -> Result<(Driver, Process), Failure> {
    let by = |driver| Ok((driver, network.engine(driver, stop)?));
    let engine = match asked {
        // A driver requested by the user has no fallback.
        Some(driver) => return by(driver),
        None if !root => by(Driver::AfPacket),
        // Without XDP sockets the engine fails at once.
        None => match by(Driver::AfXdp) {
            Err(Failure::Broken(_)) => by(Driver::AfPacket),
            engine => engine,
        },
    };
    engine.map_err(Failure::before_the_first_scene)
}

/// Everything that lives while the demo plays. Fields are dropped in order: the engine and the other processes first.
struct Stage {
    engine: Process,
    driver: Driver,
    root: bool,
    network: Network,
    stop: Stop,
    status: Status,
    /// Length of scenes; 1 is normal.
    unit: f64,
    watching: Watch,
    results: Results,
}

/// Stops the thread that polls the engine.
struct Watch(Arc<AtomicBool>, Option<std::thread::JoinHandle<()>>);

impl Drop for Watch {
    fn drop(&mut self) {
        // Relaxed: no other data depends on the flag.
        self.0.store(true, Ordering::Relaxed);
        // A panic of the thread has been shown on the screen.
        let _ = self.1.take().map(std::thread::JoinHandle::join);
    }
}

impl Stage {
    fn set(options: &Options, root: bool, stop: Stop, status: Status) -> Result<Self, Failure> {
        let network = Network::new(Files::new()?).map_err(Failure::before_the_first_scene)?;
        let (driver, engine) = engine(&network, options.driver, root, &stop)?;
        status.engine(Some(&network.engine_socket()));
        let over = Arc::new(AtomicBool::new(false));
        let watching = Watch(Arc::clone(&over), Some(status.watch(over)));
        let unit = options.length.as_secs_f64() / USUAL;
        let results = Results { driver: driver.word(), ..Results::default() };
        Ok(Self { engine, driver, root, network, stop, status, unit, watching, results })
    }

    /// Duration of a scene that normally takes `seconds`.
    fn units(&self, seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds * self.unit)
    }

    fn play(mut self) -> Result<Results, Failure> {
        self.status.play(PEOPLE);
        let people = Clients::start(&self.network)?;
        self.stop.pause(self.units(1.5))?;
        self.attack(&people)?;
        self.inspector()?;
        self.workers()?;
        self.file()?;
        self.end_clients(people);
        self.kernel()
    }

    fn attack(&mut self, people: &Clients) -> Result<(), Failure> {
        let mut attack = Attack::default();
        self.status.play(SCAN);
        attack.scan(&self.network, &self.stop)?;
        // The last packets may be in flight.
        let mut scan = 0;
        self.stop.until(PATIENCE, || {
            scan = self.rules()?.packets(rule::SCAN);
            Ok(scan >= attack.scanned)
        })?;
        let line = format!(
            "{} ports tried, {} open; rule {} stopped {}",
            attack.scanned,
            attack.open,
            rule::SCAN,
            thousands(scan)
        );
        self.close(SCAN, "the port scan finds nothing", attack.open == 0 && scan >= attack.scanned, line);
        self.stop.pause(self.units(0.3))?;

        self.status.play(FLOOD);
        let before = people.work();
        attack.flood(&self.network, &self.stop, self.units(2.0))?;
        self.stop.pause(self.units(0.3))?;
        let answered = people.work().answers - before.answers;
        let rules = self.rules()?;
        let (came, within) = (rules.packets(rule::FLOOD_KNOCKS), rules.packets(rule::FLOOD_LET_IN));
        let line = format!(
            "{} SYNs from forged addresses, rule {} admitted {within}; {} requests of clients answered",
            thousands(attack.flood),
            rule::FLOOD_LIMIT,
            thousands(answered),
        );
        let held = came > STRANGERS && within <= STRANGERS && answered > 0;
        self.close(FLOOD, "the limit stops the flood", held, line);

        self.status.play(GREED);
        let before = rules.packets(rule::KNOCKS) - rules.packets(rule::LET_IN);
        attack.grab(&self.network, &self.stop, PATIENCE)?;
        let mut stopped = 0;
        self.stop.until(PATIENCE, || {
            let rules = self.rules()?;
            stopped = rules.packets(rule::KNOCKS) - rules.packets(rule::LET_IN) - before;
            Ok(stopped >= WANTED - LIMIT)
        })?;
        let line = format!(
            "{WANTED} connections attempted, {} admitted; rule {} stopped {stopped}",
            attack.got,
            rule::LIMIT
        );
        self.close(
            GREED,
            "one source gets no more than its limit",
            attack.got == LIMIT && stopped >= WANTED - LIMIT,
            line,
        );
        self.results.attack = attack;
        Ok(())
    }

    fn inspector(&mut self) -> Result<(), Failure> {
        self.status.play(INSPECTOR);
        let lines = inspect::send(&self.network, &self.stop, self.units(1.5))?;
        let line = format!(
            "{} lines, {} with a secret; {} arrived, {} leaked",
            thousands(lines.sent),
            thousands(lines.secret),
            thousands(lines.arrived),
            lines.leaked
        );
        self.results.inspector = lines;
        let exact = lines.leaked == 0 && lines.arrived == lines.sent - lines.secret;
        self.close(INSPECTOR, "the inspector drops the secrets and nothing else", exact, line);
        Ok(())
    }

    fn workers(&mut self) -> Result<(), Failure> {
        self.status.play(WORKERS);
        let service = messages::ask(self.network.ends(), &self.stop, &self.status, self.units(3.0))?;
        let (well, line) = (service.well(), service.to_string());
        self.results.messages = service;
        self.close(WORKERS, "no message is lost when a worker dies", well, line);
        Ok(())
    }

    fn file(&mut self) -> Result<(), Failure> {
        self.status.play(FILE);
        let megabytes = (64.0 * self.unit).clamp(8.0, 512.0) as u64;
        let sent = file::send(self.network.ends(), &self.stop, megabytes)?;
        let (well, line) = (sent.well(), sent.to_string());
        self.results.file = sent;
        self.close(FILE, "the file arrives whole", well, line);
        Ok(())
    }

    /// Stops the clients and checks their results.
    fn end_clients(&mut self, people: Clients) {
        let work = people.end();
        let all = work.requests == work.answers && work.questions == work.replies && work.requests > 0;
        let line = format!(
            "{} requests, {} questions; {}; the slowest in {:.1} ms",
            thousands(work.requests),
            thousands(work.questions),
            if all { "all answered" } else { "NOT all answered" },
            work.slowest_us as f64 / 1e3
        );
        let trouble = work.trouble.clone().map_or_else(String::new, |trouble| format!(" ({trouble})"));
        let whole = all && work.trouble.is_none();
        self.results.people = work;
        self.close(PEOPLE, "clients are always answered", whole, line + &trouble);
    }

    fn kernel(mut self) -> Result<Results, Failure> {
        self.status.play(KERNEL);
        let Way { forwards, conntrack, queue } = self.network.way;
        for (there, what) in [
            (forwards, "the kernel's path: cannot enable forwarding (is /proc/sys read-only?)"),
            (conntrack || !forwards, "connection tracking on the kernel's path (install iptables)"),
            (queue || !forwards, "the kernel's NFQUEUE (install iptables)"),
        ] {
            if !there {
                self.results.left_out.push(what.into());
            }
        }
        self.status.quiet(true);
        let mut rows = Vec::new();
        let sinks = vs_kernel::sinks(&self.network)?;
        self.measure(&sinks, &mut rows)?;
        let (engine, stopped) = self.count("every packet is accounted for")?;
        self.results.stopped = stopped;
        self.results.engine = Some(engine);
        self.drain("the engine drains and ends")?;
        let other = self.driver.other();
        if other == Driver::AfXdp && !self.root {
            self.results.left_out.push("XDP sockets: they need root".into());
            return self.end(rows);
        }
        match self.network.engine(other, &self.stop) {
            Ok(engine) => {
                (self.engine, self.driver) = (engine, other);
                self.measure(&sinks, &mut rows)?;
                self.count("every packet of the second engine, too")?;
                self.drain("the second engine drains and ends")?;
            }
            Err(Failure::Broken(why)) => self.results.left_out.push(format!("{}: {why}", other.word())),
            Err(failure) => return Err(failure),
        }
        self.end(rows)
    }

    /// Measures the same traffic on both paths with the running engine.
    fn measure(&mut self, sinks: &Arc<vs_kernel::Sinks>, rows: &mut Vec<Comparison>) -> Result<(), Failure> {
        if !self.network.way.forwards {
            return Ok(());
        }
        let congestion = vs_kernel::congestion(&self.network)?;
        self.results.congestion = Some(congestion);
        let turns = Turns { driver: self.driver.word(), length: self.units(0.26).max(TURN), congestion };
        let status = self.status.clone();
        vs_kernel::measure(&self.network, &self.stop, sinks, turns, rows, |rows| {
            status.note(KERNEL, format!("by {}: {} kinds of traffic", turns.driver, rows.len()));
            status.shown().vs_kernel = rows.to_vec();
        })
    }

    /// Checks that the engine's counters add up, and lists the drops by rule.
    fn count(&mut self, name: &'static str) -> Result<(Engine, Vec<Stopped>), Failure> {
        let (mut engine, mut stopped) = (Engine::default(), Vec::new());
        // Packets in flight have arrived once no counter changes.
        let network = &self.network;
        self.stop.until(PATIENCE, || {
            let before = engine.packets;
            stopped = self.stopped()?;
            engine = network_stats(network)?;
            Ok(engine.packets == before && engine.waiting == 0)
        })?;
        engine.cpu_seconds = self.engine.cpu();
        let sum = engine.passed + engine.dropped + engine.rejected + engine.waiting;
        let saw = format!("{} packets in, {} accounted for", thousands(engine.packets), thousands(sum));
        self.results.expect(name, sum == engine.packets && engine.malformed == 0, saw);
        Ok((engine, stopped))
    }

    /// Lists all drops of the engine by cause.
    fn stopped(&self) -> Result<Vec<Stopped>, Failure> {
        let rules = self.rules()?;
        let queues = ctl(&self.network.engine_socket(), "show queues");
        let queues =
            queues.ok_or_else(|| Failure::Broken("the engine does not answer ctl show queues".into()))?;
        // Packets without a verdict are dropped, too: drop is the queue's default.
        let queue = |name: &str| queues["queues"][0][name].as_u64().unwrap_or(0);
        let row =
            |rule, what, knocks: u64, stopped| Stopped { rule, what, came: rules.packets(knocks), stopped };
        let all = |number, what| row(number, what, number, rules.packets(number));
        let over = |number, what, knocks, let_in| {
            row(number, what, knocks, rules.packets(knocks).saturating_sub(rules.packets(let_in)))
        };
        Ok(vec![
            all(rule::SCAN, "port scan"),
            over(rule::FLOOD_LIMIT, "SYN flood", rule::FLOOD_KNOCKS, rule::FLOOD_LET_IN),
            over(rule::LIMIT, "a source over its limit", rule::KNOCKS, rule::LET_IN),
            row(rule::INSPECT, "by the inspector", rule::INSPECT, queue("dropped") + queue("lost")),
            all(rule::STRAY, "belongs to no connection"),
            all(rule::ELSE, "everything else"),
            all(rule::DEFAULT, "the default rule"),
        ])
    }

    /// Stops the engine.
    fn drain(&mut self, name: &'static str) -> Result<(), Failure> {
        let status = self.engine.stop()?;
        self.results.expect(name, status.success(), status.to_string());
        Ok(())
    }

    fn end(mut self, rows: Vec<Comparison>) -> Result<Results, Failure> {
        let ours = || rows.iter().flat_map(|row| &row.ours);
        let measured = ours().all(|ours| ours.ratio.is_finite() && ours.ratio > 0.0);
        let line = format!("{} kinds of traffic measured on both paths", rows.len());
        self.results.vs_kernel = rows;
        self.close(KERNEL, "traffic passes on both paths", measured, line);
        self.status.engine(None);
        drop(self.watching);
        Ok(self.results)
    }

    fn close(&mut self, scene: &'static str, name: &'static str, met: bool, saw: String) {
        self.status.over(scene, met, saw.clone());
        self.results.expect(name, met, saw);
    }

    fn rules(&self) -> Result<Rules, Failure> {
        let shown = ctl(&self.network.engine_socket(), "show rules");
        shown.map(Rules).ok_or_else(|| Failure::Broken("the engine does not answer ctl show rules".into()))
    }
}

fn network_stats(network: &Network) -> Result<Engine, Failure> {
    let shown = ctl(&network.engine_socket(), "show stats");
    let shown = shown.ok_or_else(|| Failure::Broken("the engine does not answer ctl show stats".into()))?;
    Ok(Engine::told(&shown["stats"]))
}

/// Output of `towpath ctl show rules`.
struct Rules(Value);

impl Rules {
    fn packets(&self, number: u64) -> u64 {
        let rules = self.0["rules"].as_array().into_iter().flatten();
        let mut found = rules.filter(|rule| rule["number"] == number);
        found.next().and_then(|rule| rule["packets"].as_u64()).unwrap_or(0)
    }
}
