//! The processing of one frame of messages in [`Worker::serve`](super::Worker::serve).

use super::message::{Connection, Piece, View, connection};
use super::reply::{Reply, ServeError};
use crate::client::recv_error::RecvError;
use crate::client::{Consumer, Frame};
use crate::lane::batch::{self, Part};
use crate::lane::reserve_error::ReserveError;
use crate::shm::header::{Kind, Meta};

/// Bytes of answers from which on the answers of a frame are sent without waiting for the rest.
pub(super) const SMALL: usize = 16 << 10;

/// A frame that [`Worker::serve`](super::Worker::serve) processes.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) frame: Frame,
    /// Messages done.
    pub(super) done: u32,
}

/// Processing of one frame in [`Worker::serve`](super::Worker::serve). If `work` panics, the finished messages are answered.
pub(super) struct Turn<'a> {
    pub(super) queue: &'a mut Consumer,
    pub(super) reply: &'a mut Reply,
    pub(super) begun: &'a mut Begun,
}

impl Turn<'_> {
    pub(super) fn serve(
        &mut self,
        count: u32,
        work: &mut impl FnMut(View<'_>, &mut Reply),
    ) -> Result<(), ServeError> {
        // Answers that the previous call could not send.
        self.answer()?;
        self.end()?;
        while self.begun.done < count {
            self.work(count, work)?;
            self.answer()?;
            self.end()?;
        }
        Ok(())
    }

    /// Processes messages until all are done, their answers are long, or one of them ends the connection.
    fn work(&mut self, count: u32, work: &mut impl FnMut(View<'_>, &mut Reply)) -> Result<(), RecvError> {
        let Begun { frame, done } = &mut *self.begun;
        let mut end = 0;
        let (header, payload) = (frame.header(), self.queue.payload(frame));
        let (connection, time, from) = (connection(frame), header.time, *done as usize);
        let piece = if header.kind.is_message() { Piece::of(header) } else { Piece::default() };
        let mut each = |part| {
            self.queue.tell_at(frame, *done as u16);
            work(View { part, connection, time, piece }, self.reply);
            let now = self.reply.bytes.len();
            *done += 1;
            if now > end {
                self.reply.ends.push((now, *done));
            }
            end = now;
            now < SMALL && self.reply.then.is_none()
        };
        if header.kind.is_message() {
            let layers = header.layers;
            let (skip, trim) = (layers.network, layers.payload);
            each(Part { bytes: payload, skip, trim, mark: header.mark, hash: header.hash });
            return Ok(());
        }
        let parts = batch::parse(payload, count);
        let parts = parts.ok_or_else(|| RecvError::Damaged("a batch with wrong lengths".into()))?;
        let _: Option<()> = parts.skip(from).try_for_each(|part| each(part).then_some(()));
        Ok(())
    }

    /// Closes or resets the connection if the last answer asked for it.
    fn end(&mut self) -> Result<(), ServeError> {
        let Some(kind) = self.reply.then else { return Ok(()) };
        let Connection { index: port, generation: group } = connection(&self.begun.frame);
        let mark = self.begun.frame.seq().0;
        let meta = Meta { kind, port, group, mark, ..Meta::default() };
        let sent = self.queue.reply(&self.begun.frame, &[], &meta);
        if !matches!(sent, Err(ReserveError::Interrupted | ReserveError::RingFull)) {
            self.reply.then = None;
        }
        sent.map_err(|why| ServeError::Reply { len: 0, why })
    }

    /// Sends the answers and reports the finished messages.
    fn answer(&mut self) -> Result<(), ServeError> {
        let Begun { frame, done } = &mut *self.begun;
        let Reply { bytes, ends, .. } = &mut *self.reply;
        let mut count = ends.len();
        while count > 0 {
            let (len, upto) = ends[count - 1];
            // Messages without an answer may follow the last answer.
            let group = if count == ends.len() { *done } else { upto };
            let kind = if frame.header().kind == Kind::MESSAGE_PART { Kind::REPLY_PART } else { Kind::REPLY };
            let meta = Meta { kind, port: frame.seq().0, group, mark: count as u32, ..Meta::default() };
            let sent = self.queue.reply(frame, &bytes[..len], &meta);
            match sent {
                Err(why @ (ReserveError::Interrupted | ReserveError::RingFull)) => {
                    return Err(ServeError::Reply { len, why });
                }
                // Too large together with the last answer, which made it long: send the earlier ones without it.
                Err(ReserveError::TooLarge) if count > 1 => {
                    count -= 1;
                    continue;
                }
                Ok(()) | Err(_) => {}
            }
            bytes.drain(..len);
            // Release the memory of a long answer.
            bytes.shrink_to(2 * SMALL);
            ends.drain(..count);
            ends.iter_mut().for_each(|(end, _)| *end -= len);
            count = ends.len();
            sent.map_err(|why| ServeError::Reply { len, why })?;
        }
        Ok(())
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        // A partial answer of the panicked message is discarded.
        if std::thread::panicking() {
            self.reply.bytes.truncate(self.reply.ends.last().map_or(0, |(end, _)| *end));
            // Answers that are too long are left out.
            while let Err(ServeError::Reply { why: ReserveError::TooLarge, .. }) = self.answer() {}
            self.reply.clear();
        }
    }
}
