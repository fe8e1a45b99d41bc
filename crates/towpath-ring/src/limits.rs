//! What each user may have of an endpoint, and who has it.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Arc, Mutex, PoisonError};

use crate::header::Credentials;

/// What each user may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Most bytes of shared memory of all channels of one user. The default is 256 MiB.
    pub bytes_per_user: u64,
    /// Most channels of one user. The default is 64.
    pub channels_per_user: usize,
    /// Most channels of all users. The default is 256.
    pub channels: usize,
    /// Most descriptors that a client may have passed and that were not used yet; more are closed. The default is 16.
    pub descriptors: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes_per_user: 256 << 20, channels_per_user: 64, channels: 256, descriptors: 16 }
    }
}

/// One channel's part; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Share {
    shares: Shares,
    number: u64,
}

#[derive(Clone, Debug)]
struct Holder {
    uid: u32,
    pid: u32,
    name: String,
    bytes: u64,
}

#[derive(Debug, Default)]
struct Book {
    holders: BTreeMap<u64, Holder>,
    next: u64,
}

/// Who has what. Locked at attach and detach only.
#[derive(Clone, Debug)]
pub(crate) struct Shares {
    limits: Limits,
    book: Arc<Mutex<Book>>,
}

impl Shares {
    pub(crate) fn new(limits: Limits) -> Self {
        Self { limits, book: Arc::default() }
    }

    /// Takes a share of `bytes`, or says which limit stands against it and who holds what.
    pub(crate) fn take(&self, peer: &Credentials, name: &str, bytes: u64) -> Result<Share, String> {
        let mut book = self.book.lock().unwrap_or_else(PoisonError::into_inner);
        let Limits { bytes_per_user, channels_per_user, channels, .. } = self.limits;
        let uid = peer.uid;
        let theirs: Vec<&Holder> = book.holders.values().filter(|h| h.uid == uid).collect();
        let held: u64 = theirs.iter().map(|h| h.bytes).sum();
        if book.holders.len() >= channels {
            return Err(format!("{channels} channels; {}", holders(book.holders.values())));
        }
        if theirs.len() >= channels_per_user {
            return Err(format!(
                "{channels_per_user} channels for user {uid}; {}",
                holders(theirs.into_iter())
            ));
        }
        if held + bytes > bytes_per_user {
            let theirs = holders(theirs.into_iter());
            return Err(format!("{bytes_per_user} bytes for user {uid}, {bytes} more asked for; {theirs}"));
        }
        let number = book.next;
        book.next += 1;
        book.holders.insert(number, Holder { uid, pid: peer.pid, name: name.into(), bytes });
        Ok(Share { shares: self.clone(), number })
    }
}

fn holders<'a>(holders: impl Iterator<Item = &'a Holder>) -> String {
    let mut text = String::from("held by:");
    for Holder { pid, name, bytes, .. } in holders.take(8) {
        let _ = write!(text, " {name}[{pid}] {bytes}");
    }
    text
}

impl Share {
    /// Counts `bytes` more, or says which limit stands against it and who holds what.
    pub(crate) fn more(&self, bytes: u64) -> Result<More, String> {
        let mut book = self.shares.book.lock().unwrap_or_else(PoisonError::into_inner);
        let most = self.shares.limits.bytes_per_user;
        let uid = book.holders.get(&self.number).map_or(0, |h| h.uid);
        let theirs = || book.holders.values().filter(|h| h.uid == uid);
        if theirs().map(|h| h.bytes).sum::<u64>() + bytes > most {
            return Err(format!(
                "{most} bytes for user {uid}, {bytes} more asked for; {}",
                holders(theirs())
            ));
        }
        if let Some(holder) = book.holders.get_mut(&self.number) {
            holder.bytes += bytes;
        }
        Ok(More { shares: self.shares.clone(), number: self.number, bytes })
    }
}

/// What a channel has taken beyond its share; given back when it is dropped.
#[derive(Debug)]
pub(crate) struct More {
    shares: Shares,
    number: u64,
    bytes: u64,
}

impl Drop for More {
    fn drop(&mut self) {
        let mut book = self.shares.book.lock().unwrap_or_else(PoisonError::into_inner);
        // When the channel is gone, so is its entry.
        if let Some(holder) = book.holders.get_mut(&self.number) {
            holder.bytes -= self.bytes;
        }
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.shares.book.lock().unwrap_or_else(PoisonError::into_inner).holders.remove(&self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_names_itself_and_the_holders() {
        let shares = Shares::new(Limits {
            bytes_per_user: 100,
            channels_per_user: 2,
            channels: 3,
            ..Limits::default()
        });
        let peer = |uid, pid| Credentials { pid, uid, gid: 0 };
        let take = |uid, pid, bytes| shares.take(&peer(uid, pid), "ids", bytes);
        let first = take(7, 11, 60).unwrap();
        assert_eq!(
            take(7, 12, 41).unwrap_err(),
            "100 bytes for user 7, 41 more asked for; held by: ids[11] 60"
        );
        let _second = take(7, 12, 40).unwrap();
        assert_eq!(take(7, 13, 0).unwrap_err(), "2 channels for user 7; held by: ids[11] 60 ids[12] 40");
        let _third = take(8, 14, 1).unwrap();
        assert!(take(9, 15, 1).unwrap_err().starts_with("3 channels; held by:"));
        drop(first);
        let third = take(7, 13, 50).unwrap();
        let more = third.more(10).unwrap();
        assert_eq!(
            third.more(1).unwrap_err(),
            "100 bytes for user 7, 1 more asked for; held by: ids[12] 40 ids[13] 60"
        );
        drop(more);
        let more = third.more(10).unwrap();
        drop(third);
        drop(more);
        take(7, 13, 60).unwrap();
    }
}
