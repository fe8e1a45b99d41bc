//! The sequence of scenes and the expectations of each.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, Signal, geteuid, getrlimit, kill_process, setrlimit};
use serde_json::Value;
use towpath_port::namespace;

use super::attack::{Attack, WANTED, flood};
use super::clients::Clients;
use super::digits::thousands;
use super::files::Files;
use super::network::{LIMIT, Network, OTHERS_LIMIT, Way, rule};
use super::process::{PATIENCE, Process, ctl};
use super::results::{Engine, Results, Stopped};
use super::screen::Screen;
use super::status::Status;
use super::trace::Trace;
use super::vs_kernel::{Comparison, Turns};
use super::{Driver, Failure, Options, Stop, file, inspect, messages, vs_kernel};

const CLIENTS: &str = "clients";
const INSPECTOR: &str = "inspector killed";
const FLOOD: &str = "reload in a SYN flood";
const TRACE: &str = "live trace";
const SCAN: &str = "port scan";
const GREED: &str = "source over its limit";
const WORKERS: &str = "worker killed";
const FILE: &str = "file sent";
const KERNEL: &str = "the kernel's path";
/// The scenes in the order of the screen.
const SCENES: [&str; 9] = [CLIENTS, INSPECTOR, FLOOD, TRACE, SCAN, GREED, WORKERS, FILE, KERNEL];
/// The scenes that the kernel's forwarding has no equivalent of.
const BEYOND: [&str; 3] = [INSPECTOR, FLOOD, TRACE];

/// Reasons for which rules drop packets.
const BY_RULES: [&str; 2] = ["rule", "over_limit"];
/// Reasons for which a queue drops packets.
const BY_INSPECTION: [&str; 6] =
    ["inspector", "overdue", "invalid_verdict", "inspector_died", "queue_full", "no_inspector"];

/// Interval at which the user's keys are looked at.
const KEYS: Duration = Duration::from_millis(50);

/// Duration of the demo with scenes of normal length, in seconds.
const USUAL: f64 = 20.0;

/// Shortest measurable turn.
const TURN: Duration = Duration::from_millis(75);

/// Descriptors that the demo needs, mostly for the scanner's sockets.
const DESCRIPTORS: u64 = 256;

/// Plays all scenes. Returns the results.
pub(super) fn play(options: &Options, screen: &Screen) -> Result<Results, Failure> {
    descriptors(DESCRIPTORS)?;
    let (root, place) = enter()?;
    let stop = Stop::on_signals()?;
    let status = screen.status(&SCENES, &BEYOND);
    status.shown().place = place.to_owned();
    status.shown().hosts = true;
    screen.show(&status, &stop, || {
        let played = Stage::set(options, root, stop.clone(), status.clone()).and_then(Stage::play);
        played
            .map(|results| Results { place: place.to_owned(), ..results })
            .map_err(|failure| stop.explain(failure))
    })
}

/// Raises the descriptor limit to `wanted` if needed.
pub(super) fn descriptors(wanted: u64) -> Result<(), Failure> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let enough = |limit: Option<u64>| limit.is_none_or(|limit| limit >= wanted);
    if enough(current) {
        return Ok(());
    }
    // Root may raise the hard limit, too.
    let maximum = if enough(maximum) { maximum } else { Some(wanted) };
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }).map_err(|_| {
        let limit = current.unwrap_or(wanted);
        Failure::Missing(format!("the limit of open files is {limit}, but {wanted} are needed (ulimit -n)"))
    })
}

