//! The bars of zero-copy sends: CPU of the sender, and of both ends together, over that of plain sends.

use std::fs;

use anyhow::{Context, Result, bail};

use crate::bar::{Bar, Better, Report};
use crate::peer::{Skipped, netns};
use crate::pin::Cpus;
use crate::side::Side;
use crate::stat::median;
use crate::subject::rows::{self, Row};
use crate::transfer::{self, DEVICES, How, Run, SEGMENT, Told};

/// Messages, with the bars for ordinary pages, huge pages, and both ends together.
const SIZES: [(usize, f64, f64, f64); 5] = [
    (4 << 10, 0.54, 0.47, 0.82),
    (16 << 10, 0.37, 0.31, 0.75),
    (64 << 10, 0.28, 0.23, 0.72),
    (256 << 10, 0.28, 0.17, 0.72),
    (1 << 20, 0.24, 0.15, 0.73),
];

const SENDER: &str = "sender";
/// What the sender may cost over a loop of send(2) that has nothing to decide.
const BESIDE_BARE: f64 = 1.05;

/// Of so many turns one does not count: that in which others took the sender's CPU away most often.
const COUNTS: usize = 3;

/// The longest of the random lengths, and how many there are.
const RANDOM: usize = 32 << 10;
const MESSAGES: usize = 1_000_000;

/// One row: kinds of transfer, in turns.
struct Case {
    name: String,
    veth: bool,
    ours: Run,
    peer: Run,
    /// The bare sender, without a copy: what the kernel alone costs.
    bare: Option<Run>,
    figures: Vec<Figure>,
    /// Transfers for each repetition.
    slices: u32,
}

/// What is compared.
struct Figure {
    name: &'static str,
    unit: &'static str,
    better: Better,
    bar: f64,
    of: fn(&Told, &Told) -> f64,
}

const fn sender_cpu(bar: f64) -> Figure {
    Figure {
        name: SENDER,
        unit: "s/GB",
        better: Better::Lower,
        bar,
        of: |sent, _| sent.cpu / gigabytes(sent),
    }
}

const fn system_cpu(bar: f64) -> Figure {
    Figure {
        name: "both ends",
        unit: "s/GB",
        better: Better::Lower,
        bar,
        of: |sent, received| (sent.cpu + received.cpu + received.napi) / gigabytes(sent),
    }
}

const fn throughput(bar: f64) -> Figure {
    Figure {
        name: "rate",
        unit: "GB/s",
        better: Better::Higher,
        bar,
        of: |sent, _| gigabytes(sent) / sent.wall,
    }
}

const fn gigabytes(told: &Told) -> f64 {
    told.bytes as f64 / 1e9
}

/// What one transfer sends, in a quarter of a second and less: what is compared is near in time, and there are many turns to take the median
/// of.
const SLICE: u64 = 256 << 20;

/// What goes before it over the same connection, unmeasured: at first plain sends cost less than they do in the long run, and those
/// without a copy more. Windows and caches are not yet what they will be.
const WARM: u64 = 64 << 20;

/// Measures and prints; whether every bar that could be measured holds.
pub(crate) fn run(json: bool, megabytes: u64, reps: u32, only: Option<&str>) -> Result<bool> {
    let cases = rows::chosen(cases(megabytes << 20), only)?;
    rows::need_root()?;
    let cpus = Cpus::find()?;
    let (mut report, mut good) = (Report::new(json), true);
    let _pages = cases.iter().any(|case| case.ours.huge).then(HugePages::reserve);
    for veth in [true, false] {
        if !cases.iter().any(|case| case.veth == veth) {
            continue;
        }
        let mut world = match World::start(veth, cpus) {
            Err(error) if error.is::<Skipped>() => {
                eprintln!("{}: {error}", if veth { "veth" } else { "loopback" });
                continue;
            }
            world => world?,
        };
        for case in cases.iter().filter(|case| case.veth == veth) {
            if let Err(error) = world.measure(case, reps, &mut report) {
                eprintln!("{}: failed: {error:#}", case.name);
                good = false;
                // What is left of the transfer would disturb the next.
                world = World::start(veth, cpus)?;
            }
        }
    }
    Ok(report.finish()? && good)
}

impl Row for Case {
    fn name(&self) -> &str {
        &self.name
    }
}

