//! The metrics endpoint: formats, scrapers, alerts, and hostile clients.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use towpath_port::netns::within;

use crate::live::machines::*;
use crate::support::until;

const ADDRESS: &str = "127.0.0.1:9464";
const METRICS: &str = "[metrics]\nlisten = \"127.0.0.1:9464\"\n";
const OPENMETRICS: &str = "application/openmetrics-text;version=1.0.0";

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/observe")
}

/// Status line with fields, and body.
fn exchange(mut stream: impl Read + Write, accept: &str) -> (String, String) {
    let request =
        format!("GET /metrics HTTP/1.1\r\nHost: a\r\nAccept: {accept}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer}"));
    (head.to_owned(), body.to_owned())
}

fn connect() -> TcpStream {
    let stream = TcpStream::connect(ADDRESS).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream
}

fn scrape(accept: &str) -> String {
    let (head, body) = exchange(connect(), accept);
    assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
    body
}

/// The value of a sample in the format 0.0.4.
fn value(text: &str, sample: &str) -> f64 {
    let value = text.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
    value.unwrap_or_else(|| panic!("no {sample} in {text}")).parse().unwrap()
}

/// Passes `input` to a program, which must accept it. Returns its output.
fn accepted(program: &str, words: &[&str], input: &str) -> String {
    let mut child = Command::new(program)
        .args(words)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    let output = child.wait_with_output().unwrap();
    let said =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {words:?}: {said}\n{input}");
    said
}

/// Prints the samples of OpenMetrics text as JSON: name with sorted labels, and value.
const PARSE: &str = "
import json, sys
from prometheus_client.openmetrics.parser import text_string_to_metric_families
samples = {}
for family in text_string_to_metric_families(sys.stdin.read()):
    assert family.documentation, family.name
    for sample in family.samples:
        labels = ','.join(f'{name}={value}' for name, value in sorted(sample.labels.items()))
        samples[sample.name + '{' + labels + '}'] = sample.value
print(json.dumps(samples))
";

/// Both formats are what their own parsers accept, and have the values of the control socket.
#[towpath_testenv::needs(netns, "promtool", "python:prometheus_client")]
#[test]
fn both_formats_are_what_their_parsers_accept() {
    within(|| {
        let (left, right) = machines();
        let queue =
            "[queue.1]\ncommand = \"towpath inspect --queue 1 --match nothing-like-this --verdict drop\"\n";
        let files = files(&format!("{BRIDGE}{METRICS}{queue}"), RULES);
        let engine = Engine::start(files.path());
        arrived(transfer(&left, &right, 9000));
        arrived(transfer(&left, &right, 9001));
        let packets = || engine.json("show stats --json")["stats"]["packets"].as_u64().unwrap();
        // The last acknowledgements have arrived, and the text has them.
        let (mut samples, mut all) = (BTreeMap::new(), 0);
        let python = format!("{}/bin/python", towpath_testenv::clients!());
        until(|| {
            all = packets();
            let text = scrape(OPENMETRICS);
            samples =
                serde_json::from_str::<BTreeMap<String, f64>>(&accepted(&python, &["-c", PARSE], &text))
                    .unwrap();
            samples.get("towpath_engine_packets_total{}") == Some(&(all as f64)) && packets() == all
        });
        let sample = |name: &str| *samples.get(name).unwrap_or_else(|| panic!("{name}: {samples:?}"));
        let queues = engine.json("show queues --json");
        let frames = queues["queues"][0]["frames"].as_u64().unwrap();
        assert!(frames > 0);
        assert_eq!(sample("towpath_queue_frames_total{queue=1}"), frames as f64);
        assert_eq!(sample("towpath_reload_last_refused{}"), 0.0);
        // Each frame has a verdict of the inspector.
        assert_eq!(sample("towpath_queue_verdict_time_seconds_count{queue=1}"), frames as f64);
        assert!(sample("towpath_queue_verdict_time_seconds_sum{queue=1}") > 0.0);
        for name in [
            "towpath_thread_busy_seconds_total{thread=engine-0}",
            "towpath_thread_asleep_seconds_total{thread=engine-0}",
            "towpath_thread_cpu_seconds_total{thread=engine-0}",
            "towpath_process_resident_bytes{}",
            "towpath_process_cpu_seconds_total{}",
            "towpath_control_accepted_connections_total{}",
            "towpath_states_created_states_total{}",
        ] {
            assert!(sample(name) > 0.0, "{name}");
        }
        // A client that does not name OpenMetrics gets the older format, with the same samples.
        let text = scrape("*/*");
        accepted("promtool", &["check", "metrics"], &text);
        let names = |text: &str| -> Vec<String> {
            let lines = text.lines().filter(|line| !line.starts_with('#'));
            lines.map(|line| line.rsplit_once(' ').unwrap().0.to_owned()).collect()
        };
        assert_eq!(names(&text), names(&scrape(OPENMETRICS)));
        engine.stop();
    });
}

