//! `[control]`: the socket of `towpath ctl`.

use std::path::{Path, PathBuf};

use super::reader::Table;
use super::users;

/// The control socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Control {
    /// Where it is.
    pub socket: PathBuf,
    /// Who may change things, beside root and the engine's user: the file is theirs.
    pub owner: Option<u32>,
    /// Whose members may look.
    pub group: Option<u32>,
    /// The file's permissions.
    pub mode: u32,
}

pub(super) fn take(top: &Table<'_, '_>, directory: &Path) -> Option<Control> {
    let table = top.table("control")?;
    table.need("socket", "write socket = \"/run/towpath/control.sock\"");
    let socket = table.text("socket").map(|text| directory.join(text.value));
    let owner = table.text("owner").and_then(|name| users::user(&table, &name));
    let group = table.text("group").and_then(|name| users::group(&table, &name)).map(|group| group.id);
    let mode = users::mode(&table).unwrap_or(if group.is_some() { 0o660 } else { 0o600 });
    table.finish();
    Some(Control { socket: socket?, owner, group, mode })
}

impl Control {
    /// A socket for the engine's user and root.
    pub fn private(socket: &Path) -> Self {
        Self { socket: socket.into(), owner: None, group: None, mode: 0o600 }
    }
}
