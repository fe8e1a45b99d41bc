//! Copies of a pool's state for `towpath ctl` and metrics.

use towpath_fleet::workers::HostView;
use towpath_metrics::Histogram;
use towpath_mux::mux::Mux;

use super::WorkerPool;
use super::completions::Completions;
use super::worker_slot::WorkerSlot;
use crate::control::WorkerPoolView;
use crate::control::commands::{show_mux, show_rings, show_send};
use crate::metrics::{COMPLETION_TIME, MESSAGE_WAIT, Samples};

impl WorkerPoolView for WorkerPool {
    fn rings(&self) -> Vec<show_rings::Ring> {
        let first = self.config.first_channel;
        let ring = |ring: show_rings::Ring| show_rings::Ring { channel: first + ring.channel, ..ring };
        self.slots.iter().filter_map(WorkerSlot::ring).map(ring).collect()
    }

    fn mux(&self) -> show_mux::Mux {
        let slots = &self.slots;
        let identity = |id| {
            let pid = slots.iter().find_map(|slot| slot.pid(id)).unwrap_or(0);
            (pid, slots.iter().find_map(|slot| slot.remote_name(id)))
        };
        let remote = self.config.remote.as_ref().and_then(|remote| remote.starter.remote_view());
        let held_by = |pid: &u32| slots.iter().map(|slot| slot.held_by(*pid)).sum::<usize>();
        let in_flight = |host: &HostView| host.slots.iter().map(held_by).sum::<usize>();
        let remote = remote.map(|view| show_mux::RemoteWorkers {
            in_flight: view.hosts.iter().map(in_flight).collect(),
            view,
        });
        let restarts = slots.iter().map(WorkerSlot::restarts).sum();
        let name = self.config.name.clone();
        let Completions { lost, violations, .. } = self.completions;
        let server = self.driver.server();
        let arrivals = server.accept_stats();
        let of = |core: &Mux| show_mux::Mux {
            name,
            lost,
            violations,
            arrivals,
            upgrade: self.upgrades.stats,
            remote,
            ..show_mux::Mux::of(core, restarts, identity)
        };
        server.look(of).with_peers(|psock| server.peer(psock))
    }

    fn send(&self) -> show_send::Send {
        self.zerocopy_tx.show(&self.config.name)
    }

    fn metrics(&self, samples: &mut Samples) {
        let name = if self.config.name.is_empty() { "mux" } else { &self.config.name };
        let server = self.driver.server();
        let show = server.look(Mux::show);
        samples.add(&[("mux", name)], &show.totals);
        samples.add(&[("mux", name)], &show.psock_totals);
        samples.add(&[("mux", name)], &server.accept_stats());
        samples.add(&[("mux", name)], &self.completions.lost);
        let mut wait = Histogram::default();
        server.look(|mux| {
            for value in mux.queue_wait().iter_recorded() {
                wait.add_many(value.value_iterated_to(), value.count_since_last_iteration());
            }
        });
        samples.add_histogram(&[("mux", name)], &MESSAGE_WAIT, &wait);
        let sends = self.zerocopy_tx.show(name).totals;
        samples.add(&[("mux", name)], &sends.counters);
        let mut completion = Histogram::default();
        for (at, count) in sends.distributions.pin_time.buckets().iter().enumerate() {
            // Each bucket has the microseconds below a power of two.
            completion.add_many(1000 << at, *count);
        }
        samples.add_histogram(&[("mux", name)], &COMPLETION_TIME, &completion);
        samples.add(&[("mux", name)], &self.completions.violations);
        if let Some(view) = self.config.remote.as_ref().and_then(|remote| remote.starter.remote_view()) {
            samples.add(&[("mux", name)], &view.stats);
        }
        samples.add(&[("mux", name)], &self.upgrades.stats);
    }
}
