//! The scenes without privilege: a capture through the rules with an inspector process, and the message server and the file over
//! loopback.

use std::io;
use std::net::Ipv4Addr;
use std::time::Duration;

use serde_json::Value;

use super::digits::thousands;
use super::files::Files;
use super::netns_host::NetnsHost;
use super::network::Ends;
use super::process::{PATIENCE, Process};
use super::results::{Engine, Results};
use super::screen::Screen;
use super::status::Status;
use super::{Failure, Options, Stop, doing, file, messages};

const CAPTURE: &str = "inspected capture";
const WORKERS: &str = "worker killed";
const FILE: &str = "file sent";

const PLACE: &str = "loopback and a capture";

/// The queue and inspector of the example.
const INSPECTOR: &str = "1=towpath inspect --queue 1 --match password= --verdict drop";

/// Plays the scenes that need no privilege. `missing` is the reason why the others cannot be played.
pub(super) fn play(options: &Options, screen: &Screen, missing: &str) -> Result<Results, Failure> {
    let stop = Stop::on_signals()?;
    let status = screen.status(&[CAPTURE, WORKERS, FILE], &[]);
    status.shown().place = PLACE.into();
    status.shown().news.push_back(format!("Playing only the scenes without privilege: {missing}."));
    screen.show(&status, &stop, || {
        scenes(options, &stop, &status, missing).map_err(|failure| stop.explain(failure))
    })
}

fn scenes(options: &Options, stop: &Stop, status: &Status, missing: &str) -> Result<Results, Failure> {
    let files = Files::new()?;
    let here = NetnsHost::here();
    let ends = Ends {
        outside: &here,
        inside: &here,
        server: Ipv4Addr::LOCALHOST,
        shared: true,
        files: files.path(),
    };
    let mut results =
        Results { place: PLACE.into(), driver: "no interfaces", alone: true, ..Results::default() };
    results.left_out.push(format!(
        "hosts, the engine between them, an attack, the comparison with the kernel: {missing}"
    ));
    if options.driver.is_some() {
        results.left_out.push("--driver: no interfaces are used".into());
    }

    status.play(CAPTURE);
    let engine = replay(ends, stop)?;
    let sum = engine.passed + engine.dropped + engine.rejected;
    let line = format!(
        "{} packets: {} passed, {} dropped, {} rejected, {} inspected",
        thousands(engine.packets),
        thousands(engine.passed),
        thousands(engine.dropped),
        thousands(engine.rejected),
        thousands(engine.inspected)
    );
    close(status, &mut results, CAPTURE, "every packet is accounted for", sum == engine.packets, line);
    results.engine = Some(engine);

    status.play(WORKERS);
    let length = Duration::from_secs_f64(options.length.as_secs_f64() * 0.15);
    results.messages = messages::ask(ends, stop, status, length)?;
    let (well, line) = (results.messages.well(), results.messages.to_string());
    close(status, &mut results, WORKERS, "no message is lost when a worker dies", well, line);

    status.play(FILE);
    results.file = file::send(ends, stop, 64)?;
    let (well, line) = (results.file.well(), results.file.to_string());
    close(status, &mut results, FILE, "the file arrives whole", well, line);
    Ok(results)
}

fn close(
    status: &Status,
    results: &mut Results,
    scene: &'static str,
    name: &'static str,
    met: bool,
    saw: String,
) {
    status.over(scene, met, saw.clone());
    results.expect(name, met, saw);
}

/// Replays the capture of examples/ with an inspector process.
fn replay(ends: Ends<'_>, stop: &Stop) -> Result<Engine, Failure> {
    let write = |name: &str, bytes: &[u8]| std::fs::write(ends.files.join(name), bytes).map_err(doing(name));
    write("office.pcap", include_bytes!("../files/office.pcap"))?;
    write("office.ipfw", include_bytes!("../files/office.ipfw"))?;
    let words = ["replay", "office.pcap", "--rules", "office.ipfw", "--queue", INSPECTOR, "--json"];
    let said = Process::start(ends.inside, ends.files, "replay", &words)?.answer(stop, PATIENCE)?;
    let said: Value = serde_json::from_str(&said)
        .map_err(|error| doing("towpath replay")(io::Error::new(io::ErrorKind::InvalidData, error)))?;
    Ok(Engine::told(&said))
}
