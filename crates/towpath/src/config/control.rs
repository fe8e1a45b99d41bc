//! `[control]`: the socket of `towpath ctl`.

use std::path::{Path, PathBuf};

use super::reader::Table;
use super::users;

/// The control socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Control {
    /// Path of the socket.
    pub socket: PathBuf,
    /// User with full access besides root and the engine's user; owns the file.
    pub owner: Option<u32>,
    /// Group with read access.
    pub group: Option<u32>,
    /// File mode of the socket.
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
