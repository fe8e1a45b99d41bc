//! Effects of a packet on its state: counters, windows, the flags and chunks seen, and the lifetime.

use super::{State, seconds};
use crate::state::tcp::window::{Fit, Window};
use crate::state::{Direction, Segment, Settings};
use towpath_wire::Time;

pub(super) fn count(state: &mut State, direction: Direction, segment: &Segment) {
    state.packets[direction as usize] += 1;
    state.bytes[direction as usize] += u64::from(segment.bytes);
}

pub(super) fn fit(state: &mut State, direction: Direction, segment: &Segment) -> Fit {
    let (ended, reopens) = (ended(state), reopens(state, direction, segment));
    let Some(window) = &mut state.window else { return Fit::Fits };
    if ended && segment.tcp_flags & 4 != 0 {
        return Fit::Fits;
    }
    if reopens {
        *window = Window::default();
    }
    window.segment(direction, segment)
}

fn ended(state: &State) -> bool {
    (state.flags[0] | state.flags[1]) & 4 != 0 || state.flags[0] & state.flags[1] & 1 != 0
}

fn reopens(state: &State, direction: Direction, segment: &Segment) -> bool {
    direction == Direction::Forward && !state.orphaned && ended(state) && segment.tcp_flags & 0b1_0111 == 2
}

fn established(state: &State) -> bool {
    state.flags[0] & state.flags[1] & 2 != 0 && !ended(state)
}

/// Returns true if the segment is a reset that its receiver does not accept.
fn is_blind_reset(state: &State, side: usize, segment: &Segment, settings: &Settings) -> bool {
    let checked = settings.dyn_rst_check && state.window.is_none() && established(state);
    if segment.tcp_flags & 4 == 0 || !checked || state.ack[1 - side] == 0 {
        return false;
    }
    let window = |side: usize| 65_535 << state.scales[side].unwrap_or(14);
    // Distances modulo 2^32.
    let behind = segment.tcp_ack.wrapping_sub(state.ack[side]);
    let near = behind.min(behind.wrapping_neg()) <= window(side) || state.ack[side] == 0;
    match segment.tcp_seq.wrapping_sub(state.ack[1 - side]) {
        0 => false,
        ahead if segment.tcp_flags & 16 == 0 => ahead > 65_535,
        ahead => ahead > window(1 - side) || !near,
    }
}

/// Returns true if the packet, after it was applied, proves that the state was replied to.
pub(super) fn replied(state: &State, direction: Direction, segment: &Segment, settings: &Settings) -> bool {
    let chunk = |kind: u8| state.chunks.iter().any(|chunk| chunk.0 == kind);
    match state.flow.proto {
        6 => {
            let reset = (state.flags[0] | state.flags[1]) & 4 != 0;
            let acknowledges = segment.tcp_flags & 0b1_0110 == 0b1_0000;
            direction == Direction::Forward && state.answered && acknowledges && !reset
        }
        // With chunks seen, the complete handshake is needed.
        132 if settings.dyn_sctp && !state.chunks.is_empty() => {
            chunk(11) && ![7, 14, 6].into_iter().any(chunk)
        }
        _ => direction == Direction::Reverse,
    }
}

pub(super) fn packet(
    state: &mut State,
    direction: Direction,
    segment: &Segment,
    settings: &Settings,
    now: Time,
) {
    if state.flow.proto == 6 && is_blind_reset(state, direction as usize, segment, settings) {
        return;
    }
    let lifetime = match state.flow.proto {
        6 => tcp(state, direction, segment, settings),
        132 if settings.dyn_sctp => sctp(state, direction, segment.sctp_chunk, settings),
        17 | 136 => Some(state.lifetime.unwrap_or(settings.dyn_udp_lifetime)),
        _ => Some(state.lifetime.unwrap_or(settings.dyn_short_lifetime)),
    };
    if let Some(lifetime) = state.timeout.or(lifetime) {
        state.expire = now + seconds(lifetime);
    }
}

