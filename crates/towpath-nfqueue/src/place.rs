//! The engine's socket of a queue, as `TOWPATH_NFQUEUE` names it.
//!
//! The variable has entries between colons, and the first one that applies to a queue counts. `N=PATH` is the socket of queue N, `*=PATH`
//! that of every queue, and `DIRECTORY` has the socket of queue N as `queue-N.sock`.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// The directory of the engine's sockets without the variable.
const DIRECTORY: &str = "/run/towpath";

/// The socket of queue `number`.
pub(crate) fn socket_of(number: u16) -> Option<PathBuf> {
    let variable = std::env::var_os("TOWPATH_NFQUEUE");
    find(&variable.unwrap_or_else(|| OsString::from(DIRECTORY)), number)
}

fn find(variable: &OsStr, number: u16) -> Option<PathBuf> {
    let entries = variable.as_bytes().split(|byte| *byte == b':').filter(|entry| !entry.is_empty());
    entries.into_iter().find_map(|entry| {
        let path = |bytes| Path::new(OsStr::from_bytes(bytes));
        let Some(equals) = entry.iter().position(|byte| *byte == b'=') else {
            return Some(path(entry).join(format!("queue-{number}.sock")));
        };
        let (name, socket) = (&entry[..equals], &entry[equals + 1..]);
        let named = name == b"*" || name == number.to_string().as_bytes();
        named.then(|| path(socket).to_owned())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_entry_that_applies_counts() {
        for (variable, number, socket) in [
            ("1=/a:2=/b", 2, Some("/b")),
            ("1=/a:2=/b", 3, None),
            ("1=/a:*=/b", 3, Some("/b")),
            ("1=/a:/run", 3, Some("/run/queue-3.sock")),
            ("/run", 1, Some("/run/queue-1.sock")),
            ("::1=/a=b", 1, Some("/a=b")),
            ("", 1, None),
            ("11=/a", 1, None),
        ] {
            assert_eq!(find(OsStr::new(variable), number), socket.map(PathBuf::from), "{variable} {number}");
        }
    }
}
