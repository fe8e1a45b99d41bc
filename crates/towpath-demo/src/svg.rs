//! Renders a screen as SVG: one text element for each run of cells with the same style.

use std::fmt::Write;

use ratatui::buffer::{Buffer, Cell};
use ratatui::style::{Color, Modifier};

/// Size of a cell in pixels, and the margin around the screen.
const WIDTH: f64 = 8.4;
const HEIGHT: f64 = 18.0;
const MARGIN: f64 = 14.0;

/// Default colours.
const INK: &str = "#d0d7de";
const PAPER: &str = "#0d1117";

/// Renders `screen`.
pub(super) fn svg(screen: &Buffer) -> String {
    let (columns, rows) = (f64::from(screen.area.width), f64::from(screen.area.height));
    let (width, height) = (columns * WIDTH + 2.0 * MARGIN, rows * HEIGHT + 2.0 * MARGIN);
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" \
         font-family=\"ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace\" font-size=\"14\">\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"{PAPER}\"/>\n"
    );
    for y in 0..screen.area.height {
        let line: Vec<&Cell> = (0..screen.area.width)
            .filter_map(|x| screen.cell((screen.area.x + x, screen.area.y + y)))
            .collect();
        let mut x = 0;
        for run in line.chunk_by(|a, b| looks(a) == looks(b)) {
            draw(&mut out, run, x, y);
            x += run.len();
        }
    }
    out.push_str("</svg>\n");
    out
}

/// Foreground, background, and bold.
fn looks(cell: &Cell) -> (Option<String>, Option<String>, bool) {
    let (mut ink, mut paper) = (colour(cell.fg), colour(cell.bg));
    if cell.modifier.contains(Modifier::REVERSED) {
        (ink, paper) = (Some(paper.unwrap_or(PAPER.into())), Some(ink.unwrap_or(INK.into())));
    }
    if cell.modifier.contains(Modifier::DIM) && ink.is_none() {
        ink = Some("#7d8590".into());
    }
    (ink, paper, cell.modifier.contains(Modifier::BOLD))
}

fn draw(out: &mut String, run: &[&Cell], x: usize, y: u16) {
    let (ink, paper, bold) = looks(run[0]);
    let (left, top) = (MARGIN + x as f64 * WIDTH, MARGIN + f64::from(y) * HEIGHT);
    let width = run.len() as f64 * WIDTH;
    // Writing to a String cannot fail.
    if let Some(paper) = paper {
        let _ = writeln!(
            out,
            "<rect x=\"{left:.1}\" y=\"{top:.1}\" width=\"{width:.1}\" height=\"{HEIGHT}\" fill=\"{paper}\"/>"
        );
    }
    let text: String = run.iter().map(|cell| cell.symbol()).collect();
    if text.trim().is_empty() {
        return;
    }
    let ink = ink.as_deref().unwrap_or(INK);
    let weight = if bold { " font-weight=\"bold\"" } else { "" };
    let _ = writeln!(
        out,
        "<text x=\"{left:.1}\" y=\"{:.1}\" textLength=\"{width:.1}\" xml:space=\"preserve\" fill=\"{ink}\"{weight}>{}</text>",
        top + HEIGHT * 0.74,
        escaped(&text)
    );
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// The colours that the view uses; `None` is the default.
fn colour(colour: Color) -> Option<String> {
    let named = match colour {
        Color::Red | Color::LightRed => "#ff7b72",
        Color::Green | Color::LightGreen => "#56d364",
        Color::Yellow | Color::LightYellow => "#e3b341",
        Color::Blue | Color::LightBlue => "#79c0ff",
        Color::Magenta | Color::LightMagenta => "#d2a8ff",
        Color::Cyan | Color::LightCyan => "#56d4dd",
        Color::DarkGray => "#6e7681",
        Color::Gray => "#9198a1",
        Color::White => "#ffffff",
        Color::Black => "#000000",
        Color::Rgb(r, g, b) => return Some(format!("#{r:02x}{g:02x}{b:02x}")),
        Color::Indexed(_) | Color::Reset => return None,
    };
    Some(named.into())
}

#[cfg(test)]
mod tests {
    use ratatui::buffer::Buffer;
    use ratatui::layout::Rect;
    use ratatui::style::{Color, Style};

    use super::svg;

    #[test]
    fn runs_of_the_same_look_are_one_text_and_signs_are_escaped() {
        let mut screen = Buffer::empty(Rect::new(0, 0, 10, 2));
        screen.set_string(0, 0, "a<b&c", Style::new().fg(Color::Red));
        screen.set_string(5, 0, "plain", Style::new());
        let picture = svg(&screen);
        assert!(picture.contains(">a&lt;b&amp;c</text>"), "{picture}");
        assert!(picture.contains("fill=\"#ff7b72\""), "{picture}");
        assert_eq!(picture.matches("<text").count(), 2, "the empty line has none: {picture}");
    }
}