/// The dashboard asks for metrics that exist.
#[towpath_testenv::needs(netns)]
#[test]
fn the_dashboard_and_the_alerts_name_existing_metrics() {
    let mut documented: Vec<String> = vec!["towpath_build_info".into()];
    for table in towpath::metrics::TABLES {
        documented.extend(table.rows.iter().map(|row| match row.kind {
            towpath_metrics::Kind::Counter => row.family() + "_total",
            towpath_metrics::Kind::Gauge => row.family(),
            towpath_metrics::Kind::Histogram => row.family() + "_bucket",
        }));
    }
    let mut count = 0;
    for file in ["dashboard.json", "alerts.yml", "alerts_test.yml"] {
        let text = std::fs::read_to_string(examples().join(file)).unwrap();
        let is_part = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
        for name in text.split(|c| !is_part(c)).filter(|word| word.starts_with("towpath_")) {
            assert!(documented.iter().any(|known| known == name), "{file}: no metric {name}");
            count += 1;
        }
    }
    assert!(count > 30, "{count}");
    let text = std::fs::read_to_string(examples().join("dashboard.json")).unwrap();
    assert!(
        serde_json::from_str::<Value>(&text).unwrap()["panels"]
            .as_array()
            .is_some_and(|panels| panels.len() > 10)
    );
}

#[towpath_testenv::needs("promtool")]
#[test]
fn promtool_accepts_configuration_and_alerts() {
    let file = |name: &str| examples().join(name).display().to_string();
    accepted("promtool", &["check", "config", &file("prometheus.yml")], "");
    accepted("promtool", &["check", "rules", &file("alerts.yml")], "");
    accepted("promtool", &["test", "rules", &file("alerts_test.yml")], "");
}

/// Prometheus scrapes the engine, and a refused reload raises its alert.
#[towpath_testenv::needs(netns, "prometheus", "curl")]
#[test]
fn prometheus_scrapes_the_endpoint() {
    within(|| {
        let (left, right) = machines();
        let files = files(&format!("{BRIDGE}{METRICS}"), RULES);
        let engine = Engine::start(files.path());
        for name in ["prometheus.yml", "alerts.yml"] {
            let text = std::fs::read_to_string(examples().join(name)).unwrap();
            std::fs::write(files.path().join(name), text.replace("15s", "200ms")).unwrap();
        }
        let path = |name: &str| files.path().join(name).display().to_string();
        let mut prometheus = Command::new("prometheus")
            .args(["--config.file", &path("prometheus.yml"), "--storage.tsdb.path", &path("data")])
            .args(["--web.listen-address", "127.0.0.1:9090", "--log.level", "error"])
            .spawn()
            .unwrap();
        let query = |expression: &str| -> Vec<Value> {
            let output = Command::new("curl")
                .args(["--silent", "--get", "http://127.0.0.1:9090/api/v1/query", "--data-urlencode"])
                .arg(format!("query={expression}"))
                .output()
                .unwrap();
            let answer: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
            answer["data"]["result"].as_array().cloned().unwrap_or_default()
        };
        arrived(transfer(&left, &right, 9001));
        until(|| {
            let found = query("towpath_engine_passed_packets_total{job=\"towpath\"}");
            found.first().is_some_and(|found| found["value"][1] != "0")
        });
        // On a busy machine, a scrape may have taken longer than the interval.
        until(|| query("up{job=\"towpath\"}").first().is_some_and(|up| up["value"][1] == "1"));
        assert!(query("ALERTS{alertname=\"TowpathReloadRefused\"}").is_empty());
        std::fs::write(files.path().join("r.ipfw"), "add alow ip from any to any\n").unwrap();
        engine.signal(Signal::HUP);
        until(|| !query("ALERTS{alertname=\"TowpathReloadRefused\", alertstate=\"firing\"}").is_empty());
        kill_process(Pid::from_child(&prometheus), Signal::TERM).unwrap();
        prometheus.wait().unwrap();
        engine.stop();
    });
}