fn cases(total: u64) -> Vec<Case> {
    let slices = u32::try_from(total.div_ceil(SLICE)).unwrap_or(u32::MAX);
    let total = total.min(SLICE);
    let run = |message: usize, how, huge| Run {
        message,
        // Whole messages.
        total: (WARM + total).div_ceil(message as u64) * message as u64,
        warm: WARM,
        how,
        bare: false,
        huge,
        gather: 0,
        read_every: 64,
        batch: 1,
        segment: None,
        random: false,
    };
    let pair = |message, huge| (run(message, How::Zerocopy, huge), run(message, How::Plain, huge));
    let mut cases = Vec::new();
    for (huge, pages) in [(false, "4K pages"), (true, "huge pages")] {
        for (message, ordinary_bar, huge_bar, system_bar) in SIZES {
            let (ours, peer) = pair(message, huge);
            let mut figures = vec![sender_cpu(if huge { huge_bar } else { ordinary_bar })];
            if !huge {
                figures.push(system_cpu(system_bar));
            }
            let bare = Some(Run { bare: true, ..ours });
            cases.push(Case {
                name: format!("{} {pages}", kib(message)),
                veth: true,
                ours,
                peer,
                bare,
                figures,
                slices,
            });
        }
    }
    let (ours, peer) = pair(4 << 10, false);
    let gathered = |run| Run { gather: 64 << 10, ..run };
    cases.push(Case {
        name: "4K gathered to 64K".to_owned(),
        veth: true,
        ours: gathered(ours),
        peer: gathered(peer),
        bare: Some(Run { bare: true, ..run(64 << 10, How::Zerocopy, false) }),
        figures: vec![sender_cpu(SIZES[2].1)],
        slices,
    });
    // How often the error queue is read, over once for each call.
    let (ours, _) = pair(16 << 10, true);
    for read_every in [8, 32, 128] {
        cases.push(Case {
            name: format!("16K, queue read every {read_every}"),
            veth: true,
            ours: Run { read_every, ..ours },
            peer: Run { read_every: 1, ..ours },
            bare: None,
            figures: vec![sender_cpu(1.0)],
            slices: slices.div_ceil(2),
        });
    }
    let (ours, peer) = pair(7 * usize::from(SEGMENT), true);
    let datagrams = |run: Run| Run {
        segment: Some(SEGMENT),
        total: total / 4 / run.message as u64 * run.message as u64,
        warm: 0,
        ..run
    };
    cases.push(Case {
        name: "UDP GSO 56K".to_owned(),
        veth: true,
        ours: datagrams(ours),
        peer: datagrams(peer),
        bare: None,
        figures: vec![sender_cpu(1.0)],
        slices,
    });
    let (ours, peer) = pair(RANDOM, true);
    let total = transfer::lengths(RANDOM).take(MESSAGES).sum::<usize>() as u64;
    let random = |run| Run { total, warm: 0, random: true, gather: 64 << 10, ..run };
    cases.push(Case {
        name: "10^6 messages of random lengths".to_owned(),
        veth: true,
        ours: random(ours),
        peer: random(peer),
        bare: None,
        figures: Vec::new(),
        slices: 1,
    });
    for message in [4 << 10, 64 << 10, 1 << 20] {
        let adaptive = Run { read_every: 32, ..run(message, How::Adaptive, true) };
        cases.push(Case {
            name: format!("loopback {}", kib(message)),
            veth: false,
            ours: adaptive,
            peer: run(message, How::Plain, true),
            bare: None,
            figures: vec![sender_cpu(1.03), throughput(0.97)],
            slices,
        });
    }
    cases
}

fn kib(bytes: usize) -> String {
    if bytes < 1 << 20 { format!("{}K", bytes >> 10) } else { format!("{}M", bytes >> 20) }
}

/// Huge pages for what is sent from, given back at the end. A system that has none left makes transparent ones do.
struct HugePages {
    before: Option<String>,
}

impl HugePages {
    fn reserve() -> Self {
        let before = fs::read_to_string(NR_HUGEPAGES).ok();
        let had: usize = before.as_deref().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
        if let Err(error) = fs::write(NR_HUGEPAGES, (had + PAGES).to_string()) {
            eprintln!("{NR_HUGEPAGES}: {error}");
        }
        Self { before }
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        // Fails only where reserving failed.
        let _ = self.before.as_deref().map(|before| fs::write(NR_HUGEPAGES, before));
    }
}

const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";
/// The sender's area and some.
const PAGES: usize = 24;

/// The two processes.
struct World {
    sender: Side,
    receiver: Side,
}

impl World {
    fn start(veth: bool, cpus: Cpus) -> Result<Self> {
        let words = |role: &str, how: String, cpu: usize| [role.to_owned(), how, cpu.to_string()];
        let mut receiver = Side::start(
            &words("send-receiver", if veth { "veth" } else { "loopback" }.to_owned(), cpus.consumer),
            &[],
        )?;
        expect(&mut receiver, "unshared")?;
        let join = if veth { 0 } else { receiver.pid() };
        let mut sender = Side::start(&words("send-sender", join.to_string(), cpus.engine), &[])?;
        expect(&mut sender, "unshared")?;
        if veth {
            netns::connect_as(DEVICES, sender.pid(), receiver.pid())?;
        }
        for side in [&mut receiver, &mut sender] {
            side.tell("go")?;
            expect(side, "ready")?;
        }
        Ok(Self { sender, receiver })
    }

