//! Connections as workers see them: opened and ended events.
//!
//! What: the core gives an opened event to one worker, as a message without bytes (`towpath_mux::mux`, `opened.rs`). This table has the
//! addresses that are published with it, and the cause of the end until workers have done all messages of the connection. Then each
//! worker that got any of them gets an ended event.
//!
//! Invariants:
//! - Nothing is recorded before a worker asks for events.
//! - A worker gets *ended* after the last message of the connection, because all messages are done then.
//!
//! Bounds: one entry for each connection that is open or has messages, and in each process one pending ended event for each connection
//! that it got. A process with [`PENDING`] pending ended events gets no messages.

use std::collections::HashMap;
use std::sync::Arc;

use towpath_mux::io::{ConnectionInfo, Driver, Lifecycle};
use towpath_mux::mux::{Batch, Cause, psock};
use towpath_ring::{EndCause, EndedInfo, Kind, Meta, OpenedInfo};

use super::worker_slot::WorkerSlot;

/// Pending ended events of a process from which on it gets no messages.
pub(super) const PENDING: usize = 1024;

/// An ended event.
#[derive(Debug)]
pub(super) struct EndedEvent {
    pub(super) meta: Meta,
    pub(super) payload: Vec<u8>,
}

#[derive(Debug)]
struct Connection {
    info: Box<ConnectionInfo>,
    cause: Option<Cause>,
}

/// See the documentation of this module.
#[derive(Debug, Default)]
pub(super) struct Connections {
    on: bool,
    all: HashMap<psock::Id, Connection>,
}

impl Connections {
    /// Starts to record and report connections if a worker wants events.
    pub(super) fn report(&mut self, driver: &mut Driver, slots: &[WorkerSlot]) {
        if !self.on && slots.iter().any(WorkerSlot::wants_events) {
            self.on = true;
            driver.report_connections();
        }
    }

    /// Takes the changes from the driver. Queues ended events at the workers; returns true if there are any.
    pub(super) fn update(&mut self, driver: &mut Driver, slots: &mut [WorkerSlot]) -> bool {
        let mut any = false;
        if !self.on {
            return any;
        }
        while let Some(change) = driver.poll_lifecycle() {
            match change {
                Lifecycle::Opened(id, info) => drop(self.all.insert(id, Connection { info, cause: None })),
                Lifecycle::Ended(id, cause) => {
                    if let Some(connection) = self.all.get_mut(&id) {
                        connection.cause = Some(cause);
                    }
                }
                Lifecycle::Removed(id) => {
                    let cause = self.all.remove(&id).and_then(|connection| connection.cause);
                    let ended = Arc::new(EndedEvent::new(id, cause.as_ref(), super::epoch()));
                    slots.iter_mut().for_each(|slot| slot.handle_ended(id, &ended));
                    any = true;
                }
            }
        }
        any
    }

    /// Metadata and payload of an opened event.
    pub(super) fn opened(&self, event: &Batch, time: u64) -> (Meta, Vec<u8>) {
        let (port, group) = event.psock().parts();
        let resumed = event.views().next().is_some_and(|view| view.mark() != 0);
        let info = self.all.get(&event.psock()).map(|connection| (*connection.info).clone());
        let ConnectionInfo { peer, local, listener, tls, server_name, protocol, client_names, starttls } =
            info.unwrap_or_default();
        let info =
            OpenedInfo { resumed, tls, starttls, peer, local, listener, server_name, protocol, client_names };
        (Meta { kind: Kind::OPENED, time, port, group, mark: info.mark(), ..Meta::default() }, info.emit())
    }
}

impl EndedEvent {
    fn new(id: psock::Id, cause: Option<&Cause>, time: u64) -> Self {
        let (port, group) = id.parts();
        let info = cause.map_or_else(EndedInfo::default, info);
        let hash = info.errno.unsigned_abs();
        let meta =
            Meta { kind: Kind::ENDED, time, port, group, mark: info.cause.code(), hash, ..Meta::default() };
        Self { meta, payload: info.emit() }
    }
}

