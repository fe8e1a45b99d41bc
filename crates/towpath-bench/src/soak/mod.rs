//! A running engine under everything that happens to it, for a long time: memory and descriptors stay, and every packet is accounted for.
//!
//! What: one engine forwards packets between ports of three drivers ([`engine`]), with two queues and a mux. In each round, rules are
//! reloaded, an inspector of each queue and a worker of the mux are killed, a capture is replayed and a file is sent. In the second half of
//! the time, each round also upgrades the engine. In the first half, one engine runs all the time, so that what it loses slowly is seen.
//!
//! Invariant, at the end and for each driver: packets that were sent = received by the port + lost at the port, by reason; packets of the
//! engine = passed + dropped, by reason + rejected; packets that the port sent = packets that arrived. Packets that an interface or socket
//! outside of the engine has dropped are counted there. Every request of the mux is answered once and in order, and no connection ends.

mod clients;
mod engine;
mod memory;
mod traffic;

use std::collections::BTreeMap;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde::Serialize;
use serde_json::Value;

use clients::{Client, Files, Inspector, kill};
use engine::{Engine, OWN_INSPECTORS, until};
use memory::{Sample, Series};
use traffic::{Ends, Traffic};

/// Time between two lines about the progress.
const PROGRESS: Duration = Duration::from_secs(60);
/// An inspector that ends younger than a second has ended early: the engine starts it again after a pause that doubles. Younger ones are not
/// killed.
const YOUNG: Duration = Duration::from_millis(1_100);
/// Connections to the mux.
const CLIENTS: usize = 4;

/// The result.
#[derive(Debug, Serialize)]
struct Report {
    seconds: f64,
    rounds: u64,
    reloads: u64,
    upgrades: u64,
    inspectors_killed: u64,
    workers_killed: u64,
    replayed: u64,
    sent_bytes: u64,
    requests: u64,
    packets: Vec<Packets>,
    /// Packets that the engines dropped, by reason.
    dropped: BTreeMap<String, u64>,
    /// The longest time without reception at an upgrade.
    longest_pause_ms: f64,
    memory: Vec<memory::Row>,
    /// Statements that did not hold.
    failures: Vec<String>,
}

/// The packets of a driver.
#[derive(Debug, Serialize)]
struct Packets {
    driver: &'static str,
    sent: u64,
    arrived: u64,
    /// Lost at the port that received, by reason.
    lost: BTreeMap<String, u64>,
    /// Dropped by interfaces or sockets outside of the engine.
    outside: u64,
}

/// Runs for `time` and prints the report. Returns true if everything held.
pub(crate) fn run(json: bool, time: Duration) -> Result<bool> {
    let mut soak = Soak::start()?;
    let result = soak.rounds(time);
    if result.is_err() {
        eprintln!("the end of the log: {}", soak.engine.log_end());
    }
    result?;
    let report = soak.finish()?;
    let text = report.text();
    if json {
        eprint!("{text}");
        println!("{}", serde_json::to_string_pretty(&report)?);
    } else {
        print!("{text}");
    }
    Ok(report.failures.is_empty())
}

struct Soak {
    begun: Instant,
    files: Files,
    traffic: Traffic,
    clients: Vec<Client>,
    inspectors: Vec<Inspector>,
    rounds: u64,
    upgrades: u64,
    workers_killed: u64,
    inspectors_killed: u64,
    /// When the engine's inspectors were last complete after one was killed.
    replaced: Instant,
    longest_pause: Duration,
    /// The first engine, those after an upgrade, and the launcher.
    series: [Series; 3],
    /// After the other fields: it stops last.
    engine: Engine,
}

impl Soak {
    fn start() -> Result<Self> {
        let engine = Engine::start()?;
        let files = Files::make(engine.directory())?;
        let inspectors =
            (0..OWN_INSPECTORS).map(|_| Inspector::start(&engine)).collect::<Result<Vec<_>>>()?;
        engine.complete()?;
        let traffic = Traffic::start(&engine)?;
        let clients = (0..CLIENTS).map(|_| Client::start(&engine)).collect::<Result<Vec<_>>>()?;
        Ok(Self {
            begun: Instant::now(),
            files,
            traffic,
            clients,
            inspectors,
            rounds: 0,
            upgrades: 0,
            workers_killed: 0,
            inspectors_killed: 0,
            replaced: Instant::now(),
            longest_pause: Duration::ZERO,
            series: Default::default(),
            engine,
        })
    }