/// Clients that send nothing, send slowly and take nothing have all places. Other scrapers are served, and packets too.
#[towpath_testenv::needs(netns)]
#[test]
fn hostile_clients_cost_others_nothing() {
    within(|| {
        let (left, right) = machines();
        let files = files(&format!("{BRIDGE}{METRICS}"), RULES);
        let engine = Engine::start(files.path());
        let mut hostile = Vec::new();
        for at in 0..200 {
            let mut client = connect();
            match at % 4 {
                0 => {}
                1 => client.write_all(b"GET /metrics HTTP/1.1\r\nX: ").unwrap(),
                // Answers that it does not read.
                2 => client.write_all("GET /metrics HTTP/1.1\r\n\r\n".repeat(100).as_bytes()).unwrap(),
                _ => client.write_all(&[0xff; 64]).unwrap(),
            }
            hostile.push(client);
            if at % 20 == 0 {
                assert!(value(&scrape("*/*"), "towpath_scrape_clients_connections{}") <= 32.0);
            }
        }
        arrived(transfer(&left, &right, 9001));
        until(|| {
            let text = scrape("*/*");
            value(&text, "towpath_scrape_closed_connections_total{reason=\"displaced\"}") > 0.0
                && value(&text, "towpath_scrape_requests_total{result=\"refused\"}") > 0.0
        });
        drop(hostile);
        engine.stop();
    });
}

/// The engine listens before it gives up its privileges, on a port below 1024 or with a socket file of its user, and without a control
/// socket too.
#[towpath_testenv::needs(root, netns)]
#[test]
fn an_engine_without_privileges_has_an_endpoint() {
    within(|| {
        let (_left, _right) = machines();
        let config = BRIDGE.replace("[control]\nsocket = \"ctl.sock\"\n", "");
        assert_ne!(config, BRIDGE);
        for (listen, file) in [("127.0.0.1:464", None), ("unix:m/m.sock", Some("m/m.sock"))] {
            let config = format!("{config}[engine]\nuser = \"nobody\"\n[metrics]\nlisten = \"{listen}\"\n");
            let files = files(&config, RULES);
            // The engine's user removes the file.
            std::fs::set_permissions(files.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
            let mut engine = Command::new(env!("CARGO_BIN_EXE_towpath"))
                .args(["run", files.path().join("t.toml").to_str().unwrap()])
                .stderr(Stdio::piped())
                .stdout(Stdio::null())
                .spawn()
                .unwrap();
            let mut answer = None;
            until(|| {
                answer = match file {
                    None => TcpStream::connect(listen).ok().map(|stream| exchange(stream, "*/*")),
                    Some(file) => UnixStream::connect(files.path().join(file))
                        .ok()
                        .map(|stream| exchange(stream, "*/*")),
                };
                answer.is_some() || engine.try_wait().unwrap().is_some()
            });
            let (head, text) = answer.expect("the engine runs");
            assert!(head.starts_with("HTTP/1.1 200 OK\r\n"), "{head}");
            assert!(value(&text, "towpath_process_resident_bytes{}") > 0.0);
            if let Some(file) = file {
                let mode = std::fs::metadata(files.path().join(file)).unwrap().permissions().mode();
                assert_eq!(mode & 0o777, 0o600);
            }
            kill_process(Pid::from_child(&engine), Signal::TERM).unwrap();
            let output = engine.wait_with_output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && said.contains("metrics: listens on "), "{said}");
            assert!(
                file.is_none_or(|file| !files.path().join(file).exists()),
                "the socket's file is removed"
            );
        }
    });
}
