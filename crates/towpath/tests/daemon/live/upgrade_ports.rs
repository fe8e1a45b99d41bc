//! Upgrades with ports whose packets wait in a queue of the kernel while no process reads: TAP devices and NFQUEUE.

use towpath_port::netns::{Host, ip, veth, within};

use super::drivers::queued;
use super::machines::*;
use super::upgrade::{Load, Running, TIME, upgrades};

const TOWPATH: &str = env!("CARGO_BIN_EXE_towpath");
/// UDP to port 11 has no inspector.
const RULES: &str = "add 100 allow layer2 mac-type arp\nadd 200 allow ip from any to any\n";

fn upgraded(mut engine: Running, left: &Host, right: &Host) {
    let load = Load::start(left, right, &[11]);
    let echo = Echo::start(left, right, 9100);
    echo.goes_on();
    for _ in 0..upgrades() {
        load.goes_on();
        engine.upgrade();
        echo.goes_on();
    }
    let (missing, sent) = load.end();
    assert_eq!(missing, [0], "of {sent} datagrams: {}", engine.first.json("show ports --json"));
    echo.goes_on();
    echo.end();
    engine.stop();
}

fn config(ports: &str) -> String {
    format!("{ports}[engine]\nupgrade = [\"{TOWPATH}\"]\n{TIME}\n")
}

#[towpath_testenv::needs(netns, tun)]
#[test]
fn upgrades_lose_no_packet_of_tap_devices() {
    within(|| {
        let files = files(&config(&BRIDGE.replace("af_packet", "tap")), RULES);
        let engine = Running::start(files.path());
        // A bridge of the kernel joins each device with a machine.
        let (left, right) = (Host::new(), Host::new());
        for (tap, own, end, bridge) in [("wan", "w0", "l0", "b0"), ("lan", "n0", "r0", "b1")] {
            veth(own, end);
            ip(&format!("link add {bridge} type bridge"));
            // The queue of a device has room for 500 frames: less than the load of a pause on a busy machine.
            ip(&format!("link set {tap} txqueuelen 20000"));
            ip(&format!("link set {tap} master {bridge}"));
            ip(&format!("link set {own} master {bridge} up"));
            ip(&format!("link set {bridge} up"));
        }
        left.take("l0", &format!("{LEFT}/24"));
        right.take("r0", &format!("{RIGHT}/24"));
        upgraded(engine, &left, &right);
    });
}

#[towpath_testenv::needs(netns, nfqueue)]
#[test]
fn upgrades_lose_no_packet_of_the_kernels_queue() {
    within(|| {
        let (left, right) = queued();
        let ports = "rules = \"r.ipfw\"\n[port.kernel]\ndriver = \"nfqueue\"\nqueue = 5\n[control]\nsocket = \"ctl.sock\"\n";
        let files = files(&config(ports), RULES);
        let engine = Running::start(files.path());
        upgraded(engine, &left, &right);
    });
}