    /// Rounds with one engine for half of the time, then rounds with upgrades, at least one.
    fn rounds(&mut self, time: Duration) -> Result<()> {
        let mut told = Instant::now();
        while self.begun.elapsed() < time || self.upgrades == 0 {
            self.rounds += 1;
            let upgrades = self.begun.elapsed() >= time / 2;
            self.round(upgrades).with_context(|| {
                format!("round {}, after {:.0} s", self.rounds, self.begun.elapsed().as_secs_f64())
            })?;
            if told.elapsed() >= PROGRESS {
                told = Instant::now();
                eprintln!(
                    "after {:.0} s: {} rounds, {} upgrades",
                    self.begun.elapsed().as_secs_f64(),
                    self.rounds,
                    self.upgrades
                );
            }
        }
        Ok(())
    }

    fn round(&mut self, upgrade: bool) -> Result<()> {
        self.engine.reload(self.rounds)?;
        self.kill_inspectors()?;
        self.kill_worker()?;
        self.files.replay()?;
        self.files.send(&self.engine)?;
        if upgrade {
            self.longest_pause = self.longest_pause.max(self.engine.upgrade()?);
            self.upgrades += 1;
        }
        self.engine.complete()?;
        self.traffic.goes_on()?;
        self.clients.iter().try_for_each(Client::goes_on)?;
        self.inspectors.iter_mut().try_for_each(Inspector::lives)?;
        let [engine, launcher] = self.engine.processes();
        self.series[usize::from(upgrade)].push(Sample::of(engine)?);
        self.series[2].push(Sample::of(launcher)?);
        Ok(())
    }

    /// Kills one of our inspectors, which we replace, and one of the engine's, which the engine replaces.
    fn kill_inspectors(&mut self) -> Result<()> {
        thread::sleep(YOUNG.saturating_sub(self.replaced.elapsed()));
        let at = self.rounds as usize % self.inspectors.len();
        kill(self.inspectors[at].pid().as_raw_nonzero().get())?;
        self.inspectors[at] = Inspector::start(&self.engine)?;
        let inspectors = self.engine.inspectors(2)?;
        kill(*inspectors.first().context("no inspector")?)?;
        self.inspectors_killed += 2;
        let killed = inspectors[0];
        until("a killed inspector is replaced", || Ok(!self.engine.inspectors(2)?.contains(&killed)))?;
        self.engine.complete()?;
        self.replaced = Instant::now();
        Ok(())
    }

    fn kill_worker(&mut self) -> Result<()> {
        let workers = self.engine.workers()?;
        let killed = workers[self.rounds as usize % workers.len()];
        kill(killed)?;
        self.workers_killed += 1;
        until("a killed worker is replaced", || Ok(!self.engine.workers()?.contains(&killed)))?;
        self.engine.complete()
    }

    /// Stops everything, and adds up.
    fn finish(mut self) -> Result<Report> {
        let mut failures = Vec::new();
        let mut requests = 0;
        for client in self.clients {
            match client.finish() {
                Ok(answered) => requests += answered,
                Err(error) => failures.push(format!("a connection of the mux: {error:#}")),
            }
        }
        let ends = self.traffic.finish()?;
        let seconds = self.begun.elapsed().as_secs_f64();
        // Before the engine: it would start no other ones, and they would report its end.
        let reports = self.engine.stop()?;
        drop(self.inspectors);
        let (packets, dropped) = conserved(&ends, &reports, &mut failures)?;
        let [first, later, launcher] = &self.series;
        let memory = vec![
            first.row("one engine", &mut failures),
            later.row("engines after an upgrade", &mut failures),
            launcher.row("the launcher", &mut failures),
        ];
        Ok(Report {
            seconds,
            rounds: self.rounds,
            reloads: self.rounds,
            upgrades: self.upgrades,
            inspectors_killed: self.inspectors_killed,
            workers_killed: self.workers_killed,
            replayed: self.rounds * clients::PACKETS,
            sent_bytes: self.rounds * clients::FILE as u64,
            requests,
            packets,
            dropped,
            longest_pause_ms: self.longest_pause.as_secs_f64() * 1e3,
            memory,
            failures,
        })
    }
}