/// Checks that namespaces are available. Returns whether the user is root, and a description of the place.
pub(super) fn enter() -> Result<(bool, &'static str), Failure> {
    // On a separate thread, with which the namespace ends.
    let network = || std::thread::spawn(namespace::enter_network).join();
    if geteuid().is_root() && matches!(network(), Ok(Ok(()))) {
        return Ok((true, "as root"));
    }
    let missing =
        |error| Failure::Missing(format!("cannot create namespaces: {error}; run the demo as root"));
    namespace::enter_user().map_err(missing)?;
    match network() {
        Ok(Ok(())) => Ok((false, "without root")),
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
    /// The thread that carries out the user's keys.
    hands: Watch,
    results: Results,
}

/// A thread that ends with this value.
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
        let over = Arc::new(AtomicBool::new(false));
        let hands = Hands {
            status: status.clone(),
            stop: stop.clone(),
            over: Arc::clone(&over),
            engine: network.engine_socket(),
        };
        let hands = Watch(over, Some(network.outside.start(move || hands.run())));
        let unit = options.length.as_secs_f64() / USUAL;
        let results = Results { driver: driver.word(), ..Results::default() };
        Ok(Self { engine, driver, root, network, stop, status, unit, watching, hands, results })
    }

    /// Duration of a scene that normally takes `seconds`.
    fn units(&self, seconds: f64) -> Duration {
        Duration::from_secs_f64(seconds * self.unit)
    }

    fn play(mut self) -> Result<Results, Failure> {
        self.status.play(CLIENTS);
        let clients = Clients::start(&self.network)?;
        self.stop.pause(self.units(1.5))?;
        self.inspector()?;
        self.attack(&clients)?;
        self.workers()?;
        self.file()?;
        self.end_clients(clients);
        self.kernel()
    }

    fn attack(&mut self, clients: &Clients) -> Result<(), Failure> {
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
            "{} ports tried, {} open; rule {} dropped {}",
            attack.scanned,
            attack.open,
            rule::SCAN,
            thousands(scan)
        );
        self.close(SCAN, "the port scan finds nothing", attack.open == 0 && scan >= attack.scanned, line);
        self.stop.pause(self.units(0.3))?;

        self.flood(&mut attack, clients)?;
        self.limit(&mut attack)?;
        self.results.attack = attack;
        Ok(())
    }

    /// The rules are reloaded again and again while SYNs from forged addresses arrive.
    fn flood(&mut self, attack: &mut Attack, clients: &Clients) -> Result<(), Failure> {
        self.status.play(FLOOD);
        let before = (clients.work(), self.rules()?);
        let flood = Attack::flood(&self.network, &self.stop, self.units(2.0));
        let mut reloads = 0;
        while !flood.is_finished() {
            reloads += 1;
            self.network.change_rules(reloads)?;
            self.engine.signal(Signal::HUP);
            if !self.stop.until(PATIENCE, || Ok(self.rules()?.has(&format!("reload {reloads}"))))? {
                return Err(Failure::Broken("the engine does not reload its rules".into()));
            }
            self.status.say(format!("reload {reloads}: rules replaced, states kept"));
            self.stop.pause(self.units(0.1))?;
        }
        attack.flood = Attack::flooded(flood)?;
        self.stop.pause(self.units(0.3))?;
        let answered = clients.work().answers - before.0.answers;
        let rules = self.rules()?;
        let of = |number| rules.packets(number) - before.1.packets(number);
        let (came, within) = (of(rule::FLOOD_ATTEMPTS), of(rule::FLOOD_ADMITTED));
        let line = format!(
            "{} SYNs, {within} admitted; {reloads} reloads; {} answers",
            thousands(attack.flood),
            thousands(answered),
        );
        // Each flood that the user starts may use the limit again.
        let most = OTHERS_LIMIT * (1 + self.status.shown().floods);
        let held = came > OTHERS_LIMIT && within <= most && answered > 0 && reloads > 0;
        self.close(FLOOD, "the limit holds in a flood, during reloads", held, line);
        self.results.reloads = reloads;
        Ok(())
    }

    /// A source opens too many connections, and a trace shows the verdict for each of its packets.
    fn limit(&mut self, attack: &mut Attack) -> Result<(), Failure> {
        self.status.play(TRACE);
        let mut trace = Trace::start(&self.network)?;
        trace.wait(&self.stop)?;
        self.status.play(GREED);
        let over = |rules: &Rules| rules.packets(rule::ATTEMPTS) - rules.packets(rule::ADMITTED);
        let before = over(&self.rules()?);
        attack.exceed_limit(&self.network, &self.stop, PATIENCE)?;
        let mut stopped = 0;
        self.stop.until(PATIENCE, || {
            stopped = over(&self.rules()?) - before;
            Ok(stopped >= WANTED - LIMIT)
        })?;
        let line = format!(
            "{WANTED} connections tried, {} admitted; rule {} dropped {stopped}",
            attack.got,
            rule::LIMIT
        );
        self.close(
            GREED,
            "one source gets no more than its limit",
            attack.got == LIMIT && stopped >= WANTED - LIMIT,
            line,
        );
        let traced = trace.end(&self.stop, LIMIT)?;
        traced.last.iter().for_each(|line| self.status.say(line.clone()));
        let line = format!(
            "{} packets with verdict: {} passed, {} dropped",
            traced.packets, traced.passed, traced.dropped
        );
        let shown = traced.passed >= LIMIT && traced.dropped > 0;
        self.results.trace = traced;
        self.close(TRACE, "a live trace shows each verdict", shown, line);
        Ok(())
    }

    /// An inspector drops lines with a secret, and is killed meanwhile.
    fn inspector(&mut self) -> Result<(), Failure> {
        self.status.play(INSPECTOR);
        let (socket, status) = (self.network.engine_socket(), self.status.clone());
        let kill = || match kill_inspector(&socket) {
            Some(pid) => status.say(format!("inspector {pid} killed (SIGKILL)")),
            None => status.say("no inspector to kill".into()),
        };
        let lost = || lost_lines(&socket).unwrap_or(0);
        let lines = inspect::send(&self.network, &self.stop, self.units(1.5), kill, lost)?;
        let line = format!(
            "{} lines, {}/{} secrets leaked, back in {:.0} ms",
            thousands(lines.sent),
            lines.leaked,
            thousands(lines.secret),
            lines.outage_ms,
        );
        // A packet that the killed inspector held may be lost; one with a secret never passes.
        let whole = lines.arrived + lines.lost >= lines.sent - lines.secret;
        let exact = lines.leaked == 0 && whole && lines.arrived <= lines.sent - lines.secret;
        self.results.inspector = lines;
        self.close(INSPECTOR, "no secret passes while the inspector is killed", exact, line);
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
    fn end_clients(&mut self, clients: Clients) {
        let work = clients.end();
        let all = work.requests == work.answers && work.questions == work.replies && work.requests > 0;
        let line = format!(
            "{} requests, {} queries: {}",
            thousands(work.requests),
            thousands(work.questions),
            if all { "all answered" } else { "NOT all answered" },
        );
        let trouble = work.trouble.clone().map_or_else(String::new, |trouble| format!(" ({trouble})"));
        let whole = all && work.trouble.is_none();
        self.results.clients = work;
        self.close(CLIENTS, "clients are always answered", whole, line + &trouble);
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
        let machine = vs_kernel::Machine::look(&self.stop)?;
        self.status.shown().machine = machine.to_string();
        self.results.machine = Some(machine);
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
            engine = Engine::told(&stats(network)?);
            Ok(engine.packets == before && engine.waiting == 0)
        })?;
        engine.cpu_seconds = self.engine.cpu();
        let sum = engine.passed + engine.dropped + engine.rejected + engine.waiting;
        let listed: u64 = stopped.iter().map(|row| row.stopped).sum();
        let saw = format!(
            "{} packets in, {} accounted for; {} dropped, {} in the table",
            thousands(engine.packets),
            thousands(sum),
            thousands(engine.dropped),
            thousands(listed)
        );
        let whole = sum == engine.packets && listed == engine.dropped;
        self.results.expect(name, whole && engine.malformed == 0, saw);
        Ok((engine, stopped))
    }

    /// Lists all drops of the engine: by rule, by the inspector, and by every other reason that occurred.
    fn stopped(&self) -> Result<Vec<Stopped>, Failure> {
        let rules = self.rules()?;
        let stats = stats(&self.network)?;
        let dropped = |reason: &str| stats["dropped_by"][reason].as_u64().unwrap_or(0);
        let row = |rule, what, attempts: u64, stopped| Stopped {
            rule: Some(rule),
            what,
            came: rules.packets(attempts),
            stopped,
        };
        let all = |number, what| row(number, what, number, rules.packets(number));
        let over = |number, what, attempts, admitted| {
            row(number, what, attempts, rules.packets(attempts).saturating_sub(rules.packets(admitted)))
        };
        let inspected = BY_INSPECTION.into_iter().map(dropped).sum();
        let mut rows = vec![
            all(rule::SCAN, "port scan".to_owned()),
            over(rule::FLOOD_LIMIT, "SYN flood".to_owned(), rule::FLOOD_ATTEMPTS, rule::FLOOD_ADMITTED),
            over(rule::LIMIT, "a source over its limit".to_owned(), rule::ATTEMPTS, rule::ADMITTED),
            row(rule::INSPECT, "by the inspector".to_owned(), rule::INSPECT, inspected),
            all(rule::STRAY, "belongs to no connection".to_owned()),
            all(rule::ELSE, "everything else".to_owned()),
            all(rule::DEFAULT, "the default rule".to_owned()),
        ];
        // For example `tx_full`: in the comparison, datagrams are sent faster than a port takes them.
        let reasons = stats["dropped_by"].as_object().into_iter().flatten();
        let known = |name: &str| BY_RULES.contains(&name) || BY_INSPECTION.contains(&name);
        let others = reasons.filter(|(name, _)| !known(name));
        rows.extend(others.map(|(name, packets)| {
            let packets = packets.as_u64().unwrap_or(0);
            Stopped { rule: None, what: name.clone(), came: packets, stopped: packets }
        }));
        Ok(rows)
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
        drop((self.watching, self.hands));
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

/// The engine's counters.
fn stats(network: &Network) -> Result<Value, Failure> {
    let shown = ctl(&network.engine_socket(), "show stats");
    let mut shown =
        shown.ok_or_else(|| Failure::Broken("the engine does not answer ctl show stats".into()))?;
    Ok(shown["stats"].take())
}

/// Kills an inspector of the engine. Returns its process.
fn kill_inspector(engine: &Path) -> Option<i32> {
    let shown = ctl(engine, "show rings")?;
    let open = |ring: &&Value| ring["gone"].is_null();
    let ring = shown["rings"].as_array()?.iter().find(open)?;
    let pid = Pid::from_raw(i32::try_from(ring["pid"].as_u64()?).ok()?)?;
    kill_process(pid, Signal::KILL).ok()?;
    Some(pid.as_raw_nonzero().get())
}

/// The number of packets that the queue decided by default: those of an inspector that died.
fn lost_lines(engine: &Path) -> Option<u64> {
    ctl(engine, "show queues")?["queues"][0]["lost"].as_u64()
}

/// Carries out the user's keys on a thread of the outside host.
struct Hands {
    status: Status,
    stop: Stop,
    over: Arc<AtomicBool>,
    engine: PathBuf,
}

impl Hands {
    fn run(self) {
        // Relaxed: no other data depends on the flag.
        while !self.over.load(Ordering::Relaxed) {
            std::thread::sleep(KEYS);
            let asked = std::mem::take(&mut self.status.shown().asked_for);
            if asked.kill {
                match kill_inspector(&self.engine) {
                    Some(pid) => self.status.say(format!("key k: inspector {pid} killed")),
                    None => self.status.say("key k: no inspector runs now".into()),
                }
            }
            if asked.flood {
                self.status.shown().floods += 1;
                self.status.say("key f: a SYN flood of a second".into());
                match flood(&self.stop, Duration::from_secs(1)) {
                    Ok(sent) => self.status.say(format!("key f: {} SYNs sent", thousands(sent))),
                    Err(error) => self.status.say(format!("key f: {error}")),
                }
            }
        }
    }
}

/// Output of `towpath ctl show rules`.
struct Rules(Value);

impl Rules {
    /// Returns true if a rule has this comment.
    fn has(&self, comment: &str) -> bool {
        let rules = self.0["rules"].as_array().into_iter().flatten();
        let mut comments = rules.filter_map(|rule| rule["text"].as_str()?.split_once(" // "));
        comments.any(|(_, other)| other == comment)
    }

    fn packets(&self, number: u64) -> u64 {
        let rules = self.0["rules"].as_array().into_iter().flatten();
        let mut found = rules.filter(|rule| rule["number"] == number);
        found.next().and_then(|rule| rule["packets"].as_u64()).unwrap_or(0)
    }
}
