//! The state table at every size: what a packet takes, in bursts and one by one, as a table and as a plot.

use std::fmt::Write as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use towpath_gate::state::Pages;

use crate::flows::{Family, Load, Work};
use crate::pin::{self, Cpus};
use crate::stat::median;

const SIZES: [u32; 6] = [64, 1000, 10_000, 100_000, 1_000_000, 5_000_000];

/// A curve: what is measured, and its colour in the plot.
struct Curve {
    name: &'static str,
    family: Family,
    what: What,
    colour: &'static str,
}

#[derive(Clone, Copy)]
enum What {
    Packets(Work, bool),
    /// States that are made in a table that holds so many at the end.
    Installs,
}

const CURVES: [Curve; 8] = {
    const fn curve(name: &'static str, family: Family, what: What, colour: &'static str) -> Curve {
        Curve { name, family, what, colour }
    }
    use Family::{V4, V6};
    use What::{Installs, Packets};
    use Work::{FullPath, Lookup};
    [
        curve("lookup, bursts", V4, Packets(Lookup, true), "#0b6e4f"),
        curve("lookup, one by one", V4, Packets(Lookup, false), "#6cae75"),
        curve("full path, bursts", V4, Packets(FullPath, true), "#235789"),
        curve("full path, one by one", V4, Packets(FullPath, false), "#7aa5d2"),
        curve("IPv6 lookup, bursts", V6, Packets(Lookup, true), "#b7791f"),
        curve("IPv6 full path, bursts", V6, Packets(FullPath, true), "#e0b060"),
        curve("insert", V4, Installs, "#c1292e"),
        curve("IPv6 insert", V6, Installs, "#e58a8d"),
    ]
};

/// Measures every curve at every size, prints nanoseconds, and plots them.
pub(crate) fn run(path: &Path, time: Duration) -> Result<()> {
    pin::to(Cpus::find()?.engine)?;
    let mut nanos = [[0.0; SIZES.len()]; CURVES.len()];
    for (at, &flows) in SIZES.iter().enumerate() {
        for family in [Family::V4, Family::V6] {
            let start = Instant::now();
            let mut load = Load::new(family, flows, Pages::Huge)?;
            let each = start.elapsed().as_nanos() as f64 / f64::from(flows);
            for (curve, nanos) in CURVES.iter().zip(&mut nanos).filter(|(curve, _)| curve.family == family) {
                nanos[at] = match curve.what {
                    What::Installs => each,
                    What::Packets(work, bursts) => {
                        let rate = |_| load.rate(work, bursts, time / 3);
                        let rates: Result<Vec<f64>> = (0..3).map(rate).collect();
                        1e9 / median(&rates?)
                    }
                };
            }
        }
    }
    let mut table = "ns".to_owned();
    SIZES.iter().try_for_each(|size| write!(table, "\t{size}"))?;
    for (curve, nanos) in CURVES.iter().zip(&nanos) {
        write!(table, "\n{}", curve.name)?;
        nanos.iter().try_for_each(|nanos| write!(table, "\t{nanos:.1}"))?;
    }
    println!("{table}");
    let plotted = std::fs::write(path, plot(&nanos)?);
    plotted.with_context(|| format!("writing {}", path.display()))
}

fn plot(nanos: &[[f64; SIZES.len()]]) -> Result<String> {
    // Ten to a thousand nanoseconds, a decade in 160 units; sizes by their logarithm.
    let y = |nanos: f64| 340.0 - 160.0 * (nanos.clamp(5.0, 1e3).log10() - 0.69897);
    let x = |size: u32| 70.0 + (f64::from(size).log10() - 1.8) / 5.0 * 480.0;
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 400\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"720\" height=\"400\" fill=\"white\"/>\n\
         <text x=\"70\" y=\"18\" font-size=\"14\">Nanoseconds for a packet, by the number of flows; one CPU, huge pages</text>\n",
    );
    for label in [5, 10, 20, 50, 100, 200, 500] {
        let y = y(f64::from(label));
        writeln!(
            svg,
            "<path d=\"M70 {y:.1}H550\" stroke=\"#ddd\"/><text x=\"62\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            y + 4.0
        )?;
    }
    for size in SIZES {
        writeln!(svg, "<text x=\"{:.1}\" y=\"360\" text-anchor=\"middle\">{size}</text>", x(size))?;
    }
    writeln!(svg, "<text x=\"310\" y=\"384\" text-anchor=\"middle\">flows</text>")?;
    // Names stand beside the last points, moved apart where these are close.
    let mut order: Vec<usize> = (0..CURVES.len()).collect();
    order.sort_by(|&a, &b| nanos[b][SIZES.len() - 1].total_cmp(&nanos[a][SIZES.len() - 1]));
    let mut free = 0.0;
    for at in order {
        let Curve { name, colour, .. } = &CURVES[at];
        let mut points = String::new();
        for (&size, &nanos) in SIZES.iter().zip(&nanos[at]) {
            write!(points, "{:.1},{:.1} ", x(size), y(nanos))?;
        }
        let label = (y(nanos[at][SIZES.len() - 1]) + 4.0).max(free);
        free = label + 14.0;
        writeln!(
            svg,
            "<polyline points=\"{points}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>"
        )?;
        writeln!(svg, "<text x=\"558\" y=\"{label:.1}\" fill=\"{colour}\">{name}</text>")?;
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}