/// Compares what was sent and has arrived with the reports of all engines.
fn conserved(
    ends: &[Ends],
    reports: &[Value],
    failures: &mut Vec<String>,
) -> Result<(Vec<Packets>, BTreeMap<String, u64>)> {
    let count =
        |object: &Value, name: &str| object[name].as_u64().with_context(|| format!("no {name}: {object}"));
    let sum = |name: &str| reports.iter().map(|report| count(report, name)).sum::<Result<u64>>();
    // The counters of ports continue at upgrades.
    let ports = reports.last().context("no report")?["ports"].as_array().context("no ports")?;
    let port =
        |name: &str| ports.iter().find(|port| port["name"] == name).with_context(|| format!("no {name}"));
    let mut check = |what: &str, left: u64, right: u64| {
        if left != right {
            failures.push(format!("{what}: {left} and {right}"));
        }
    };
    let (mut packets, mut received, mut sent) = (Vec::new(), 0, 0);
    for Ends { driver, ports: [from, to], sent: offered, arrived, outside, foreign } in ends {
        let (from, to) = (port(from)?, port(to)?);
        let lost = losses(&from["lost"]);
        let (into, out) = (count(from, "received")?, count(to, "sent")?);
        let missing =
            offered.saturating_sub(into + lost.values().sum::<u64>()) + out.saturating_sub(*arrived);
        check(
            &format!("{driver}: packets that are missing, and those that were dropped outside"),
            missing,
            *outside,
        );
        check(&format!("{driver}: packets of other senders, and none"), *foreign, 0);
        received += into;
        sent += out;
        packets.push(Packets { driver, sent: *offered, arrived: *arrived, lost, outside: *outside });
    }
    let outcomes = sum("passed")? + sum("dropped")? + sum("rejected")?;
    check("packets of the engines, and their outcomes", sum("packets")?, outcomes);
    check("packets of the engines, and of the ports that received", sum("packets")?, received);
    check("passed packets, and those of the ports that sent", sum("passed")?, sent);
    let mut dropped = BTreeMap::new();
    for (reason, number) in reports.iter().filter_map(|report| report["dropped_by"].as_object()).flatten() {
        *dropped.entry(reason.clone()).or_insert(0) += number.as_u64().unwrap_or(0);
    }
    Ok((packets, dropped))
}

/// The losses of a port, by reason.
fn losses(lost: &Value) -> BTreeMap<String, u64> {
    let rows = lost.as_array().into_iter().flatten();
    rows.filter_map(|row| Some((row[0].as_str()?.to_owned(), row[1].as_u64()?))).collect()
}

impl Report {
    fn text(&self) -> String {
        let words = |counts: &BTreeMap<String, u64>| match counts.len() {
            0 => "none".to_owned(),
            _ => counts
                .iter()
                .map(|(reason, count)| format!("{count} {reason}"))
                .collect::<Vec<_>>()
                .join(", "),
        };
        let mut text = format!(
            "{:.0} s, {} rounds: {} reloads, {} upgrades (longest pause {:.1} ms), {} inspectors and {} workers killed\n",
            self.seconds,
            self.rounds,
            self.reloads,
            self.upgrades,
            self.longest_pause_ms,
            self.inspectors_killed,
            self.workers_killed
        );
        text += &format!(
            "{} packets replayed, {} MiB sent, {} requests answered\n",
            self.replayed,
            self.sent_bytes >> 20,
            self.requests
        );
        for Packets { driver, sent, arrived, lost, outside } in &self.packets {
            text += &format!(
                "{driver:<10} {sent} sent, {arrived} arrived; lost at the port: {}; outside: {outside}\n",
                words(lost)
            );
        }
        text += &format!("dropped by the engines: {}\n", words(&self.dropped));
        for row in &self.memory {
            text += &format!("{}\n", row.text());
        }
        let held =
            if self.failures.is_empty() { "everything held".to_owned() } else { self.failures.join("\n") };
        text + &held + "\n"
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// One bridge: of 100 packets, one was lost at the port, 10 were dropped by a rule and 89 arrived.
    fn checked(change: impl FnOnce(&mut Ends, &mut Value)) -> Vec<String> {
        let mut ends = Ends {
            driver: "af_packet",
            ports: ["wan", "lan"],
            sent: 100,
            arrived: 89,
            outside: 0,
            foreign: 0,
        };
        let mut report = json!({
            "packets": 99, "passed": 89, "dropped": 10, "rejected": 0, "dropped_by": {"rule": 10},
            "ports": [
                {"name": "wan", "received": 99, "sent": 0, "lost": [["rx_full", 1]]},
                {"name": "lan", "received": 0, "sent": 89, "lost": []},
            ],
        });
        change(&mut ends, &mut report);
        let mut failures = Vec::new();
        conserved(&[ends], &[report], &mut failures).unwrap();
        failures
    }

    #[test]
    fn each_missing_packet_is_a_failure() {
        assert_eq!(checked(|_, _| {}), Vec::<String>::new());
        assert_eq!(checked(|ends, _| (ends.arrived, ends.outside) = (88, 1)), Vec::<String>::new());
        let rows: [fn(&mut Ends, &mut Value); 7] = [
            |ends, _| ends.arrived = 88,
            |ends, _| ends.sent = 101,
            |ends, _| ends.outside = 1,
            |ends, _| ends.foreign = 1,
            |_, report| report["ports"][0]["lost"] = json!([]),
            |_, report| report["dropped"] = json!(9),
            |_, report| (report["passed"], report["dropped"]) = (json!(90), json!(9)),
        ];
        for (number, change) in rows.into_iter().enumerate() {
            assert_eq!(checked(change).len(), 1, "row {number}");
        }
    }
}
