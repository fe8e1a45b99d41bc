//! The state table at every size: time per packet, in bursts and one by one, as a table, JSON and a plot.

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use towpath_gate::state::Pages;

use crate::flows::{Family, Load, Work};
use crate::pin::{self, Cpus};
use crate::stat::median;

const SIZES: [u32; 6] = [64, 1000, 10_000, 100_000, 1_000_000, 5_000_000];

const FAMILIES: [(Family, &str); 2] = [(Family::V4, "IPv4"), (Family::V6, "IPv6")];

/// A curve of a family: the measurement and its colour.
struct Curve {
    name: &'static str,
    what: What,
    colour: &'static str,
}

#[derive(Clone, Copy)]
enum What {
    /// Packets of flows with states; the flag selects bursts.
    Packets(Work, bool),
    /// Installs of states, up to the given number of flows.
    Installs(bool),
    /// Installs of states, each with an expiry and a collection.
    Churn(bool),
}

const CURVES: [Curve; 8] = {
    const fn curve(name: &'static str, what: What, colour: &'static str) -> Curve {
        Curve { name, what, colour }
    }
    use What::{Churn, Installs, Packets};
    use Work::{FullPath, Lookup};
    [
        curve("lookup, bursts", Packets(Lookup, true), "#0b6e4f"),
        curve("lookup, one by one", Packets(Lookup, false), "#6cae75"),
        curve("full path, bursts", Packets(FullPath, true), "#235789"),
        curve("full path, one by one", Packets(FullPath, false), "#7aa5d2"),
        curve("insert, bursts", Installs(true), "#8c1c22"),
        curve("insert, one by one", Installs(false), "#dd6e72"),
        curve("expiry churn, bursts", Churn(true), "#5b3a8c"),
        curve("expiry churn, one by one", Churn(false), "#a48bc9"),
    ]
};

/// One point of a curve.
#[derive(Serialize, Deserialize)]
struct Point {
    /// Family and curve.
    name: String,
    flows: u32,
    ns: f64,
}

/// Measures every curve at every size, or reads the JSON of an earlier run. Prints nanoseconds and writes a plot.
pub(crate) fn run(path: &Path, from: Option<&Path>, json: bool, time: Duration) -> Result<()> {
    let points = match from {
        Some(from) => {
            let text =
                std::fs::read_to_string(from).with_context(|| format!("reading {}", from.display()))?;
            serde_json::from_str(&text)
                .with_context(|| format!("{}: not the JSON output of a sweep", from.display()))?
        }
        None => measure(time)?,
    };
    if json {
        println!("{}", serde_json::to_string(&points)?);
    } else {
        println!("{}", table(&points)?);
    }
    let plotted = std::fs::write(path, plot(&points)?);
    plotted.with_context(|| format!("writing {}", path.display()))
}

fn measure(time: Duration) -> Result<Vec<Point>> {
    pin::to(Cpus::find()?.engine)?;
    let mut points = Vec::new();
    for flows in SIZES {
        for (family, family_name) in FAMILIES {
            let mut point = |name: &str, ns: f64| {
                points.push(Point { name: format!("{family_name} {name}"), flows, ns });
            };
            let mut load = Load::new(family, flows, Pages::Huge)?;
            for Curve { name, what, .. } in CURVES {
                if let What::Packets(work, bursts) = what {
                    let rate = |_| load.rate(work, bursts, time / 3);
                    let rates: Result<Vec<f64>> = (0..3).map(rate).collect();
                    point(name, 1e9 / median(&rates?));
                }
            }
            drop(load);
            for bursts in [true, false] {
                let mut load = Load::turning(family, flows)?;
                let (mut took, mut each) = (Duration::ZERO, Vec::new());
                // Small tables are filled repeatedly.
                while took < time / 3 {
                    load = Load::turning(family, flows)?;
                    let filled = load.fill(bursts)?;
                    took += filled;
                    each.push(filled.as_nanos() as f64 / f64::from(flows));
                }
                let churned: Result<Vec<f64>> = (0..3).map(|_| load.turn(bursts, time / 3)).collect();
                let churned = 1e9 / median(&churned?);
                for Curve { name, what, .. } in CURVES {
                    match what {
                        What::Installs(so) if so == bursts => point(name, median(&each)),
                        What::Churn(so) if so == bursts => point(name, churned),
                        _ => {}
                    }
                }
            }
        }
    }
    Ok(points)
}

fn at(points: &[Point], family: &str, curve: &str) -> Result<[f64; SIZES.len()]> {
    let name = format!("{family} {curve}");
    let mut nanos = [0.0; SIZES.len()];
    for (ns, flows) in nanos.iter_mut().zip(SIZES) {
        let point = points.iter().find(|point| point.name == name && point.flows == flows);
        *ns = point.with_context(|| format!("no point for {name} at {flows} flows"))?.ns;
        ensure!(ns.is_finite() && *ns > 0.0, "{name} at {flows} flows: {ns} ns");
    }
    Ok(nanos)
}

