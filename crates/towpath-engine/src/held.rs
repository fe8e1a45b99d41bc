//! A packet in the reorder buffer: its bytes, its headers, and what it is charged with.

use std::sync::Arc;

use towpath_gate::Edits;
use towpath_port::Burst;
use towpath_wire::{self as wire, Packet};

use crate::drop_reason::DropReason;
use crate::edits::{self, Place};
use crate::meta::Meta;
use crate::packet_ctx::PacketCtx;
use crate::packet_io::PacketIo;
use crate::reorder::{Held, PacketId, ReorderBuffer};

/// The bytes of a packet in the reorder buffer: its own copy, or those in the burst.
#[inline]
pub(crate) fn bytes<'a>(held: &'a Held<Meta>, burst: Option<&'a Arc<Burst>>) -> &'a [u8] {
    held.bytes(|index| burst.expect("the burst is being processed").frame(index).bytes)
}

#[inline]
pub(crate) fn parse<'a>(
    held: &'a Held<Meta>,
    ctx: &mut PacketCtx,
    burst: Option<&'a Arc<Burst>>,
) -> Result<Packet<'a>, wire::Malformed> {
    ctx.parse(bytes(held, burst), &held.meta)
}

/// Applies the edits of the rules so far.
pub(crate) fn edit(held: &mut Held<Meta>, ctx: &mut PacketCtx, burst: Option<&Arc<Burst>>) {
    let edits = ctx.walk.edits();
    if edits == Edits::default() {
        return;
    }
    let Ok(packet) = parse(held, ctx, burst) else { return };
    let place = Place::of(&packet);
    let borrowed = |index| burst.expect("the burst is being processed").frame(index).bytes;
    let (frame, meta) = held.parts_mut(borrowed);
    edits::apply(edits, place, frame, meta);
}

/// Returns why the packet cannot have this replacement: [`TooLong`](DropReason::TooLong) if no frame of this length leaves by its
/// port. Otherwise the replacement is charged to the packet's account.
pub(crate) fn admit_replacement<E: PacketIo>(
    reorder: &mut ReorderBuffer<Meta, PacketCtx>,
    io: &E,
    id: PacketId,
    bytes: &[u8],
) -> Result<(), DropReason> {
    let Some((held, ctx)) = reorder.waiting_mut(id) else { return Ok(()) };
    let meta = edits::replaced_meta(&held.meta, bytes.len(), bytes);
    if bytes.len() > io.max_frame(ctx.egress_port(), bytes, &meta) {
        return Err(DropReason::TooLong);
    }
    if reorder.admit_replacement(id, bytes.len()) { Ok(()) } else { Err(DropReason::ReplaceLimit) }
}
