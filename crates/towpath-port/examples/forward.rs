//! Forwards frames between two ports of any drivers for some seconds, then prints how many frames passed.
//!
//! ```text
//! cargo run --release -p towpath-port --example forward -- packet:eth0 packet:eth1 --seconds 10
//! ``` Ports: `packet:NAME[,vnet]`, `xdp:NAME[,native][,frags][,busy]`, `tun:NAME[,plain]`, `tap:NAME[,plain]`, `nfqueue:N` (as the
//! only port: every packet is accepted), `generator:WORDS` (receives only), `null` (drops all frames that are sent to it),
//! `pcap:FILE` (writes only). With `--park`, a loop without frames sleeps in poll(2); otherwise it spins.

use std::error::Error;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use towpath_port::{
    Burst, Caps, Frame, Port, QueueVerdict, Received, Stats, TxDrop, af_packet, af_xdp, generator, nfqueue,
    pcap, tun,
};

fn main() -> Result<(), Box<dyn Error>> {
    let mut ports = Vec::new();
    let (mut seconds, mut park) = (5, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--seconds" => seconds = arguments.next().ok_or("--seconds needs a number")?.parse()?,
            "--park" => park = true,
            port => ports.push(open(port)?),
        }
    }
    if ports.is_empty() {
        return Err(
            "forward PORT [PORT] [--seconds N] [--park]; ports are described at the top of this example"
                .into(),
        );
    }
    eprintln!("ready");
    run(&mut ports, Instant::now() + Duration::from_secs(seconds), park)?;
    for port in &mut ports {
        let name = port.name().to_owned();
        let stats = port.stats();
        let Stats { received, received_bytes, sent, sent_bytes, .. } = stats;
        let dropped: Vec<_> = stats.drops().filter(|(_, count)| *count > 0).collect();
        println!(
            "{name}: received {received} ({received_bytes} B), sent {sent} ({sent_bytes} B), {dropped:?}"
        );
    }
    Ok(())
}

fn open(text: &str) -> Result<Box<dyn Port>, Box<dyn Error>> {
    let (driver, rest) = text.split_once(':').unwrap_or((text, ""));
    let mut words = rest.split(',');
    let name = words.next().unwrap_or_default();
    let options: Vec<&str> = words.collect();
    let has = |option| options.contains(&option);
    Ok(match driver {
        "packet" => {
            let config = af_packet::Config { vnet_hdr: has("vnet"), ..af_packet::Config::new(name) };
            Box::new(af_packet::Socket::open(config)?)
        }
        "xdp" => {
            let mode = if has("native") { af_xdp::Mode::Native } else { af_xdp::Mode::Skb };
            let (multi_buffer, busy_poll) = (has("frags"), has("busy").then_some(20));
            let config = af_xdp::Config { mode, multi_buffer, busy_poll, ..af_xdp::Config::new(name) };
            Box::new(af_xdp::Socket::open(config)?)
        }
        "tun" | "tap" => {
            let config = if driver == "tun" { tun::Config::tun(name) } else { tun::Config::tap(name) };
            Box::new(tun::Device::open(tun::Config { vnet_hdr: !has("plain"), ..config })?)
        }
        "nfqueue" => Box::new(nfqueue::Queue::open(nfqueue::Config::new(name.parse()?))?),
        "generator" => Box::new(generator::Generator::new("generator", rest.parse()?)),
        "pcap" => Box::new(pcap::Writer::create(rest)?),
        "null" => Box::new(Null(Stats::default())),
        _ => return Err(format!("{text}: no such driver").into()),
    })
}

fn run(ports: &mut [Box<dyn Port>], until: Instant, park: bool) -> Result<(), Box<dyn Error>> {
    let mut burst = Burst::new(256);
    let mut rounds = 0_u32;
    loop {
        let mut idle = true;
        for from in 0..ports.len() {
            let caps = ports[from].caps();
            if !caps.receive || ports[from].receive(&mut burst)? != Received::Frames {
                continue;
            }
            idle = false;
            if caps.verdicts {
                burst.iter().try_for_each(|frame| ports[from].verdict(frame, QueueVerdict::Accept))?;
                ports[from].flush()?;
                continue;
            }
            let to = if ports.len() > 1 { 1 - from } else { 0 };
            if ports[to].caps().send {
                ports[to].send(&mut burst.iter())?;
            }
        }
        rounds = rounds.wrapping_add(1);
        if (idle || rounds.is_multiple_of(64)) && Instant::now() >= until {
            return Ok(());
        }
        if idle && park {
            let fds = ports.iter().filter_map(|port| port.poll_fd());
            let mut fds: Vec<_> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 100_000_000 }))?;
        } else if idle {
            std::hint::spin_loop();
        }
    }
}

/// Takes every frame.
struct Null(Stats);

impl Port for Null {
    fn name(&self) -> &str {
        "null"
    }

    fn caps(&self) -> Caps {
        let mut caps = Caps::default();
        caps.send = true;
        caps
    }

    fn receive(&mut self, burst: &mut Burst) -> Result<Received, towpath_port::Error> {
        burst.clear();
        Ok(Received::Nothing)
    }

    fn send<'a>(
        &mut self,
        frames: &mut dyn Iterator<Item = Frame<'a>>,
    ) -> Result<usize, towpath_port::Error> {
        let before = self.0.sent;
        for frame in frames {
            self.0.sent += 1;
            self.0.sent_bytes += frame.bytes.len() as u64;
        }
        Ok((self.0.sent - before) as usize)
    }

    fn take_refused(&mut self, _: &mut dyn FnMut(TxDrop, &[u8])) {}

    fn stats(&mut self) -> Stats {
        self.0
    }
}
