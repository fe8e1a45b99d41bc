//! Metrics of zero-copy sends: CPU of the sender, and of both ends, relative to plain sends.

use std::fs;

use anyhow::{Context, Result, bail};

use crate::metric::{Better, Metric, Report};
use crate::peer::{Skipped, netns};
use crate::pin::Cpus;
use crate::side::Side;
use crate::stat::median;
use crate::subject::rows::{self, Row};
use crate::transfer::{self, DEVICES, How, Run, SEGMENT, Told};

/// Message sizes with the targets for ordinary pages, huge pages, and both ends.
const SIZES: [(usize, f64, f64, f64); 5] = [
    (4 << 10, 0.54, 0.47, 0.82),
    (16 << 10, 0.37, 0.31, 0.75),
    (64 << 10, 0.28, 0.23, 0.72),
    (256 << 10, 0.28, 0.17, 0.72),
    (1 << 20, 0.24, 0.15, 0.73),
];

const SENDER: &str = "sender";
/// Target of the sender's CPU relative to a minimal loop of send(2).
const OVER_BASELINE: f64 = 1.05;

/// Target of the sender's CPU through io_uring relative to MSG_ZEROCOPY.
const OVER_MSG_ZEROCOPY: f64 = 1.25;

/// One in this many turns is discarded: those with the most preemptions of the sender.
const COUNTS: usize = 3;

/// Maximum of the random lengths.
const RANDOM: usize = 32 << 10;
/// Number of messages of random lengths.
const MESSAGES: usize = 1_000_000;

/// A row: transfers by different methods, in alternation.
struct Case {
    name: String,
    veth: bool,
    ours: Run,
    peer: Run,
    /// The loop with which the sender's CPU is compared, besides plain sends.
    baseline: Option<Baseline>,
    figures: Vec<Figure>,
    /// Transfers per repetition.
    slices: u32,
}

/// A second comparison of the sender's CPU.
struct Baseline {
    run: Run,
    name: &'static str,
    target: f64,
}

impl Baseline {
    /// The minimal zero-copy sender, which shows the kernel's cost.
    fn bare(run: Run) -> Self {
        Self { run: Run { baseline: true, ..run }, name: "over a bare one", target: OVER_BASELINE }
    }
}

/// A compared figure.
struct Figure {
    name: &'static str,
    unit: &'static str,
    better: Better,
    target: f64,
    of: fn(&Told, &Told) -> f64,
}

const fn sender_cpu(target: f64) -> Figure {
    Figure {
        name: SENDER,
        unit: "s/GB",
        better: Better::Lower,
        target,
        of: |sent, _| sent.cpu / gigabytes(sent),
    }
}

const fn system_cpu(target: f64) -> Figure {
    Figure {
        name: "both ends",
        unit: "s/GB",
        better: Better::Lower,
        target,
        of: |sent, received| (sent.cpu + received.cpu + received.napi) / gigabytes(sent),
    }
}

const fn throughput(target: f64) -> Figure {
    Figure {
        name: "rate",
        unit: "GB/s",
        better: Better::Higher,
        target,
        of: |sent, _| gigabytes(sent) / sent.wall,
    }
}

const fn gigabytes(told: &Told) -> f64 {
    told.bytes as f64 / 1e9
}

/// Bytes per transfer. A transfer takes at most a quarter of a second, so that compared transfers are close in time and the median has
/// many of them.
const SLICE: u64 = 256 << 20;

/// Unmeasured bytes at the start of each connection. Initially, plain sends cost less than later and zero-copy sends more, until TCP
/// windows and caches are in a steady state.
const WARM: u64 = 64 << 20;

/// Measures and prints all rows. Returns true if every measured metric meets its target.
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
        let mut topology = match Topology::start(veth, cpus) {
            Err(error) if error.is::<Skipped>() => {
                eprintln!("{}: {error}", if veth { "veth" } else { "loopback" });
                continue;
            }
            topology => topology?,
        };
        for case in cases.iter().filter(|case| case.veth == veth) {
            if let Err(error) = topology.measure(case, reps, &mut report) {
                eprintln!("{}: failed: {error:#}", case.name);
                good = false;
                // The rest of the transfer would disturb the next one.
                topology = Topology::start(veth, cpus)?;
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
        // Round up to whole messages.
        total: (WARM + total).div_ceil(message as u64) * message as u64,
        warm: WARM,
        how,
        baseline: false,
        huge,
        gather: 0,
        read_every: 64,
        batch: 1,
        segment: None,
        io_uring: false,
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
            let baseline = Some(Baseline::bare(ours));
            cases.push(Case {
                name: format!("{} {pages}", kib(message)),
                veth: true,
                ours,
                peer,
                baseline,
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
        baseline: Some(Baseline::bare(run(64 << 10, How::Zerocopy, false))),
        figures: vec![sender_cpu(SIZES[2].1)],
        slices,
    });
    // The same through io_uring, beside MSG_ZEROCOPY and copying.
    for (message, target, ..) in SIZES {
        let (ours, peer) = pair(message, false);
        cases.push(Case {
            name: format!("{} io_uring", kib(message)),
            veth: true,
            ours: Run { io_uring: true, ..ours },
            peer,
            baseline: Some(Baseline { run: ours, name: "over MSG_ZEROCOPY", target: OVER_MSG_ZEROCOPY }),
            figures: vec![sender_cpu(target * OVER_MSG_ZEROCOPY)],
            slices,
        });
    }
    // Reads of the error queue after several calls, relative to a read after each call.
    let (ours, _) = pair(16 << 10, true);
    for read_every in [8, 32, 128] {
        cases.push(Case {
            name: format!("16K, queue read every {read_every}"),
            veth: true,
            ours: Run { read_every, ..ours },
            peer: Run { read_every: 1, ..ours },
            baseline: None,
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
        baseline: None,
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
        baseline: None,
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
            baseline: None,
            figures: vec![sender_cpu(1.03), throughput(0.97)],
            slices,
        });
    }
    cases
}

fn kib(bytes: usize) -> String {
    if bytes < 1 << 20 { format!("{}K", bytes >> 10) } else { format!("{}M", bytes >> 20) }
}

/// Reserved huge pages for the send memory, returned on drop. Without free ones, the sender uses transparent huge pages.
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
        // Fails only if the reservation failed.
        let _ = self.before.as_deref().map(|before| fs::write(NR_HUGEPAGES, before));
    }
}