    fn measure(&mut self, case: &Case, reps: u32, report: &mut Report) -> Result<()> {
        let turns = (case.slices * reps) as usize;
        // What comes first has other neighbours in time: it changes places.
        let mut turns: Vec<Turn> =
            (0..turns).map(|at| self.turn(case, at % 2 == 0)).collect::<Result<_>>()?;
        turns.sort_by_key(|turn| turn.preempted);
        turns.truncate(turns.len() - turns.len() / COUNTS);
        let of =
            |which: fn(&Turn) -> Option<(Told, Told)>| turns.iter().filter_map(which).collect::<Vec<_>>();
        let ours = of(|turn| Some(turn.ours));
        let (peer, bare) = (of(|turn| Some(turn.peer)), of(|turn| turn.bare));
        for figure in &case.figures {
            let of = |runs: &[(Told, Told)]| -> Vec<f64> {
                runs.iter().map(|(sent, received)| (figure.of)(sent, received)).collect()
            };
            let name = format!("{}, {}", case.name, figure.name);
            report.push(paired(&name, &of(&ours), &of(&peer), figure, figure.bar));
            if figure.name == SENDER && !bare.is_empty() {
                let name = format!("{}, {} beside a bare one", case.name, figure.name);
                report.push(paired(&name, &of(&ours), &of(&bare), figure, BESIDE_BARE));
            }
        }
        if case.ours.how == How::Zerocopy {
            let sum = |of: fn(&Told) -> u64| ours.iter().map(|(sent, _)| of(sent)).sum::<u64>() as f64;
            let (copied, numbers) = (sum(|told| told.copied), sum(|told| told.numbers));
            let name = format!("{}, copied", case.name);
            report.push(Bar::new(&name, copied, numbers, "numbers", Better::Lower, 0.0));
            if case.ours.random {
                let (tampered, messages) = (sum(|told| told.tampered), (ours.len() * MESSAGES) as f64);
                let name = format!("{}, changed in flight", case.name);
                report.push(Bar::new(&name, tampered, messages, "frames", Better::Lower, 0.0));
            }
            let plain = sum(|told| told.plain_bytes);
            if plain > sum(|told| told.bytes) / 1000.0 {
                eprintln!("{}: {:.1} MB of it went plain", case.name, plain / 1e6);
            }
            if case.ours.huge && ours.iter().any(|(sent, _)| !sent.huge) {
                eprintln!("{}: there were no reserved huge pages", case.name);
            }
        }
        Ok(())
    }

    /// One transfer of each kind, one behind the other.
    fn turn(&mut self, case: &Case, peer_first: bool) -> Result<Turn> {
        let first = self.transfer(if peer_first { case.peer } else { case.ours })?;
        let second = self.transfer(if peer_first { case.ours } else { case.peer })?;
        let bare = case.bare.map(|run| self.transfer(run)).transpose()?;
        let (peer, ours) = if peer_first { (first, second) } else { (second, first) };
        let all = [Some(ours), Some(peer), bare];
        let preempted = all.iter().flatten().map(|(sent, _)| sent.preempted).sum();
        Ok(Turn { ours, peer, bare, preempted })
    }

    fn transfer(&mut self, run: Run) -> Result<(Told, Told)> {
        let line = serde_json::to_string(&run)?;
        self.receiver.tell(&line)?;
        self.sender.tell(&line)?;
        let sent = serde_json::from_str(&self.sender.line()?).context("what the sender says")?;
        let received = serde_json::from_str(&self.receiver.line()?).context("what the receiver says")?;
        Ok((sent, received))
    }
}

/// Transfers that are compared with each other.
struct Turn {
    ours: (Told, Told),
    peer: (Told, Told),
    bare: Option<(Told, Told)>,
    preempted: u64,
}

fn paired(name: &str, ours: &[f64], peer: &[f64], figure: &Figure, bar: f64) -> Bar {
    let ratios: Vec<f64> = ours.iter().zip(peer).map(|(ours, peer)| ours / peer).collect();
    Bar::paired(name, median(ours), median(peer), median(&ratios), figure.unit, figure.better, bar)
}

fn expect(side: &mut Side, word: &str) -> Result<()> {
    let line = side.line()?;
    if line != word {
        bail!("{line:?} where {word:?} was due");
    }
    Ok(())
}