fn tcp(state: &mut State, direction: Direction, segment: &Segment, settings: &Settings) -> Option<u32> {
    let side = direction as usize;
    if reopens(state, direction, segment) {
        (state.flags, state.ack, state.turn, state.picked_up) = ([0; 2], [0; 2], None, false);
    }
    if segment.tcp_flags & 6 == 2 && !established(state) {
        state.scales[side] = Some(segment.tcp_wscale.unwrap_or(0));
    }
    state.flags[side] |= segment.tcp_flags & 7;
    let [forward, reverse] = state.flags;
    let has = |flags: u8, flag: u8| flags & flag != 0;
    let (syn, fin, rst) = (2, 1, 4);
    if has(forward | reverse, rst) {
        return Some(settings.dyn_rst_lifetime);
    }
    if forward == syn && reverse == 0 {
        return Some(settings.dyn_syn_lifetime);
    }
    if !has(forward, syn) || !has(reverse, syn) {
        return Some(settings.dyn_rst_lifetime);
    }
    if has(forward, fin) && has(reverse, fin) {
        return Some(settings.dyn_fin_lifetime);
    }
    let last = state.ack[side];
    let newer = last == 0 || segment.tcp_ack.wrapping_sub(last) < 1 << 31;
    if segment.tcp_flags & 16 == 0 || !newer {
        return None;
    }
    state.ack[side] = segment.tcp_ack;
    let refresh = state.turn.is_some_and(|turn| turn != direction);
    state.turn = Some(direction);
    refresh.then(|| state.lifetime.unwrap_or(settings.dyn_ack_lifetime))
}

/// Records the chunks since the last accepted INIT, each with its side. (The table stores a phase instead.)
fn sctp(state: &mut State, direction: Direction, chunk: Option<u8>, settings: &Settings) -> Option<u32> {
    let seen =
        |state: &State, kind: u8| state.chunks.iter().find(|chunk| chunk.0 == kind).map(|chunk| chunk.1);
    let (init, abort, shutdown, shutdown_ack, echo, ack, complete) = (1, 6, 7, 8, 10, 11, 14);
    let over = |state: &State| seen(state, complete).or(seen(state, abort)).is_some();
    match chunk {
        Some(1) if seen(state, echo).is_none() || over(state) => state.chunks = vec![(init, direction)],
        Some(6) => state.chunks.push((abort, direction)),
        Some(10) if !over(state) && seen(state, echo).is_none() && seen(state, init) == Some(direction) => {
            state.chunks.push((echo, direction));
        }
        Some(11)
            if !over(state)
                && seen(state, ack).or(seen(state, shutdown)).is_none()
                && seen(state, echo).is_some_and(|side| side != direction) =>
        {
            state.chunks.push((ack, direction));
            state.turn = Some(direction);
            return Some(state.lifetime.unwrap_or(settings.dyn_ack_lifetime));
        }
        Some(kind)
            if (kind == shutdown || kind == shutdown_ack)
                && !over(state)
                && seen(state, echo).is_some()
                && seen(state, shutdown).is_none() =>
        {
            state.chunks.push((shutdown, direction));
            return Some(settings.dyn_syn_lifetime);
        }
        Some(14) if !over(state) && seen(state, shutdown).is_some() => {
            state.chunks.push((complete, direction))
        }
        _ => {}
    }
    if seen(state, abort).is_some() {
        Some(settings.dyn_rst_lifetime)
    } else if seen(state, complete).is_some() {
        Some(settings.dyn_fin_lifetime)
    } else if seen(state, shutdown).is_some() {
        None
    } else if seen(state, ack).is_some() {
        let refresh = state.turn != Some(direction);
        state.turn = Some(direction);
        refresh.then(|| state.lifetime.unwrap_or(settings.dyn_ack_lifetime))
    } else if seen(state, init).is_some() {
        Some(settings.dyn_syn_lifetime)
    } else {
        Some(state.lifetime.unwrap_or(settings.dyn_short_lifetime))
    }
}
