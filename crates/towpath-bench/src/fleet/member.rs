//! Gates of a group in this process, without ports: their states come from walks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use towpath::config;
use towpath::control::EndpointCounters;
use towpath::fleet::{Fleet, FleetView};
use towpath::ruleset_manager::RulesetManager;
use towpath_gate::Walker;
use towpath_wire::Time;

use super::packets::{self, START};
use super::server::Server;

/// Maximum time for the gates to be in step without states.
const JOIN: Duration = Duration::from_secs(30);

/// Flows from here on are those of probes.
const PROBES: u32 = 0xf000_0000;

/// Time between two probes.
const GAP: Duration = Duration::from_millis(5);

/// Maximum time of a probe.
const LOST: Duration = Duration::from_secs(10);

struct Member {
    manager: Arc<RulesetManager>,
    shown: EndpointCounters,
    fleet: Option<Fleet>,
}

impl Member {
    fn new(states: u32) -> Result<(Self, [Walker; 2])> {
        let (manager, walkers) = packets::manager(states)?;
        Ok((Self { manager, shown: EndpointCounters::default(), fleet: None }, walkers))
    }

    fn join(&mut self, server: &Server, gate: &str) -> Result<()> {
        let config = config::Fleet {
            servers: vec![format!("nats://127.0.0.1:{}", server.port)],
            group: Some("bench".to_owned()),
            gate: gate.to_owned(),
            credentials: None,
            tls_ca: None,
            tls_identity: None,
            tls: false,
            all: false,
            window: Duration::from_millis(10),
            configuration: None,
        };
        self.fleet = Some(Fleet::start(&config, &self.manager, self.shown.clone())?);
        Ok(())
    }

    fn view(&self) -> Result<FleetView> {
        self.shown.fleet().context("the gate has no group")
    }

