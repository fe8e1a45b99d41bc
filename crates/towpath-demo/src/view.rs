//! The live view: draws the status on a terminal, into a recording, or both.

use std::cell::RefCell;
use std::io::{self, IsTerminal, Stderr, Write};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use ratatui::backend::CrosstermBackend;
use ratatui::buffer::Buffer;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{EnterAlternateScreen, LeaveAlternateScreen};
use ratatui::crossterm::{cursor, terminal};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style, Stylize};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Paragraph, Sparkline};
use ratatui::{Frame, Terminal, TerminalOptions, Viewport};

use super::asciicast::Asciicast;
use super::digits::thousands;
use super::status::{Shown, State, Status};
use super::{Failure, doing};

/// Interval between two frames.
const REST: Duration = Duration::from_millis(100);
/// Size of a recording without a terminal, and the maximum size on a terminal.
const SCREEN: (u16, u16) = (120, 38);
/// Minimum size.
const LEAST: (u16, u16) = (80, 24);

/// The view's thread; draws until told to stop.
#[derive(Debug)]
pub(super) struct View {
    over: Arc<AtomicBool>,
    thread: JoinHandle<io::Result<Seen>>,
}

/// The view's output.
#[derive(Debug)]
pub(super) struct Seen {
    pub(super) cast: Asciicast,
    /// The last frame.
    pub(super) screen: Buffer,
}

/// The drawing targets.
struct Paper {
    terminal: Option<Stderr>,
    cast: Rc<RefCell<Asciicast>>,
}

impl View {
    /// Returns true if standard error is a terminal of sufficient size.
    pub(super) fn fits() -> bool {
        io::stderr().is_terminal()
            && terminal::size().is_ok_and(|(width, height)| width >= LEAST.0 && height >= LEAST.1)
    }

    /// Starts drawing, on the terminal if `on_terminal` is set, and always into the recording.
    pub(super) fn start(status: &Status, on_terminal: bool) -> Self {
        let over = Arc::new(AtomicBool::new(false));
        let (status, until) = (status.clone(), Arc::clone(&over));
        let thread = thread::spawn(move || draw_until(&status, on_terminal, &until));
        Self { over, thread }
    }

    /// Draws a last time and restores the terminal.
    pub(super) fn end(self) -> Result<Seen, Failure> {
        // Relaxed: the status is synchronised by its lock.
        self.over.store(true, Ordering::Relaxed);
        let seen = self.thread.join().map_err(|_| Failure::Broken("the view panicked".into()))?;
        seen.map_err(doing("the view"))
    }
}

fn draw_until(status: &Status, on_terminal: bool, over: &AtomicBool) -> io::Result<Seen> {
    let (mut width, mut height) = SCREEN;
    if on_terminal {
        let size = terminal::size()?;
        (width, height) = (width.min(size.0), height.min(size.1));
    }
    // Shared with the backend, which hides its writer. Only one thread uses both.
    let cast = Rc::new(RefCell::new(Asciicast::new(width, height)));
    let paper = Paper { terminal: on_terminal.then(io::stderr), cast: Rc::clone(&cast) };
    let viewport = Viewport::Fixed(Rect::new(0, 0, width, height));
    let mut terminal = Terminal::with_options(CrosstermBackend::new(paper), TerminalOptions { viewport })?;
    if on_terminal {
        execute!(io::stderr(), EnterAlternateScreen, cursor::Hide)?;
    }
    let drawn = pictures(status, &mut terminal, &cast, over);
    if on_terminal {
        // Restoring a closed terminal fails harmlessly.
        let _ = execute!(io::stderr(), LeaveAlternateScreen, cursor::Show);
    }
    let screen = drawn?;
    drop(terminal);
    let cast = Rc::into_inner(cast).expect("the terminal is gone").into_inner();
    Ok(Seen { cast, screen })
}

