//! Reload of configuration and rules while packets flow: all of it is applied, or nothing.

use std::io;
use std::sync::mpsc::channel;
use std::time::Duration;

use towpath_gate::rules::{Diagnostic, Ruleset};

use super::super::inspector_sockets::Socket;
use super::super::mux_service::Service;
use super::super::privilege::Capabilities;
use super::super::worker_command::WorkerCommand;
use super::Supervisor;
use super::ruleset::{routes, settings};
use crate::config::{self, Config};
use crate::fleet::group::Held;
use crate::logging::{self, OPERATOR};
use crate::quantity::count;
use crate::sandbox;
use crate::service_manager::{RELOADED, notify, reloading};
use crate::snapshot::{self, Saving};
use towpath_engine::queue::DefaultVerdict;

/// Time that threads have to apply a step of a reload.
const SETTLE_TIMEOUT: Duration = Duration::from_secs(10);

impl Supervisor {
    /// Reads configuration and rules again and applies all of it or nothing.
    pub(super) fn reload(&mut self) {
        reloading();
        let group = self.group_rules.clone();
        // No version of the group is applied meanwhile.
        let mut held = group.as_ref().map(|group| group.hold());
        match self.read_again(held.as_deref()) {
            Ok((local, config, ruleset, bound)) => {
                if let Some(held) = &mut held {
                    held.set_local(local);
                }
                self.prepare(&config);
                if self.rechecking {
                    tracing::info!(
                        "reloaded before the previous re-check was complete: all states are re-checked against the new rules"
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
                if config.log.levels != self.config.log.levels {
                    logging::configure(config.log.levels.clone());
                }
                self.change(config, bound);
                self.services.iter().for_each(Service::reload_tls);
                self.count_reload(true);
                // Log after everything is applied: readers of this line may use the new configuration at once.
                tracing::info!(
                    target: OPERATOR,
                    "reloaded: {} added, {} removed, {} kept; {} dropped",
                    count(diff.added.len() as u64, "rule"),
                    diff.removed.len(),
                    diff.kept,
                    count(diff.states_dropped as u64, "state")
                );
                notify(&format!("{RELOADED}\nSTATUS={}", self.summary()));
            }
            Err(reasons) => {
                self.count_reload(false);
                let first = reasons.first().map_or("", |reason| reason.lines().next().unwrap_or_default());
                notify(&format!("{RELOADED}\nSTATUS=not reloaded: {first}"));
                for reason in reasons {
                    tracing::warn!(target: OPERATOR, "not reloaded: {reason}");
                }
            }
        }
    }

    fn count_reload(&self, applied: bool) {
        self.counters.update(|servers| {
            let reloads = &mut servers.reloads;
            *(if applied { &mut reloads.applied } else { &mut reloads.refused }) += 1;
            reloads.last_refused = u64::from(!applied);
        });
    }

    /// Sends the threads the changes that must precede the new rules. Changes that must follow them are made by
    /// [`change`](Self::change). No packet is therefore dropped because of the order of the changes.
    fn prepare(&self, config: &Config) {
        let Self { config: before, services, .. } = self;
        for queue in &config.queues {
            if lenient(before, queue) {
                self.say(&|| WorkerCommand::Queue(queue.number, queue.policy.clone()));
            }
        }
        if config.unserved != before.unserved && config.unserved == DefaultVerdict::Pass {
            self.say(&|| WorkerCommand::Unserved(config.unserved));
            services.iter().for_each(|service| service.set_unserved(config.unserved));
        }
        self.settle();
    }

    fn say(&self, command: &dyn Fn() -> WorkerCommand) {
        self.workers.iter().for_each(|worker| worker.say(command()));
    }

    /// Waits until the threads have executed the commands or ended, up to the timeout.
    fn settle(&self) {
        let (done, settled) = channel();
        self.say(&|| WorkerCommand::Settle(done.clone()));
        drop(done);
        // No message ever arrives: the call returns when the last sender is dropped.
        let _ = settled.recv_timeout(SETTLE_TIMEOUT);
    }

    /// Applies the changes that do not depend on the rules.
    fn change(&mut self, config: Config, bound: Vec<Socket>) {
        let before = std::mem::replace(&mut self.config, config);
        if (&before.states, before.states_every) != (&self.config.states, self.config.states_every) {
            // The old thread ends before its file is set aside: it would become outdated.
            if self.running.take().is_some()
                && let Some(path) = &before.states
            {
                snapshot::set_aside(path);
            }
            if let Err(error) = self.save_states() {
                tracing::warn!(
                    "states are not saved while the engine runs: no thread: {error}; reload again"
                );
            }
        }
        let Self { config, workers, sockets, services, .. } = self;
        sockets.extend(bound);
        let say =
            |command: &dyn Fn() -> WorkerCommand| workers.iter().for_each(|worker| worker.say(command()));
        for queue in &config.queues {
            let old = before.queues.iter().find(|old| old.number == queue.number);
            if old == Some(queue) {
                continue;
            }
            tracing::info!("queue {}: {}", queue.number, if old.is_some() { "changed" } else { "new" });
            if !lenient(&before, queue) {
                say(&|| WorkerCommand::Queue(queue.number, queue.policy.clone()));
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
        self.offer_upgrades();
    }

    /// Reads the files and binds the sockets of new queues.
    ///
    /// Returns this gate's own configuration, and the one with the keys and rules of its group.
    fn read_again(
        &self,
        group: Option<&Held>,
    ) -> Result<(Config, Config, Ruleset, Vec<Socket>), Vec<String>> {
        let lines = |found: Vec<Diagnostic>| explained(found.iter().map(ToString::to_string).collect());
        let mut config = Config::read(&self.config.file).map_err(lines)?;
        config.number_ports_as(&self.config);
        let fixed = self.config.fixed_differences(&config);
        if !fixed.is_empty() {
            let needed = match self.launcher {
                Some(_) => Capabilities::needed_in_use(&config),
                None => Capabilities::needed(&config),
            };
            let missing = self.kept.missing(needed);
            let why = match missing.is_empty() {
                true => String::new(),
                false => format!(" ({missing} was dropped at startup)"),
            };
            let line = |what| format!("{what} cannot change at run time{why}: restart the engine");
            return Err(fixed.iter().map(line).collect());
        }
        let lacking = |queue: &config::Queue| {
            let socket = self.sockets.iter().find(|socket| socket.queue == queue.number)?;
            let why = socket.lacks(&queue.inspectors)?;
            Some(format!(
                "queue {}: {why}, which cannot change at run time: restart the engine",
                queue.number
            ))
        };
        let lacking: Vec<String> = config.queues.iter().filter_map(lacking).collect();
        if !lacking.is_empty() {
            return Err(lacking);
        }
        if let Some(refused) = sandbox::refuses(&config) {
            return Err(vec![refused]);
        }
        let rules = config.read_rules().map_err(lines)?;
        let local = config.clone();
        let (config, rules) = match group.and_then(|group| group.over(&local)) {
            Some(over) => over.map_err(lines)?,
            None => (config, rules),
        };
        if let Some(path) = config.states.as_ref().filter(|_| config.states != self.config.states) {
            Saving::create(path).map_err(|error| vec![format!("states: {}: {error}", path.display())])?;
        }
        let is_new = |queue: &&config::Queue| !self.sockets.iter().any(|socket| socket.queue == queue.number);
        let bind = |queue| {
            Socket::bind(queue, self.workers.len().max(1), &self.starter, None, None)
                .map_err(|error| vec![error.to_string()])
        };
        let bound = config.queues.iter().filter(is_new).map(bind).collect::<Result<_, _>>()?;
        // Last: from now on the launcher starts the programs of this configuration only.
        if let Some(launcher) = &self.launcher {
            launcher.adopt(&config).map_err(|error| vec![error.to_string()])?;
        }
        rules.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        Ok((local, config, rules.ruleset, bound))
    }
}

/// Adds the remedy for files that the sandbox does not permit.
fn explained(mut lines: Vec<String>) -> Vec<String> {
    let denied = io::Error::from(rustix::io::Errno::ACCESS).to_string();
    if sandbox::restricts_files() && lines.iter().any(|line| line.contains(&denied)) {
        lines.push(sandbox::OUTSIDE.to_owned());
    }
    lines
}

/// Returns true if the queue is new or its default verdict changes from drop to pass: such a change precedes the new rules.
fn lenient(before: &Config, queue: &config::Queue) -> bool {
    let old = before.queues.iter().find(|old| old.number == queue.number);
    let verdict = queue.policy.default;
    old.is_none_or(|old| old.policy.default != verdict && verdict == DefaultVerdict::Pass)
}
