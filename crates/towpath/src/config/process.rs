//! The keys `user`, `group`, `env`, `limits` and `cgroup` of [queue.N] and [mux.NAME]: how a started program runs.

use std::path::Path;

use super::reader::Table;
use super::users;
use crate::process::{Identity, LIMITS, Limit, Settings};

/// Directory of the cgroups (v2) that relative names are in.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Reads the keys.
pub(super) fn take(table: &Table<'_, '_>) -> Settings {
    let account = table.text("user").and_then(|name| users::account(table, &name));
    let group = table.text("group").and_then(|name| users::group(table, &name)).map(|group| group.id);
    Settings {
        user: account.map(|account| account.user),
        group: group.or(account.map(|account| account.group)),
        env: table.texts("env").iter().filter_map(|text| variable(table, text)).collect(),
        limits: table.texts("limits").iter().filter_map(|text| limit(table, text)).collect(),
        cgroup: table.text("cgroup").map(|text| Path::new(CGROUPS).join(text.value)),
    }
}

/// The user and group of the engine: `user` and `group` of [engine].
pub(super) fn engine(table: &Table<'_, '_>) -> Option<Identity> {
    let account = table.text("user").and_then(|name| users::account(table, &name));
    let group = table.text("group").and_then(|name| users::group(table, &name));
    if account.is_none() && group.is_some() && !table.has("user") {
        table.wrong(&table.span_of("group"), "`group` needs `user`", "write user = \"USER\"");
    }
    let account = account?;
    Some(Identity { group: group.map_or(account.group, |group| group.id), ..account })
}

fn variable(table: &Table<'_, '_>, text: &super::reader::At<&str>) -> Option<String> {
    let name = text.value.split('=').next().unwrap_or_default();
    if name.is_empty() || text.value.contains('\0') {
        let message = format!("`{}` is not an environment variable", text.value);
        table.wrong(&text.span, message, "write \"NAME\" to pass it, or \"NAME=VALUE\"");
        return None;
    }
    Some(text.value.to_owned())
}

fn limit(table: &Table<'_, '_>, text: &super::reader::At<&str>) -> Option<Limit> {
    let limit = Limit::parse(text.value);
    if limit.is_none() {
        let names: Vec<_> = LIMITS.iter().map(|(name, _)| *name).collect();
        let hint = format!("write \"NAME=NUMBER\" or \"NAME=unlimited\"; the names are {}", names.join(", "));
        table.wrong(&text.span, format!("`{}` is not a resource limit", text.value), hint);
    }
    limit
}
