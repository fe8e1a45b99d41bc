//! The keys `user`, `group`, `env`, `limits`, `cgroup` and `sandbox` of [queue.N] and [mux.NAME]: how a started program runs.

use std::path::{Path, PathBuf};

use super::reader::{At, Table, meant};
use super::users;
use crate::process::{Identity, LIMITS, Limit, Namespace, Sandbox, Settings};

/// Directory of the cgroups (v2) that relative names are in.
const CGROUPS: &str = "/sys/fs/cgroup";

/// Reads the keys. Paths are relative to `directory`.
pub(super) fn take(table: &Table<'_, '_>, directory: &Path) -> Settings {
    let account = table.text("user").and_then(|name| users::account(table, &name));
    let group = table.text("group").and_then(|name| users::group(table, &name)).map(|group| group.id);
    Settings {
        user: account.map(|account| account.user),
        group: group.or(account.map(|account| account.group)),
        env: table.texts("env").iter().filter_map(|text| variable(table, text)).collect(),
        limits: table.texts("limits").iter().filter_map(|text| limit(table, text)).collect(),
        cgroup: table.text("cgroup").map(|text| Path::new(CGROUPS).join(text.value)),
        sandbox: sandbox(table, directory),
    }
}

/// The table `sandbox`.
fn sandbox(table: &Table<'_, '_>, directory: &Path) -> Sandbox {
    let Some(table) = table.table("sandbox") else { return Sandbox::default() };
    let paths = |key| {
        let texts = table.texts(key);
        table.has(key).then(|| texts.iter().filter_map(|text| path(&table, text, directory)).collect())
    };
    let sandbox = Sandbox {
        seccomp: table.word("seccomp").map(|word| word == "default"),
        namespaces: table.texts("namespaces").iter().filter_map(|text| namespace(&table, text)).collect(),
        read: paths("read"),
        write: paths("write"),
    };
    table.finish();
    sandbox
}

fn namespace(table: &Table<'_, '_>, text: &At<&str>) -> Option<Namespace> {
    let found = Namespace::of_word(text.value);
    if found.is_none() {
        let names: Vec<_> = Namespace::ALL.iter().map(|(name, _)| *name).collect();
        let hint = meant(text.value, names.iter().copied())
            .unwrap_or_else(|| format!("the namespaces are {}", names.join(", ")));
        table.wrong(&text.span, format!("`{}` is not a namespace of a sandbox", text.value), hint);
    }
    found
}

fn path(table: &Table<'_, '_>, text: &At<&str>, directory: &Path) -> Option<PathBuf> {
    if text.value.is_empty() || text.value.contains('\0') {
        table.wrong(&text.span, format!("`{}` is not a path", text.value.escape_debug()), "");
        return None;
    }
    Some(directory.join(text.value))
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

fn variable(table: &Table<'_, '_>, text: &At<&str>) -> Option<String> {
    let name = text.value.split('=').next().unwrap_or_default();
    if name.is_empty() || text.value.contains('\0') {
        let message = format!("`{}` is not an environment variable", text.value);
        table.wrong(&text.span, message, "write \"NAME\" to pass it, or \"NAME=VALUE\"");
        return None;
    }
    Some(text.value.to_owned())
}

fn limit(table: &Table<'_, '_>, text: &At<&str>) -> Option<Limit> {
    let limit = Limit::parse(text.value);
    if limit.is_none() {
        let names: Vec<_> = LIMITS.iter().map(|(name, _)| *name).collect();
        let hint = format!("write \"NAME=NUMBER\" or \"NAME=unlimited\"; the names are {}", names.join(", "));
        table.wrong(&text.span, format!("`{}` is not a resource limit", text.value), hint);
    }
    limit
}