fn info(cause: &Cause) -> EndedInfo {
    let (bytes, length) = match cause {
        Cause::Inside { bytes, length } => (*bytes as u64, length.map(|length| length as u64)),
        _ => (0, None),
    };
    EndedInfo {
        cause: EndCause::from_name(cause.name()),
        errno: cause.errno(),
        bytes,
        length,
        text: cause.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use towpath_mux::framing;
    use towpath_mux::io::Server;
    use towpath_ring::Event;

    use super::super::authority::Rights;
    use super::super::completions::Completions;
    use super::super::worker_slot::tests::{ask, attach, learn};
    use super::*;

    #[test]
    fn each_cause_has_its_number_in_the_ring() {
        let framing =
            |cause| Cause::Framing(towpath_mux::assembler::Failure { offset: 0, cause, head: Vec::new() });
        let causes = [
            Cause::Clean,
            Cause::Inside { bytes: 1, length: None },
            Cause::Reset(104),
            Cause::Tls(String::new()),
            framing(framing::Cause::Program(5)),
            framing(framing::Cause::HeadTooBig { max: 1 }),
            framing(framing::Cause::Timeout { in_body: true }),
            Cause::GivenBack,
            Cause::Unattached,
            Cause::Drained,
            Cause::DrainTimeout,
            Cause::Descriptors,
            Cause::Idle,
            Cause::SendTimeout,
            Cause::SendFull,
            Cause::Memory,
            Cause::Closed,
            Cause::ResetByWorker,
            Cause::WorkerEnded,
        ];
        assert_eq!(causes.each_ref().map(|cause| info(cause).cause), EndCause::ALL);
    }

    #[test]
    fn ended_events_wait_for_room_and_none_is_lost() {
        const COUNT: usize = 200;
        let server = Server::new(
            "line".parse().unwrap(),
            towpath_mux::mux::Config::new(towpath_mux::mux::Order::None),
        )
        .unwrap();
        let mut driver = server.driver().unwrap();
        let directory = tempfile::tempdir().unwrap();
        let mut slot = WorkerSlot::new(0, directory.path(), Rights::default());
        let path = directory.path().join("worker-0-0.sock");
        let mut worker = attach(&mut slot, path, &mut driver, Instant::now());
        let (connections, mut completions) = (Connections::default(), Completions::default());
        let mut ids = Vec::new();
        driver.change(|mux, now| {
            learn(mux, now);
            (0..COUNT).for_each(|_| ask(mux, 1, now));
            ids.extend(mux.show().psocks.iter().map(|row| row.id));
            assert!(slot.fill(mux, now, COUNT));
        });
        slot.hand_over(&mut completions, &connections, 0, 0);
        for _ in 0..COUNT {
            let message = worker.recv().unwrap().unwrap();
            worker.done(message);
        }
        worker.queue().flush();
        assert!(slot.collect(&mut completions, 1, None));
        // The last one is of a connection that the worker did not receive.
        for id in ids.iter().copied().chain([psock::Id::from_parts(4_000_000, 1)]) {
            slot.handle_ended(id, &Arc::new(EndedEvent::new(id, Some(&Cause::Idle), 7)));
        }
        let mut ended = Vec::new();
        while ended.len() < COUNT {
            slot.hand_over(&mut completions, &connections, 1, 0);
            let before = ended.len();
            while let Some(event) = worker.try_recv_event().unwrap() {
                let Event::Ended(event) = event else { panic!("{event:?}") };
                assert_eq!((event.info.cause, event.info.errno, event.time), (EndCause::Idle, 110, 7));
                ended.push(psock::Id::from_parts(event.connection.index, event.connection.generation));
            }
            assert!(ended.len() > before, "no more events after {before}");
            worker.queue().flush();
            slot.collect(&mut completions, 1, None);
        }
        // The first one was served by another worker.
        assert_eq!(ended, ids[1..]);
        slot.hand_over(&mut completions, &connections, 1, 0);
        assert!(worker.try_recv_event().unwrap().is_none());
    }
}
