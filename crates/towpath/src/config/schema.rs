//! The JSON schema of the configuration file, generated from the table of keys. Editors complete TOML by it.

use serde_json::{Map, Value as Json, json};
use towpath_gate::Values;

use super::keys::{KEYS, Key, Value};
use crate::settings;

/// How a table appears in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// `[engine]`
    One,
    /// `[port.NAME]`
    Named,
    /// `[queue.N]`
    Numbered,
    /// `[[route]]`
    List,
}

/// The tables besides the top of the file, each with its purpose.
const TABLES: &[(&str, Shape, &str)] = &[
    ("port", Shape::Named, "A port: a network interface, a queue of the kernel, or a capture"),
    ("port.vlan", Shape::Named, "A VLAN that rules see as a port"),
    ("bridge", Shape::List, "Two ports whose packets are forwarded to each other"),
    ("route", Shape::List, "A route"),
    ("queue", Shape::Numbered, "The queue of `inspect N`, `divert N` and `tee N` in the rules"),
    ("queue.sandbox", Shape::One, "What the programs of `command` may not do"),
    ("mux", Shape::Named, "A message server"),
    ("mux.sandbox", Shape::One, "What the programs of `worker` may not do"),
    ("engine", Shape::One, "The threads, their memory and their user"),
    ("control", Shape::One, "The control socket"),
    ("metrics", Shape::One, "The metrics endpoint"),
    ("ipfix", Shape::One, "Flow records for a collector"),
    ("events", Shape::One, "Events as JSON lines"),
    ("fleet", Shape::One, "Servers of NATS: states in a group of gates, and workers on other machines"),
    ("offload", Shape::One, "Flows whose packets the kernel forwards"),
    ("log", Shape::One, "The log"),
];

/// The schema: JSON Schema draft-07, which the TOML language servers of editors use.
pub fn schema() -> Json {
    let mut top = object("");
    let properties = top["properties"].as_object_mut().expect("an object has properties");
    for (name, ..) in TABLES.iter().filter(|(name, ..)| !name.contains('.')) {
        properties.insert((*name).to_owned(), table(name));
    }
    properties.insert("settings".to_owned(), settings());
    let members = top.as_object_mut().expect("an object");
    members.insert("$schema".to_owned(), "http://json-schema.org/draft-07/schema#".into());
    members.insert("title".to_owned(), "Configuration of towpath run".into());
    members.insert("anyOf".to_owned(), json!([{ "required": ["port"] }, { "required": ["mux"] }]));
    top
}

/// A help text without Markdown: `[text](target)` becomes `text`.
pub(super) fn plain(help: &str) -> String {
    let (mut text, mut rest) = (String::new(), help);
    while let Some((before, link)) = rest.split_once('[') {
        let Some((words, after)) = link.split_once("](").filter(|(words, _)| !words.contains('[')) else {
            break;
        };
        let Some((_, after)) = after.split_once(')') else { break };
        text += before;
        text += words;
        rest = after;
    }
    let text = text + rest;
    // References to other parts of the page.
    text.replace(" (below)", "")
}

fn table(name: &str) -> Json {
    let (_, shape, purpose) = TABLES.iter().find(|(own, ..)| *own == name).expect("every table is listed");
    let mut one = object(name);
    one.as_object_mut().expect("an object").insert("description".to_owned(), (*purpose).into());
    for (inner, ..) in TABLES {
        if let Some((outer, key)) = inner.split_once('.')
            && outer == name
        {
            one["properties"][key] = table(inner);
        }
    }
    match shape {
        Shape::One => one,
        Shape::Named => json!({ "type": "object", "additionalProperties": one }),
        Shape::Numbered => {
            json!({ "type": "object", "patternProperties": { "^[1-9][0-9]{0,4}$": one }, "additionalProperties": false })
        }
        // One table is a list of one.
        Shape::List => json!({ "anyOf": [one.clone(), { "type": "array", "items": one }] }),
    }
}

/// The keys of a table.
fn object(table: &str) -> Json {
    let keys = || KEYS.iter().filter(|key| key.table == table);
    let properties: Map<String, Json> = keys().map(|key| (key.name.to_owned(), property(key))).collect();
    let required: Vec<&str> = keys().filter(|key| key.default == "required").map(|key| key.name).collect();
    let mut object = json!({ "type": "object", "additionalProperties": false, "properties": properties });
    if !required.is_empty() {
        object["required"] = required.into();
    }
    // A key that is required without another one.
    let either = keys().find_map(|key| Some((key.name, other(key)?)));
    if let Some((name, other)) = either {
        object["anyOf"] = json!([{ "required": [name] }, { "required": [other] }]);
    }
    object
}

/// The key without which this one is required.
fn other(key: &Key) -> Option<&'static str> {
    key.default.strip_prefix("required without `")?.strip_suffix('`')
}

