//! Users and groups by name or number.
//!
//! Names are looked up in /etc/passwd and /etc/group only. Users of other databases (LDAP, systemd) are given by number.

use super::reader::{At, Table, meant};
use crate::process::Identity;

/// Users that may attach to a queue besides root and the engine's user.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Users {
    /// User ids in ascending order, including members of the named groups at the time of reading.
    pub ids: Vec<u32>,
    /// Ids of the named groups: a process whose group is one of them may attach.
    pub groups: Vec<u32>,
}

impl Users {
    /// Returns true if no user and no group is named.
    pub fn is_empty(&self) -> bool {
        self.ids.is_empty() && self.groups.is_empty()
    }
}

/// A group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Group {
    pub(super) id: u32,
    /// Its members, including users whose primary group it is.
    pub(super) members: Vec<u32>,
}

/// A line of passwd(5).
struct Entry {
    name: String,
    user: u32,
    group: u32,
}

impl Entry {
    const fn identity(&self) -> Identity {
        Identity { user: self.user, group: self.group }
    }
}

/// The keys `users` and `groups`.
pub(super) fn take(table: &Table<'_, '_>) -> Users {
    let mut ids: Vec<u32> = table.texts("users").iter().filter_map(|name| user(table, name)).collect();
    let mut groups = Vec::new();
    for name in table.texts("groups") {
        let Some(group) = group(table, &name) else { continue };
        ids.extend(group.members);
        groups.push(group.id);
    }
    for numbers in [&mut ids, &mut groups] {
        numbers.sort_unstable();
        numbers.dedup();
    }
    Users { ids, groups }
}

/// Looks up a user by name or number.
pub(super) fn user(table: &Table<'_, '_>, name: &At<&str>) -> Option<u32> {
    account(table, name).map(|account| account.user)
}

/// The user called `name` in /etc/passwd, with its group.
pub(crate) fn named(name: &str) -> Option<Identity> {
    passwd().iter().find(|entry| entry.name == name).map(Entry::identity)
}

/// Returns true if /etc/passwd has a user with this id.
pub(crate) fn exists(id: u32) -> bool {
    passwd().iter().any(|entry| entry.user == id)
}

/// Looks up a user by name or number, with its group. The group of a number without a user is the same number.
pub(super) fn account(table: &Table<'_, '_>, name: &At<&str>) -> Option<Identity> {
    let entries = passwd();
    if let Ok(id) = name.value.parse() {
        let entry = entries.iter().find(|entry| entry.user == id);
        return Some(entry.map_or(Identity { user: id, group: id }, Entry::identity));
    }
    let found = entries.iter().find(|entry| entry.name == name.value).map(Entry::identity);
    if found.is_none() {
        let hint = meant(name.value, entries.iter().map(|entry| entry.name.as_str()));
        let hint = hint.unwrap_or_else(|| "name one of /etc/passwd, or give a number as text".into());
        table.wrong(&name.span, format!("unknown user `{}`", name.value), hint);
    }
    found
}

/// Looks up a group by name or number.
pub(super) fn group(table: &Table<'_, '_>, name: &At<&str>) -> Option<Group> {
    let text = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let number: Option<u32> = name.value.parse().ok();
    let row = text.lines().find_map(|line| {
        // group(5): name:password:GID:user,user
        let mut fields = line.split(':');
        let (row, id) = (fields.next()?, fields.nth(1)?.parse::<u32>().ok()?);
        (row == name.value || number == Some(id)).then(|| (id, fields.next().unwrap_or_default().to_owned()))
    });
    let (id, names) = match (row, number) {
        (Some(row), _) => row,
        (None, Some(id)) => (id, String::new()),
        (None, None) => {
            let names = text.lines().filter_map(|line| line.split(':').next());
            let hint = meant(name.value, names);
            let hint = hint.unwrap_or_else(|| "name one of /etc/group, or give a number as text".into());
            table.wrong(&name.span, format!("unknown group `{}`", name.value), hint);
            return None;
        }
    };
    let listed: Vec<&str> = names.split(',').collect();
    let members =
        passwd().into_iter().filter(|entry| entry.group == id || listed.contains(&entry.name.as_str()));
    Some(Group { id, members: members.map(|entry| entry.user).collect() })
}

/// Reads the key `mode`: an octal file mode.
pub(super) fn mode(table: &Table<'_, '_>) -> Option<u32> {
    let text = table.text("mode")?;
    let mode = u32::from_str_radix(text.value, 8).ok().filter(|mode| *mode <= 0o777);
    if mode.is_none() {
        table.wrong(
            &text.span,
            format!("`{}` is not a file mode", text.value),
            "write it in octal, such as \"0660\"",
        );
    }
    mode
}

fn passwd() -> Vec<Entry> {
    let text = std::fs::read_to_string("/etc/passwd").unwrap_or_default();
    let entry = |line: &str| {
        let mut fields = line.split(':');
        let name = fields.next()?.to_owned();
        let user = fields.nth(1)?.parse().ok()?;
        Some(Entry { name, user, group: fields.next()?.parse().ok()? })
    };
    text.lines().filter_map(entry).collect()
}