/// Draws until `over` is set, and once more.
fn pictures(
    status: &Status,
    terminal: &mut Terminal<CrosstermBackend<Paper>>,
    cast: &RefCell<Asciicast>,
    over: &AtomicBool,
) -> io::Result<Buffer> {
    loop {
        let last = over.load(Ordering::Relaxed);
        let shown = status.shown().clone();
        let screen = terminal.draw(|frame| picture(frame, &shown))?.buffer.clone();
        cast.borrow_mut().cut();
        if last {
            return Ok(screen);
        }
        thread::sleep(REST);
    }
}

fn picture(frame: &mut Frame<'_>, shown: &Shown) {
    let scenes = shown.scenes.len() as u16 + 2;
    let happens =
        || Paragraph::new(shown.scenes.iter().map(scene).collect::<Vec<_>>()).block(boxed("scenes"));
    if !shown.hosts {
        let rows =
            [Constraint::Length(1), Constraint::Length(scenes), Constraint::Length(10), Constraint::Fill(1)];
        let [head, top, bottom, _] = Layout::vertical(rows).areas(frame.area());
        frame.render_widget(headline(shown), head);
        frame.render_widget(happens(), top);
        frame.render_widget(news(shown), bottom);
        return;
    }
    // The lower boxes have 8 rows if there is room; the rules get the rest, at most one row each.
    let room = frame.area().height.saturating_sub(3 + scenes);
    let rules = (shown.rules.len().max(4) as u16 + 2).min(room.saturating_sub(7));
    let [head, wires, top, middle, bottom] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Length(2),
        Constraint::Length(scenes),
        Constraint::Length(rules),
        Constraint::Fill(1),
    ])
    .areas(frame.area());
    frame.render_widget(headline(shown), head);
    frame.render_widget(map(shown), wires);
    frame.render_widget(happens(), top);
    frame.render_widget(
        Paragraph::new(rules_of(shown, middle)).block(boxed("rules, with their packets")),
        middle,
    );
    let [curves, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(2)]).areas(bottom);
    curves_of(frame, shown, curves);
    if shown.vs_kernel.is_empty() {
        frame.render_widget(news(shown), right);
    } else {
        frame.render_widget(
            Paragraph::new(vs_kernel(shown)).block(boxed("compared with the kernel's path")),
            right,
        );
    }
}

fn news(shown: &Shown) -> Paragraph<'_> {
    let lines: Vec<Line<'_>> = shown.news.iter().map(|line| Line::raw(line.as_str())).collect();
    Paragraph::new(lines).block(boxed("news"))
}

fn boxed(title: &str) -> Block<'_> {
    Block::bordered().title(title.bold()).border_style(Style::new().fg(Color::DarkGray))
}

fn headline(shown: &Shown) -> Line<'_> {
    let end = match shown.ended {
        None => Span::raw(""),
        Some(true) => " every expectation was met ".black().on_green(),
        Some(false) => " an expectation was not met ".white().on_red(),
    };
    Line::from(vec![
        " towpath demo ".black().on_cyan().bold(),
        format!("  {:4.1} s  ", shown.begun.elapsed().as_secs_f64()).bold(),
        Span::raw(shown.place.as_str()).dark_gray(),
        Span::raw("  "),
        end,
    ])
}

/// The diagram of hosts and links.
fn map(shown: &Shown) -> Paragraph<'_> {
    let workers: Vec<String> =
        shown.workers.iter().map(|(pid, messages, _)| format!("{pid}: {}", thousands(*messages))).collect();
    let workers = if workers.is_empty() { "-".to_owned() } else { workers.join("  ") };
    let wire = || "══════".dark_gray();
    Paragraph::new(vec![
        Line::from(vec![
            " people, attackers ".green(),
            wire(),
            "[ wan   TOWPATH: gate, inspector   lan ]".cyan().bold(),
            wire(),
            " web, names, log, files, messages ".green(),
        ]),
        Line::from(vec![
            "      10.77.0.1    ".dark_gray(),
            "                 and, for comparison, the kernel's path ".dark_gray(),
            "        10.77.0.2    workers ".dark_gray(),
            workers.magenta(),
        ]),
    ])
}