fn property(key: &Key) -> Json {
    let mut property = values(key.value);
    let mut description = plain(key.help);
    // A default is a value in backquotes, or words.
    let default = key.default.strip_prefix('`').and_then(|default| default.strip_suffix('`'));
    match default.and_then(|default| serde_json::from_str::<Json>(default).ok()) {
        Some(default) => property["default"] = default,
        None if ["", "required"].contains(&key.default) || other(key).is_some() => {}
        None => description += &format!(". Default: {}", plain(key.default)),
    }
    property["description"] = description.into();
    property
}

fn values(value: Value) -> Json {
    match value {
        Value::Text => json!({ "type": "string" }),
        Value::Texts => json!({ "type": ["string", "array"], "items": { "type": "string" } }),
        Value::Flag => json!({ "type": "boolean" }),
        Value::Switch => json!({ "enum": [true, false, "yes", "no"] }),
        Value::Number(min, max) => json!({ "type": "integer", "minimum": min, "maximum": max }),
        Value::Numbers(min, max) => json!({
            "type": ["integer", "array"], "minimum": min, "maximum": max,
            "items": { "type": "integer", "minimum": min, "maximum": max }
        }),
        Value::NumberOr(min, max, word) => json!({
            "anyOf": [{ "type": "integer", "minimum": min, "maximum": max }, { "const": word }]
        }),
        Value::Seconds(min, max) => json!({
            "type": ["number", "string"], "minimum": min, "maximum": max, "pattern": "^[0-9]*\\.?[0-9]+s$"
        }),
        Value::Word(words) => json!({ "enum": words }),
    }
}

/// The settings under ipfw's names, which may have ipfw's prefix.
fn settings() -> Json {
    let setting = |values: Values| {
        let kind = if values == Values::Switch { json!(["boolean", "integer"]) } else { json!("integer") };
        json!({ "type": kind, "minimum": 0, "maximum": values.max() })
    };
    let row = |own: &towpath_gate::Setting| {
        let mut property = setting(own.values);
        property["description"] = format!("{}. Default: {}", plain(own.help), own.default).into();
        (own.name.to_owned(), property)
    };
    let properties: Map<String, Json> = settings::table().map(row).collect();
    let prefixed = r"^net\.inet\.ip\.fw\.|^net\.inet6\.ip6\.fw\.";
    json!({
        "type": "object",
        "description": "Settings of the rules and the states, as `towpath ctl sysctl` changes them",
        "properties": properties,
        "patternProperties": { prefixed: { "type": ["boolean", "integer"] } },
        "additionalProperties": false,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_is_in_the_schema() {
        let schema = schema();
        for key in KEYS {
            // A table of the second level is in that of the first.
            let first = key.table.split_once('.').map(|(outer, _)| outer);
            let tables = first.into_iter().chain(Some(key.table).filter(|table| !table.is_empty()));
            let path = tables.fold(String::new(), |path, table| {
                let (_, shape, _) =
                    TABLES.iter().find(|(name, ..)| *name == table).expect("the table is listed");
                let inner = match shape {
                    Shape::One => "",
                    Shape::Named => "/additionalProperties",
                    Shape::Numbered => "/patternProperties/^[1-9][0-9]{0,4}$",
                    Shape::List => "/anyOf/0",
                };
                let name = table.rsplit('.').next().unwrap_or(table);
                format!("{path}/properties/{name}{inner}")
            });
            let path = format!("{path}/properties/{}", key.name);
            let found = schema.pointer(&path).unwrap_or_else(|| panic!("{path} is missing"));
            let description = found["description"].as_str().unwrap_or_default();
            assert!(!description.is_empty() && !description.contains("]("), "{path}: {description}");
        }
    }

    #[test]
    fn defaults_are_values() {
        let schema = schema();
        let port = "/properties/port/additionalProperties/properties";
        assert_eq!(schema.pointer("/properties/default/default"), Some(&json!("deny")));
        assert_eq!(schema.pointer(&format!("{port}/echo/default")), Some(&json!(1000)));
        assert_eq!(schema.pointer(&format!("{port}/gso/default")), Some(&json!(true)));
        let interface = schema.pointer(&format!("{port}/interface/description")).unwrap();
        assert!(interface.as_str().unwrap().ends_with(". Default: NAME"), "{interface}");
    }

    #[test]
    fn a_mux_has_a_worker_here_or_elsewhere() {
        let mux = &schema()["properties"]["mux"]["additionalProperties"];
        assert_eq!(mux["required"], json!(["listen", "framing"]));
        assert_eq!(mux["anyOf"], json!([{ "required": ["worker"] }, { "required": ["remote"] }]));
        assert_eq!(mux["properties"]["worker"]["description"], "command of a worker process");
    }

    #[test]
    fn help_is_plain_text() {
        let rows = [
            ("the [rule file](rules.md)", "the rule file"),
            ("weight in the [reorder buffer](../how/x.md#y) (below)", "weight in the reorder buffer"),
            ("a [ that opens nothing", "a [ that opens nothing"),
        ];
        for (help, expected) in rows {
            assert_eq!(plain(help), expected);
        }
    }
}
