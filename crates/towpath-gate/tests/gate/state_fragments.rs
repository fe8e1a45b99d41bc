//! Later fragments match the state of their datagram's first fragment.

use towpath_gate::rules::Ruleset;
use towpath_gate::state;
use towpath_gate::{Dir, DropReason, Gate, GateSettings, Ports, Step, Walk};
use towpath_wire::{self as wire, LinkType, Time};

/// A fragment of a UDP datagram from 10.0.0.1:4000 to 192.0.2.1:53, or of the same ports over IPv6.
fn fragment(six: bool, id: u16, offset: u16, more: bool) -> Vec<u8> {
    let field = if six { offset << 3 | u16::from(more) } else { offset | if more { 0x2000 } else { 0 } };
    let mut frame = Vec::new();
    if six {
        frame.extend([0x60, 0, 0, 0, 0, 16, 44, 64]);
        frame.extend([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
        frame.extend([0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2]);
        frame.extend([17, 0].into_iter().chain(field.to_be_bytes()).chain([0, 0]).chain(id.to_be_bytes()));
    } else {
        frame.extend([0x45, 0, 0, 28].into_iter().chain(id.to_be_bytes()).chain(field.to_be_bytes()));
        frame.extend([64, 17, 0, 0, 10, 0, 0, 1, 192, 0, 2, 1]);
    }
    // A later fragment has data in place of ports.
    frame.extend(if offset == 0 { [0x0f, 0xa0, 0, 53, 0, 16, 0, 0] } else { [9; 8] });
    frame
}

fn walk(gate: &mut Gate, frame: &[u8], seconds: u64) -> Step {
    let packet = wire::parse(LinkType::RAW, frame, frame.len() as u32).unwrap();
    gate.walk(&mut Walk::new(Dir::In, None, None), &packet, Time::from_secs(seconds))
}

const DENY: Step = Step::Drop(DropReason::Deny);

#[test]
fn later_fragments_match_the_state_of_the_first() {
    for six in [false, true] {
        for option in ["keep-state", "keep-state strict", "record-state", "limit src-addr 1"] {
            let rules = format!("add check-state\nadd allow udp from any to any 53 {option}");
            let ruleset = Ruleset::parse("t", &rules).ruleset.unwrap();
            let mut gate = Gate::new(ruleset, Ports::new(), state::Settings::default(), 7);
            let mut walk =
                |id, offset, more, seconds| walk(&mut gate, &fragment(six, id, offset, more), seconds);
            assert_eq!(walk(7, 1, true, 10), DENY, "before the first");
            assert_eq!(walk(7, 0, true, 10), Step::Pass);
            assert_eq!(walk(7, 1, true, 11), Step::Pass);
            assert_eq!(walk(7, 2, false, 12), Step::Pass);
            assert_eq!(walk(8, 1, false, 12), DENY, "another datagram");
            // Also when the first fragment was a hit. The state expires 10 s after its last packet with ports.
            assert_eq!(walk(8, 0, true, 13), Step::Pass);
            assert_eq!(walk(8, 1, false, 22), Step::Pass);
            assert_eq!(walk(8, 1, false, 23), DENY);
            let states: Vec<_> = gate.states().list(Time::from_secs(22)).collect();
            let counted = states.iter().map(|state| state.packets).max();
            assert_eq!(counted, Some([5, 0]), "{option}");
        }
    }
}

#[test]
fn without_the_setting_later_fragments_have_no_ports() {
    let ruleset = Ruleset::parse("t", "add allow udp from any to any 53 keep-state").ruleset.unwrap();
    let mut gate = Gate::new(ruleset, Ports::new(), state::Settings::default(), 7);
    gate.set_settings(GateSettings { fragments: false, ..gate.settings() });
    assert_eq!(walk(&mut gate, &fragment(false, 7, 0, true), 10), Step::Pass);
    assert_eq!(walk(&mut gate, &fragment(false, 7, 1, true), 10), DENY);
}