fn scene(scene: &super::status::Scene) -> Line<'_> {
    let sign = match scene.state {
        State::Waits => "  ".dark_gray(),
        State::Plays => "> ".yellow().bold(),
        State::Over(true) => "ok".green().bold(),
        State::Over(false) => "NO".red().bold(),
    };
    let name = match scene.state {
        State::Waits => scene.name.dark_gray(),
        State::Plays => scene.name.yellow().bold(),
        State::Over(_) => scene.name.bold(),
    };
    let space = " ".repeat(26_usize.saturating_sub(scene.name.len()));
    Line::from(vec![sign, Span::raw(" "), name, Span::raw(space), Span::raw(scene.line.as_str())])
}

fn rules_of(shown: &Shown, area: Rect) -> Vec<Line<'_>> {
    let rows = area.height.saturating_sub(2) as usize;
    // Rules that do not fit are at the end: the default rule, which is not of interest here.
    shown.rules.iter().take(rows).map(rule).collect()
}

fn rule((number, packets, text): &(u64, u64, String)) -> Line<'_> {
    let count = format!("{:>10}  ", thousands(*packets));
    let count = match (*packets, text.starts_with("deny")) {
        (0, _) => count.dark_gray(),
        (_, true) => count.red().bold(),
        _ => count.green(),
    };
    let (rule, comment) = text.split_once(" // ").unwrap_or((text, ""));
    let number = format!("{number:05}").dark_gray();
    Line::from(vec![
        number,
        count,
        format!("{comment:<26}").yellow(),
        Span::raw(rule.replace(" :default", "")),
    ])
}

fn curves_of(frame: &mut Frame<'_>, shown: &Shown, area: Rect) {
    let [passed, dropped] = Layout::vertical([Constraint::Fill(1), Constraint::Fill(1)]).areas(area);
    let rows =
        [("passed", &shown.passed, Color::Green, passed), ("stopped", &shown.dropped, Color::Red, dropped)];
    for (name, points, colour, area) in rows {
        let width = area.width.saturating_sub(2) as usize;
        let newest: Vec<u64> = points.iter().copied().skip(points.len().saturating_sub(width)).collect();
        let title = format!("{name}: {} packets/s", thousands(points.back().copied().unwrap_or(0)));
        let curve = Sparkline::default().data(newest).style(Style::new().fg(colour));
        frame.render_widget(curve.block(boxed(&title)), area);
    }
}

fn vs_kernel(shown: &Shown) -> Vec<Line<'_>> {
    let ours = shown.vs_kernel.first().map(|row| row.ours.as_slice()).unwrap_or_default();
    let mut head = format!("{:<29}{:>8}", "", "kernel");
    ours.iter().for_each(|ours| head += &format!(" {:>9}{:>9}", ours.driver, "ratio"));
    let mut lines = vec![Line::from(head.dark_gray())];
    lines.extend(shown.vs_kernel.iter().map(|row| {
        let mut line = vec![Span::raw(format!("{:<29}{:>8.1}", row.name, row.kernel.value))];
        for ours in &row.ours {
            let better = (ours.ratio >= 1.0) != row.lower_is_better;
            let ratio = format!("{:>7.2} x", ours.ratio);
            line.push(format!(" {:>9.1}", ours.figure.value).cyan());
            line.push(if better { ratio.green().bold() } else { ratio.yellow() });
        }
        Line::from(line)
    }));
    lines
}

impl Write for Paper {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // A closed terminal ends the drawing, not the recording.
        if self.terminal.as_mut().is_some_and(|terminal| terminal.write_all(bytes).is_err()) {
            self.terminal = None;
        }
        self.cast.borrow_mut().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        if self.terminal.as_mut().is_some_and(|terminal| terminal.flush().is_err()) {
            self.terminal = None;
        }
        Ok(())
    }
}