    /// Waits until the gate is in step with this many peers.
    fn in_step(&self, peers: usize, most: Duration) -> Result<()> {
        let begun = Instant::now();
        loop {
            let view = self.view()?;
            if view.stats.in_step == 1 && view.peers.len() == peers {
                return Ok(());
            }
            ensure!(begun.elapsed() < most, "not in step: {view:?}");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Two gates in step, with the walkers of both.
struct Pair {
    one: Member,
    two: Member,
    walkers: [[Walker; 2]; 2],
    begun: Instant,
    _server: Server,
}

impl Pair {
    fn new(states: u32) -> Result<Self> {
        let server = Server::start()?;
        let ((mut one, first), (mut two, second)) = (Member::new(states)?, Member::new(states)?);
        one.join(&server, "a")?;
        two.join(&server, "b")?;
        one.in_step(1, JOIN)?;
        two.in_step(1, JOIN)?;
        Ok(Self { one, two, walkers: [first, second], begun: Instant::now(), _server: server })
    }
}

/// Sets the clock of a gate to the time since `begun`.
fn tick(manager: &RulesetManager, begun: Instant) -> Time {
    let now = START + begun.elapsed();
    manager.clock().set(now);
    now
}

/// Creates `rate` states a second until `stop` is set. Returns their number.
fn offer(
    walker: &mut Walker,
    manager: &RulesetManager,
    begun: Instant,
    rate: f64,
    stop: &AtomicBool,
) -> Result<u32> {
    let (from, mut made) = (Instant::now(), 0);
    // Relaxed: the flag guards no data.
    while !stop.load(Ordering::Relaxed) {
        let now = tick(manager, begun);
        let due = (rate * from.elapsed().as_secs_f64()) as u32;
        while made < due {
            packets::create(walker, made, now)?;
            made += 1;
        }
        walker.idle();
        thread::sleep(Duration::from_millis(1));
    }
    Ok(made)
}

/// Measures new states a second that the other gate has, while `rate` are created.
pub(crate) fn rate(rate: f64, time: Duration) -> Result<f64> {
    let Pair { one, two, walkers: [[mut walker, _other], _second], begun, _server } =
        Pair::new((rate * time.as_secs_f64() * 2.0) as u32)?;
    let stop = AtomicBool::new(false);
    let from = Instant::now();
    let made = thread::scope(|scope| {
        let creating = scope.spawn(|| offer(&mut walker, &one.manager, begun, rate, &stop));
        while from.elapsed() < time {
            tick(&two.manager, begun);
            thread::sleep(Duration::from_millis(1));
        }
        stop.store(true, Ordering::Relaxed);
        creating.join().map_err(|_| anyhow!("the thread that creates states panicked"))?
    })?;
    loop {
        let (there, elapsed) = (two.view()?.stats.created, from.elapsed());
        if there >= u64::from(made) || elapsed > time + LOST {
            let missed = one.view()?.stats.not_sent_missed;
            eprintln!(
                "{made} states were created, {there} are at the other gate; the thread missed {missed} changes"
            );
            return Ok(there as f64 / elapsed.as_secs_f64());
        }
        tick(&two.manager, begun);
        thread::sleep(Duration::from_millis(1));
    }
}

/// Measures the time in ms from the creation of a state until a packet at the other gate finds it, while `rate` others are created.
/// Returns the 99% quantile.
pub(crate) fn lag(rate: f64, time: Duration) -> Result<f64> {
    let Pair { one, two, walkers: [[mut walker, mut maker], [mut finder, _other]], begun, _server } =
        Pair::new((rate * time.as_secs_f64() * 2.0) as u32)?;
    let stop = AtomicBool::new(false);
    let mut times = thread::scope(|scope| {
        let creating = scope.spawn(|| offer(&mut walker, &one.manager, begun, rate, &stop));
        let mut probe = |n: u32| {
            packets::create(&mut maker, n, tick(&one.manager, begun))?;
            maker.idle();
            let made = Instant::now();
            loop {
                let found = packets::walk(&mut finder, n, true, tick(&two.manager, begun))?;
                finder.idle();
                if found {
                    return anyhow::Ok(made.elapsed().as_secs_f64() * 1e3);
                }
                ensure!(made.elapsed() < LOST, "a state did not arrive: {:?}", two.view()?);
                thread::sleep(Duration::from_micros(20));
            }
        };
        let (from, mut times, mut n) = (Instant::now(), Vec::new(), PROBES);
        let probed = loop {
            if from.elapsed() >= time {
                break Ok(());
            }
            match probe(n) {
                Ok(time) => times.push(time),
                Err(error) => break Err(error),
            }
            n += 1;
            thread::sleep(GAP);
        };
        stop.store(true, Ordering::Relaxed);
        creating.join().map_err(|_| anyhow!("the thread that creates states panicked"))??;
        probed.map(|()| times)
    })?;
    ensure!(!times.is_empty(), "no time for a probe");
    times.sort_by(f64::total_cmp);
    Ok(times[((times.len() - 1) as f64 * 0.99) as usize])
}

/// Measures the time in seconds in which a gate that joins has the `states` states of its peer.
pub(crate) fn bulk(states: u32) -> Result<f64> {
    let server = Server::start()?;
    let begun = Instant::now();
    let ((mut one, [mut walker, _other]), (mut two, _walkers)) = (Member::new(states)?, Member::new(states)?);
    (0..states).try_for_each(|n| packets::create(&mut walker, n, START))?;
    walker.idle();
    one.join(&server, "a")?;
    one.in_step(0, JOIN)?;
    // Its first walk sends all of them; no peer is there yet.
    let most = LOST + JOIN + Duration::from_micros(20) * states;
    let waiting = Instant::now();
    while one.view()?.stats.sent < u64::from(states) {
        ensure!(waiting.elapsed() < most, "the states were not sent: {:?}", one.view()?);
        tick(&one.manager, begun);
        thread::sleep(Duration::from_millis(10));
    }
    let joining = Instant::now();
    two.join(&server, "b")?;
    loop {
        tick(&one.manager, begun);
        tick(&two.manager, begun);
        let view = two.view()?;
        if view.stats.in_step == 1 && view.stats.created >= u64::from(states) {
            return Ok(joining.elapsed().as_secs_f64());
        }
        ensure!(joining.elapsed() < most, "the gate is not in step: {view:?}");
        thread::sleep(Duration::from_millis(1));
    }
}