fn table(points: &[Point]) -> Result<String> {
    let mut table = "ns".to_owned();
    SIZES.iter().try_for_each(|size| write!(table, "\t{size}"))?;
    for (_, family) in FAMILIES {
        for Curve { name, .. } in &CURVES {
            write!(table, "\n{family} {name}")?;
            at(points, family, name)?.iter().try_for_each(|nanos| write!(table, "\t{nanos:.1}"))?;
        }
    }
    Ok(table)
}

fn plot(points: &[Point]) -> Result<String> {
    let mut svg = String::from(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 1240 430\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"1240\" height=\"430\" fill=\"white\"/>\n\
         <text x=\"70\" y=\"18\" font-size=\"14\">Nanoseconds for a packet, or for a state that is made, by the number of flows; one CPU, huge pages</text>\n",
    );
    for ((_, family), left) in FAMILIES.into_iter().zip([0.0, 620.0]) {
        panel(&mut svg, points, family, left)?;
    }
    svg.push_str("</svg>\n");
    Ok(svg)
}

/// Draws the curves of one family at the horizontal offset `left`.
fn panel(svg: &mut String, points: &[Point], family: &str, left: f64) -> Result<()> {
    // Range 5 to 2000 ns; a decade has 130 units; logarithmic sizes.
    let y = |nanos: f64| 370.0 - 130.0 * (nanos.clamp(5.0, 2e3).log10() - 0.69897);
    let x = |size: u32| left + 70.0 + (f64::from(size).log10() - 1.8) / 5.0 * 370.0;
    let (from, to) = (left + 70.0, left + 445.0);
    writeln!(svg, "<text x=\"{from}\" y=\"36\" font-size=\"13\">{family}</text>")?;
    for label in [5, 10, 20, 50, 100, 200, 500, 1000, 2000] {
        let y = y(f64::from(label));
        writeln!(
            svg,
            "<path d=\"M{from} {y:.1}H{to}\" stroke=\"#ddd\"/><text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{label}</text>",
            from - 8.0,
            y + 4.0
        )?;
    }
    for size in SIZES {
        writeln!(svg, "<text x=\"{:.1}\" y=\"390\" text-anchor=\"middle\">{size}</text>", x(size))?;
    }
    writeln!(svg, "<text x=\"{}\" y=\"414\" text-anchor=\"middle\">flows</text>", (from + to) / 2.0)?;
    // The names are next to the last points, moved apart where these are close.
    let mut curves = Vec::new();
    for curve in &CURVES {
        curves.push((at(points, family, curve.name)?, curve));
    }
    curves.sort_by(|(a, _), (b, _)| b[SIZES.len() - 1].total_cmp(&a[SIZES.len() - 1]));
    let mut free = 0.0;
    for (nanos, Curve { name, colour, .. }) in curves {
        let mut line = String::new();
        for (size, nanos) in SIZES.into_iter().zip(nanos) {
            write!(line, "{:.1},{:.1} ", x(size), y(nanos))?;
        }
        let label = (y(nanos[SIZES.len() - 1]) + 4.0).max(free);
        free = label + 14.0;
        writeln!(svg, "<polyline points=\"{line}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>")?;
        writeln!(svg, "<text x=\"{}\" y=\"{label:.1}\" fill=\"{colour}\">{name}</text>", to + 8.0)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plots_its_own_json() {
        let all =
            FAMILIES.iter().flat_map(|(_, family)| CURVES.iter().map(move |curve| (*family, curve.name)));
        let points: Vec<Point> = all
            .flat_map(|(family, curve)| {
                SIZES.map(|flows| Point { name: format!("{family} {curve}"), flows, ns: 7.5 })
            })
            .collect();
        let json = serde_json::to_string(&points).unwrap();
        let mut back: Vec<Point> = serde_json::from_str(&json).unwrap();
        assert_eq!(plot(&back).unwrap(), plot(&points).unwrap());
        assert_eq!(plot(&back).unwrap().matches("<polyline").count(), 2 * CURVES.len());
        assert_eq!(table(&back).unwrap().lines().count(), 1 + 2 * CURVES.len());
        back.pop();
        assert!(plot(&back).unwrap_err().to_string().contains("no point for IPv6 expiry churn, one by one"));
    }

    #[test]
    fn churn_expires_as_many_as_it_installs() {
        for bursts in [true, false] {
            let mut load = Load::turning(Family::V4, 1000).unwrap();
            load.fill(bursts).unwrap();
            load.turn(bursts, Duration::from_millis(1)).unwrap();
            let held = load.states.len();
            assert!((1000..1500).contains(&held), "{held}");
        }
    }
}
