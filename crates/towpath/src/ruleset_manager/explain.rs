//! The walks that a packet would take in a running engine.

use towpath_engine::ForwardMode;
use towpath_engine::offload::NoPath;
use towpath_gate::state::Foreseen;
use towpath_gate::{Dir, NoOffload, Obstacle, PacketSpec, PortId, Walk};
use towpath_wire::{End, Packet};

use super::RulesetManager;
use crate::explained::{Walked, way_out};

impl RulesetManager {
    /// Explains the walks that a packet would take now: on the port that it names, and on the port by which it leaves if it passes
    /// there and walks the rules again. The note says whether the kernel would forward the packets of its flow. Changes nothing. The second walk finds the states that the first one would make.
    ///
    /// # Errors
    /// There is no such port, or the packet is malformed.
    pub fn explain(&self, spec: &PacketSpec) -> Result<(Vec<Walked>, Option<String>), String> {
        let now = self.clock.now();
        let packet = towpath_wire::parse(spec.link(), &spec.frame, spec.frame.len() as u32)
            .map_err(|reason| format!("these words make a malformed packet: {reason}"))?;
        let note = self.offload_note(spec, &packet);
        let book = self.book();
        let gate = &book.gate;
        let name = |id: Option<PortId>| id.and_then(|id| gate.ports().name(id)).unwrap_or("?").to_owned();
        let id = match &spec.port {
            Some(port) => Some(gate.ports().find(port).ok_or_else(|| {
                let names: Vec<_> = gate.ports().ids().map(|id| name(Some(id))).collect();
                format!("there is no port `{port}`; the ports are {}", names.join(", "))
            })?),
            None => gate.ports().ids().next(),
        };
        let first = match spec.dir {
            Dir::In => Walk::new(Dir::In, id, None),
            Dir::Out => Walk::new(Dir::Out, None, id),
        };
        let mode = id.and_then(|id| self.topology.mode(id)).unwrap_or(ForwardMode::Routes);
        let (mut walks, mut states) = (Vec::new(), Foreseen::default());
        let (mut walk, mut port) = (first, id);
        loop {
            let explanation = gate.explain_walk(&mut walk, &mut states, &packet, now);
            let verdict = explanation.verdict;
            walks.push(Walked { dir: walk.dir(), port: name(port), explanation, verdict });
            let Some(out) = way_out(mode, gate.routes(), &walk, &packet, verdict) else {
                return Ok((walks, note));
            };
            walk.leave(out);
            port = Some(out);
        }
    }

    /// Whether the kernel would forward the packets of the flow of a received packet, and if not, why.
    fn offload_note(&self, spec: &PacketSpec, packet: &Packet<'_>) -> Option<String> {
        let offload = self.offload()?;
        let flow = packet.flow().filter(|_| spec.dir == Dir::In)?;
        let arrival = {
            let book = self.book();
            let ports = book.gate.ports();
            match &spec.port {
                Some(name) => ports.find(name)?,
                None => ports.ids().next()?,
            }
        };
        Some(match offload.path(&flow, arrival, self.clock.now()) {
            Ok(path) if path.walk.blocked => {
                "offload: the kernel drops the packets of this flow, which an inspector has blocked".to_owned()
            }
            Ok(_) => "offload: the kernel forwards the packets of this flow".to_owned(),
            Err(NoPath::Rules(NoOffload::NoState)) => {
                "offload: the kernel forwards the packets of this flow once it has a state with enough packets, if no rule prevents it"
                    .to_owned()
            }
            Err(NoPath::Rules(reason @ NoOffload::Rule(rule, Obstacle::Action))) => {
                let stays = format!("offload: the packets of this flow stay in the engine: {reason} (rules)");
                match offload.denied((&flow, arrival), rule) {
                    Some(Ok(test)) => {
                        let packets = match test.end {
                            End::Source => "of this source",
                            End::Destination => "to this destination",
                        };
                        let by = if test.has_table { "a table" } else { "its address" };
                        format!("offload: the kernel drops the packets {packets}: rule {rule} denies it by {by}")
                    }
                    Some(Err((reason, test))) => {
                        let by = if test.has_table { "table" } else { "addresses" };
                        format!("{stays}; the kernel drops no packets by the rule's {by}, because {reason}")
                    }
                    None => stays,
                }
            }
            Err(reason) => {
                let name = reason.name();
                format!("offload: the packets of this flow stay in the engine: {reason} ({name})")
            }
        })
    }
}
