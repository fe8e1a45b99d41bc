//! Another configuration and other rules, while packets come: all of it is taken, or nothing.

use std::sync::mpsc::channel;
use std::time::Duration;

use towpath_gate::rules::{Diagnostic, Ruleset};

use super::super::inspector_sockets::Socket;
use super::super::privilege::Capabilities;
use super::super::worker_command::WorkerCommand;
use super::Supervisor;
use super::ruleset::{routes, settings};
use crate::config::{self, Config};
use crate::snapshot::Saving;
use towpath_engine::queue::DefaultVerdict;

/// How long threads have to do what a reload asks of them.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(10);

impl Supervisor {
    /// Reads the configuration and the rules again. All of it is taken, or nothing.
    pub(super) fn reload(&mut self) {
        match self.read_again() {
            Ok((config, ruleset, bound)) => {
                self.prepare(&config);
                if self.rechecking {
                    log::info!(
                        "reloaded again before all states were re-checked: all of them are, by these rules"
                    );
                }
                let settings = settings(&config);
                let routes = (config.routes != self.config.routes).then(|| routes(&config));
                let diff = self.ruleset.replace(
                    ruleset,
                    routes,
                    config.default_allow,
                    config.reload,
                    Some(settings),
                );
                self.rechecking = self.ruleset.rechecks().running;
                self.change(config, bound);
                // When all of it is so: who reads this line may attach by the new words at once.
                log::info!(
                    "reloaded: {} rules added, {} removed, {} kept; {} states dropped",
                    diff.added.len(),
                    diff.removed.len(),
                    diff.kept,
                    diff.states_dropped
                );
            }
            Err(reasons) => {
                for reason in reasons {
                    log::warn!("not reloaded: {reason}");
                }
            }
        }
    }

    /// Has the threads do whatever other rules may ask of them, before the first packet meets these; what is not asked of them
    /// any more goes on until [`change`](Self::change). So no packet is dropped for what is there by the one or the other.
    fn prepare(&self, config: &Config) {
        let Self { config: before, services, .. } = self;
        for queue in &config.queues {
            if lenient(before, queue) {
                self.say(&|| WorkerCommand::Queue(queue.number, queue.policy));
            }
        }
        if config.unserved != before.unserved && config.unserved == DefaultVerdict::Pass {
            self.say(&|| WorkerCommand::Unserved(config.unserved));
            services.iter().for_each(|service| service.set_unserved(config.unserved));
        }
        if config.routes != before.routes {
            self.say(&|| WorkerCommand::Routes(before.routes.clone(), config.routes.clone()));
        }
        self.settle();
    }

    fn say(&self, command: &dyn Fn() -> WorkerCommand) {
        self.workers.iter().for_each(|worker| worker.say(command()));
    }

    /// Waits until the threads have done what was said, and not for long: one that ends does nothing of it.
    fn settle(&self) {
        let (done, settled) = channel();
        self.say(&|| WorkerCommand::Settle(done.clone()));
        drop(done);
        // Nothing ever comes: it is over when the last of them has let go.
        let _ = settled.recv_timeout(SETTLE_TIMEOUT);
    }

    /// Takes what else can change while it runs.
    fn change(&mut self, config: Config, bound: Vec<Socket>) {
        let before = std::mem::replace(&mut self.config, config);
        let Self { config, workers, sockets, services, .. } = self;
        sockets.extend(bound);
        let say =
            |command: &dyn Fn() -> WorkerCommand| workers.iter().for_each(|worker| worker.say(command()));
        for queue in &config.queues {
            let old = before.queues.iter().find(|old| old.number == queue.number);
            if old == Some(queue) {
                continue;
            }
            log::info!("queue {}: {}", queue.number, if old.is_some() { "changed" } else { "new" });
            if !lenient(&before, queue) {
                say(&|| WorkerCommand::Queue(queue.number, queue.policy));
            }
            if let Some(socket) = sockets.iter_mut().find(|socket| socket.queue == queue.number) {
                socket.want(&queue.inspectors);
            }
        }
        if config.unserved != before.unserved {
            say(&|| WorkerCommand::Unserved(config.unserved));
            services.iter().for_each(|service| service.set_unserved(config.unserved));
        }
        if config.engine != before.engine {
            say(&|| WorkerCommand::Pace(config.engine.clone()));
        }
        if config.routes != before.routes {
            say(&|| WorkerCommand::Routes(config.routes.clone(), before.routes.clone()));
        }
    }

    /// The files as they are now, and the sockets of queues that are new.
    fn read_again(&self) -> Result<(Config, Ruleset, Vec<Socket>), Vec<String>> {
        let lines = |found: Vec<Diagnostic>| found.iter().map(ToString::to_string).collect::<Vec<_>>();
        let mut config = Config::read(&self.config.file).map_err(lines)?;
        config.number_ports_as(&self.config);
        let fixed = self.config.fixed_differences(&config);
        if !fixed.is_empty() {
            let missing = self.kept.missing(Capabilities::needed(&config));
            let why = match missing.is_empty() {
                true => String::new(),
                false => format!(" ({missing} was given up)"),
            };
            let line = |what| format!("{what} cannot change while it runs{why}: restart");
            return Err(fixed.iter().map(line).collect());
        }
        let cramped = |queue: &config::Queue| {
            let socket = self.sockets.iter().find(|socket| socket.queue == queue.number)?;
            let why = socket.lacks(&queue.inspectors)?;
            Some(format!("queue {}: {why}, which cannot change while it runs: restart", queue.number))
        };
        let cramped: Vec<String> = config.queues.iter().filter_map(cramped).collect();
        if !cramped.is_empty() {
            return Err(cramped);
        }
        let rules = config.read_rules().map_err(lines)?;
        if let Some(path) = config.states.as_ref().filter(|_| config.states != self.config.states) {
            Saving::create(path).map_err(|error| vec![format!("states: {}: {error}", path.display())])?;
        }
        let is_new = |queue: &&config::Queue| !self.sockets.iter().any(|socket| socket.queue == queue.number);
        let bind =
            |queue| Socket::bind(queue, self.workers.len().max(1)).map_err(|error| vec![error.to_string()]);
        let bound = config.queues.iter().filter(is_new).map(bind).collect::<Result<_, _>>()?;
        rules.warnings.iter().for_each(|warning| log::warn!("{warning}"));
        Ok((config, rules.ruleset, bound))
    }
}

/// Whether a queue is new, or lets pass what nobody decides where it did not: then it comes before the rules.
fn lenient(before: &Config, queue: &config::Queue) -> bool {
    let old = before.queues.iter().find(|old| old.number == queue.number);
    let verdict = queue.policy.default;
    old.is_none_or(|old| old.policy.default != verdict && verdict == DefaultVerdict::Pass)
}