const NR_HUGEPAGES: &str = "/proc/sys/vm/nr_hugepages";
/// Number of huge pages: the sender's memory and a margin.
const PAGES: usize = 24;

/// The two processes.
struct Topology {
    sender: Side,
    receiver: Side,
}

impl Topology {
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
        // The order alternates, because a transfer affects the one that follows it.
        let mut turns: Vec<Turn> =
            (0..turns).map(|at| self.turn(case, at % 2 == 0)).collect::<Result<_>>()?;
        turns.sort_by_key(|turn| turn.preempted);
        turns.truncate(turns.len() - turns.len() / COUNTS);
        let of =
            |which: fn(&Turn) -> Option<(Told, Told)>| turns.iter().filter_map(which).collect::<Vec<_>>();
        let ours = of(|turn| Some(turn.ours));
        let (peer, baseline) = (of(|turn| Some(turn.peer)), of(|turn| turn.baseline));
        for figure in &case.figures {
            let of = |runs: &[(Told, Told)]| -> Vec<f64> {
                runs.iter().map(|(sent, received)| (figure.of)(sent, received)).collect()
            };
            let name = format!("{}, {}", case.name, figure.name);
            report.push(paired(&name, &of(&ours), &of(&peer), figure, figure.target));
            if figure.name == SENDER && !baseline.is_empty() {
                let second = case.baseline.as_ref().context("a row with a second comparison")?;
                let name = format!("{}, {} {}", case.name, figure.name, second.name);
                report.push(paired(&name, &of(&ours), &of(&baseline), figure, second.target));
            }
        }
        if case.ours.how == How::Zerocopy {
            let sum = |of: fn(&Told) -> u64| ours.iter().map(|(sent, _)| of(sent)).sum::<u64>() as f64;
            let (copied, numbers) = (sum(|told| told.copied), sum(|told| told.numbers));
            let name = format!("{}, copied", case.name);
            report.push(Metric::new(&name, copied, numbers, "numbers", Better::Lower, 0.0));
            if case.ours.random {
                let (tampered, messages) = (sum(|told| told.tampered), (ours.len() * MESSAGES) as f64);
                let name = format!("{}, changed in flight", case.name);
                report.push(Metric::new(&name, tampered, messages, "frames", Better::Lower, 0.0));
            }
            let plain = sum(|told| told.plain_bytes);
            if plain > sum(|told| told.bytes) / 1000.0 {
                eprintln!("{}: {:.1} MB sent with a copy", case.name, plain / 1e6);
            }
            if case.ours.huge && ours.iter().any(|(sent, _)| !sent.huge) {
                eprintln!("{}: no reserved huge pages available", case.name);
            }
        }
        Ok(())
    }

    /// Runs one transfer of each method, in sequence.
    fn turn(&mut self, case: &Case, peer_first: bool) -> Result<Turn> {
        let first = self.transfer(if peer_first { case.peer } else { case.ours })?;
        let second = self.transfer(if peer_first { case.ours } else { case.peer })?;
        let baseline = case.baseline.as_ref().map(|second| self.transfer(second.run)).transpose()?;
        let (peer, ours) = if peer_first { (first, second) } else { (second, first) };
        let all = [Some(ours), Some(peer), baseline];
        let preempted = all.iter().flatten().map(|(sent, _)| sent.preempted).sum();
        Ok(Turn { ours, peer, baseline, preempted })
    }

    fn transfer(&mut self, run: Run) -> Result<(Told, Told)> {
        let line = serde_json::to_string(&run)?;
        self.receiver.tell(&line)?;
        self.sender.tell(&line)?;
        let sent = serde_json::from_str(&self.sender.line()?).context("parsing the report of the sender")?;
        let received =
            serde_json::from_str(&self.receiver.line()?).context("parsing the report of the receiver")?;
        Ok((sent, received))
    }
}

/// Results of transfers that are compared.
struct Turn {
    ours: (Told, Told),
    peer: (Told, Told),
    baseline: Option<(Told, Told)>,
    preempted: u64,
}

fn paired(name: &str, ours: &[f64], peer: &[f64], figure: &Figure, target: f64) -> Metric {
    let ratios: Vec<f64> = ours.iter().zip(peer).map(|(ours, peer)| ours / peer).collect();
    Metric::paired(name, median(ours), median(peer), median(&ratios), figure.unit, figure.better, target)
}

fn expect(side: &mut Side, word: &str) -> Result<()> {
    let line = side.line()?;
    if line != word {
        bail!("expected {word:?}, received {line:?}");
    }
    Ok(())
}
